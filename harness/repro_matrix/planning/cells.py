"""Catalogue and selection -> cells, the hardware that each is measured on, and why a variant cannot run there. Pure."""

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
from repro_matrix.config.schema import Case, Strategy
from repro_matrix.config.selection import Selection, expand
from repro_matrix.config.settings import RunSettings
from repro_matrix.errors import ConfigError, unknown
from repro_matrix.records.document import Skip as StoredSkip
from repro_matrix.records.document import SkipKind

if TYPE_CHECKING:
    from repro_matrix.environment.profiles import Profile

# How this machine's ranks reach each other: needed on some machines, and results are compared across machines.
TRANSPORT = ("NCCL_", "GLOO_")
REPRODUCING = "reproducing"  # of the axis stack: those on which the case is known to reproduce
MAX_NAME = 150  # characters of a file name
_PLAIN = re.compile(r"[\w./:-]+")  # a value that needs no quotes in an override


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
        if len(tail) > MAX_NAME or tail != plain:  # else two cells might share a name
            tail = f"{tail[:MAX_NAME]}-{hashlib.sha256('-'.join(parts).encode()).hexdigest()[:8]}"
        return f"{self.case}/{tail}"

    @property
    def where(self) -> str:
        """Its axes as expectations name them: ``model/strategy[/name=value...]``."""
        return "/".join([self.model, self.strategy, *self.overrides, *_assignments(self.flags)])


def _assignments(flags: Iterable[tuple[str, Any]]) -> list[str]:
    return [f"{name}={json.dumps(value)}" for name, value in flags]


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
    cells: dict[Cell, None] = {}
    for selection, cases in zip(selections, chosen):
        _check_flags(everything, selection)
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
    models = selection.model and expand("model", selection.model, catalogue.models, selection.source)
    strategies = selection.strategy and expand("strategy", selection.strategy, catalogue.strategies, selection.source)
    names = sorted(selection.flags)
    for case in cases:
        if any(name not in case.flags for name in names):
            continue  # another case's flag was swept: this case has no such cell
        replaces = {"model", "strategy"} - set(selection.narrows) if case.slug in selection.case else set()
        default_ranks = case.launch.world_size
        stacks = [name for each in selection.stack for name in (known[case.slug] if each == REPRODUCING else [each])]
        for model, strategy, ranks, stack, *values in itertools.product(
            _axis(case.axes.model, models, "model" in replaces),
            _axis(case.axes.strategy, strategies, "strategy" in replaces),
            selection.ranks or [default_ranks],
            dict.fromkeys(stacks),
            *(selection.flags[name] for name in names),
        ):
            changed = (*([f"ranks={ranks}"] if ranks != default_ranks else []), *overrides)
            yield Cell(case.slug, model, strategy, tuple(zip(names, values)), stack, "auto", ranks, changed)


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


# -- the hardware of a cell, and what cannot be measured there


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
        index = reasons.index(None) if None in reasons else len(profiles) - 1
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


@dataclass(frozen=True)
class Skip:
    """Why a variant is not launched. ``reason``: for people. ``needs``: what would have to be there, as declared
    (``torch>=2.4``, ``2 GPUs``)."""

    kind: SkipKind
    reason: str
    needs: tuple[str, ...] = ()

    def to_json(self) -> StoredSkip:
        return {"kind": self.kind, "requires": list(self.needs)}


def unsuitable(
    case: Case, strategy: Strategy, settings: Mapping[str, Any], ranks: int, profile: Profile
) -> Skip | None:
    """Return why a variant with these settings measures nothing, whatever the stack has; or None."""
    return (
        wrong_ranks(case, ranks)
        or wrong_tp_size(strategy, settings["tp_size"], settings["world_size"])
        or wrong_hardware(case, strategy, settings["devices"], settings["world_size"], profile)
        or wrong_flags(case, settings["strategy"]["slug"], settings["flags"])
        or (indivisible(strategy, settings) if case.requires.divisible else None)
    )


def wrong_ranks(case: Case, ranks: int) -> Skip | None:
    if ranks < case.min_ranks:
        return Skip("ranks", f"needs at least {case.min_ranks} ranks; ranks={ranks}")
    if ranks != case.launch.world_size and not case.supports_other_world_sizes:
        needed = f"exactly {case.launch.world_size} ranks (the case does not declare `scales`)"
        return Skip("ranks", f"needs {needed}; ranks={ranks}")
    return None


def wrong_tp_size(strategy: Strategy, size: int, ranks: int) -> Skip | None:
    if not strategy.must_divide and size > 1:
        return Skip("tp_size", f"strategy {strategy.slug} has no tensor parallelism; tp_size={size}")
    if strategy.must_divide and size != ranks:
        return Skip("tp_size", f"tensor parallelism is over all {ranks} ranks here; tp_size={size}")
    return None


def wrong_hardware(case: Case, strategy: Strategy, devices: int, ranks: int, profile: Profile) -> Skip | None:
    """Return why a variant with these devices and ranks cannot run on this hardware, or None."""
    required = case.requires.gpus
    if required > len(profile.gpus) or (required and profile.shared):
        return _too_few_gpus(required, profile, f" ({case.requires.reason})" if case.requires.reason else "")
    if profile.accelerator != "cuda":
        return None
    if case.accelerator == "cpu":
        return Skip("accelerator", f"runs on the CPU only (accelerator: cpu); hardware {profile.name} is for GPUs")
    if profile.shared and not (case.allow_gpu_sharing and strategy.allow_gpu_sharing):
        subject = "the case" if not case.allow_gpu_sharing else f"strategy {strategy.slug}"
        return Skip("shared", f"ranks that share one GPU: {subject} does not declare `shared`")
    if devices > len(profile.gpus):
        return _too_few_gpus(devices, profile)
    exclusive = next((gpu for gpu in profile.gpus if gpu.mode.startswith("exclusive")), None)
    if case.requires.requires_default_compute_mode and ranks > 1 and exclusive:
        mode = f"GPU {exclusive.index} is in {exclusive.mode} mode (nvidia-smi -c 0)"
        return Skip("gpu_mode", f"its ranks compute on the same GPUs, and {mode}")
    return None


def _too_few_gpus(needed: int, profile: Profile, why: str = "") -> Skip:
    have = f"hardware {profile.name} has {len(profile.gpus) or 'none'}{why}"
    return Skip("gpus", f"needs {needed} GPUs; {have}", (f"{needed} GPUs",))


def wrong_flags(case: Case, strategy: str, flags: Mapping[str, Any]) -> Skip | None:
    """Return why a flag's value does not exist in this strategy, or None."""
    for name, flag in case.flags.items():
        value = flags.get(name)
        if flag.strategies is not None and strategy not in flag.strategies and value not in (flag.default, flag.full):
            others = ", ".join(flag.strategies)
            return Skip("flags", f"flags.{name}={value} is for {others}; the strategy is {strategy}")
    return None


def indivisible(strategy: Strategy, settings: Mapping[str, Any]) -> Skip | None:
    """Return why the model cannot be split over ``tp_size`` ranks, or None."""
    size, config = settings["tp_size"], settings["model"]["config"]
    for key in strategy.must_divide:
        if config.get(key, 0) % size:
            name = key.removeprefix("num_").replace("_", " ")
            return Skip("divisible", f"{config[key]} {name} do not divide over {size} ranks")
    return None


def unmet_requirement(text: str, versions: Mapping[str, str]) -> str | None:
    """Describe a requirement that the versions do not meet; None when they do."""
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion, Version

    requirement = Requirement(text)
    have = versions.get(requirement.name) or versions.get(requirement.name.replace("_", "-"))
    if have is None:
        return f"{text}, which it does not have"
    try:
        satisfied = requirement.specifier.contains(Version(have), prereleases=True)
    except InvalidVersion:
        satisfied = not requirement.specifier
    return None if satisfied else f"{text}, and it has {have}"
