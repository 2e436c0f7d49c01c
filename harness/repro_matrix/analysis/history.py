"""The history of nightly runs: ``nights.jsonl``, a JSON line per run; and the comparison of a run with it.

A change counts until it is acknowledged: the run that has it does not pass, so that the next one is compared with the
same passing run again. Acknowledged: listed by its digest (its issue was closed). A quarantined change does not count
while its entry is active, and no later run is compared with it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from pydantic import ConfigDict, TypeAdapter

from repro_matrix.analysis.diff import RESULTS, Change, compare, newest
from repro_matrix.analysis.inputs import VariantResult, from_row
from repro_matrix.analysis.releases import STATES
from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import RELEVANT, OutcomeName
from repro_matrix.errors import ResultsError
from repro_matrix.grading.expectations import as_expected, expected
from repro_matrix.grading.verdict import DATED, is_older
from repro_matrix.paths import write_text
from repro_matrix.results.expectations import lacking
from repro_matrix.results.rows import Row, compared
from repro_matrix.results.runs import ENDED, LOOK_BACK, listed
from repro_matrix.results.store import changed_files
from repro_matrix.results.summary import stored_rows
from repro_matrix.text import counted, line

FILE = "nights.jsonl"
SHOWN, MOST_FILES = 3, 5  # cells with missing results; changed files of the catalog


@dataclass(frozen=True)
class NightlyRun:
    """``exit_code``: that of `repro nightly`; None where it is unknown. ``stacks``: stack -> versions.

    ``rows``: without settings, paths and what they have in common. ``quarantined``: (cell id, variant) of changes that
    did not count.
    """

    schema: Literal[1]
    run_id: str
    started: float
    commit: str | None
    exit_code: int | None
    rows: tuple[VariantResult, ...]
    stacks: Mapping[str, Mapping[str, str]]
    quarantined: tuple[tuple[str, str], ...] = ()
    dirty: bool = False
    machines: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # hardware -> CPU, cores, memory ...
    partial: bool = False  # it measured less than requested

    __pydantic_config__ = ConfigDict(extra="forbid")

    @property
    def passed(self) -> bool:
        return self.exit_code == 0


_ADAPTER = TypeAdapter(NightlyRun)
_SHARED: dict[str, Any] = {
    "versions": {}, "started": 0.0, "commit": None, "dirty": False, "machine": {}, "settings": {}, "path": "",
}  # fmt: skip


def make_run(
    run_id: str, rows: Iterable[VariantResult], exit_code: int | None = None,
    packages: Mapping[str, Mapping[str, str]] | None = None,
) -> NightlyRun:  # fmt: skip
    """Make a run of the newest result of each cell. ``packages``: all those of a stack, where they are known."""
    cells = newest(rows)
    kept = [row for cell_id in sorted(cells) for row in cells[cell_id].values()]
    commits = {row.commit for row in kept}
    return NightlyRun(
        1, run_id, max((row.started for row in kept), default=0.0), commits.pop() if len(commits) == 1 else None,
        exit_code, tuple(replace(row, **_SHARED) for row in kept),
        {row.stack: row.versions for row in kept} | dict(packages or {}), (), any(row.dirty for row in kept),
        {row.hardware: row.machine for row in kept if row.machine},
    )  # fmt: skip


def load_history(folder: Path, notes: list[str]) -> list[NightlyRun]:
    """Load the runs in the order in which they were stored. A truncated last line is added to ``notes``.

    Raises ResultsError: the file cannot be read, or a line of it is damaged.
    """
    path = folder / FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read: {error}") from None
    runs = []
    for number, text in enumerate(content.splitlines(keepends=True), 1):
        try:
            runs.append(_ADAPTER.validate_python(json.loads(text)))
        except ValueError as error:
            if not text.endswith(b"\n"):
                notes.append(f"{path}:{number}: truncated line ignored")
                break
            hint = "Restore the file from a backup, or move it away to start a new history."
            raise ResultsError(f"{path}:{number}: damaged: {line(str(error))}. {hint}") from None
    return runs


def store_run(folder: Path, run: NightlyRun) -> None:
    """Add a run to the history, or replace the one of the same id. Raises ResultsError: it cannot be written."""
    runs = {each.run_id: each for each in [*load_history(folder, []), run]}
    values = [_ADAPTER.dump_python(each, mode="json", exclude_defaults=True) for each in runs.values()]
    try:
        write_text(folder / FILE, "".join(json.dumps(each, separators=(",", ":")) + "\n" for each in values))
    except OSError as error:
        raise ResultsError(f"{folder / FILE}: cannot be written: {error.strerror or error}") from None


# -- changed results


@dataclass(frozen=True)
class ChangedCase:
    """A case whose results changed on a stack since ``passing``, the last passing run that measured them.

    ``versions``, ``machine``: package, or part of the machine -> (then, now), where they differ. ``files``: those of
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
        more = f" and {len(self.files) - MOST_FILES} more" if len(self.files) > MOST_FILES else ""
        moved += [f"the catalog: {', '.join(self.files[:MOST_FILES])}{more}"] if self.files else []
        return moved + ["the passing run had uncommitted files"] * self.passing.dirty

    @property
    def digest(self) -> str:
        """Identify the change: the same in each run that has it; another one after a passing run without it."""
        changes = sorted(
            (c.row.key, c.row.hardware, c.row.stack, c.variant, c.kind, c.row.verdict or "", *c.row.failure_ids)
            for c in self.changes
        )
        return hashlib.sha256(json.dumps([self.case, self.passing.run_id, changes]).encode()).hexdigest()[:12]


Place = tuple[str, str, str, str]  # cell id, hardware, stack, variant
References = dict[Place, tuple[NightlyRun, VariantResult]]


@dataclass
class Regressions:
    """``count``: of the compared variants. ``new``: ids of cells that no passing run measured. ``previous``: the newest
    passing run with one of these variants. ``quarantined``: (cell id, variant) -> its change. ``references``: what each
    variant was compared with. ``passing``: the runs."""

    changed: list[ChangedCase] = field(default_factory=list)
    count: int = 0
    new: set[str] = field(default_factory=set)
    previous: NightlyRun | None = None
    quarantined: dict[tuple[str, str], str] = field(default_factory=dict)
    references: References = field(default_factory=dict)
    passing: Sequence[NightlyRun] = ()

    def unexpected(self, tonight: Iterable[VariantResult], handled: Collection[str] = ()) -> list[VariantResult]:
        """Return results that differ from their reviewed expectation, without those that are quarantined or handled: of
        a change with one of these digests, or the same in the passing run."""
        known = {_place(c.row) for each in self.changed if each.digest in handled for c in each.changes}

        def passed_before(row: VariantResult) -> bool:
            before = self.references[_place(row)][1] if _place(row) in self.references else None
            return before is not None and before.expected == row.expected and before.verdict == row.verdict

        return [
            row
            for place, row in _by_place(tonight).items()
            if row.expected == "unexpected" and row.measured
            and not (place in known or (row.key, row.variant) in self.quarantined or passed_before(row))
        ]  # fmt: skip


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
    packages: Mapping[str, Mapping[str, str]] | None = None,
) -> Regressions:
    """Compare each variant with the last passing run that measured it without a quarantined change.

    ``quarantined`` takes (cell id, variant). ``packages``: stack -> all its packages, where they are known.
    """
    tonight = list(tonight)
    now = make_run("", tonight, packages=packages)
    measured = {place: row for place, row in _by_place(tonight).items() if row.measured}
    passing = [run for run in history if run.passed]
    references, pools = _references(passing, measured)
    result = Regressions(references=references, passing=passing)
    for run in reversed(passing):
        if result.previous is None and any(row.measured and _place(row) in measured for row in run.rows):
            result.previous = run
        before = {place: row for place, (other, row) in result.references.items() if other is run}
        found: dict[tuple[str, str], list[Change]] = {}
        changes = compare(before.values(), [measured[place] for place in before]).select(RESULTS)
        steady = before.keys() - {_place(change.row) for change in changes}
        pooled = [replace(before[place], kinds=pools[place]) for place in steady]
        changes += [
            change if change.row.steady else replace(change, kind="became_flaky")
            for change in compare(pooled, [measured[place] for place in steady]).select(RESULTS)
        ]
        for change in changes:
            if quarantined(change.row.key, change.variant):
                result.quarantined[change.row.key, change.variant] = f"{change.kind} since {run.run_id}"
            else:
                found.setdefault((change.row.case, change.row.stack), []).append(change)
        for (case, stack), changes in found.items():
            rows = [row for row in measured.values() if row.stack == stack]
            versions = differing_packages(run.stacks.get(stack, {}), now.stacks[stack])
            hardware = changes[0].row.hardware
            machine = _differing(run.machines.get(hardware, {}), now.machines.get(hardware, {}))
            fixes = working_fixes(case, rows)
            result.changed.append(ChangedCase(case, stack, run, tuple(changes), versions, fixes, machine))
    result.count = len(result.references)
    result.new = {row.key for row in measured.values()} - {place[0] for place in result.references}
    return result


def _references(
    passing: Iterable[NightlyRun], measured: Collection[Place]
) -> tuple[References, dict[Place, Counter[OutcomeName]]]:
    """Return place -> the last of these runs that measured it, and the result; and the outcomes of all runs since that
    result first appeared. A flaky result that does not differ from the one before it is no reference: a fix that dies
    in two steps would never differ."""
    found: References = {}
    pools: dict[Place, Counter[OutcomeName]] = {}
    for run in passing:
        for row in run.rows:
            place = _place(row)
            if row.measured and place in measured and (row.key, row.variant) not in run.quarantined:
                since = compare([found[place][1]], [row]) if place in found else None
                same = since is not None and not since.changes and not since.incomparable
                pools[place] = (pools[place] if same else Counter()) + Counter(row.kinds)
                if row.steady or not same:
                    found[place] = run, row
    return found, pools


def since_last_passing(folder: Path, rows: Sequence[Row], cases: Mapping[str, Case]) -> Regressions:
    """Compare a run with the runs beside it. A run passes where nothing in it differs from what is expected now, nor
    from the passing runs before it. At most ``LOOK_BACK`` runs are read."""
    cells, found = {row.cell for row in rows}, list[NightlyRun]()
    earlier = [run for run in listed(folder.resolve().parent) if run.folder.name < folder.resolve().name]
    for run in earlier[-LOOK_BACK:]:
        stored = [compared(row, cases) for each in stored_rows(run.folder, []).values() for row in each]
        if cells & {row.cell for row in stored}:
            results = [from_row(row) for row in stored]
            since = compare_to_last_passing(results, found)
            differs = any(row.state == "unexpected" for row in against_history(stored, cases, since)) or since.changed
            made = make_run(run.folder.name, results, int(bool(differs)))
            found.append(replace(made, partial=run.state != ENDED or bool(lacking(stored))))
    accepted = {(row.cell_id, row.variant) for row in rows if row.state == "quarantined"}
    results = [from_row(row) for row in rows]
    since = compare_to_last_passing(results, found, lambda *place: place in accepted)
    return name_files(since, make_run("", results))


def against_history(rows: Iterable[Row], cases: Mapping[str, Case], since: Regressions) -> list[Row]:
    """Mark as unexpected what has no expectation and was better: in the last passing run that measured it, or, of a fix
    that fails, with the newest older release."""
    changed = {_place(change.row) for each in since.changed for change in each.changes}
    upgraded = {(each.case, each.stack) for each in since.changed if DATED & each.versions.keys()}

    def better_before(row: Row) -> tuple[str | None, str] | None:
        place = row.cell_id, row.hardware.profile, row.stack.name, row.variant
        now = STATES.get(row.verdict or "")
        if place not in since.references:
            failing_fix = row.role == "fix" and now == "reproduces" and row.verdict != "FIXED"
            return _worked(row, cases.get(row.case), since.passing) if failing_fix else None
        run, before = since.references[place]
        works_now = row.verdict == "FIXED" and STATES.get(before.verdict or "") != "absent"
        upstream = now == "absent" and (row.case, row.stack.name) in upgraded
        same = before.verdict == as_expected(row.verdict or "") or not changed & {place, (*place[:3], "unfixed")}
        return None if same or works_now or upstream else (before.verdict, run.run_id)

    marked = []
    for row in rows:
        known = better_before(row) if row.state == "no_expectation" and row.measured else None
        note = f"no expectation; measured in {known[1]}" if known else ""
        marked.append(replace(row, state="unexpected", expected_verdict=known[0], note=note) if known else row)
    return marked


def _worked(row: Row, case: Case | None, passing: Iterable[NightlyRun]) -> tuple[str, str] | None:
    """Return FIXED and where it was measured, if the newest older release on this hardware shows it."""
    place, versions = (row.cell_id, row.hardware.profile, row.variant), row.stack.versions
    found = [(run.stacks.get(one.stack, {}), one.verdict, run.run_id) for run in passing for one in run.rows
             if one.measured and (one.key, one.hardware, one.variant) == place]  # fmt: skip
    if case:
        for end in (end for entry in case.expect for end in entry.measured_at):
            listed = expected(case, row.params, row.variant, end, row.hardware.kind, row.hardware.capabilities)
            release = " + ".join(f"{name} {version}" for name, version in end.items())
            found += [(end, cast(Any, listed.verdicts[row.variant]), release)] if listed else []
    older = [each for each in found if is_older(each[0], versions)]
    newest = next((one for one in older if not any(is_older(one[0], other[0]) for other in older)), None)
    return (newest[1], newest[2]) if newest and newest[1] == "FIXED" else None


def name_files(since: Regressions, now: NightlyRun) -> Regressions:
    """Add the files of the catalog that differ to each change, as far as git knows."""
    unknown = ["files that were not committed"] if now.dirty else []
    changed = [
        replace(each, files=tuple(changed_files(each.passing.commit, now.commit, now.dirty) or unknown))
        for each in since.changed
    ]
    return replace(since, changed=changed)


def differing_packages(then: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return package -> (then, now); where only one side lists all its packages, only of the usual ones."""
    if any(not side.keys() - set(RELEVANT) for side in (then, now)):
        then, now = ({name: each[name] for name in each if name in RELEVANT} for each in (then, now))
    return _differing(then, now)


def _differing(then: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    pairs = {name: (then.get(name, "none"), now.get(name, "none")) for name in sorted({*then, *now})} if then else {}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _place(row: VariantResult) -> Place:
    return row.key, row.hardware, row.stack, row.variant


def _by_place(rows: Iterable[VariantResult]) -> dict[Place, VariantResult]:
    return {_place(row): row for variants in newest(rows).values() for row in variants.values()}


def working_fixes(case: str, rows: Iterable[VariantResult]) -> tuple[str, ...]:
    """Return the fixes that work in every cell in which they were measured."""
    verdicts: dict[str, set[str | None]] = {}
    for row in rows:
        if row.case == case and row.role == "fix":
            verdicts.setdefault(row.variant, set()).add(row.verdict)
    return tuple(variant for variant, names in verdicts.items() if names == {"FIXED"})


# -- missing results


@dataclass(frozen=True)
class Requested:
    """What one of tonight's runs was asked to measure.

    ``cells``: cell id -> stacks; None: unknown, so that every variant in ``variants`` (case -> variants) is taken as
    requested. ``hardware``: patterns. ``unstarted``: "hardware stack cell-id" of cells for which there was no time;
    None: unknown. ``stacks``: those that it measured (a stack may have several names). ``catalog``: case -> all its
    variants.
    """

    variants: Mapping[str, Collection[str]]
    cells: Mapping[str, Collection[str]] | None = None
    hardware: Sequence[str] = ("auto",)
    unstarted: Collection[str] | None = ()
    stacks: Collection[str] = ()
    catalog: Mapping[str, Collection[str]] | None = None

    def excuse(self, row: VariantResult) -> str:
        """Return why this run need not have measured a variant; "" where it should have."""
        if self.catalog is not None and row.variant not in self.catalog.get(row.case, ()):
            return "no longer in the catalog"
        if row.variant not in self.variants.get(row.case, ()):
            return "not requested"
        if self.cells is None:
            return ""
        stacks = self.cells.get(row.key)
        on_hardware = any(pattern == "auto" or fnmatchcase(row.hardware, pattern) for pattern in self.hardware)
        if stacks is None or row.stack not in {*stacks, *self.stacks} or not on_hardware:
            return "not requested"
        in_time = self.unstarted is not None and f"{row.hardware} {row.stack} {row.key}" not in self.unstarted
        return "" if in_time else "no time left"


class MissingResult(NamedTuple):
    """A variant of the last passing run ``run_id`` without a result tonight. ``excuse``: why that is no error, or "".

    ``reason``: why the variant was skipped, or what its attempts were lost to.
    """

    row: VariantResult
    run_id: str
    excuse: str
    reason: str


def find_missing(
    tonight: Iterable[VariantResult], history: Sequence[NightlyRun], requested: Sequence[Requested]
) -> list[MissingResult]:
    """Find variants that a passing run measured and tonight has no result for, by the last run that measured them.

    A variant that is lost to an infrastructure error has no result, and neither has a skipped one, unless the last
    passing run with that variant skipped it for the same reason. Excused variants are listed for the last passing run
    only.
    """
    rows = _by_place(tonight)
    passing = [run for run in reversed(history) if run.passed]
    if any(each.cells is None for each in requested):  # the request is unknown: use the last run on this hardware
        hardware = {row.hardware for row in rows.values()}
        same = [run for run in passing if hardware & {row.hardware for row in run.rows}]
        passing = (same or passing)[:1]
    missing: list[MissingResult] = []
    checked: set[Place] = set()
    for run in passing:
        for row in run.rows:
            place = _place(row)
            now = rows.get(place)
            same_skip = row.skipped and now is not None and now.skipped == row.skipped
            if not (row.measured or same_skip) or place in checked:
                continue
            checked.add(place)
            excuse = min(each.excuse(row) for each in requested)
            if same_skip or (now is not None and now.measured) or (excuse and run is not passing[0]):
                continue
            missing.append(MissingResult(row, run.run_id, excuse, (now.skipped or now.text) if now else ""))
    return missing


def describe_missing(missing: Iterable[MissingResult]) -> Iterator[str]:
    """Yield a message for each excuse, and one for what is missing without any."""
    by_excuse: dict[str, list[MissingResult]] = {}
    for each in missing:
        by_excuse.setdefault(each.excuse, []).append(each)
    for excuse, group in by_excuse.items():
        cells: dict[str, list[str]] = {}
        for row, _, _, reason in group:
            variant = f"{row.variant} ({line(reason)})" if reason else row.variant
            cells.setdefault(f"{row.key} on {row.hardware}, stack {row.stack}", []).append(variant)
        listed = [f"{place}: {', '.join(variants)}" for place, variants in cells.items()]
        shown = "; ".join(listed[:SHOWN]) + ("; ..." if len(listed) > SHOWN else "")
        runs = ", ".join(dict.fromkeys(each.run_id for each in group))
        head = f"{counted(len(group), 'variant')} measured in the last passing run ({runs})"
        if excuse:
            yield f"{head} were not measured tonight ({excuse}): {shown}"
        else:
            hint = "If this is intentional, restrict the run explicitly, e.g. case=... or hardware=..."
            yield f"Missing: {head} have no result tonight: {shown}. {hint}"
