"""May I upgrade? What stored results and expectations say about two stacks. Pure.

A result counts for a stack with the same releases of torch, transformers and what the case
requires; other packages may differ. Where nothing was measured, an expectation's ranges of releases
may say it. Only passing or failing counts: another wording, or another error of what failed before,
is no reason not to upgrade.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from repro_matrix.baseline.releases import STATES, releases_of
from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import UPSTREAM
from repro_matrix.environment.stacks.spec import canonical
from repro_matrix.grading.expected import basis, settings_difference
from repro_matrix.planning.cells import Cell, unmet_requirement, variants_of
from repro_matrix.planning.plan import needs
from repro_matrix.results.rows import Row
from repro_matrix.runner.schedule import UNKNOWN_S, recorded
from repro_matrix.runner.session import Request
from repro_matrix.text import counted, first_line

State = Literal["passes", "reproduces", "fails", "flaky"]
_OF_OUTCOME: Mapping[str, State] = {"passed": "passes", "reproduced": "reproduces"}
_OF_UNFIXED: Mapping[str, State] = {
    "absent": "passes",
    "reproduces": "reproduces",
    "other_failure": "fails",
}
_OF_VERDICT: Mapping[str, State] = {
    "FIXED": "passes",
    "NOT_REPRODUCED": "passes",
    "PASSED": "passes",
    "NOT_FIXED": "reproduces",
    "DIFFERENT_FAILURE": "fails",
    "FIX_BREAKS": "fails",
}
ABSENT, UNPINNED, DISAGREE = " (it has none)", "pins no", "attempts disagree"
UNREAD = "the releases of {} are not known"
EXIT_CODES = {"GO": 0, "GO with these fixes": 1, "NO-GO": 1, "UNDECIDED": 3}


class End(NamedTuple):
    """One of the two stacks. ``versions``: empty where they are not known before it is built."""

    name: str
    versions: Mapping[str, str]


class KnownState(NamedTuple):
    """What a variant shows on a stack. ``settings``: empty where an expectation says it.
    ``releases``: those of the packages that it depends on. ``assumed``: an expectation says it, and
    they do not lie between measured ones."""

    state: State
    text: str = ""
    settings: Mapping[str, Any] = {}
    releases: frozenset[tuple[str, str]] = frozenset()
    assumed: bool = False


class Unknown(NamedTuple):
    """A variant that is not compared. ``ends``: the stacks on which it would have to be measured.
    ``lost``: it is known on the stack in use, and the new one lacks a package for it, or attempts
    disagree there. ``nearest``: "same", "worse" or "better" by the nearest measured releases; ""
    where they say nothing."""

    cell: Cell
    variant: str
    reason: str
    ends: tuple[str, ...] = ()
    lost: bool = False
    nearest: str = ""


class ReleaseBoundary(NamedTuple):
    """``first``: the first measured release with the failure, ``last``: the last one without it,
    ``exact``: no release lies between them."""

    package: str
    first: str
    last: str
    exact: bool

    @property
    def hold(self) -> str:
        return f"hold {self.package} {f'below {self.first}' if self.exact else f'at {self.last}'}"


@dataclass(frozen=True)
class Problem:
    """What gets worse in a case. ``variants``: those that fail. ``fixes``: variants that pass on
    the new stack in all these cells."""

    kind: Literal["new_failure", "fix_stopped_working"]
    case: Case
    cells: tuple[Cell, ...]
    variants: tuple[str, ...]
    state: State
    text: str
    fixes: tuple[str, ...]
    boundary: ReleaseBoundary | None

    def bisect(self, source: str, target: str) -> str:
        """Return the command that searches for the release."""
        words = [
            "repro",
            "bisect",
            self.case.slug,
            "--good",
            source,
            "--bad",
            target,
            "--variant",
            self.variants[0],
        ]
        return shlex.join(
            [*words, *axes(self.cells[0]), *(["--any-change"] if self.state == "fails" else [])]
        )


@dataclass
class Upgrade:
    """``gone``: cases whose failure no longer occurs. ``same``: of the ``compared`` results.
    ``informed``: those that depend on a package which changes. ``seconds``: to measure what is
    missing."""

    source: End
    target: End
    problems: list[Problem] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    compared: int = 0
    same: int = 0
    informed: int = 0
    unknown: list[Unknown] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def missing(self) -> set[tuple[str, str]]:
        """The cells to measure: (key, stack)."""
        return {(each.cell.key, end) for each in self.unknown for end in each.ends}

    @property
    def verdict(self) -> str:
        if not all(each.fixes for each in self.problems):
            return "NO-GO"
        missing = sum(bool(each.ends) for each in self.unknown)
        enough = (
            self.informed
            and self.informed >= missing
            and not any(each.lost for each in self.unknown)
        )
        return "UNDECIDED" if not enough else "GO with these fixes" if self.problems else "GO"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]


def axes(cell: Cell) -> list[str]:
    """Return the arguments that select the cell among those of its case."""
    flags = (f"flags.{name}={json.dumps(value)}" for name, value in cell.flags)
    return [f"model={cell.model}", f"strategy={cell.strategy}", *flags, *cell.overrides]


def compare_stacks(request: Request, ends: Sequence[End], rows: Sequence[Row]) -> Upgrade:
    """Compare what is known of two stacks."""
    catalogue, settings = request.catalogue, request.settings
    result, sides = Upgrade(ends[0], ends[1]), [_Side(catalogue, end, rows) for end in ends]
    hardware = sorted({row.hardware.kind for row in rows} | {"cpu"}, key=lambda name: name != "cpu")
    pairs: dict[str, dict[tuple[Cell, str], tuple[KnownState, KnownState]]] = defaultdict(dict)
    took = recorded(rows)
    for cell in request.cells:
        case = catalogue.cases[cell.case]
        chosen = [
            name for name in variants_of(case, settings.variants) if not case.variants[name].stack
        ]
        for variant in chosen:
            tried = [_pair(sides, cell, variant, name) for name in hardware]
            pair = next((each for each in tried if not isinstance(each, Unknown)), None)
            if pair:
                pairs[case.slug][cell, variant] = pair
            else:
                result.unknown.append(next(each for each in tried if isinstance(each, Unknown)))
        missing = {end for each in result.unknown if each.cell == cell for end in each.ends}
        times = [
            known.seconds if (known := took.get((cell.key, name))) else UNKNOWN_S for name in chosen
        ]
        result.seconds += len(missing) * sum(times) * (settings.repeat or case.repeat)
    for slug, found in pairs.items():
        result.compared += len(found)
        result.same += sum(old.state == new.state for old, new in found.values())
        result.informed += sum(old.releases != new.releases for old, new in found.values())
        result.problems += _problems(catalogue.cases[slug], found, ends)
        first = next(iter(catalogue.cases[slug].variants))
        if any(
            name == first and old.state != "passes" == new.state
            for (_, name), (old, new) in found.items()
        ):
            result.gone.append(slug)
    result.gone = [
        slug for slug in result.gone if slug not in {each.case.slug for each in result.problems}
    ]
    return result


def _pair(
    sides: Sequence[_Side], cell: Cell, variant: str, hardware: str
) -> tuple[KnownState, KnownState] | Unknown:
    found = [side.known(cell, variant, hardware) for side in sides]
    never = tuple(side.end.name for side, each in zip(sides, found) if each is None)
    reasons = [each for each in found if isinstance(each, str)]
    if reasons:
        lost = isinstance(found[0], KnownState) and any(
            text in reasons[0] for text in (UNPINNED, DISAGREE)
        )
        return Unknown(cell, variant, reasons[0], lost=lost)
    if never:
        unread = " and ".join(side.end.name for side in sides if not side.end.versions)
        reason = UNREAD.format(unread) if unread else f"never measured on {' or '.join(never)}"
        gpus = sides[0].catalogue.cases[cell.case].requires.gpus
        reason += f" (needs {counted(gpus, 'GPU')})" if gpus else ""
        return Unknown(
            cell, variant, reason, never, nearest=_nearest(sides, cell, variant, hardware)
        )
    old, new = (each for each in found if isinstance(each, KnownState))
    difference = settings_difference(old.settings, new.settings)  # type: ignore[arg-type]
    if difference:
        return Unknown(
            cell,
            variant,
            f"measured with other settings: {difference}",
            tuple(s.end.name for s in sides),
        )
    assumed = tuple(side.end.name for side, each in zip(sides, (old, new)) if each.assumed)
    if (
        assumed and old.state == new.state and old.releases != new.releases
    ):  # that nothing changes is not known
        return Unknown(
            cell,
            variant,
            f"{' and '.join(assumed)}: its releases do not lie between measured ones",
            assumed,
        )
    return old, new


def _nearest(sides: Sequence[_Side], cell: Cell, variant: str, hardware: str) -> str:
    """Return what changes by the nearest measured releases."""
    both = [side.known(cell, variant, hardware, nearest=True) for side in sides]
    old, new = (each.state if isinstance(each, KnownState) else None for each in both)
    if old is None or new is None:
        return ""
    return (
        "same"
        if old == new
        else "worse"
        if old == "passes"
        else "better"
        if new == "passes"
        else "same"
    )


class _Side:
    """What is known of one stack: its newest results, else what expectations say."""

    def __init__(self, catalogue: Catalogue, end: End, rows: Iterable[Row]) -> None:
        self.catalogue, self.end = catalogue, end
        self.rows: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
        for row in sorted(rows, key=lambda row: row.started, reverse=True):
            if row.evidence_attempts and not row.stack.changed:
                self.rows[row.cell_id, row.variant, row.hardware.kind].append(row)
        self.expecting: dict[tuple[str, frozenset[str]], Case] = {}

    def known(
        self, cell: Cell, variant: str, hardware: str, nearest: bool = False
    ) -> KnownState | str | None:
        """Return what is known, or why it cannot be; None: it was not measured. ``nearest``: what
        the nearest measured releases agree on is enough."""
        case, versions = self.catalogue.cases[cell.case], self.end.versions
        if not versions:
            return None
        models, strategies = self.catalogue.models, self.catalogue.strategies
        needed = []
        for each in (
            next(iter(case.variants.values())),
            case.variants[variant],
        ):  # a fix is compared with the first
            model, strategy = (
                models[each.model or cell.model],
                strategies[each.strategy or cell.strategy],
            )
            needed += needs(case, each, model, strategy, (hardware,))
        unmet = next(filter(None, (unmet_requirement(item, versions) for item in needed)), None)
        if unmet:
            text = unmet.removesuffix(ABSENT)
            return (
                f"{self.end.name} lacks {unmet}"
                if text == unmet
                else f"{self.end.name} {UNPINNED} {text}"
            )
        deciding = frozenset(
            {"torch", "transformers", *(canonical(Requirement(item).name) for item in needed)}
        )
        here = _releases(deciding, versions)
        for row in self.rows[cell.key, variant, hardware]:
            if _releases(deciding, row.stack.versions) == here:
                failed = [each for each in row.evidence_attempts if each.outcome != "passed"]
                outcomes = {each.outcome for each in row.evidence_attempts}
                if len(outcomes) > 1:
                    return f"{DISAGREE} on {self.end.name}"
                text = first_line(failed[0].reason) if failed else ""
                return KnownState(
                    _OF_OUTCOME.get(outcomes.pop(), "fails"), text, row.settings, here
                )
        patched = any("+" in release_of(versions.get(name, "")) for name in deciding)
        found = (
            None if patched else self._expected(case, cell, variant, hardware, deciding, nearest)
        )
        return found and found._replace(releases=here)

    def _expected(
        self,
        case: Case,
        cell: Cell,
        variant: str,
        hardware: str,
        deciding: frozenset[str],
        nearest: bool,
    ) -> KnownState | None:
        trimmed = self.expecting.get((case.slug, deciding))
        if trimmed is None:
            kept = [
                {name: each.versions[name] for name in each.versions if name in deciding}
                for each in case.expect
            ]
            entries = [
                each.model_copy(update={"versions": only}) for each, only in zip(case.expect, kept)
            ]
            trimmed = self.expecting[case.slug, deciding] = case.model_copy(
                update={"expect": entries}
            )
        unfixed = variant == "unfixed"
        for name in case.variants if unfixed else [variant]:
            found = basis(trimmed, cell.where, name, self.end.versions, hardware)
            agree = found and not found.on_cpu and len(set(found.verdicts)) == 1
            entry = (
                found.entries[0] if found and agree and (nearest or not found.releases) else None
            )
            verdict = entry.verdicts[name] if entry else ""
            state = (
                _OF_UNFIXED.get(STATES.get(verdict, "")) if unfixed else _OF_VERDICT.get(verdict)
            )
            if entry and state:
                listed = [] if unfixed else entry.failure_ids_of(name) or []
                within = all(
                    _within(each, entry.measured_at, self.end.versions) for each in deciding
                )
                return KnownState(state, " or ".join(listed), assumed=not within)
        return None


def _releases(names: Iterable[str], versions: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(
        (name, release_of(versions.get(name, ""))) for name in names if name in UPSTREAM
    )


def _within(
    package: str, measured: Iterable[Mapping[str, str]], versions: Mapping[str, str]
) -> bool:
    """Whether a release lies between those that were measured; a pre-release never does."""
    ends = sorted(Version(release_of(each[package])) for each in measured if package in each)
    try:
        version = Version(release_of(versions.get(package, "")))
    except InvalidVersion:
        return not ends
    return not ends or (ends[0] <= version <= ends[-1] and not version.is_prerelease)


_BUILD = re.compile(r"cpu|cu\d|rocm|xpu")


def release_of(text: str) -> str:
    """Return a version without what it was built for (+cpu, +cu124); a patched build (+x) keeps its
    label."""
    try:
        version = Version(text)
    except InvalidVersion:
        return text
    return version.public if _BUILD.match(version.local or "cpu") else str(version)


def _problems(
    case: Case, found: Mapping[tuple[Cell, str], tuple[KnownState, KnownState]], ends: Sequence[End]
) -> Iterator[Problem]:
    first = next(iter(case.variants))
    offered = [name for name, each in case.variants.items() if name == first or each.role == "fix"]
    worse = {
        key: new
        for key, (old, new) in found.items()
        if key[1] in offered and old.state == "passes" != new.state
    }
    newly = {key: new for key, new in worse.items() if key[1] == first}
    lost = {key: new for key, new in worse.items() if (key[0], first) not in newly}
    for kind, group in (("new_failure", newly), ("fix_stopped_working", lost)):
        if group:
            cells = tuple(dict.fromkeys(cell for cell, _ in group))
            now = [
                [pair[1].state for cell in cells if (pair := found.get((cell, name)))]
                for name in offered
            ]
            fixes = tuple(
                name for name, states in zip(offered, now) if states == ["passes"] * len(cells)
            )
            variants, known = (
                tuple(dict.fromkeys(name for _, name in group)),
                next(iter(group.values())),
            )
            boundary = _boundary(case, ends) if group is newly else None
            yield Problem(
                kind,  # type: ignore[arg-type]
                case,
                cells,
                variants,
                known.state,
                known.text,
                fixes,
                boundary,
            )


def _boundary(case: Case, ends: Sequence[End]) -> ReleaseBoundary | None:
    """Return where the failure begins between the two stacks, if measured releases of one package
    alone show it."""
    found = releases_of(case)
    old, new = (each.versions.get(found.package, "") for each in ends)
    for before, after in pairwise(found.ranges) if old and new else ():
        begins = after.state != "absent" == before.state and after.alone
        if begins and Version(old) < Version(after.first) <= Version(new):
            return ReleaseBoundary(found.package, after.first, before.last, after.follows)
    return None
