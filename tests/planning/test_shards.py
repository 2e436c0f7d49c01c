"""Shards of a run: disjoint, complete, and about as long as each other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.errors import ConfigError
from repro_matrix.planning.cells import Cell
from repro_matrix.planning.plan import parse_shard, select_shard
from repro_matrix.runner import session

CELLS = st.lists(st.integers(0, 40), unique=True, min_size=1, max_size=25).map(
    lambda numbers: [Cell(f"c{n}", "m", "ddp", (), "current", "cpu") for n in numbers]
)


@given(CELLS, st.data())
def test_parts_are_disjoint_complete_and_balanced(cells: list[Cell], data: Any) -> None:
    count = data.draw(st.integers(1, len(cells)))
    seconds = {cell: data.draw(st.sampled_from([0.1, 1.0, 2.0, 30.0])) for cell in cells}
    parts = [select_shard(cells, (number, count), seconds) for number in range(1, count + 1)]
    assert sorted(c.case for part in parts for c in part) == sorted(c.case for c in cells)
    loads = [sum(seconds[cell] for cell in part) for part in parts]
    assert max(loads) - min(loads) <= max(seconds.values()) + 1e-9
    shuffled = data.draw(st.permutations(cells))
    for number, part in enumerate(parts, 1):
        assert set(select_shard(shuffled, (number, count), seconds)) == set(part), (
            "another order gives the same shards"
        )


@pytest.mark.parametrize("text", ["0/8", "9/8", "2", "2/", "a/b", "1/0", "-1/2", "1.5/2", ""])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="PART/PARTS"):
        parse_shard(text)


def test_more_parts_than_cells_are_refused() -> None:
    cell = Cell("c", "m", "ddp", (), "current", "cpu")
    with pytest.raises(ConfigError, match="only 1 cells"):
        select_shard([cell], parse_shard("1/2") or (1, 1), {cell: 1.0})


def test_session_has_its_part_of_the_selection() -> None:
    texts = ["case=fsdp-generate,fsdp-uniform-dtype", "hardware=cpu"]
    whole = session.prepare(texts, build_stacks=False)
    parts = [session.prepare([*texts, f"shard={n}/2"], build_stacks=False) for n in (1, 2)]
    keys = [[plan.cell.key for plan in each.plans] for each in (whole, *parts)]
    assert sorted(keys[0]) == sorted(keys[1] + keys[2]) and keys[1] and keys[2]


def test_variants_that_are_right_for_the_selection_are_right_for_its_shards() -> None:
    """The shard whose cases have none of them ended with "unknown variant": half of the run could
    not be made."""
    texts = ["case=train-step,ddp-ready-once", "model=qwen1.5-0.5b", "strategy=ddp", "hardware=cpu"]

    def variants(*more: str) -> dict[str, list[str]]:
        found = session.prepare([*texts, *more], build_stacks=False).plans
        return {plan.cell.case: [variant.variant for variant in plan.variants] for plan in found}

    one, two = (variants("variants=[unfixed,no-check*]", f"shard={number}/2") for number in (1, 2))
    assert one | two == {
        "train-step": ["control"],
        "ddp-ready-once": ["unfixed", "no-checkpointing"],
    }
    assert len(one) == len(two) == 1
    with pytest.raises(ConfigError, match="unknown variant 'unfxed'"):
        variants("variants=[unfxed]", "shard=1/2")
