"""Cells of which every variant fails with one and the same other error: the case itself does not run there. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from repro_matrix.grading.root_cause import failure_ids
from repro_matrix.records.document import Document, Made
from repro_matrix.records.outcome import FailureId, Outcome


def failing(documents: Iterable[Document]) -> list[tuple[Document, Made]]:
    """The cells in which two variants at least gave an answer, the broken one among them, and every attempt of all of
    them met the same thing, which is not the known failure: what they differ in made no difference, so that nothing is
    shown of the failure or of a fix. With the unfixed variant's first attempt. Not where that very thing is what is
    expected."""
    found = []
    for document in documents:
        answers = {name: _answers(variant["attempts"]) for name, variant in document["variants"].items()}
        answers = {name: made for name, made in answers.items() if made}
        if len(answers) < 2 or "unfixed" not in answers:
            continue
        verdicts = [said for variant, said in document["verdicts"].items() if variant in answers]
        if verdicts and all(said.get("expected") == "expected" for said in verdicts):
            continue
        failure_ids = {_failure_ids(document["case"], each) for made in answers.values() for each in made}
        if len(failure_ids) == 1 and failure_ids != {()}:
            found.append((document, answers["unfixed"][0]))
    return found


def _answers(attempts: Iterable[Made]) -> list[Made]:
    return [made for made in attempts if made["outcome"]["outcome"] != "infra_error"]


def _failure_ids(case: str, made: Made) -> tuple[FailureId, ...]:
    """Nothing for whatever is not another error: it makes the cell one that shows something."""
    return (
        failure_ids(case, Outcome.from_json(made["outcome"])) if made["outcome"]["outcome"] == "other_failure" else ()
    )
