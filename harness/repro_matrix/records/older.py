"""What older documents lack, made of what they hold: the one place that reads sentences which the project wrote. Pure.

Outcomes and verdicts are judged anew wherever a document's case is in the catalogue; what is brought up here is what
stands in a document as it was planned, and what is taken as stored.
"""

from __future__ import annotations

import re
from typing import Any

from repro_matrix.records.base import FailureKind
from repro_matrix.records.document import Document, Skip

Json = dict[str, Any]

# "stack NAME: on cpu needs torch>=2.4, and it has 2.2.2, vllm, which it does not have; needs stack OTHER (why)"
_PACKAGES = re.compile(r"stack .+?: (?:on \w+ )?needs (?P<needs>.+?)(?:; needs stack .*)?$")
_NEED = re.compile(r"(?P<item>[\w.-]+(?:\[[^\]]*\])?(?:[<>=!~]+[\w.*+!]+(?:,(?=[<>=!~])[<>=!~]+[\w.*+!]+)*)?), "
                   r"(?:which it does not have|and it has [^ ,;]+)")  # fmt: skip
_SKIPS = (
    (re.compile(r"the same as \w+ on stack "), "same"),
    (re.compile(r"needs (?P<needs>\d+ GPUs); hardware "), "gpus"),
    (re.compile(r"needs (?P<needs>stack [^:]+): "), "stack"),
    (re.compile(r"needs [\d.]+ GiB "), "memory"),
    (re.compile(r"weights=hub: "), "weights"),
    (re.compile(r"(?:means something from|is about) \d+ rank"), "ranks"),
    (re.compile(r"runs on the CPU only "), "accelerator"),
    (re.compile(r"ranks that share one GPU: "), "shared"),
    (re.compile(r"its ranks compute on the same cards"), "cards"),
    (re.compile(r"flags\.\w+="), "flags"),
    (re.compile(r"\d+ .+ do not divide over "), "divisible"),
    (re.compile(r"(?:tensor parallelism is over|strategy \S+ has no tensor)"), "tp_size"),
)
_ENDED = re.compile(r"SIG[A-Z0-9]+|exit code .*")


def with_ranks(document: Json) -> Json:
    """The same document (changed in place). Before ranks were an axis its cell had as many as its first arm."""
    if "ranks" not in document:
        first: Json = next(iter(document["arms"].values()), {})
        document["ranks"] = first.get("settings", {}).get("world_size", 2)
        document["variant"] = []
    return document


def filled(document: Document) -> Document:
    """The same document (changed in place), which is known to be one, with what one of today holds."""
    for arm in document["arms"].values():
        if arm["skipped"] and not arm.get("skip"):
            arm["skip"] = skip_of(arm["skipped"])
        for attempt in arm["attempts"]:
            primary = attempt["outcome"]["primary"]
            if primary and "kind" not in primary:
                primary["kind"] = kind_of(primary["type"])
    return document


def skip_of(reason: str) -> Skip:
    """What a reason says that was stored before it had a kind and its needs."""
    told = _PACKAGES.match(reason)
    if told:
        needs = [found["item"] for found in _NEED.finditer(told["needs"])]
        if needs:
            return {"kind": "packages", "needs": list(dict.fromkeys(needs))}
    for pattern, kind in _SKIPS:
        found = pattern.match(reason)
        if found:
            need = found.groupdict().get("needs")
            return {"kind": kind, "needs": [need] if need else []}  # type: ignore[typeddict-item]
    return {"kind": "unknown", "needs": []}


def kind_of(type_: str) -> FailureKind:
    """How a rank failed, by what a failure without an exception is called."""
    if _ENDED.fullmatch(type_) is None:
        return "exception"
    return "signal" if type_.startswith("SIG") else "left" if type_ == "exit code 0" else "exit"
