"""Statements of several files in one: names told apart, imports of the kit gone, the text of each. Pure."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from repro_matrix.authoring.export import layout
from repro_matrix.authoring.export.code import bindings
from repro_matrix.authoring.export.reach import alive_parts
from repro_matrix.authoring.export.source import OWN, SCRIPT, Module, imports_of, target_of, whole_module

GIVEN = ("flags", "options", "model", "strategy")  # of `run`, as a whole: constants that script.py defines


def told_apart(modules: Mapping[str, Module], reached: Mapping[str, list[str]]) -> dict[tuple[str, str], str]:
    """(module, name) -> the name in the one file, where it is another one. The script keeps its names."""
    owners: dict[str, tuple[str, str]] = {}
    names: dict[tuple[str, str], str] = {}
    for module in [SCRIPT, *(name for name in reached if name != SCRIPT)]:
        for name in list(reached[module]):
            text = ast.unparse(modules[module].bound[name])
            if name not in owners:
                owners[name] = module, text
            elif owners[name][1] == text:
                reached[module].remove(name)  # the same twice
            else:
                names[module, name] = f"{module.rpartition('.')[2]}_{name}"
    return names


class Renamed(ast.NodeTransformer):
    """A module's statement with the names that things have in the one file, without its imports of the kit."""

    def __init__(self, modules: Mapping[str, Module], module: str, names: Mapping[tuple[str, str], str]) -> None:
        self.modules, self.module, self.names = modules, module, names
        self.seen = dict(modules[module].imports)
        self.taken: list[set[str]] = []

    def _name(self, module: str, name: str) -> str:
        here = self.modules.get(module)
        if here is not None and name not in here.bound and name in here.imports:
            target = target_of(self.modules, here.imports[name])
            return self._name(*target) if target else name
        return self.names.get((module, name), name)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        self.seen.update({a: of for a, of in self.modules[self.module].local(node).items()})
        inner = {
            a for each in ast.walk(node) if isinstance(each, (ast.Import, ast.ImportFrom)) for a in imports_of(each)
        }
        self.taken.append(set(bindings(node)) - inner)
        self.generic_visit(node)
        self.taken.pop()
        node.body = node.body or [ast.Pass()]
        if not self.taken:
            node.name = self.names.get((self.module, node.name), node.name)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        self.taken.append(set())
        self.generic_visit(node)
        self.taken.pop()
        if not self.taken:
            node.name = self.names.get((self.module, node.name), node.name)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        return [] if str(node.module).startswith(OWN) else node

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if isinstance(node.value, ast.Name) and (whole := whole_module(self.modules, self.seen.get(node.value.id))):
            return ast.Name(self._name(whole, node.attr), node.ctx)
        if node.attr in GIVEN and ast.unparse(node.value) in ("run", "self.run"):
            return ast.Name(node.attr.upper(), ast.Load())
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        if ast.unparse(node) in ("run.model['config']", "self.run.model['config']"):
            return ast.Name("CONFIG", ast.Load())
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> Any:
        if any(node.id in taken for taken in self.taken):
            return node
        of = self.seen.get(node.id)
        if node.id in self.modules[self.module].bound and (of is None or not of[0].startswith(OWN)):
            return ast.Name(self.names.get((self.module, node.id), node.id), node.ctx)
        target = target_of(self.modules, of) if of else None
        return ast.Name(self._name(*target), node.ctx) if target else node


def texts(module: Module, names: list[str], attributes: set[str]) -> list[str]:
    texts = []
    for name in names:
        statement = module.bound[name]
        if isinstance(statement, ast.ClassDef):
            alive = {id(each) for each in alive_parts(statement, attributes)}
            if id(statement) not in alive:
                statement.body = [each for each in statement.body if id(each) in alive] or [ast.Pass()]
        texts.append(layout.text_of(statement))
    return texts


def early(modules: Mapping[str, Module], reached: Mapping[str, list[str]]) -> bool:
    """Whether the script uses something of the kit while it is imported: a base class, a default, a constant."""
    theirs = {name for module, names in reached.items() if module != SCRIPT for name in names}
    for name in reached[SCRIPT]:
        statement = modules[SCRIPT].bound[name]
        parts: list[ast.AST] = [statement]
        if isinstance(statement, ast.FunctionDef):
            parts = [*statement.decorator_list, *statement.args.defaults, *(d for d in statement.args.kw_defaults if d)]
        elif isinstance(statement, ast.ClassDef):
            parts = [*statement.decorator_list, *statement.bases]
        if any(isinstance(node, ast.Name) and node.id in theirs for part in parts for node in ast.walk(part)):
            return True
    return False
