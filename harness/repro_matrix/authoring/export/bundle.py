"""A script of repros/ and what it uses of the kit -> one file about one variant. Pure: text in, text out.

The kit does much for the harness alone: the record, the evidence of what was in effect, references that attempts share,
models drawn piece by piece. In its place stand the short definitions under ``plain/``, which have the same names and
say the same to a script. Then the variant's settings are put in (fold.py), and what is left and reached from the
script's
``body`` is taken: functions, classes, and of a class the methods that somebody names.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro_matrix.authoring.export import fold
from repro_matrix.authoring.export.code import gives
from repro_matrix.authoring.export.merge import Renamed, early, texts, told_apart
from repro_matrix.authoring.export.reach import reach
from repro_matrix.authoring.export.source import SCRIPT, ExportError, Module, read, visible

PLAIN = Path(__file__).with_name("plain")


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
    modules = read(script, kit, plain)
    if "body" not in modules[SCRIPT].bound:
        raise ExportError(f"{title}: its script has no function body(run)")
    fold_in(modules, {**values, "proven": proven}, proven)
    reached, imports, named = reach(modules, title)
    names = told_apart(modules, reached)
    for module, own_names in reached.items():
        for name in own_names:
            Renamed(modules, module, names).visit(modules[module].bound[name])
    parts = [(module, texts(modules[module], found, named)) for module, found in reached.items() if found]
    own = next(texts for module, texts in parts if module == SCRIPT)
    rest = [(module, "\n\n\n".join(texts)) for module, texts in parts if module != SCRIPT]
    return Bundle(sorted(imports), own, rest, early(modules, reached))


def read_plain() -> dict[str, str]:
    return {
        f"repro_kit.{path.name.partition('.')[0]}": path.read_text(encoding="utf-8") for path in PLAIN.glob("*.py.txt")
    }


def fold_in(modules: Mapping[str, Module], values: Mapping[str, Any], proven: bool) -> None:
    """Until nothing changes any more."""
    todo = {(module.name, name) for module in modules.values() for name in module.bound}
    given: dict[tuple[str, str], Any] = {}  # what functions always give
    says: dict[tuple[str, str], set[str]] = {}  # the names in a statement, until it is changed
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
            names = visible(modules, here, statement)
            one = fold.Fold(
                values,
                {alias: given[of] for alias, of in names.items() if of in given},
                {alias: tables[of] for alias, of in names.items() if of in tables},
                proven,
                {alias for alias, of in names.items() if of[1] in fold.SILENT.get(of[0], ())},
                {alias for alias, of in names.items() if of == ("repro_kit.instrumentation", "watch")},
            )
            here.bound[name] = one.visit(statement)
            says.pop((module, name), None)
            if one.changed:
                changed.add((module, name))
        new = {}
        for module, name in todo:
            statement = modules[module].bound[name]
            found = gives(statement) if isinstance(statement, ast.FunctionDef) else ()
            if found and (module, name) not in given:
                new[module, name] = found[0]
        given.update(new)
        words = {name for _, name in new}
        todo = changed
        for module_of in modules.values() if words else ():
            for name, statement in module_of.bound.items():
                at = (module_of.name, name)
                if at not in says:
                    says[at] = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
                if words & says[at]:  # it calls one of them
                    todo.add(at)
