"""Finish a nightly run: read -> compare -> judge -> store -> describe, then bisect what changed."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import NamedTuple

from repro_matrix import git
from repro_matrix.baseline import quarantine
from repro_matrix.baseline.quarantine import Quarantine
from repro_matrix.changes.diff import describe_row
from repro_matrix.changes.history import (
    NightlyRun,
    by_place,
    check_one_commit,
    load_history,
    make_run,
    store_run,
)
from repro_matrix.changes.missing import SHOWN, MissingResult, describe_missing, find_missing
from repro_matrix.changes.regressions import (
    ChangedCase,
    Regressions,
    compare_to_last_passing,
    name_files,
)
from repro_matrix.changes.sides import Side
from repro_matrix.config import project
from repro_matrix.errors import ExitCode, MeasureError, ResultsError
from repro_matrix.paths import file_lock
from repro_matrix.records.outcome import DIFFERS_FROM_PREDICTION
from repro_matrix.results.rows import Row
from repro_matrix.results.runs import ENDED, Run
from repro_matrix.text import counted, list_some

NOTHING_COMPARED = (
    "nothing was compared: no passing run in the history measured any of these results"
)
NEAR = ("interpolated", "predicted", "possible")
NOT_BISECTED = ("became_flaky", "became_steady")


@dataclass(frozen=True)
class Night:
    """The results of one night, and what its judgement depends on besides the history.

    ``side``: the results. ``run_exit_code``: the worst of the runs, 0 if it is unknown. ``locks``:
    stack -> the lock file that a floating stack had. ``acknowledged``: digests of changes that do
    not count.
    """

    run_id: str
    side: Side
    today: date
    quarantined: Sequence[Quarantine] = ()
    run_exit_code: int = 0
    locks: Mapping[str, Path] = field(default_factory=dict)
    acknowledged: Collection[str] = ()

    @property
    def active(self) -> list[Quarantine]:
        return [entry for entry in self.quarantined if entry.until >= self.today]

    def is_quarantined(self, cell: str, variant: str) -> bool:
        return any(entry.covers(cell, variant) for entry in self.active)


@dataclass(frozen=True)
class NightComparison:
    """The differences from the passing runs before.

    ``changed``: by case, without what was acknowledged. ``unchanged_since``: the run that stored
    the same results before, or None.
    """

    since: Regressions
    missing: Sequence[MissingResult]
    changed: Mapping[str, Sequence[ChangedCase]]
    unchanged_since: str | None


class NightFinding(NamedTuple):
    """A reason why a night does not pass. ``differs``: exit code 1, else 3."""

    differs: bool
    reason: str
    messages: Sequence[str] = ()


@dataclass(frozen=True)
class NightReport:
    """``notes`` go to stderr, ``messages`` to stdout."""

    exit_code: int
    reason: str
    changed: Mapping[str, Sequence[ChangedCase]]
    notes: Sequence[str]
    messages: Sequence[str]


def finish_night(night: Night, folder: Path) -> NightReport:
    """Compare a night with those stored before it in ``folder``, and store it there.

    Raises ResultsError: no results, or of several commits; MeasureError: none can be read, or a run
    did not end.
    """
    _check(night.side)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResultsError(f"{folder}: cannot be written: {error.strerror or error}") from None
    with file_lock(folder / ".lock"):
        stored = load_history(folder)
        ids = [run.run_id for run in stored]
        replaced = night.run_id in ids
        earlier = stored[: ids.index(night.run_id)] if replaced else stored
        tonight = make_run(night.run_id, night.side.rows, packages=night.side.packages)
        compared = _compare(night, tonight, earlier)
        findings = list(_judge(night, compared))
        code = _exit_code(night, findings)
        quarantined = tuple(sorted(compared.since.quarantined))
        store_run(folder, replace(tonight, exit_code=code, quarantined=quarantined))
        _store_locks(night, folder)
    report = _describe(night, compared, findings, code)
    if replaced:
        text = f"The history had a run {night.run_id} already: its entry is replaced"
        report = replace(report, notes=[*report.notes, text])
    return report


def _check(side: Side) -> None:
    if side.rows:
        check_one_commit(side.rows)
    elif side.unreadable:
        count = counted(len(side.unreadable), "file")
        raise MeasureError(f"{side.name}: no results: {count} could not be read")
    elif not all(map(_is_finished, side.runs)):
        raise MeasureError(
            f"{side.name}: no results: the run did not end. `repro matrix --resume` continues it."
        )
    else:
        raise ResultsError(f"{side.name}: no results: nothing was measured or uploaded")


def _compare(night: Night, tonight: NightlyRun, earlier: Sequence[NightlyRun]) -> NightComparison:
    rows = night.side.rows
    packages = night.side.packages
    since = compare_to_last_passing(rows, earlier, night.is_quarantined, packages)
    since = name_files(since, tonight)
    changed: dict[str, list[ChangedCase]] = {}
    for each in since.changed:
        if each.digest not in night.acknowledged:
            changed.setdefault(each.case, []).append(each)
    same = (
        run.run_id
        for run in earlier
        if run.started == tonight.started and len(run.rows) == len(tonight.rows)
    )
    return NightComparison(
        since, find_missing(rows, earlier, night.side.runs), changed, next(same, None)
    )


def _judge(night: Night, compared: NightComparison) -> Iterator[NightFinding]:
    """Yield every reason why the night does not pass: first what differs, then what is missing."""
    side = night.side
    rows = by_place(night.side.rows).values()
    if compared.changed:
        yield NightFinding(True, f"results of {counted(len(compared.changed), 'case')} changed")
    unexpected = compared.since.unexpected(side.rows, night.acknowledged)
    yield from _rows_finding(True, "result", "not as expected", unexpected)
    for text in quarantine.expired(rows, night.quarantined, night.today):
        yield NightFinding(True, text)
    if night.run_exit_code:
        yield NightFinding(False, f"the runs ended with exit code {night.run_exit_code}")
    for run in side.runs:
        if not _is_finished(run):
            yield NightFinding(False, f"{run.folder}: the run did not end")
    if before := compared.unchanged_since:
        yield NightFinding(False, f"this run is stored as {before}: nothing was measured since")
    if side.unreadable:
        yield NightFinding(False, f"{counted(len(side.unreadable), 'file')} could not be read")
    missing = [each for each in compared.missing if not each.excuse]
    if missing:
        reason = f"{counted(len(missing), 'result')} missing"
        yield NightFinding(False, reason, list(describe_missing(missing)))
    other = [row for row in rows if row.kinds and row.state in DIFFERS_FROM_PREDICTION]
    fixes = [row for row in other if row.state == "differs_from_documentation"]
    failing = [row for row in fixes if not night.is_quarantined(row.cell_id, row.variant)]
    how = "not working here (no expectation is stored)"
    yield from _rows_finding(False, "documented fix", how, failing)
    predicted = [row for row in other if row not in fixes]
    yield from _rows_finding(False, "result", "not as predicted", predicted)
    lacking = [cell for cell in side.lacking if cell not in {row.cell_id for row in other}]
    if lacking:
        reason = f"{counted(len(lacking), 'cell')} not measured completely"
        text = f"Not measured completely: {list_some(lacking, SHOWN, '; ')}"
        yield NightFinding(False, reason, [text])
    if not any(row.kinds for row in rows):
        yield NightFinding(False, "nothing was measured")


def _rows_finding(
    differs: bool, what: str, how: str, rows: Sequence[Row]
) -> Iterator[NightFinding]:
    texts = [f"{row.cell_id} variant {row.variant}: {describe_row(row)}" for row in rows]
    if texts:
        message = f"{how.capitalize()}: {list_some(texts, SHOWN, '; ')}"
        yield NightFinding(differs, f"{counted(len(rows), what)} {how}", [message])


def _exit_code(night: Night, findings: Sequence[NightFinding]) -> int:
    if any(each.differs for each in findings):
        return ExitCode.DIFFERS
    return night.run_exit_code or (ExitCode.INCOMPLETE if findings else ExitCode.OK)


def _store_locks(night: Night, folder: Path) -> None:
    for stack, path in night.locks.items():
        target = stored_lock(folder, stack, night.run_id)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _describe(
    night: Night, compared: NightComparison, findings: Sequence[NightFinding], code: int
) -> NightReport:
    since = compared.since
    rows = by_place(night.side.rows)
    notes = list(describe_missing(each for each in compared.missing if each.excuse))
    if since.new:
        cells = counted(len(since.new), "cell")
        notes.append(f"{cells} measured in no passing run: nothing to compare with yet")
    same = "nothing changed" if since.references else NOTHING_COMPARED
    head = f"{counted(len(compared.changed), 'case')} changed since the last passing run"
    if not since.references:
        head = same
    if code == ExitCode.INCOMPLETE:
        head += ", but less was measured than requested"
    cells = counted(len({place[:3] for place in rows}), "cell")
    messages = [f"run {night.run_id}: {cells}; {head}"]
    for entry in night.active:
        if any(row.kinds and entry.covers(row.cell_id, row.variant) for row in rows.values()):
            changes = [
                f"variant {variant}: {kind}"
                for (cell, variant), kind in since.quarantined.items()
                if entry.covers(cell, variant)
            ]
            text = "; ".join(changes) or "unchanged"
            messages.append(f"quarantined: {entry.describe()} ({text})")
    messages += [text for each in findings for text in each.messages]
    near = Counter(row.state for row in rows.values() if row.state in NEAR)
    if near:
        counts = ", ".join(f"{number} {name}" for name, number in near.most_common())
        messages.append(
            f"With releases that were not measured before, as in the nearest ones: {counts}"
        )
    if edited := not_committed():
        what = f"{counted(len(edited), 'file')} of expectations not committed"
        messages.append(f"Not reviewed: {what} ({list_some(edited, SHOWN)})")
    reason = "; ".join(each.reason for each in findings) or same
    return NightReport(code, reason, compared.changed, notes, messages)


def not_committed() -> list[str]:
    """Return uncommitted files of expectations and the quarantine, which are not reviewed."""
    own = project.current()
    places = (own.expected, quarantine.file())
    return [file for place in places for file in git.uncommitted_files(own.folder, [place])]


def _is_finished(run: Run) -> bool:
    """Return whether a run ended, and left out cells only because of its time limit."""
    limited = any(text.startswith("time_limit=") for text in run.texts)
    return run.state == ENDED and (limited or not run.left)


def stored_lock(folder: Path, stack: str, run_id: str) -> Path:
    return folder / "locks" / f"{stack}-{run_id}.txt"


def run_bisect(words: list[str], seconds: float) -> tuple[str, str]:
    """Run `repro bisect --json`; return its report, or "" and the reason.

    Its probes stay stored.
    """
    command = [sys.executable, "-m", "repro_matrix", *words, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
            return "", f"Not finished after {seconds:.0f} s"
    try:
        return json.loads(output)["report"], ""
    except ValueError:
        return "", f"The bisection failed with exit code {process.returncode}"


def bisect_change(
    changed: ChangedCase,
    folder: Path,
    run_id: str,
    deadline: float,
    run: Callable[[list[str], float], tuple[str, str]] = run_bisect,
) -> str | None:
    """Bisect a change between two runs' locks; return the report, or why there is none.

    None: the stack has no lock, or nothing to bisect changed. ``deadline``: of time.monotonic().
    """
    before = changed.passing.run_id
    good, bad = (stored_lock(folder, changed.stack, each) for each in (before, run_id))
    changes = [change for change in changed.changes if change.kind not in NOT_BISECTED]
    if not bad.is_file() or not changes:
        return None
    if not good.is_file():
        return f"Not bisected: no lock of {before} is stored."
    if good.read_bytes() == bad.read_bytes():
        return "Not bisected: both runs had the same lock, so no release caused the change."
    row = changes[0].row
    variant = changes[0].variant
    ends = ["--good", str(good), "--bad", str(bad)]
    place = [*row.axes, f"hardware={row.hardware.profile}"]
    words = ["bisect", row.case, *ends, "--variant", variant, "--any-change", *place]
    words.append(f"results={folder / 'bisect'}")
    command = shlex.join(["repro", *words])
    left = deadline - time.monotonic()
    if left <= 0:
        return f"Not bisected: no time left (--bisect-time). Run `{command}`."
    print(f"bisecting for at most {left:.0f} s: {command}", file=sys.stderr, flush=True)
    report, reason = run(words, left)
    return report or f"{reason}. Continue with `{command}`."
