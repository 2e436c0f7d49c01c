"""Build observations, cases and stored results by hand."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from repro_matrix.config.schema import Case, Signature
from repro_matrix.grading.observation import Evidence, module_names
from repro_matrix.grading.root_cause import find_failures
from repro_matrix.grading.signature import Match, match_attempt
from repro_matrix.records.outcome import Outcome
from repro_matrix.results.projection import rows_of
from repro_matrix.results.rows import Row

SITE = "/opt/venv/lib/python3.11/site-packages"
DIST = f"{SITE}/torch/distributed"
PEER = (
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    " [127.0.0.1]:20635"
)


def frame(module: str, function: str, file: str | None = None) -> dict[str, Any]:
    """A frame as the kit records it: with the installed module that it lies in, by its path."""
    path = file if file is not None else f"{SITE}/{module.replace('.', '/')}.py"
    location = module_names(path)[0] if "-packages/" in path else ""
    location = f"repros.{path.rpartition('/repros/')[2]}" if "/repros/" in path else location
    return {
        "file": path,
        "line": 1,
        "function": function,
        "module": module,
        "code_location": location,
        "code": "",
    }


SCRIPT = frame("__main__", "body", "/home/me/project/repros/some_case.py")
NORM = frame("transformers.models.qwen2.modeling_qwen2", "forward")


def exception(
    type_: str = "RuntimeError",
    message: str = "size mismatch in norm",
    frames: list[dict[str, Any]] | None = None,
    bases: list[str] | None = None,
    cause: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "type": type_,
        "module": "builtins",
        "bases": ["Exception", "BaseException"] if bases is None else bases,
        "message": message,
        "frames": [SCRIPT, NORM] if frames is None else frames,
        "cause": cause,
    }


def check(name: str = "logits", passed: bool = True, **changes: Any) -> dict[str, Any]:
    numbers = {"actual": 0.0 if passed else 0.5, "expected": 0.0, "tolerance": 1e-4}
    return {"name": name, **numbers, "subject": "it", "at": 5.0, "passed": passed, **changes}


def made(**changes: Any) -> dict[str, Any]:
    """A check with all that today's kit writes of one."""
    made = {
        "name": "x",
        "actual": 1.0,
        "expected": 1.0,
        "tolerance": 0.1,
        "subject": "it",
        "at": 1.0,
        "passed": True,
    }
    return {**made, **changes}


def record(rank: int = 0, **changes: Any) -> dict[str, Any]:
    made = {
        "schema": 2,
        "rank": rank,
        "world_size": 2,
        "pid": 1,
        "started": 100.0,
        "ended": 110.0 + rank,
        "phase": "end",
        "done": True,
        "done_at": 9.0,
        "exception": None,
        "checks": [check()],
        "metrics": {},
        "facts": {},
        "versions": {},
        "warnings": [],
        "logs": [],
        "cpu_s": 1.0,
        "peak_rss_bytes": 300 << 20,
    }
    return {**made, **changes}


def ok(rank: int, **changes: Any) -> dict[str, Any]:
    """A rank that finished."""
    made = {
        "rank": rank,
        "exit_code": 0,
        "signal": None,
        "terminated_by": "self",
        "log_tail": "",
        "stack": None,
    }
    return {**made, "record": record(rank), **changes}


def failed(
    rank: int, error: dict[str, Any] | None = None, at: float | None = None
) -> dict[str, Any]:
    """A rank that raised."""
    ended = 110.0 + rank if at is None else at
    wrote = record(
        rank, done=False, checks=[], phase="body", exception=error or exception(), ended=ended
    )
    return ok(rank, exit_code=1, record=wrote)


def peer_failed(rank: int, at: float = 105.0) -> dict[str, Any]:
    """A rank that lost its connection, by default before anything else was recorded."""
    frames = [SCRIPT, frame("torch.distributed.distributed_c10d", "wait")]
    return failed(rank, exception("RuntimeError", PEER, frames), at)


def ended(
    rank: int, by: str = "launcher", signal: str = "SIGTERM", stack: str | None = None
) -> dict[str, Any]:
    """A rank that was ended from outside while it worked."""
    wrote = record(rank, done=False, checks=[], phase="body", ended=None)
    return ok(rank, exit_code=None, signal=signal, terminated_by=by, record=wrote, stack=stack)


def observation(*ranks: dict[str, Any], infra_error: Any = None, **attempt: Any) -> dict[str, Any]:
    made = {
        "id": "a1",
        "launcher": "torchrun",
        "command": ["python", "x.py"],
        "torchrun": "torchrun x.py",
        "backend": "gloo",
        "world_size": len(ranks) or 2,
        "started": 99.0,
        "ended": 120.0,
        "wall_s": 21.0,
        "cpu_s": 30.0,
        "deadline_s": 120,
        "timed_out": False,
        "interrupted": False,
        "leaked_processes": [],
        "seed": 0,
        "settings": {},
    }
    whole = {
        "schema": 1,
        "attempt": {**made, **attempt},
        "infra_error": infra_error,
        "ranks": list(ranks),
    }
    made = copy.deepcopy(whole)
    records = [
        r["record"]
        for r in made["ranks"]
        if isinstance(r, dict) and isinstance(r.get("record"), dict)
    ]
    for each in records:  # record() is of two ranks
        if "world_size" in each:
            each["world_size"] = made["attempt"]["world_size"]
    # What the engine and the kit always write, where the test does not: promises, and that they
    # were kept.
    settings = {"flags": {}, **made["attempt"]["settings"]}
    settings["strategy"] = {"invariants": {"collectives": []}, **settings.get("strategy", {})}
    made["attempt"]["settings"] = settings
    for each in records:
        each.update({**as_promised(settings, made["attempt"]["world_size"]), **each})
    return made


EXCEPTION = {
    "name": "norm",
    "kind": "exception",
    "type": "RuntimeError",
    "message": r"size mismatch in norm",
    "package": "transformers",
}


SEEN = {  # a stored measurement has shown it once, elsewhere
    "verdicts": {"fix": "FIXED"},
    "hardware": "elsewhere",
    "measured_at": [{}],
    "reason": "because",
}


def as_promised(settings: dict[str, Any], ranks: int, also: Sequence[str] = ()) -> dict[str, Any]:
    """What a rank's record holds when all that its settings name was in effect, and every flag and
    option was read."""
    invariants = settings["strategy"].get("invariants") or {}
    held = {"whole": 1000.0, "shard": 1000 / ranks, "part": 600.0}
    items: list[dict[str, Any]] = [{"what": "group", "actual": ranks, "backend": "gloo nccl"}]
    for what in ("parameters", "gradients", "updates"):
        if what in invariants:
            items.append(
                {"what": what, "actual": held[invariants[what]], "whole": 1000, "bytes": 4000}
            )
    items.append(
        {"what": "collectives", "actual": dict.fromkeys(invariants.get("collectives", ()), 1)}
    )
    items += [{"what": name, "actual": 1, "least": 1} for name in also]
    read = {
        "flags": list(settings["flags"]),
        "options": list(settings["strategy"].get("options") or {}),
    }
    used = {"peak_gpu_bytes": 512, "device": "cuda:0"} if settings.get("device") == "cuda" else {}
    return {"effects": items, "read": read, **used}


def case(
    slug: str = "some-case", signatures: list[dict[str, Any]] | None = None, **changes: Any
) -> Case:
    made: dict[str, Any] = {
        "slug": slug,
        "title": "a case",
        "pass_criteria": {"kind": "inference", "checks": ["logits"]},
        "axes": {"model": ["m"], "strategy": ["fsdp"]},
        "flags": {
            "call": {"default": "inner", "choices": ["inner", "root"]},
            "cache": {"default": True},
        },
        "signatures": [EXCEPTION] if signatures is None else signatures,
        "variants": {"unfixed": {}, "fix": {"flags": {"call": "root"}}, "other-fix": {}},
        "expect": [SEEN],
        **changes,
    }
    for name in made["variants"].keys() - {"unfixed", "control"}:
        made["variants"] = {**made["variants"], name: {"role": "fix", **made["variants"][name]}}
    return Case.model_validate(made)


def matches(signature: Signature, observed: Any, backend: str | None = None) -> Match | None:
    attempt = Evidence(observed)
    return match_attempt(signature, attempt, find_failures(attempt), backend)


def control(**changes: Any) -> Case:
    return case("a-control", [], kind="control", variants={"control": {}}, **changes)


def outcome(name: str, reason: str = "because", **changes: Any) -> Outcome:
    return Outcome(name, reason, **changes)  # type: ignore[arg-type]


def _named(seen: dict[str, Any], name: str) -> dict[str, Any]:
    """The observation as that of an attempt of its own."""
    return {**seen, "attempt": {**seen["attempt"], "id": name}} if "attempt" in seen else seen


def summary_rows(*documents: Any) -> list[Row]:
    """The summary rows of documents as they are, without grading them."""
    return [row for each in documents for row in rows_of(each, {})]


def document(
    variants: dict[str, list[tuple[str, dict[str, Any]]] | str],
    verdicts: dict[str, str] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A stored cell. ``variants``: variant -> [(outcome, observation)], or the reason why it was
    skipped."""
    made: dict[str, Any] = {
        "schema": 1,
        "case": "some-case",
        "title": "a case",
        "kind": "failure",
        "simulated": None,
        "references": [],
        "model": "m",
        "strategy": "fsdp",
        "flags": {},
        "ranks": 2,
        "overrides": [],
        "scale": "tiny",
        "weights": "random",
        "stack": {
            "name": "current",
            "python": "3.11.7",
            "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
        },
        "hardware": {
            "profile": "cpu",
            "accelerator": "cpu",
            "gpus": [],
            "cpu": "a cpu",
            "cores": 2,
            "memory_gb": 8.0,
            "driver": None,
            "os": "Linux",
        },
        "provenance": {
            "git_commit": "c0ffee",
            "git_dirty": False,
            "harness_version": "0.1.0",
            "command": "repro matrix",
            "started": 99.0,
            "ended": 120.0,
            "seed": 0,
            "launcher": "torchrun",
            "fingerprint": "f",
        },
        "variants": {
            name: {
                "skipped": attempts if isinstance(attempts, str) else None,
                "settings": {},
                "attempts": (
                    []
                    if isinstance(attempts, str)
                    else [
                        {
                            "observation": _named(seen, f"{name}-{index}"),
                            "outcome": outcome(result).to_json(),
                        }
                        for index, (result, seen) in enumerate(attempts)
                    ]
                ),
            }
            for name, attempts in variants.items()
        },
        "verdicts": {
            variant: {
                "name": name,
                "reason": "because",
                "unfixed_k": 1,
                "unfixed_n": 1,
                "fix_k": 1,
                "fix_n": 1,
                "interval": [0.2, 1.0],
                "unfixed_interval": [0.2, 1.0],
                "named_case": None,
                "measured": True,
            }
            for variant, name in (verdicts or {}).items()
        },
        "complete": True,
    }
    return {**made, **changes}
