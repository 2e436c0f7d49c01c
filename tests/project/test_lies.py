"""Every lie that needs no ranks is caught (`make lies` plants the others, too), and the table can say NOT CAUGHT."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
from lies import PURE
from lies.lie import Bench, Lie, tried


@pytest.mark.parametrize("bench", PURE, ids=[bench.name for bench in PURE])
def test_every_lie_is_caught(bench: Bench) -> None:
    assert [(row.lie.name, row.said) for row in tried(bench) if not row.caught] == []


@pytest.mark.ranks
@pytest.mark.slow  # the gate has a dozen trainings that are not what they say: test_training_ranks
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs the stack `current` (torch)")
def test_some_of_those_that_real_ranks_tell() -> None:
    from lies.launched import RANKS

    some = ("NO_SHARD as FSDP", "never reads", "exec with an installed", "a script changed, and the run resumed")
    few = dataclasses.replace(RANKS, lies=tuple(lie for lie in RANKS.lies if any(name in lie.name for name in some)))
    assert len(few.lies) == len(some)
    assert [(row.lie.name, row.said) for row in tried(few) if not row.caught] == []


def test_what_is_not_caught_is_said() -> None:
    lies = (Lie("seen", "x", "wrong", "^refused"), Lie("believed", "x", "right", "^refused"))
    bench = Bench(
        "b", "h", "^good", lambda plants: ["refused" if plant == "wrong" else "good" for plant in plants], lies
    )
    assert [(row.lie.name, row.caught) for row in tried(bench)] == [("seen", True), ("believed", False)]
    assert [row.lie.name for row in tried(bench, "bel")] == ["believed"] and tried(bench, "none") == []


def test_a_bench_that_shows_nothing_is_refused() -> None:
    lie = Lie("anything", "x", "wrong", "good|refused")
    with pytest.raises(AssertionError, match="the honest one is called"):
        tried(Bench("b", "h", "^good", lambda plants: ["good" for _ in plants], (lie,)))
    with pytest.raises(AssertionError, match="the honest one is not"):
        tried(Bench("b", "h", "^good", lambda plants: ["refused" for _ in plants], (lie,)))


def test_lies_have_names_of_their_own() -> None:
    from lies.launched import LAUNCHED

    names = [lie.name for bench in (*PURE, *LAUNCHED) for lie in bench.lies]
    assert len(names) == len(set(names)) >= 120
