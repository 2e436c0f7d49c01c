"""Turn a command line into a prepared run, for every command that launches something.

``make_request`` parses overrides; ``prepare`` plans the request and launches nothing;
``run.execute`` runs the plan.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from repro_matrix.config import catalog
from repro_matrix.config import selection as overrides
from repro_matrix.config.catalog import Catalogue, check_syntax
from repro_matrix.config.selection import Selection
from repro_matrix.config.settings import RunSettings, compose_run, stored_run
from repro_matrix.environment import machine as machine_module
from repro_matrix.environment import stacks as stacks_module
from repro_matrix.environment.profiles import settle_all, with_every_gpu
from repro_matrix.environment.stacks import Stack
from repro_matrix.errors import ConfigError, MeasureError, nearest, unknown
from repro_matrix.planning import cells as matrix
from repro_matrix.planning.cells import Cell
from repro_matrix.planning.plan import TORCH, parse_shard, select_shard
from repro_matrix.results import runs
from repro_matrix.results.rows import Row
from repro_matrix.runner.prepared import Session

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
# Overrides that say where and how to measure, not which cells.
MACHINE_SETTINGS = (
    "results",
    "jobs",
    "launcher",
    "order",
    "min_cells",
    "executor",
    "node_command",
    "rendezvous",
)


@dataclass(frozen=True)
class Request:
    """A parsed command line.

    ``words``: its overrides (key, text). ``selections``: one of the command line, or one for each
    block of a named matrix.
    """

    words: Sequence[tuple[str, str]]
    catalogue: Catalogue
    settings: RunSettings
    selections: Sequence[Selection]

    @property
    def hardware(self) -> list[str]:
        """Return the requested profiles. Raises ConfigError where blocks request different ones."""
        requested = {tuple(each.hardware): each.source for each in self.selections}
        if len(requested) > 1:
            named = ", ".join(f"{source}: {','.join(names)}" for names, source in requested.items())
            raise ConfigError(
                f"the blocks are for different hardware ({named}). Add hardware=... to the command."
            )
        return list(next(iter(requested)))

    def for_stack(self, stack: str, variants: Sequence[str], repeat: int) -> Request:
        """Return the request for one stack (by its name) and these variants."""
        return replace(
            self,
            settings=self.settings.model_copy(
                update={"variants": list(variants), "repeat": repeat}
            ),
            selections=[
                replace(each, stack=[stack], given=each.given | {"stack"})
                for each in self.selections
            ],
        )

    def with_values(self, values: Mapping[str, Any], without: Collection[str] = ()) -> Request:
        """Return the request with these values, by the keys of their overrides.

        ``without``: keys whose overrides are dropped. Raises ConfigError as ``make_request`` does.
        """
        kept = self.texts(without={*values, *without})
        return make_request([*kept, *(overrides.override_text(*item) for item in values.items())])

    def texts(self, without: Collection[str]) -> list[str]:
        """Return the overrides as they were written, to be pasted, without these keys."""
        return [text for key, text in self.words if key not in without]

    def check(self) -> None:
        """Raise ConfigError (StackError) for an unknown stack, profile or shard."""
        for name in dict.fromkeys(
            name for each in self.selections for name in each.stack if name != matrix.REPRODUCING
        ):
            stacks_module.check_stack(name)
        for name in self.hardware:
            if name not in self.catalogue.hardware:
                raise unknown("hardware", name, self.catalogue.hardware, "hardware")
        if parse_shard(self.settings.shard):
            raise ConfigError(
                "shard=: this command shows the whole selection. `repro matrix --dry-run shard=...`"
                " shows a shard."
            )

    @property
    def left_out(self) -> list[str]:
        """Return the errors of the selected files of conf/ that are left out."""
        found: dict[str, None] = {}
        for each in self.selections:
            for options, patterns in (
                (self.catalogue.cases, each.case),
                (self.catalogue.models, each.model or ["*"]),
                (self.catalogue.strategies, each.strategy or ["*"]),
            ):
                wrong = catalog.left_out(options)
                found |= {
                    str(wrong[name]): None
                    for name in wrong
                    if any(fnmatchcase(name, one) for one in patterns)
                }
        return list(found)

    @cached_property
    def cells(self) -> list[Cell]:
        """Every selected cell, in the catalogue's order, not yet assigned to a profile."""
        changes = matrix.overrides_of(self.settings, self.selections[0].patches)
        reproducing = [each for each in self.selections if matrix.REPRODUCING in each.stack]
        names = {
            name
            for each in reproducing
            for name in overrides.expand("case", each.case, self.catalogue.cases)
        }
        return matrix.enumerate_cells(
            self.catalogue,
            *self.selections,
            overrides=changes,
            known=reproduces_on(self.catalogue, names),
        )


def make_request(texts: Sequence[str]) -> Request:
    """Parse overrides. Raises ConfigError that names what cannot be understood."""
    line = overrides.parse_overrides(texts)
    for key, text in line.words:
        if key.partition(".")[0] == "executor":
            raise ConfigError(
                f"{text}: only `repro matrix`, run, versions and bisect measure on a cluster."
            )
    catalogue = catalog.load(patches=line.patches, cases=line.case)
    if "model" in line.patches:
        _check_models(line.patches["model"], set(line.added), catalog.load())
    settings = compose_run(line.run) if line.run else stored_run()
    return Request(line.words, catalogue, settings, overrides.blocks(settings.matrix, line))


def _check_models(
    changes: Sequence[tuple[list[str], Any]], added: set[str], catalogue: Catalogue
) -> None:
    """Raise ConfigError for a configuration key or a type of value that no model has."""
    for keys, value in changes:
        if keys[0] != "config" or len(keys) != 2 or f"model.{'.'.join(keys)}" in added:
            continue
        known = {key for model in catalogue.models.values() for key in model.config}
        where = f"override model.config.{keys[1]}"
        if keys[1] not in known:
            hint = nearest(keys[1], known)
            raise ConfigError(
                f"{where}: no model has that key{hint}; one that transformers knows:"
                f" +model.config.{keys[1]}="
            )
        values = [model.config.get(keys[1]) for model in catalogue.models.values()]
        types = {type(each).__name__ for each in values if each is not None}
        accepted = types | {"NoneType"} | ({"int"} if "float" in types else set())
        if types and type(value).__name__ not in accepted:
            raise ConfigError(f"{where}: {value!r} is not of type {' or '.join(sorted(types))}")


def reproduces_on(catalogue: Catalogue, names: set[str]) -> dict[str, list[str]]:
    """Return case -> the stacks on which its published measurement reproduces.

    They have a name and stay as they are, else they are the replaced packages of a version map. A
    case that reproduced nowhere has the stack that its file names.
    """
    found: dict[str, set[str]] = {name: set() for name in names}
    for row in runs.measured_rows() if names else ():
        if row.case in names and row.first and row.counts["reproduced"]:
            found[row.case].add(row.stack.name)
    lasting = {name for name, stack in catalogue.stacks.items() if not stack.floating}
    return {
        name: (
            sorted(stacks & lasting or stacks)
            or [catalogue.cases[name].requires.stack or "current"]
        )
        for name, stacks in found.items()
    }


def prepare(
    texts: Sequence[str] | Request,
    build_stacks: bool = True,
    given: Mapping[str, Stack] | None = None,
    probe: bool = False,
    as_locked: bool = False,
) -> Session:
    """Plan a selection. Every error in it is found here, before anything is launched or written.

    ``texts``: a command line's overrides, or what was parsed from them. ``given``: stacks that the
    caller has already resolved, by the name that the selection uses for them. ``probe``: ask the
    stacks' torch whether it can use the GPUs also where nothing is built. ``as_locked``: plan a
    stack that a run would build first as its lock describes it.
    """
    from repro_matrix.runner import prerequisites  # psutil, which `repro list` must not load

    request = texts if isinstance(texts, Request) else make_request(texts)
    session, cells = _place_cells(request)
    session.stacks, session.as_locked = dict(given or {}), as_locked
    for slug in sorted({cell.case for cell in cells}):
        check_syntax(session.catalogue.script(session.catalogue.cases[slug]))
    cells = _select_part(session, cells)
    prerequisites.plan_cells(session, cells, build_stacks, build_stacks or probe)
    _check_stacks(session, cells)
    if build_stacks:
        _check_torch(session)
    return session


def _place_cells(request: Request) -> tuple[Session, list[Cell]]:
    """Return the session and its cells, each on one of the machine's profiles."""
    catalogue, machine = request.catalogue, machine_module.detect()
    profiles = settle_all(request.hardware, catalogue.hardware, machine)
    auto = request.hardware == ["auto"]
    cells, elsewhere = matrix.place(catalogue, request.cells, profiles, auto)
    session = Session(
        catalogue,
        request.settings.model_copy(),
        profiles,
        machine,
        left_out=request.left_out,
        elsewhere=elsewhere,
    )
    if auto and machine.left_out:
        _note_displaced(session, request, cells)
    return session, cells


def _note_displaced(session: Session, request: Request, cells: Sequence[Cell]) -> None:
    """Note the cells that would be on other hardware if no GPU was left out."""
    every = with_every_gpu(session.machine)
    whole = settle_all(["auto"], session.catalogue.hardware, every)
    usual, _ = matrix.place(session.catalogue, request.cells, whole, True)
    kinds = {
        profile.name: (profile.accelerator, profile.shared)
        for profile in (*session.profiles, *whole)
    }
    session.usual_gpus = len(whole[0].gpus)
    session.displaced = {
        cell for cell, other in zip(cells, usual) if kinds[cell.hardware] != kinds[other.hardware]
    }


def _select_part(session: Session, cells: list[Cell]) -> list[Cell]:
    """Return the cells of this shard, in the order that the time limit needs."""
    catalogue, settings = session.catalogue, session.settings
    # Of the whole selection: what is right for it is right for each of its shards.
    if settings.variants:
        variants = {variant for cell in cells for variant in catalogue.cases[cell.case].variants}
        settings.variants = overrides.expand("variant", settings.variants, variants)
    if shard := parse_shard(settings.shard):
        cells = select_shard(cells, shard, _published_seconds(catalogue, cells, settings))
    session.time_limit = seconds_of("time_limit", settings.time_limit)
    if session.time_limit is not None:
        settings.order = "declared"
        cells = oldest_first(cells, runs.measured_rows(settings))
    return cells


def _check_stacks(session: Session, cells: Sequence[Cell]) -> None:
    """Raise MeasureError or ConfigError if no stack of the cells can be used."""
    names = list(dict.fromkeys(cell.stack for cell in cells))
    if all(name in session.unavailable for name in names):
        kind = MeasureError if names[0] in session.unusable else ConfigError
        why = session.unavailable[names[0]]
        raise kind(why if why.startswith("stack") else f"stack={names[0]}: {why}")


def _check_torch(session: Session) -> None:
    """Raise MeasureError if every cell is skipped, one of them because torch is missing."""
    skips = [plan.variants[0].skip for plan in session.plans]
    torchless = next((skip for skip in skips if skip and skip.needs == (TORCH,)), None)
    if torchless and all(skips):
        raise MeasureError(torchless.reason)


def _published_seconds(
    catalogue: Catalogue, cells: Sequence[Cell], settings: RunSettings
) -> dict[Cell, float]:
    """Return how long the attempts of each cell take according to the published baseline."""
    from repro_matrix.runner.schedule import UNKNOWN_S, recorded

    took = recorded(runs.measured_rows())
    seconds = {}
    for cell in cells:
        case = catalogue.cases[cell.case]
        known = [
            took.get((cell.key, variant)) for variant in matrix.variants_of(case, settings.variants)
        ]
        seconds[cell] = sum(one.seconds if one else UNKNOWN_S for one in known) * (
            settings.repeat or case.repeat
        )
    return seconds


def selected_by(line: Selection) -> list[str]:
    """Return the overrides of a command line that say what is measured, as they were written."""
    return sorted(text for key, text in line.words if key.partition(".")[0] not in MACHINE_SETTINGS)


def seconds_of(name: str, text: str | None) -> float | None:
    """``30m`` -> 1800.0 seconds. Raises ConfigError. ``name``: of the option, for the message."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smh])", str(text))
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if seconds <= 0:
        raise ConfigError(
            f"{name}={text}: not a duration. Write {name}=90s, {name}=30m or {name}=2h."
        )
    return seconds


def oldest_first(cells: Sequence[Cell], rows: Sequence[Row]) -> list[Cell]:
    """Order cells by their latest result in ``rows``, those without one first.

    Over several runs with a time limit each cell is measured.
    """
    latest: dict[tuple[str, str, str], float] = {}
    for row in rows:
        cell = (row.hardware.profile, row.stack.name, row.cell_id)
        latest[cell] = max(latest.get(cell, 0.0), row.started)
    return sorted(cells, key=lambda cell: latest.get((cell.hardware, cell.stack, cell.key), 0.0))
