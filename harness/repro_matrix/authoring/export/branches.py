"""Remove what one variant does not need: branches that its settings rule out, and calls that only record. Pure."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from repro_matrix.authoring.export.sources import COMMENT, Module, bindings, target_of

UNKNOWN = object()
_RECORDS = {"repro_kit.instrumentation": None, "repro_kit.models": ("fetch_code",)}  # None: every function
_REFERENCES = ("Reference", "Single")  # classes that compute what one process would
_ALLOWED = (
    ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Tuple, ast.List,
    ast.Set, ast.Call, ast.cmpop, ast.boolop, ast.unaryop, ast.expr_context,
)  # fmt: skip
_CALLS = {"int": int, "bool": bool, "str": str}
_LITERALS = (bool, int, float, str, type(None))


def simplify(modules: Mapping[str, Module], values: Mapping[str, Any], proven: bool) -> None:
    """Change the modules' statements. ``values``: attributes of ``run``; ``proven``: keep the checks of the result."""
    device = SimpleNamespace(type=values.get("device_kind"))
    run = SimpleNamespace(**values, proven=proven, device=device)
    for module in modules.values():
        for name, statement in module.bound.items():
            for _ in range(2):  # what the first pass removes may make a name a constant
                statement = _Simplify(modules, module, statement, run, proven).visit(statement)
            module.bound[name] = statement


class _Simplify(ast.NodeTransformer):
    def __init__(
        self, modules: Mapping[str, Module], module: Module, statement: ast.stmt, run: Any, proven: bool
    ) -> None:
        self.proven, self.module = proven, module
        own = vars(run) if module.name == "repro_kit.run" else {}
        self.names = {"run": run, "self": SimpleNamespace(run=run, **own), **_CALLS}
        self.targets = {
            alias: target
            for alias, imported in module.visible_imports(statement).items()
            if (target := target_of(modules, imported))
        }
        self.references: set[str] = set()

    def value(self, node: ast.AST) -> Any:
        """The value of an expression of settings and literals; UNKNOWN where it is more than that."""
        for each in ast.walk(node):
            if not isinstance(each, _ALLOWED) or (isinstance(each, ast.Name) and each.id not in self.names):
                return UNKNOWN
            if isinstance(each, ast.Call) and not (
                (isinstance(each.func, ast.Name) and each.func.id in _CALLS)
                or (isinstance(each.func, ast.Attribute) and each.func.attr in ("get", "startswith"))
            ):
                return UNKNOWN
        try:
            expression = ast.fix_missing_locations(ast.Expression(node))  # type: ignore[arg-type]
            found = eval(compile(expression, "export", "eval"), {"__builtins__": {}}, self.names)
        except Exception:  # noqa: BLE001 - leave it as it is written
            return UNKNOWN
        return found if isinstance(found, _LITERALS) else UNKNOWN

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if not isinstance(block, list):
                continue
            ends = [at for at, each in enumerate(block) if _ends(each)]
            block = block[: ends[0] + 1] if ends else block
            setattr(node, name, [*block, ast.Pass()] if name == "body" and _bare(block) else block)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        bound = bindings(node)
        for each in ast.walk(node):
            if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
                name, value = each.targets[0].id, self.value(each.value)
                if bound.count(name) == 1 and value is not UNKNOWN:
                    self.names[name] = value
                called = each.value.func if isinstance(each.value, ast.Call) else None
                if isinstance(called, ast.Name) and called.id in _REFERENCES:
                    self.references.add(name)
        self.generic_visit(node)
        loaded = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
        constant = {name for name in set(bound) & set(self.names) if bound.count(name) == 1}
        _Unused((constant | (set() if self.proven else self.references)) - loaded, loaded).visit(node)
        return node

    def visit_If(self, node: ast.If) -> Any:
        value = self.value(node.test)
        if value is UNKNOWN:
            self.generic_visit(node)
            if _empty(node.body) and not node.orelse and not _calls(node.test):
                return []
            return node
        inner = [self.visit(each) for each in (node.body if value else node.orelse)]
        return [each for part in inner for each in (part if isinstance(part, list) else [part])]

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        value = self.value(node.test)
        return self.generic_visit(node) if value is UNKNOWN else self.visit(node.body if value else node.orelse)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        absorbs = isinstance(node.op, ast.Or)
        parts: list[ast.expr] = []
        for each in node.values:
            value = self.value(each)
            if value is UNKNOWN or bool(value) == absorbs or each is node.values[-1]:
                parts.append(each)
            if value is not UNKNOWN and bool(value) == absorbs:
                break
        node.values = parts
        return parts[0] if len(parts) == 1 else node

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        """TABLE[run.flags["which"]] is the table's entry."""
        table = node.value
        if isinstance(table, ast.Name) and isinstance(self.module.bound.get(table.id), ast.Assign):
            table = self.module.bound[table.id].value  # type: ignore[attr-defined]
        key = self.value(node.slice)
        if isinstance(table, ast.Dict) and key is not UNKNOWN:
            for each, entry in zip(table.keys, table.values):
                if isinstance(each, ast.Constant) and each.value == key:
                    return entry
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        if self._target(node) == ("repro_kit.instrumentation", "watch") and len(node.args) > 1:
            return self.visit(node.args[1])
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> Any:
        if isinstance(node.value, ast.Call) and self._records(node.value):
            return []
        self.generic_visit(node)
        return [] if isinstance(node.value, ast.Name) else node

    def _target(self, node: ast.Call) -> tuple[str, str]:
        return self.targets.get(node.func.id, ("", "")) if isinstance(node.func, ast.Name) else ("", "")

    def _records(self, node: ast.Call) -> bool:
        module, name = self._target(node)
        if module in _RECORDS and name != "watch":
            names = _RECORDS[module]
            return names is None or name in names
        if not isinstance(node.func, ast.Attribute):
            return False
        owner, method = ast.unparse(node.func.value), node.func.attr
        if owner in ("run", "self.run"):
            return method in ("fact", "phase", "metric") or (method == "check" and not self.proven)
        return not self.proven and owner in self.references and method.startswith("check")


class _Unused(ast.NodeTransformer):
    """Remove the assignments to ``names``, and imports of a function that are not ``loaded``."""

    def __init__(self, names: set[str], loaded: set[str]) -> None:
        self.names, self.loaded = names, loaded

    def visit_Assign(self, node: ast.Assign) -> Any:
        return ast.Pass() if isinstance(node.targets[0], ast.Name) and node.targets[0].id in self.names else node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        node.names = [each for each in node.names if (each.asname or each.name) in self.loaded]
        return node if node.names else ast.Pass()

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse"):
            block = getattr(node, name, None)
            if isinstance(block, list) and len(block) > 1:
                rest = [each for each in block if not isinstance(each, ast.Pass)]
                setattr(node, name, rest if not _bare(rest) else [*rest, ast.Pass()])
        return node


def _ends(each: ast.stmt) -> bool:
    """Whether no statement after this one is reached."""
    if isinstance(each, ast.With):
        return _ends(each.body[-1])
    return isinstance(each, (ast.Return, ast.Raise, ast.Continue))


def _bare(block: list[ast.stmt]) -> bool:
    return all(map(_is_comment, block))


def _empty(block: list[ast.stmt]) -> bool:
    return all(isinstance(each, ast.Pass) or _is_comment(each) for each in block)


def _is_comment(each: ast.stmt) -> bool:
    value = each.value if isinstance(each, ast.Expr) else None
    return isinstance(value, ast.Constant) and str(value.value).startswith(COMMENT)


def _calls(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Call) for each in ast.walk(node))
