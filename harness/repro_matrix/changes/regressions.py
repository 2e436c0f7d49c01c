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
from repro_matrix.git import UNCOMMITTED, changed_files
from repro_matrix.grading.expected import as_expected
from repro_matrix.grading.verdict import DATED, is_older
from repro_matrix.records.outcome import DIFFERS_FROM_PREDICTION, NOTHING_STORED
from repro_matrix.results.projection import with_catalog
from repro_matrix.results.rows import Row
from repro_matrix.results.runs import KEPT, current_rows, runs_before, scratch
from repro_matrix.results.summary import lost, missing_cells
from repro_matrix.text import list_some

MOST_FILES = 2
UNKNOWN_FILES = ("files that were not committed",)
Reference = tuple[NightlyRun, Row]
Differences = Mapping[str, tuple[str, str]]  # name -> then, now


@dataclass(frozen=True)
class ChangedCase:
    """A case whose results changed on a stack since ``passing``, the last run that passed with it.

    ``versions``, ``machine``: packages and parts of the machine that differ. ``files``: those of
    the catalog that differ. ``working_fixes``: those that work in every measured cell.
    """

    case: str
    stack: str
    passing: NightlyRun
    changes: tuple[Change, ...]
    versions: Differences
    working_fixes: tuple[str, ...]
    machine: Differences = field(default_factory=dict)
    files: tuple[str, ...] = ()

    @property
    def moved(self) -> list[str]:
        """List what else changed since then: packages, the machine, the catalog's own files."""
        pairs = (*self.versions.items(), *self.machine.items())
        moved = [f"{name}: {then} -> {now}" for name, (then, now) in pairs]
        if self.files:
            moved.append(list_some(self.files, MOST_FILES))
        if self.passing.dirty:
            moved.append("the passing run had uncommitted files")
        if moved and not self.versions:
            moved.append("no package")
        return moved

    @property
    def suspect(self) -> str:
        """Return the command that shows the first changed file, if no package changed."""
        if self.versions or self.files in ((), UNKNOWN_FILES):
            return ""
        name = self.files[0].removesuffix(UNCOMMITTED)
        commit = (self.passing.commit or "")[:7] if name == self.files[0] else ""
        return " ".join(filter(None, ("git diff", commit, name)))

    @property
    def digest(self) -> str:
        """Identify the change: it is the same in each run until a passing run comes between."""
        changes = sorted(
            (*place_of(c.row), c.kind, c.row.stored_verdict or "", *c.row.failure_ids)
            for c in self.changes
        )
        text = json.dumps([self.case, self.passing.run_id, changes])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass
class Regressions:
    """The comparison of a run with the passing runs before it.

    ``new``: ids of cells that no passing run measured. ``previous``: the passing run with which
    most variants were compared, preferably a whole one. ``quarantined``: (cell id, variant) -> its
    change. ``references``: the result that each variant was compared with. ``earlier``: whether
    earlier runs have these cells, passing or not.
    """

    changed: list[ChangedCase] = field(default_factory=list)
    new: set[str] = field(default_factory=set)
    previous: NightlyRun | None = None
    quarantined: dict[tuple[str, str], str] = field(default_factory=dict)
    references: dict[Place, Reference] = field(default_factory=dict)
    passing: Sequence[NightlyRun] = ()
    earlier: bool = False

    def unexpected(self, tonight: Iterable[Row], handled: Collection[str] = ()) -> list[Row]:
        """Return results that differ from their reviewed expectation.

        Without those that are quarantined or handled: the same in the passing run, or of a change
        with such a digest.
        """
        acknowledged = {
            place_of(change.row)
            for each in self.changed
            if each.digest in handled
            for change in each.changes
        }
        same_before = {
            (place, before.state, before.stored_verdict)
            for place, (_, before) in self.references.items()
        }
        return [
            row
            for place, row in by_place(tonight).items()
            if row.state == "unexpected"
            and row.kinds
            and place not in acknowledged
            and (row.cell_id, row.variant) not in self.quarantined
            and (place, row.state, row.stored_verdict) not in same_before
        ]


@dataclass
class Past:
    """The passing results of a variant since it last changed.

    ``recent``: the attempts of the newest results, as long as they had the same outcomes.
    ``earlier``: all attempts before. ``reference``: the newest of the earlier results whose
    attempts agree, else the first.
    """

    reference: Reference
    newest: Reference
    recent: Counter[OutcomeName]
    earlier: Counter[OutcomeName] = field(default_factory=Counter)

    def change(self, row: Row) -> tuple[str | None, Reference]:
        """Return the kind of the change or None, and what the result is compared with.

        Where attempts disagree, all those of the passing runs count, and runs that have the same
        outcomes as this one count with it: a fix may stop working in two steps. If attempts agree
        on a result that is not the expected one, chance is not the reason.
        """
        kinds = Counter(row.kinds)
        again = row.kinds.keys() == self.recent.keys()
        pools = [(self.earlier + self.recent, kinds)]
        if again and self.earlier:
            pools.append((self.earlier, self.recent + kinds))
        if row.steady and row.state == "unexpected":
            pools = []
        reference = self.newest if self.newest[1].steady and not again else self.reference
        kind = result_change(reference[1], row, pools)
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
    """Return whether later results are compared with this one.

    Not with a quarantined change, and not with what its run left open (exit code 3 passes, too).
    """
    left_open = run.partial and row.state in DIFFERS_FROM_PREDICTION
    quarantined = (row.cell_id, row.variant) in run.quarantined
    return run.passed and bool(row.kinds) and not left_open and not quarantined


def _only_flaky(run: NightlyRun, row: Row) -> bool:
    """Return whether a night did not pass because a documented fix was flaky.

    Its attempts count, or those of the passing nights would look steadier than the fix is.
    """
    return run.exit_code == 3 and row.state == "differs_from_documentation" and not row.steady


def _pasts(history: Iterable[NightlyRun], measured: Collection[Place]) -> dict[Place, Past]:
    """Return the past of each place in the results that count."""
    found: dict[Place, Past] = {}
    for run in history:
        for row in run.rows:
            place = place_of(row)
            past = found.get(place)
            counts = place in measured and _counts(run, row)
            if past and (_only_flaky(run, row) or (counts and not past.change(row)[0])):
                past.add(run, row)
            elif counts:
                found[place] = Past((run, row), (run, row), Counter(row.kinds))
    return found


def compare_to_last_passing(
    tonight: Iterable[Row],
    history: Sequence[NightlyRun],
    quarantined: Callable[[str, str], bool] = lambda *_: False,
    packages: Mapping[str, Mapping[str, str]] | None = None,
) -> Regressions:
    """Compare each variant with the passing runs whose result of it counts.

    ``quarantined`` takes (cell id, variant). ``packages``: stack -> all its packages, if known.
    """
    now = make_run("", tonight, packages=packages)
    measured = {place_of(row): row for row in now.rows if row.kinds}
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
        hardware = changes[0].row.hardware.profile
        fixes = working_fixes(case, [row for row in measured.values() if row.stack.name == stack])
        result.changed.append(
            ChangedCase(
                case,
                stack,
                run,
                tuple(changes),
                differing_packages(run.versions(stack), now.versions(stack)),
                fixes,
                _differing(run.machine(hardware), now.machine(hardware)),
            )
        )
    compared = Counter(run.run_id for run, _ in result.references.values())
    result.previous = max(
        (run for run in result.passing if run.run_id in compared),
        key=lambda run: (not run.partial, compared[run.run_id], run.started),
        default=None,
    )
    result.new = {row.cell_id for row in measured.values()} - {place[0] for place in pasts}
    return result


def since_last_passing(folder: Path, rows: Sequence[Row], cases: Mapping[str, Case]) -> Regressions:
    """Compare a run with the last ``KEPT`` runs before it that passed.

    An exit code of 3 passes, too: less was measured than requested.
    """
    cells = {row.cell for row in rows}
    found = list[NightlyRun]()
    before = runs_before(folder)
    for run in [each for each in before if each.exit_code in (0, 3)][-KEPT:]:
        notes: list[str] = []
        stored = [with_catalog(row, cases) for row in current_rows(run.folder, notes)]
        if cells & {row.cell for row in stored}:
            name = run.folder.name if run.folder.parent == scratch().resolve() else str(run.folder)
            missing = missing_cells(run.folder, stored, notes) or lost(notes)
            partial = bool(run.exit_code or missing or lacking(stored))
            found.append(replace(make_run(name, stored, 0), partial=partial))
    accepted = {(row.cell_id, row.variant) for row in rows if row.state == "quarantined"}
    since = compare_to_last_passing(rows, found, lambda *place: place in accepted)
    since.earlier = bool(before)
    return name_files(since, make_run("", rows))


def against_history(rows: Iterable[Row], since: Regressions) -> list[Row]:
    """Mark rows without an expectation of their own releases as unexpected if they were better.

    Better in the last passing run that measured them; a fix that fails, and of which no release is
    known, also with the newest older release there.
    """
    changed = {place_of(change.row) for each in since.changed for change in each.changes}
    upgraded = {(each.case, each.stack) for each in since.changed if DATED & each.versions.keys()}

    def better_before(row: Row) -> tuple[str | None, str] | None:
        place = place_of(row)
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
        if is_open and row.measured and (known := better_before(row)):
            note = f"{row.note or 'no expectation'}; measured in {known[1]}"
            row = replace(row, state="unexpected", expected_verdict=known[0], note=note)
        marked.append(row)
    return marked


def _worked(row: Row, passing: Iterable[NightlyRun]) -> tuple[str, str] | None:
    """Return FIXED and its run, if the newest older release on this hardware shows that."""
    place = (row.cell_id, row.hardware.profile, row.variant)
    versions = row.stack.versions
    found = [
        (run.versions(one.stack.name), one.stored_verdict, run.run_id)
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
    """Return the packages that differ: only the usual ones, unless both sides list all packages."""
    differing = _differing(then, now)
    if then.keys() <= set(RELEVANT) or now.keys() <= set(RELEVANT):
        return {name: pair for name, pair in differing.items() if name in RELEVANT}
    return differing


def _differing(then: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    pairs = {name: (then.get(name, "none"), now.get(name, "none")) for name in {**then, **now}}
    return {name: pairs[name] for name in sorted(pairs) if then and len(set(pairs[name])) > 1}


def working_fixes(case: str, rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the fixes that work in every cell in which they were measured."""
    verdicts: dict[str, set[str | None]] = {}
    for row in rows:
        if row.case == case and row.role == "fix":
            verdicts.setdefault(row.variant, set()).add(row.stored_verdict)
    return tuple(variant for variant, names in verdicts.items() if names == {"FIXED"})
