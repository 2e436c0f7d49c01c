"""Compare what stored results and expectations say about two stacks: may I upgrade? Pure.

A result counts for a stack with the same releases of torch, transformers and what the case
requires; other packages may differ. Where nothing was measured, an expectation's ranges of releases
may say it. Only passing or failing counts: another message, or another error of what failed before,
is not a reason against an upgrade.
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
from repro_matrix.grading.expected import Situation, basis, settings_difference
from repro_matrix.planning.cells import Cell, unmet_requirement, variants_of
from repro_matrix.planning.plan import needs
from repro_matrix.results.rows import Row
from repro_matrix.runner.schedule import UNKNOWN_S, recorded
from repro_matrix.runner.session import Request
from repro_matrix.text import counted, first_line

State = Literal["passes", "reproduces", "fails"]
Kind = Literal["new_failure", "fix_stopped_working"]
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
ABSENT = " (it has none)"
UNREAD = "the releases of {} are not known"
EXIT_CODES = {"GO": 0, "GO with these fixes": 1, "NO-GO": 1, "UNDECIDED": 3}


class End(NamedTuple):
    """One of the two stacks. ``versions``: empty where they are not known before it is built."""

    name: str
    versions: Mapping[str, str]


class KnownState(NamedTuple):
    """The state of a variant on a stack.

    ``settings``: empty if an expectation says it. ``releases``: those of the packages that the
    variant depends on. ``assumed``: an expectation says it, and they are not between measured ones.
    """

    state: State
    text: str = ""
    settings: Mapping[str, Any] = {}
    releases: frozenset[tuple[str, str]] = frozenset()
    assumed: bool = False


class Gap(NamedTuple):
    """Why the state of a variant on a stack is not known; "": it was not measured.

    ``lost``: a stack lacks a package for it, or attempts disagree.
    """

    reason: str = ""
    lost: bool = False


class Unknown(NamedTuple):
    """A variant that is not compared.

    ``ends``: the stacks on which it has to be measured. ``lost``: it is known only on the stack in
    use. ``nearest``: "same", "worse" or "better" by the nearest measured releases, or "".
    """

    cell: Cell
    variant: str
    reason: str
    ends: tuple[str, ...] = ()
    lost: bool = False
    nearest: str = ""


class ReleaseBoundary(NamedTuple):
    """The releases between which a failure begins.

    ``first``: the first measured release with the failure. ``last``: the last one without it.
    ``exact``: there is no release between them.
    """

    package: str
    first: str
    last: str
    exact: bool

    @property
    def hold(self) -> str:
        return f"hold {self.package} {f'below {self.first}' if self.exact else f'at {self.last}'}"


@dataclass(frozen=True)
class Problem:
    """A case that gets worse.

    ``variants``: those that fail. ``fixes``: variants that pass on the new stack in all its cells.
    """

    kind: Kind
    case: Case
    cells: tuple[Cell, ...]
    variants: tuple[str, ...]
    state: State
    text: str
    fixes: tuple[str, ...]
    boundary: ReleaseBoundary | None

    def bisect(self, source: str, target: str) -> str:
        """Return the command that searches for the release."""
        words = ["repro", "bisect", self.case.slug]
        words += ["--good", source, "--bad", target]
        words += ["--variant", self.variants[0]]
        words += axes(self.cells[0])
        if self.state == "fails":
            words.append("--any-change")
        return shlex.join(words)


@dataclass
class Upgrade:
    """The comparison of two stacks.

    ``gone``: cases whose failure does not occur any more. ``same``: unchanged results.
    ``informed``: results that depend on a package which changes. ``seconds``: to measure what is
    missing.
    """

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
        """Return the cells to measure: (key, stack)."""
        return {(each.cell.key, end) for each in self.unknown for end in each.ends}

    @property
    def verdict(self) -> str:
        if not all(each.fixes for each in self.problems):
            return "NO-GO"
        missing = sum(bool(each.ends) for each in self.unknown)
        lost = any(each.lost for each in self.unknown)
        if lost or not self.informed or self.informed < missing:
            return "UNDECIDED"
        if self.problems:
            return "GO with these fixes"
        return "GO"

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
    pairs: dict[str, dict[tuple[Cell, str], Pair]] = defaultdict(dict)
    took = recorded(rows)
    for cell in request.cells:
        case = catalogue.cases[cell.case]
        chosen = [
            name for name in variants_of(case, settings.variants) if not case.variants[name].stack
        ]
        for variant in chosen:
            tried = [_pair(sides, cell, variant, name) for name in hardware]
            known = [each for each in tried if not isinstance(each, Unknown)]
            if known:
                pairs[case.slug][cell, variant] = known[0]
            else:
                result.unknown += [each for each in tried if isinstance(each, Unknown)][:1]
        missing = {end for each in result.unknown if each.cell == cell for end in each.ends}
        for name in chosen:
            past = took.get((cell.key, name))
            seconds = past.seconds if past else UNKNOWN_S
            result.seconds += len(missing) * seconds * (settings.repeat or case.repeat)
    for slug, found in pairs.items():
        result.compared += len(found)
        result.same += sum(old.state == new.state for old, new in found.values())
        result.informed += sum(old.releases != new.releases for old, new in found.values())
        case = catalogue.cases[slug]
        problems = list(_problems(case, found, ends))
        result.problems += problems
        first = next(iter(case.variants))
        unfixed = [pair for (_, name), pair in found.items() if name == first]
        if not problems and any(old.state != "passes" == new.state for old, new in unfixed):
            result.gone.append(slug)
    return result


Pair = tuple[KnownState, KnownState]  # on the stack in use, and on the new one


def _pair(sides: Sequence[_Side], cell: Cell, variant: str, hardware: str) -> Pair | Unknown:
    old, new = (side.known(cell, variant, hardware) for side in sides)
    for gap in (old, new):
        if isinstance(gap, Gap) and gap.reason:
            lost = gap.lost and isinstance(old, KnownState)
            return Unknown(cell, variant, gap.reason, lost=lost)
    if isinstance(old, Gap) or isinstance(new, Gap):
        never = tuple(s.end.name for s, each in zip(sides, (old, new)) if isinstance(each, Gap))
        unread = " and ".join(side.end.name for side in sides if not side.end.versions)
        reason = UNREAD.format(unread) if unread else f"never measured on {' or '.join(never)}"
        if gpus := sides[0].catalogue.cases[cell.case].requires.gpus:
            reason += f" (needs {counted(gpus, 'GPU')})"
        nearest = _nearest(sides, cell, variant, hardware)
        return Unknown(cell, variant, reason, never, nearest=nearest)
    difference = settings_difference(old.settings, new.settings)  # type: ignore[arg-type]
    if difference:
        reason = f"measured with other settings: {difference}"
        return Unknown(cell, variant, reason, tuple(side.end.name for side in sides))
    assumed = tuple(side.end.name for side, each in zip(sides, (old, new)) if each.assumed)
    if assumed and old.state == new.state and old.releases != new.releases:
        reason = f"{' and '.join(assumed)}: its releases do not lie between measured ones"
        return Unknown(cell, variant, reason, assumed)
    return old, new


def _nearest(sides: Sequence[_Side], cell: Cell, variant: str, hardware: str) -> str:
    """Return what changes by the nearest measured releases."""
    old, new = (side.known(cell, variant, hardware, nearest=True) for side in sides)
    if isinstance(old, Gap) or isinstance(new, Gap):
        return ""
    if "passes" not in (old.state, new.state) or old.state == new.state:
        return "same"
    return "worse" if old.state == "passes" else "better"


class _Side:
    """The knowledge about one stack: its newest results, else its expectations."""

    def __init__(self, catalogue: Catalogue, end: End, rows: Iterable[Row]) -> None:
        self.catalogue, self.end = catalogue, end
        self.rows: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
        for row in sorted(rows, key=lambda row: row.started, reverse=True):
            if row.evidence_attempts and not row.stack.changed:
                self.rows[row.cell_id, row.variant, row.hardware.kind].append(row)
        self.expecting: dict[tuple[str, frozenset[str]], Case] = {}

    def known(
        self, cell: Cell, variant: str, hardware: str, nearest: bool = False
    ) -> KnownState | Gap:
        """Return what is known, or why it is not.

        ``nearest``: what the nearest measured releases agree on is enough.
        """
        versions = self.end.versions
        if not versions:
            return Gap()
        needed = self._needed(cell, variant, hardware)
        for unmet in filter(None, (unmet_requirement(item, versions) for item in needed)):
            absent = unmet.endswith(ABSENT)
            text = f"pins no {unmet.removesuffix(ABSENT)}" if absent else f"lacks {unmet}"
            return Gap(f"{self.end.name} {text}", lost=absent)
        names = {"torch", "transformers", *(canonical(Requirement(item).name) for item in needed)}
        deciding = frozenset(names)
        here = _releases(deciding, versions)
        for row in self.rows[cell.key, variant, hardware]:
            if _releases(deciding, row.stack.versions) == here:
                return self._measured(row, here)
        if any("+" in release_of(versions.get(name, "")) for name in deciding):  # a patched build
            return Gap()
        found = self._expected(cell, variant, hardware, deciding, nearest)
        return found._replace(releases=here) if found else Gap()

    def _needed(self, cell: Cell, variant: str, hardware: str) -> list[str]:
        """Return the requirements of a variant and of the first one, with which it is compared."""
        case, found = self.catalogue.cases[cell.case], list[str]()
        for each in (next(iter(case.variants.values())), case.variants[variant]):
            model = self.catalogue.models[each.model or cell.model]
            strategy = self.catalogue.strategies[each.strategy or cell.strategy]
            found += needs(case, each, model, strategy, (hardware,))
        return found

    def _measured(self, row: Row, releases: frozenset[tuple[str, str]]) -> KnownState | Gap:
        outcomes = {each.outcome for each in row.evidence_attempts}
        if len(outcomes) > 1:
            return Gap(f"attempts disagree on {self.end.name}", lost=True)
        failed = [each for each in row.evidence_attempts if each.outcome != "passed"]
        text = first_line(failed[0].reason) if failed else ""
        return KnownState(_OF_OUTCOME.get(outcomes.pop(), "fails"), text, row.settings, releases)

    def _expected(
        self, cell: Cell, variant: str, hardware: str, deciding: frozenset[str], nearest: bool
    ) -> KnownState | None:
        case, versions = self._ranged_over(cell.case, deciding), self.end.versions
        unfixed = variant == "unfixed"
        for name in case.variants if unfixed else [variant]:
            found = basis(case, name, Situation(cell.where, versions, hardware))
            agree = found and not found.on_cpu and len(set(found.verdicts)) == 1
            if not (found and agree and (nearest or not found.releases)):
                continue
            entry = found.entries[0]
            verdict = entry.verdicts[name]
            of_unfixed = _OF_UNFIXED.get(STATES.get(verdict, ""))
            if state := of_unfixed if unfixed else _OF_VERDICT.get(verdict):
                listed = [] if unfixed else entry.failure_ids_of(name) or []
                within = all(_within(each, entry.measured_at, versions) for each in deciding)
                return KnownState(state, " or ".join(listed), assumed=not within)
        return None

    def _ranged_over(self, slug: str, deciding: frozenset[str]) -> Case:
        """Return a case whose expectations depend on these packages only."""
        if (slug, deciding) not in self.expecting:
            case = self.catalogue.cases[slug]
            entries = []
            for entry in case.expect:
                kept = {name: entry.versions[name] for name in entry.versions if name in deciding}
                entries.append(entry.model_copy(update={"versions": kept}))
            self.expecting[slug, deciding] = case.model_copy(update={"expect": entries})
        return self.expecting[slug, deciding]


def _releases(names: Iterable[str], versions: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(
        (name, release_of(versions.get(name, ""))) for name in names if name in UPSTREAM
    )


def _within(
    package: str, measured: Iterable[Mapping[str, str]], versions: Mapping[str, str]
) -> bool:
    """Return whether a release is between measured ones; a pre-release never is."""
    ends = sorted(Version(release_of(each[package])) for each in measured if package in each)
    try:
        version = Version(release_of(versions.get(package, "")))
    except InvalidVersion:
        return not ends
    return not ends or (ends[0] <= version <= ends[-1] and not version.is_prerelease)


_BUILD = re.compile(r"cpu|cu\d|rocm|xpu")


def release_of(text: str) -> str:
    """Return a version without its build (+cpu, +cu124); a patched build (+x) keeps its label."""
    try:
        version = Version(text)
    except InvalidVersion:
        return text
    return version.public if _BUILD.match(version.local or "cpu") else str(version)


def _problems(
    case: Case, found: Mapping[tuple[Cell, str], Pair], ends: Sequence[End]
) -> Iterator[Problem]:
    first = next(iter(case.variants))
    offered = [name for name, each in case.variants.items() if name == first or each.role == "fix"]
    worse = {
        (cell, name): new
        for (cell, name), (old, new) in found.items()
        if name in offered and old.state == "passes" != new.state
    }
    newly = {(cell, name): new for (cell, name), new in worse.items() if name == first}
    lost = {(cell, name): new for (cell, name), new in worse.items() if (cell, first) not in newly}
    passing = {place for place, (_, new) in found.items() if new.state == "passes"}
    groups: Mapping[Kind, Any] = {"new_failure": newly, "fix_stopped_working": lost}
    for kind, group in groups.items():
        if not group:
            continue
        cells = tuple(dict.fromkeys(cell for cell, _ in group))
        fixes = tuple(name for name in offered if all((cell, name) in passing for cell in cells))
        known = next(iter(group.values()))
        variants = tuple(dict.fromkeys(name for _, name in group))
        boundary = _boundary(case, ends) if kind == "new_failure" else None
        yield Problem(kind, case, cells, variants, known.state, known.text, fixes, boundary)


def _boundary(case: Case, ends: Sequence[End]) -> ReleaseBoundary | None:
    """Return where the failure begins between the two stacks.

    None, unless measured releases of only one package show it.
    """
    found = releases_of(case)
    old, new = (each.versions.get(found.package, "") for each in ends)
    for before, after in pairwise(found.ranges) if old and new else ():
        begins = after.state != "absent" == before.state and after.alone
        if begins and Version(old) < Version(after.first) <= Version(new):
            return ReleaseBoundary(found.package, after.first, before.last, after.follows)
    return None
