"""A script of repros/ and what it uses of the kit -> one file about one arm. Pure: text in, text out.

The kit does much for the harness alone: the record, the evidence of what was in force, references that attempts share,
models drawn piece by piece. In its place stand the short definitions under ``plain/``, which have the same names and
say the same to a script. Then the arm's settings are put in (fold.py), and what is left and reached from the script's
``body`` is taken: functions, classes, and of a class the methods that somebody names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro_matrix.conf.errors import ReproError
from repro_matrix.export import fold, layout

PLAIN = Path(__file__).with_name("plain")
SCRIPT = "script"
_OWN = ("kit", "arm_settings", "harness")
_HARNESS = ("kit.witness", "kit.place", "kit.record", "arm_settings", "harness")
GIVEN = ("flags", "options", "model", "strategy")  # of `run`, as a whole: constants that script.py defines


class ExportError(ReproError):
    """A script that cannot stand alone."""


@dataclass
class _Module:
    """One source file: its top-level statements by the names that they bind, and what it imports."""

    name: str
    bound: dict[str, ast.stmt] = field(default_factory=dict)
    imports: dict[str, tuple[str, str | None, str]] = field(default_factory=dict)  # alias -> (module, name, the line)

    @classmethod
    def read(cls, name: str, text: str) -> _Module:
        tree = ast.parse(text)
        if name == SCRIPT:
            layout.annotate(tree, layout.comments(text))
        module = cls(name)
        for statement in tree.body:
            module.bind(statement)
        return module

    def bind(self, statement: ast.stmt) -> None:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            self.imports.update(_imports(statement))
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

    def local(self, node: ast.AST) -> dict[str, tuple[str, str | None, str]]:
        """All imports that a statement sees: the module's, and those within it."""
        found = dict(self.imports)
        for each in ast.walk(node):
            if isinstance(each, (ast.Import, ast.ImportFrom)):
                found.update(_imports(each))
        return found


@dataclass
class Bundle:
    imports: list[str]  # lines, of what is installed
    case: list[str]  # the script's own statements
    kit: list[tuple[str, str]]  # (where it is from, text)
    first: bool  # whether the kit's must stand before the script's, which uses them when it is imported


def bundle(
    script: str,
    kit: Mapping[str, str],
    values: Mapping[str, Any],
    title: str,
    proven: bool = True,
    plain: Mapping[str, str] | None = None,
) -> Bundle:
    """``kit``, ``plain``: dotted name -> source. ``values``: what `run` is known to have (fold.Fold). ``proven``: False
    leaves out what checks the result. Raises ExportError: it uses what is the harness's alone, or files beside it."""
    plain = read_plain() if plain is None else plain
    modules = _read(script, kit, plain)
    if "body" not in modules[SCRIPT].bound:
        raise ExportError(f"{title}: its script has no function body(run)")
    _fold(modules, {**values, "proven": proven}, proven)
    reached, imports, named = _reach(modules, title)
    names = _told_apart(modules, reached)
    for module, own_names in reached.items():
        for name in own_names:
            _Renamed(modules, module, names).visit(modules[module].bound[name])
    parts = [(module, _texts(modules[module], found, named)) for module, found in reached.items() if found]
    own = next(texts for module, texts in parts if module == SCRIPT)
    rest = [(module, "\n\n\n".join(texts)) for module, texts in parts if module != SCRIPT]
    return Bundle(sorted(imports), own, rest, _early(modules, reached))


def read_plain() -> dict[str, str]:
    return {f"kit.{path.name.partition('.')[0]}": path.read_text(encoding="utf-8") for path in PLAIN.glob("*.py.txt")}


# -- sources


def _read(script: str, kit: Mapping[str, str], plain: Mapping[str, str]) -> dict[str, _Module]:
    """The script, the modules that it imports, and those that these import; in the order of their names."""
    found = {SCRIPT: _Module.read(SCRIPT, script)}
    todo = [SCRIPT, "kit.run"]
    while todo:
        name = todo.pop()
        if name not in found:
            if name not in kit and name not in plain:
                continue
            found[name] = _Module.read(name, kit[name] if name in kit and name != "kit.run" else "")
            over = _Module.read(name, plain.get(name, ""))
            found[name].bound.update(over.bound)
            found[name].imports.update(over.imports)
        elif name != SCRIPT:
            continue
        here = found[name]
        seen = [*here.imports.values(), *(of for each in here.bound.values() for of in here.local(each).values())]
        todo += {f"kit.{what}" if module == "kit" else module for module, what, _ in seen}
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


def _imports(statement: ast.Import | ast.ImportFrom) -> dict[str, tuple[str, str | None, str]]:
    found: dict[str, tuple[str, str | None, str]] = {}
    for item in statement.names:
        renamed = f" as {item.asname}" if item.asname else ""
        if isinstance(statement, ast.Import):
            alias = item.asname or item.name.partition(".")[0]
            found[alias] = (item.name, None, f"import {item.name}{renamed}")
        else:
            line = f"from {statement.module} import {item.name}{renamed}"
            found[item.asname or item.name] = (str(statement.module), item.name, line)
    return found


def _target(modules: Mapping[str, _Module], of: tuple[str, str | None, str]) -> tuple[str, str] | None:
    """The (module, name) of ours that an import is; None where it is installed, or a whole module."""
    module, name, _ = of
    if module == "kit" and name in ("Run", "main"):
        module = "kit.run"
    return (module, name) if name is not None and module in modules else None


# -- settings


def _fold(modules: Mapping[str, _Module], values: Mapping[str, Any], proven: bool) -> None:
    """Until nothing changes any more."""
    todo = {(module.name, name) for module in modules.values() for name in module.bound}
    gives: dict[tuple[str, str], Any] = {}
    tables = {
        (module.name, name): statement.value
        for module in modules.values()
        for name, statement in module.bound.items()
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict)
    }
    while todo:
        changed = set()
        for module, name in sorted(todo):
            here = modules[module]
            statement = here.bound[name]
            names = _visible(modules, here, statement)
            one = fold.Fold(
                values,
                {alias: gives[of] for alias, of in names.items() if of in gives},
                {alias: tables[of] for alias, of in names.items() if of in tables},
                proven,
                {alias for alias, of in names.items() if of[1] in fold.SILENT.get(of[0], ())},
                {alias for alias, of in names.items() if of == ("kit.in_force", "watch")},
            )
            here.bound[name] = one.visit(statement)
            if one.changed:
                changed.add((module, name))
        new = {}
        for module, name in todo:
            statement = modules[module].bound[name]
            found = fold.gives(statement) if isinstance(statement, ast.FunctionDef) else ()
            if found and (module, name) not in gives:
                new[module, name] = found[0]
        gives.update(new)
        words = {name for _, name in new}
        callers = {
            (module.name, name)
            for module in modules.values()
            for name, statement in module.bound.items()
            if words and any(isinstance(n, ast.Name) and n.id in words for n in ast.walk(statement))
        }
        todo = changed | callers


def _visible(modules: Mapping[str, _Module], here: _Module, statement: ast.stmt) -> dict[str, tuple[str, str]]:
    """What a statement calls things of ours: alias -> (module, name)."""
    inner = {}
    for node in ast.walk(statement):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            inner.update(_imports(node))
    taken = set(fold.bindings(statement)) - set(inner) if isinstance(statement, ast.FunctionDef) else set()
    names = {alias: found for alias, of in {**here.imports, **inner}.items() if (found := _target(modules, of))}
    names.update({own: (here.name, own) for own in here.bound})
    return {alias: of for alias, of in names.items() if alias not in taken}


# -- what is reached


def _reach(modules: Mapping[str, _Module], title: str) -> tuple[dict[str, list[str]], dict[str, None], set[str]]:
    """(module -> top-level names that are reached, the imports of what is installed, attributes that are named)."""
    attributes: set[str] = set()
    while True:
        imports: dict[str, None] = {}
        seen = {(SCRIPT, "body"), ("kit.run", "main")}
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
    order = [*(name for name in modules if name not in (SCRIPT, "kit.run")), "kit.run", SCRIPT]
    reached = {}
    for module in order:
        statements: dict[int, str] = {}
        for name, statement in modules[module].bound.items():
            if (module, name) in seen:
                statements.setdefault(id(statement), name)
        reached[module] = list(statements.values())
    return reached, imports, attributes


def _alive(statement: ast.stmt, attributes: set[str]) -> list[ast.AST]:
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
    modules: Mapping[str, _Module],
    module: str,
    name: str,
    imports: dict[str, None],
    attributes: set[str],
    named: set[str],
    title: str,
) -> Iterator[tuple[str, str]]:
    """What a top-level name needs: (module, name) of this bundle; what is installed goes to ``imports``."""
    here = modules[module]
    for part in _alive(here.bound[name], attributes):
        inner: dict[str, tuple[str, str | None, str]] = {}
        for node in ast.walk(part):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                inner.update(_imports(node))
        seen = {**here.imports, **inner}
        taken = set(fold.bindings(part)) - set(inner)
        for node in ast.walk(part):
            if isinstance(node, ast.Attribute):
                named.add(node.attr)
                if isinstance(node.value, ast.Name) and (whole := _whole(modules, seen.get(node.value.id))):
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
            elif of[0].startswith(_OWN):
                if not _whole(modules, of):
                    target = _target(modules, of)
                    yield from _found(modules, *(target or (of[0], str(of[1]))), title)
            elif node.id not in inner:
                imports[of[2]] = None


def _whole(modules: Mapping[str, _Module], of: tuple[str, str | None, str] | None) -> str:
    """The module of the kit that a name is: `from kit import zero`."""
    return f"kit.{of[1]}" if of and of[0] == "kit" and f"kit.{of[1]}" in modules else ""


def _found(modules: Mapping[str, _Module], module: str, name: str, title: str) -> Iterator[tuple[str, str]]:
    if module in _HARNESS or module not in modules:
        raise ExportError(f"{title}: it uses {module}.{name}, which is the harness's alone")
    here = modules[module]
    if name in here.bound:
        yield module, name
    elif name in here.imports:  # handed on
        yield from _found(modules, *(_target(modules, here.imports[name]) or (here.imports[name][0], name)), title)
    elif module == "kit.run":
        raise ExportError(f"{title}: it uses {module}.{name}, which is the harness's alone")


# -- one file


def _told_apart(modules: Mapping[str, _Module], reached: Mapping[str, list[str]]) -> dict[tuple[str, str], str]:
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


class _Renamed(ast.NodeTransformer):
    """A module's statement with the names that things have in the one file, without its imports of the kit."""

    def __init__(self, modules: Mapping[str, _Module], module: str, names: Mapping[tuple[str, str], str]) -> None:
        self.modules, self.module, self.names = modules, module, names
        self.seen = dict(modules[module].imports)
        self.taken: list[set[str]] = []

    def _name(self, module: str, name: str) -> str:
        here = self.modules.get(module)
        if here is not None and name not in here.bound and name in here.imports:
            target = _target(self.modules, here.imports[name])
            return self._name(*target) if target else name
        return self.names.get((module, name), name)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        self.seen.update({a: of for a, of in self.modules[self.module].local(node).items()})
        inner = {a for each in ast.walk(node) if isinstance(each, (ast.Import, ast.ImportFrom)) for a in _imports(each)}
        self.taken.append(set(fold.bindings(node)) - inner)
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
        return [] if str(node.module).startswith(_OWN) else node

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if isinstance(node.value, ast.Name) and (whole := _whole(self.modules, self.seen.get(node.value.id))):
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
        if node.id in self.modules[self.module].bound and (of is None or not of[0].startswith(_OWN)):
            return ast.Name(self.names.get((self.module, node.id), node.id), node.ctx)
        target = _target(self.modules, of) if of else None
        return ast.Name(self._name(*target), node.ctx) if target else node


def _texts(module: _Module, names: list[str], attributes: set[str]) -> list[str]:
    texts = []
    for name in names:
        statement = module.bound[name]
        if isinstance(statement, ast.ClassDef):
            alive = {id(each) for each in _alive(statement, attributes)}
            if id(statement) not in alive:
                statement.body = [each for each in statement.body if id(each) in alive] or [ast.Pass()]
        texts.append(layout.text_of(statement))
    return texts


def _early(modules: Mapping[str, _Module], reached: Mapping[str, list[str]]) -> bool:
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
