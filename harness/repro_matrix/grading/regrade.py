"""Grade stored documents anew: outcomes from observations, verdicts from outcomes. Pure.

The outcomes and verdicts that a document holds may come from another version of the grader, or be edited: they are
never used, and every difference is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from repro_matrix.config.schema import Case
from repro_matrix.grading.expectations import as_expected, comparison, recorded_capabilities
from repro_matrix.grading.grade import grade
from repro_matrix.grading.verdict import judge
from repro_matrix.records.document import Cell, Document, Variant, kind_of
from repro_matrix.records.outcome import Outcome, StoredVerdict, Verdict

Outcomes = dict[str, list[Outcome]]  # by variant


class Regraded(NamedTuple):
    """``documents`` as graded now; ``notes`` name every document that held something else."""

    documents: list[Document]
    notes: list[str]


def regrade(documents: Iterable[Document], cases: Mapping[str, Case]) -> Regraded:
    """Grade every document of a case of the catalogue by that case as it is now.

    The documents are each other's history: an older stack that reproduced makes a newer one's NOT_REPRODUCED a
    FIXED_UPSTREAM.
    """
    result = Regraded([], [])
    cells: dict[tuple[str, str], list[Document]] = {}
    for document in documents:
        if document["case"] not in cases:
            continue
        case, name = cases[document["case"]], document_name(document)
        outcomes = outcomes_of(document, case, cases)
        now = with_outcomes(document, outcomes)
        result.notes.extend(f"{name}: {text}" for text in _other_outcomes(document, outcomes))
        result.documents.append(now)
        cells.setdefault((now["case"], now.get("cell_id", "")), []).append(now)
    for document in result.documents:  # copies: what was given is not changed
        history = [d for d in cells[document["case"], document.get("cell_id", "")] if _other_stack(d, document)]
        stored = document["verdicts"]
        document["verdicts"] = verdicts_of(document, cases[document["case"]], history)
        differences = _other_verdicts(stored, document["verdicts"])
        result.notes.extend(f"{document_name(document)}: {text}" for text in differences)
    return result


def document_name(document: Document) -> str:
    """Return how a note names a document."""
    return document.get("path") or document.get("cell_id") or document["case"]


def with_expectations(document: Document, case: Case) -> Document:
    """Return a regraded document whose verdicts also hold how they compare with what is expected now."""
    hardware = document["hardware"]
    versions, kind, facts = document["stack"]["versions"], kind_of(hardware), hardware.get("capabilities", {})
    where = document.get("params") or f"{document['model']}/{document['strategy']}"
    verdicts = {}
    for name, stored in document["verdicts"].items():
        compared = comparison(case, where, name, Verdict.from_json(stored), versions, kind, facts)
        verdicts[name] = {**stored, **compared}
    return {**document, "verdicts": verdicts}


def outcomes_of(document: Document, case: Case, cases: Mapping[str, Case]) -> Outcomes:
    """Grade the attempts of each variant that the case has by the case as it is now."""
    stack = document["stack"]
    outcomes = {}
    for name, variant in document["variants"].items():
        if name not in case.variants:
            continue
        # A variant on a stack of its own: its versions are those that its own attempts were planned with.
        planned = stack["versions"] if variant.get("stack") in (None, stack["name"]) else None
        outcomes[name] = [grade(case, name, made["observation"], cases, planned) for made in variant["attempts"]]
    return outcomes


def with_outcomes(document: Document, outcomes: Outcomes) -> Document:
    """Return the document with these outcomes instead of its own, without variants that have none here."""
    variants: dict[str, Variant] = {}
    for name, graded in outcomes.items():
        variant = document["variants"][name]
        attempts = zip(variant["attempts"], graded)
        variants[name] = {**variant, "attempts": [{**made, "outcome": each.to_json()} for made, each in attempts]}
    result: Document = {**document, "variants": variants}
    return {**result, "hardware": {**result["hardware"], "capabilities": recorded_capabilities(result)}}


def verdicts_of(document: Cell, case: Case, history: Iterable[Cell]) -> dict[str, StoredVerdict]:
    """Return the verdicts that follow from the document's outcomes. ``history``: the same cell on other stacks."""
    outcomes = {
        name: [Outcome("skipped", variant["skipped"])]
        if variant["skipped"]
        else [Outcome.from_json(attempt["outcome"]) for attempt in variant["attempts"]]
        for name, variant in document["variants"].items()
    }
    unfixed, stack = document["variants"].get("unfixed"), document["stack"]
    settings, facts = unfixed["settings"] if unfixed else None, document["hardware"].get("capabilities", {})
    verdicts = judge(case, outcomes, history, stack["versions"], settings, facts, stack.get("changed", ()))
    return {name: verdict.to_json() for name, verdict in verdicts.items()}


def _other_stack(other: Cell, document: Cell) -> bool:
    same_kind = other["hardware"]["accelerator"] == document["hardware"]["accelerator"]
    return same_kind and other["stack"]["versions"] != document["stack"]["versions"]


def _other_outcomes(document: Cell, outcomes: Outcomes) -> Iterable[str]:
    for name, graded in outcomes.items():
        for index, (attempt, now) in enumerate(zip(document["variants"][name]["attempts"], graded)):
            stored = attempt["outcome"]["outcome"]
            if stored != now.outcome:
                yield f"variant {name}, attempt {index}: stored as {stored}, graded as {now.outcome}: {now.reason}"


def _other_verdicts(stored: Mapping[str, StoredVerdict], now: Mapping[str, StoredVerdict]) -> Iterable[str]:
    """Report changed verdicts; whether it is NOT_REPRODUCED or FIXED_UPSTREAM depends on what else is stored."""
    for name, verdict in now.items():
        before = stored[name]["name"] if name in stored else ""
        if before and as_expected(before) != as_expected(verdict["name"]):
            yield f"variant {name}: stored as {before}, graded as {verdict['name']}"
