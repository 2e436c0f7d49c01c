"""A Python file as a tree of what can be left out of it, and the text that is left: lines, not an unparsed tree, so
that comments and layout stay as somebody wrote them. Pure.

An element is a statement (with its decorators and the comment right above it), an ``except`` branch, or the *head* of
a block that is no definition (``for``, ``if``, ``with``, ``try``): without its head a block's body stands by itself.
Statements that share a line are one element. What is left may not parse (a ``try`` without a branch): ``without`` then
gives None, and there is no question to ask.
"""

from __future__ import annotations

import ast
import builtins
import functools
import io
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from repro_matrix.search.reduce.tree import Kept, Tree

Blocks = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try)
Definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
KNOWN = frozenset(dir(builtins)) | {"__file__", "__name__", "__doc__", "self", "cls"}


@dataclass
class Element:
    """Lines count from 1. ``first`` ... ``last`` are all of it; of a head, the head's own."""

    parent: int
    first: int
    last: int
    indent: str
    head: bool = False
    body: tuple[int, int] = (0, 0)  # of a head: the first and last line of what it holds
    binds: frozenset[str] = frozenset()
    loads: frozenset[str] = frozenset()  # by itself, not by elements below it
    plain: bool = False  # an import or a definition: of no use where nobody uses its names


@dataclass
class Source:
    text: str
    elements: list[Element] = field(default_factory=list)

    @functools.cached_property
    def tree(self) -> Tree:
        return Tree([element.parent for element in self.elements])

    @functools.cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines(keepends=True)

    @functools.cached_property
    def _inside_strings(self) -> set[int]:
        return _string_lines(self.text)

    # -- what is left

    def only(self, kept: Kept) -> str | None:
        """The text of these elements alone; None where it does not parse."""
        gone = [element for index, element in enumerate(self.elements) if index not in kept]
        text = self._without(gone)
        try:
            compile(text, "<shrunk>", "exec", dont_inherit=True)  # also ``break`` outside a loop
        except (SyntaxError, ValueError):
            return None
        return text

    def _without(self, gone: Sequence[Element]) -> str:
        lines = self.lines
        dead: set[int] = set()
        shift: dict[int, int] = {}  # line -> how many characters of indentation go
        for element in gone:
            dead |= set(range(element.first, element.last + 1))
            if element.head:
                first, last = element.body
                width = len(_indent(lines[first - 1])) - len(element.indent)
                for number in range(first, last + 1):
                    shift[number] = shift.get(number, 0) + width
        inside = self._inside_strings
        out: list[str] = []
        for number, line in enumerate(lines, 1):
            if number in dead:
                continue
            cut = 0 if number in inside else min(shift.get(number, 0), len(_indent(line)))
            out.append(line[cut:])
            passing = self._needs_pass(number, dead)
            if passing is not None:
                out.append(passing[cut:] + "pass\n")
        return "".join(out)

    def _needs_pass(self, number: int, dead: set[int]) -> str | None:
        """The indentation for a ``pass``, where a block begins after this line of which nothing is left."""
        for block in self._blocks_after.get(number, ()):
            if all(line in dead or self._empty[line] for line in range(block[0], block[1] + 1)):
                return _indent(self.lines[block[2] - 1])
        return None

    _blocks_after: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)  # (first, last, a statement's)
    _empty: dict[int, bool] = field(default_factory=dict)  # line -> nothing but a comment in it

    # -- hints

    def unbound(self, kept: Kept) -> Kept:
        """Elements that load a name which only what is gone did bind: they would end with a NameError."""
        here = {index: self.elements[index] for index in kept}
        bound = frozenset[str]().union(*(element.binds for element in here.values())) | KNOWN
        ever = frozenset[str]().union(*(element.binds for element in self.elements))
        return frozenset(index for index, element in here.items() if element.loads & ever - bound)

    def idle(self, kept: Kept) -> Kept:
        """Imports and definitions whose names nothing that is kept loads."""
        loaded: dict[str, set[int]] = {}
        for index in kept:
            for name in self.elements[index].loads:
                loaded.setdefault(name, set()).add(index)
        found = set()
        for index in kept:
            element = self.elements[index]
            users = {user for name in element.binds for user in loaded.get(name, ()) if not self._below(user, index)}
            if element.plain and not users:
                found.add(index)
        return frozenset(found)

    def _below(self, node: int, top: int) -> bool:
        while node >= 0:
            if node == top:
                return True
            node = self.elements[node].parent
        return False


def read(text: str) -> Source:
    """Raises SyntaxError as ``ast.parse`` does."""
    if not text.endswith("\n"):
        text += "\n"
    source = Source(text)
    lines = source.lines
    source._empty = {number: line.strip() == "" or line.strip().startswith("#") for number, line in enumerate(lines, 1)}
    _block(source, lines, ast.parse(text).body, -1, 0)
    return source


def _block(source: Source, lines: list[str], body: Sequence[ast.stmt], parent: int, after: int) -> None:
    """The statements of one block; ``after``: the line that its head ends with (0 at the top)."""
    if not body:
        return
    groups = list(_groups(body))
    if after:
        source._blocks_after.setdefault(after, []).append((after + 1, groups[-1][2], groups[0][1]))
    before = after
    for group, start, end in groups:
        first, last = _with_comments(lines, start, before), end
        indent = _indent(lines[start - 1])
        index = len(source.elements)
        statement = group[0]
        whole = len(group) == 1 and _multiline(statement, lines)
        element = Element(parent, first, last, indent)
        source.elements.append(element)
        nested = list(_nested(statement)) if whole else []
        element.binds, element.loads = _names(group, [part for _, part in nested])
        element.plain = all(isinstance(each, (ast.Import, ast.ImportFrom, *Definitions)) for each in group)
        if whole:
            _inside(source, lines, statement, index, indent)
        before = end


def _inside(source: Source, lines: list[str], statement: ast.stmt, index: int, indent: str) -> None:
    own = source.elements[index]
    body: Sequence[ast.stmt] = statement.body  # type: ignore[attr-defined]
    start = _start(statement)
    head_end = _start(body[0]) - 1
    while head_end > start and source._empty[head_end]:
        head_end -= 1
    branch = index  # what the branches hang from: they go with their head
    if isinstance(statement, Blocks):
        last = _end(body[-1])
        binds, loads = _names([statement], [part for _, part in _nested(statement)])
        branch = len(source.elements)
        head = Element(index, own.first, head_end, indent, True, (head_end + 1, last), binds, loads)
        own.binds, own.loads = frozenset(), frozenset()
        source.elements.append(head)
    _block(source, lines, body, index, head_end)
    end = _end(body[-1])
    for handler in getattr(statement, "handlers", []):
        at = len(source.elements)
        first = _start_of(handler)
        source.elements.append(Element(branch, first, _end(handler.body[-1]), indent))
        handled = source.elements[at]
        name = frozenset({handler.name}) if handler.name else frozenset[str]()
        handled.binds, handled.loads = name, _loaded(handler.type) if handler.type else frozenset()
        if handler.body[0].lineno > first:
            _block(source, lines, handler.body, at, _start(handler.body[0]) - 1)
        end = _end(handler.body[-1])
    for part in ("orelse", "finalbody"):
        rest: Sequence[ast.stmt] = getattr(statement, part, [])
        if not rest:
            continue
        first = end + 1
        while source._empty[first]:
            first += 1
        at = len(source.elements)
        last = _end(rest[-1])
        source.elements.append(Element(branch, first, last, indent))  # ``else:``, ``elif``, ``finally:`` and all of it
        if _start(rest[0]) > first:
            _block(source, lines, rest, at, _start(rest[0]) - 1)
        else:
            source.elements[at].binds, source.elements[at].loads = _names(list(rest), [])
        end = last


def _groups(body: Sequence[ast.stmt]) -> Iterator[tuple[list[ast.stmt], int, int]]:
    """Statements that share lines, with their first and last line."""
    group: list[ast.stmt] = []
    start = end = 0
    for statement in body:
        if group and _start(statement) > end:
            yield group, start, end
            group = []
        start = start if group else _start(statement)
        group, end = [*group, statement], max(end if group else 0, _end(statement))
    yield group, start, end


def _multiline(statement: ast.stmt, lines: list[str]) -> bool:
    """Whether it holds a block whose first statement has a line of its own."""
    body = getattr(statement, "body", None)
    if not isinstance(body, list) or isinstance(statement, ast.Match) or not body:
        return False
    return lines[_start(body[0]) - 1][: _column(body[0])].strip() == "" and _start(body[0]) > statement.lineno


def _nested(statement: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    for part in ("body", "handlers", "orelse", "finalbody"):
        for each in getattr(statement, part, []) or []:
            yield part, each


def _start(statement: ast.stmt) -> int:
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(each.lineno for each in decorators)])


def _start_of(handler: ast.ExceptHandler) -> int:
    return handler.lineno


def _column(statement: ast.stmt) -> int:
    decorators = getattr(statement, "decorator_list", [])
    return 0 if decorators else statement.col_offset


def _end(statement: ast.AST) -> int:
    return int(statement.end_lineno)  # type: ignore[attr-defined]


def _with_comments(lines: list[str], start: int, before: int) -> int:
    """The first line of a statement with the comment that stands right above it."""
    indent = _indent(lines[start - 1])
    first = start
    while first - 1 > before and lines[first - 2].startswith(f"{indent}#"):
        first -= 1
    return start if first == 1 and lines[0].startswith("#!") else first


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]


def _string_lines(text: str) -> set[int]:
    """Lines that begin inside a string: their spaces are content."""
    found: set[int] = set()
    middle = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING or tokenize.tok_name[token.type] == "FSTRING_MIDDLE":
            middle = token.end[0] - token.start[0]
            found |= set(range(token.start[0] + 1, token.start[0] + 1 + middle))
    return found


# -- names


def _names(group: Sequence[ast.AST], without: Sequence[ast.AST]) -> tuple[frozenset[str], frozenset[str]]:
    """(bound, loaded) by statements, not by the parts that are elements of their own."""
    bound: set[str] = set()
    loaded: set[str] = set()
    skip = {id(each) for each in without}
    waiting: list[ast.AST] = list(group)
    while waiting:
        node = waiting.pop()
        if id(node) in skip:
            continue
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, Definitions):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
        waiting += ast.iter_child_nodes(node)
    return frozenset(bound), frozenset(loaded)


def _loaded(node: ast.AST) -> frozenset[str]:
    return _names([node], [])[1]
