"""Searches stay within their number of probes; without enough probes a boundary is wider, never wrong."""

from __future__ import annotations

import math
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.search.algorithms import (
    Boundary,
    Side,
    Trail,
    bisect,
    boundaries,
    ddmin,
    find_culprits,
    labels_of,
    least,
    repeats_for,
    version_map,
)  # fmt: skip

GOOD, BAD, UNKNOWN = Side.GOOD, Side.BAD, Side.UNKNOWN
SIDES = st.sampled_from([GOOD, BAD, UNKNOWN])
LABELS = st.sampled_from(["passed", "reproduced", "other_failure: KeyError", None])
NAMES = "abcdefghij"


def log2(value: float) -> int:
    return max(0, math.ceil(math.log2(value)))


class Probe:
    """Answers from a function, once each; ``asked`` in order."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[Any] = []

    def __call__(self, question: Any) -> Any:
        assert question not in self.asked, f"asked twice: {question}"
        self.asked.append(question)
        return self.answer(question)


def bisected(history: list[Side], **how: Any) -> tuple[Boundary, Trail[int, Side]]:
    last = len(history) - 1
    trail = Trail(Probe(history.__getitem__), {0: GOOD, last: BAD}, **how)
    found = bisect(trail, 0, last)
    assert found is not None and (history[found.before], history[found.after]) == (GOOD, BAD)
    assert all(history[i] is UNKNOWN for i in found.unknown)
    assert sorted(found.unknown + found.unprobed) == list(range(found.before + 1, found.after))
    return found, trail


# -- bisection


@given(st.integers(2, 400).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))))
def test_bisect_monotone_history_is_exact_within_its_probes(case: tuple[int, int]) -> None:
    count, first_bad = case
    found, trail = bisected([GOOD] * first_bad + [BAD] * (count - first_bad))
    assert found == Boundary(first_bad - 1, first_bad) and found.exact
    assert len(trail.answers) <= log2(count) + 2


@given(st.lists(SIDES, max_size=80) | st.lists(st.sampled_from([GOOD, BAD]), max_size=120), st.integers(2, 12))
def test_bisect_any_history_gives_a_real_change(middle: list[Side], most: int) -> None:
    _, limited = bisected([GOOD, *middle, BAD], max_probes=most)
    assert len(limited.answers) <= most and (limited.ended is None or len(limited.answers) == most)
    found, trail = bisected([GOOD, *middle, BAD])
    assert found.unprobed == ()
    assert UNKNOWN in middle or (found.exact and len(trail.answers) <= log2(len(middle) + 2) + 2)


def test_bisect_confirm_continues_before_a_flaky_good_point() -> None:
    history = [GOOD, GOOD, BAD, BAD, BAD, BAD, BAD, BAD]
    trail = Trail(lambda at: GOOD if at == 3 else history[at], {0: GOOD, 7: BAD})  # 3 looks good at first
    assert bisect(trail, 0, 7, confirm=history.__getitem__) == Boundary(1, 2)
    assert bisect(Trail(lambda at: GOOD, {0: GOOD, 2: BAD}), 0, 2, confirm=lambda at: BAD) is None


def test_bisect_flaky_errors_are_rare() -> None:
    rng, wrong, rate = random.Random(7), 0, 0.3
    for _ in range(400):
        first_bad, count = rng.randrange(1, 64), 64
        reproductions = max(1, sum(rng.random() < rate for _ in range(20)))
        repeats = repeats_for(reproductions, 20)

        def probe(index: int, bad: int = first_bad, repeats: int = repeats) -> Side:
            return BAD if index >= bad and any(rng.random() < rate for _ in range(repeats)) else GOOD

        found = bisect(Trail(probe, {0: GOOD, count - 1: BAD}), 0, count - 1, confirm=probe)
        wrong += found is None or found.after != first_bad
    assert wrong <= 20  # about six points on a path, each missed with about 1 %


# -- version maps


def mapped(history: list[tuple[Any, ...]], samples: int = 8, **how: Any) -> tuple[Trail[int, Any], Probe]:
    names = "ab"[: len(history[0])]
    probe = Probe(lambda at: dict(zip(names, history[at])))
    trail: Trail[int, Any] = Trail(probe, **how)
    version_map(trail, len(history), names, samples)
    return trail, probe


@given(st.lists(st.tuples(LABELS, LABELS), min_size=1, max_size=100), st.integers(2, 30))
def test_version_map_contains_only_probed_answers(history: list[tuple[str | None, str | None]], samples: int) -> None:
    trail, probe = mapped(history, samples)
    assert len(set(probe.asked)) == len(probe.asked)
    for variant, side in (("a", 0), ("b", 1)):
        labels = labels_of(trail, variant)
        assert all(history[i][side] == label for i, label in labels.items())
        for edge in boundaries(labels):
            one, other = history[edge.before][side], history[edge.after][side]
            assert None not in (one, other) and one != other
            assert edge.unprobed == () and all(history[i][side] is None for i in edge.unknown)


@given(st.lists(st.sampled_from("xyz"), min_size=2, max_size=150), st.integers(2, 40))
def test_version_map_stays_within_its_probes(history: list[str], samples: int) -> None:
    trail, probe = mapped([(label,) for label in history], samples)
    edges = boundaries(labels_of(trail, "a"))
    gap = math.ceil((len(history) - 1) / (samples - 1))
    assert len(probe.asked) <= samples + len(edges) * log2(max(1, gap))
    assert all(edge.exact for edge in edges)


def test_version_map_limit_counts_all_variants() -> None:
    trail, probe = mapped([(i // 7 % 2, i // 5 % 2) for i in range(200)], max_probes=12)
    assert len(probe.asked) == 12 and trail.ended is not None
    assert len(mapped([("passed", None)] * 100, 4)[1].asked) == 4


# -- sets and values


@st.composite
def monotone(draw: st.DrawFn) -> tuple[list[str], list[frozenset[str]]]:
    """Things, and some groups of them: the failure occurs where one whole group is there."""
    things = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=10))
    groups = draw(st.lists(st.frozensets(st.sampled_from(things or ["-"]), max_size=4), min_size=1, max_size=3))
    return things, [group & frozenset(things) for group in groups]


@given(monotone())
def test_ddmin_of_a_monotone_failure_is_one_group(drawn: tuple[list[str], list[frozenset[str]]]) -> None:
    things, groups = drawn
    trail = Trail(Probe(lambda kept: any(group <= set(kept) for group in groups)))
    found = ddmin(things, trail.ask)
    assert frozenset(found) in groups and list(found) == [thing for thing in things if thing in found]


@given(st.integers(1, 8), st.randoms(use_true_random=False))
def test_ddmin_of_any_failure_is_one_minimal(count: int, rng: random.Random) -> None:
    answers: dict[tuple[int, ...], bool] = {}
    found = ddmin(range(count), lambda kept: answers.setdefault(kept, len(kept) == count or rng.choice([True, False])))
    assert answers.get(found, len(found) == count)
    assert not any(answers[tuple(x for x in found if x != thing)] for thing in found)


@given(st.integers(1, 200), st.data())
def test_least_has_a_lower_neighbour_without_the_failure(count: int, data: st.DataObject) -> None:
    fails = [*data.draw(st.lists(st.booleans(), min_size=count - 1, max_size=count - 1)), True]
    probe = Probe(fails.__getitem__)
    found = least(range(count), lambda value: value == count - 1 or probe(value))
    assert fails[found] and (found == 0 or not fails[found - 1])
    assert len(probe.asked) <= 2 * count.bit_length() and probe.asked[:1] == [0][: count - 1]


@given(st.integers(1, 14).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=4))))
def test_find_culprits_of_a_monotone_cause_is_exact(case: tuple[int, set[int]]) -> None:
    count, cause = case
    wanted = {f"p{i}" for i in cause}
    probe = Probe(lambda taken: BAD if wanted <= taken else GOOD)
    found = find_culprits([f"p{i}" for i in range(count)], probe)
    assert set(found.members or ()) == wanted and found.unproven == ()
    assert len(cause) != 1 or len(probe.asked) <= 2 * log2(count) + 3


@given(st.integers(1, 8), st.randoms(use_true_random=False))
def test_find_culprits_lists_unproven_members(count: int, rng: random.Random) -> None:
    items = [f"p{i}" for i in range(count)]
    answers = {frozenset(items): BAD, frozenset[str](): GOOD}
    found = find_culprits(items, lambda taken: answers.setdefault(taken, rng.choice([GOOD, BAD, UNKNOWN])))
    members = frozenset(found.members or ())
    assert answers[members] is BAD
    assert all(answers[members - {item}] is GOOD for item in members - set(found.unproven))
    assert all(answers.get(members - {item}) in (None, UNKNOWN) for item in found.unproven)
