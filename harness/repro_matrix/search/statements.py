"""The statements of a Python file: what is left of it without some of them, and delta debugging over them. Pure.

Whole lines are left out, so that comments and layout stay as somebody wrote them. A block whose statements are all left
out gets ``pass``. Statements that share a line count as one.
"""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass, field

from repro_matrix.search.parameters import Spent, Trail
from repro_matrix.search.releases import ddmin

KNOWN = frozenset(dir(builtins)) | {"__file__", "__name__", "__doc__", "__spec__", "__package__", "__class__"}


@dataclass(frozen=True)
class Statement:
    """Lines count from 1; both ends belong to it. ``parent``: the statement that it lies in, or -1."""

    first: int
    last: int
    parent: int
    depth: int
    block: int  # the block that it lies in


@dataclass
class Source:
    text: str
    statements: list[Statement] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lines = self.text.splitlines(keepends=True)
        self._blocks = 0
        tree = ast.parse(self.text)
        self._add_block(tree.body, -1, 0, 0)
        self._unbound = _unbound(tree)

    def _add_block(self, body: list[ast.stmt], parent: int, depth: int, after: int) -> None:
        """``after``: the line on which the block's head begins: what shares it is a part of the head."""
        self._blocks += 1
        block = self._blocks
        for node in body:
            first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
            last = node.end_lineno or node.lineno
            if first <= after:
                continue
            if self.statements and self.statements[-1].block == block and self.statements[-1].last >= first:
                before = self.statements[-1]
                self.statements[-1] = Statement(before.first, last, parent, depth, block)
                continue
            at = len(self.statements)
            self.statements.append(Statement(first, last, parent, depth, block))
            for inner, head in _blocks(node):
                self._add_block(inner, at, depth + 1, head)

    def only(self, kept: frozenset[int]) -> str | None:
        """Return the text with these statements and without all others; None where it is not valid Python."""
        kept = self.closed(kept)
        lines = list(self.lines)
        for at, statement in enumerate(self.statements):
            if at in kept or (statement.parent >= 0 and statement.parent not in kept):
                continue
            lines[statement.first - 1 : statement.last] = [""] * (statement.last - statement.first + 1)
        for block in {self.statements[at].block for at in range(len(self.statements)) if at not in kept}:
            inside = [at for at, statement in enumerate(self.statements) if statement.block == block]
            parent = self.statements[inside[0]].parent
            if parent in kept and not any(at in kept for at in inside):
                first = self.lines[self.statements[inside[0]].first - 1]
                lines[self.statements[inside[0]].first - 1] = f"{first[: len(first) - len(first.lstrip())]}pass\n"
        text = "".join(lines)
        try:
            ast.parse(text)
        except SyntaxError:
            return None
        return text

    def closed(self, kept: frozenset[int]) -> frozenset[int]:
        """Return the statements without those whose parent is left out."""
        found: set[int] = set()
        for at in sorted(kept):
            parent = self.statements[at].parent
            if parent < 0 or parent in found:
                found.add(at)
        return frozenset(found)

    def undefined(self, text: str) -> frozenset[str]:
        """Return the names that are used and no longer bound: such a text would only raise NameError."""
        return _unbound(ast.parse(text)) - self._unbound


def _blocks(node: ast.stmt) -> list[tuple[list[ast.stmt], int]]:
    """Return the blocks of a compound statement, each with the line where its head begins."""
    found = []
    for name in ("body", "orelse", "finalbody"):
        body = getattr(node, name, None)
        if body and isinstance(body[0], ast.stmt):
            found.append((body, node.lineno))
    for handler in [*getattr(node, "handlers", ()), *getattr(node, "cases", ())]:
        found.append((handler.body, getattr(handler, "lineno", handler.body[0].lineno - 1)))
    return sorted(found, key=lambda item: item[0][0].lineno)


def _unbound(tree: ast.AST) -> frozenset[str]:
    """Return the names that are loaded somewhere and bound nowhere."""
    loaded: set[str] = set()
    bound = set(KNOWN)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            if node.name == "*":
                return frozenset()
            bound.add((node.asname or node.name).partition(".")[0])
        elif (isinstance(node, ast.ExceptHandler) and node.name) or (
            isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name
        ):
            bound.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            bound.add(node.rest)
    return frozenset(loaded - bound)


def reduce_statements(source: Source, trail: Trail[frozenset[int]]) -> tuple[frozenset[int], bool]:
    """Return the statements that the failure needs, and whether the search ended by itself.

    Delta debugging from the outermost statements inwards, then over all that are left, until nothing changes. The whole
    file is known to fail.
    """
    kept = frozenset(range(len(source.statements)))

    def reproduced(chosen: frozenset[int]) -> bool:
        nonlocal kept
        smaller = source.closed(chosen)
        if smaller == kept or trail.reproduced(smaller):
            kept = smaller
            return True
        return False

    def reduce(among: frozenset[int]) -> None:
        rest = kept - among
        ddmin(sorted(among), lambda some: reproduced(rest | frozenset(some)))

    try:
        while True:
            before = kept
            for depth in range(1 + max((each.depth for each in source.statements), default=0)):
                reduce(frozenset(at for at in kept if source.statements[at].depth == depth))
            if kept == before:
                return kept, True
    except Spent:
        return kept, False
