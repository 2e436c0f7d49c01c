"""Enumerate the cells of a selection, place them on hardware, and say what cannot run there.

Pure.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from repro_kit.settings import first

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.schema import Case, Strategy
from repro_matrix.config.selection import Selection, expand
from repro_matrix.config.settings import RunSettings
from repro_matrix.environment.profiles import Profile
from repro_matrix.errors import ConfigError, as_yaml, unknown
from repro_matrix.records.document import SkipKind
from repro_matrix.records.document import SkipRecord as StoredSkip
from repro_matrix.text import counted

# How this machine's ranks reach each other: needed on some machines, and results are compared
# across machines.
TRANSPORT = ("NCCL_", "GLOO_")
# settings that change what is measured
MEASUREMENT = {"scale", "weights", "steps", "seed", "nodes"}
REPRODUCING = "reproducing"  # of the axis stack: those on which the case is known to reproduce
MAX_NAME = 150  # characters of a file name
_PLAIN = re.compile(r"[\w./:-]+")  # a value that needs no quotes in an override


@dataclass(frozen=True)
class Cell:
    """One entry of the matrix.

    case x model x strategy x flags x ranks x stack x hardware, and what else differs from the
    case's file.
    """

    case: str
    model: str
    strategy: str
    flags: tuple[tuple[str, Any], ...]  # only those that the selection sets; sorted by name
    stack: str
    hardware: str
    ranks: int = 2
    # Differences from the case's file: the number of ranks, the scale, the steps, a model's key
    # ...: "name=value".
    overrides: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The name within one stack and hardware, safe as a path.

        ``case/model-strategy[-name=value...]``
        """
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


def enumerate_cells(
    catalogue: Catalogue,
    *selections: Selection,
    overrides: tuple[str, ...] = (),
    known: Mapping[str, Sequence[str]] | None = None,
) -> list[Cell]:
    """Return every cell of these selections, each once, without its hardware (``place``).

    A case's file lists its models and strategies. With ``case`` left out or a glob, a selection
    narrows those lists; if it names the case, it replaces them: any model, and a strategy of its
    file. ``overrides``: what the run's settings change in every cell (``overrides_of``).
    ``known``: case -> stacks, for ``stack=reproducing``. Raises ConfigError for an unknown name, a
    strategy that no named case supports, a case that supports none of them, a flag that no selected
    case declares, or a value that a flag does not take.
    """
    chosen = [_cases_of(catalogue, each) for each in selections]
    everything = [catalogue.cases[name] for names in chosen for name in names]
    cells: dict[Cell, None] = {}
    for selection, names in zip(selections, chosen):
        _check_flags(everything, selection)
        for name in names:
            cells |= dict.fromkeys(
                _cells_of(catalogue, selection, catalogue.cases[name], overrides, known or {})
            )
    if not cells:
        words = dict.fromkeys(text for each in selections for _, text in each.words)
        hint = " Name the case, without *, to try another model."
        raise ConfigError(
            f"the selection has no cell: no case fits {' '.join(words) or 'it'}."
            + (hint if any(each.model for each in selections) else "")
        )
    return list(cells)


def _cases_of(catalogue: Catalogue, selection: Selection) -> list[str]:
    cases = catalogue.cases
    names = expand("case", selection.case, cases, selection.source)
    return [
        name
        for name in names
        if (not selection.area or cases[name].area in selection.area)
        and selection.silent in (None, cases[name].silent)
    ]


def _cells_of(
    catalogue: Catalogue,
    selection: Selection,
    case: Case,
    overrides: tuple[str, ...],
    known: Mapping[str, Sequence[str]],
) -> Iterator[Cell]:
    flags = sorted(selection.flags)
    if any(name not in case.flags for name in flags):
        return  # another case's flag was swept: this case has no such cell
    axes = []
    for axis in ("model", "strategy"):
        listed, wanted = getattr(case.axes, axis), getattr(selection, axis)
        names = wanted and expand(axis, wanted, catalogue.groups[axis], selection.source)
        narrows = case.slug not in selection.case or axis in selection.narrows
        if axis == "strategy" and not narrows:
            names = _supported(catalogue, case, names or [], selection)
        axes.append(
            [name for name in listed if name in names] if names and narrows else names or listed
        )
    default_ranks = case.launch.world_size
    stacks = [
        name
        for each in selection.stack
        for name in (known[case.slug] if each == REPRODUCING else [each])
    ]
    for model, strategy, ranks, stack, *values in itertools.product(
        *axes,
        selection.ranks or [default_ranks],
        dict.fromkeys(stacks),
        *(selection.flags[name] for name in flags),
    ):
        changed = (*([f"ranks={ranks}"] if ranks != default_ranks else []), *overrides)
        yield Cell(
            case.slug, model, strategy, tuple(zip(flags, values)), stack, "auto", ranks, changed
        )


def _supported(
    catalogue: Catalogue, case: Case, names: Sequence[str], selection: Selection
) -> list[str]:
    """Return which of these strategies a named case supports.

    Raises ConfigError if it supports none of them, or no named case supports one that the selection
    gives without *.
    """
    known = _strategies_of(catalogue, case)
    named = [catalogue.cases[name] for name in selection.case if name in catalogue.cases]
    anywhere = known.union(*(_strategies_of(catalogue, each) for each in named))
    supported = [name for name in names if name in known]
    refused = [name for name in selection.strategy or () if name in names and name not in anywhere]
    if refused or (names and not supported):
        name = (refused or names)[0]
        raise unknown("strategy of this case", name, known, f"strategy={name}: case {case.slug}")
    return supported


def _strategies_of(catalogue: Catalogue, case: Case) -> set[str]:
    """Return the strategies of the case's file, and of its variants, that take its options."""
    others = (
        catalogue.strategies[each.strategy] for each in case.variants.values() if each.strategy
    )
    fitting = (
        each.slug
        for each in others
        if not any(
            each.refuses(option, value)
            for option, value in case.options.items()
            if option in each.options
        )
    )
    return {*case.axes.strategy, *fitting}


def overrides_of(
    settings: RunSettings, patches: Mapping[str, Sequence[tuple[Sequence[str], Any]]]
) -> tuple[str, ...]:
    """Return what a run's settings change in a measurement.

    Results of such a run never replace the usual ones.
    """
    changed = settings.model_dump(include=MEASUREMENT, exclude_defaults=True)
    words = [f"{name}={value}" for name, value in changed.items()]
    words += [
        f"env.{name}={value if _PLAIN.fullmatch(value) else json.dumps(value)}"
        for name, value in sorted(settings.env.items())
        if not name.startswith(TRANSPORT)
    ]
    for group, changes in sorted(patches.items()):
        words += [f"{group}.{'.'.join(keys)}={json.dumps(value)}" for keys, value in changes]
    return tuple(words)


NUMBERS = (int, float)


def _check_flags(cases: list[Case], selection: Selection) -> None:
    for name, values in selection.flags.items():
        having = [case for case in cases if name in case.flags]
        if not having:
            raise unknown("flag", name, {flag for case in cases for flag in case.flags}, "flags")
        for case in having:
            choices, default = case.flags[name].choices, case.flags[name].default
            for value in values:
                if not choices and type(default) in NUMBERS and type(value) not in NUMBERS:
                    raise ConfigError(
                        f"flags.{name}={as_yaml(value)} cannot run: case {case.slug} takes a number"
                        f" there. Give one, such as {default or 1}."
                    )
                if choices is not None and value not in choices:
                    raise unknown(
                        f"value of flags.{name}",
                        as_yaml(value),
                        map(as_yaml, choices),
                        f"case {case.slug}",
                    )


def variants_of(case: Case, requested: list[str] | None) -> list[str]:
    """Return the variants to run, always with the unfixed one.

    Without the unfixed variant a fix proves nothing.
    """
    if not requested:
        return list(case.variants)
    first = next(iter(case.variants))
    return [variant for variant in case.variants if variant in requested or variant == first]


# -- the hardware of a cell, and what cannot be measured there


def place(
    catalogue: Catalogue, cells: Iterable[Cell], profiles: Sequence[Profile], auto: bool
) -> tuple[list[Cell], dict[str, int]]:
    """Place each cell on the first profile that can show it (``auto``), else on every profile.

    Return also how many cells are measured on another profile than the first, by the reason.
    """
    placed: list[Cell] = []
    elsewhere: Counter[str] = Counter()
    for cell in cells:
        if not auto:
            placed += [replace(cell, hardware=profile.name) for profile in profiles]
            continue
        reasons = [_unsuitable(catalogue, cell, profile) for profile in profiles]
        index = reasons.index(None) if None in reasons else len(profiles) - 1
        placed.append(replace(cell, hardware=profiles[index].name))
        if index:
            elsewhere[str(reasons[0])] += 1
    return placed, dict(elsewhere)


def _unsuitable(catalogue: Catalogue, cell: Cell, profile: Profile) -> str | None:
    """Return why the cell's first variant cannot run on the profile, or None.

    Without it the other variants prove nothing.
    """
    case = catalogue.cases[cell.case]
    variant = next(iter(case.variants.values()))
    ranks = variant.world_size or cell.ranks
    nodes = variant.nodes or case.launch.nodes
    whole = first(variant.devices, case.launch.devices, -(-ranks // nodes))
    devices = 1 if profile.shared else whole
    strategy = catalogue.strategies[variant.strategy or cell.strategy]
    # the stack's releases are not known here
    if "shared_gpu" in {*profile.kinds} & strategy.requires_on.keys():
        return (
            f"strategy {strategy.slug} shares a GPU with some releases only: name"
            f" hardware={profile.name}"
        )
    return next(
        (skip.reason for skip in wrong_hardware(case, strategy, devices, ranks, profile)), None
    )


@dataclass(frozen=True)
class Skip:
    """Why a variant is not launched.

    ``needs``: what is missing, as declared (``torch>=2.4``, ``2 GPUs``).
    """

    kind: SkipKind
    reason: str
    needs: tuple[str, ...] = ()

    def to_json(self) -> StoredSkip:
        return {"kind": self.kind, "requires": list(self.needs)}


def unsuitable(
    case: Case, strategy: Strategy, settings: Mapping[str, Any], ranks: int, profile: Profile
) -> Iterator[Skip]:
    """Yield each reason why a variant cannot run, whatever packages the stack has."""
    if ranks < case.min_ranks:
        yield Skip("ranks", f"needs at least {counted(case.min_ranks, 'rank')}; ranks={ranks}")
    elif ranks != case.launch.world_size and not case.supports_other_world_sizes:
        own = counted(case.launch.world_size, "rank")
        needed = f"exactly {own} (the case does not declare `supports_other_world_sizes`)"
        yield Skip("ranks", f"needs {needed}; ranks={ranks}")
    size, config = settings["world_size"], settings["model"]["config"]
    yield from wrong_hardware(case, strategy, settings["devices"], size, profile)
    for name, flag in case.flags.items():
        value = settings["flags"].get(name)
        if (
            flag.strategies
            and strategy.slug not in flag.strategies
            and value not in (flag.default, flag.full)
        ):
            others = ", ".join(flag.strategies)
            yield Skip(
                "flags",
                f"flags.{name}={as_yaml(value)} is for {others}; the strategy is {strategy.slug}",
            )
    for key in strategy.must_divide if case.requires.divisible else ():
        if config.get(key, 0) % size:
            name = key.removeprefix("num_").replace("_", " ")
            yield Skip(
                "divisible", f"{config[key]} {name} do not divide over {counted(size, 'rank')}"
            )


def wrong_hardware(
    case: Case, strategy: Strategy, devices: int, ranks: int, profile: Profile
) -> Iterator[Skip]:
    """Yield each reason why a variant with these devices and ranks cannot run on this hardware."""
    on_gpus, required = profile.accelerator == "cuda", case.requires.gpus
    if on_gpus and case.accelerator == "cpu":
        yield Skip(
            "accelerator",
            f"runs on the CPU only (accelerator: cpu); hardware {profile.name} is for GPUs",
        )
    needed = max(required, devices if on_gpus else 0)
    if needed > len(profile.gpus) or (required and profile.shared):
        why = f" ({case.requires.reason})" if case.requires.reason and needed == required else ""
        have = f"hardware {profile.name} has {len(profile.gpus) or 'none'}{why}"
        yield Skip("gpus", f"needs {counted(needed, 'GPU')}; {have}", (f"{needed} GPUs",))
    if profile.shared and case.requires.requires_default_compute_mode:
        yield Skip("shared", "its ranks compute on each other's GPUs, and they share one")
    if "shared_gpu" in profile.kinds and not (
        case.allow_gpu_sharing and strategy.allow_gpu_sharing
    ):
        subject = "the case" if not case.allow_gpu_sharing else f"strategy {strategy.slug}"
        yield Skip(
            "shared", f"ranks that share one GPU: {subject} does not declare `allow_gpu_sharing`"
        )
    exclusive = next((gpu for gpu in profile.gpus if gpu.mode.startswith("exclusive")), None)
    if case.requires.requires_default_compute_mode and ranks > 1 and exclusive:
        mode = f"GPU {exclusive.index} is in {exclusive.mode} mode (nvidia-smi -c 0)"
        yield Skip("gpu_mode", f"its ranks compute on the same GPUs, and {mode}")


parse_requirement = functools.cache(Requirement)  # a plan asks for the same few again and again


def unmet_requirement(text: str, versions: Mapping[str, str]) -> str | None:
    """Describe a requirement that the versions do not meet; None when they do."""
    requirement = parse_requirement(text)
    have = versions.get(requirement.name) or versions.get(requirement.name.replace("_", "-"))
    if have is None:
        return f"{text} (it has none)"
    try:
        satisfied = requirement.specifier.contains(Version(have), prereleases=True)
    except InvalidVersion:
        satisfied = not requirement.specifier
    return None if satisfied else f"{text} (it has {have})"
