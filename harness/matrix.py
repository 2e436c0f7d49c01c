"""catalogue + selection -> cells. Pure, and fast: options are read once, cells are only named combinations."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

from harness.catalogue import Catalogue
from harness.errors import ConfigError, unknown
from harness.overrides import Selection, expand
from harness.schema import Case


@dataclass(frozen=True)
class Cell:
    """case x model x strategy x flags x stack x hardware."""

    case: str
    model: str
    strategy: str
    flags: tuple[tuple[str, Any], ...]  # only those that the selection sets; sorted by name
    stack: str
    hardware: str

    @property
    def key(self) -> str:
        """The cell's name within one stack and hardware: ``case/model-strategy[-flag=value...]``, safe as a path."""
        parts = [f"{self.model}-{self.strategy}", *(f"{name}={json.dumps(value)}" for name, value in self.flags)]
        tail = "-".join(parts).replace("/", "_").replace('"', "")
        return f"{self.case}/{tail}"

    @property
    def where(self) -> str:
        """The cell's axes as an expectation names them: ``model/strategy[/flag=value...]``."""
        return "/".join([self.model, self.strategy, *(f"{name}={json.dumps(value)}" for name, value in self.flags)])


def enumerate_cells(catalogue: Catalogue, selection: Selection) -> list[Cell]:
    """Every cell of the selection, in the catalogue's order.

    A case's file lists the models and strategies it is for. With ``case`` left out or a glob, a selection narrows those
    lists; with a case named outright the selection replaces them (a user may try any combination). Raises ConfigError
    on an unknown name, a flag that no selected case declares, or a value that a flag does not take.
    """
    named = {name for name in selection.case if name in catalogue.cases}
    cases = [catalogue.cases[name] for name in expand("case", selection.case, catalogue.cases)]
    models = None if selection.model is None else expand("model", selection.model, catalogue.models)
    strategies = None if selection.strategy is None else expand("strategy", selection.strategy, catalogue.strategies)
    _check_flags(cases, selection)
    cells = []
    for case in cases:
        own_models = _axis(case.axes.model, models, case.slug in named)
        own_strategies = _axis(case.axes.strategy, strategies, case.slug in named)
        if any(name not in case.flags for name in selection.flags):
            continue  # another case's flag was swept: this case has no such cell
        names = sorted(selection.flags)
        sweeps = [selection.flags[name] for name in names]
        for model, strategy, stack in itertools.product(own_models, own_strategies, selection.stack):
            for values in itertools.product(*sweeps):
                flags = tuple(zip(names, values))
                cells.append(Cell(case.slug, model, strategy, flags, stack, selection.hardware))
    if not cells:
        raise ConfigError(
            "the selection has no cell: no selected case lists that model and strategy "
            "(name the case outright, without *, to try any combination)"
        )
    return cells


def _axis(listed: list[str], asked: list[str] | None, outright: bool) -> list[str]:
    if asked is None:
        return listed
    return asked if outright else [name for name in listed if name in asked]


def _check_flags(cases: list[Case], selection: Selection) -> None:
    for name, values in selection.flags.items():
        having = [case for case in cases if name in case.flags]
        if not having:
            raise unknown("flag", name, {flag for case in cases for flag in case.flags}, "flags")
        for case in having:
            choices = case.flags[name].choices
            for value in values:
                if choices is not None and value not in choices:
                    raise unknown(f"value of flags.{name}", str(value), map(str, choices), f"case {case.slug}")


def arms_of(case: Case, asked: list[str] | None) -> list[str]:
    """The arms to run; the broken arm always is among them, for without it a fix proves nothing."""
    if not asked:
        return list(case.arms)
    first = next(iter(case.arms))
    return [arm for arm in case.arms if arm in asked or arm == first]
