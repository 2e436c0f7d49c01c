"""Grade stored documents anew: outcomes from observations, verdicts from outcomes. Pure.

The outcomes and verdicts that a document holds may come from another version of the grader, or be
edited: they are never used. baseline/accept.py reports the differences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from repro_matrix.config.schema import Case
from repro_matrix.grading.expected import comparison, recorded_capabilities
from repro_matrix.grading.grade import grade
from repro_matrix.grading.verdict import judge
from repro_matrix.records.document import CellRecord, Document, VariantRecord, kind_of
from repro_matrix.records.outcome import Outcome, StoredVerdict, Verdict

Outcomes = dict[str, list[Outcome]]  # by variant


def regrade(documents: Iterable[Document], cases: Mapping[str, Case]) -> list[Document]:
    """Grade every document of a case of the catalogue by that case as it is now.

    The documents are each other's history: an older stack that reproduced makes a newer one's
    NOT_REPRODUCED a FIXED_UPSTREAM.
    """
    graded: list[Document] = []
    cells: dict[tuple[str, str], list[Document]] = {}
    for document in documents:
        if case := cases.get(document["case"]):
            now = with_outcomes(document, outcomes_of(document, case, cases))
            graded.append(now)
            cells.setdefault((now["case"], now.get("cell_id", "")), []).append(now)
    for document in graded:  # copies: what was given is not changed
        history = [
            d
            for d in cells[document["case"], document.get("cell_id", "")]
            if _other_stack(d, document)
        ]
        document["verdicts"] = verdicts_of(document, cases[document["case"]], history)
    return graded


def with_expectations(document: Document, case: Case) -> Document:
    """Return a regraded document whose verdicts are compared with today's expectations."""
    hardware = document["hardware"]
    versions, kind, facts = (
        document["stack"]["versions"],
        kind_of(hardware),
        hardware.get("capabilities", {}),
    )
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
        # A variant on a stack of its own: its versions are those that its own attempts were planned
        # with.
        planned = stack["versions"] if variant.get("stack") in (None, stack["name"]) else None
        outcomes[name] = [
            grade(case, name, made["observation"], cases, planned) for made in variant["attempts"]
        ]
    return outcomes


def with_outcomes(document: Document, outcomes: Outcomes) -> Document:
    """Return the document with these outcomes instead of its own.

    Variants without an outcome are omitted.
    """
    variants: dict[str, VariantRecord] = {}
    for name, graded in outcomes.items():
        variant = document["variants"][name]
        attempts = zip(variant["attempts"], graded)
        variants[name] = {
            **variant,
            "attempts": [{**made, "outcome": each.to_json()} for made, each in attempts],
        }
    result: Document = {**document, "variants": variants}
    return {
        **result,
        "hardware": {**result["hardware"], "capabilities": recorded_capabilities(result)},
    }


def verdicts_of(
    document: CellRecord, case: Case, history: Iterable[CellRecord]
) -> dict[str, StoredVerdict]:
    """Return the verdicts that follow from the document's outcomes.

    ``history``: the same cell on other stacks.
    """
    outcomes = {
        name: (
            [Outcome("skipped", variant["skipped"])]
            if variant["skipped"]
            else [Outcome.from_json(attempt["outcome"]) for attempt in variant["attempts"]]
        )
        for name, variant in document["variants"].items()
    }
    unfixed, stack = document["variants"].get("unfixed"), document["stack"]
    settings, facts = (
        unfixed["settings"] if unfixed else None,
        document["hardware"].get("capabilities", {}),
    )
    verdicts = judge(
        case, outcomes, history, stack["versions"], settings, facts, stack.get("changed", ())
    )
    return {name: verdict.to_json() for name, verdict in verdicts.items()}


def _other_stack(other: CellRecord, document: CellRecord) -> bool:
    same_kind = other["hardware"]["accelerator"] == document["hardware"]["accelerator"]
    return same_kind and other["stack"]["versions"] != document["stack"]["versions"]
