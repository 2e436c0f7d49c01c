"""Syntax trees -> text that a person reads: a script's comments kept, long lines broken at commas. Pure."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Mapping

WIDTH = 100
_MARK = "@@"


def comments(text: str) -> dict[int, str]:
    """Line -> the comment on it."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and "type: ignore" not in token.string and "fmt:" not in token.string:
            found[token.start[0]] = token.string.replace("# <-", "# -->", 1)
    return found


def annotate(tree: ast.AST, found: Mapping[int, str]) -> None:
    """Hangs each comment of a source on the statement that it is about, to share its fate."""
    left = dict(found)

    def visit(node: ast.AST) -> None:
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            for each in block if isinstance(block, list) else []:
                inner = [b for name in ("body", "orelse") for b in getattr(each, name, None) or []]
                last = max(each.lineno, inner[0].lineno - 2) if inner else each.end_lineno or each.lineno
                each.comments = [left.pop(line) for line in sorted(left) if line <= last]
                visit(each)

    visit(tree)


def _marked(node: ast.AST) -> None:
    """The comments as statements before those that they hang on."""
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if isinstance(block, list):
            marked: list[ast.stmt] = []
            for each in block:
                marked += [ast.Expr(ast.Constant(_MARK + text)) for text in getattr(each, "comments", ())]
                each.comments = []
                marked.append(each)
                _marked(each)
            setattr(node, field, marked)


def text_of(node: ast.stmt) -> str:
    """The statement as it is written into the file."""
    lines: list[str] = list(getattr(node, "comments", ()))
    _marked(node)
    for line in ast.unparse(ast.fix_missing_locations(node)).splitlines():
        bare = line.strip()
        indent = line[: len(line) - len(line.lstrip())]
        if bare.lstrip("'\"").startswith(_MARK):
            lines.append(indent + str(ast.literal_eval(bare)).removeprefix(_MARK))
        else:
            lines += unfixed(line)
    return "\n".join(lines)


def unfixed(line: str) -> list[str]:
    """A line that is too long, with what stands in its last outer brackets on lines of its own."""
    if len(line) <= WIDTH or line.lstrip().startswith(("'", '"', "#")):
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    try:
        tokens = [
            token
            for token in tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline)
            if token.start[0] == 1
        ]
    except (tokenize.TokenError, IndentationError):
        tokens = _until_error(line.strip())
    groups = _groups(tokens)
    if not groups:
        return [line]
    start, end, commas, loops = max(groups, key=lambda group: group[1] - group[0])
    bare = line.strip()
    head, tail, inner = bare[: start + 1], bare[end:], bare[start + 1 : end]
    cuts = [at - start - 1 for at in loops] if loops else [at - start for at in commas]
    parts = [inner[a:b].strip() for a, b in zip([0, *cuts], [*cuts, len(inner)])]
    parts = [part for part in parts if part]
    if len(parts) == 1 and not loops and len(parts[0]) + len(indent) + 4 >= len(line):
        return [line]
    if commas and not loops and not parts[-1].endswith(",") and not parts[-1].startswith("*"):
        parts[-1] += ","
    out = [indent + head]
    for part in parts:
        out += unfixed(f"{indent}    {part}")
    return [*out, indent + tail]


def _groups(tokens: Iterable[tokenize.TokenInfo]) -> list[tuple[int, int, list[int], list[int]]]:
    """The outermost brackets with something in them: (where they open, where they close, commas, `for`s)."""
    found, depth, start = [], 0, 0
    commas: list[int] = []
    loops: list[int] = []
    for token in tokens:
        if token.string in ("(", "[", "{"):
            if depth == 0:
                start, commas, loops = token.start[1], [], []
            depth += 1
        elif token.string in (")", "]", "}"):
            depth -= 1
            if depth == 0 and token.start[1] > start + 1:
                found.append((start, token.start[1], commas, loops))
        elif depth == 1 and token.string == ",":
            commas.append(token.start[1])
        elif depth == 1 and token.type == tokenize.NAME and token.string == "for":
            loops.append(token.start[1])
    return found


def _until_error(text: str) -> list[tokenize.TokenInfo]:
    found: list[tokenize.TokenInfo] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text + "\n").readline):
            if token.start[0] == 1:
                found.append(token)
    except (tokenize.TokenError, IndentationError):
        pass
    return found
