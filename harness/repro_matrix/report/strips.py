"""Strips: the results of each variant over the releases of a package, and over the runs of a history. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from repro_matrix.config.vocabulary import UPSTREAM
from repro_matrix.grading.expectations import as_expected
from repro_matrix.report.labels import LABELS, Label

if TYPE_CHECKING:
    from repro_matrix.analysis.history import NightlyRun
    from repro_matrix.report.page_model import Cell

MOST_RUNS, MOST_STRIPS = 40, 200  # columns and rows of the history on the page
NO_ANSWER = ("skipped", "absent", "infra_error", "INCONCLUSIVE")  # neither a change nor the end of one


def parse_version(text: str) -> Version:
    """Return the release; 0 for what is no version."""
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


# Over releases


@dataclass(frozen=True)
class Entry:
    label: Label
    cell: str  # its anchor
    column: str


@dataclass(frozen=True)
class ReleaseStrip:
    """One variant of one cell over an axis's columns. ``changes``: (last entry before, first entry after)."""

    cell: str
    variant: str
    entries: tuple[Entry | None, ...]

    @property
    def changes(self) -> list[tuple[Entry, Entry]]:
        known = [entry for entry in self.entries if entry]
        return [(a, b) for a, b in pairwise(known) if as_expected(a.label.name) != as_expected(b.label.name)]


@dataclass(frozen=True)
class ReleaseAxis:
    """Measurements that differ in the release of ``package`` only; "": whole stacks, which differ in several.

    ``steady``: the number of variants that never change, whose strips are left out.
    """

    title: str
    package: str
    columns: tuple[str, ...]
    strips: tuple[ReleaseStrip, ...]
    steady: int

    @property
    def changes(self) -> list[tuple[Entry, Entry, list[str]]]:
        """Return each change with the variants that it is of."""
        found: dict[tuple[str, str, Label, Label], tuple[Entry, Entry, list[str]]] = {}
        for strip in self.strips:
            for before, after in strip.changes:
                key = (before.column, after.column, before.label, after.label)
                found.setdefault(key, (before, after, []))[2].append(strip.variant)
        return list(found.values())


def release_axes(cells: Iterable[Cell]) -> Iterator[ReleaseAxis]:
    """Yield the axes of one case's cells: each cell stands on its longest axis of one package, and on that of all
    stacks."""
    releases = {
        cell: {
            name: parse_version(cell.row.stack.versions[name]) for name in UPSTREAM if name in cell.row.stack.versions
        }
        for cell in cells
    }
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    for cell, versions in releases.items():
        for package in versions:
            rest = ", ".join(f"{name} {version.public}" for name, version in versions.items() if name != package)
            groups.setdefault((package, cell.row.hardware.profile, rest), []).append(cell)

    def length(package: str, members: Iterable[Cell]) -> int:
        by_cell: dict[tuple[str, ...], set[str]] = {}
        for cell in members:
            by_cell.setdefault(cell.row.axes, set()).add(releases[cell][package].public)
        return max(map(len, by_cell.values()), default=0)

    left = set(releases)
    for package, hardware, rest in sorted(groups, key=lambda key: -length(key[0], groups[key])):
        members = [cell for cell in groups[package, hardware, rest] if cell in left]
        if length(package, members) > 1:
            left.difference_update(members)
            members.sort(key=lambda cell: releases[cell][package])
            title = f"{package}, with {rest} ({hardware})"
            yield _axis(title, package, [(releases[cell][package].public, cell) for cell in members])
    stacks = [
        (
            ", ".join([*(f"{name} {version.public}" for name, version in versions.items()), cell.row.hardware.profile]),
            cell,
        )
        for cell, versions in sorted(
            releases.items(), key=lambda item: [item[1].get(name, Version("0")) for name in UPSTREAM]
        )
    ]
    if len({column for column, _ in stacks}) > 1:
        yield _axis("all stacks, the oldest first", "", stacks)


def _axis(title: str, package: str, placed: Sequence[tuple[str, Cell]]) -> ReleaseAxis:
    columns = list(dict.fromkeys(column for column, _ in placed))
    index = {column: number for number, column in enumerate(columns)}
    found: dict[tuple[tuple[str, ...], str], list[Entry | None]] = {}
    for column, cell in placed:
        for row, label in cell.variants:
            entries = found.setdefault((row.axes, row.variant), [None] * len(columns))
            if label.name not in NO_ANSWER:
                entries[index[column]] = Entry(label, cell.id, column)
    strips = [
        ReleaseStrip(" ".join(axes), variant, tuple(entries))
        for (axes, variant), entries in found.items()
        if sum(entry is not None for entry in entries) > 1
    ]
    changing = [strip for strip in strips if strip.changes]
    return ReleaseAxis(title, package, tuple(columns), tuple(changing), len(strips) - len(changing))


# Over runs


@dataclass(frozen=True)
class Answer:
    """What a variant answered in a run. ``failures``: failure ids; ``disagreeing``: attempts, of ``attempts``, whose
    outcome is not the usual one."""

    name: str
    failures: tuple[str, ...] = ()
    attempts: int = 0
    disagreeing: int = 0


VariantKey = tuple[str, str, str, str, str]  # case, axes, hardware, stack, variant
ABSENT = Answer("absent")


@dataclass(frozen=True)
class Run:
    name: str
    answers: Mapping[VariantKey, Answer]


def run_of(name: str, cells: Iterable[Cell]) -> Run:
    """Return a run of a history from its cells."""
    answers = {}
    for cell in cells:
        for row, label in cell.variants:
            counts = row.counts
            failures = tuple(sorted({failure for attempt in row.attempts for failure in attempt.failures}))
            usual = max(counts.values(), default=0)
            key = (row.case, " ".join(row.axes), row.hardware.profile, row.stack.name, row.variant)
            answers[key] = Answer(as_expected(label.name), failures, counts.total(), counts.total() - usual)
    return Run(name, answers)


def run_of_history(run: NightlyRun) -> Run:
    """Return a run of the stored history of nightly runs."""
    answers = {}
    for row in run.rows:
        usual = max(row.kinds.values(), default=0)
        outcome = next((kind for kind, count in row.kinds.items() if count == usual), "skipped")
        key = (row.case, " ".join(row.axes), row.hardware, row.stack, row.variant)
        answers[key] = Answer(row.verdict or outcome, row.failure_ids, row.measured, row.measured - usual)
    return Run(run.run_id, answers)


@dataclass(frozen=True)
class HistoryStrip:
    key: VariantKey
    answers: tuple[Answer, ...]

    @property
    def labels(self) -> list[Label]:
        return [LABELS.get(answer.name, LABELS["absent"]) for answer in self.answers]

    @property
    def disagreeing(self) -> int:
        return sum(answer.disagreeing for answer in self.answers)

    @property
    def last_change(self) -> int | None:
        """The index of the last run whose answer differs from the one before it that has an answer."""
        known = [(index, a) for index, a in enumerate(self.answers) if a.name not in NO_ANSWER]
        changed = [later for (_, a), (later, b) in pairwise(known) if (a.name, a.failures) != (b.name, b.failures)]
        return changed[-1] if changed else None


@dataclass(frozen=True)
class History:
    """Runs, the oldest first, with a strip for each variant. ``steady``: the number of strips that were left out."""

    runs: tuple[str, ...]
    strips: tuple[HistoryStrip, ...]
    steady: int = 0

    def of_case(self, slug: str) -> History:
        return replace(self, strips=tuple(strip for strip in self.strips if strip.key[0] == slug)[:MOST_STRIPS])

    def changed(self) -> History:
        """Return the variants that changed or whose attempts disagreed, the latest change first."""
        changed = [strip for strip in self.strips if strip.last_change is not None or strip.disagreeing]
        changed.sort(key=lambda strip: -1 if strip.last_change is None else strip.last_change, reverse=True)
        return replace(self, strips=tuple(changed[:MOST_STRIPS]), steady=len(self.strips) - len(changed))


def history(runs: Sequence[Run]) -> History:
    """Return the newest runs with a strip for each variant that one of them has."""
    runs = runs[-MOST_RUNS:]
    keys = dict.fromkeys(key for run in reversed(runs) for key in run.answers)
    strips = tuple(HistoryStrip(key, tuple(run.answers.get(key, ABSENT) for run in runs)) for key in sorted(keys))
    return History(tuple(run.name for run in runs), strips)
