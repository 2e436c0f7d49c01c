"""Reducing parameters: minimal, no question twice, within the attempts, resumed from stored answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.search import parameters
from repro_matrix.search.parameters import Config, Parameter, Response, Spent, Trail, arguments_of, least
from repro_matrix.search.releases import ddmin

NAMES = "abcdefghij"


class Oracle:
    """Answers from a function, and complains when it is asked the same twice."""

    def __init__(self, says: Callable[..., Response]) -> None:
        self.says = says
        self.asked: list[object] = []

    def __call__(self, question: object) -> tuple[Response, int]:
        assert question not in self.asked, f"asked twice: {question}"
        self.asked.append(question)
        return self.says(question), 1


# -- sets of things


@st.composite
def monotone(draw: st.DrawFn) -> tuple[list[str], list[frozenset[str]]]:
    """Things, and some groups of them: it reproduces where one whole group is there."""
    things = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=10))
    groups = draw(st.lists(st.frozensets(st.sampled_from(things or ["-"]), max_size=4), min_size=1, max_size=3))
    return things, [group & frozenset(things) for group in groups]


@given(monotone())
def test_what_is_left_fires_and_nothing_of_it_can_be_left_out(made: tuple[list[str], list[frozenset[str]]]) -> None:
    things, groups = made
    trail: Trail[tuple[str, ...]] = Trail(Oracle(lambda kept: any(group <= set(kept) for group in groups)))
    found = ddmin(things, trail.reproduced)
    assert frozenset(found) in groups  # of a monotone failure a minimal set is one of its groups, whole
    assert list(found) == [thing for thing in things if thing in found]  # in their own order


@given(st.integers(1, 8), st.randoms(use_true_random=False))
def test_one_minimal_whatever_the_failure_is(count: int, random: object) -> None:
    """Answers that follow no rule, some of them unknown: what is left reproduces, and without any one thing it does
    not."""
    answers: dict[frozenset[int], Response] = {}

    def says(kept: tuple[int, ...]) -> Response:
        choices = [True, False, None]
        return answers.setdefault(frozenset(kept), len(kept) == count or random.choice(choices))  # type: ignore[attr-defined]

    trail: Trail[tuple[int, ...]] = Trail(Oracle(says))
    found = ddmin(range(count), trail.reproduced)
    assert says(found) is True
    assert all(trail.answers[tuple(x for x in found if x != thing)] is not True for thing in found)


@given(st.integers(1, 200), st.data())
def test_least_stands_beside_one_that_does_not_fire(count: int, data: st.DataObject) -> None:
    says = [*data.draw(st.lists(st.booleans(), min_size=count - 1, max_size=count - 1)), True]
    trail: Trail[int] = Trail(Oracle(lambda value: says[value]))
    found = least(range(count), lambda value: value == count - 1 or trail.reproduced(value))
    assert says[found] and (found == 0 or not says[found - 1])
    assert trail.cost <= 2 * count.bit_length()
    assert count == 1 or next(iter(trail.answers)) == 0  # from below


# -- parameters


def number(name: str, given_: int, least_: int = 1) -> Parameter:
    return Parameter(name, given_, least_, tuple(range(least_, 2 * given_ + 1)), ordered=True)


FEW = (
    Parameter("mixed", "bf16", None, (None, "bf16")),
    Parameter("call", "inner", "inner", ("inner", "root", "summon")),
    Parameter("wrap", "size", "layer", ("layer", "size", "none")),
    number("layers", 24),
    number("hidden", 16),
    number("ranks", 2),
)


@st.composite
def failures(draw: st.DrawFn) -> Callable[[Config], Response]:
    """One that needs certain values of choices and at least so much of numbers; some configurations are no question."""
    rules: list[Callable[[object], bool]] = []
    for parameter in FEW:
        if not draw(st.booleans()):
            rules.append(lambda value: True)
        elif parameter.ordered:
            floor = draw(st.integers(1, parameter.given))
            top = draw(st.integers(parameter.given, parameter.values[-1]))
            rules.append(lambda value, floor=floor, top=top: floor <= value <= top)  # type: ignore[misc]
        else:
            allowed = draw(st.sets(st.sampled_from(parameter.values))) | {parameter.given}
            rules.append(lambda value, allowed=allowed: value in allowed)  # type: ignore[misc]
    odd = draw(st.booleans())

    def says(config: Config) -> Response:
        if odd and config[4] != 1 and config[4] % 2:  # an odd hidden size is no model
            return None
        return all(rule(value) for rule, value in zip(rules, config))

    return says


GIVEN: Config = tuple(parameter.given for parameter in FEW)


def reduced(says: Callable[[Config], Response], **how: object) -> tuple[parameters.Reduced, Trail[Config]]:
    trail: Trail[Config] = Trail(Oracle(says), **how)  # type: ignore[arg-type]
    assert trail.ask(GIVEN) is True
    return parameters.reduce(FEW, trail), trail


@given(failures())
def test_a_minimal_configuration_and_what_it_needs(says: Callable[[Config], Response]) -> None:
    found, _ = reduced(says)
    assert found.done and says(found.config) is True
    for index, (parameter, each) in enumerate(zip(FEW, found.ranges)):
        value = found.config[index]
        with_ = {v: says((*found.config[:index], v, *found.config[index + 1 :])) for v in parameter.values}
        assert all(each.answers[v] == with_[v] for v in each.answers)  # nothing is told that was not asked
        if value != parameter.simplest:
            assert each.answers[parameter.simplest] is not True  # leaving it out makes it go, and that was asked
            if parameter.ordered:
                lower = parameter.values[parameter.values.index(value) - 1]
                assert each.answers[lower] is not True
        if parameter.ordered:
            assert each.reproducing[0] == value and with_[each.reproducing[-1]] is True
            above = [v for v in parameter.values if v > each.reproducing[-1]]
            assert not above or each.answers[above[0]] is not True
        else:
            assert set(each.answers) == set(parameter.values)
            assert (
                each.needed == all(with_[v] is False for v in parameter.values if v != value)
                or value != parameter.simplest
            )


def test_a_failure_that_needs_nothing() -> None:
    found, trail = reduced(lambda config: True)
    assert found.config == (None, "inner", "layer", 1, 1, 1)
    assert not any(each.needed for each in found.ranges)
    assert trail.cost <= 12


@given(failures(), st.integers(1, 40))
def test_a_budget_is_kept_and_the_same_search_goes_on(says: Callable[[Config], Response], budget: int) -> None:
    whole, asked = reduced(says)
    part, trail = reduced(says, max_attempts=budget)
    assert trail.cost <= budget and says(part.config) is True
    assert part.done == (asked.cost <= budget)
    assert list(asked.answers)[: trail.cost] == list(trail.answers)  # the same questions in the same order
    rest, more = reduced_again(says, trail.answers)
    assert (rest.config, [r.answers for r in rest.ranges]) == (whole.config, [r.answers for r in whole.ranges])
    assert not set(more.oracle_asked) & set(trail.answers) and len(more.oracle_asked) == asked.cost - trail.cost


def reduced_again(
    says: Callable[[Config], Response], stored: dict[Config, Response]
) -> tuple[parameters.Reduced, Resumed]:
    check = Oracle(says)
    trail: Trail[Config] = Trail(check, answers=dict(stored))
    trail.ask(GIVEN)
    return parameters.reduce(FEW, trail), Resumed(check.asked)


class Resumed:
    def __init__(self, asked: list[object]) -> None:
        self.oracle_asked = asked


def test_a_parameter_without_its_own_values_is_refused() -> None:
    with pytest.raises(ValueError, match="among"):
        Parameter("x", 3, 1, (1, 2), ordered=True)
    with pytest.raises(ValueError, match="ascend"):
        Parameter("x", 2, 1, (2, 1), ordered=True)


def test_no_question_after_the_budget() -> None:
    trail: Trail[int] = Trail(lambda question: (True, 2), max_attempts=3, least=2)
    assert trail.ask(1) is True
    with pytest.raises(Spent):
        trail.ask(2)
    assert trail.ask(1) is True  # what is answered stays


def test_arguments_are_options_with_their_values() -> None:
    words = arguments_of(["train", "--lr", "1e-4", "--layers=24", "--bf16", "--sizes", "1", "2", "--n", "8"])
    assert [word.parts for word in words] == [
        ("train",), ("--lr", "1e-4"), ("--layers=24",), ("--bf16",), ("--sizes", "1", "2"), ("--n", "8"),
    ]  # fmt: skip
    assert [word.number.values for word in words if word.number] == [(1, 2, 4, 8, 16, 24), (1, 2, 4, 8)]
    assert words[2].to_args({"value of --layers": 2}) == ["--layers=2"]
    assert words[5].to_args({"value of --n": 4}) == ["--n", "4"]
    assert words[2].to_args({"--layers": "(left out)"}) == [] and words[3].to_args({}) == ["--bf16"]
