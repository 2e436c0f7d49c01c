"""Lies about what an attempt leaves the others of its run (reference_cache.py): it is made again, never taken."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from repro_matrix.paths import REPROS

from .lie import Bench, Lie

FILES = {"last": b"weights" * 100, "truth": b'{"losses": [1.0]}'}


def _left(plants: Sequence[Callable[[Path], Any] | None]) -> list[str]:
    if str(REPROS) not in sys.path:
        sys.path.insert(0, str(REPROS))
    from repro_kit.reference_cache import Common

    said = []
    for plant in plants:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            one = Common(folder / "run", "one")
            assert one.leave("the key", _made(folder / "made"))
            (place,) = (folder / "run").iterdir()
            if plant is not None:
                plant(place)
            by = one.take("the key", folder / "taken")
            if by is not None:
                said.append(f"taken, as {by} left it" if _read(folder / "taken") == FILES else "taken, not as it was")
            else:
                clean = not (folder / "taken").exists() and one.leave("the key", _made(folder / "again"))
                whole = one.take("the key", folder / "taken") and _read(folder / "taken") == FILES
                said.append("made again" if clean and whole else "in the way")
    return said


def _made(folder: Path) -> Path:
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    return folder


def _read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def said(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    """What is said of the files, changed."""

    def edit(place: Path) -> None:
        data = json.loads((place / "made.json").read_text())
        change(data)
        (place / "made.json").write_text(json.dumps(data))

    return edit


LEFT = Bench(
    "left",
    "a reference that an attempt left, changed before another takes it",
    "^taken, as one left it$",
    _left,
    tuple(
        Lie(name, "P3", plant, "^made again$")
        for name, plant in (
            ("a tensor of a left reference edited", lambda place: (place / "last").write_bytes(b"w" * 700)),
            ("a left reference cut short", lambda place: os.truncate(place / "last", 3)),
            ("a left reference without its losses", lambda place: (place / "truth").unlink()),
            ("another model's reference under this key", said(lambda data: data.update(key="the kez"))),
            ("a left reference that says no key", said(lambda data: data.pop("key"))),
            ("a left reference of no files", said(lambda data: data.update(sums={}))),
            ("a left reference whose sums are no sums", said(lambda data: data.update(sums=None))),
            ("a left reference that was not finished", lambda place: os.truncate(place / "made.json", 20)),
            ("files that nobody says anything of", lambda place: (place / "made.json").unlink()),
        )
    ),
)
