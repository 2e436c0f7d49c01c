"""Bundle a script and the functions of the kit that it reaches. Pure: text in, text out."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from repro_matrix.authoring.export.branches import simplify
from repro_matrix.authoring.export.sources import (
    OWN,
    SCRIPT,
    ExportError,
    Module,
    bindings,
    imports_within,
    read_sources,
    read_stubs,
    target_of,
    text_of,
    whole_module,
)

_HARNESS = ("repro_kit.rank_monitor", "repro_kit.code_location", "repro_kit.record", "repro_kit.settings", "harness")
_FIRST = [(SCRIPT, "body"), ("repro_kit.run", "main")]
Name = tuple[str, str]  # (module, top-level name)


@dataclass(frozen=True)
class Bundle:
    imports: list[str]  # lines, of installed packages
    case: list[str]  # the script's own statements
    kit: list[str]  # statements of the kit
    kit_first: bool  # whether the script uses the kit while it is imported


def bundle(
    script: str,
    kit: Mapping[str, str],
    values: Mapping[str, Any],
    title: str,
    proven: bool = True,
    stubs: Mapping[str, str] | None = None,
) -> Bundle:
    """``kit``, ``stubs``: module -> source. ``values``: attributes of `run`. ``proven``: keep the checks of the result.

    Raises ExportError: the script uses what only the harness has, or files beside it."""
    modules = read_sources(script, kit, read_stubs(proven) if stubs is None else stubs)
    if "body" not in modules[SCRIPT].bound:
        raise ExportError(f"{title}: its script has no function body(run). Add one: it is what `repro run` calls.")
    simplify(modules, values, proven)
    reached = _Reach(modules, title).run()
    names = _unique_names(modules, reached.names)
    imports: set[str] = set()
    case: list[str] = []
    rest: list[str] = []
    for module in [*(each for each in modules if each not in (SCRIPT, "repro_kit.run")), "repro_kit.run", SCRIPT]:
        done = set()
        for name, statement in modules[module].bound.items():
            if (module, name) not in reached.names or id(statement) in done or names.get((module, name)) == "":
                continue
            done.add(id(statement))
            if isinstance(statement, ast.ClassDef):
                statement.body = [e for e in statement.body if _is_alive(e, reached.attributes)] or [ast.Pass()]
            statement = _Rename(modules, module, names).visit(statement)
            (case if module == SCRIPT else rest).append(text_of(statement))
    imports |= set(reached.imports)
    return Bundle(sorted(imports), case, rest, _uses_early(modules, reached.names))


class _Reach:
    """What the script's body reaches: top-level names, and of a class the methods that something names."""

    def __init__(self, modules: Mapping[str, Module], title: str) -> None:
        self.modules, self.title = modules, title
        self.names: set[Name] = set()
        self.imports: dict[str, None] = {}
        self.attributes: set[str] = set()

    def run(self) -> _Reach:
        before = -1
        while before < len(self.attributes):  # a method that is named now may reach more
            before = len(self.attributes)
            self.names, self.imports = set(_FIRST), {}
            todo = list(_FIRST)
            while todo:
                new = set(self._needs(*todo.pop())) - self.names
                self.names |= new
                todo += new
        return self

    def _needs(self, module: str, name: str) -> Iterator[Name]:
        here = self.modules[module]
        statement = here.bound[name]
        is_class = isinstance(statement, ast.ClassDef)
        parts: list[ast.AST] = [statement]
        if isinstance(statement, ast.ClassDef):
            alive = [each for each in statement.body if _is_alive(each, self.attributes)]
            parts = [*statement.bases, *statement.decorator_list, *alive]
        for part in parts:
            inner = imports_within(part)
            imports = {**here.imports, **inner}
            local = set(bindings(part)) - set(inner)
            for node in ast.walk(part):
                if isinstance(node, ast.Attribute):
                    self.attributes.add(node.attr)
                    owner = node.value.id if isinstance(node.value, ast.Name) else ""
                    if whole := whole_module(self.modules, imports.get(owner)):
                        yield self._known(whole, node.attr)
                if not isinstance(node, ast.Name) or node.id in local:
                    continue
                if is_class:
                    self.attributes.add(node.id)  # an attribute of a class may use another one
                if node.id == "__file__":
                    raise ExportError(f"{self.title}: {module}.{name} reads files beside it: a single file has none.")
                imported = inner.get(node.id) or (None if node.id in here.bound else here.imports.get(node.id))
                if imported is None:
                    if node.id in here.bound:
                        yield module, node.id
                elif not imported[0].startswith(OWN):
                    if node.id not in inner:
                        self.imports[imported[2]] = None
                elif not whole_module(self.modules, imported):
                    yield self._known(*(target_of(self.modules, imported) or (imported[0], str(imported[1]))))

    def _known(self, module: str, name: str) -> Name:
        if module in _HARNESS or module not in self.modules or name not in self.modules[module].bound:
            raise ExportError(f"{self.title}: it uses {module}.{name}, which only the harness has.")
        return module, name


def _is_alive(statement: ast.stmt, attributes: set[str]) -> bool:
    """Whether a part of a class is kept: a method or an attribute that nothing names is not."""
    name = "__"
    if isinstance(statement, ast.FunctionDef):
        name = statement.name
    elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        name = statement.targets[0].id
    return name.startswith("__") or name in attributes


def _unique_names(modules: Mapping[str, Module], reached: set[Name]) -> dict[Name, str]:
    """New names for those that two modules use; "": the same definition twice. The script keeps its names."""
    owners: dict[str, str] = {}
    names: dict[Name, str] = {}
    for module, name in sorted(reached, key=lambda item: (item[0] != SCRIPT, item)):
        text = ast.unparse(modules[module].bound[name])
        if name in owners:
            names[module, name] = "" if owners[name] == text else f"{module.rpartition('.')[2]}_{name}"
        owners.setdefault(name, text)
    return names


class _Rename(ast.NodeTransformer):
    """Give a statement the names of the one file, and remove its imports of the kit."""

    def __init__(self, modules: Mapping[str, Module], module: str, names: Mapping[Name, str]) -> None:
        self.modules, self.module, self.names = modules, module, names
        self.imports = dict(modules[module].imports)
        self.local: list[set[str]] = []

    def _name(self, module: str, name: str) -> str:
        return self.names.get((module, name)) or name

    def visit_FunctionDef(self, node: Any) -> Any:
        inner = imports_within(node)
        self.imports.update(inner)
        self.local.append(set(bindings(node)) - set(inner) if isinstance(node, ast.FunctionDef) else set())
        self.generic_visit(node)
        self.local.pop()
        node.body = node.body or [ast.Pass()]
        if not self.local:
            node.name = self._name(self.module, node.name)
        return node

    visit_ClassDef = visit_FunctionDef

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        return [] if str(node.module).startswith(OWN) else node

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        if whole := whole_module(self.modules, self.imports.get(owner)):
            return ast.Name(self._name(whole, node.attr), node.ctx)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> Any:
        if any(node.id in local for local in self.local):
            return node
        imported = self.imports.get(node.id)
        if node.id in self.modules[self.module].bound and (imported is None or not imported[0].startswith(OWN)):
            return ast.Name(self._name(self.module, node.id), node.ctx)
        target = target_of(self.modules, imported)
        return ast.Name(self._name(*target), node.ctx) if target else node


def _uses_early(modules: Mapping[str, Module], reached: set[Name]) -> bool:
    """Whether the script uses the kit while it is imported: as a base class, a decorator, a default, a constant."""
    theirs = {name for module, name in reached if module != SCRIPT}
    for module, name in reached:
        if module != SCRIPT:
            continue
        statement = modules[SCRIPT].bound[name]
        parts: list[ast.AST] = [statement]
        if isinstance(statement, ast.FunctionDef):
            parts = [*statement.decorator_list, *statement.args.defaults, *(d for d in statement.args.kw_defaults if d)]
        elif isinstance(statement, ast.ClassDef):
            parts = [*statement.decorator_list, *statement.bases]
        if any(isinstance(node, ast.Name) and node.id in theirs for part in parts for node in ast.walk(part)):
            return True
    return False
