"""The searches: within their number of probes, and never a boundary in the wrong place, only a wider one."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.search.releases import (
    NO,
    YES,
    Boundary,
    Label,
    bisect,
    default_samples,
    find_culprits,
    repeats_for,
    sample,
    version_map,
)

LABELS = st.sampled_from(["passed", "reproduced", "other_failure: KeyError"])
MAYBE = st.sampled_from([NO, YES, None])


def log2(value: float) -> int:
    return max(0, math.ceil(math.log2(value)))


# -- bisection


@given(st.integers(2, 400).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))))
def test_monotone_history_is_found_within_its_probes(case: tuple[int, int]) -> None:
    count, first_bad = case
    found = bisect(count, lambda i: YES if i >= first_bad else NO)
    assert (found.status, found.boundary) == ("found", Boundary(first_bad - 1, first_bad))
    assert found.boundary is not None and found.boundary.exact
    assert len(found.asked) <= log2(count) + 2
    assert len(set(found.asked)) == len(found.asked)


@given(st.lists(st.sampled_from([NO, YES]), min_size=0, max_size=120))
def test_any_history_gives_a_change_that_is_there(middle: list[str]) -> None:
    history = [NO, *middle, YES]
    found = bisect(len(history), history.__getitem__)
    assert found.boundary is not None and found.boundary.exact
    assert (history[found.boundary.before], history[found.boundary.after]) == (NO, YES)
    assert len(found.asked) <= log2(len(history)) + 2


@given(st.lists(MAYBE, min_size=0, max_size=80))
def test_unknown_points_widen_the_boundary_and_never_move_it(middle: list[str | None]) -> None:
    history = [NO, *middle, YES]
    found = bisect(len(history), history.__getitem__)
    edge = found.boundary
    assert edge is not None and (history[edge.before], history[edge.after]) == (NO, YES)
    assert edge.unprobed == ()
    assert list(edge.unknown) == list(range(edge.before + 1, edge.after))
    assert all(history[i] is None for i in edge.unknown)


@given(st.integers(3, 200), st.data())
def test_a_block_of_unknown_releases_at_the_edge_leaves_an_honest_range(count: int, data: st.DataObject) -> None:
    first_bad = data.draw(st.integers(1, count - 1))
    block = set(data.draw(st.sets(st.integers(1, max(1, count - 2)))))
    found = bisect(count, lambda i: None if i in block and 0 < i < count - 1 else (YES if i >= first_bad else NO))
    assert found.boundary is not None
    assert found.boundary.before < first_bad <= found.boundary.after


@given(st.lists(MAYBE, min_size=5, max_size=80), st.integers(2, 12))
def test_a_spent_budget_is_said(middle: list[str | None], budget: int) -> None:
    history = [NO, *middle, YES]
    found = bisect(len(history), history.__getitem__, max_probes=budget)
    assert len(found.asked) <= budget
    edge = found.boundary
    assert edge is not None and (history[edge.before], history[edge.after]) == (NO, YES)
    assert sorted(edge.unknown + edge.unprobed) == list(range(edge.before + 1, edge.after))


@given(st.lists(MAYBE, min_size=1, max_size=60), st.integers(0, 20))
def test_an_interrupted_bisection_resumes_and_asks_nothing_twice(middle: list[str | None], stop: int) -> None:
    history = [NO, *middle, YES]
    whole = bisect(len(history), history.__getitem__)
    stored = {i: history[i] for i in whole.asked[:stop]}
    resumed = bisect(len(history), history.__getitem__, known=stored)
    assert resumed.boundary == whole.boundary
    assert not set(resumed.asked) & set(stored)


@pytest.mark.parametrize(
    ("history", "status"),
    [
        ([NO], "too-few"),
        ([NO, NO, NO], "identical"),
        ([YES, NO, YES], "identical"),
        ([YES, NO, NO], "swapped"),
        ([None, NO, YES], "endpoint-unknown"),
        ([NO, NO, None], "endpoint-unknown"),
    ],
)
def test_endpoints_are_verified_first(history: list[str | None], status: str) -> None:
    found = bisect(len(history), history.__getitem__)
    assert (found.status, found.boundary) == (status, None)
    assert set(found.asked) <= {0, len(history) - 1}


# -- flaky points


def test_flaky_errors_are_as_rare_as_promised() -> None:
    rng, wrong, rate = random.Random(7), 0, 0.3
    for _ in range(400):
        first_bad, count = rng.randrange(1, 64), 64
        fired = max(1, sum(rng.random() < rate for _ in range(20)))
        repeats = repeats_for(fired, 20)

        def probe(index: int, bad: int = first_bad, repeats: int = repeats) -> Label | None:
            return YES if index >= bad and any(rng.random() < rate for _ in range(repeats)) else NO

        found = bisect(count, probe, confirm=probe)
        wrong += found.boundary is None or found.boundary.after != first_bad
    assert wrong <= 20  # about six points on a path, each missed with about 1 %


def test_a_good_point_that_fires_when_confirmed_sends_the_search_back() -> None:
    history = [NO, NO, YES, YES, YES, YES, YES, YES]
    seen: list[int] = []

    def probe(index: int) -> Label | None:  # index 3 looks good at first
        seen.append(index)
        return NO if index == 3 and seen.count(3) == 1 else history[index]

    found = bisect(len(history), probe, confirm=probe)
    assert found.boundary == Boundary(1, 2)


@pytest.mark.parametrize(
    ("fired", "launches", "least", "most"), [(5, 5, 1, 1), (1, 1, 1, 1), (9, 10, 2, 4), (1, 20, 80, 100)]
)
def test_repeats_follow_the_measured_rate(fired: int, launches: int, least: int, most: int) -> None:
    assert least <= repeats_for(fired, launches) <= most


def test_repeats_need_a_firing() -> None:
    with pytest.raises(ValueError, match="reproduced at least once"):
        repeats_for(0, 10)


# -- version maps


@given(st.lists(LABELS, min_size=1, max_size=150), st.integers(1, 40))
def test_a_map_stays_within_its_probes_and_says_the_rest(history: list[str], spread: int) -> None:
    count = len(history)
    found = version_map(count, history.__getitem__, samples=spread)
    assert len(found.asked) <= spread + len(found.boundaries) * log2(count / min(spread, count))
    assert sorted([*found.answers, *found.unprobed]) == list(range(count))
    for edge in found.boundaries:
        assert edge.exact and history[edge.before] != history[edge.after]
    for segment in found.segments:
        assert {history[i] for i in segment.probed} == {segment.label}
        assert (segment.first, segment.last) == (segment.probed[0], segment.probed[-1])


@given(st.lists(st.one_of(LABELS, st.none()), min_size=1, max_size=120), st.integers(1, 30))
def test_a_map_riddled_with_unknowns_is_never_wrong(history: list[str | None], spread: int) -> None:
    found = version_map(len(history), history.__getitem__, samples=spread)
    for edge in found.boundaries:
        assert None not in (history[edge.before], history[edge.after])
        assert history[edge.before] != history[edge.after]
        assert edge.unprobed == () and all(history[i] is None for i in edge.unknown)
    assert all(history[i] is None for i in found.unknown)
    for first, second in pairwise(found.segments):
        assert first.last < second.first and first.label != second.label


@given(st.lists(st.one_of(LABELS, st.none()), min_size=1, max_size=100))
def test_an_exhaustive_map_leaves_nothing_out(history: list[str | None]) -> None:
    found = version_map(len(history), history.__getitem__, exhaustive=True)
    assert found.unprobed == () and len(found.asked) == len(history)
    flips = [i for i in range(1, len(history)) if None not in history[i - 1 : i + 1] and history[i - 1] != history[i]]
    assert {edge.after for edge in found.boundaries if edge.exact} == set(flips)


@given(st.integers(2, 300), st.data())
def test_one_change_is_always_found_when_both_ends_are_probed(count: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(1, count - 1))
    found = version_map(count, lambda i: "reproduced" if i >= first else "passed")
    assert [(edge.before, edge.after) for edge in found.boundaries] == [(first - 1, first)]


@given(st.lists(LABELS, min_size=2, max_size=80), st.integers(2, 10), st.integers(0, 30))
def test_a_stored_probe_is_never_repeated(history: list[str], spread: int, stop: int) -> None:
    whole = version_map(len(history), history.__getitem__, samples=spread)
    stored = {i: history[i] for i in whole.asked[:stop]}
    again = version_map(len(history), history.__getitem__, samples=spread, known=stored)
    assert not set(again.asked) & set(stored)
    assert set(again.boundaries) >= set(whole.boundaries)


@given(st.integers(1, 500), st.integers(1, 60))
def test_spread_points_are_few_even_and_hold_the_newest(count: int, spread: int) -> None:
    points = sample(count, spread)
    assert points == sorted(set(points)) and len(points) <= spread and points[-1] == count - 1
    widest = 2 ** log2(count / min(spread, count))
    assert all(after - before <= widest for before, after in pairwise(points))
    assert points[0] < widest
    assert sample(count, default_samples(count))[0] == 0


# -- guilty packages


@given(
    st.integers(1, 14).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1, max_size=4)))
)
def test_the_guilty_set_of_a_monotone_cause_is_exact(case: tuple[int, set[int]]) -> None:
    count, cause = case
    items = [f"p{i}" for i in range(count)]
    wanted = {f"p{i}" for i in cause}
    asked: list[frozenset[str]] = []
    found = find_culprits(items, lambda taken: asked.append(taken) or (YES if wanted <= taken else NO))  # type: ignore[func-returns-value]
    assert set(found.members or ()) == wanted and found.unproven == ()
    if len(cause) == 1:
        assert len(asked) == len(set(asked)) <= 2 * log2(count) + 3


@given(st.integers(1, 8), st.randoms(use_true_random=False))
def test_a_guilty_set_always_fires_and_what_is_unproven_is_said(count: int, rng: random.Random) -> None:
    items = [f"p{i}" for i in range(count)]
    answers: dict[frozenset[str], Label | None] = {frozenset(items): YES, frozenset(): NO}
    found = find_culprits(items, lambda taken: answers.setdefault(taken, rng.choice([YES, NO, None])))
    assert found.members is not None
    members = frozenset(found.members)
    assert answers[members] == YES
    assert all(answers[members - {item}] == NO for item in members - set(found.unproven))
    assert all(answers.get(members - {item}) is None for item in found.unproven)


def test_no_set_is_guilty_when_all_packages_together_do_not_fail() -> None:
    assert find_culprits(["a", "b"], lambda taken: NO).members is None


def test_the_good_stack_failing_by_itself_has_no_guilty_package() -> None:
    assert find_culprits(["a", "b"], lambda taken: YES).members == ()
