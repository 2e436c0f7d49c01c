"""What is left of a script still parses, and is the statements that were kept and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repro_matrix.search.reduce import lines
from repro_matrix.search.reduce.lines import read
from repro_matrix.search.reduce.search import Trail
from repro_matrix.search.reduce.tree import Kept, prune

SCRIPT = '''#!/usr/bin/env python
"""Trains."""
import os, sys  # two
import json

# what it trains
TEXT = """
    spaces that are content
# no comment
"""

def helper(x):
    # says it
    print(x)
    return json.dumps(x)

@staticmethod
def unused():
    if True: return 1; pass

for step in range(3):
    if step == 2:
        data = [step]
        boom = data[step]  # <- here
    elif step == 1:
        print("one")
    else:
        helper(step)
with open(os.devnull) as f:
    text = """
  kept as it is
    """
    try:
        f.read()
        1 / 1
    except (OSError,
            ValueError) as error:
        print(error)
    finally:
        x = 1; y = 2
'''
FOLDER = Path(lines.__file__).parents[2]
FILES = [
    Path(lines.__file__),
    FOLDER / "cli" / "main.py",
    FOLDER / "launch" / "worker" / "fork_attempt.py",
    FOLDER / "external" / "scripts" / "launch.py",
]
TEXTS = [SCRIPT, *(path.read_text(encoding="utf-8") for path in FILES)]


@pytest.mark.parametrize("text", TEXTS)
def test_all_of_it_is_the_file_itself(text: str) -> None:
    source = read(text)
    assert source.only(frozenset(range(len(source.elements)))) == text
    assert source.only(frozenset()) is not None


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(TEXTS), st.data())
def test_statements_at_the_top_are_kept_as_they_were(text: str, data: st.DataObject) -> None:
    source = read(text)
    top = [index for index, element in enumerate(source.elements) if element.parent < 0]
    chosen = data.draw(st.sets(st.sampled_from(top)))
    kept = frozenset(i for i in range(len(source.elements)) if root(source, i) in chosen)
    got = ast.parse(source.only(kept) or "nothing")
    body = ast.parse(text).body
    wanted = [each for each in body if any(covers(source, index, each) for index in chosen)]
    assert [ast.dump(each) for each in got.body] == [ast.dump(each) for each in wanted]


def root(source: lines.Source, index: int) -> int:
    while source.elements[index].parent >= 0:
        index = source.elements[index].parent
    return index


def covers(source: lines.Source, index: int, statement: ast.stmt) -> bool:
    return source.elements[index].first <= statement.lineno <= source.elements[index].last


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(TEXTS), st.data())
def test_any_part_of_it_parses_or_is_no_question(text: str, data: st.DataObject) -> None:
    source = read(text)
    some = data.draw(st.sets(st.integers(0, len(source.elements) - 1)))
    kept = source.tree.closed(frozenset(range(len(source.elements))) - some)
    left = source.only(kept)
    if left is None:  # a try without a branch, a break without its loop
        assert any(word in text for word in ("try:", "break", "continue", "elif", "else:"))
    else:
        names = {node.id for node in ast.walk(ast.parse(left)) if isinstance(node, ast.Name)}
        assert names <= {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        assert len(left.splitlines()) <= 2 * len(text.splitlines())


def test_one_element_at_a_time() -> None:
    source = read(SCRIPT)
    everything = frozenset(range(len(source.elements)))
    left = [source.only(source.tree.closed(everything - {index})) for index in everything]
    assert left.count(None) <= 1  # the try without its except has a finally
    assert not any(text == SCRIPT for text in left)
    without_loop = next(text for text in left if text and "for step" not in text and "boom" in text)
    assert "\nif step == 2:\n    data = [step]\n" in without_loop  # its body stands by itself
    without_with = next(text for text in left if text and "open(os" not in text and "f.read" in text)
    assert '\ntext = """\n  kept as it is\n    """\ntry:\n' in without_with  # a string's own spaces stay


def shrunk(text: str, wanted: list[str]) -> str:
    """The smallest text that still has the wanted lines."""
    source = read(text)

    def probe(kept: Kept) -> tuple[bool | None, int]:
        left = source.only(kept)
        found = None if left is None else [line.strip() for line in left.splitlines()]
        return (None, 0) if found is None else (all(line in found for line in wanted), 1)

    trail: Trail[Kept] = Trail(probe)
    found = prune(source.tree, trail, source.unbound, source.idle)
    assert found.done and trail.cost < 60
    return source.only(found.kept) or ""


def test_a_script_is_shrunk_to_what_matters() -> None:
    left = shrunk(SCRIPT, ["data = [step]", "boom = data[step]  # <- here"])
    assert [line for line in left.splitlines() if line.strip()] == [
        "#!/usr/bin/env python", "data = [step]", "boom = data[step]  # <- here",
    ]  # fmt: skip


def test_hints_say_what_cannot_stand_and_what_nobody_uses() -> None:
    source = read("import os\nimport json\nx = os.sep\nprint(x)\n")
    assert source.idle(frozenset({0, 1, 2, 3})) == {1}
    assert source.unbound(frozenset({1, 2, 3})) == {2}
    assert source.unbound(frozenset({0, 1, 3})) == {3}
