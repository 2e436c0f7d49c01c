"""Shrinking: the searches are minimal, ask nothing twice, keep to a budget, and go on from stored answers alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.search.reduce import parameters as knobbing
from repro_matrix.search.reduce.parameters import Config, Knob
from repro_matrix.search.reduce.search import Answer, Spent, Trail, least, minimal
from repro_matrix.search.reduce.tree import Kept, Pruned, Tree, prune

NAMES = "abcdefghij"


class Oracle:
    """Answers from a function, and complains when it is asked the same twice."""

    def __init__(self, says: Callable[..., Answer]) -> None:
        self.says = says
        self.asked: list[object] = []

    def __call__(self, question: object) -> tuple[Answer, int]:
        assert question not in self.asked, f"asked twice: {question}"
        self.asked.append(question)
        return self.says(question), 1


# -- sets of things


@st.composite
def monotone(draw: st.DrawFn) -> tuple[list[str], list[frozenset[str]]]:
    """Things, and some groups of them: it fires where one whole group is there."""
    things = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=10))
    groups = draw(st.lists(st.frozensets(st.sampled_from(things or ["-"]), max_size=4), min_size=1, max_size=3))
    return things, [group & frozenset(things) for group in groups]


@given(monotone())
def test_what_is_left_fires_and_nothing_of_it_can_be_left_out(made: tuple[list[str], list[frozenset[str]]]) -> None:
    things, groups = made
    trail: Trail[tuple[str, ...]] = Trail(Oracle(lambda kept: any(group <= set(kept) for group in groups)))
    found = minimal(things, trail.fires)
    assert frozenset(found) in groups  # of a monotone failure a minimal set is one of its groups, whole
    assert list(found) == [thing for thing in things if thing in found]  # in their own order


@given(st.integers(1, 8), st.randoms(use_true_random=False))
def test_one_minimal_whatever_the_failure_is(count: int, random: object) -> None:
    """Answers that follow no rule, some of them unknown: what is left fires, and without any one thing it does not."""
    answers: dict[frozenset[int], Answer] = {}

    def says(kept: tuple[int, ...]) -> Answer:
        choices = [True, False, None]
        return answers.setdefault(frozenset(kept), len(kept) == count or random.choice(choices))  # type: ignore[attr-defined]

    trail: Trail[tuple[int, ...]] = Trail(Oracle(says))
    found = minimal(range(count), trail.fires)
    assert says(found) is True
    assert all(trail.answers[tuple(x for x in found if x != thing)] is not True for thing in found)


@given(st.integers(1, 200), st.data())
def test_least_stands_beside_one_that_does_not_fire(count: int, data: st.DataObject) -> None:
    says = [*data.draw(st.lists(st.booleans(), min_size=count - 1, max_size=count - 1)), True]
    trail: Trail[int] = Trail(Oracle(lambda value: says[value]))
    found = least(range(count), lambda value: value == count - 1 or trail.fires(value))
    assert says[found] and (found == 0 or not says[found - 1])
    assert trail.cost <= 2 * count.bit_length()
    assert count == 1 or next(iter(trail.answers)) == 0  # from below


# -- knobs


def number(name: str, given_: int, least_: int = 1) -> Knob:
    return Knob(name, given_, least_, tuple(range(least_, 2 * given_ + 1)), ordered=True)


FEW = (
    Knob("mixed", "bf16", None, (None, "bf16")),
    Knob("call", "inner", "inner", ("inner", "root", "summon")),
    Knob("wrap", "size", "layer", ("layer", "size", "none")),
    number("layers", 24),
    number("hidden", 16),
    number("ranks", 2),
)


@st.composite
def failures(draw: st.DrawFn) -> Callable[[Config], Answer]:
    """One that needs certain values of choices and at least so much of numbers; some configurations are no question."""
    rules: list[Callable[[object], bool]] = []
    for knob in FEW:
        if not draw(st.booleans()):
            rules.append(lambda value: True)
        elif knob.ordered:
            floor = draw(st.integers(1, knob.given))
            top = draw(st.integers(knob.given, knob.values[-1]))
            rules.append(lambda value, floor=floor, top=top: floor <= value <= top)  # type: ignore[misc]
        else:
            allowed = draw(st.sets(st.sampled_from(knob.values))) | {knob.given}
            rules.append(lambda value, allowed=allowed: value in allowed)  # type: ignore[misc]
    odd = draw(st.booleans())

    def says(config: Config) -> Answer:
        if odd and config[4] != 1 and config[4] % 2:  # an odd hidden size is no model
            return None
        return all(rule(value) for rule, value in zip(rules, config))

    return says


GIVEN: Config = tuple(knob.given for knob in FEW)


def shrunk(says: Callable[[Config], Answer], **how: object) -> tuple[knobbing.Shrunk, Trail[Config]]:
    trail: Trail[Config] = Trail(Oracle(says), **how)  # type: ignore[arg-type]
    assert trail.ask(GIVEN) is True
    return knobbing.shrink(FEW, trail), trail


@given(failures())
def test_a_minimal_configuration_and_what_it_needs(says: Callable[[Config], Answer]) -> None:
    found, _ = shrunk(says)
    assert found.done and says(found.config) is True
    for index, (knob, each) in enumerate(zip(FEW, found.ranges)):
        value = found.config[index]
        with_ = {v: says((*found.config[:index], v, *found.config[index + 1 :])) for v in knob.values}
        assert all(each.asked[v] == with_[v] for v in each.asked)  # nothing is told that was not asked
        if value != knob.simplest:
            assert each.asked[knob.simplest] is not True  # leaving it out makes it go, and that was asked
            if knob.ordered:
                lower = knob.values[knob.values.index(value) - 1]
                assert each.asked[lower] is not True
        if knob.ordered:
            assert each.firing[0] == value and with_[each.firing[-1]] is True
            above = [v for v in knob.values if v > each.firing[-1]]
            assert not above or each.asked[above[0]] is not True
        else:
            assert set(each.asked) == set(knob.values)
            assert each.needed == all(with_[v] is False for v in knob.values if v != value) or value != knob.simplest


def test_a_failure_that_needs_nothing() -> None:
    found, trail = shrunk(lambda config: True)
    assert found.config == (None, "inner", "layer", 1, 1, 1)
    assert not any(each.needed for each in found.ranges)
    assert trail.cost <= 12


@given(failures(), st.integers(1, 40))
def test_a_budget_is_kept_and_the_same_search_goes_on(says: Callable[[Config], Answer], budget: int) -> None:
    whole, asked = shrunk(says)
    part, trail = shrunk(says, budget=budget)
    assert trail.cost <= budget and says(part.config) is True
    assert part.done == (asked.cost <= budget)
    assert list(asked.answers)[: trail.cost] == list(trail.answers)  # the same questions in the same order
    rest, more = shrunk_again(says, trail.answers)
    assert (rest.config, [r.asked for r in rest.ranges]) == (whole.config, [r.asked for r in whole.ranges])
    assert not set(more.oracle_asked) & set(trail.answers) and len(more.oracle_asked) == asked.cost - trail.cost


def shrunk_again(says: Callable[[Config], Answer], stored: dict[Config, Answer]) -> tuple[knobbing.Shrunk, Resumed]:
    oracle = Oracle(says)
    trail: Trail[Config] = Trail(oracle, answers=dict(stored))
    trail.ask(GIVEN)
    return knobbing.shrink(FEW, trail), Resumed(oracle.asked)


class Resumed:
    def __init__(self, asked: list[object]) -> None:
        self.oracle_asked = asked


def test_a_knob_without_its_own_values_is_refused() -> None:
    with pytest.raises(ValueError, match="among"):
        Knob("x", 3, 1, (1, 2), ordered=True)
    with pytest.raises(ValueError, match="ascend"):
        Knob("x", 2, 1, (2, 1), ordered=True)


# -- trees


@st.composite
def trees(draw: st.DrawFn) -> tuple[Tree, Kept]:
    """A tree, and the nodes that the failure needs (with those above them)."""
    parent = [draw(st.integers(-1, index - 1)) for index in range(draw(st.integers(1, 14)))]
    tree = Tree(parent)
    needed = set(draw(st.sets(st.integers(0, len(parent) - 1), max_size=4)))
    for node in sorted(needed, reverse=True):
        while parent[node] >= 0:
            node = parent[node]
            needed.add(node)
    return tree, frozenset(needed)


@given(trees(), st.data())
def test_a_tree_is_pruned_to_what_the_failure_needs(made: tuple[Tree, Kept], data: st.DataObject) -> None:
    tree, needed = made
    wrong = frozenset(data.draw(st.sets(st.integers(0, len(tree.parent) - 1))))  # hints may be wrong
    trail: Trail[Kept] = Trail(Oracle(lambda kept: needed <= kept))
    found = prune(tree, trail, along=lambda kept: kept & wrong, idle=lambda kept: kept & wrong)
    assert found.done and found.kept == needed
    assert found.alone == dict.fromkeys(needed, False)


@given(trees(), st.integers(0, 20))
def test_a_tree_within_a_budget(made: tuple[Tree, Kept], budget: int) -> None:
    tree, needed = made
    trail: Trail[Kept] = Trail(Oracle(lambda kept: needed <= kept), budget)
    found: Pruned = prune(tree, trail)
    assert trail.cost <= budget and needed <= found.kept == tree.closed(found.kept)
    again = prune(tree, Trail(Oracle(lambda kept: needed <= kept), answers=dict(trail.answers)))
    assert again.done and again.kept == needed


def test_no_question_after_the_budget() -> None:
    trail: Trail[int] = Trail(lambda question: (True, 2), budget=3, least=2)
    assert trail.ask(1) is True
    with pytest.raises(Spent):
        trail.ask(2)
    assert trail.ask(1) is True  # what is answered stays
