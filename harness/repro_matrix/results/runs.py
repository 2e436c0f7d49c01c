"""A folder for each run of the matrix: ``results/scratch/<when>/``, and ``latest``, which points at the last.

Whoever reads results and is given a folder of runs reads the last of them (``of``); nothing is overwritten. The last
``KEPT`` runs are kept: when one begins, older ones go, but for those that somebody is writing or reading. What searches
and scripts measure is no run's: it lies in ``searches/`` and ``scripts/`` beside them, and stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from repro_matrix.errors import ResultsError
from repro_matrix.results.store import LATEST as LATEST
from repro_matrix.results.store import write_text

SEARCHES = "searches"
MANIFEST = "run.manifest"  # no .json: these are cells
KEPT = 20
ENDED = "ended"
UNFINISHED = "unfinished"

_held: dict[Path, IO[str]] = {}  # runs that this process writes or reads: locked until it ends
_own: set[Path] = set()  # those that it writes


@dataclass(frozen=True)
class Run:
    """``left``: cells for which its budget had no room, "hardware stack key"; None: it does not say."""

    folder: Path
    texts: tuple[str, ...]  # the command line's overrides
    state: str
    left: tuple[str, ...] | None = None


def of(folder: Path) -> Path:
    """The run that a folder of runs stands for: its last. Any other folder is itself.

    Raises ResultsError: ``latest`` points at a run whose manifest cannot be read; an older one would be told instead.
    """
    found = listed(folder)
    sound(folder)
    target = (folder / LATEST).resolve()
    last = target if any(run.folder.resolve() == target for run in found) else found[-1].folder if found else folder
    _hold(last)
    return last


def sound(root: Path) -> None:
    """Raises ResultsError where ``latest`` points at a folder whose manifest is damaged."""
    last = (root / LATEST).resolve()
    if (last / MANIFEST).exists() and read(last) is None:
        raise ResultsError(
            f"{last / MANIFEST}: damaged: whether that run ended is not known; name the folder of a run, or remove it"
        )


def listed(root: Path) -> list[Run]:
    """The runs in a folder, the oldest first."""
    if not root.is_dir():
        return []
    found = [run for path in sorted(root.iterdir()) if not path.is_symlink() and (run := read(path))]
    return sorted(found, key=lambda run: run.folder.name)


def read(folder: Path) -> Run | None:
    """The run whose folder it is, or None."""
    try:
        said = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        left = tuple(map(str, said["left"])) if "left" in said else None
        return Run(folder, tuple(map(str, said["texts"])), str(said["state"]), left)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def begin(root: Path, texts: Sequence[str]) -> Path:
    """A new run's folder; ``latest`` points at it. Raises ResultsError: it cannot be made."""
    if root.exists() and not root.is_dir():
        raise ResultsError(f"{root}: is a file, no folder; another folder: results=DIR")
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = _new(root)
        note(folder, texts, UNFINISHED)
    except OSError as error:
        raise ResultsError(f"{root}: cannot be written ({error.strerror}); another folder: results=DIR") from None
    point(folder)
    prune(root)
    return folder


def _new(root: Path) -> Path:
    name = time.strftime("%Y-%m-%d-%H%M%S", time.gmtime())
    for number in range(1, 1000):
        folder = root / (name if number == 1 else f"{name}-{number:03}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise OSError(0, "a thousand runs began in this second")


def note(folder: Path, texts: Sequence[str], state: str, left: Sequence[str] | None = None) -> None:
    """What was asked for, and whether all of it was measured; the folder is in use until this process ends. ``left``:
    see ``Run``."""
    said = {"schema": 1, "texts": list(texts), "state": state} | ({} if left is None else {"left": list(left)})
    write_text(folder / MANIFEST, json.dumps(said) + "\n")
    _held.pop(folder.resolve(), None)
    _own.add(folder.resolve())
    _hold(folder)


def point(folder: Path) -> None:
    """Let ``latest`` point at a run. Where links cannot be made its name tells which is the last."""
    link = folder.parent / f".{LATEST}-{os.getpid()}"
    with contextlib.suppress(OSError):
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name, target_is_directory=True)
        os.replace(link, folder.parent / LATEST)


def drop(folder: Path) -> None:
    """Take a run back that has not measured anything; ``latest`` is the one before it."""
    if next(folder.rglob("*.json"), None):
        return
    shutil.rmtree(folder, ignore_errors=True)
    before = listed(folder.parent)
    if before:
        point(before[-1].folder)
    else:
        (folder.parent / LATEST).unlink(missing_ok=True)


def unfinished(root: Path) -> Run | None:
    """The last run that was interrupted, or whose process died."""
    for run in reversed(listed(root)):
        if run.state != ENDED and not in_use(run.folder):
            return run
    return None


def prune(root: Path, kept: int = KEPT) -> list[Path]:
    """Remove the oldest runs beyond ``kept``, but for those in use: (the folders that are gone)."""
    gone = []
    for run in listed(root)[:-kept]:
        if not in_use(run.folder):
            shutil.rmtree(run.folder, ignore_errors=True)
            gone.append(run.folder)
    return gone


def in_use(folder: Path) -> bool:
    """Whether a process, this one too, writes or reads the run."""
    try:
        with open(folder / MANIFEST, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


def died(run: Run) -> bool:
    """Whether it never got to its end and nobody is at it: interrupted, or killed."""
    at = run.folder.resolve()
    if run.state == ENDED or at in _own:
        return False
    mine = _held.get(at)
    if mine is None:
        return not in_use(at)
    try:  # this process reads it: does any other one?
        fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(mine, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _hold(folder: Path) -> None:
    if folder.resolve() in _held:
        return
    with contextlib.suppress(OSError):
        file: Any = open(folder / MANIFEST, encoding="utf-8")  # noqa: SIM115 - open until this process ends
        _held[folder.resolve()] = file
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
