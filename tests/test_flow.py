"""Data flows one way (README's map): who imports whom in the package, read from its source."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import repro_matrix

pytestmark = pytest.mark.xdist_group("flow")  # the source is parsed once
FOLDER = Path(repro_matrix.__file__).parent
# What stands earlier never imports what stands later. The judge is pure and stands before what launches: a hang is
# judged while it is watched. New folders are put where they belong.
FLOW = [
    "paths", "conf", "setup", "cell", "judge", "matching", "launch", "stacks", "hardware", "memory", "planning",
    "results", "terminal", "running", "bisection", "script", "shrink", "diff", "nights", "export", "authoring",
    "page", "verbs", "cli", "pytest_plugin",
]  # fmt: skip


def modules(folder: Path = FOLDER) -> dict[str, Path]:
    """Module -> its file; a package is its ``__init__``."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join(("repro_matrix", *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


def imported(source: str, known: dict[str, Path]) -> Iterator[str]:
    """The package's modules that a source imports, at its top or when a function runs; not those for type hints."""
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in names)


def graph(known: dict[str, Path]) -> dict[str, set[str]]:
    return {name: set(imported(path.read_text(encoding="utf-8"), known)) for name, path in known.items()}


@cache
def ours() -> dict[str, set[str]]:
    return graph(modules())


def folder_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def against(drawn: dict[str, set[str]]) -> list[str]:
    """The imports against the flow, and what stands nowhere in it."""
    place = {name: index for index, name in enumerate(["", *FLOW])}
    strange = {folder_of(module) for module in drawn} - place.keys() - {"worker"}
    arrows = [(one, other) for one, others in drawn.items() for other in sorted(others)]
    wrong = [
        f"{one} imports {other}"
        for one, other in arrows
        if place.get(folder_of(other), len(place)) > place.get(folder_of(one), -1)
    ]
    return [*(f"{name}: has no place in FLOW" for name in sorted(strange)), *wrong]


def test_no_import_goes_against_the_flow() -> None:
    assert against(ours()) == []


def test_no_circle() -> None:
    graphlib.TopologicalSorter(ours()).prepare()  # CycleError names them


def test_the_worker_stands_alone() -> None:
    """It runs inside the stack, from its path: nothing of the package is there."""
    drawn = ours()
    assert {m for m, others in drawn.items() if folder_of(m) == "worker" and others} == set()
    assert {other for others in drawn.values() for other in others if folder_of(other) == "worker"} == set()


def test_an_arrow_against_the_flow_and_a_circle_are_seen(tmp_path: Path) -> None:
    for name, text in {
        "__init__": "",
        "conf/__init__": "",
        "conf/one": "def f():\n    from repro_matrix.judge import two\n",
        "judge/__init__": "",
        "judge/two": "import repro_matrix.conf.one\n",
        "new/__init__": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from repro_matrix.judge import two\n",
    }.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    drawn = graph(modules(tmp_path))
    assert against(drawn) == ["new: has no place in FLOW", "repro_matrix.conf.one imports repro_matrix.judge.two"]
    try:
        graphlib.TopologicalSorter(drawn).prepare()
    except graphlib.CycleError as error:
        assert set(error.args[1]) == {"repro_matrix.conf.one", "repro_matrix.judge.two"}
    else:
        raise AssertionError("the circle was not seen")


def test_the_tree_imports_the_package_by_its_one_name() -> None:
    root = FOLDER.resolve().parent
    for folder in ("harness", "tests", "bench"):
        for path in (root / folder).rglob("*.py"):
            found = re.search(r"^\s*(from|import) harness\b", path.read_text(encoding="utf-8"), re.M)
            assert not found, f"{path}: the package is repro_matrix; harness/ is where its source lies"
