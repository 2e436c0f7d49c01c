"""Finish a nightly run: compare it with the last passing one, add it to the history, bisect what
changed."""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from filelock import FileLock

from repro_matrix.baseline import quarantine
from repro_matrix.baseline.quarantine import Quarantine
from repro_matrix.changes import history
from repro_matrix.changes.diff import describe_row
from repro_matrix.changes.history import by_place
from repro_matrix.changes.missing import SHOWN, Requested, describe_missing, find_missing
from repro_matrix.changes.regressions import ChangedCase, compare_to_last_passing, name_files
from repro_matrix.changes.sides import Side, VariantResult
from repro_matrix.config import catalog, project
from repro_matrix.errors import ConfigError, ExitCode, MeasureError, ResultsError
from repro_matrix.planning.cells import variants_of
from repro_matrix.records.outcome import DIFFERS_FROM_PREDICTION
from repro_matrix.results import runs, store
from repro_matrix.runner.session import make_request
from repro_matrix.text import counted, list_some

NOTHING_COMPARED = (
    "nothing was compared: no passing run in the history measured any of these results"
)
NEAR = ("interpolated", "predicted", "possible")
NOT_BISECTED = ("became_flaky", "became_steady")


@dataclass(frozen=True)
class Report:
    """``changed``: by case, without what was acknowledged. ``notes`` go to stderr, ``messages`` to
    stdout."""

    run_id: str
    exit_code: int
    reason: str
    changed: Mapping[str, Sequence[ChangedCase]]
    notes: Sequence[str]
    messages: Sequence[str]


def finish_night(
    name: str,
    sides: Sequence[Side],
    folders: Sequence[Path],
    nights: Path,
    entries: Sequence[Quarantine],
    today: date,
    run_exit_code: int = 0,
    locks: Mapping[str, Path] | None = None,
    acknowledged: Collection[str] = (),
) -> Report:
    """Compare tonight's run, ``name``, with those stored before it, and add it to the history in
    ``nights``.

    ``entries``: of the quarantine. ``run_exit_code``: the worst of its runs, 0 where it is unknown.
    ``locks``: stack ->
    the lock file that a floating stack had. ``acknowledged``: digests of changes that do not count.

    Raises ResultsError: no results, or of several commits; MeasureError: none can be read, or a run
    did not end.
    """
    rows = [row for side in sides for row in side.rows]
    unreadable = [note for side in sides for note in side.unreadable]
    if not rows:
        where = ", ".join(map(str, folders))
        if unreadable:
            raise MeasureError(
                f"{where}: no results: {counted(len(unreadable), 'file')} could not be read"
            )
        if not all(map(_is_finished, folders)):
            raise MeasureError(
                f"{where}: no results: the run did not end. `repro matrix --resume` continues it."
            )
        raise ResultsError(f"{where}: no results: nothing was measured or uploaded")
    history.check_one_commit(rows)
    history.check_each_once(side.rows for side in sides)
    packages = {
        stack: all_of
        for run in map(runs.read_run, folders)
        if run
        for stack, all_of in run.stacks.items()
    }
    active = [entry for entry in entries if entry.until >= today]
    expired = [
        entry
        for entry in entries
        if entry not in active and entry.cell in {row.key for row in rows}
    ]
    notes: list[str] = []
    try:
        nights.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResultsError(f"{nights}: cannot be written: {error.strerror or error}") from None
    with FileLock(str(nights / ".lock")):
        earlier = history.load_history(nights)
        stored = {run.run_id: run.started for run in earlier}
        # The same run again replaces itself; another run with the same id becomes ID.2.
        tonight = history.make_run(name, rows, packages=packages)
        started = tonight.started
        names = (f"{name}.{number}" for number in itertools.count(2))
        run_id = next(
            each for each in itertools.chain([name], names) if stored.get(each, started) == started
        )
        if run_id in stored:
            earlier = earlier[: list(stored).index(run_id)]
        if run_id != name:
            notes.append(f"another run {name} is stored: this one is stored as {run_id}")
        for stack, path in (locks or {}).items():
            target = stored_lock(nights, stack, run_id)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        compared = compare_to_last_passing(
            rows,
            earlier,
            lambda cell, variant: any(entry.covers(cell, variant) for entry in active),
            packages,
        )
        compared = name_files(compared, tonight)
        requested = [load_requested(folder, side.rows) for folder, side in zip(folders, sides)]
        missing = find_missing(rows, earlier, requested)
        unexcused = [each for each in missing if not each.excuse]
        changed: dict[str, list[ChangedCase]] = {}
        for each in compared.changed:
            if each.digest not in acknowledged:
                changed.setdefault(each.case, []).append(each)
        unexpected = compared.unexpected(rows, acknowledged)
        differs = [f"results of {counted(len(changed), 'case')} changed"] if changed else []
        differs += [f"{counted(len(unexpected), 'result')} not as expected"] if unexpected else []
        differs += [entry.describe_expired() for entry in expired]
        unfinished = [str(folder) for folder in folders if not _is_finished(folder)]
        incomplete = [f"{each}: the run did not end" for each in unfinished]
        again = (
            run
            for run in earlier
            if run.started == started and by_place(rows).keys() <= by_place(run.rows).keys()
        )
        before = next((run.run_id for run in again if run.run_id != run_id), None)
        incomplete += (
            [f"this run is stored as {before}: nothing was measured since"] if before else []
        )
        incomplete += (
            [f"{counted(len(unreadable), 'file')} could not be read"] if unreadable else []
        )
        incomplete += [f"{counted(len(unexcused), 'result')} missing"] if unexcused else []
        other = [
            row
            for row in by_place(rows).values()
            if row.measured and row.expected in DIFFERS_FROM_PREDICTION
        ]
        fixes = [row for row in other if row.expected == "differs_from_documentation"]
        failing = [
            row for row in fixes if not any(entry.covers(row.key, row.variant) for entry in active)
        ]
        predicted = [row for row in other if row not in fixes]
        left_open = (
            ("documented fix", "not working here (no expectation is stored)", failing),
            ("result", "not as predicted", predicted),
        )
        incomplete += [
            f"{counted(len(found), what)} {how}" for what, how, found in left_open if found
        ]
        lacking = [
            cell
            for side in sides
            for cell in side.lacking
            if cell not in {row.key for row in other}
        ]
        incomplete += (
            [f"{counted(len(lacking), 'cell')} not measured completely"] if lacking else []
        )
        incomplete += [] if any(row.measured for row in rows) else ["nothing was measured"]
        code = (
            ExitCode.DIFFERS
            if differs
            else run_exit_code or (ExitCode.INCOMPLETE if incomplete else 0)
        )
        quarantined = tuple(sorted(compared.quarantined))
        history.store_run(
            nights, replace(tonight, run_id=run_id, exit_code=code, quarantined=quarantined)
        )
    if compared.new:
        cells = counted(len(compared.new), "cell")
        notes.append(f"{cells} measured in no passing run: nothing to compare with yet")
    notes += describe_missing(each for each in missing if each.excuse)
    same = "nothing changed" if compared.references else NOTHING_COMPARED
    since = (
        f"{counted(len(changed), 'case')} changed since the last passing run"
        if compared.references
        else same
    )
    since += ", but less was measured than requested" * (code == ExitCode.INCOMPLETE)
    messages = [
        f"run {run_id}: {counted(len({(r.key, r.hardware, r.stack) for r in rows}), 'cell')};"
        f" {since}"
    ]
    for entry in active:
        if any(row.measured and entry.covers(row.key, row.variant) for row in rows):
            found = [
                f"variant {variant}: {kind}"
                for (cell, variant), kind in compared.quarantined.items()
                if entry.covers(cell, variant)
            ]
            messages.append(f"quarantined: {entry.describe()} ({'; '.join(found) or 'unchanged'})")
    messages += describe_missing(unexcused)
    for how, results in [("not as expected", unexpected), *(each[1:] for each in left_open)]:
        texts = [f"{row.key} variant {row.variant}: {describe_row(row)}" for row in results]
        messages += [f"{how.capitalize()}: {list_some(texts, SHOWN, '; ')}"] if texts else []
    messages += [f"Not measured completely: {list_some(lacking, SHOWN, '; ')}"] if lacking else []
    near = Counter(row.expected for row in by_place(rows).values() if row.expected in NEAR)
    counts = ", ".join(f"{number} {name}" for name, number in near.most_common())
    messages += (
        [f"With releases that were not measured before, as in the nearest ones: {counts}"]
        if near
        else []
    )
    edited = not_committed()
    what = f"{counted(len(edited), 'file')} of expectations not committed"
    messages += [f"Not reviewed: {what} ({list_some(edited, SHOWN)})"] if edited else []
    by_runs = [f"the runs ended with exit code {run_exit_code}"] if run_exit_code else []
    reasons = [*differs, *by_runs, *incomplete]
    return Report(run_id, code, "; ".join(reasons) or same, changed, notes, messages)


def not_committed() -> list[str]:
    """Return the files of expectations and of the quarantine that are not committed: they were not
    reviewed."""
    own, places = project.current(), (project.current().expected, quarantine.file())
    return [file for place in places for file in store.uncommitted_files(own.folder, [place])]


def _is_finished(folder: Path) -> bool:
    """Whether its manifest, where it has one, says that the run ended and left out no cell but for
    its time limit."""
    run = runs.read_run(folder)
    limited = run is not None and any(text.startswith("time_limit=") for text in run.texts)
    return run is None or (run.state == runs.ENDED and (limited or not run.left))


def load_requested(folder: Path, rows: Iterable[VariantResult]) -> Requested:
    """Return what a run was asked for, by the overrides in its folder and today's catalog.

    Of results without overrides, every variant of the catalog counts as requested.
    """
    run = runs.read_run(folder)
    try:
        asked = make_request(run.texts) if run else None
        cells, hardware = (asked.cells, asked.hardware) if asked else ([], [])
    except ConfigError:
        asked = None
    known = {slug: set(case.variants) for slug, case in catalog.load().cases.items()}
    if run is None or asked is None:
        return Requested(known, catalog=known)
    stacks: dict[str, set[str]] = {}
    for cell in cells:
        stacks.setdefault(cell.key, set()).add(cell.stack)
    patterns = asked.settings.variants
    variants = {}
    for case in (asked.catalogue.cases[slug] for slug in {cell.case for cell in cells}):
        named = [
            each
            for each in case.variants
            if any(fnmatchcase(each, pattern) for pattern in patterns or ())
        ]
        variants[case.slug] = set(variants_of(case, named) if patterns else case.variants)
    unstarted = None if run.left is None and asked.settings.time_limit else run.left or ()
    return Requested(
        variants, stacks, tuple(hardware), unstarted, {row.stack for row in rows}, known
    )


def stored_lock(folder: Path, stack: str, run_id: str) -> Path:
    return folder / "locks" / f"{stack}-{run_id}.txt"


RunBisect = Callable[[list[str], float], "tuple[dict[str, Any] | None, str]"]


class Bisections:
    """Bisect changes between two runs' locks, for at most ``seconds`` in all."""

    def __init__(
        self, folder: Path, run_id: str, seconds: float, run: RunBisect | None = None
    ) -> None:
        self.folder, self.run_id = folder, run_id
        self.run = run or run_bisect
        self.deadline = time.monotonic() + seconds

    def report(self, changed: ChangedCase) -> str | None:
        """Return the report, or why there is none; None where the stack has no lock, or nothing to
        bisect changed."""
        good, bad = (
            stored_lock(self.folder, changed.stack, each)
            for each in (changed.passing.run_id, self.run_id)
        )
        changes = [change for change in changed.changes if change.kind not in NOT_BISECTED]
        if not bad.is_file() or not changes:
            return None
        if not good.is_file():
            return f"Not bisected: no lock of {changed.passing.run_id} is stored."
        if good.read_bytes() == bad.read_bytes():
            return "Not bisected: both runs had the same lock, so no release caused the change."
        row, variant = changes[0].row, changes[0].variant
        words = [
            "bisect",
            row.case,
            "--good",
            str(good),
            "--bad",
            str(bad),
            "--variant",
            variant,
            "--any-change",
        ]
        words += [*row.axes, f"hardware={row.hardware}", f"results={self.folder / 'bisect'}"]
        command, left = shlex.join(["repro", *words]), self.deadline - time.monotonic()
        if left <= 0:
            return f"Not bisected: no time left (--bisect-time). Run `{command}`."
        print(f"bisecting for at most {left:.0f} s: {command}", file=sys.stderr, flush=True)
        data, reason = self.run(words, left)
        return (
            str(data["report"])
            if data and data.get("report")
            else f"{reason}. Continue with `{command}`."
        )


def run_bisect(words: list[str], seconds: float) -> tuple[dict[str, Any] | None, str]:
    """Run `repro bisect --json`; return its result, or None and the reason. Its probes stay
    stored."""
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
