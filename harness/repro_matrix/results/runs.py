"""Manage folders of results: one for each run below ``results/scratch``, one for searches.

``latest`` points at the last run; a folder of runs stands for it (``of``). When a run begins, all
but the last ``KEPT``
runs are removed, except those that a process writes. Searches have one folder, which is never
removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from filelock import Timeout

from repro_matrix.config import project
from repro_matrix.config.settings import RunSettings
from repro_matrix.errors import ResultsError
from repro_matrix.paths import file_lock, file_state, has_locks, read_json, write_text
from repro_matrix.records.document import Document
from repro_matrix.records.outcome import adapter
from repro_matrix.results.rows import Row
from repro_matrix.results.store import (
    ENDED,
    LATEST,
    LOCK,
    MANIFEST,
    SUMMARY,
    UNFINISHED,
    cannot_write,
)
from repro_matrix.results.summary import evidence_states, load_rows, stored_rows, summaries

SEARCHES = "searches"
KEPT = 20
HEAD = 800  # bytes of a line of a summary that hold the case and its kind
LOOK_BACK = 5  # runs whose results count as the history of a cell


@dataclass(frozen=True)
class Run:
    """One run of the matrix, by its manifest.

    ``texts``: the command line's overrides. ``left``: cells that its time limit left out, "hardware
    stack key"; None if that is unknown. ``planned``: all its cells. ``stacks``: all packages of
    each stack. ``project``: the folder of the checkout or project that measured it. ``written``:
    when its manifest was last written. ``exit_code``: None if it did not end.
    """

    folder: Path
    texts: tuple[str, ...]
    state: str
    left: tuple[str, ...] | None = None
    planned: tuple[str, ...] = ()
    stacks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    project: str = ""
    written: float = 0.0
    exit_code: int | None = None

    @property
    def interrupted(self) -> bool:
        """Return whether it did not get to its end and no process continues it."""
        return self.state != ENDED and not in_use(self.folder)


def scratch() -> Path:
    """Return the folder of runs."""
    return project.current().results / "scratch"


def results_folder(settings: RunSettings) -> Path:
    """Return the folder that results are written to: ``results=``, else that of searches."""
    return Path(settings.results).expanduser() if settings.results else scratch() / SEARCHES


def last_run(folder: Path) -> Path:
    """Return the last run in a folder of runs; any other folder is returned as it is.

    Raises ResultsError: the manifest of the last run is damaged.
    """
    found = list_runs(folder)
    check_latest(folder)
    latest = (folder / LATEST).resolve()
    return latest if (latest / MANIFEST).exists() else found[-1].folder if found else folder


def named_folders(text: str) -> list[Path]:
    """Return the folders of results that ``DIR,...`` lists; a folder of runs means its last run."""
    return [last_run(Path(part).expanduser()) for part in text.split(",")]


def check_latest(root: Path) -> None:
    """Raise ResultsError if ``latest`` points at a run whose manifest is damaged."""
    manifest = (root / LATEST).resolve() / MANIFEST
    if manifest.exists() and read_run(manifest.parent) is None:
        raise ResultsError(f"{manifest}: damaged. Name the folder of a run, or remove that folder.")


def list_runs(root: Path) -> list[Run]:
    """Return the runs in a folder, the oldest first."""
    folders = sorted(root.iterdir()) if root.is_dir() else []
    found = [run for folder in folders if not folder.is_symlink() and (run := read_run(folder))]
    return sorted(found, key=lambda run: run.written)


def runs_before(folder: Path) -> list[Run]:
    """Return the runs beside a run that ended before it, the oldest first.

    Only runs of the same checkout or project count: ``results=`` may name a folder that others use.
    """
    own = read_run(folder)
    beside = list_runs(folder.resolve().parent) if own else []
    return [
        run for run in beside if own and run.project == own.project and run.written < own.written
    ]


def read_run(folder: Path) -> Run | None:
    """Return the run whose folder it is, or None."""
    try:
        run: Run = adapter(Run).validate_python({"folder": folder, **read_json(folder / MANIFEST)})
    except (TypeError, ValueError):  # missing or damaged
        return None
    return run


def create_run(root: Path, texts: Sequence[str]) -> Path:
    """Create a run's folder, let ``latest`` point at it and remove the oldest runs.

    Raises ResultsError.
    """
    name = time.strftime("%Y-%m-%d-%H%M%S", time.gmtime())
    try:
        root.mkdir(parents=True, exist_ok=True)
        names = (name, *(f"{name}-{number:03}" for number in range(2, 1000)))
        folder = next(root / each for each in names if not (root / each).exists())
        folder.mkdir()
        note(folder, texts, UNFINISHED)
    except OSError as error:
        raise cannot_write(error, root) from None
    point(folder)
    prune_runs(root)
    return folder


def store_exit_code(folder: Path, code: int) -> None:
    """Add the exit code to a run's manifest: later runs are compared with passing ones."""
    with contextlib.suppress(OSError, ValueError):
        path = folder / MANIFEST
        manifest = json.loads(path.read_text(encoding="utf-8"))
        write_text(path, json.dumps({**manifest, "exit_code": code}))


def note(
    folder: Path,
    texts: Sequence[str],
    state: str,
    left: Sequence[str] | None = None,
    stacks: Mapping[str, Mapping[str, str]] | None = None,
    planned: Sequence[str] = (),
) -> None:
    """Write the manifest: what was requested, and whether all of it was measured.

    ``left``, ``stacks``: see ``Run``. ``planned``: cells as in ``left``; a reader reports those
    without a result (``summary.load_rows``).
    """
    data = {
        "schema": 1,
        "texts": list(texts),
        "state": state,
        "stacks": stacks or {},
        "planned": list(planned),
        "project": str(project.current().folder),
        "written": time.time(),
    }
    if left is not None:
        data["left"] = list(left)
    write_text(folder / MANIFEST, json.dumps(data) + "\n")


def point(folder: Path) -> None:
    """Let ``latest`` point at a run.

    Where links cannot be created, the last name is the last run.
    """
    link = folder.parent / f".{LATEST}-{os.getpid()}"
    with contextlib.suppress(OSError):
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name, target_is_directory=True)
        os.replace(link, folder.parent / LATEST)


def drop(folder: Path) -> None:
    """Remove a run that has not measured anything; ``latest`` is the one before it."""
    if next(folder.rglob("*.json"), None):
        return
    shutil.rmtree(folder, ignore_errors=True)
    (folder.parent / LATEST).unlink(missing_ok=True)
    for before in list_runs(folder.parent)[-1:]:
        point(before.folder)


def prune_runs(root: Path, kept: int = KEPT) -> None:
    """Remove the oldest runs beyond ``kept``, except those in use."""
    for run in list_runs(root)[:-kept]:
        ended = run.state == ENDED or has_locks(run.folder)
        if ended and not in_use(run.folder):
            shutil.rmtree(run.folder, ignore_errors=True)


def in_use(folder: Path) -> bool:
    """Return whether a process writes results there (``Store.open``)."""
    if not (folder / LOCK).exists():
        return False
    try:
        with file_lock(folder / LOCK, timeout=0):
            return False
    except OSError as error:
        return isinstance(error, Timeout)


def measured_rows(settings: RunSettings | None = None) -> list[Row]:
    """Return the stored rows of earlier measurements, with the grading that they were stored with.

    They are the published ones and, with ``settings``, those of that run's folder and, where it is
    one of scratch/, of the last runs before it.
    """
    published = list(dict.fromkeys(map(Path.resolve, project.published())))
    folders: list[Path] = []
    if settings is not None:
        folders.append(results_folder(settings))
        if folders[-1].parent.resolve() == scratch().resolve():
            folders += [run.folder for run in list_runs(scratch())[-LOOK_BACK:]]
    own = [each for each in dict.fromkeys(map(Path.resolve, folders)) if each not in published]
    rows = [_published_rows(each, tuple(map(file_state, summaries(each)))) for each in published]
    rows += map(_stored_rows, own)
    return list(chain.from_iterable(rows))


@lru_cache(maxsize=4)  # a command asks several times
def _published_rows(folder: Path, states: tuple[tuple[int, ...], ...]) -> list[Row]:
    return _stored_rows(folder)


def _stored_rows(folder: Path, wanted: Callable[[bytes], bool] | None = None) -> list[Row]:
    return list(chain.from_iterable(stored_rows(folder, [], wanted).values()))


def rows_of_stacks(
    stacks: Sequence[Mapping[str, str]], folder: Path, notes: list[str]
) -> list[Row]:
    """Return the stored rows of stacks with these versions of torch and transformers.

    They are the published ones and those of all runs and searches. ``folder``: another one to read.
    ``notes`` gets what cannot be read.
    """
    pins = ("torch", "transformers")
    wanted = [
        [f'"{n}":"{each[n].partition("+")[0]}'.encode() for n in pins if n in each]
        for each in stacks
    ]
    folders = [
        *project.published(),
        *(run.folder for run in list_runs(scratch())),
        scratch() / SEARCHES,
        folder,
    ]

    def of_stacks(line: bytes) -> bool:  # most lines are of others, and reading a row takes time
        return any(all(pin in line for pin in each) for each in wanted)

    return _rows(folders, of_stacks, notes)


def rows_of_cases(slugs: Collection[str]) -> list[Row]:
    """Return the stored rows of these cases and of all controls.

    They are those of the last run, of searches and the published ones, as they were graded. Other
    rows are not parsed.
    """
    wanted = [f'"case":"{slug}"'.encode() for slug in slugs] + [b'"kind":"control"']
    folders = last_run(scratch()), scratch() / SEARCHES, *project.published()
    return _rows(folders, lambda line: any(each in line[:HEAD] for each in wanted), [])


def _rows(folders: Iterable[Path], wanted: Callable[[bytes], bool], notes: list[str]) -> list[Row]:
    """Return the rows whose line is wanted, as they are stored."""
    published = list(map(Path.resolve, project.published()))
    found: list[Row] = []
    for folder in dict.fromkeys(map(Path.resolve, folders)):
        if folder in published:
            found += _stored_rows(folder, wanted)
        elif folder.is_dir():
            found += current_rows(folder, notes, wanted)
    return found


def current_rows(
    folder: Path, notes: list[str], wanted: Callable[[bytes], bool] | None = None
) -> list[Row]:
    """Return the rows of a run, from its evidence if its summary is edited or outdated.

    ``notes`` gets what cannot be read. ``wanted``: of which lines.
    """
    edited: list[str] = []
    cells = stored_rows(folder, edited, wanted)
    if not edited and _is_of_its_evidence(folder):
        return list(chain.from_iterable(cells.values()))
    return [
        row
        for row in load_rows(folder, notes=notes)
        if wanted is None or wanted(adapter(Row).dump_json(row))
    ]


def _is_of_its_evidence(folder: Path) -> bool:
    """Return whether the summary of a run lists each file of evidence as it is, and no other.

    A reader of a run that had not ended may have written it, so times do not tell.
    """
    states, path = evidence_states(folder), folder / SUMMARY
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    named = (
        set(re.findall(r'"evidence":"([^":]+)', text)),
        set(re.findall(r'"evidence_state":"(\w+)"', text)),
    )
    return named[0] == states.keys() and named[1].issuperset(states.values())


def past_measurements(rows: Iterable[Row]) -> dict[str, list[Document]]:
    """Return cell id -> what ``verdict.judge`` reads of measurements on other stacks."""
    found: dict[str, list[Document]] = defaultdict(list)
    for row in rows:
        if row.variant == "unfixed":
            attempts = [{"outcome": {"outcome": attempt.outcome}} for attempt in row.attempts]
            past: Any = {
                "stack": {
                    "name": row.stack.name,
                    "versions": row.stack.versions,
                    "changed": list(row.stack.changed),
                },
                "hardware": {
                    "accelerator": row.hardware.accelerator,
                    "capabilities": row.hardware.capabilities,
                },
                "variants": {"unfixed": {"settings": row.settings, "attempts": attempts}},
            }
            found[row.cell_id].append(past)
    return found
