"""Catalogue and selection -> cells, and the hardware that each is measured on. Pure and fast: no file is read."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from repro_kit.settings import first

from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.schema import Case
from repro_matrix.config.selection import Selection, expand
from repro_matrix.config.settings import RunSettings
from repro_matrix.errors import ConfigError, unknown
from repro_matrix.planning.skips import wrong_hardware

if TYPE_CHECKING:
    from repro_matrix.environment.profiles import Profile


@dataclass(frozen=True)
class Cell:
    """case x model x strategy x flags x ranks x stack x hardware, and what else differs from the case's file."""

    case: str
    model: str
    strategy: str
    flags: tuple[tuple[str, Any], ...]  # only those that the selection sets; sorted by name
    stack: str
    hardware: str
    ranks: int = 2
    # What differs from the case's file: the number of ranks, the scale, the steps, a model's key ...: "name=value".
    overrides: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Its name within one stack and hardware: ``case/model-strategy[-name=value...]``, safe as a path."""
        parts = [f"{self.model}-{self.strategy}", *self.overrides, *_assignments(self.flags)]
        plain = "-".join(parts).replace('"', "")
        tail = re.sub(r"[^\w.=,+-]+", "_", plain)
        if len(tail) > LONGEST or tail != plain:  # else two cells might share a name
            tail = f"{tail[:LONGEST]}-{hashlib.sha256('-'.join(parts).encode()).hexdigest()[:8]}"
        return f"{self.case}/{tail}"

    @property
    def where(self) -> str:
        """Its axes as expectations name them: ``model/strategy[/name=value...]``."""
        return "/".join([self.model, self.strategy, *self.overrides, *_assignments(self.flags)])


# How this machine's ranks reach each other: needed on some machines, and results are compared across machines.
TRANSPORT = ("NCCL_", "GLOO_")
_PLAIN = re.compile(r"[\w./:-]+")  # a value that needs no quotes in an override
LONGEST = 150  # characters of a file name


def _assignments(flags: Iterable[tuple[str, Any]]) -> list[str]:
    return [f"{name}={json.dumps(value)}" for name, value in flags]


KNOWN = "reproducing"  # of the axis stack: those on which the case is known to reproduce


def with_case(catalogue: Catalogue, case: Case) -> Catalogue:
    """Return the catalogue with a case that has no file in conf/ (a user's script: ``script`` may be absolute)."""
    raw = {
        **catalogue.raw,
        "case": {**catalogue.raw["case"], case.slug: case.model_dump(mode="json", exclude_unset=True)},
    }
    return replace(catalogue, cases={**catalogue.cases, case.slug: case}, raw=raw)


def enumerate_cells(catalogue: Catalogue, selection: Selection, overrides: tuple[str, ...] = ()) -> list[Cell]:
    """Return every cell of one selection, in the catalogue's order."""
    return enumerate_all(catalogue, [selection], overrides)


def enumerate_all(
    catalogue: Catalogue,
    selections: Sequence[Selection],
    overrides: tuple[str, ...] = (),
    known: Mapping[str, Sequence[str]] | None = None,
) -> list[Cell]:
    """Return every cell of these selections, each once, without its hardware (``place``).

    A case's file lists its models and strategies. With ``case`` left out or a glob, a selection narrows those lists; if
    it names the case, it replaces them (a user may try any combination). ``overrides``: what the run's settings change
    in all of them (``overrides_of``). ``known``: case -> stacks, for ``stack=reproducing``. Raises ConfigError for an
    unknown name, a flag that no selected case declares, or a value that a flag does not take.
    """
    chosen = [
        [catalogue.cases[name] for name in expand("case", each.case, catalogue.cases, each.source)]
        for each in selections
    ]
    everything = [case for cases in chosen for case in cases]
    for selection in selections:
        _check_flags(everything, selection)
    cells: dict[Cell, None] = {}
    for selection, cases in zip(selections, chosen):
        cells |= dict.fromkeys(_cells_of(catalogue, selection, cases, overrides, known or {}))
    if not cells:
        raise ConfigError(
            "the selection has no cell: no selected case lists that model and strategy. "
            "Name the case, without *, to try any combination."
        )
    return list(cells)


def _cells_of(
    catalogue: Catalogue,
    selection: Selection,
    cases: Iterable[Case],
    overrides: tuple[str, ...],
    known: Mapping[str, Sequence[str]],
) -> Iterator[Cell]:
    named = {name for name in selection.case if name in catalogue.cases}
    models, strategies = (
        None if requested is None else expand(axis, requested, options, selection.source)
        for axis, requested, options in (
            ("model", selection.model, catalogue.models),
            ("strategy", selection.strategy, catalogue.strategies),
        )
    )
    for case in cases:
        outright = case.slug in named
        case_models = _axis(case.axes.model, models, outright and "model" not in selection.narrows)
        case_strategies = _axis(case.axes.strategy, strategies, outright and "strategy" not in selection.narrows)
        if any(name not in case.flags for name in selection.flags):
            continue  # another case's flag was swept: this case has no such cell
        names = sorted(selection.flags)
        sweeps = [selection.flags[name] for name in names]
        default_ranks = case.launch.world_size
        stacks = [name for each in selection.stack for name in (known[case.slug] if each == KNOWN else [each])]
        for model, strategy, ranks, stack in itertools.product(
            case_models, case_strategies, selection.ranks or [default_ranks], dict.fromkeys(stacks)
        ):
            changed = (*([f"ranks={ranks}"] if ranks != default_ranks else []), *overrides)
            for values in itertools.product(*sweeps):
                flags = tuple(zip(names, values))
                yield Cell(case.slug, model, strategy, flags, stack, "auto", ranks, changed)


def overrides_of(settings: RunSettings, patches: Mapping[str, Sequence[tuple[Sequence[str], Any]]]) -> tuple[str, ...]:
    """Return what a run's settings change in a measurement: its results never replace the usual ones."""
    usual = RunSettings()
    words = []
    for name in ("scale", "weights", "steps", "seed", "tp_size"):
        value = getattr(settings, name)
        if value != getattr(usual, name):
            words.append(f"{name}={getattr(value, 'value', value)}")
    given = {name: value for name, value in sorted(settings.env.items()) if not name.startswith(TRANSPORT)}
    words += [f"env.{name}={value if _PLAIN.fullmatch(value) else json.dumps(value)}" for name, value in given.items()]
    for group, changes in sorted(patches.items()):
        words += [f"{group}.{'.'.join(keys)}={json.dumps(value)}" for keys, value in changes]
    return tuple(words)


def _axis(listed: list[str], requested: list[str] | None, outright: bool) -> list[str]:
    if requested is None:
        return listed
    return requested if outright else [name for name in listed if name in requested]


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


def variants_of(case: Case, requested: list[str] | None) -> list[str]:
    """Return the variants to run; always with the unfixed variant, without which a fix proves nothing."""
    if not requested:
        return list(case.variants)
    first = next(iter(case.variants))
    return [variant for variant in case.variants if variant in requested or variant == first]


@dataclass(frozen=True)
class Placed:
    """``elsewhere``: cells that are measured on another profile than the first, by the reason."""

    cells: list[Cell]
    elsewhere: Mapping[str, list[Cell]]


def place(catalogue: Catalogue, cells: Iterable[Cell], profiles: Sequence[Profile], auto: bool) -> Placed:
    """Place each cell on the first profile that can show it (``auto``), else on every profile."""
    placed: list[Cell] = []
    elsewhere: dict[str, list[Cell]] = {}
    for cell in cells:
        if not auto:
            placed += [replace(cell, hardware=profile.name) for profile in profiles]
            continue
        reasons = [_unsuitable(catalogue, cell, profile) for profile in profiles]
        index = next((number for number, reason in enumerate(reasons) if reason is None), len(profiles) - 1)
        placed.append(replace(cell, hardware=profiles[index].name))
        if index:
            elsewhere.setdefault(str(reasons[0]), []).append(placed[-1])
    return Placed(placed, elsewhere)


def _unsuitable(catalogue: Catalogue, cell: Cell, profile: Profile) -> str | None:
    """Return why the cell's first variant, without which the others prove nothing, cannot run on the profile."""
    case = catalogue.cases[cell.case]
    variant = next(iter(case.variants.values()))
    ranks = variant.world_size or cell.ranks
    devices = 1 if profile.shared else first(variant.devices, case.launch.devices, ranks)
    wrong = wrong_hardware(case, catalogue.strategies[variant.strategy or cell.strategy], devices, ranks, profile)
    return wrong.reason if wrong else None
