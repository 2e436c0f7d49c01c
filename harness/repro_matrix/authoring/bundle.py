"""Bundle a case's script and the functions of the kit that it reaches into one file. Pure: text in, text out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from repro_matrix.errors import ReproError

SCRIPT, RUN = "script", "repro_kit.run"
KIT = ("repro_kit", "repro_matrix")  # packages that an exported script does not import
# Modules that record evidence: an exported script has none of it.
RECORDING = ("repro_kit.rank_monitor", "repro_kit.code_location", "repro_kit.record", "repro_kit.settings")
UNKNOWN = object()
COMMENT = "@@"  # begins a string statement that stands for a comment
STUBS = Path(__file__).with_name("stubs.py.txt")  # short versions of functions of the kit, by module
Name = tuple[str, str]  # (module, top-level name)


class ExportError(ReproError):
    """A script that cannot stand alone."""


@dataclass(frozen=True)
class Bundle:
    imports: list[str]  # lines, of installed packages
    case: list[str]  # the script's own statements
    kit: list[str]  # statements of the kit


def bundle(script: str, kit: Mapping[str, str], values: Mapping[str, Any], title: str, checks: bool = True) -> Bundle:
    """``kit``: module -> source, of ``with_stubs``. ``values``: attributes of `run`. ``checks``: keep the checks of the
    result. Raises ExportError: the script uses what only the harness has, or files in its folder."""
    modules = _read_sources(script, kit)
    if "body" not in modules[SCRIPT].bound:
        raise ExportError(f"{title}: its script has no function body(run). Add one: it is what `repro run` calls.")
    run = SimpleNamespace(**values, device=SimpleNamespace(type=values.get("device_kind")))
    for module in modules.values():
        for name, statement in module.bound.items():
            inner = _imports_in(statement)
            module.imports.update({alias: each for alias, each in inner.items() if each.module.startswith(KIT)})
            module.bound[name] = _Simplify(module, run, checks).visit(statement)
    reached = _Reach(modules, title).run()
    texts: dict[bool, list[str]] = {True: [], False: []}  # by whether it is of the script
    names: dict[str, str] = {}
    order = [each for each in modules.values() if each.name not in (SCRIPT, RUN)]
    for here in [*order, modules[RUN], modules[SCRIPT]]:
        done = set()
        for name, statement in here.bound.items():
            if (here.name, name) not in reached.names or id(statement) in done:
                continue
            if names.setdefault(name, here.name) != here.name:
                raise ExportError(f"{title}: {names[name]} and {here.name} both define {name}. Rename one of them.")
            done.add(id(statement))
            if isinstance(statement, ast.ClassDef):
                statement.body = [e for e in statement.body if _is_alive(e, reached.attributes)] or [ast.Pass()]
            texts[here.name == SCRIPT].append(_text(statement))
    return Bundle(sorted(reached.imports), texts[True], texts[False])


# -- the sources


@dataclass(frozen=True)
class Import:
    module: str
    name: str | None  # in the module; None: the module itself
    line: str


@dataclass
class Module:
    """One source file."""

    name: str
    bound: dict[str, ast.stmt] = field(default_factory=dict)  # name -> the top-level statement that binds it
    imports: dict[str, Import] = field(default_factory=dict)  # by alias

    def bind(self, statement: ast.stmt) -> None:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            self.imports.update(_imports_in(statement))
        elif isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            self.bound[statement.name] = statement
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            stored = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
            self.bound.update({name.id: statement for name in stored})
        elif isinstance(statement, ast.Try):
            for inner in statement.body:
                self.bind(inner)


def _read_sources(script: str, kit: Mapping[str, str]) -> dict[str, Module]:
    """Return the script, the modules of the kit that it imports, and those that these import."""
    modules: dict[str, Module] = {}
    todo = [SCRIPT, RUN]
    while todo:
        name = todo.pop()
        if name in modules or not (name == SCRIPT or name in kit):
            continue
        module = modules[name] = Module(name)
        for statement in ast.parse(_keep_triggers(script) if name == SCRIPT else kit[name]).body:
            module.bind(statement)
        every = [*module.imports.values(), *(i for each in module.bound.values() for i in _imports_in(each).values())]
        todo += [part for each in every for part in (each.module, f"{each.module}.{each.name}")]
    return dict(sorted(modules.items()))


def with_stubs(kit: Mapping[str, str], checks: bool) -> dict[str, str]:
    """Return the kit's modules with stubs in place of what records evidence. ``checks``: with the stubs that check the
    result, else with their empty versions."""
    parts = re.split(r"^# ==== (\S+)(?: (checks|unchecked))?\n", STUBS.read_text(encoding="utf-8"), flags=re.M)[1:]
    other = "unchecked" if checks else "checks"
    stubs = {name: text for name, kind, text in zip(parts[::3], parts[1::3], parts[2::3]) if kind != other}
    sources = {**kit, RUN: ""}
    return sources | {name: f"{sources.get(name, '')}\n{text}" for name, text in stubs.items()}


def _imports_in(node: ast.AST) -> dict[str, Import]:
    found: dict[str, Import] = {}
    for each in ast.walk(node):
        for item in each.names if isinstance(each, (ast.Import, ast.ImportFrom)) else ():
            renamed = f" as {item.asname}" if item.asname else ""
            if isinstance(each, ast.Import):
                alias = item.asname or item.name.partition(".")[0]
                found[alias] = Import(item.name, None, f"import {item.name}{renamed}")
            elif isinstance(each, ast.ImportFrom):
                line = f"from {each.module} import {item.name}{renamed}"
                found[item.asname or item.name] = Import(str(each.module), item.name, line)
    return found


def _keep_triggers(text: str) -> str:
    """Turn each `# <-` comment, which the parser drops, into a string statement before its line."""

    def marked(found: re.Match[str]) -> str:
        return f"{found[1]}{COMMENT + '# -->' + found[3]!r}\n{found[1]}{found[2]}"

    return re.sub(r"^([ \t]*)(.*?)[ \t]*# <-(.*)$", marked, text, flags=re.M)


def _text(statement: ast.stmt) -> str:
    """Return the statement as text, with its triggers as comments."""
    text = ast.unparse(ast.fix_missing_locations(statement))
    mark = re.compile(rf"^(\s*)(['\"]{COMMENT}.*)$", re.M)
    return mark.sub(lambda found: found[1] + str(ast.literal_eval(found[2])).removeprefix(COMMENT), text)


# -- what is left out


class _Simplify(ast.NodeTransformer):
    """Remove annotations, the kit's docstrings, calls that only record, and branches that the settings rule out."""

    def __init__(self, module: Module, run: SimpleNamespace, checks: bool) -> None:
        self.module, self.checks = module, checks
        self.slug = getattr(run, "strategy", {}).get("slug")
        self.names = {"run": run, "self": run if module.name == RUN else SimpleNamespace(run=run)}

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if not isinstance(block, list):
                continue
            ends = [at for at, each in enumerate(block) if _ends(each)]
            block = block[: ends[0] + 1] if ends else block
            bare = name == "body" and all(map(_is_comment, block))
            setattr(node, name, [*block, ast.Pass()] if bare else block)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.returns = None
        bound = list(_bindings(node))
        for each in ast.walk(node):  # `slug = run.strategy["slug"]`
            if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
                name, value = each.targets[0].id, self._value(each.value)
                if bound.count(name) == 1 and value is not UNKNOWN:
                    self.names[name] = value
        return self.visit_ClassDef(node)

    def visit_ClassDef(self, node: Any) -> Any:
        if self.module.name != SCRIPT and ast.get_docstring(node):
            node.body = node.body[1:]
        return self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        return None if str(node.module).startswith(KIT) else node

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        """`zero.engine` is `engine` in the one file."""
        owner = self.module.imports.get(node.value.id) if isinstance(node.value, ast.Name) else None
        if owner is None or owner.module != "repro_kit" or owner.name in ("Run", "main"):
            return self.generic_visit(node)
        self.module.imports[node.attr] = Import(f"repro_kit.{owner.name}", node.attr, owner.line)
        return ast.Name(node.attr, node.ctx)

    def visit_arg(self, node: ast.arg) -> Any:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        self.generic_visit(node)
        return ast.copy_location(ast.Assign([node.target], node.value), node) if node.value else None

    def visit_Dict(self, node: ast.Dict) -> Any:
        """Of a table by strategy only the entry of the run's strategy is used."""
        entries = list(zip(node.keys, node.values))
        used = [(key, value) for key, value in entries if isinstance(key, ast.Constant) and key.value == self.slug]
        if self.slug and used and all(isinstance(value, ast.Name) for value in node.values):
            node.keys, node.values = [used[0][0]], [used[0][1]]
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> Any:
        value = self._value(node.test)
        if value is UNKNOWN:
            return self.generic_visit(node)
        chosen = node.body if value else node.orelse
        return self.generic_visit(ast.If(ast.Constant(True), chosen, [])).body if chosen else None  # type: ignore[attr-defined]

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        value = self._value(node.test)
        return self.generic_visit(node) if value is UNKNOWN else self.visit(node.body if value else node.orelse)

    def _value(self, node: ast.expr) -> Any:
        """Return the value of an expression of the run's settings, UNKNOWN where it is more than that."""
        if not all(each.id in self.names for each in ast.walk(node) if isinstance(each, ast.Name)):
            return UNKNOWN
        try:
            code = compile(ast.fix_missing_locations(ast.Expression(node)), "export", "eval")
            found = eval(code, {"__builtins__": {}}, self.names)
        except Exception:  # noqa: BLE001 - it needs more than the settings
            return UNKNOWN
        return found if isinstance(found, (bool, int, float, str, type(None))) else UNKNOWN

    def visit_Expr(self, node: ast.Expr) -> Any:
        call = node.value.func if isinstance(node.value, ast.Call) else None
        name = call.id if isinstance(call, ast.Name) else call.attr if isinstance(call, ast.Attribute) else ""
        imported = self.module.imports.get(name)
        owner = ast.unparse(call.value) if isinstance(call, ast.Attribute) else ""
        records = owner in ("run", "self.run") and name in ("fact", "phase", "metric")
        records = records or (imported is not None and imported.module == "repro_kit.instrumentation")
        return None if records or (name.startswith("check") and not self.checks) else self.generic_visit(node)


def _ends(each: ast.stmt) -> bool:
    """Whether no statement after this one is reached."""
    return isinstance(each, (ast.Return, ast.Raise)) or (isinstance(each, ast.With) and _ends(each.body[-1]))


def _is_comment(each: ast.stmt) -> bool:
    value = each.value if isinstance(each, ast.Expr) else None
    return isinstance(value, ast.Constant) and str(value.value).startswith(COMMENT)


# -- what is reached


class _Reach:
    """What the script's body reaches: top-level names, and of a class the methods that something names."""

    def __init__(self, modules: Mapping[str, Module], title: str) -> None:
        self.modules, self.title = modules, title
        self.names: set[Name] = set()
        self.imports: set[str] = set()
        self.attributes: set[str] = set()

    def run(self) -> _Reach:
        before = -1
        while before < len(self.attributes):  # a method that is named now may reach more
            before = len(self.attributes)
            self.names, self.imports = set(), set()
            todo = [(SCRIPT, "body"), (RUN, "main")]
            while todo:
                name = todo.pop()
                if name not in self.names:
                    self.names.add(name)
                    todo += self._needs(*name)
        return self

    def _needs(self, module: str, name: str) -> Iterator[Name]:
        here = self.modules[module]
        statement = here.bound[name]
        parts: list[ast.AST] = [statement]
        if isinstance(statement, ast.ClassDef):
            alive = [each for each in statement.body if _is_alive(each, self.attributes)]
            parts = [*statement.bases, *statement.decorator_list, *alive]
        for part in parts:
            inner = _imports_in(part)
            local = set(_bindings(part)) - set(inner)
            for node in ast.walk(part):
                if isinstance(node, ast.Attribute):
                    self.attributes.add(node.attr)
                elif isinstance(node, ast.Name) and node.id not in local:
                    yield from self._named(here, node.id, inner, isinstance(statement, ast.ClassDef))

    def _named(self, here: Module, name: str, inner: Mapping[str, Import], in_class: bool) -> Iterator[Name]:
        if in_class:
            self.attributes.add(name)  # an attribute of a class may use another one
        if name == "__file__":
            raise ExportError(f"{self.title}: {here.name} reads files in its folder: a single file has none.")
        imported = inner.get(name) or (None if name in here.bound else here.imports.get(name))
        if imported is None:
            if name in here.bound:
                yield here.name, name
        elif not imported.module.startswith(KIT):
            if name not in inner:
                self.imports.add(imported.line)
        else:
            if name != imported.name:
                raise ExportError(f"{self.title}: `{imported.line}`: import it under its own name.")
            yield self._known(imported.module, name)

    def _known(self, module: str, name: str) -> Name:
        module = RUN if module == "repro_kit" else module
        here = self.modules.get(module)
        if here and name not in here.bound and name in here.imports:  # imported there from another module
            return self._known(here.imports[name].module, name)
        if here is None or module in RECORDING or name not in here.bound:
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


def _bindings(node: ast.AST) -> Iterator[str]:
    """Yield every name that is bound anywhere in a function, its arguments included."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, (ast.Store, ast.Del)):
            yield each.id
        elif isinstance(each, ast.arg):
            yield each.arg
        elif isinstance(each, (ast.FunctionDef, ast.ClassDef)) and each is not node:
            yield each.name
