"""Find what is not ready about a case, with file and key: in its files and in the outcomes of its attempts. Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from repro_matrix.config.catalog import changes
from repro_matrix.config.schema import Case
from repro_matrix.grading import grade
from repro_matrix.grading.signature import unrelated_matches
from repro_matrix.records.document import Document, Variant
from repro_matrix.records.outcome import StoredOutcome, StoredVerdict

_TODO = re.compile(r"\bTODO\b")


@dataclass(frozen=True)
class Finding:
    file: str
    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}: {self.key}: {self.text}"


def check_texts(file: str, text: str, script: str, code: str) -> list[Finding]:
    """Places that are still to be written, and a script that does not parse."""
    found = [
        Finding(name, f"line {number}", "TODO is left")
        for name, content in ((file, text), (script, code))
        for number, line in enumerate(content.splitlines(), 1)
        if _TODO.search(line)
    ]
    try:
        ast.parse(code)
    except SyntaxError as error:
        found.append(Finding(script, f"line {error.lineno}", f"not valid Python: {error.msg}"))
    return found


def check_case(file: str, case: Case) -> list[Finding]:
    """Signatures that match anybody's messages, and variants that change more than they say."""
    found = []
    for signature in case.signatures:
        taken = unrelated_matches(case.slug, signature)
        if taken:
            shown = taken[0].partition("\n")[0][:100] or "the empty message"
            what = f"too broad: matches {len(taken)} messages of other failures, as {shown!r}"
            found.append(Finding(file, f"signatures.{signature.name}.message", what))
    earlier: list[dict[str, Any]] = [{}]  # what the first variant changes, and those that this one may build upon
    for name, variant in list(case.variants.items())[1:]:
        own = _flat(changes(case, variant))
        unsaid = [_unsaid(own, other, variant.help.lower()) for other in earlier]
        if all(unsaid):
            what = f"changes {len(own)} things, and its help does not name {', '.join(unsaid[0])}"
            found.append(Finding(file, f"variants.{name}", what))
        earlier.append(own)
    return found


def _flat(changed: Mapping[str, Any]) -> dict[str, Any]:
    """{"flags": {"a": 1}} as {"flags.a": 1}, without what a variant only needs."""
    out: dict[str, Any] = {}
    for key, value in changed.items():
        if key in ("requires", "requires_on", "depends_on_capabilities"):
            continue
        out |= {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, Mapping) else {key: value}
    return out


# As people say it: a help need not use a key's own name.
_WORDS = {"world_size": ("rank", "process"), "devices": ("device", "gpu"), "env": ("variable",)}


def _unsaid(own: Mapping[str, Any], other: Mapping[str, Any], said: str) -> list[str]:
    """Of several things that differ between two variants those that a help does not name; one thing needs no name."""
    differ = [key for key in {**own, **other} if own.get(key) != other.get(key)]
    words = {key: (key.rpartition(".")[2], str(own.get(key)), *_WORDS.get(key, ())) for key in differ}
    unsaid = [key for key in differ if not any(_in(word, said) for word in words[key])]
    return unsaid if len(differ) > 1 else []


def _in(word: str, said: str) -> bool:
    return word.lower() in said or word.lower().replace("_", " ") in said


def check_other_cases(file: str, case: Case, cases: Mapping[str, Case], documents: Iterable[Document]) -> list[Finding]:
    """Stored evidence of other cases' unfixed variants that this case's signatures match, undeclared."""
    found: dict[str, Finding] = {}
    for document in documents:
        other = cases.get(document["case"])
        if (
            other is None
            or other.slug == case.slug
            or other.slug in case.also_matches
            or case.slug in other.also_matches
        ):
            continue
        for attempt in document["variants"]["unfixed"]["attempts"] if "unfixed" in document["variants"] else ():
            seen = grade.grade(other, "unfixed", attempt["observation"], {other.slug: other, case.slug: case})
            for item in seen.recognized:
                if item.case == case.slug and other.slug not in found:
                    what = f"matches the stored evidence of {other.slug} ({attempt['outcome']['reason'][:80]})"
                    found[other.slug] = Finding(file, f"signatures.{item.signature}", what)
    return list(found.values())


# Of why a variant was not launched: what this machine and stack lack, which is no fault of the case.
_LACKING = frozenset({"gpus", "accelerator", "gpu_mode", "stack", "packages", "build", "memory", "weights", "same"})


def unmeasured(documents: Mapping[str, Iterable[Document]]) -> dict[str, str]:
    """variant -> why it could not be measured here, though nothing is wrong with it."""
    variants = [item for measured in documents.values() for each in measured for item in each["variants"].items()]
    return {name: str(variant["skipped"]) for name, variant in variants if _lacking(name, variant)}


def recorded(documents: Mapping[str, Iterable[Document]]) -> dict[str, str]:
    """variant -> its verdict, of variants that help nobody and of which a reviewed expectation says just that."""
    said = [item for measured in documents.values() for each in measured for item in each["verdicts"].items()]
    return {variant: verdict["name"] for variant, verdict in said if _expected(verdict) and verdict["name"] != "FIXED"}


def _lacking(name: str, variant: Variant) -> bool:
    skip = variant.get("skip")
    return name not in ("unfixed", "control") and skip is not None and skip["kind"] in _LACKING


def _expected(verdict: StoredVerdict | None) -> bool:
    return verdict is not None and verdict.get("expected") == "expected"


def check_attempts(file: str, script: str, case: Case, documents: Mapping[str, Iterable[Document]]) -> list[Finding]:
    """``documents``: launcher -> what was measured by it. A variant that does not help is none where results/expected
    has it so, and one that cannot be measured here none where nothing but this machine or stack is in the way."""
    found: list[Finding] = []
    seen: dict[str, dict[str, set[str]]] = {}
    for launcher, measured in documents.items():
        for document in measured:
            for name, variant in document["variants"].items():
                outcomes = [attempt["outcome"] for attempt in variant["attempts"]]
                kinds: set[str] = {outcome["outcome"] for outcome in outcomes}
                seen.setdefault(name, {})[launcher] = kinds
                if _lacking(name, variant):
                    continue
                known = _expected(document["verdicts"].get(name))
                found += _check_variant(file, script, case, name, outcomes, variant["skipped"], launcher, known)
    for name, by in seen.items():
        if len({frozenset(kinds) for kinds in by.values()}) > 1:
            said = ", ".join(f"{launcher}: {' and '.join(sorted(kinds))}" for launcher, kinds in by.items())
            found.append(Finding(file, f"variants.{name}", f"the launchers disagree: {said}"))
    fixes = [kinds for name, by in seen.items() if name != "unfixed" for kinds in by.values()]
    if case.kind == "failure" and not any(kinds == {"passed"} for kinds in fixes):
        what = (
            "no variant passes: nothing shows that only the failure matches the signature, and that the checks can pass"
        )
        found.append(Finding(file, "variants", what))
    return list(dict.fromkeys(found))


def _check_variant(
    file: str,
    script: str,
    case: Case,
    name: str,
    outcomes: list[StoredOutcome],
    skipped: str | None,
    launcher: str,
    known: bool,
) -> Iterable[Finding]:
    where = f"variants.{name}"
    kinds = sorted({outcome["outcome"] for outcome in outcomes})
    if skipped or not outcomes:
        yield Finding(file, where, f"could not be measured: {skipped or 'no attempt'}")
        return
    if len(kinds) > 1:
        yield Finding(file, where, f"not deterministic ({launcher}): {' and '.join(kinds)} in {len(outcomes)} attempts")
    for outcome in outcomes:
        reason = outcome["reason"].strip().partition("\n")[0][:200]
        if outcome["outcome"] == "infra_error":
            its_own = outcome.get("infra_error") == "script_error"
            what = "raises its own error" if its_own else "no verdict (is a check missing?)"
            yield Finding(script if its_own else file, where, f"{what}: {reason}")
        elif name in ("unfixed", "control"):
            wanted = "reproduced" if name == "unfixed" else "passed"
            if outcome["outcome"] != wanted:
                yield Finding(file, where, f"is {outcome['outcome']} instead of {wanted}: {reason}")
        elif known or "non-fix" in case.variants[name].help:
            continue
        elif outcome["outcome"] == "reproduced":
            names = ", ".join(item["signature"] for item in outcome["recognized"])
            what = (
                f"the signature {names} matches this variant too: {reason} (write `non-fix` in its help if it is none)"
            )
            yield Finding(file, where, what)
        elif outcome["outcome"] in ("other_failure", "hang"):
            yield Finding(file, where, f"is {outcome['outcome']}: {reason}")
