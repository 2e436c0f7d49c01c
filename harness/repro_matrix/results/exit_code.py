"""The exit code of a run: 1 differs from its expectation (a control that fails always does), else 3 less measured than
asked for, else 0. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from repro_matrix.records.document import Document, Made
from repro_matrix.results import identical_failures as alike
from repro_matrix.results import unpaired as alone

DIFFERS = 1
TOO_LITTLE = 3


def exit_code(documents: Iterable[Document], min_cells: int, stopped_early: bool = False) -> int:
    documents = list(documents)
    verdicts = [verdict for document in documents for verdict in document["verdicts"].values()]
    if any(verdict.get("expected") == "unexpected" for verdict in verdicts):
        return DIFFERS
    variants = [variant for document in documents for variant in document["variants"].values()]
    lost = any(missed(variant["attempts"]) > 0 for variant in variants)
    # What could not be made here is no property of the stack: another try, or a compiler, would measure it.
    lost = lost or any(skip["kind"] == "build" for variant in variants if (skip := variant.get("skip")))
    unseen = any(verdict.get("unseen") for verdict in verdicts)
    measured = sum(
        any(variant["attempts"] for variant in document["variants"].values()) and document["complete"]
        for document in documents
    )
    little = lost or unseen or stopped_early or measured < min_cells
    little = little or bool(alone.unshown(documents) or alike.failing(documents))
    return TOO_LITTLE if little or _unknown(documents) else 0


def _unknown(documents: Iterable[Document]) -> bool:
    """Of the variants measured on GPUs more than half have neither an expectation nor a prediction: green says
    nothing."""
    said = [
        verdict.get("expected", "no_expectation")
        for document in documents
        if document["hardware"]["accelerator"] != "cpu"
        for verdict in document["verdicts"].values()
        if verdict["measured"]
    ]
    return 2 * said.count("no_expectation") > len(said)


def missed(attempts: Sequence[Made]) -> int:
    """How many gave no answer, less those that were made once more for it (running/again.py)."""
    infra_error = sum(attempt["outcome"]["outcome"] == "infra_error" for attempt in attempts)
    return infra_error - sum(bool(attempt["observation"]["attempt"].get("retry_of")) for attempt in attempts)


def bisect_exit(documents: Iterable[Document]) -> int:
    """For `git bisect run`: 1 the known failure reproduces, 0 it does not, 125 this point says neither."""
    outcomes = [
        attempt["outcome"]["outcome"]
        for document in documents
        for attempt in next(iter(document["variants"].values()))["attempts"]
    ]
    if "reproduced" in outcomes:
        return 1
    return 0 if outcomes and all(outcome == "passed" for outcome in outcomes) else 125
