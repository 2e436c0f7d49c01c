"""Questions about a syntax tree: what it binds, what it gives, whether it does anything. Pure."""

from __future__ import annotations

import ast
import warnings
from typing import Any

NOTHING = object()  # not even None
_PLAIN = (
    ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.IfExp, ast.cmpop,
    ast.boolop, ast.unaryop, ast.expr_context,
)  # fmt: skip


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


def gives(node: ast.FunctionDef) -> Any:
    """What a function always gives when that is a constant: (it,); () when it may do something."""
    body = [each for each in node.body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))]
    if any(not isinstance(each, (ast.Pass, ast.Return, ast.ImportFrom)) for each in body) or node.decorator_list:
        return ()
    returned = [each for each in body if isinstance(each, ast.Return)]
    value = value_of(returned[0].value) if returned and returned[0].value is not None else None
    return () if value is NOTHING or isinstance(value, (list, dict)) else (value,)


def value_of(node: ast.expr) -> Any:
    """What an expression of constants alone gives; NOTHING where it is more than that."""
    if isinstance(node, ast.Constant):
        return node.value
    if all(isinstance(each, _PLAIN) for each in ast.walk(node)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)  # `0 is None`
                code = compile(ast.fix_missing_locations(ast.Expression(node)), "export", "eval")
            return eval(code, {"__builtins__": {}})
        except Exception:  # noqa: BLE001 - left as it is written
            return NOTHING
    return NOTHING


def called(node: ast.expr) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def appended_to(node: ast.AST) -> str:
    """The name that a statement `name.append(...)` is about."""
    call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    func = call.func if call else None
    if isinstance(func, ast.Attribute) and func.attr == "append" and isinstance(func.value, ast.Name):
        return func.value.id
    return ""


def arguments(node: ast.FunctionDef) -> set[str]:
    return {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}


def harmless(node: ast.expr) -> bool:
    return not any(isinstance(each, (ast.Call, ast.Await, ast.Yield, ast.Subscript)) for each in ast.walk(node))
