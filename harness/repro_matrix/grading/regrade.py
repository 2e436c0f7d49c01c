"""Grade stored documents anew: outcomes from observations, verdicts from outcomes. Pure.

What a document says of its own outcomes and verdicts may be of an older grader, or edited: it is never taken over, and
every difference is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from repro_matrix.config.schema import Case
from repro_matrix.grading import outcome, verdict
from repro_matrix.grading.comparability import recorded_capabilities
from repro_matrix.grading.consistency import fingerprint_mismatch
from repro_matrix.grading.expectations import as_expected, comparison
from repro_matrix.grading.grade import grade
from repro_matrix.grading.outcome import Outcome
from repro_matrix.grading.root_cause import FailureId
from repro_matrix.records.document import Cell, Document, Variant
from repro_matrix.records.outcome import Verdict as Stored


@dataclass
class Regraded:
    """``documents`` as graded now; ``left_out`` with the reason; ``remarks``: every document that said otherwise."""

    documents: list[Document] = field(default_factory=list)
    left_out: list[tuple[Document, str]] = field(default_factory=list)
    remarks: list[tuple[str, str]] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        return [f"{document}: {remark}" for document, remark in self.remarks]


# Documents by their id, with the outcomes found in them: every probe of a search looks at the same ones.
Graded = dict[int, tuple[Document, "dict[str, list[Outcome]] | None"]]


def regrade(
    documents: Iterable[Document], cases: Mapping[str, Case], graded: bool = False, kept: Graded | None = None
) -> Regraded:
    """Grade every document of a case of the catalogue by that case as it is now.

    ``graded``: its outcomes are of this very grader (a run that has just ended); only its verdicts are found anew.
    ``kept``: documents in it are graded once. The documents are each other's history: an older stack that reproduced
    makes a newer one's NOT_REPRODUCED an FIXED_UPSTREAM. A document with the wrong fingerprint is left out.
    """
    result = Regraded()
    cells: dict[tuple[str, str], list[Document]] = {}
    for document in documents:
        if document["case"] not in cases:
            continue
        case, name = cases[document["case"]], document_name(document)
        wrong = fingerprint_mismatch(document)
        if wrong:
            result.left_out.append((document, wrong))
            result.remarks.append((name, f"left out: {wrong}"))
            continue
        if graded:
            now: Document = {**document}
        else:
            outcomes = _grade_once(document, case, cases, kept or {})
            now = with_outcomes(document, outcomes)
            result.remarks += [(name, text) for text in _other_outcomes(document, outcomes)]
        result.documents.append(now)
        cells.setdefault((now["case"], now.get("cell_id", "")), []).append(now)
    for document in result.documents:  # copies: what was given is not changed
        history = [d for d in cells[document["case"], document.get("cell_id", "")] if _other_stack(d, document)]
        stored = document["verdicts"]
        document["verdicts"] = verdicts_of(document, cases[document["case"]], history)
        differences = _other_verdicts(stored, document["verdicts"])
        result.remarks += [(document_name(document), text) for text in differences]
    return result


def _grade_once(document: Document, case: Case, cases: Mapping[str, Case], kept: Graded) -> dict[str, list[Outcome]]:
    before = kept.get(id(document))
    if before is None or before[0] is not document:
        return outcomes_of(document, case, cases)
    outcomes = before[1] or outcomes_of(document, case, cases)
    kept[id(document)] = (document, outcomes)
    return outcomes


def document_name(document: Document) -> str:
    """Return how a note names a document."""
    return document.get("path") or document.get("cell_id") or document["case"]


def with_expectations(document: Document, case: Case) -> Document:
    """Return a regraded document whose verdicts also hold how they compare with what is expected now."""
    hardware = document["hardware"]
    versions, profile, facts = document["stack"]["versions"], hardware["profile"], hardware.get("capabilities", {})
    where = document.get("params") or f"{document['model']}/{document['strategy']}"
    verdicts = {}
    for name, stored in document["verdicts"].items():
        compared = comparison(case, where, name, read_verdict(stored), versions, profile, facts)
        verdicts[name] = cast(Stored, {**stored, **compared})
    return {**document, "verdicts": verdicts}


def read_verdict(stored: Stored) -> verdict.Verdict:
    """Parse a verdict that this grader wrote."""
    plain: dict[str, Any] = {key: value for key, value in stored.items() if key in verdict.KEYS}
    return verdict.Verdict(
        **{**plain, "failure_ids": tuple(FailureId(**failure_ids) for failure_ids in stored.get("failure_ids", ()))}
    )


def outcomes_of(document: Document, case: Case, cases: Mapping[str, Case]) -> dict[str, list[Outcome]]:
    """Grade the attempts of each variant by the case as it is now; variants that the case no longer has are left
    out."""
    stack = document["stack"]
    outcomes = {}
    for name, variant in document["variants"].items():
        if name not in case.variants:
            continue
        # A variant on a stack of its own: its versions are those that its own attempts were planned with.
        planned = stack["versions"] if variant.get("stack") in (None, stack["name"]) else None
        outcomes[name] = [grade(case, name, made["observation"], cases, planned) for made in variant["attempts"]]
    return outcomes


def with_outcomes(document: Document, outcomes: Mapping[str, list[Outcome]]) -> Document:
    """Return the document with these outcomes instead of its own, without variants that have none here."""
    variants: dict[str, Variant] = {}
    for name, graded in outcomes.items():
        variant = document["variants"][name]
        variants[name] = {
            **variant,
            "attempts": [{**made, "outcome": o.to_json()} for made, o in zip(variant["attempts"], graded)],
        }
    result: Document = {**document, "variants": variants}
    return {**result, "hardware": {**result["hardware"], "capabilities": recorded_capabilities(result)}}


def verdicts_of(document: Cell, case: Case, history: Iterable[Cell]) -> dict[str, Stored]:
    """Return the verdicts that follow from the document's outcomes. ``history``: the same cell on other stacks."""
    outcomes = {
        name: [outcome.skipped(variant["skipped"])]
        if variant["skipped"]
        else [Outcome.from_json(attempt["outcome"]) for attempt in variant["attempts"]]
        for name, variant in document["variants"].items()
    }
    unfixed, stack = document["variants"].get("unfixed"), document["stack"]
    settings, facts = unfixed["settings"] if unfixed else None, document["hardware"].get("capabilities", {})
    verdicts = verdict.judge(case, outcomes, history, stack["versions"], settings, facts, stack.get("changed", ()))
    return {name: cast(Stored, found.to_json()) for name, found in verdicts.items()}


def _other_stack(other: Cell, document: Cell) -> bool:
    same_kind = other["hardware"]["accelerator"] == document["hardware"]["accelerator"]
    return same_kind and other["stack"]["versions"] != document["stack"]["versions"]


def _other_outcomes(document: Cell, outcomes: Mapping[str, list[Outcome]]) -> Iterable[str]:
    for name, graded in outcomes.items():
        for index, (attempt, now) in enumerate(zip(document["variants"][name]["attempts"], graded)):
            stored = attempt["outcome"]["outcome"]
            if stored != now.outcome:
                yield f"variant {name}, attempt {index}: it says {stored}, its observation {now.outcome}: {now.reason}"


def _other_verdicts(stored: Mapping[str, Stored], now: Mapping[str, Stored]) -> Iterable[str]:
    """Report changed verdicts; whether it is NOT_REPRODUCED or FIXED_UPSTREAM depends on what else is stored."""
    for name, found in now.items():
        before = stored[name]["name"] if name in stored else ""
        if before and as_expected(before) != as_expected(found["name"]):
            yield f"variant {name}: it says {before}, its outcomes {found['name']}"
