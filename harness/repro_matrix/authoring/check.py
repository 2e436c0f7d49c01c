"""Check whether a case is ready: its files, and the outcomes of several attempts with both
launchers."""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping

from repro_matrix.config.launchers import SHIPPED
from repro_matrix.config.schema import Case
from repro_matrix.grading import grade
from repro_matrix.grading.signature import unrelated_matches
from repro_matrix.records.document import Document, VariantRecord
from repro_matrix.records.outcome import StoredOutcome
from repro_matrix.runner import run as workspace
from repro_matrix.runner import session
from repro_matrix.runner.session import make_request
from repro_matrix.text import log

TIMES = 3  # attempts of each variant with each launcher, unless repeat= is given
SUMMARY_WORDS = 5  # at least, of a case's summary
Documents = Mapping[str, Iterable[Document]]  # by launcher


# -- its files


def check_texts(texts: Mapping[str, str]) -> list[str]:
    """Find places that are still to be written. ``texts``: file -> its text.

    A finding is a line: the file, the key, and what is wrong."""
    return [
        f"{file}: line {number}: TODO is left"
        for file, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(r"\bTODO\b", line)
    ]


def check_signatures(file: str, case: Case) -> Iterator[str]:
    """Find signatures that match messages of other failures, and a summary that says nothing."""
    for signature in case.signatures:
        taken = unrelated_matches(signature)
        if taken:
            shown = taken[0].partition("\n")[0][:100] or "the empty message"
            what = f"too broad: matches {len(taken)} messages of other failures, such as {shown!r}"
            yield f"{file}: signatures.{signature.name}.message: {what}"
    if case.kind == "failure" and len(case.summary.split()) < SUMMARY_WORDS:
        yield (
            f"{file}: summary: {case.summary!r} does not say why it fails. Write a sentence or two."
        )


def check_other_cases(
    file: str, case: Case, cases: Mapping[str, Case], documents: Iterable[Document]
) -> list[str]:
    """Find stored evidence of other cases' unfixed variants that this case's signatures match,
    undeclared."""
    found: dict[str, str] = {}
    for document in documents:
        other = cases.get(document["case"])
        declared = (
            other is None
            or other.slug in (case.slug, *case.also_matches)
            or case.slug in other.also_matches
        )
        if other is None or declared or "unfixed" not in document["variants"]:
            continue
        for attempt in document["variants"]["unfixed"]["attempts"]:
            graded = grade.grade(
                other, "unfixed", attempt["observation"], {other.slug: other, case.slug: case}
            )
            for item in graded.recognized:
                if item.case == case.slug:
                    what = (
                        f"matches the stored evidence of {other.slug}"
                        f" ({attempt['outcome']['reason'][:80]})"
                    )
                    found.setdefault(other.slug, f"{file}: signatures.{item.signature}: {what}")
    return list(found.values())


# -- its attempts


def measure_case(slug: str, overrides: list[str]) -> dict[str, list[Document]] | None:
    """Measure each variant several times with both launchers, in a folder that is removed. Raises
    MeasureError.

    Returns launcher -> its documents; None: interrupted."""
    request = make_request([f"case={slug}", *overrides])
    given = {key for key, _ in request.words}
    if "stack" not in given and (known := request.catalogue.cases[slug].requires.stack):
        request = request.with_values({"stack": known})
        log(f"{slug}: on {known}, where it is known to reproduce")
    stop = threading.Event()
    found: dict[str, list[Document]] = {}
    with (
        workspace.interruptible(stop, log, "nothing is stored"),
        tempfile.TemporaryDirectory(prefix="repro-check-") as folder,
    ):
        for launcher in SHIPPED:
            log(f"{slug}: every variant, {launcher}")
            usual = {"repeat": TIMES, "launcher": launcher, "results": f"{folder}/{launcher}"}
            prepared = session.prepare(
                request.with_values({key: usual[key] for key in usual.keys() - given})
            )
            summary = workspace.execute(prepared, lambda event: None, stop, on_warning=log)
            if summary.problem:
                raise summary.problem
            if stop.is_set():
                return None
            found[launcher] = summary.documents
    return found


# Why a variant was not launched: what this machine and stack lack, which is no defect of the case.
_LACKING = frozenset(
    {"gpus", "accelerator", "gpu_mode", "stack", "packages", "build", "memory", "weights", "same"}
)


def unmeasured(documents: Documents) -> dict[str, str]:
    """Return variant -> why this machine or stack cannot measure it."""
    every = [
        item
        for measured in documents.values()
        for each in measured
        for item in each["variants"].items()
    ]
    return {name: str(variant["skipped"]) for name, variant in every if _is_lacking(name, variant)}


def _is_lacking(name: str, variant: VariantRecord) -> bool:
    skip = variant.get("skip")
    return name not in ("unfixed", "control") and skip is not None and skip["kind"] in _LACKING


def check_attempts(file: str, script: str, case: Case, documents: Documents) -> list[str]:
    """Find what is not ready in the attempts. A fix that does not help is no finding where
    results/expected lists it so, and one that cannot be measured here none where only this machine
    or stack is in the way."""
    found: list[str] = []
    outcomes: dict[str, dict[str, set[str]]] = {}  # variant -> launcher -> outcomes
    for launcher, measured in documents.items():
        for document in measured:
            for name, variant in document["variants"].items():
                attempts = [attempt["outcome"] for attempt in variant["attempts"]]
                outcomes.setdefault(name, {})[launcher] = {
                    outcome["outcome"] for outcome in attempts
                }
                if _is_lacking(name, variant):
                    continue
                where = f"{file}: variants.{name}"
                if variant["skipped"] or not attempts:
                    found.append(
                        f"{where}: could not be measured: {variant['skipped'] or 'no attempt'}"
                    )
                kinds = " and ".join(sorted(outcomes[name][launcher]))
                if " and " in kinds:
                    found.append(
                        f"{where}: not deterministic ({launcher}): {kinds} in {len(attempts)}"
                        " attempts"
                    )
                verdict = document["verdicts"].get(name)
                expected = verdict is not None and verdict.get("expected") == "expected"
                must_pass = case.variants[name].role == "fix" and not expected
                for outcome in attempts:
                    what = _problem(name, outcome, must_pass)
                    own_error = outcome.get("infra_error") == "script_error"
                    found += (
                        [f"{script if own_error else file}: variants.{name}: {what}"]
                        if what
                        else []
                    )
    for name, by in outcomes.items():
        if len(set(map(frozenset, by.values()))) > 1:
            texts = ", ".join(
                f"{launcher}: {' and '.join(sorted(kinds))}" for launcher, kinds in by.items()
            )
            found.append(f"{file}: variants.{name}: the launchers disagree: {texts}")
    fixes = [kinds for name, by in outcomes.items() if name != "unfixed" for kinds in by.values()]
    if case.kind == "failure" and {"passed"} not in fixes:
        what = (
            "no variant passes: nothing shows that only the failure matches, and that the checks"
            " can pass"
        )
        found.append(f"{file}: variants: {what}")
    return list(dict.fromkeys(found))


def _problem(name: str, outcome: StoredOutcome, must_pass: bool) -> str:
    """Return what is wrong with an attempt, "" if nothing."""
    kind, reason = outcome["outcome"], outcome["reason"].strip().partition("\n")[0][:200]
    if kind == "infra_error":
        own_error = outcome.get("infra_error") == "script_error"
        return (
            f"{'raises its own error' if own_error else 'no verdict (is a check missing?)'}:"
            f" {reason}"
        )
    if name in ("unfixed", "control"):
        wanted = "reproduced" if name == "unfixed" else "passed"
        return "" if kind == wanted else f"is {kind} instead of {wanted}: {reason}"
    if not must_pass or kind not in ("reproduced", "other_failure", "hang"):
        return ""
    if kind == "reproduced":
        names = ", ".join(item["signature"] for item in outcome["recognized"])
        return (
            f"the signature {names} matches this variant too: {reason} (role: non_fix or probe, if"
            " it is no fix)"
        )
    return f"is {kind}: {reason}"
