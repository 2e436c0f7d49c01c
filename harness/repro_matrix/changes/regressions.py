"""Compare a run with the passing runs before it. Pure, except for git and the runs of a folder.

A change counts until it is acknowledged: the run that has it does not pass, so that the next one is
compared with the same passing run again. Acknowledged: listed by its digest (its issue was closed).
A quarantined change does not count while its entry is active, and no later run is compared with it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from repro_matrix.baseline.derivation import lacking
from repro_matrix.baseline.releases import STATES
from repro_matrix.changes.diff import Change, result_change
from repro_matrix.changes.history import NightlyRun, Place, by_place, make_run, place_of
from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import RELEVANT, OutcomeName
from repro_matrix.grading.expected import as_expected
from repro_matrix.grading.verdict import DATED, is_older
from repro_matrix.records.outcome import DIFFERS_FROM_PREDICTION, NOTHING_STORED
from repro_matrix.results.rows import Row, with_catalog
from repro_matrix.results.runs import KEPT, current_rows, runs_before, scratch
from repro_matrix.results.store import UNCOMMITTED, changed_files
from repro_matrix.results.summary import lost, missing_cells
from repro_matrix.text import list_some

MOST_FILES = 2
UNKNOWN_FILES = ("files that were not committed",)


@dataclass(frozen=True)
class ChangedCase:
    """A case whose results changed on a stack since ``passing``, the last passing run that measured
    them.

    ``versions``, ``machine``: package, or part of the machine -> (then, now), where they differ.
    ``files``: those of
    the catalog that differ. ``working_fixes``: those that work in every measured cell.
    """

    case: str
    stack: str
    passing: NightlyRun
    changes: tuple[Change, ...]
    versions: Mapping[str, tuple[str, str]]
    working_fixes: tuple[str, ...]
    machine: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    files: tuple[str, ...] = ()

    @property
    def moved(self) -> list[str]:
        """Say what else changed since then: packages, the machine, the catalog's own files."""
        pairs = (*self.versions.items(), *self.machine.items())
        moved = [f"{name}: {then} -> {now}" for name, (then, now) in pairs]
        moved += [list_some(self.files, MOST_FILES)] if self.files else []
        moved += ["the passing run had uncommitted files"] * self.passing.dirty
        return moved + ["no package"] * bool(moved and not self.versions)

    @property
    def suspect(self) -> str:
        """Return the command that shows the catalog's first file that changed, where no package
        did; else ""."""
        if self.versions or self.files in ((), UNKNOWN_FILES):
            return ""
        name = self.files[0].removesuffix(UNCOMMITTED)
        commit = (self.passing.commit or "")[:7] if name == self.files[0] else ""
        return " ".join(filter(None, ("git diff", commit, name)))

    @property
    def digest(self) -> str:
        """Identify the change: the same in each run that has it; another one after a passing run
        without it."""
        changes = sorted(
            (
                c.row.cell_id,
                c.row.hardware.profile,
                c.row.stack.name,
                c.variant,
                c.kind,
                c.row.stored_verdict or "",
                *c.row.failure_ids,
            )
            for c in self.changes
        )
        return hashlib.sha256(
            json.dumps([self.case, self.passing.run_id, changes]).encode()
        ).hexdigest()[:12]


@dataclass
class Regressions:
    """``new``: ids of cells that no passing run measured. ``previous``: the passing run with which
    most of these variants were compared, preferably a whole one. ``quarantined``: (cell id,
    variant) -> its change. ``references``: what each variant was compared with. ``passing``: the
    runs. ``left_open``: variants that these have only with results unlike a prediction, so that
    they are not compared. ``earlier``: whether earlier runs have these cells, passing or not."""

    changed: list[ChangedCase] = field(default_factory=list)
    new: set[str] = field(default_factory=set)
    previous: NightlyRun | None = None
    quarantined: dict[tuple[str, str], str] = field(default_factory=dict)
    references: dict[Place, tuple[NightlyRun, Row]] = field(default_factory=dict)
    passing: Sequence[NightlyRun] = ()
    left_open: tuple[str, ...] = ()
    earlier: bool = False

    def unexpected(self, tonight: Iterable[Row], handled: Collection[str] = ()) -> list[Row]:
        """Return results that differ from their reviewed expectation, without those that are
        quarantined or handled: of a change with one of these digests, or the same in the passing
        run."""
        known = {
            place_of(c.row) for each in self.changed if each.digest in handled for c in each.changes
        }

        def passed_before(row: Row) -> bool:
            before = self.references[place_of(row)][1] if place_of(row) in self.references else None
            return (
                before is not None
                and before.state == row.state
                and before.stored_verdict == row.stored_verdict
            )

        return [
            row
            for place, row in by_place(tonight).items()
            if row.state == "unexpected"
            and row.kinds
            and not (
                place in known
                or (row.cell_id, row.variant) in self.quarantined
                or passed_before(row)
            )
        ]


@dataclass
class Past:
    """The passing runs of a variant since it last changed. ``recent``: the attempts of the newest
    results, as long as they had the same outcomes; ``earlier``: all attempts before. ``reference``:
    the newest of the earlier results whose attempts agree, else the first."""

    reference: tuple[NightlyRun, Row]
    newest: tuple[NightlyRun, Row]
    recent: Counter[OutcomeName]
    earlier: Counter[OutcomeName] = field(default_factory=Counter)

    def change(self, row: Row) -> tuple[str | None, tuple[NightlyRun, Row]]:
        """Return the kind of the change or None, and what the result is compared with. Where
        attempts disagree, all those of the passing runs count, and runs that have the same outcomes
        as this one count with it: a fix may stop working in two steps. Of attempts that agree on a
        result that is not the expected one, chance is no reason."""
        kinds, again = Counter(row.kinds), row.kinds.keys() == self.recent.keys()
        pools = [(self.earlier + self.recent, kinds)]
        pools += [(self.earlier, self.recent + kinds)] if again and self.earlier else []
        reference = self.newest if self.newest[1].steady and not again else self.reference
        unexpected = row.steady and row.state == "unexpected"
        kind = result_change(reference[1], row, () if unexpected else pools)
        if kind and not row.steady and reference[1].kinds.keys() & row.kinds.keys():
            kind = "became_flaky"
        return kind, reference if kind else self.newest

    def add(self, run: NightlyRun, row: Row) -> None:
        if row.kinds.keys() != self.recent.keys():
            self.earlier += self.recent
            self.recent.clear()
            self.reference = self.newest if self.newest[1].steady else self.reference
        self.recent += Counter(row.kinds)
        self.newest = run, row


def _counts(run: NightlyRun, row: Row) -> bool:
    """Whether later results are compared with this one of a passing run: it has no quarantined
    change, and is not what the run left open (one with exit code 3 passes, too)."""
    left_open = run.partial and row.state in DIFFERS_FROM_PREDICTION
    return (
        run.passed
        and bool(row.kinds)
        and not left_open
        and (row.cell_id, row.variant) not in run.quarantined
    )


def _only_flaky(run: NightlyRun, row: Row) -> bool:
    """Whether a night did not pass because a documented fix was flaky: its attempts count, or those
    of the passing nights would look steadier than the fix is."""
    return run.exit_code == 3 and row.state == "differs_from_documentation" and not row.steady


def _pasts(history: Iterable[NightlyRun], measured: Collection[Place]) -> dict[Place, Past]:
    """Return the past of each of these places in the results that count."""
    found: dict[Place, Past] = {}
    for run in history:
        for row in run.rows:
            place = place_of(row)
            if place in found and _only_flaky(run, row):
                found[place].add(run, row)
            elif _counts(run, row) and place in measured:
                if place not in found or found[place].change(row)[0]:
                    found[place] = Past((run, row), (run, row), Counter(row.kinds))
                else:
                    found[place].add(run, row)
    return found


def compare_to_last_passing(
    tonight: Iterable[Row],
    history: Sequence[NightlyRun],
    quarantined: Callable[[str, str], bool] = lambda *_: False,
    packages: Mapping[str, Mapping[str, str]] | None = None,
) -> Regressions:
    """Compare each variant with the passing runs whose result of it counts.

    ``quarantined`` takes (cell id, variant). ``packages``: stack -> all its packages, where they
    are known.
    """
    tonight = list(tonight)
    now = make_run("", tonight, packages=packages)
    measured = {place: row for place, row in by_place(tonight).items() if row.kinds}
    result = Regressions(passing=[run for run in history if run.passed])
    pasts = _pasts(history, measured)
    found: dict[tuple[str, str, str], tuple[NightlyRun, list[Change]]] = {}
    for place, past in pasts.items():
        row = measured[place]
        kind, (run, before) = past.change(row)
        result.references[place] = run, before
        if kind and quarantined(row.cell_id, row.variant):
            result.quarantined[row.cell_id, row.variant] = f"{kind} since {run.run_id}"
        elif kind:
            change = Change(kind, row.variant, before, row)
            found.setdefault((row.case, row.stack.name, run.run_id), (run, []))[1].append(change)
    for (case, stack, _), (run, changes) in found.items():
        versions = differing_packages(run.stacks.get(stack, {}), now.stacks[stack])
        hardware = changes[0].row.hardware.profile
        machine = _differing(run.machines.get(hardware, {}), now.machines.get(hardware, {}))
        fixes = working_fixes(case, [row for row in measured.values() if row.stack.name == stack])
        result.changed.append(
            ChangedCase(case, stack, run, tuple(changes), versions, fixes, machine)
        )
    shared = [
        run
        for run in result.passing
        if any(_counts(run, row) and place_of(row) in measured for row in run.rows)
    ]
    left = {
        f"{row.case}/{row.variant}"
        for run in result.passing
        for row in run.rows
        if row.state in DIFFERS_FROM_PREDICTION and place_of(row) in measured.keys() - pasts.keys()
    }
    result.left_open = tuple(sorted(left))
    compared = Counter(run.run_id for run, _ in result.references.values())
    result.previous = max(
        shared,
        key=lambda run: (not run.partial, compared[run.run_id], shared.index(run)),
        default=None,
    )
    result.new = {row.cell_id for row in measured.values()} - {place[0] for place in pasts}
    return result


def since_last_passing(folder: Path, rows: Sequence[Row], cases: Mapping[str, Case]) -> Regressions:
    """Compare a run with those before it (``runs_before``) that passed: with exit code 0, or 3
    where less was measured than requested. At most ``KEPT`` are read."""
    cells, found = {row.cell for row in rows}, list[NightlyRun]()
    before = runs_before(folder)
    for run in [each for each in before if each.exit_code in (0, 3)][-KEPT:]:
        notes: list[str] = []
        stored = [with_catalog(row, cases) for row in current_rows(run.folder, notes)]
        if cells & {row.cell for row in stored}:
            name = run.folder.name if run.folder.parent == scratch().resolve() else str(run.folder)
            less = (
                run.exit_code
                or missing_cells(run.folder, stored, notes)
                or lost(notes)
                or lacking(stored)
            )
            found.append(replace(make_run(name, stored, 0), partial=bool(less)))
    accepted = {(row.cell_id, row.variant) for row in rows if row.state == "quarantined"}
    results = rows
    since = compare_to_last_passing(results, found, lambda *place: place in accepted)
    since.earlier = bool(before)
    return name_files(since, make_run("", results))


def against_history(rows: Iterable[Row], since: Regressions) -> list[Row]:
    """Mark as unexpected what has no expectation of its own releases and was better: in the last
    passing run that measured it, or, of a fix that fails and of which no release is known, with the
    newest older release there."""
    changed = {place_of(change.row) for each in since.changed for change in each.changes}
    upgraded = {(each.case, each.stack) for each in since.changed if DATED & each.versions.keys()}

    def better_before(row: Row) -> tuple[str | None, str] | None:
        place = row.cell_id, row.hardware.profile, row.stack.name, row.variant
        now = STATES.get(row.verdict or "")
        if place not in since.references:
            failing_fix = row.role == "fix" and now == "reproduces" and row.verdict != "FIXED"
            return _worked(row, since.passing) if failing_fix and not row.nearest else None
        run, before = since.references[place]
        works_now = row.verdict == "FIXED" and STATES.get(before.stored_verdict or "") != "absent"
        upstream = now == "absent" and (row.case, row.stack.name) in upgraded
        same = before.stored_verdict == as_expected(row.verdict or "") or not changed & {
            place,
            (*place[:3], "unfixed"),
        }
        return None if same or works_now or upstream else (before.stored_verdict, run.run_id)

    marked = []
    for row in rows:
        is_open = row.state in NOTHING_STORED or (row.nearest and row.state != "unexpected")
        known = better_before(row) if is_open and row.measured else None
        note = f"{row.note or 'no expectation'}; measured in {known[1]}" if known else ""
        marked.append(
            replace(row, state="unexpected", expected_verdict=known[0], note=note) if known else row
        )
    return marked


def _worked(row: Row, passing: Iterable[NightlyRun]) -> tuple[str, str] | None:
    """Return FIXED and where it was measured, if the newest older release on this hardware shows
    it."""
    place, versions = (row.cell_id, row.hardware.profile, row.variant), row.stack.versions
    found = [
        (run.stacks.get(one.stack.name, {}), one.stored_verdict, run.run_id)
        for run in passing
        for one in run.rows
        if one.kinds and (one.cell_id, one.hardware.profile, one.variant) == place
    ]
    older = [each for each in found if is_older(each[0], versions)]
    newest = next(
        (one for one in older if not any(is_older(one[0], other[0]) for other in older)), None
    )
    return (newest[1], newest[2]) if newest and newest[1] == "FIXED" else None


def name_files(since: Regressions, now: NightlyRun) -> Regressions:
    """Add the files of the catalog that differ to each change, as far as git knows."""
    until, unknown = (now.started, UNKNOWN_FILES) if now.dirty else (0.0, ())
    changed = [
        replace(each, files=tuple(changed_files(each.passing.commit, now.commit, until) or unknown))
        for each in since.changed
    ]
    return replace(since, changed=changed)


def differing_packages(
    then: Mapping[str, str], now: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Return package -> (then, now); where only one side lists all its packages, only of the usual
    ones."""
    if any(not side.keys() - set(RELEVANT) for side in (then, now)):
        then, now = (
            {name: each[name] for name in each if name in RELEVANT} for each in (then, now)
        )
    return _differing(then, now)


def _differing(then: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    pairs = (
        {name: (then.get(name, "none"), now.get(name, "none")) for name in sorted({*then, *now})}
        if then
        else {}
    )
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def working_fixes(case: str, rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the fixes that work in every cell in which they were measured."""
    verdicts: dict[str, set[str | None]] = {}
    for row in rows:
        if row.case == case and row.role == "fix":
            verdicts.setdefault(row.variant, set()).add(row.stored_verdict)
    return tuple(variant for variant, names in verdicts.items() if names == {"FIXED"})
