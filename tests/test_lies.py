"""Every lie that needs no ranks is caught (`make lies` plants the others, too), and the table can say NOT CAUGHT."""

from __future__ import annotations

import pytest
from lies import PURE
from lies.lie import Bench, Lie, tried


@pytest.mark.parametrize("bench", PURE, ids=[bench.name for bench in PURE])
def test_every_lie_is_caught(bench: Bench) -> None:
    assert [(row.lie.name, row.said) for row in tried(bench) if not row.caught] == []


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
    names = [lie.name for bench in PURE for lie in bench.lies]
    assert len(names) == len(set(names)) >= 80
