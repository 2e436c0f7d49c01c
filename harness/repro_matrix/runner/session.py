"""Turn a command line into a prepared run: what `repro run`, `repro matrix`, pytest and the
searches have in common.

``ask`` parses overrides to a request; ``prepare`` plans it and launches nothing;
``workspace.execute`` runs the plan.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from repro_matrix.environment.gpus import Gpu, describe_unusable
from repro_matrix.environment.machine import Machine, Profile
from repro_matrix.environment.stacks import Stack, spec
from repro_matrix.errors import ConfigError, MeasureError, nearest, unknown
from repro_matrix.planning import cells as matrix
from repro_matrix.planning.cells import Cell
from repro_matrix.planning.plan import TORCH, CellPlan, parse_shard, select_shard
from repro_matrix.results import runs
from repro_matrix.results.rows import Row
from repro_matrix.text import counted

_SHOWN = ("python", "torch", "transformers")  # of a stack, in a run's first line
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
# Overrides that say where and how to measure, not which cells.
MACHINE_SETTINGS = ("results", "jobs", "launcher", "order", "min_cells")


@dataclass(frozen=True)
class Request:
    """A parsed command line: its overrides (key, text), the catalogue, the settings, and the
    selections of cells.

    ``selections``: one of the command line, or one for each block of a named matrix.
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

    def with_values(self, values: Mapping[str, Any]) -> Request:
        """Return the request with these values, by the keys of their overrides. Raises ConfigError
        as ``ask`` does."""
        return make_request(
            [
                *self.texts(without=values),
                *(overrides.override_text(*item) for item in values.items()),
            ]
        )

    def without(self, dropped: Callable[[str], bool]) -> Request:
        """Return the request without the overrides of these keys."""
        return make_request(self.texts(without={key for key, _ in self.words if dropped(key)}))

    def texts(self, without: Collection[str] = ()) -> list[str]:
        """Return the overrides as they were written, to be pasted, without these keys."""
        return [text for key, text in self.words if key not in without]

    def check(self) -> None:
        """Raise ConfigError (StackError) for an unknown stack or profile, and for a shard: for
        commands that prepare nothing."""
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
    catalogue = catalog.load(patches=line.patches, cases=line.case)
    if "model" in line.patches:
        _check_models(line.patches["model"], set(line.added), catalog.load())
    settings = compose_run(line.run) if line.run else stored_run()
    return Request(line.words, catalogue, settings, overrides.blocks(settings.matrix, line))


def _check_models(
    changes: Sequence[tuple[list[str], Any]], added: set[str], catalogue: Catalogue
) -> None:
    """Raise ConfigError for a configuration key that no model has, or a value of another type than
    theirs."""
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
        types = {
            type(m.config[keys[1]]) for m in catalogue.models.values() if keys[1] in m.config
        } - {type(None)}
        if (
            types
            and value is not None
            and type(value) not in types | ({int} if float in types else set())
        ):
            raise ConfigError(
                f"{where}: {value!r} is not of type"
                f" {' or '.join(sorted(t.__name__ for t in types))}"
            )


def reproduces_on(catalogue: Catalogue, names: set[str]) -> dict[str, list[str]]:
    """Return case -> the stacks on which its published measurement reproduces: those that have a
    name and stay as they are, else the replaced packages of a version map. A case that reproduced
    nowhere: the stack that its file names."""
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


@dataclass
class Session:
    """A prepared run."""

    catalogue: Catalogue
    settings: RunSettings
    profiles: list[Profile]  # side by side; each cell is measured on one of them
    machine: Machine
    stacks: dict[str, Stack] = field(default_factory=dict)
    plans: list[CellPlan] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)  # stack -> why it is not there
    to_build: dict[str, Stack] = field(
        default_factory=dict
    )  # what a real run builds first, as its lock describes it
    as_locked: bool = (
        False  # whether stacks that are not built are planned as their locks describe them
    )
    # Of the unavailable stacks, those that are there and whose torch cannot use the GPUs: their
    # variants were selected.
    unusable: set[str] = field(default_factory=set)
    unplanned: list[str] = field(default_factory=list)  # what the memory plan could not find out
    left_out: list[str] = field(
        default_factory=list
    )  # invalid files of conf/ among the selected ones
    elsewhere: dict[str, int] = field(
        default_factory=dict
    )  # why not on the GPUs -> cells measured on another profile
    displaced: set[Cell] = field(
        default_factory=set
    )  # of these, those that would be on GPUs if none was left out
    usual_gpus: int = 0  # of hardware=auto, if none was left out
    time_limit: float | None = None  # seconds after which no cell starts

    @property
    def profile(self) -> Profile:
        """Return the first profile: the GPUs, where there are any."""
        return self.profiles[0]

    @property
    def gpus(self) -> list[Gpu]:
        """Return all GPUs of all profiles, each once, those of the widest profile first and in its
        order."""
        return list({gpu.uuid: gpu for profile in self.profiles for gpu in profile.gpus}.values())

    def sizes(self, profile: Profile) -> list[int]:
        """Return the numbers of ranks of its attempts, each once."""
        plans = [plan for plan in self.plans if plan.profile.name == profile.name]
        return sorted(
            {
                variant.world_size
                for plan in plans
                for variant in plan.variants
                if not variant.skipped
            }
        )

    def headline(self) -> str:
        """Return the first line of a run: its hardware and stacks."""
        hardware = []
        for profile in self.profiles:
            sizes = self.sizes(profile)
            ranks = (
                " to ".join(map(str, dict.fromkeys(sizes[:1] + sizes[-1:])))
                + f" rank{'s' * (sizes != [1])}"
            )
            beside = (
                " an attempt, several side by side"
                if sizes and max(sizes) * 2 <= len(profile.gpus)
                else ""
            )
            hardware.append(f"{profile.words()}, {ranks + beside if sizes else 'no cell for it'}")
        used = sorted({plan.cell.stack for plan in self.plans} & self.stacks.keys())
        stacks = [self.stacks[name].describe(_SHOWN) for name in used]
        return f"hardware {' | '.join(hardware)}; stack {', '.join(stacks) or 'none'}"

    def shortfall(self) -> list[str]:
        """Return why a run of this plan measures less than is requested: its exit code is not 0
        then."""
        # Also the stacks of single variants, which declare no requirement.
        missing = {plan.cell.stack for plan in self.plans} & self.unavailable.keys() | self.unusable
        texts = [f"stack={name}: {self.unavailable[name]}" for name in sorted(missing)]
        needed = {
            f"{count} GPUs" for count in range(len(self.profile.gpus) + 1, self.usual_gpus + 1)
        }
        variants = [(plan.cell, variant.skip) for plan in self.plans for variant in plan.variants]
        lost = sum(
            cell in self.displaced or bool(skip and needed & set(skip.needs))
            for cell, skip in variants
        )
        if lost:
            why = "; ".join(describe_unusable(self.machine.left_out))
            remedy = "Make them usable, or list the others in CUDA_VISIBLE_DEVICES"
            texts.append(
                f"{counted(lost, 'variant')} not measured on GPUs because some are left out"
                f" ({why}). {remedy}."
            )
        runnable, least = sum(plan.skipped is None for plan in self.plans), self.settings.min_cells
        if runnable < least:
            few = f"{runnable} of {len(self.plans)} cells can run here, and min_cells={least}"
            texts.append(f"{few}: see the reasons. Select others, or other hardware.")
        return texts

    def too_few_free(self) -> list[str]:
        """Return the problem that attempts find too few GPUs, because other users' processes are on
        the others now."""
        needed = max(
            (v.gpus for plan in self.plans for v in plan.variants if not v.skipped), default=0
        )
        busy = ", ".join(str(gpu.index) for gpu in self.gpus if gpu.busy)
        free = sum(not gpu.busy for gpu in self.gpus)
        if free >= needed:
            return []
        who = (
            f"attempts need up to {counted(needed, 'GPU')}, and {free} of this machine's are"
            " free now"
        )
        return [f"{who} (in use: GPU {busy}). They end without a result unless more become free."]

    def changed(self) -> list[str]:
        """Return a line for each stack in use that is not what its versions say."""
        used = {
            variant.stack for plan in self.plans for variant in plan.variants if not variant.skipped
        }
        return list(
            filter(
                None,
                (spec.describe_changes(self.stacks[name]) for name in used & self.stacks.keys()),
            )
        )

    def notes(self) -> list[str]:
        """Return what a person should know before the run: files and GPUs that are left out, what
        may go wrong."""
        wrong = [
            *(f"left out: {text}" for text in self.catalogue.left_out),
            *self.changed(),
            *self.unplanned,
        ]
        hidden = [self.machine.hidden] if self.machine.hidden else []
        if self.profile.accelerator == "cpu":
            return [
                *wrong,
                *(hidden if self.machine.driver else []),
            ]  # GPUs are here, and none is selected
        gpus = describe_unusable(self.machine.left_out)
        warnings = self.profile.warnings(machine_module.shm_mb())
        return [*wrong, *gpus, *hidden, *warnings, *self.machine.notes(self.settings.env)]


def prepare(
    texts: Sequence[str] | Request,
    build_stacks: bool = True,
    given: Mapping[str, Stack] | None = None,
    probe: bool = False,
    as_locked: bool = False,
) -> Session:
    """Plan a selection. Every error in it is found here, before anything is launched or written.

    ``texts``: a command line's overrides, or what was parsed from them. ``given``: stacks that the
    caller has already
    resolved, by the name that the selection uses for them. ``probe``: ask the stacks' torch whether
    it can use the GPUs also where nothing is built. ``as_locked``: plan a stack that a run would
    build first as its lock describes it.
    """
    from repro_matrix.runner import (
        prerequisites,
    )  # `repro list` needs the cells and nothing that launches

    request = texts if isinstance(texts, Request) else make_request(texts)
    catalogue, settings = request.catalogue, request.settings.model_copy()
    machine = machine_module.detect()
    profiles = machine_module.settle_all(request.hardware, catalogue.hardware, machine)
    auto = request.hardware == ["auto"]
    cells, elsewhere = matrix.place(catalogue, request.cells, profiles, auto)
    displaced, usual_gpus = set[Cell](), 0
    if auto and machine.left_out:
        whole = machine_module.settle_all(
            ["auto"], catalogue.hardware, machine_module.with_every_gpu(machine)
        )
        usual_gpus = len(whole[0].gpus)
        kinds = {
            profile.name: (profile.accelerator, profile.shared) for profile in (*profiles, *whole)
        }
        usual, _ = matrix.place(catalogue, request.cells, whole, auto)
        displaced = {
            cell
            for cell, other in zip(cells, usual)
            if kinds[cell.hardware] != kinds[other.hardware]
        }
    for slug in sorted({cell.case for cell in cells}):
        check_syntax(catalogue.script(catalogue.cases[slug]))
    if (
        settings.variants
    ):  # of the whole selection: what is right for it is right for each of its shards
        variants = {variant for cell in cells for variant in catalogue.cases[cell.case].variants}
        settings.variants = overrides.expand("variant", settings.variants, variants)
    shard = parse_shard(settings.shard)
    if shard:
        cells = select_shard(cells, shard, _published_seconds(catalogue, cells, settings))
    time_limit = seconds_of("time_limit", settings.time_limit)
    if time_limit is not None:
        settings.order = "declared"
        cells = oldest_first(cells, runs.measured_rows(settings))
    session = Session(
        catalogue,
        settings,
        profiles,
        machine,
        dict(given or {}),
        left_out=list(request.left_out),
        elsewhere=elsewhere,
        displaced=displaced,
        usual_gpus=usual_gpus,
        time_limit=time_limit,
        as_locked=as_locked,
    )
    prerequisites.plan_cells(session, cells, build_stacks, build_stacks or probe)
    names = list(dict.fromkeys(cell.stack for cell in cells))
    if all(name in session.unavailable for name in names):
        kind = MeasureError if names[0] in session.unusable else ConfigError
        why = session.unavailable[names[0]]
        raise kind(why if why.startswith("stack") else f"stack={names[0]}: {why}")
    skips = [plan.variants[0].skip for plan in session.plans] if build_stacks else []
    torchless = next((skip for skip in skips if skip and skip.needs == (TORCH,)), None)
    if torchless and all(skips):
        raise MeasureError(torchless.reason)
    return session


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
    """Return the overrides of a command line that say what is measured, and not where or how, as
    they were written."""
    return sorted(text for key, text in line.words if key not in MACHINE_SETTINGS)


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
