"""Who is given what is stored takes its type (harness/cell): it is doubted where it is read, and never again."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from repro_matrix.paths import PACKAGE

STORED = {
    "document", "documents", "observation", "observations", "outcome", "outcomes", "attempt", "attempts", "arm", "arms",
    "verdict", "verdicts",
}  # fmt: skip
RAW = re.compile(r"\b(Mapping\[str, Any\]|dict\[str, Any\]|Json\b|Any$)")
DOORS = {  # what is read or made there is not yet known to be what it should be
    "cell/older.py",  # before it is compared with its type
    "results/compact.py", "results/sheet.py",  # a line of a published file <-> a document
    "authoring/shrunk.py",  # the JSON that `repro shrink --json` printed
}  # fmt: skip


def raw(source: str) -> Iterator[str]:
    """Parameters that hold what is stored, and say nothing of what that is."""
    for each in ast.walk(ast.parse(source)):
        if not isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for given in (*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs):
            if given.arg in STORED and given.annotation and RAW.search(ast.unparse(given.annotation)):
                yield f"{each.lineno}: {each.name}({given.arg}: {ast.unparse(given.annotation)})"


def test_what_takes_something_stored_says_its_type() -> None:
    found = {
        f"{name}:{each}"
        for path in PACKAGE.rglob("*.py")
        if not (name := str(path.relative_to(PACKAGE))).startswith("worker/") and name not in DOORS
        for each in raw(path.read_text(encoding="utf-8"))
    }
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "def f(document: Mapping[str, Any]) -> None: ...",
        "def f(self, documents: Iterable[dict[str, Any]]) -> None: ...",
        "def f(*, outcome: Any) -> None: ...",
    ],
)
def test_such_a_function_is_seen(code: str) -> None:
    assert list(raw(code))
