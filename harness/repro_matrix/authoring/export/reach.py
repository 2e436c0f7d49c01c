"""What of the sources a script's body reaches: top-level names, and of a class the methods that are named. Pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from repro_matrix.authoring.export.code import bindings
from repro_matrix.authoring.export.source import (
    OWN,
    SCRIPT,
    ExportError,
    Import,
    Module,
    imports_of,
    target_of,
    whole_module,
)

_HARNESS = ("repro_kit.rank_monitor", "repro_kit.code_location", "repro_kit.record", "repro_kit.settings", "harness")


def reach(modules: Mapping[str, Module], title: str) -> tuple[dict[str, list[str]], dict[str, None], set[str]]:
    """(module -> top-level names that are reached, the imports of what is installed, attributes that are named)."""
    attributes: set[str] = set()
    while True:
        imports: dict[str, None] = {}
        seen = {(SCRIPT, "body"), ("repro_kit.run", "main")}
        todo = list(seen)
        named: set[str] = set()
        while todo:
            module, name = todo.pop()
            for need in _needs(modules, module, name, imports, attributes, named, title):
                if need not in seen:
                    seen.add(need)
                    todo.append(need)
        if named <= attributes:
            break
        attributes |= named
    order = [*(name for name in modules if name not in (SCRIPT, "repro_kit.run")), "repro_kit.run", SCRIPT]
    reached = {}
    for module in order:
        statements: dict[int, str] = {}
        for name, statement in modules[module].bound.items():
            if (module, name) in seen:
                statements.setdefault(id(statement), name)
        reached[module] = list(statements.values())
    return reached, imports, attributes


def alive_parts(statement: ast.stmt, attributes: set[str]) -> list[ast.AST]:
    """The parts of a top-level statement that are kept."""
    if not isinstance(statement, ast.ClassDef) or any(not isinstance(base, ast.Name) for base in statement.bases):
        return [statement]
    kept: list[ast.AST] = [*statement.bases, *statement.decorator_list]
    for each in statement.body:
        name = _member(each)
        if not name or name.startswith("__") or name in attributes:
            kept.append(each)
    return kept


def _member(statement: ast.stmt) -> str:
    """The name of a class's method or attribute that may be left out; empty: it may not."""
    if isinstance(statement, ast.FunctionDef):
        return statement.name
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return ""


def _needs(
    modules: Mapping[str, Module],
    module: str,
    name: str,
    imports: dict[str, None],
    attributes: set[str],
    named: set[str],
    title: str,
) -> Iterator[tuple[str, str]]:
    """What a top-level name needs: (module, name) of this bundle; what is installed goes to ``imports``."""
    here = modules[module]
    for part in alive_parts(here.bound[name], attributes):
        inner: dict[str, Import] = {}
        for node in ast.walk(part):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                inner.update(imports_of(node))
        seen = {**here.imports, **inner}
        taken = set(bindings(part)) - set(inner)
        for node in ast.walk(part):
            if isinstance(node, ast.Attribute):
                named.add(node.attr)
                if isinstance(node.value, ast.Name) and (whole := whole_module(modules, seen.get(node.value.id))):
                    yield from _found(modules, whole, node.attr, title)
            if not isinstance(node, ast.Name) or node.id in taken:
                continue
            if isinstance(here.bound[name], ast.ClassDef):
                named.add(node.id)  # an attribute may use another one
            if node.id == "__file__":
                raise ExportError(f"{title}: {module} reads files that lie beside it ({name}), a single file has none")
            of = inner.get(node.id) or (None if node.id in here.bound else here.imports.get(node.id))
            if of is None:
                if node.id in here.bound:
                    yield module, node.id
            elif of[0].startswith(OWN):
                if not whole_module(modules, of):
                    target = target_of(modules, of)
                    yield from _found(modules, *(target or (of[0], str(of[1]))), title)
            elif node.id not in inner:
                imports[of[2]] = None


def _found(modules: Mapping[str, Module], module: str, name: str, title: str) -> Iterator[tuple[str, str]]:
    if module in _HARNESS or module not in modules:
        raise ExportError(f"{title}: it uses {module}.{name}, which is the harness's alone")
    here = modules[module]
    if name in here.bound:
        yield module, name
    elif name in here.imports:  # handed on
        yield from _found(modules, *(target_of(modules, here.imports[name]) or (here.imports[name][0], name)), title)
    elif module == "repro_kit.run":
        raise ExportError(f"{title}: it uses {module}.{name}, which is the harness's alone")
