"""Nights on disk: folders of results, and ``nights.jsonl``, where each night is what differs from the one before.

The first line is a whole night, every other one a difference (results/compact.py); what was folded is
unfolded again without loss. A folder of nights may hold both: what is there as a folder counts as measured there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from repro_matrix.analysis import inputs as sides
from repro_matrix.analysis.night import Night, from_json, of_briefs, to_json
from repro_matrix.errors import ResultsError
from repro_matrix.records.paths import LINES
from repro_matrix.results import runs
from repro_matrix.results.compact import applied, difference
from repro_matrix.results.store import SCRIPTS, write_text

FILE = "nights.jsonl"


@dataclass
class Nights:
    """In the order of time. ``notes``: what could not be read, or says something else than it shows; ``unread``: the
    first of these alone, of folders."""

    found: list[Night] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


def read(paths: Sequence[Path]) -> Nights:
    """``paths``: folders of results (a night each), and folders of nights. Raises ResultsError: neither."""
    by_name: dict[str, Night] = {}
    seen: set[Path] = set()
    out = Nights()
    for path in sorted(paths, key=lambda path: path.is_dir() and not is_nights(path)):
        if not path.is_dir():
            raise ResultsError(f"{path}: no such folder (of results, or of nights)")
        if not is_nights(path):
            if path.resolve() in seen:
                continue  # it lies in a folder of nights that is given, too
            seen.add(path.resolve())
            _add(_folder(path, _free(path, by_name), out), path, by_name, out)
            continue
        for night in ledger(path, out.notes):
            by_name[night.name] = night
        for folder in folders(path):
            seen.add(folder.resolve())
            _add(_folder(folder, folder.name, out), folder, by_name, out)
    out.found = sorted(by_name.values(), key=lambda night: (night.started, night.name))
    return out


def _add(night: Night, path: Path, by_name: dict[str, Night], out: Nights) -> None:
    """A run that failed, an upload that is missing or damaged is no night in which everything was gone."""
    if night.cells:
        by_name[night.name] = night
    else:
        out.notes.append(f"{path}: no results in it: it counts as no night")


def _folder(path: Path, name: str, out: Nights) -> Night:
    found = sides.read(path, str(path))
    out.notes += found.notes
    out.unread += found.unread
    return of_briefs(name, found.briefs)


def _free(path: Path, taken: Iterable[str]) -> str:
    """The folder's name, with its parent's where another night has it."""
    name = path.resolve().name
    return f"{path.resolve().parent.name}/{name}" if name in taken else name


def is_nights(path: Path) -> bool:
    """Whether a folder holds nights, and not one night's results: these are ``hardware/stack/case/cell.json``."""
    return (path / FILE).exists() or bool(folders(path))


def folders(path: Path) -> list[Path]:
    """The nights that lie in it as folders of results."""
    return [
        folder
        for folder in sorted(path.iterdir())
        if folder.is_dir() and not folder.is_symlink()  # latest
        and folder.name not in ("history", SCRIPTS, runs.SEARCHES) and not folder.name.startswith(".")
        and (next(folder.glob("*/*/*/*.json"), None) or next(folder.glob(f"*/*{LINES}"), None))
    ]  # fmt: skip


def ledger(path: Path, notes: list[str]) -> list[Night]:
    """The nights of ``nights.jsonl``. Raises ResultsError with the line; a last line that was cut off is a note."""
    file = path / FILE
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{file}: cannot be read: {error}") from None
    whole: Any = {}
    found: list[Night] = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        try:
            whole = applied(whole, json.loads(line))
            found.append(from_json(whole))
        except (ValueError, LookupError, TypeError) as error:
            if not line.endswith("\n"):
                notes.append(f"{file}:{number}: cut off while it was written; left out")
                break
            raise ResultsError(f"{file}:{number}: damaged: {error}") from None
    return found


def keep(path: Path, night: Night) -> None:
    """Take a night over into ``nights.jsonl``; one of the same name is replaced. Raises ResultsError."""
    _write(path, [*(n for n in ledger(path, []) if n.name != night.name), night])


def _write(path: Path, nights: Iterable[Night]) -> None:
    ordered = sorted(nights, key=lambda night: (night.started, night.name))
    before: Any = {}
    lines = []
    for night in ordered:
        now = json.loads(json.dumps(to_json(night)))
        lines.append(json.dumps(difference(before, now), separators=(",", ":"), sort_keys=True) + "\n")
        before = now
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_text(path / FILE, "".join(lines))
    except OSError as error:
        raise ResultsError(f"{path / FILE}: cannot be written: {error.strerror or error}") from None


def compact(path: Path, newest: int) -> tuple[list[str], list[str]]:
    """Fold every folder of a night but the ``newest`` into ``nights.jsonl``: (the nights folded, notes).

    A folder goes when its night, read back, says the same. Raises ResultsError: no folder of nights, or one of them
    holds what cannot be read (it stays, and so do all others).
    """
    if not path.is_dir() or not is_nights(path):
        raise ResultsError(f"{path}: no folder of nights (folders of results, or {FILE})")
    out = Nights()
    nights = [(folder, _folder(folder, folder.name, out)) for folder in folders(path)]
    nights.sort(key=lambda item: (item[1].started, item[0].name))
    old = nights[: len(nights) - newest] if newest else nights
    if out.unread:
        raise ResultsError(f"nothing is compacted: {out.unread[0]}")
    codes = {night.name: night.code for night in ledger(path, out.notes)}
    taken = [replace(night, code=codes.get(night.name)) for _, night in old]
    names = {night.name for night in taken}
    _write(path, [*(n for n in ledger(path, []) if n.name not in names), *taken])
    back = {night.name: night for night in ledger(path, [])}
    for (folder, _), night in zip(old, taken):
        if json.dumps(to_json(back[night.name]), sort_keys=True) != json.dumps(to_json(night), sort_keys=True):
            raise ResultsError(f"{folder}: read back from {FILE} it says something else; it stays")
        shutil.rmtree(folder)
    return sorted(names), out.notes
