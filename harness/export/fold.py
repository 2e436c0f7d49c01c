"""What one arm's settings decide, decided: constants in the place of settings, and only the branches that are taken.

A script of repros/ serves all arms of its case, an exported one is about one arm: ``run.flags["call"]`` becomes
``'inner'``, an ``if`` on it becomes its body, and a local name that holds nothing but such a value goes. What only
tells the judge something (``run.fact``, ``watch``) goes, too. Pure: syntax trees in, the same trees changed.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

Function = ast.FunctionDef
_NOTHING = object()
# What only says something to the judge: methods of `run`, and functions of kit/in_force.py and others.
SILENT_METHODS = ("fact", "phase", "metric")
SILENT = {
    "kit.in_force": ("note", "checkpointing", "adapters", "precision", "tokens", "files", "watch_flag", "watch"),
    "kit.models": ("fetch_code",),
}
PROOFS = ("Reference", "Single")  # classes that compute what one process would
LOOKS = ("full_parameters", "looked_at", "differing", "apart", "all_apart")  # what only a proof wants to know
_TABLES = ("flags", "options", "model", "strategy", "settings")
_PLAIN = (
    ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.IfExp, ast.cmpop,
    ast.boolop, ast.unaryop, ast.expr_context,
)  # fmt: skip
_CALLS: dict[str, Callable[..., Any]] = {"int": int, "str": str, "bool": bool, "float": float}


class Fold(ast.NodeTransformer):
    """One pass over a top-level statement; ``changed`` says whether another may find more.

    ``values``: what `run` is known to have: attribute -> value (a mapping for flags, options, model ...).
    ``constants``: top-level names of functions that give nothing (None) or one constant. ``tables``: top-level
    names that are a
    mapping in braces. ``proven``: False: what checks the result is left out, too. ``silent``, ``watch``: how the
    functions that only tell the judge something, and kit.in_force.watch, are called here.
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
                return self.values.get(node.attr, _NOTHING)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            table = self._of_run(node.value)
            if isinstance(table, Mapping):
                return table.get(node.slice.value, _NOTHING)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            table = self._of_run(node.func.value)
            if isinstance(table, Mapping) and isinstance(node.args[0], ast.Constant):
                default = _value(node.args[1]) if len(node.args) > 1 else None
                return table.get(node.args[0].value, default)
        return _NOTHING

    def _known(self, node: ast.expr) -> ast.expr | None:
        value = self._of_run(node)
        if value is _NOTHING or isinstance(value, Mapping):
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
                if kind is not _NOTHING:
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
        values = [_value(each) for each in node.args]
        if name in _CALLS and len(values) == 1 and values[0] is not _NOTHING:
            self.changed = True
            return literal(_CALLS[name](values[0]))
        if name == "getattr" and len(values) == 2 and isinstance(values[1], str):
            self.changed = True
            return ast.Attribute(node.args[0], values[1], ast.Load())
        if isinstance(node.func, ast.Attribute) and node.func.attr == "startswith" and len(values) == 1:
            text = _value(node.func.value)
            if isinstance(text, str) and isinstance(values[0], str):
                self.changed = True
                return literal(text.startswith(values[0]))
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        self.generic_visit(node)
        parts: list[Any] = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue) and part.conversion == -1 and part.format_spec is None:
                value = _value(part.value)
                part = ast.Constant(str(value)) if value is not _NOTHING else part
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
        value = _value(node)
        if value is _NOTHING:
            return node
        self.changed = True
        return literal(value)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        stops = isinstance(node.op, ast.Or)  # the truth at which it ends
        kept: list[ast.expr] = []
        for at, each in enumerate(node.values):
            value = _value(each)
            if value is _NOTHING:
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
        value = _value(node.test)
        if value is _NOTHING:
            return node
        self.changed = True
        return node.body if value else node.orelse

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        value = _value(node.test)
        if value is not _NOTHING:
            self.changed = True
            return node.body if value else node.orelse
        if not node.body and not node.orelse:
            self.changed = True
            return [] if _harmless(node.test) else ast.Expr(node.test)
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
            self._unproven(node)
        self._locals(node)
        _ends(node)
        self._unused(node)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_For(self, node: ast.For) -> Any:
        self.generic_visit(node)
        if node.body:
            return node
        self.changed = True
        return [] if _harmless(node.iter) else ast.Expr(node.iter)

    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def _unproven(self, node: Function) -> None:
        """Without the proofs: nobody computes what one process would."""
        for each in ast.walk(node):
            if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) and _called(each.value) in PROOFS:
                name = each.targets[0].id
                uses = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == name]
                held = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)
                        and n.value.id == name]  # fmt: skip
                if len(held) < len(uses) - 1:
                    continue  # it is handed on
                _Drop(name).visit(node)
                self.changed = True

    def _locals(self, node: Function) -> None:
        """Local names that are bound once, to a constant."""
        bound = bindings(node)
        known: dict[str, ast.expr] = {}
        for each in list(node.body):
            if isinstance(each, ast.Assign) and len(each.targets) == 1 and isinstance(each.targets[0], ast.Name):
                name = each.targets[0].id
                if isinstance(each.value, ast.Constant) and bound.count(name) == 1:
                    known[name] = each.value
                    node.body.remove(each)
        if known:
            self.changed = True
            _Replace(known).visit(node)

    def _unused(self, node: Function) -> None:
        """Imports and plain values that nobody reads any more, and lists that are only appended to."""
        loaded = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Store)]
        only: dict[str, int] = {}
        for each in ast.walk(node):
            appended = _appended(each)
            if appended:
                only[appended] = only.get(appended, 0) + 1
        gone = {name for name, count in only.items() if loaded.count(name) == count} - _arguments(node)
        if not self.proven:
            looks = [n for n in ast.walk(node) if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
                     and _looks(n.value)]  # fmt: skip
            for each in looks:
                name = each.targets[0].id  # type: ignore[attr-defined]
                within = [n for n in ast.walk(each.value) if isinstance(n, ast.Name) and n.id == name]
                if loaded.count(name) == len(within):
                    _Drop(name).visit(node)
                    self.changed = True
        if _Unread(set(loaded), gone if not self.proven else set()).clean(node):
            self.changed = True


class _Drop(ast.NodeTransformer):
    """Without a proof that is called ``name``; its learning rate is the kit's."""

    def __init__(self, name: str) -> None:
        self.name = name

    def visit_Assign(self, node: ast.Assign) -> Any:
        target = node.targets[0]
        if isinstance(target, ast.Name) and target.id == self.name:
            return []
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> Any:
        func = node.value.func if isinstance(node.value, ast.Call) else None
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == self.name:
            return []
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id == self.name and node.attr == "lr":
            return ast.Constant(0.1)
        return self.generic_visit(node)


class _Replace(ast.NodeTransformer):
    def __init__(self, known: Mapping[str, ast.expr]) -> None:
        self.known = known

    def visit_Name(self, node: ast.Name) -> Any:
        return self.known.get(node.id, node) if isinstance(node.ctx, ast.Load) else node


class _Unread(ast.NodeTransformer):
    def __init__(self, loaded: Collection[str], appended: Collection[str]) -> None:
        self.loaded, self.appended, self.changed = loaded, appended, False

    def clean(self, node: Function) -> bool:
        self.generic_visit(node)
        for each in ast.walk(node):
            for block in ("body",):
                if isinstance(getattr(each, block, None), list) and not getattr(each, block):
                    setattr(each, block, [ast.Pass()])
        return self.changed

    def visit_Assign(self, node: ast.Assign) -> Any:
        names = [t.id for t in node.targets if isinstance(t, ast.Name)]
        if len(names) == len(node.targets) == 1:
            plain = _harmless(node.value)
            if (names[0] in self.appended and plain) or (names[0] not in self.loaded and plain):
                self.changed = True
                return []
        return node

    def visit_Expr(self, node: ast.Expr) -> Any:
        if _appended(node) in self.appended:
            self.changed = True
            return []
        return node

    def _imports(self, node: Any) -> Any:
        kept = [item for item in node.names if (item.asname or item.name.partition(".")[0]) in self.loaded]
        if len(kept) == len(node.names) or isinstance(node, ast.Import):
            return node  # `import x` may be wanted for what it does
        self.changed = True
        node.names = kept
        return node if kept else []

    visit_ImportFrom = visit_Import = _imports


def literal(value: Any) -> ast.expr:
    return ast.parse(repr(value), mode="eval").body


def bindings(node: ast.AST) -> list[str]:
    """Every name that is bound anywhere in a function, as often as it is, its arguments included."""
    found = []
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, (ast.Store, ast.Del)):
            found.append(each.id)
        elif isinstance(each, ast.arg):
            found.append(each.arg)
        elif isinstance(each, (ast.Import, ast.ImportFrom)):
            found += [item.asname or item.name.partition(".")[0] for item in each.names]
        elif isinstance(each, (ast.FunctionDef, ast.ClassDef)) and each is not node:
            found.append(each.name)
    return found


def gives(node: Function) -> Any:
    """What a function always gives when that is a constant: (it,); () when it may do something."""
    body = [each for each in node.body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))]
    if any(not isinstance(each, (ast.Pass, ast.Return, ast.ImportFrom)) for each in body) or node.decorator_list:
        return ()
    returned = [each for each in body if isinstance(each, ast.Return)]
    value = _value(returned[0].value) if returned and returned[0].value is not None else None
    return () if value is _NOTHING or isinstance(value, (list, dict)) else (value,)


def _value(node: ast.expr) -> Any:
    """What an expression of constants alone gives; _NOTHING where it is more than that."""
    if isinstance(node, ast.Constant):
        return node.value
    if all(isinstance(each, _PLAIN) for each in ast.walk(node)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)  # `0 is None`
                code = compile(ast.fix_missing_locations(ast.Expression(node)), "export", "eval")
            return eval(code, {"__builtins__": {}})
        except Exception:  # noqa: BLE001 - left as it is written
            return _NOTHING
    return _NOTHING


def _called(node: ast.expr) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _looks(node: ast.expr) -> bool:
    return any(isinstance(part, ast.expr) and _called(part) in LOOKS for part in ast.walk(node))


def _appended(node: ast.AST) -> str:
    """The name that a statement `name.append(...)` is about."""
    call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    func = call.func if call else None
    if isinstance(func, ast.Attribute) and func.attr == "append" and isinstance(func.value, ast.Name):
        return func.value.id
    return ""


def _arguments(node: Function) -> set[str]:
    return {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}


def _harmless(node: ast.expr) -> bool:
    return not any(isinstance(each, (ast.Call, ast.Await, ast.Yield, ast.Subscript)) for each in ast.walk(node))


def _ends(node: Function) -> None:
    """Nothing stands after what always leaves."""
    for each in ast.walk(node):
        for field in ("body", "orelse"):
            block = getattr(each, field, None)
            if not isinstance(block, list):
                continue
            at = next((n for n, one in enumerate(block) if _leaves(one)), None)
            if at is not None:
                del block[at + 1 :]


def _leaves(node: ast.stmt) -> bool:
    within = isinstance(node, ast.With) and bool(node.body) and _leaves(node.body[-1])
    return within or isinstance(node, (ast.Return, ast.Raise))
