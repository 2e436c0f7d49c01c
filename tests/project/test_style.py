"""Check the rules of CONTRIBUTING.md about English that ruff does not check."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest
from repro_matrix.paths import ROOT

FILES = sorted((ROOT / "harness").rglob("*.py"))
NOUN_CLAUSE = re.compile(r"(What|Whether|Where)\b(?!.*\?)")
SUBJECT = re.compile(r"[a-z][\w ,./+-]*: [a-z`\"'*0-9_].*")


def texts(path: Path) -> list[tuple[int, str]]:
    """Return the line and the text of each docstring and of each comment that begins a block."""
    source = path.read_text(encoding="utf-8")
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = [
        (getattr(node, "lineno", 1), text)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
    ]
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                found.append((token.start[0], token.string.lstrip("#: ")))
            last = token.start[0]
    return found


def test_no_docstring_or_comment_is_a_noun_clause() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text[:60]}"
        for path in FILES
        for line, text in texts(path)
        if NOUN_CLAUSE.match(text)
    ]
    assert len(FILES) > 100 and not found, "\n".join(found)


def test_subjects_of_commits_are_short_and_name_an_area() -> None:
    """Check the commits that are not pushed yet: a pushed one cannot be reworded."""
    command = ["git", "log", "--no-merges", "--format=%s", "origin/main..HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no branch origin/main to compare with")
    subjects = done.stdout.splitlines()
    assert not [each for each in subjects if len(each) > 72 or not SUBJECT.fullmatch(each)]
