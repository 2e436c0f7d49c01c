"""How far the CPU predicts a real GPU: the page is computed from the stored runs, and what differs
is explained."""

from __future__ import annotations

import pytest

from bench import agreement

pytestmark = [
    pytest.mark.slow,  # grades all runs of results/gpu, with their histories
    pytest.mark.xdist_group("baseline"),
    pytest.mark.usefixtures("published_rows"),
]


def test_page_is_computed_from_the_stored_runs() -> None:
    assert agreement.page() == agreement.PAGE.read_text(encoding="utf-8"), "make gpu-agreement"


def test_every_disagreement_is_explained_and_nothing_else() -> None:
    runs = agreement.compared()
    found = [(run, gpu.cell_id, gpu.variant) for run, _, gpu in agreement.disagreements(runs)]
    assert sorted(found) == sorted(agreement.explanations())
    counts = [
        sum(each) for each in zip(*(case.counts for cases in runs.values() for case in cases))
    ]
    assert counts == [176, 179], "README and the guides say so"
