"""The published store: a line a cell, a file a stack; a damaged line is one cell's damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import document, failed, observation, ok

from repro_matrix.cell import place
from repro_matrix.conf.errors import ResultsError
from repro_matrix.diff.sides import side
from repro_matrix.paths import BASELINE
from repro_matrix.results import published, sheet
from repro_matrix.results.compact import compacted, expanded
from repro_matrix.results.publishing import place as placed
from repro_matrix.results.store import Store, listed, write_json

Stored = dict[str, Any]
FILE = "cpu/torch2.13.0-tf5.23.0-abc.jsonl"


def cell(name: str, case: str = "some-case", **changes: Any) -> Stored:
    made = document(
        {"broken": [("fires", observation(failed(0), failed(1)))] * 3, "fix": [("clean", observation(ok(0)))] * 3},
        {"fix": "FIX_HOLDS"}, case=case, key=f"{case}/{name}", **changes,
    )  # fmt: skip
    return {**made, "stack": {**made["stack"], "label": "torch2.13.0-tf5.23.0-abc"}}


def write(root: Path, *made: Stored) -> list[bytes]:
    published.write(root, {placed(one): one for one in made}, ())
    return (root / FILE).read_bytes().split(b"\n")


def read(root: Path) -> tuple[dict[str, str], list[str]]:
    """(key -> path, what is damaged)."""
    store = Store(root)
    return {found["key"]: found["path"] for found in store.documents()}, store.damaged


@given(
    st.dictionaries(st.sampled_from(["a", "a-4ranks", "b"]), st.integers(0, 2), min_size=1),
    st.dictionaries(st.sampled_from(["a", "a-4ranks", "c"]), st.integers(3, 5)),
    st.sets(st.sampled_from(["a", "b"])),
)
def test_what_is_published_comes_back_and_no_other_line_changes(
    first: dict[str, int], second: dict[str, int], gone: set[str]
) -> None:
    def made(of: dict[str, int]) -> dict[str, Stored]:
        told = (cell(name, provenance={**cell("x")["provenance"], "seed": n}) for name, n in of.items())
        return {one["key"]: one for one in told}

    dropped = {f"some-case/{name}" for name in gone - second.keys()}
    before = sheet.of(sheet.rewritten(None, made(first), ()))
    text = sheet.rewritten(before, made(second), dropped)
    wanted = {key: one for key, one in {**made(first), **made(second)}.items() if key not in dropped}
    assert bool(text) == bool(wanted)
    after = sheet.of(text)
    keys = after.keys if text else {}
    assert list(keys.values()) == sorted(wanted)
    for number, key in keys.items():
        assert same(expanded(after.document(number)), expanded(compacted(wanted[key])))
    lines = {key: after.lines[number - 1] for number, key in keys.items()}
    kept = {key: number for number, key in before.keys.items() if key not in dropped and key not in made(second)}
    assert all(before.lines[number - 1] == lines[key] for key, number in kept.items())
    assert not kept or after.lines[0] == before.lines[0]


def same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def test_a_cell_measured_again_is_one_changed_line_and_says_little_that_the_others_say(tmp_path: Path) -> None:
    before = write(tmp_path, cell("a"), cell("b"), cell("c"))
    after = write(tmp_path, cell("b", provenance={**cell("b")["provenance"], "started": 5.0, "git_commit": "new"}))
    assert [one == other for one, other in zip(before, after)] == [True, True, False, True, True]
    assert not [said for said in (b'"hardware"', b"git_commit", b'"stack":{') if said in before[1]]
    assert b'"git_commit":["new"]' in after[2]


def broken_line(lines: list[bytes]) -> list[bytes]:
    return [*lines[:2], lines[2][:-9], *lines[3:]]


DAMAGED = {
    "cut off": (broken_line, ["a", "c"], ":3: damaged"),
    "wrong in itself": (lambda lines: [*lines[:2], lines[2].replace(b'"arms"', b'"army"'), *lines[3:]],
                        ["a", "c"], ":3: damaged"),
    "not text": (lambda lines: [*lines[:2], b"\xff\xfe", *lines[3:]], ["a", "c"], ":3: damaged"),
    "a merge that was not done": (lambda lines: [*lines[:3], b"<<<<<<< HEAD", *lines[3:]],
                                  ["a", "b", "c"], ":4: damaged"),
    "twice": (lambda lines: [*lines[:3], lines[2], *lines[3:]], ["a", "b", "c"], "b stands in line 3 too"),
    "of another case": (lambda lines: [*lines[:2], lines[2].replace(b"some-case/b", b"other/b"), *lines[3:]],
                        ["a", "c"], ":3: damaged (its key is 'other/b'"),
    "of a newer schema": (
        lambda lines: [*lines[:2], lines[2].replace(b'"cell":{', b'"cell":{"schema":[99],'), *lines[3:]],
        ["a", "c"], ":3: schema 99: a newer repro-matrix wrote it"),
    "its first line gone": (lambda lines: lines[1:], [], ":1: damaged"),
    "its first line": (lambda lines: [b"{", *lines[1:]], [], ":1: damaged"),
    "a newer file": (lambda lines: [lines[0].replace(b'"published":2', b'"published":3'), *lines[1:]],
                     [], ":1: published 3: a newer repro-matrix wrote it"),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_line_is_named_and_disables_its_cell_only(tmp_path: Path, how: str) -> None:
    edit, left, told = DAMAGED[how]
    lines = write(tmp_path, cell("a"), cell("b"), cell("c"))
    (tmp_path / FILE).write_bytes(b"\n".join(edit(lines)))
    found, damaged = read(tmp_path)
    assert sorted(found) == [f"some-case/{name}" for name in left]
    assert len(damaged) == 1 and f"{tmp_path / FILE}" in damaged[0] and told in damaged[0], damaged
    for one in Store(tmp_path).documents(cases=["some-case"]):
        assert one["key"] in found


@pytest.mark.parametrize("how", ["not text", "twice", "its first line", "a newer file"])
def test_a_file_that_cannot_be_told_is_not_written_over(tmp_path: Path, how: str) -> None:
    lines = DAMAGED[how][0](write(tmp_path, cell("a"), cell("b"), cell("c")))
    (tmp_path / FILE).write_bytes(b"\n".join(lines))
    with pytest.raises(ResultsError, match="restore it first"):
        write(tmp_path, cell("d"))
    assert (tmp_path / FILE).read_bytes() == b"\n".join(lines)


def test_an_older_folder_is_read_and_a_cell_moves_when_it_is_published_again(tmp_path: Path) -> None:
    for name in ("a", "b"):
        at = tmp_path / f"{placed(cell(name))}.json"
        at.parent.mkdir(parents=True, exist_ok=True)
        write_json(at, compacted(cell(name)))
    assert sorted(read(tmp_path)[0]) == ["some-case/a", "some-case/b"]
    write(tmp_path, cell("a"))
    found, damaged = read(tmp_path)
    assert damaged == [] and found["some-case/a"] == f"{tmp_path / FILE}:2"
    assert found["some-case/b"] == str(tmp_path / f"{placed(cell('b'))}.json")
    published.write(tmp_path, {placed(cell("b")): cell("b")}, ())
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [Path(FILE).name]
    assert not (tmp_path / FILE.removesuffix(".jsonl")).exists(), "its folder is gone"


def test_a_document_is_named_so_that_it_can_be_opened_and_given_to_a_verb(tmp_path: Path) -> None:
    write(tmp_path, cell("a"), cell("b"))
    found, _ = read(tmp_path)
    at = place.read(found["some-case/b"])
    assert (at.file, at.line) == (str(tmp_path / FILE), 3) and str(at) == found["some-case/b"]
    assert (at.hardware, at.stack) == ("cpu", "torch2.13.0-tf5.23.0-abc")
    assert json.loads(Path(at.file).read_text().split("\n")[at.line - 1])["key"] == "some-case/b"
    assert [one.path for one in listed(Path(found["some-case/b"]))] == [found["some-case/b"]]
    (one,) = side(found["some-case/b"]).briefs
    assert one.key == "some-case/b" and len(side(at.file).briefs) == 2
    run = place.read("r/cpu/torch2.2/some-case/m.json")
    assert (run.hardware, run.stack, run.case, run.line) == ("cpu", "torch2.2", "some-case", None)


def test_json_lines_of_something_else_are_no_published_file(tmp_path: Path) -> None:
    (tmp_path / "nights.jsonl").write_text('{"night": "one"}\n')
    assert read(tmp_path) == ({}, [])


def test_all_that_is_published_is_a_file_a_stack_with_its_lines_in_order() -> None:
    files = sorted(BASELINE.rglob("*.json*"))
    assert files and {path.suffix for path in files} == {".jsonl"}
    for path in files:
        held = sheet.of(path.read_bytes())
        assert list(held.keys.values()) == sorted(set(held.keys.values())) and "" not in held.keys.values(), path
        stack = held.head()["shared"]["stack"]["label"]
        assert (path.parent.name, path.stem) == (held.head()["shared"]["hardware"]["profile"], stack)
        assert len(held.lines) == len(held.keys) + 2 and held.lines[-1] == b"", "an end of line, and no empty one"
