"""budget=30m: the most informative cells first, as many as fit, and nothing is passed off as measured."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import document, observation, ok
from repro_matrix.errors import ConfigError
from repro_matrix.planning.cells import Cell
from repro_matrix.runner import budget, session
from repro_matrix.runner.budget import Known

CELLS = st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=10).map(
    lambda numbers: [Cell(f"c{n}", "m", "ddp", (), "current", "cpu") for n in numbers]
)
KNOWN = st.none() | st.builds(Known, st.sampled_from([1.0, 2.0, 3.0]), st.booleans(), st.booleans())


def at(cell: Cell) -> tuple[str, str, str]:
    return cell.hardware, cell.stack, cell.key


@given(CELLS, st.floats(1, 100), st.data())
def test_what_is_chosen_fits_and_nothing_more_informative_would_have(cells: list[Cell], most: float, data: Any) -> None:
    seconds = {cell: data.draw(st.sampled_from([0.5, 1.0, 7.0, 40.0])) for cell in cells}
    known = {at(cell): found for cell in cells if (found := data.draw(KNOWN)) is not None}
    controls = data.draw(st.sets(st.sampled_from([cell.case for cell in cells])))
    if min(seconds.values()) > most:
        with pytest.raises(ConfigError, match="the shortest cell"):
            budget.choose(cells, seconds, most, known, controls)
        return
    chosen, left = budget.choose(cells, seconds, most, known, controls)
    assert sorted(c.key for c in chosen + left) == sorted(c.key for c in cells), "each is measured or said not to be"
    assert [c for c in cells if c in set(chosen)] == chosen and sum(seconds[c] for c in chosen) <= most + 1e-9
    for cell in left:
        before = [c for c in chosen if budget.rank(c, known, controls) < budget.rank(cell, known, controls)]
        assert sum(seconds[c] for c in before) + seconds[cell] > most, "it had no room when its turn came"
    shuffled = data.draw(st.permutations(cells))
    assert set(budget.choose(shuffled, seconds, most, known, controls)[0]) == set(chosen)
    assert budget.choose(cells, seconds, sum(seconds.values()) + 1, known, controls) == (cells, [])


def test_the_order_of_what_is_learnt() -> None:
    names = ["new", "new-control", "changed", "flaky", "old", "recent", "control"]
    cells = [Cell(name, "m", "ddp", (), "current", "cpu") for name in names]
    known = {
        at(cell): found
        for cell, found in zip(
            cells[2:], [Known(9, changed=True), Known(9, flaky=True), Known(1), Known(2), Known(0)], strict=True
        )
    }
    ranked = sorted(cells[::-1], key=lambda cell: budget.rank(cell, known, {"new-control", "control"}))
    assert [cell.case for cell in ranked] == names


@given(CELLS)
def test_over_some_nights_every_cell_has_its_turn(cells: list[Cell]) -> None:
    known: dict[tuple[str, str, str], Known] = {}
    for night in range(len(cells)):
        chosen, _ = budget.choose(cells, dict.fromkeys(cells, 1.0), 1.0, known)
        known |= {at(cell): Known(float(night)) for cell in chosen}
    assert known.keys() == {at(cell) for cell in cells}


def test_what_is_known_comes_from_the_two_newest_documents() -> None:
    def made(started: float, *kinds: str, expected: str = "expected") -> dict[str, Any]:
        one = document({"broken": [(kind, observation(ok(0))) for kind in kinds]}, {"broken": "X"}, key="c/m")
        one["provenance"]["started"] = started
        one["verdicts"]["broken"]["expected"] = expected
        return one

    where = ("cpu", "current", "c/m")
    assert budget.known([made(1, "fires"), made(2, "fires")]) == {where: Known(2.0)}
    assert budget.known([made(2, "fires"), made(1, "clean")])[where].changed
    assert not budget.known([made(3, "fires"), made(2, "fires"), made(1, "clean")])[where].changed
    assert budget.known([made(1, "fires", expected="unexpected")])[where].changed
    assert budget.known([made(1, "fires", "clean")])[where].flaky
    assert budget.known([made(1)]) == {}, "what was skipped was not measured"


@pytest.mark.parametrize("text", ["30", "m", "-3m", "0m", "3d", "1.2.3h", "", "thirty minutes"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="budget=30m"):
        budget.of(text)
    assert (budget.of("90s"), budget.of("1.5m"), budget.of("2h"), budget.of(None)) == (90, 90, 7200, None)


def test_a_run_says_what_its_budget_leaves_out(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from repro_matrix.cli import main as cli

    words = ["case=train-step", "strategy=ddp,fsdp", "hardware=cpu", "jobs=1", f"results={tmp_path}"]
    whole = session.prepare(words, build_stacks=False)
    part = session.prepare([*words, "budget=6s"], build_stacks=False)
    keys = [plan.cell.key for plan in part.plans]
    assert 0 < len(keys) < len(whole.plans)
    assert sorted([*keys, *(cell.key for cell in part.left)]) == sorted(plan.cell.key for plan in whole.plans)
    assert cli.main(["matrix", *words, "budget=6s", "--plan"]) == 0
    assert f"no room within budget=6s: {len(part.left)} cells" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="the shortest cell"):
        session.prepare([*words, "budget=0.001s"], build_stacks=False)
