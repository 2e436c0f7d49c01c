"""What one variant's settings decide, decided: constants in the place of settings, and only the branches that are
taken.

A script of repros/ serves all variants of its case, an exported one is about one variant: ``run.flags["call"]`` becomes
``'inner'``, an ``if`` on it becomes its body, and a local name that holds nothing but such a value goes. What only
tells the judge something (``run.fact``, ``watch``) goes, too. Pure: syntax trees in, the same trees changed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping
from typing import Any

from repro_matrix.authoring.export.code import NOTHING, harmless, literal, value_of
from repro_matrix.authoring.export.prune import without_constants, without_proofs, without_unused, without_what_follows

# What only says something to the judge: methods of `run`, and functions of repro_kit/instrumentation.py and others.
SILENT_METHODS = ("fact", "phase", "metric")
SILENT = {
    "repro_kit.instrumentation": (
        "note",
        "checkpointing",
        "adapters",
        "precision",
        "tokens",
        "files",
        "watch_flag",
        "watch",
    ),
    "repro_kit.models": ("fetch_code",),
}
_TABLES = ("flags", "options", "model", "strategy", "settings")
_CALLS: dict[str, Callable[..., Any]] = {"int": int, "str": str, "bool": bool, "float": float}


class Fold(ast.NodeTransformer):
    """One pass over a top-level statement; ``changed`` says whether another may find more.

    ``values``: what `run` is known to have: attribute -> value (a mapping for flags, options, model ...).
    ``constants``: top-level names of functions that give nothing (None) or one constant. ``tables``: top-level
    names that are a
    mapping in braces. ``proven``: False: what checks the result is left out, too. ``silent``, ``watch``: how the
    functions that only tell the judge something, and repro_kit.instrumentation.watch, are called here.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        constants: Mapping[str, Any],
        tables: Mapping[str, ast.Dict],
        proven: bool,
        silent: Collection[str] = (),
        watch: Collection[str] = (),
    ) -> None:
        self.values, self.constants, self.tables, self.proven = values, constants, tables, proven
        self.silent, self.watch = silent, watch
        self.changed = False

    # -- values

    def _of_run(self, node: ast.expr) -> Any:
        """The value of `run.X`, `self.run.X` and of what is looked up in it."""
        if isinstance(node, ast.Attribute):
            base = node.value
            if "run" in (getattr(base, "id", None), getattr(base, "attr", None)):
                return self.values.get(node.attr, NOTHING)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            table = self._of_run(node.value)
            if isinstance(table, Mapping):
                return table.get(node.slice.value, NOTHING)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            table = self._of_run(node.func.value)
            if isinstance(table, Mapping) and isinstance(node.args[0], ast.Constant):
                default = value_of(node.args[1]) if len(node.args) > 1 else None
                return table.get(node.args[0].value, default)
        return NOTHING

    def _known(self, node: ast.expr) -> ast.expr | None:
        value = self._of_run(node)
        if value is NOTHING or isinstance(value, Mapping):
            return None
        self.changed = True
        return ast.copy_location(literal(value), node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if isinstance(node.ctx, ast.Load):
            known = self._known(node)
            if known is not None:
                return known
            if node.attr == "type" and isinstance(node.value, ast.Attribute) and node.value.attr == "device":
                kind = self._of_run(ast.Attribute(node.value.value, "device_kind", ast.Load()))
                if kind is not NOTHING:
                    self.changed = True
                    return literal(kind)
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        known = self._known(node) if isinstance(node.ctx, ast.Load) else None
        if known is not None:
            return known
        self.generic_visit(node)
        table = self.tables.get(node.value.id) if isinstance(node.value, ast.Name) else node.value
        if isinstance(table, ast.Dict) and isinstance(node.slice, ast.Constant) and isinstance(node.ctx, ast.Load):
            for key, value in zip(table.keys, table.values):
                if isinstance(key, ast.Constant) and key.value == node.slice.value:
                    self.changed = True
                    return value
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        known = self._known(node)
        if known is not None:
            return known
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in self.watch and len(node.args) > 1:
            self.changed = True
            return node.args[1]
        if name in self.constants:
            self.changed = True
            return literal(self.constants[name])
        values = [value_of(each) for each in node.args]
        if name in _CALLS and len(values) == 1 and values[0] is not NOTHING:
            self.changed = True
            return literal(_CALLS[name](values[0]))
        if name == "getattr" and len(values) == 2 and isinstance(values[1], str):
            self.changed = True
            return ast.Attribute(node.args[0], values[1], ast.Load())
        if isinstance(node.func, ast.Attribute) and node.func.attr == "startswith" and len(values) == 1:
            text = value_of(node.func.value)
            if isinstance(text, str) and isinstance(values[0], str):
                self.changed = True
                return literal(text.startswith(values[0]))
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        self.generic_visit(node)
        parts: list[Any] = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue) and part.conversion == -1 and part.format_spec is None:
                value = value_of(part.value)
                part = ast.Constant(str(value)) if value is not NOTHING else part
            if isinstance(part, ast.Constant) and parts and isinstance(parts[-1], ast.Constant):
                parts[-1] = ast.Constant(str(parts[-1].value) + str(part.value))
            else:
                parts.append(part)
        if all(isinstance(part, ast.Constant) for part in parts):
            return literal("".join(str(part.value) for part in parts if isinstance(part, ast.Constant)))
        node.values = parts
        return node

    # -- conditions

    def visit_Compare(self, node: ast.Compare) -> Any:
        return self._computed(self.generic_visit(node))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        return self._computed(node) if isinstance(node.op, ast.Not) else node

    def _computed(self, node: Any) -> Any:
        value = value_of(node)
        if value is NOTHING:
            return node
        self.changed = True
        return literal(value)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        stops = isinstance(node.op, ast.Or)  # the truth at which it ends
        kept: list[ast.expr] = []
        for at, each in enumerate(node.values):
            value = value_of(each)
            if value is NOTHING:
                kept.append(each)
            elif bool(value) == stops or at == len(node.values) - 1:
                kept.append(each)
                break
        if len(kept) < len(node.values):
            self.changed = True
        node.values = kept
        return kept[0] if len(kept) == 1 else node

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        self.generic_visit(node)
        value = value_of(node.test)
        if value is NOTHING:
            return node
        self.changed = True
        return node.body if value else node.orelse

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        value = value_of(node.test)
        if value is not NOTHING:
            self.changed = True
            return node.body if value else node.orelse
        if not node.body and not node.orelse:
            self.changed = True
            return [] if harmless(node.test) else ast.Expr(node.test)
        if not node.body:
            node.test, node.body, node.orelse = ast.UnaryOp(ast.Not(), node.test), node.orelse, []
        return node

    # -- statements

    def visit_Expr(self, node: ast.Expr) -> Any:
        if self._silent(node.value):
            self.changed = True
            return []
        self.generic_visit(node)
        return [] if isinstance(node.value, ast.Name) else node

    def _silent(self, node: ast.expr) -> bool:
        if not isinstance(node, ast.Call):
            return False
        if isinstance(node.func, ast.Name):
            name = node.func.id
            return name in self.silent or (name in self.constants and self.constants[name] is None)
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in ("run", "self.run"):
            return node.func.attr in SILENT_METHODS or (node.func.attr == "check" and not self.proven)
        return False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        self.generic_visit(node)
        if not self.proven:
            self.changed |= without_proofs(node)
        self.changed |= without_constants(node)
        without_what_follows(node)
        self.changed |= without_unused(node, self.proven)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_For(self, node: ast.For) -> Any:
        self.generic_visit(node)
        if node.body:
            return node
        self.changed = True
        return [] if harmless(node.iter) else ast.Expr(node.iter)

    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node
