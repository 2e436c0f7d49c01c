"""The published store: a line a cell, a file a stack; a damaged line is one cell's damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import document, failed, observation, ok
from repro_matrix.errors import ResultsError
from repro_matrix.paths import BASELINE
from repro_matrix.records import paths as place
from repro_matrix.results import published, said, sheet
from repro_matrix.results.accept import place as placed
from repro_matrix.results.compact import compacted, expanded
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
    assert [n for n, (one, other) in enumerate(zip(before, after)) if one != other] == [2] and len(before) == len(after)
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
    "a newer file": (lambda lines: [lines[0].replace(b'"published":3', b'"published":4'), *lines[1:]],
                     [], ":1: published 4: a newer repro-matrix wrote it"),
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
    run = place.read("r/cpu/torch2.2/some-case/m.json")
    assert (run.hardware, run.stack, run.case, run.line) == ("cpu", "torch2.2", "some-case", None)


def test_a_file_of_an_older_version_is_read_and_written_anew_when_something_in_it_is_published(tmp_path: Path) -> None:
    at = tmp_path / FILE
    write(tmp_path, cell("a"), cell("b"), cell("c"))
    before = {one["key"]: {**one, "path": ""} for one in Store(tmp_path).documents()}
    held = sheet.of(at.read_bytes())
    older = {key: value for key, value in held.head().items() if key != "attempts"} | {"published": 2}
    lines = [json.dumps(older)]
    for number, key in held.keys.items():
        told = said.whole(held.lines[number - 1], held.said, {})
        made = {**held.document(number), "path": ""}
        for name, arm in made["arms"].items():  # as version 2 had it: against what the cell's own line says
            arm["settings"] = json.loads(told)["cell"]["arms"][0][name]["settings"]
            for attempt in arm["attempts"][:1] if "like" not in arm else ():
                own, ranks = attempt["observation"]["attempt"], attempt["observation"]["ranks"]
                if "versions" in own:
                    own["versions"] = []
                for each in ranks[:1]:
                    each["record"].update({name: [] for name in sheet.OF_RECORD if name in each["record"]})
        cells = {name: [value] for name, value in made.items() if name not in ("key", "path", *older["shared"])}
        lines.append(json.dumps({"key": key, "cell": {**cells, "provenance": [made["provenance"]]}}))
    at.write_text("\n".join([*lines, ""]))
    read_again = {one["key"]: {**one, "path": ""} for one in Store(tmp_path).documents()}
    assert same(read_again, before) and b'"said"' not in at.read_bytes()
    published.write(tmp_path, {}, ["cpu/torch2.13.0-tf5.23.0-abc/some-case/c"])
    written = at.read_bytes()
    assert written.startswith(b'{"published":3') and b'{"said":"' in written
    assert same({one["key"]: {**one, "path": ""} for one in Store(tmp_path).documents()}, {
        key: one for key, one in before.items() if key != "some-case/c"
    })  # fmt: skip


def logged(name: str, log: str) -> Stored:
    seen = observation({**failed(0), "log_tail": log})
    return {**cell(name), "arms": document({"broken": [("fires", seen)] * 3})["arms"]}


def test_what_is_new_is_said_at_the_end_and_what_nobody_names_goes(tmp_path: Path) -> None:
    long, other = "the first log " * 9, "a log of another kind " * 9
    before = write(tmp_path, logged("a", long), logged("b", long))
    assert b"\n".join(before).count(long.encode()) == 1 and long.encode() not in before[1] + before[2]
    after = write(tmp_path, logged("c", long), logged("d", other), logged("e", other))
    assert set(before) <= set(after) and b"\n".join(after).count(other.encode()) == 1
    assert b"\n".join(after).count(long.encode()) == 1, "what was said before is named"
    published.write(tmp_path, {}, [f"cpu/torch2.13.0-tf5.23.0-abc/some-case/{name}" for name in "cde"])
    assert (tmp_path / FILE).read_bytes().split(b"\n") == before


def test_what_no_line_says_any_more_costs_the_cells_that_name_it(tmp_path: Path) -> None:
    logs = {name: f"a log of {name} " * 9 for name in "ab"}
    lines = write(tmp_path, *(logged(f"{name}{number}", log) for name, log in logs.items() for number in (1, 2)))
    (said_it,) = (line for line in lines if logs["a"].encode() in line)
    edited = said_it.replace(b"a log of a a log", b"a log of b a log")
    assert edited != said_it
    for left in (b"", said_it[:-1], said_it[:-2], b"<<<<<<<" + said_it, edited):
        (tmp_path / FILE).write_bytes(b"\n".join(left if line == said_it else line for line in lines))
        found, damaged = read(tmp_path)
        assert sorted(found) == ["some-case/b1", "some-case/b2"] and len(damaged) in (2, 3), damaged
        assert all("damaged" in one for one in damaged)
        with pytest.raises(ResultsError, match="restore it first"):
            write(tmp_path, cell("new"))


@given(
    st.lists(
        st.recursive(
            st.integers(0, 2) | st.sampled_from(["x" * 90, "see", '{"see":"abc"}', "abc123"]),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["see", "said", "b"]), inner, max_size=2)
            ),
        ),
        max_size=4,
    ),
    st.integers(0, 4),
)
def test_what_is_said_apart_comes_back(values: list[Any], first: int) -> None:
    texts, apart = said.told(values[:first], {})
    more, new = said.told(values[first:], apart)
    assert not apart.keys() & new.keys()
    every = apart | new
    back = [json.loads(said.whole(text, every, {})) for text in texts + more]
    assert same(back, values)
    for name, text in every.items():
        assert said.in_line(said.line(name, text)) == (name, text)
    assert said.needed(texts, apart).keys() == apart.keys(), "what is said is named"
    long = [text for text in texts if text.count(b"x" * 90) > 1]
    assert not long, "what stands twice is said once"


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
        cells, apart = held.lines[1 : len(held.keys) + 1], held.lines[len(held.keys) + 1 : -1]
        assert len(apart) == len(held.said) and held.lines[-1] == b"", "an end of line, and no empty one"
        assert held.head()["published"] == sheet.VERSION
        assert [said.in_line(line) for line in apart] == list(said.needed(cells, held.said).items()), path
