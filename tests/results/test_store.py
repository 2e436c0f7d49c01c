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
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.errors import ResultsError
from repro_matrix.results import store as stores
from repro_matrix.results.store import Store


def document(started: float, attempts: int = 1) -> dict[str, Any]:
    made = observations.document({"unfixed": [("passed", observations.observation(observations.ok(0)))] * attempts})
    made["provenance"]["started"] = started
    return dict(json.loads(json.dumps(made)))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


def test_round_trip(store: Store) -> None:
    store.open()
    path = store.path_of("cpu", "torch2", "case/cell")
    store.save(path, document(1))
    assert store.read(path) == document(1)
    assert [d["provenance"]["started"] for d in store.documents()] == [1]


def test_an_older_measurement_is_kept_as_history(store: Store) -> None:
    path = store.path_of("cpu", "torch2", "case/cell")
    store.save(path, document(1))
    store.save(path, document(2))
    store.save(path, document(2, attempts=2))  # the same run goes on: not history
    assert [d["provenance"]["started"] for d in store.documents()] == [2]
    assert sorted(d["provenance"]["started"] for d in store.documents(history=True)) == [1, 2]


def test_half_a_copy_is_no_history(store: Store) -> None:
    """Where the disk was full; the measurement that was to be kept was replaced all the same."""
    path = store.path_of("cpu", "torch2", "case/cell")
    store.save(path, document(1, attempts=3))
    kept = store.root / "history" / path.relative_to(store.root).with_suffix(".19700101T000001.json")
    kept.parent.mkdir(parents=True)
    kept.write_text(path.read_text()[:90])
    store.save(path, document(2))
    assert json.loads(kept.read_text()) == document(1, attempts=3)
    whole = kept.read_text().replace("1.0", "1.0")
    store.save(path, document(1, attempts=1))
    store.save(path, document(3))
    assert kept.read_text() == whole, "what is whole is not written over"


def test_two_runs_in_one_folder(store: Store) -> None:
    store.open()
    with pytest.raises(ResultsError, match="another run is writing here"):
        Store(store.root).open()
    store.close()
    again = Store(store.root)
    again.open()
    again.close()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, st.booleans())
def test_a_file_is_read_as_json_reads_it(value: Any, spelled: bool) -> None:
    """Half a character and a number beyond 64 bits, too."""
    text = json.dumps(value, ensure_ascii=spelled)
    assert repr(stores._loaded(text)) == repr(json.loads(text))


@pytest.mark.parametrize(
    "text", ["", "{", "[1,]", "01", "'a'", "\ufeff1", "NaN1", '"\x01"', '"\\ud800"', "-Infinity", "1e999"]
)
def test_what_is_no_json_is_refused_with_the_same_words(text: str) -> None:
    told = []
    for read in (stores._loaded, json.loads):
        try:
            told.append(repr(read(text)))
        except ValueError as error:
            told.append(str(error))
    assert told[0] == told[1]


def test_what_is_no_document_is_said_in_words(store: Store) -> None:
    """It was "KeyError: 'provenance'", of a JSON Schema too."""
    store.root.mkdir()
    (store.root / "a.json").write_text('{"$schema": "https://json-schema.org/draft/2020-12/schema"}')
    (store.root / "b.json").write_text('{"schema": 1, "variants": {}}')
    (store.root / "c.json").write_text('{"schema": 0, "variants": {}, "provenance": {"started": 1}}')
    assert list(store.documents()) == []
    first, second, third = store.damaged
    assert "schema 0: older than any that this repro-matrix reads (1)" in third
    assert "(a JSON Schema, no cell document)" in first and "(not a cell document: it has no 'provenance')" in second


NEWER = '{"schema": 2, "variants": {}, "provenance": {"started": 1}}'


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": "2"}', "\x00\x01", NEWER])
def test_who_only_reads_moves_nothing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "cpu" / "torch2" / "case" / "cell.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    reader = Store(tmp_path)
    assert list(reader.documents()) == [] and str(path) in reader.damaged[0]
    assert path.read_text() == content and len(list(path.parent.iterdir())) == 1


def test_a_document_of_a_newer_schema_is_named_and_never_overwritten(store: Store) -> None:
    path = store.path_of("cpu", "torch2", "case/cell")
    path.parent.mkdir(parents=True)
    path.write_text(NEWER)
    store.open()
    assert store.read(path) is None and "a newer repro-matrix wrote it" in store.damaged[0]
    with pytest.raises(ResultsError, match="a newer repro-matrix wrote it"):
        store.save(path, document(1))
    assert path.read_text() == NEWER and len(list(path.parent.iterdir())) == 1
    store.close()


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (
            ("variants", "unfixed", "attempts", 0, "outcome", "outcome"),
            "fine",
            "variants.unfixed.attempts[0].outcome.outcome: ",
        ),
        (
            ("variants", "unfixed", "attempts", 0, "observation", "ranks", 0, "record", "checks", 0, "name"),
            3,
            "variants.unfixed.attempts[0].observation.ranks[0].record.checks[0].name: ",
        ),
        (("stack", "versions", "torch"), 2, "stack.versions.torch: "),
        (("case",), "Not A Slug", "case: "),
        (("verdicts", "unfixed"), {}, "verdicts.unfixed.name: Field required"),
        (("variants", "unfixed", "skipped"), "why", "variants.unfixed: a variant that was skipped has no attempts"),
        (("kind",), "control", "variants.unfixed: a control has the one variant control"),
        (("variants",), {}, "variants: "),
        (("stack",), None, "stack: "),
    ],
)
def test_a_damaged_document_is_named_with_the_place_inside_it(
    store: Store, path: tuple[Any, ...], value: Any, said: str
) -> None:
    made = document(1)
    parent: Any = made
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    there = store.path_of("cpu", "torch2", "case/cell")
    there.parent.mkdir(parents=True)
    stores.write_json(there, made)
    assert store.read(there) is None
    assert f"{there}: damaged ({said}" in store.damaged[0], store.damaged


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": "2"}', "\x00\x01"])
def test_damaged_document_is_moved_aside_not_deleted(store: Store, content: str) -> None:
    path = store.path_of("cpu", "torch2", "case/cell")
    path.parent.mkdir(parents=True)
    path.write_text(content)
    store.save(path, document(1))
    assert store.damaged and "damaged" in store.damaged[0]
    assert sorted(p.read_text() for p in path.parent.iterdir() if p != path) == [content]
    assert json.loads(path.read_text()) == document(1)


def test_a_write_that_fails_leaves_the_old_document(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.path_of("cpu", "torch2", "case/cell")
    store.save(path, document(1))

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stores.os, "fsync", full)
    with pytest.raises(ResultsError, match="disk is full"):
        store.save(path, document(1, attempts=5))
    assert json.loads(path.read_text()) == document(1)
    assert not list(path.parent.glob("*.tmp")) and not list(path.parent.glob(".*.tmp"))


def test_read_only_folder_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(self: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "write_bytes", read_only)  # the tests may run as root, whom no permission stops
    with pytest.raises(ResultsError, match="choose another folder"):
        Store(tmp_path / "x").open()


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(ResultsError):
        Store(tmp_path / "x").open()


def test_stack_label_is_readable_and_safe() -> None:
    assert stores.stack_label({"torch": "2.13.0+cpu", "transformers": "5.23.0"}, "abcdef123") == (
        "torch2.13.0+cpu-tf5.23.0-abcdef"
    )
    assert "/" not in stores.stack_label({"torch": "a/b"}, "k" * 9)


def test_what_is_no_file_is_written_to_and_never_replaced(tmp_path: Path) -> None:
    """`report --output /dev/null`, asked by root, put a file in the place of the device."""
    pipe, seen = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: seen.append(pipe.read_bytes()))
    reader.start()
    stores.write_bytes(pipe, b"told")
    reader.join(60)
    assert seen == [b"told"] and pipe.is_fifo() and [each.name for each in tmp_path.iterdir()] == ["pipe"]
    (tmp_path / "real").write_text("before")
    (tmp_path / "link").symlink_to("real")
    os.link(tmp_path / "real", tmp_path / "as it was")
    stores.write_text(tmp_path / "link", "after")
    assert (tmp_path / "as it was").read_text() == "before", "replaced in one step, not written into"
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "after"


LINKS = [("gpu1/s/some-case/m.json", 3), ("gpu1/s/some-case", 3), ("gpu1/s", 2), ("gpu1", 2)]


@pytest.mark.parametrize(("below", "left"), LINKS)
@pytest.mark.parametrize("target", ["nowhere", "elsewhere"])
def test_store_names_a_link_in_place_of_a_document(
    below: str,
    left: int,
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was passed over: nothing said that the cell was not there."""
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "results"
    for hardware in ("cpu", "gpu1"):
        for case in ("some-case", "train-step"):
            at = root / hardware / "s" / case / "m.json"
            at.parent.mkdir(parents=True)
            at.write_text(json.dumps({**document(1), "case": case, "cell_id": f"{case}/m-{hardware}"}))
    path = root / below
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / target)
    (root / "latest").symlink_to("nowhere")
    store = Store(root)
    found = len(list(store.documents()))
    if path.suffix and target == "elsewhere":  # a link to a document is one
        assert (found, store.damaged) == (4, [])
        return
    assert found == left and [f"{path}: damaged (a link that leads to " in told for told in store.damaged] == [True]
