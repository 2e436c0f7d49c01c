"""Searches stay within their number of probes; without enough probes a result is wider or larger,
never wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.search.algorithms import (
    Boundary,
    ChangeSide,
    NoMoreProbes,
    Trail,
    bisect,
    boundaries,
    ddmin,
    find_culprits,
    labels_of,
    least,
    version_map,
)
from repro_matrix.search.parameters import (
    OUT,
    Config,
    Setting,
    arguments_of,
    needed,
    reduce,
    with_value,
)

GOOD, BAD, UNKNOWN = ChangeSide.GOOD, ChangeSide.BAD, ChangeSide.UNKNOWN
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


def bisected(history: list[ChangeSide], **how: Any) -> tuple[Boundary, Trail[int, ChangeSide]]:
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


@given(
    st.lists(SIDES, max_size=80) | st.lists(st.sampled_from([GOOD, BAD]), max_size=120),
    st.integers(2, 12),
)
def test_bisect_any_history_gives_a_real_change(middle: list[ChangeSide], most: int) -> None:
    _, limited = bisected([GOOD, *middle, BAD], max_probes=most)
    assert len(limited.answers) <= most and (limited.ended is None or len(limited.answers) == most)
    found, trail = bisected([GOOD, *middle, BAD])
    assert found.unprobed == ()
    assert UNKNOWN in middle or (found.exact and len(trail.answers) <= log2(len(middle) + 2) + 2)


def test_bisect_confirm_continues_before_a_flaky_good_point() -> None:
    history = [GOOD, GOOD, BAD, BAD, BAD, BAD, BAD, BAD]
    trail = Trail(
        lambda at: GOOD if at == 3 else history[at], {0: GOOD, 7: BAD}
    )  # 3 looks good at first
    assert bisect(trail, 0, 7, confirm=history.__getitem__) == Boundary(1, 2)
    assert bisect(Trail(lambda at: GOOD, {0: GOOD, 2: BAD}), 0, 2, confirm=lambda at: BAD) is None


# -- version maps


def mapped(
    history: list[tuple[Any, ...]], samples: int = 8, **how: Any
) -> tuple[Trail[int, Any], Probe]:
    names = "ab"[: len(history[0])]
    probe = Probe(lambda at: dict(zip(names, history[at])))
    trail: Trail[int, Any] = Trail(probe, **how)
    version_map(trail, len(history), names, samples)
    return trail, probe


@given(st.lists(st.tuples(LABELS, LABELS), min_size=1, max_size=100), st.integers(2, 30))
def test_version_map_contains_only_probed_answers(
    history: list[tuple[str | None, str | None]], samples: int
) -> None:
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
    assert len(probe.asked) == 12 and probe.asked[:3] == [0, 199, 85] and trail.ended is not None
    assert len(mapped([("passed", None)] * 100, 4)[1].asked) == 4


# -- sets and values


@st.composite
def monotone(draw: st.DrawFn) -> tuple[list[str], list[frozenset[str]]]:
    """Things, and some groups of them: the failure occurs where one whole group is there."""
    things = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=10))
    groups = draw(
        st.lists(
            st.frozensets(st.sampled_from(things or ["-"]), max_size=4), min_size=1, max_size=3
        )
    )
    return things, [group & frozenset(things) for group in groups]


@given(monotone())
def test_ddmin_of_a_monotone_failure_is_one_group(
    drawn: tuple[list[str], list[frozenset[str]]],
) -> None:
    things, groups = drawn
    trail = Trail(Probe(lambda kept: any(group <= set(kept) for group in groups)))
    found = ddmin(things, trail.ask)
    assert frozenset(found) in groups and list(found) == [
        thing for thing in things if thing in found
    ]


@given(st.integers(1, 8), st.randoms(use_true_random=False))
def test_ddmin_of_any_failure_is_one_minimal(count: int, rng: random.Random) -> None:
    answers: dict[tuple[int, ...], bool] = {}
    found = ddmin(
        range(count),
        lambda kept: answers.setdefault(kept, len(kept) == count or rng.choice([True, False])),
    )
    assert answers.get(found, len(found) == count)
    assert not any(answers[tuple(x for x in found if x != thing)] for thing in found)


@given(st.integers(1, 200), st.data())
def test_least_has_a_lower_neighbour_without_the_failure(count: int, data: st.DataObject) -> None:
    fails = [*data.draw(st.lists(st.booleans(), min_size=count - 1, max_size=count - 1)), True]
    probe = Probe(fails.__getitem__)
    found = least(range(count), lambda value: value == count - 1 or probe(value))
    assert fails[found] and (found == 0 or not fails[found - 1])
    assert len(probe.asked) <= 2 * count.bit_length() and probe.asked[:1] == [0][: count - 1]


@given(
    st.integers(1, 14).flatmap(
        lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=4))
    )
)
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
    found = find_culprits(
        items, lambda taken: answers.setdefault(taken, rng.choice([GOOD, BAD, UNKNOWN]))
    )
    members = frozenset(found.members or ())
    assert answers[members] is BAD
    assert all(answers[members - {item}] is GOOD for item in members - set(found.unproven))
    assert all(answers.get(members - {item}) in (None, UNKNOWN) for item in found.unproven)


# -- parameters: minimal, and what is known when no probes are left

Answers = Callable[[Config], bool | None]


def number(name: str, most: int) -> Setting:
    return Setting(name, most, tuple(range(1, most + 1)), number=True)


PARAMETERS = (
    Setting("mixed", "bf16", (None, "bf16")),
    Setting("call", "inner", ("inner", "root", "summon")),
    Setting("wrap", "size", ("layer", "size", "none")),
    number("layers", 24),
    number("hidden", 16),
    Setting("--n", 4, (OUT, 1, 2, 4), number=True),
)
GIVEN: Config = tuple(parameter.given for parameter in PARAMETERS)


@st.composite
def failures(draw: st.DrawFn) -> Answers:
    """A failure that needs certain values of choices and a least value of numbers; some
    configurations are invalid."""
    rules: list[Callable[[Any], bool]] = []
    for parameter in PARAMETERS:
        if not draw(st.booleans()):
            rules.append(lambda value: True)
        elif parameter.number:
            floor = draw(st.sampled_from(parameter.values))
            values = parameter.values[parameter.values.index(floor) :]
            rules.append(lambda value, values=values: value in values)  # type: ignore[misc]
        else:
            allowed = draw(st.sets(st.sampled_from(parameter.values))) | {parameter.given}
            rules.append(lambda value, allowed=allowed: value in allowed)  # type: ignore[misc]
    odd = draw(st.booleans())

    def answer(config: Config) -> bool | None:
        if odd and config[4] != 1 and config[4] % 2:  # an odd hidden size is no model
            return None
        return all(rule(value) for rule, value in zip(rules, config))

    return answer


def reduced(
    answer: Answers, most: int | None = None
) -> tuple[Config, bool, Trail[Config, bool | None]]:
    asked: list[Config] = []

    def probe(config: Config) -> bool | None:
        assert config not in asked
        if len(asked) == most:
            raise NoMoreProbes
        asked.append(config)
        return answer(config)

    trail = Trail(probe, {GIVEN: True})
    return reduce(PARAMETERS, trail), trail.ended is None, trail


@given(failures(), st.integers(1, 40))
def test_reduce_result_is_minimal_and_every_choice_is_tested(answer: Answers, most: int) -> None:
    config, done, trail = reduced(answer)
    assert done and answer(config) is True
    early, done, limited = reduced(answer, most)
    assert answer(early) is True and done == (len(trail.answers) - 1 <= most)
    assert list(trail.answers)[: len(limited.answers)] == list(
        limited.answers
    )  # the same probes in the same order
    for at, (parameter, value) in enumerate(zip(PARAMETERS, config)):
        configs = {other: with_value(config, at, other) for other in parameter.values}
        asked = {
            other: trail.answers[each] for other, each in configs.items() if each in trail.answers
        }
        if value != parameter.simplest:
            assert asked[parameter.simplest] is not True
            if parameter.number:
                assert asked[parameter.values[parameter.values.index(value) - 1]] is not True
        if not parameter.number:
            assert set(asked) == set(parameter.values)


@pytest.mark.parametrize(
    ("parameter", "value", "answers", "need"),
    [
        (number("n", 3), 2, {1: False}, True),
        (number("n", 3), 1, {}, False),
        (PARAMETERS[1], "inner", {"root": False, "summon": False}, True),
        (PARAMETERS[1], "inner", {"root": False, "summon": True}, False),
        (PARAMETERS[1], "inner", {"root": False, "summon": None}, None),
    ],
)
def test_needed_follows_from_answers(
    parameter: Setting, value: Any, answers: dict[Any, Any], need: bool | None
) -> None:
    assert needed(parameter, value, answers) is need


def test_arguments_of_are_options_with_their_values() -> None:
    words = arguments_of(
        ["train", "--lr", "1e-4", "--layers=24", "--bf16", "--sizes", "1", "2", "--n", "8"]
    )
    assert [each.words(each.parameter.given) for each in words] == [
        ["train"],
        ["--lr", "1e-4"],
        ["--layers=24"],
        ["--bf16"],
        ["--sizes", "1", "2"],
        ["--n", "8"],
    ]
    values = {each.parameter.name: each.parameter.values for each in words if each.parameter.number}
    assert values == {"--layers": (OUT, 1, 2, 4, 8, 16, 24), "--n": (OUT, 1, 2, 4, 8)}
    assert (
        words[2].words(2) == ["--layers=2"]
        and words[5].words(4) == ["--n", "4"]
        and words[2].words(OUT) == []
    )
