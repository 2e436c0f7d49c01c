"""Documents are replaced in one step, and nothing recorded is ever lost."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import observations
import pytest
from repro_matrix.errors import ResultsError
from repro_matrix.results import store as stores
from repro_matrix.results.store import Store


def document(started: float, attempts: int = 1) -> dict[str, Any]:
    made = observations.document(
        {"unfixed": [("passed", observations.observation(observations.ok(0)))] * attempts}
    )
    made["provenance"]["started"] = started
    return dict(json.loads(json.dumps(made)))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


def test_save_moves_an_older_measurement_to_history(store: Store) -> None:
    path = store.path_of("cpu", "torch2", "case/cell")
    store.save(path, document(1))
    store.save(path, document(2))
    store.save(path, document(2, attempts=2))  # the same run goes on: not history
    assert store.read(path) == document(2, attempts=2)
    assert [d["provenance"]["started"] for d in store.documents()] == [2]
    assert sorted(d["provenance"]["started"] for d in store.documents(history=True)) == [1, 2]


def test_open_twice_is_refused(store: Store) -> None:
    store.open()
    with pytest.raises(ResultsError, match="another run is writing here"):
        Store(store.root).open()
    store.close()
    again = Store(store.root)
    again.open()
    again.close()


DAMAGED = {
    "": "",
    "{": "",
    "\x00\x01": "",
    "[]": "",
    '{"schema": 2, "variants": {}, "provenance": {"started": 1}}': "schema: ",
    json.dumps(document(1) | {"case": "Not A Slug"}): "case: ",
    json.dumps(
        document(1) | {"kind": "control"}
    ): "variants.unfixed: a control has the one variant control",
}


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_document_is_named_and_kept(store: Store, content: str) -> None:
    path = store.path_of("cpu", "torch2", "case/cell")
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert (
        list(store.documents()) == [] and f"{path}: damaged ({DAMAGED[content]}" in store.damaged[0]
    )
    assert path.read_text() == content and len(list(path.parent.iterdir())) == 1
    store.save(path, document(1))
    assert [each.read_text() for each in path.parent.iterdir() if each != path] == [content]
    assert json.loads(path.read_text()) == document(1)


def test_save_on_a_full_disk_keeps_the_old_document(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.path_of("cpu", "torch2", "case/cell")
    store.save(path, document(1))

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stores.os, "fsync", full)
    with pytest.raises(ResultsError, match="disk is full"):
        store.save(path, document(1, attempts=5))
    assert json.loads(path.read_text()) == document(1)
    assert not list(path.parent.glob("*.tmp")) and not list(path.parent.glob(".*.tmp"))


def test_open_refuses_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(ResultsError, match="Choose another folder"):
        Store(tmp_path / "x").open()


def test_stack_label_is_readable_and_safe() -> None:
    assert (
        stores.stack_label({"torch": "2.13.0+cpu", "transformers": "5.23.0"}, "abcdef123")
        == "torch2.13.0+cpu-tf5.23.0-abcdef"
    )


def test_write_bytes_to_a_pipe_or_link_keeps_it(tmp_path: Path) -> None:
    """`report --output /dev/null`, asked by root, put a file in the place of the device."""
    pipe, seen = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: seen.append(pipe.read_bytes()))
    reader.start()
    stores.write_bytes(pipe, b"told")
    reader.join(60)
    assert (
        seen == [b"told"]
        and pipe.is_fifo()
        and [each.name for each in tmp_path.iterdir()] == ["pipe"]
    )
    (tmp_path / "real").write_text("before")
    (tmp_path / "link").symlink_to("real")
    os.link(tmp_path / "real", tmp_path / "as it was")
    stores.write_text(tmp_path / "link", "after")
    assert (tmp_path / "as it was").read_text() == "before", (
        "replaced in one step, not written into"
    )
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "after"
