"""Read the sources that an exported script is made of: top-level statements by name, and their imports. Pure."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro_matrix.errors import ReproError

SCRIPT = "script"
OWN = ("repro_kit", "harness")
COMMENT = "@@"  # begins a string statement that stands for a comment
STUBS = Path(__file__).with_name("stubs.py.txt")  # short versions of functions of the kit, by module
# An import: (module, the name in it or None, the line that imports it).
Import = tuple[str, "str | None", str]


class ExportError(ReproError):
    """A script that cannot stand alone."""


@dataclass
class Module:
    """One source file."""

    name: str
    bound: dict[str, ast.stmt] = field(default_factory=dict)  # name -> the top-level statement that binds it
    imports: dict[str, Import] = field(default_factory=dict)  # by alias

    @classmethod
    def read(cls, name: str, text: str) -> Module:
        tree = ast.parse(text)
        if name == SCRIPT:
            _insert_comments(tree, text)
        module = cls(name)
        for statement in tree.body:
            module._bind(statement)
        return module

    def _bind(self, statement: ast.stmt) -> None:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            self.imports.update(imports_of(statement))
        elif isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            self.bound[statement.name] = _Plain(short=self.name != SCRIPT).visit(statement)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            names = [each for each in ast.walk(statement) if isinstance(each, ast.Name)]
            plain = _Plain(short=False).visit(statement)
            self.bound.update({each.id: plain for each in names if isinstance(each.ctx, ast.Store)})
        elif isinstance(statement, ast.Try):
            for inner in statement.body:
                self._bind(inner)

    def visible_imports(self, node: ast.AST) -> dict[str, Import]:
        """The imports that a statement can use: the module's, and those within it."""
        return {**self.imports, **imports_within(node)}


def read_sources(script: str, kit: Mapping[str, str], stubs: Mapping[str, str]) -> dict[str, Module]:
    """The script, the modules of the kit that it imports, and those that these import; the script last."""
    modules = {SCRIPT: Module.read(SCRIPT, script)}
    todo = [SCRIPT, "repro_kit.run"]
    while todo:
        name = todo.pop()
        if name not in modules:
            if name not in kit and name not in stubs:
                continue
            modules[name] = Module.read(name, kit[name] if name in kit and name != "repro_kit.run" else "")
            stub = Module.read(name, stubs.get(name, ""))
            modules[name].bound.update(stub.bound)
            modules[name].imports.update(stub.imports)
        elif name != SCRIPT:
            continue
        here = modules[name]
        every = [*here.imports.values(), *(i for each in here.bound.values() for i in imports_within(each).values())]
        todo += {f"repro_kit.{what}" if module == "repro_kit" else module for module, what, _ in every}
    return dict(sorted(modules.items(), key=lambda item: (item[0] == SCRIPT, item[0])))


def read_stubs(proven: bool) -> dict[str, str]:
    """Module -> its stubs. ``proven``: with those that check the result, else with their empty versions."""
    parts = re.split(r"^# ==== (\S+)(?: (proven|unproven))?\n", STUBS.read_text(encoding="utf-8"), flags=re.M)[1:]
    other = "unproven" if proven else "proven"
    return {name: text for name, kind, text in zip(parts[::3], parts[1::3], parts[2::3]) if kind != other}


class _Plain(ast.NodeTransformer):
    """Remove annotations; ``short``: and all of a docstring but its first sentence."""

    def __init__(self, short: bool) -> None:
        self.short = short

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.returns = None
        return self.visit_ClassDef(node)

    def visit_arg(self, node: ast.arg) -> Any:
        node.annotation = None
        return node

    def visit_ClassDef(self, node: Any) -> Any:
        self.generic_visit(node)
        text = ast.get_docstring(node)
        if text is not None and self.short:
            sentence = " ".join(text.partition("\n\n")[0].split()).partition(". ")[0]
            node.body[:1] = [ast.Expr(ast.Constant(sentence))] if len(sentence) < 90 else []
        node.body = node.body or [ast.Pass()]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        self.generic_visit(node)
        return ast.copy_location(ast.Assign([node.target], node.value), node) if node.value else []


def _insert_comments(tree: ast.Module, text: str) -> None:
    """Put each comment of a function, as a string statement, before the statement that it is about."""
    left: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and "type: ignore" not in token.string and "fmt:" not in token.string:
            left[token.start[0]] = token.string.replace("# <-", "# -->", 1)

    def visit(node: ast.AST) -> None:
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if not isinstance(block, list):
                continue
            marked: list[ast.stmt] = []
            for each in block:
                inner = [b for part in ("body", "orelse") for b in getattr(each, part, None) or []]
                last = max(each.lineno, inner[0].lineno - 2) if inner else each.end_lineno
                about = [left.pop(line) for line in sorted(left) if line <= last]
                marked += [ast.Expr(ast.Constant(COMMENT + each)) for each in about] if node is not tree else []
                marked.append(each)
                visit(each)
            setattr(node, name, marked)

    visit(tree)


def text_of(statement: ast.stmt) -> str:
    """The statement as text, its comments included."""
    text = ast.unparse(ast.fix_missing_locations(statement))
    mark = re.compile(rf"^(\s*)(['\"]{COMMENT}.*)$", re.M)
    return mark.sub(lambda found: found[1] + str(ast.literal_eval(found[2])).removeprefix(COMMENT), text)


def imports_of(statement: ast.Import | ast.ImportFrom) -> dict[str, Import]:
    found: dict[str, Import] = {}
    for item in statement.names:
        renamed = f" as {item.asname}" if item.asname else ""
        if isinstance(statement, ast.Import):
            alias = item.asname or item.name.partition(".")[0]
            found[alias] = (item.name, None, f"import {item.name}{renamed}")
        else:
            line = f"from {statement.module} import {item.name}{renamed}"
            found[item.asname or item.name] = (str(statement.module), item.name, line)
    return found


def imports_within(node: ast.AST) -> dict[str, Import]:
    every = (each for each in ast.walk(node) if isinstance(each, (ast.Import, ast.ImportFrom)))
    return {alias: found for each in every for alias, found in imports_of(each).items()}


def bindings(node: ast.AST) -> list[str]:
    """Every name that is bound anywhere in a function, as often as it is bound, its arguments included."""
    found = []
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, (ast.Store, ast.Del)):
            found.append(each.id)
        elif isinstance(each, ast.arg):
            found.append(each.arg)
        elif isinstance(each, (ast.Import, ast.ImportFrom)):
            found += imports_of(each)
        elif isinstance(each, (ast.FunctionDef, ast.ClassDef)) and each is not node:
            found.append(each.name)
    return found


def target_of(modules: Mapping[str, Module], imported: Import | None) -> tuple[str, str] | None:
    """The (module, name) of the bundle that an import means; None where it is an installed one, or a whole module."""
    if imported is None:
        return None
    module, name, _ = imported
    if module == "repro_kit" and name in ("Run", "main"):
        module = "repro_kit.run"
    if name is None or module not in modules:
        return None
    here = modules[module]
    if name not in here.bound and name in here.imports:  # imported there from another module
        return target_of(modules, here.imports[name])
    return module, name


def whole_module(modules: Mapping[str, Module], imported: Import | None) -> str:
    """The module of the kit that an import means (`from repro_kit import zero`), else ""."""
    name = f"repro_kit.{imported[1]}" if imported and imported[0] == "repro_kit" else ""
    return name if name in modules else ""
