"""Compare a nightly run with the last passing one: changed results, and results that are missing. Pure.

A change counts until it is acknowledged: the run that has it does not pass, so that the next one is compared with the
same passing run again. Acknowledged: quarantined, or listed by its digest (its issue was closed).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from repro_matrix.analysis.diff import RESULTS, Change, compare, newest
from repro_matrix.analysis.history import NightlyRun
from repro_matrix.analysis.inputs import VariantResult
from repro_matrix.errors import ResultsError
from repro_matrix.text import counted, line

SHOWN = 3


@dataclass(frozen=True)
class ChangedCase:
    """A case whose results changed on a stack since ``passing``, the last passing run that measured them.

    ``versions``: package -> (then, now), where they differ. ``working_fixes``: variants that pass in every measured
    cell.
    """

    case: str
    stack: str
    passing: NightlyRun
    changes: tuple[Change, ...]
    versions: Mapping[str, tuple[str, str]]
    working_fixes: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Identify the change: the same in each run that has it; another one after a passing run without it."""
        changes = sorted(
            (c.row.key, c.row.hardware, c.row.stack, c.variant, c.kind, c.row.verdict or "", *c.row.failure_ids)
            for c in self.changes
        )
        return hashlib.sha256(json.dumps([self.case, self.passing.run_id, changes]).encode()).hexdigest()[:12]


@dataclass
class Regressions:
    """``count``: of the compared variants. ``notes``: stacks that could not be compared, with the reason.
    ``quarantined``: (cell id, variant) -> its change."""

    changed: list[ChangedCase] = field(default_factory=list)
    count: int = 0
    quarantined: dict[tuple[str, str], str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def check_one_commit(rows: Iterable[VariantResult]) -> None:
    """Raise ResultsError where the rows were measured at several commits: shards that do not belong together."""
    cells = Counter((row.commit or "no commit")[:12] for row in rows if row.first)
    if len(cells) > 1:
        commits = ", ".join(f"{commit} ({counted(count, 'cell')})" for commit, count in sorted(cells.items()))
        raise ResultsError(f"results of several commits: {commits}. `repro merge` names the shard that differs.")


def compare_to_last_passing(
    tonight: Iterable[VariantResult],
    history: Sequence[NightlyRun],
    quarantined: Callable[[str, str], bool] = lambda *_: False,
) -> Regressions:
    """Compare each variant with the last passing run that measured it. ``quarantined`` takes (cell id, variant)."""
    result = Regressions()
    by_stack: dict[str, list[VariantResult]] = {}
    for variants in newest(tonight).values():
        for row in variants.values():
            by_stack.setdefault(row.stack, []).append(row)
    for stack, rows in sorted(by_stack.items()):
        passing = [run for run in reversed(history) if run.passed and stack in run.stacks]
        if not passing:
            result.notes.append(f"stack {stack}: no passing run in the history: nothing to compare with yet")
            continue
        measured = {_variant_id(row): row for row in rows if row.measured}
        compared: set[VariantId] = set()
        found: dict[tuple[str, str], list[Change]] = {}
        runs = {run.run_id: run for run in passing}
        for run in passing:
            before = [row for row in run.rows if row.measured and _variant_id(row) in measured.keys() - compared]
            compared |= set(map(_variant_id, before))
            for change in compare(before, [measured[_variant_id(row)] for row in before], need_common=False).changes:
                if change.kind not in RESULTS:
                    continue
                if quarantined(change.row.key, change.variant):
                    result.quarantined[change.row.key, change.variant] = f"{change.kind} since {run.run_id}"
                else:
                    found.setdefault((change.row.case, run.run_id), []).append(change)
        result.count += len(compared)
        new = {row.key for row in measured.values()} - {cell_id[0] for cell_id, _ in compared}
        if new:
            cells = counted(len(new), "cell")
            result.notes.append(f"stack {stack}: {cells} measured in no passing run: nothing to compare with yet")
        for (case, run_id), changes in found.items():
            run = runs[run_id]
            versions = changed_versions(run.stacks[stack], rows[0].versions)
            result.changed.append(ChangedCase(case, stack, run, tuple(changes), versions, working_fixes(case, rows)))
    return result


VariantId = tuple[tuple[str, str, str], str]


def _variant_id(row: VariantResult) -> VariantId:
    return (row.key, row.hardware, row.stack), row.variant


def changed_versions(then: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return package -> (then, now) of the packages whose versions differ."""
    names = sorted(then.keys() | now.keys())
    pairs = {name: (then.get(name, "none"), now.get(name, "none")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def working_fixes(case: str, rows: Iterable[VariantResult]) -> tuple[str, ...]:
    """Return the variants that fix the failure in every cell in which they were measured."""
    verdicts: dict[str, set[str | None]] = {}
    for row in rows:
        if row.case == case and row.measured and not row.first:
            verdicts.setdefault(row.variant, set()).add(row.verdict)
    return tuple(variant for variant, names in verdicts.items() if names == {"FIXED"})


@dataclass(frozen=True)
class Requested:
    """What one of tonight's runs was asked to measure.

    ``cells``: cell id -> stacks; None: unknown, so that every variant in ``variants`` (case -> variants) is taken as
    requested.
    ``hardware``: patterns. ``unstarted``: "hardware stack cell-id" of cells for which there was no time; None: unknown.
    ``shard``: the cell ids of the shard. ``stacks``: those that it measured (a stack may have several names).
    """

    variants: Mapping[str, Collection[str]]
    cells: Mapping[str, Collection[str]] | None = None
    hardware: Sequence[str] = ("auto",)
    unstarted: Collection[str] | None = ()
    shard: Collection[str] | None = None
    stacks: Collection[str] = ()

    def excuse(self, row: VariantResult) -> str:
        """Return why this run need not have measured a variant; "" where it should have."""
        if row.variant not in self.variants.get(row.case, ()):
            return "not requested"
        if self.cells is None:
            return ""
        stacks = self.cells.get(row.key)
        if stacks is None or row.stack not in {*stacks, *self.stacks}:
            return "not requested"
        if self.hardware != ("auto",) and not any(fnmatchcase(row.hardware, pattern) for pattern in self.hardware):
            return "not requested"
        if self.shard is not None and row.key not in self.shard:
            return "in another shard"
        if self.unstarted is None or f"{row.hardware} {row.stack} {row.key}" in self.unstarted:
            return "no time left"
        return ""


@dataclass(frozen=True)
class MissingResult:
    """A variant of the last passing run ``run_id`` without a result tonight. ``excuse``: why that is no error, or "".

    ``whole_cell``: no variant of the cell has one. ``other_hardware``: where the cell was measured instead. ``reason``:
    why the variant was skipped, or what its attempts were lost to.
    """

    row: VariantResult
    run_id: str
    excuse: str
    whole_cell: bool
    other_hardware: str = ""
    reason: str = ""


def find_missing(
    tonight: Iterable[VariantResult],
    history: Sequence[NightlyRun],
    requested: Sequence[Requested],
    unreadable: Sequence[str] = (),
) -> list[MissingResult]:
    """Find variants that a passing run measured and tonight has no result for, by the last run that measured them.

    A variant that is lost to an infrastructure error has no result, and neither has a skipped one, unless the last
    passing run with that variant skipped it for the same reason. ``unreadable``: notes on files that cannot be read;
    their cells are excused, because the file itself is reported. Excused variants are listed for the last passing run
    only.
    """
    cells = newest(tonight)
    passing = [run for run in reversed(history) if run.passed]
    if any(each.cells is None for each in requested):  # the request is unknown: use the last run on this hardware
        hardware = {cell_id[1] for cell_id in cells}
        same = [run for run in passing if hardware & {row.hardware for row in run.rows}]
        passing = (same or passing)[:1]
    missing: list[MissingResult] = []
    checked: set[VariantId] = set()
    for run in passing:
        for row in run.rows:
            cell_id, variant = _variant_id(row)
            now = cells.get(cell_id, {}).get(variant)
            same_skip = row.skipped and now is not None and now.skipped == row.skipped
            if not (row.measured or same_skip) or (cell_id, variant) in checked:
                continue
            checked.add((cell_id, variant))
            if same_skip or (now is not None and now.measured):
                continue
            reasons = [each.excuse(row) for each in requested]
            excuse = "" if "" in reasons or not reasons else reasons[0]
            if any(f"/{row.key}.json" in note for note in unreadable):
                excuse = "its result cannot be read"
            if excuse and run is not passing[0]:
                continue
            others = sorted(other[1] for other in cells if (other[0], other[2]) == (row.key, row.stack))
            whole = cell_id not in cells
            other, reason = others[0] if others and whole else "", (now.skipped or now.text) if now else ""
            missing.append(MissingResult(row, run.run_id, excuse, whole, other, reason))
    return missing


def count_missing(missing: Iterable[MissingResult]) -> str:
    """Return ``2 cells and 1 variant``."""
    missing = list(missing)
    cells = len({_variant_id(each.row)[0] for each in missing if each.whole_cell})
    variants = sum(not each.whole_cell for each in missing)
    return " and ".join(counted(count, what) for count, what in ((cells, "cell"), (variants, "variant")) if count)


def describe_missing(missing: Sequence[MissingResult]) -> list[str]:
    """Return a message for each excuse, and one for what is missing without any."""
    messages = []
    for excuse in dict.fromkeys(each.excuse for each in missing):
        group = [each for each in missing if each.excuse == excuse]
        names = [_name(each) for each in group]
        listed = "; ".join(list(dict.fromkeys(names))[:SHOWN]) + ("; ..." if len(set(names)) > SHOWN else "")
        runs = ", ".join(dict.fromkeys(each.run_id for each in group))
        head = f"{count_missing(group)} measured in the last passing run ({runs})"
        if excuse:
            messages.append(f"{head} were not measured tonight ({excuse}): {listed}")
            continue
        hardware = sorted({each.other_hardware for each in group if each.other_hardware})
        instead = f" Measured on {', '.join(hardware)} instead." if hardware else ""
        hint = "If this is intentional, restrict the run explicitly, e.g. case=... or hardware=..."
        messages.append(f"Missing: {head} have no result tonight: {listed}.{instead} {hint}")
    return messages


def _name(missing: MissingResult) -> str:
    row = missing.row
    variant = "" if missing.whole_cell else f" variant {row.variant}"
    reason = f" ({line(missing.reason)})" if missing.reason else ""
    return f"{row.key}{variant} on {row.hardware}, stack {row.stack}{reason}"
