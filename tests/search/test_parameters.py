"""Reducing parameters and statements: minimal, no question twice, and what is known when no probes are left."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repro_matrix.search.algorithms import NoMoreProbes, Trail
from repro_matrix.search.parameters import (
    OUT,
    Config,
    Parameter,
    arguments_of,
    needed,
    reduce,
    reduce_statements,
    replaced,
)  # fmt: skip

Answers = Callable[[Config], bool | None]


def number(name: str, most: int) -> Parameter:
    return Parameter(name, most, tuple(range(1, most + 1)), number=True)


PARAMETERS = (
    Parameter("mixed", "bf16", (None, "bf16")),
    Parameter("call", "inner", ("inner", "root", "summon")),
    Parameter("wrap", "size", ("layer", "size", "none")),
    number("layers", 24),
    number("hidden", 16),
    Parameter("--n", 4, (OUT, 1, 2, 4), number=True),
)
GIVEN: Config = tuple(parameter.given for parameter in PARAMETERS)


@st.composite
def failures(draw: st.DrawFn) -> Answers:
    """A failure that needs certain values of choices and a least value of numbers; some configurations are invalid."""
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


def reduced(answer: Answers, most: int | None = None) -> tuple[Config, bool, Trail[Config, bool | None]]:
    asked: list[Config] = []

    def probe(config: Config) -> bool | None:
        assert config not in asked
        if len(asked) == most:
            raise NoMoreProbes
        asked.append(config)
        return answer(config)

    trail = Trail(probe, {GIVEN: True})
    return *reduce(PARAMETERS, trail), trail


@given(failures())
def test_reduce_result_is_minimal_and_every_choice_is_tested(answer: Answers) -> None:
    config, done, trail = reduced(answer)
    assert done and answer(config) is True
    for at, (parameter, value) in enumerate(zip(PARAMETERS, config)):
        configs = {other: replaced(config, at, other) for other in parameter.values}
        asked = {other: trail.answers[each] for other, each in configs.items() if each in trail.answers}
        if value != parameter.simplest:
            assert asked[parameter.simplest] is not True
            if parameter.number:
                assert asked[parameter.values[parameter.values.index(value) - 1]] is not True
        if not parameter.number:
            assert set(asked) == set(parameter.values)


@given(failures(), st.integers(1, 40))
def test_reduce_without_more_probes_still_fails(answer: Answers, most: int) -> None:
    _, _, asked = reduced(answer)
    config, done, trail = reduced(answer, most)
    assert answer(config) is True and done == (len(asked.answers) - 1 <= most)
    assert list(asked.answers)[: len(trail.answers)] == list(trail.answers)  # the same probes in the same order


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
    parameter: Parameter, value: Any, answers: dict[Any, Any], need: bool | None
) -> None:
    assert needed(parameter, value, answers) is need


def test_arguments_of_are_options_with_their_values() -> None:
    words = arguments_of(["train", "--lr", "1e-4", "--layers=24", "--bf16", "--sizes", "1", "2", "--n", "8"])
    assert [each.words(each.parameter.given) for each in words] == [
        ["train"], ["--lr", "1e-4"], ["--layers=24"], ["--bf16"], ["--sizes", "1", "2"], ["--n", "8"],
    ]  # fmt: skip
    values = {each.parameter.name: each.parameter.values for each in words if each.parameter.number}
    assert values == {"--layers": (OUT, 1, 2, 4, 8, 16, 24), "--n": (OUT, 1, 2, 4, 8)}
    assert words[2].words(2) == ["--layers=2"] and words[5].words(4) == ["--n", "4"] and words[2].words(OUT) == []


# -- statements

BLOCKS = '''"""Text."""
import os, sys  # two
@staticmethod
def unused():
    if True: return 1; pass
for step in range(3):
    if step == 2:
        x = 1; y = 2
    elif step == 1:
        print("one")
    else:
        print("two")
try:
    1 / 1
except (OSError, ValueError) as error:
    print(error)
else:
    y = 2
match sys.argv:
    case [first, *rest]:
        print(first, rest)
'''


def statements(text: str) -> list[str]:
    """Return the first lines of the statements, without ``pass``."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    return [ast.unparse(node).splitlines()[0] for node in nodes if not isinstance(node, ast.Pass)]


@settings(deadline=None)
@given(st.data())
def test_reduce_statements_keeps_needed_ones_and_valid_python(data: st.DataObject) -> None:
    every = statements(BLOCKS)
    wanted = data.draw(st.sets(st.sampled_from(every), max_size=3))
    asked: list[str] = []

    def probe(text: str) -> bool | None:
        assert ast.parse(text) and text not in asked
        asked.append(text)
        return wanted <= set(statements(text))

    text, done = reduce_statements(BLOCKS, Trail(probe))
    assert done and wanted <= set(statements(text)) and len(statements(text)) <= 5 * len(wanted)
    stopped = Trail(lambda text: wanted <= set(statements(text)), max_probes=3)
    part, done = reduce_statements(BLOCKS, stopped)
    assert wanted <= set(statements(part)) and done == (stopped.ended is None)


def test_reduce_statements_tries_no_text_with_undefined_names() -> None:
    text = "import os\nx = os\ndef f():\n    global g\n    g = os\nprint(__file__, os, g)\n"
    asked: list[str] = []
    reduce_statements(text, Trail(lambda text: bool(asked.append(text))))
    assert asked and all("import os" in text for text in asked if "os" in text.replace("import os", ""))
    assert "import os\nprint(__file__, os, g)\n" not in asked and "" in "".join(asked)
