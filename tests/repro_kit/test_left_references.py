"""A reference that an attempt left and that was changed since is made again, never taken (reference_cache.py)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from repro_matrix.paths import REPROS

sys.path.insert(0, str(REPROS))
from repro_kit.reference_cache import Common

FILES = {"last": b"weights" * 100, "truth": b'{"losses": [1.0]}'}


def written(folder: Path) -> Path:
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    return folder


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def entry(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    """Change what the cache recorded of the files."""

    def edit(place: Path) -> None:
        data = json.loads((place / "made.json").read_text())
        change(data)
        (place / "made.json").write_text(json.dumps(data))

    return edit


CHANGES: dict[str, Callable[[Path], Any]] = {
    "a tensor edited": lambda place: (place / "last").write_bytes(b"w" * 700),
    "cut short": lambda place: os.truncate(place / "last", 3),
    "without its losses": lambda place: (place / "truth").unlink(),
    "another model's reference": entry(lambda data: data.update(key="the kez")),
    "no key": entry(lambda data: data.pop("key")),
    "no files": entry(lambda data: data.update(sums={})),
    "no checksums": entry(lambda data: data.update(sums=None)),
    "not finished": lambda place: os.truncate(place / "made.json", 20),
    "no entry": lambda place: (place / "made.json").unlink(),
}


@pytest.mark.parametrize("name", ["", *CHANGES])
def test_changed_reference_is_recomputed(name: str, tmp_path: Path) -> None:
    one = Common(tmp_path / "run", "one")
    assert one.leave("the key", written(tmp_path / "made"))
    (place,) = (tmp_path / "run").iterdir()
    if not name:
        assert one.take("the key", tmp_path / "taken") == "one" and read(tmp_path / "taken") == FILES
        return
    CHANGES[name](place)
    assert one.take("the key", tmp_path / "taken") is None and not (tmp_path / "taken").exists()
    assert one.leave("the key", written(tmp_path / "again"))
    assert one.take("the key", tmp_path / "taken") and read(tmp_path / "taken") == FILES
