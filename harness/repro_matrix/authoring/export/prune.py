"""What a function needs no more once its settings are constants, is left out: names that hold one, what stands after
its end, what nobody reads, and (where a proof is not wanted) what only a proof wants to know. Pure: trees are changed.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from typing import Any

from repro_matrix.authoring.export.code import appended_to, arguments, bindings, called, harmless

Function = ast.FunctionDef
PROOFS = ("Reference", "Single")  # classes that compute what one process would
LOOKS = ("full_parameters", "compared", "differing", "apart", "all_apart")  # what only a proof wants to know


def without_proofs(node: Function) -> bool:
    """Without the proofs: nobody computes what one process would. True: something went."""
    changed = False
    for each in ast.walk(node):
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) and called(each.value) in PROOFS:
            name = each.targets[0].id
            uses = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == name]
            held = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)
                    and n.value.id == name]  # fmt: skip
            if len(held) < len(uses) - 1:
                continue  # it is handed on
            _Drop(name).visit(node)
            changed = True
    return changed


def without_constants(node: Function) -> bool:
    """Local names that are bound once, to a constant, are that constant."""
    constants = [each for each in node.body if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant)]
    bound = bindings(node) if constants else []
    known: dict[str, ast.expr] = {}
    for each in constants:
        if len(each.targets) == 1 and isinstance(each.targets[0], ast.Name):
            name = each.targets[0].id
            if bound.count(name) == 1:
                known[name] = each.value
                node.body.remove(each)
    if known:
        _Replace(known).visit(node)
    return bool(known)


def without_unused(node: Function, proven: bool) -> bool:
    """Imports and plain values that nobody reads any more, and lists that are only appended to."""
    changed = False
    every = list(ast.walk(node))
    loaded = [n.id for n in every if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Store)]
    only: dict[str, int] = {}
    for each in every:
        appended = appended_to(each)
        if appended:
            only[appended] = only.get(appended, 0) + 1
    gone = {name for name, count in only.items() if loaded.count(name) == count} - arguments(node)
    if not proven:
        samples = [n for n in every if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
                 and _looks(n.value)]  # fmt: skip
        for each in samples:
            name = each.targets[0].id  # type: ignore[attr-defined]
            within = [n for n in ast.walk(each.value) if isinstance(n, ast.Name) and n.id == name]
            if loaded.count(name) == len(within):
                _Drop(name).visit(node)
                changed = True
    return _Unread(set(loaded), gone if not proven else set()).passed(node) or changed


def without_what_follows(node: Function) -> None:
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


def _looks(node: ast.expr) -> bool:
    return any(isinstance(part, ast.expr) and called(part) in LOOKS for part in ast.walk(node))


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

    def passed(self, node: Function) -> bool:
        self.generic_visit(node)
        for each in ast.walk(node):
            for block in ("body",):
                if isinstance(getattr(each, block, None), list) and not getattr(each, block):
                    setattr(each, block, [ast.Pass()])
        return self.changed

    def visit_Assign(self, node: ast.Assign) -> Any:
        names = [t.id for t in node.targets if isinstance(t, ast.Name)]
        if len(names) == len(node.targets) == 1:
            plain = harmless(node.value)
            if (names[0] in self.appended and plain) or (names[0] not in self.loaded and plain):
                self.changed = True
                return []
        return node

    def visit_Expr(self, node: ast.Expr) -> Any:
        if appended_to(node) in self.appended:
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
