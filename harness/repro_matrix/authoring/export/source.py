"""The sources that a script is bundled from, each as its top-level statements by name. Pure."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from repro_matrix.authoring.export import layout
from repro_matrix.authoring.export.code import bindings
from repro_matrix.errors import ReproError

SCRIPT = "script"
OWN = ("repro_kit", "harness")
# What an import is: (module, the name in it or None, the line that says so).
Import = tuple[str, "str | None", str]


class ExportError(ReproError):
    """A script that cannot stand alone."""


@dataclass
class Module:
    """One source file: its top-level statements by the names that they bind, and what it imports."""

    name: str
    bound: dict[str, ast.stmt] = field(default_factory=dict)
    imports: dict[str, Import] = field(default_factory=dict)  # alias -> (module, name, the line)

    @classmethod
    def read(cls, name: str, text: str) -> Module:
        tree = ast.parse(text)
        if name == SCRIPT:
            layout.annotate(tree, layout.comments(text))
        module = cls(name)
        for statement in tree.body:
            module.bind(statement)
        return module

    def bind(self, statement: ast.stmt) -> None:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            self.imports.update(imports_of(statement))
        elif isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            self.bound[statement.name] = _bare(statement, short=self.name != SCRIPT)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        self.bound[name.id] = _bare(statement, short=False)
        elif isinstance(statement, ast.Try):
            for inner in statement.body:
                self.bind(inner)

    def local(self, node: ast.AST) -> dict[str, Import]:
        """All imports that a statement sees: the module's, and those within it."""
        found = dict(self.imports)
        for each in ast.walk(node):
            if isinstance(each, (ast.Import, ast.ImportFrom)):
                found.update(imports_of(each))
        return found


def read(script: str, kit: Mapping[str, str], plain: Mapping[str, str]) -> dict[str, Module]:
    """The script, the modules that it imports, and those that these import; in the order of their names."""
    found = {SCRIPT: Module.read(SCRIPT, script)}
    todo = [SCRIPT, "repro_kit.run"]
    while todo:
        name = todo.pop()
        if name not in found:
            if name not in kit and name not in plain:
                continue
            found[name] = Module.read(name, kit[name] if name in kit and name != "repro_kit.run" else "")
            over = Module.read(name, plain.get(name, ""))
            found[name].bound.update(over.bound)
            found[name].imports.update(over.imports)
        elif name != SCRIPT:
            continue
        here = found[name]
        seen = [*here.imports.values(), *(of for each in here.bound.values() for of in here.local(each).values())]
        todo += {f"repro_kit.{what}" if module == "repro_kit" else module for module, what, _ in seen}
    return dict(sorted(found.items(), key=lambda item: (item[0] == SCRIPT, item[0])))


class _Bare(ast.NodeTransformer):
    """Without annotations; ``short``: with no more of a docstring than its first sentence."""

    def __init__(self, short: bool) -> None:
        self.short = short

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.returns = None
        for each in ast.walk(node.args):
            if isinstance(each, ast.arg):
                each.annotation = None
        return self._body(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return self._body(node)

    def _body(self, node: Any) -> Any:
        self.generic_visit(node)
        text = ast.get_docstring(node)
        if text is not None and self.short:
            sentence = " ".join(text.partition("\n\n")[0].split()).partition(". ")[0]
            node.body[:1] = [ast.Expr(ast.Constant(sentence))] if len(sentence) < 90 else []
        node.body = node.body or [ast.Pass()]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is None:
            return []
        plain = ast.copy_location(ast.Assign([node.target], node.value), node)
        plain.comments = getattr(node, "comments", [])  # type: ignore[attr-defined]
        return self.generic_visit(plain)


def _bare(statement: ast.stmt, short: bool) -> Any:
    return _Bare(short).visit(statement)


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


def target_of(modules: Mapping[str, Module], of: Import) -> tuple[str, str] | None:
    """The (module, name) of ours that an import is; None where it is installed, or a whole module."""
    module, name, _ = of
    if module == "repro_kit" and name in ("Run", "main"):
        module = "repro_kit.run"
    return (module, name) if name is not None and module in modules else None


def visible(modules: Mapping[str, Module], here: Module, statement: ast.stmt) -> dict[str, tuple[str, str]]:
    """What a statement calls things of ours: alias -> (module, name)."""
    inner = {}
    for node in ast.walk(statement):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            inner.update(imports_of(node))
    taken = set(bindings(statement)) - set(inner) if isinstance(statement, ast.FunctionDef) else set()
    names = {alias: found for alias, of in {**here.imports, **inner}.items() if (found := target_of(modules, of))}
    names.update({own: (here.name, own) for own in here.bound})
    return {alias: of for alias, of in names.items() if alias not in taken}


def whole_module(modules: Mapping[str, Module], of: Import | None) -> str:
    """The module of the kit that a name is: `from repro_kit import zero`."""
    return f"repro_kit.{of[1]}" if of and of[0] == "repro_kit" and f"repro_kit.{of[1]}" in modules else ""
