"""Grade stored documents anew: outcomes from observations, verdicts from outcomes. Pure.

The outcomes and verdicts that a document holds may come from another version of the grader, or be
edited: they are never used. baseline/accept.py reports the differences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from repro_matrix.config.schema import Case
from repro_matrix.grading.expected import Situation, comparison, recorded_capabilities
from repro_matrix.grading.grade import grade
from repro_matrix.grading.verdict import judge
from repro_matrix.records.document import (
    CellRecord,
    Document,
    GradedAttempt,
    VariantRecord,
    kind_of,
)
from repro_matrix.records.outcome import Outcome, StoredVerdict, Verdict


def regrade(documents: Iterable[Document], cases: Mapping[str, Case]) -> list[Document]:
    """Grade every document of a case of the catalogue by that case as it is now.

    The documents are each other's history: an older stack that reproduced makes a newer one's
    NOT_REPRODUCED a FIXED_UPSTREAM.
    """
    graded: list[Document] = []
    cells: dict[tuple[str, str], list[Document]] = {}
    for document in documents:
        if case := cases.get(document["case"]):
            now = with_outcomes(document, case, cases)
            graded.append(now)
            cells.setdefault((now["case"], now.get("cell_id", "")), []).append(now)
    for document in graded:  # copies: what was given is not changed
        history = cells[document["case"], document.get("cell_id", "")]
        document["verdicts"] = verdicts_of(document, cases[document["case"]], history)
    return graded


def with_expectations(document: Document, case: Case) -> Document:
    """Return a regraded document whose verdicts are compared with today's expectations."""
    where = document.get("params") or f"{document['model']}/{document['strategy']}"
    versions, hardware = document["stack"]["versions"], document["hardware"]
    here = Situation(where, versions, kind_of(hardware), hardware.get("capabilities", {}))
    verdicts = {}
    for name, stored in document["verdicts"].items():
        compared = comparison(case, name, here, Verdict.from_json(stored))
        verdicts[name] = {**stored, **compared}
    return {**document, "verdicts": verdicts}


def with_outcomes(document: Document, case: Case, cases: Mapping[str, Case]) -> Document:
    """Return the document with its attempts graded by the case as it is now.

    Variants that the case does not have are omitted.
    """
    stack = document["stack"]
    variants: dict[str, VariantRecord] = {}
    for name, variant in document["variants"].items():
        if name not in case.variants:
            continue
        # A variant on a stack of its own: its versions are those that its own attempts were planned
        # with.
        planned = stack["versions"] if variant.get("stack") in (None, stack["name"]) else None
        attempts: list[GradedAttempt] = []
        for made in variant["attempts"]:
            outcome = grade(case, name, made["observation"], cases, planned)
            attempts.append({**made, "outcome": outcome.to_json()})
        variants[name] = {**variant, "attempts": attempts}
    result: Document = {**document, "variants": variants}
    capabilities = recorded_capabilities(result)
    return {**result, "hardware": {**result["hardware"], "capabilities": capabilities}}


def verdicts_of(
    document: CellRecord, case: Case, history: Iterable[CellRecord]
) -> dict[str, StoredVerdict]:
    """Return the verdicts that follow from the document's outcomes.

    ``history``: results of the same cell; those on other stacks of this machine count.
    """
    others = [each for each in history if _other_stack(each, document)]
    outcomes = {}
    for name, variant in document["variants"].items():
        outcomes[name] = [Outcome.from_json(made["outcome"]) for made in variant["attempts"]]
        if variant["skipped"]:
            outcomes[name] = [Outcome("skipped", variant["skipped"])]
    unfixed, stack = document["variants"].get("unfixed"), document["stack"]
    settings = unfixed["settings"] if unfixed else None
    facts = document["hardware"].get("capabilities", {})
    verdicts = judge(
        case, outcomes, others, stack["versions"], settings, facts, stack.get("changed", ())
    )
    return {name: verdict.to_json() for name, verdict in verdicts.items()}


def _other_stack(other: CellRecord, document: CellRecord) -> bool:
    same_kind = other["hardware"]["accelerator"] == document["hardware"]["accelerator"]
    return same_kind and other["stack"]["versions"] != document["stack"]["versions"]
