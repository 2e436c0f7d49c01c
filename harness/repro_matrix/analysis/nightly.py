"""Finish a nightly run: compare it with the last passing one, add it to the history, bisect what changed."""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from filelock import FileLock

from repro_matrix.analysis import history, regressions
from repro_matrix.analysis.inputs import Side, VariantResult
from repro_matrix.analysis.regressions import ChangedCase, Requested
from repro_matrix.config import catalog
from repro_matrix.errors import ConfigError, ExitCode, MeasureError, ResultsError
from repro_matrix.planning.cells import variants_of
from repro_matrix.results import runs
from repro_matrix.results.quarantine import Quarantine
from repro_matrix.results.store import write_text
from repro_matrix.runner.session import ask
from repro_matrix.text import counted

NOTHING_COMPARED = "nothing was compared: no passing run in the history measured any of these results"
NOT_BISECTED = ("became_flaky", "became_steady")


@dataclass(frozen=True)
class Nightly:
    """Tonight's run. ``run_exit_code``: the worst of its runs. ``folder``: of the history. ``locks``: stack -> the lock
    file that a floating stack had. ``acknowledged``: digests of changes that do not count."""

    run_id: str
    sides: Sequence[Side]
    folders: Sequence[Path]
    folder: Path
    run_exit_code: int
    locks: Mapping[str, Path]
    quarantine: Sequence[Quarantine]
    today: date
    acknowledged: Collection[str] = ()


@dataclass(frozen=True)
class Report:
    """``changed``: by case, without what was acknowledged. ``notes`` go to stderr, ``messages`` to stdout."""

    run_id: str
    exit_code: int
    reason: str
    changed: Mapping[str, Sequence[ChangedCase]]
    notes: Sequence[str]
    messages: Sequence[str]


def finish(night: Nightly) -> Report:
    """Compare the run with the history and add it.

    Raises ResultsError: no results, or results of several commits; MeasureError: no result can be read.
    """
    rows = [row for side in night.sides for row in side.rows]
    unreadable = [note for side in night.sides for note in side.unreadable]
    if not rows:
        folders = ", ".join(map(str, night.folders))
        if unreadable:
            raise MeasureError(f"{folders}: no results: {counted(len(unreadable), 'file')} could not be read")
        raise ResultsError(f"{folders}: no results: nothing was measured or uploaded")
    regressions.check_one_commit(rows)
    active = [entry for entry in night.quarantine if entry.until >= night.today]
    expired = [entry for entry in night.quarantine if entry not in active and entry.cell in {row.key for row in rows}]
    notes: list[str] = []
    try:
        night.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResultsError(f"{night.folder}: cannot be written: {error.strerror or error}") from None
    with FileLock(str(night.folder / ".lock")):
        tonight = history.make_run(night.run_id, rows)
        stored = history.load_history(night.folder, notes)
        run_id = _free_id(night.run_id, tonight.started, stored)
        if run_id != night.run_id:
            notes.append(f"another run {night.run_id} is stored: this one is stored as {run_id}")
        for stack, path in night.locks.items():
            target = lock_path(night.folder, stack, run_id)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        others = [run for run in stored if run.run_id != run_id]
        earlier = [run for run in others if run.started <= tonight.started]
        compared = regressions.compare_to_last_passing(
            rows, earlier, lambda cell, variant: any(entry.covers(cell, variant) for entry in active)
        )
        requested = [load_requested(folder, side.rows) for folder, side in zip(night.folders, night.sides)]
        unfinished = [folder for folder in night.folders if not _is_finished(folder)]
        missing = regressions.find_missing(rows, earlier, requested, unreadable)
        unexcused = [each for each in missing if not each.excuse]
        changed: dict[str, list[ChangedCase]] = {}
        for each in compared.changed:
            if each.digest not in night.acknowledged:
                changed.setdefault(each.case, []).append(each)
        reasons = [f"results of {counted(len(changed), 'case')} changed"] if changed else []
        reasons += [entry.describe_expired() for entry in expired]
        code = ExitCode.DIFFERS if reasons else night.run_exit_code
        if not reasons and night.run_exit_code:
            reasons = ["the exit code of the runs"]
        if not code and (unfinished or unreadable or unexcused):
            code = ExitCode.INCOMPLETE
            reasons = [f"{folder}: the run did not end. `repro matrix --resume` continues it" for folder in unfinished]
            reasons += [f"{counted(len(unreadable), 'file')} could not be read"] if unreadable else []
            reasons += [f"{regressions.count_missing(unexcused)} missing"] if unexcused else []
        history.store_run(night.folder, history.make_run(run_id, rows, code))
    notes += [*_clock_notes(tonight.started, others), *compared.notes]
    notes += regressions.describe_missing([each for each in missing if each.excuse])
    messages = [*_quarantined(active, rows, compared.quarantined), *regressions.describe_missing(unexcused)]
    head = f"run {run_id}: {counted(len({(r.key, r.hardware, r.stack) for r in rows}), 'cell')}"
    same = "nothing changed" if compared.count else NOTHING_COMPARED
    since = f"{counted(len(changed), 'case')} changed since the last passing run" if compared.count else same
    messages.insert(0, f"{head}; {since}")
    return Report(run_id, code, "; ".join(reasons) or same, changed, notes, messages)


def _is_finished(folder: Path) -> bool:
    """Whether its manifest, where it has one, says that the run ended and left out no cell but for its time limit."""
    run = runs.read(folder)
    limited = run is not None and any(text.startswith("time_limit=") for text in run.texts)
    return run is None or (run.state == runs.ENDED and (limited or not run.left))


def _free_id(run_id: str, started: float, stored: Iterable[history.NightlyRun]) -> str:
    """Return the id, or ``ID.2``, ``ID.3`` ... where another run has it, so that no run is replaced by another."""
    known = {run.run_id: run.started for run in stored}
    ids = (run_id if number == 1 else f"{run_id}.{number}" for number in itertools.count(1))
    return next(each for each in ids if known.get(each, started) == started)


def _clock_notes(started: float, others: Iterable[history.NightlyRun]) -> list[str]:
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(started))
    notes = [f"the results were measured {when}, in the future"] if started > time.time() + 3600 else []
    later = [run.run_id for run in others if run.started > started]
    if later:
        notes.append(f"the results were measured {when}, before {', '.join(later[-3:])}: not compared with later runs")
    return notes


def _quarantined(
    entries: Iterable[Quarantine], rows: Sequence[VariantResult], changes: Mapping[tuple[str, str], str]
) -> Iterator[str]:
    for entry in entries:
        if any(row.measured and entry.covers(row.key, row.variant) for row in rows):
            found = [
                f"variant {variant}: {kind}" for (cell, variant), kind in changes.items() if entry.covers(cell, variant)
            ]
            yield f"quarantined: {entry.describe()} ({'; '.join(found) or 'unchanged'})"


def load_requested(folder: Path, rows: Iterable[VariantResult]) -> Requested:
    """Return what a run was asked for, by the overrides in its folder and today's catalog.

    Merged results have no overrides: then every variant of the catalog counts as requested.
    """
    run = runs.read(folder)
    try:
        asked = ask(run.texts) if run else None
        cells, hardware = (asked.cells, asked.hardware) if asked else ([], [])
    except ConfigError:
        asked = None
    if run is None or asked is None:
        return Requested({slug: set(case.variants) for slug, case in catalog.load().cases.items()})
    stacks: dict[str, set[str]] = {}
    for cell in cells:
        stacks.setdefault(cell.key, set()).add(cell.stack)
    patterns = asked.settings.variants
    variants = {}
    for slug in {cell.case for cell in cells}:
        case = asked.catalogue.cases[slug]
        named = [
            variant for variant in case.variants if any(fnmatchcase(variant, pattern) for pattern in patterns or ())
        ]
        variants[slug] = set(variants_of(case, named) if patterns else case.variants)
    unstarted = None if run.left is None and asked.settings.time_limit else run.left or ()
    shard: set[str] | None = None
    if asked.settings.shard:
        try:
            shard = {key for _, _, key in runs.read_manifest(folder).cells}
        except ResultsError:
            shard = None
    return Requested(variants, stacks, tuple(hardware), unstarted, shard, {row.stack for row in rows})


def lock_path(folder: Path, stack: str, run_id: str) -> Path:
    return folder / "locks" / f"{stack}-{run_id}.txt"


RunBisect = Callable[[list[str], float], "tuple[dict[str, Any] | None, str]"]


class Bisections:
    """Bisect changes between two runs' locks, for at most ``seconds`` in all."""

    def __init__(self, folder: Path, run_id: str, seconds: float, run: RunBisect | None = None) -> None:
        self.folder, self.run_id = folder, run_id
        self.run = run or run_bisect
        self.deadline = time.monotonic() + seconds

    def report(self, changed: ChangedCase) -> str | None:
        """Return the report, or why there is none; None where the stack has no lock, or nothing to bisect changed."""
        good, bad = (lock_path(self.folder, changed.stack, each) for each in (changed.passing.run_id, self.run_id))
        changes = [change for change in changed.changes if change.kind not in NOT_BISECTED]
        if not bad.is_file() or not changes:
            return None
        if not good.is_file():
            return f"Not bisected: no lock of {changed.passing.run_id} is stored."
        if good.read_bytes() == bad.read_bytes():
            return "Not bisected: both runs had the same lock, so no release caused the change."
        row, variant = changes[0].row, changes[0].variant
        words = ["bisect", row.case, "--good", str(good), "--bad", str(bad), "--variant", variant, "--find", "change"]
        words += [*row.axes, f"hardware={row.hardware}", f"results={self.folder / 'bisect'}"]
        command, left = shlex.join(["repro", *words]), self.deadline - time.monotonic()
        if left <= 0:
            return f"Not bisected: no time left (--bisect-time). Run `{command}`."
        print(f"bisecting for at most {left:.0f} s: {command}", file=sys.stderr, flush=True)
        data, reason = self.run(words, left)
        return str(data["report"]) if data and data.get("report") else f"{reason}. Continue with `{command}`."


def run_bisect(words: list[str], seconds: float) -> tuple[dict[str, Any] | None, str]:
    """Run `repro bisect --json`; return its result, or None and the reason. Its probes stay stored."""
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
            return None, f"Not finished after {seconds:.0f} s"
    try:
        return json.loads(output), ""
    except ValueError:
        return None, f"The bisection failed with exit code {process.returncode}"


def write_issue(folder: Path, case: str, text: str) -> Path:
    """Write an issue's Markdown. Raises ResultsError: the folder cannot be written."""
    path = folder / f"{case}.md"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise ResultsError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path
