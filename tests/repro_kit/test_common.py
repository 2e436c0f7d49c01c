"""What attempts of one run leave each other (reference_cache.py): only what is whole, and the very same, is ever taken.

What is not whole, or lies under another's key, is told in tests/lies/left.py."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.paths import REPROS

if str(REPROS) not in sys.path:
    sys.path.insert(0, str(REPROS))

from repro_kit import reference_cache as common
from repro_kit.reference_cache import MADE, Common

FILES = {"first": b"weights" * 100, "truth": b"{}"}


def made(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def left(tmp_path: Path, key: str = "the key", **limits: int) -> Common:
    one = Common(tmp_path / "run", "one", **limits)
    assert one.leave(key, made(tmp_path / "one" / key))
    return one


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_one_leaves_another_takes_and_says_whose_it_is(tmp_path: Path) -> None:
    left(tmp_path)
    shutil.rmtree(tmp_path / "one")  # the attempt has ended
    other = Common(tmp_path / "run", "other")
    assert other.take("the key", tmp_path / "other") == "one"
    assert read(tmp_path / "other") == FILES
    assert other.take("another key", tmp_path / "more") is None and not (tmp_path / "more").exists()
    assert not other.leave("the key", made(tmp_path / "late")), "the first that is complete stays"


@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=3), st.binary(max_size=50), min_size=1), st.text(), st.text()
)
def test_only_the_same_key_gives_the_same_files(
    tmp_path_factory: Any, files: dict[str, bytes], key: str, other: str
) -> None:
    folder = tmp_path_factory.mktemp("common")
    one = Common(folder / "run", "one")
    assert one.leave(key, made(folder / "made", files))
    taken = one.take(other, folder / "taken")
    assert (taken is not None) == (key == other)
    assert taken is None or read(folder / "taken") == files


def test_two_keys_of_one_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "short", lambda key: "same")
    one = left(tmp_path)
    assert one.take("another key", tmp_path / "taken") is None


def test_a_maker_that_is_killed_leaves_nothing_to_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException): ...

    def killed(path: Path, target: Path) -> Path:
        raise Killed

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(Killed):
        left(tmp_path)
    monkeypatch.undo()
    other = Common(tmp_path / "run", "other")
    assert other.take("the key", tmp_path / "taken") is None
    assert other.leave("the key", made(tmp_path / "other")) and other.take("the key", tmp_path / "taken") == "other"


def test_of_several_at_once_one_stays_and_nobody_waits(tmp_path: Path) -> None:
    folders = {str(number): made(tmp_path / f"made-{number}") for number in range(8)}
    results: dict[str, bool] = {}

    def leave(name: str) -> None:
        results[name] = Common(tmp_path / "run", name).leave("the key", folders[name])

    threads = [threading.Thread(target=leave, args=(name,)) for name in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = (name for name, stayed in results.items() if stayed)
    assert Common(tmp_path / "run", "late").take("the key", tmp_path / "taken") == winner
    assert len(list((tmp_path / "run").iterdir())) == 1


def test_the_oldest_make_room_and_who_uses_them_keeps_them(tmp_path: Path) -> None:
    size = sum(map(len, FILES.values()))
    one = left(tmp_path, "a", limit=2 * size)
    os.utime(tmp_path / "run" / common.short("a") / MADE, (1, 1))
    assert one.take("a", tmp_path / "used") == "one"
    for key in "bc":
        assert one.leave(key, made(tmp_path / f"made-{key}"))
    assert [one.take(key, tmp_path / f"taken-{key}") for key in "abc"] == [None, "one", "one"]
    assert read(tmp_path / "used") == FILES
    large = made(tmp_path / "large", {"first": b"x" * 5 * size})
    assert one.leave("large", large)  # it stays alone
    assert [one.take(key, tmp_path / f"then-{key}") for key in ("b", "c", "large")] == [None, None, "one"]


def test_nothing_is_left_on_a_disk_without_room_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert not Common(tmp_path / "run", "one").leave("the key", made(tmp_path / "made"))
    assert not (tmp_path / "run").exists()
