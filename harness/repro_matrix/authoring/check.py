"""Check whether a case is ready: its files, and its attempts with both launchers.

A finding is a line: the file, the key, and what is wrong.
"""

from __future__ import annotations

import re
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from repro_matrix.config.launchers import SHIPPED
from repro_matrix.config.schema import Case
from repro_matrix.grading import grade
from repro_matrix.grading.signature import unrelated_matches
from repro_matrix.records.document import Document, VariantRecord
from repro_matrix.records.outcome import StoredOutcome
from repro_matrix.results.store import Store
from repro_matrix.results.summary import stored_rows
from repro_matrix.runner import run as workspace
from repro_matrix.runner.session import make_request, prepare
from repro_matrix.text import first_line, log

TIMES = 3  # attempts of each variant with each launcher, unless repeat= is given
SUMMARY_WORDS = 5  # the least that a case's summary needs
Documents = Mapping[str, Iterable[Document]]  # by launcher


# The files of a case


def check_texts(files: Iterable[str]) -> list[str]:
    """Find places that are still to be written."""
    return [
        f"{file}: line {number}: TODO is left"
        for file in files
        for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"\bTODO\b", line)
    ]


def check_signatures(file: str, case: Case) -> Iterator[str]:
    """Find signatures that match other failures' messages, and a summary that is too short."""
    for signature in case.signatures:
        if taken := unrelated_matches(signature):
            shown = first_line(taken[0], 100) or "the empty message"
            what = f"too broad: matches {len(taken)} messages of other failures, such as {shown!r}"
            yield f"{file}: signatures.{signature.name}.message: {what}"
    if case.kind == "failure" and len(case.summary.split()) < SUMMARY_WORDS:
        yield (
            f"{file}: summary: {case.summary!r} does not say why it fails. Write a sentence or two."
        )


def distinct_evidence(folder: Path) -> Iterator[Document]:
    """Yield a stored document for each reason with which a case's unfixed variant ended."""
    store = Store(folder)
    chosen = {
        (row.case, *sorted({each.reason for each in row.attempts})): row.evidence
        for row in chain.from_iterable(stored_rows(folder, []).values())
        if row.first
    }
    for path in sorted(set(chosen.values())):
        if document := store.read(folder / path):
            yield document


def check_other_cases(
    file: str, case: Case, cases: Mapping[str, Case], documents: Iterable[Document]
) -> list[str]:
    """Find stored failures of other cases that match this case's signatures, and are undeclared."""
    found: dict[str, str] = {}  # one for each other case
    for document in documents:
        other = cases.get(document["case"])
        if other is None or "unfixed" not in document["variants"]:
            continue
        if other.slug in (case.slug, *case.also_matches) or case.slug in other.also_matches:
            continue
        both = {other.slug: other, case.slug: case}
        for attempt in document["variants"]["unfixed"]["attempts"]:
            reason = attempt["outcome"]["reason"][:80]
            for item in grade.grade(other, "unfixed", attempt["observation"], both).recognized:
                if item.case == case.slug:
                    what = f"matches the stored evidence of {other.slug} ({reason})"
                    found.setdefault(other.slug, f"{file}: signatures.{item.signature}: {what}")
    return list(found.values())


# Its attempts


def measure_case(slug: str, overrides: Iterable[str]) -> dict[str, Sequence[Document]] | None:
    """Measure each variant several times with both launchers, in a folder that is removed.

    Return launcher -> its documents, or None if interrupted. Raise MeasureError.
    """
    request = make_request([f"case={slug}", *overrides])
    given = {key for key, _ in request.words}
    if "stack" not in given and (known := request.catalogue.cases[slug].requires.stack):
        request = request.with_values({"stack": known})
        log(f"{slug}: on {known}, where it is known to reproduce")
    stop = threading.Event()
    found: dict[str, Sequence[Document]] = {}
    with (
        workspace.interruptible(stop, log, "nothing is stored"),
        tempfile.TemporaryDirectory(prefix="repro-check-") as folder,
    ):
        for launcher in SHIPPED:
            log(f"{slug}: every variant, {launcher}")
            usual = {"repeat": TIMES, "launcher": launcher, "results": f"{folder}/{launcher}"}
            values = {key: usual[key] for key in usual.keys() - given}
            prepared = prepare(request.with_values(values))
            summary = workspace.execute(prepared, lambda event: None, stop, on_warning=log)
            if summary.problem:
                raise summary.problem
            if stop.is_set():
                return None
            found[launcher] = summary.documents
    return found


# Kinds of skips that are due to this machine and stack, not to a defect of the case.
_LACKING = frozenset(
    {"gpus", "accelerator", "gpu_mode", "stack", "packages", "build", "memory", "weights", "same"}
)


def unmeasured(documents: Documents) -> dict[str, str]:
    """Return variant -> why this machine or stack cannot measure it."""
    return {
        name: str(variant["skipped"])
        for _, document in _each(documents)
        for name, variant in document["variants"].items()
        if _is_lacking(name, variant)
    }


def _each(documents: Documents) -> Iterator[tuple[str, Document]]:
    for launcher, measured in documents.items():
        for document in measured:
            yield launcher, document


def _is_lacking(name: str, variant: VariantRecord) -> bool:
    skip = variant.get("skip")
    return name not in ("unfixed", "control") and skip is not None and skip["kind"] in _LACKING


def check_attempts(file: str, script: str, case: Case, documents: Documents) -> list[str]:
    """Find what is not ready in the attempts.

    Two things are not findings: a fix that does not help, if results/expected lists it so, and a
    variant that only this machine or stack cannot measure.
    """
    found: list[str] = []
    outcomes: dict[str, dict[str, set[str]]] = defaultdict(dict)  # variant -> launcher -> outcomes
    for launcher, document in _each(documents):
        for name, variant in document["variants"].items():
            attempts = [attempt["outcome"] for attempt in variant["attempts"]]
            kinds = outcomes[name][launcher] = {each["outcome"] for each in attempts}
            if _is_lacking(name, variant):
                continue
            if variant["skipped"] or not attempts:
                why = variant["skipped"] or "no attempt"
                found.append(f"{file}: variants.{name}: could not be measured: {why}")
            if len(kinds) > 1:
                what = f"{_joined(kinds)} in {len(attempts)} attempts"
                found.append(f"{file}: variants.{name}: not deterministic ({launcher}): {what}")
            verdict = document["verdicts"].get(name) or {}
            must_pass = case.variants[name].role == "fix" and verdict.get("expected") != "expected"
            for outcome in attempts:
                if what := _problem(name, outcome, must_pass):
                    own_error = outcome.get("infra_error") == "script_error"
                    found.append(f"{script if own_error else file}: variants.{name}: {what}")
    for name, by in outcomes.items():
        if len(set(map(frozenset, by.values()))) > 1:
            texts = ", ".join(f"{launcher}: {_joined(kinds)}" for launcher, kinds in by.items())
            found.append(f"{file}: variants.{name}: the launchers disagree: {texts}")
    fixes = [kinds for name, by in outcomes.items() if name != "unfixed" for kinds in by.values()]
    if case.kind == "failure" and {"passed"} not in fixes:
        found.append(
            f"{file}: variants: no variant passes: nothing shows that only the failure matches, and"
            " that the checks can pass"
        )
    return list(dict.fromkeys(found))


def _joined(kinds: Iterable[str]) -> str:
    return " and ".join(sorted(kinds))


def _problem(name: str, outcome: StoredOutcome, must_pass: bool) -> str:
    """Return the problem of an attempt, or an empty string."""
    kind = outcome["outcome"]
    reason = first_line(outcome["reason"])
    if kind == "infra_error":
        if outcome.get("infra_error") == "script_error":
            return f"raises its own error: {reason}"
        return f"no verdict (is a check missing?): {reason}"
    if name in ("unfixed", "control"):
        wanted = "reproduced" if name == "unfixed" else "passed"
        return "" if kind == wanted else f"is {kind} instead of {wanted}: {reason}"
    if not must_pass or kind not in ("reproduced", "other_failure", "hang"):
        return ""
    if kind == "reproduced":
        names = ", ".join(item["signature"] for item in outcome["recognized"])
        return (
            f"the signature {names} matches this variant too: {reason} (use the role non_fix or"
            " probe if it is not a fix)"
        )
    return f"is {kind}: {reason}"
