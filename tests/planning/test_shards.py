"""Parts of a run: disjoint, complete, about as long as each other, and put together only where they belong together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import document, observation, ok
from repro_matrix.cli import main as cli
from repro_matrix.config import selection as overrides
from repro_matrix.errors import ConfigError, ResultsError
from repro_matrix.planning.cells import Cell
from repro_matrix.planning.plan import parse_shard as parse
from repro_matrix.planning.plan import select_shard as select
from repro_matrix.results import runs
from repro_matrix.runner import session

CELLS = st.lists(st.integers(0, 40), unique=True, min_size=1, max_size=25).map(
    lambda numbers: [Cell(f"c{n}", "m", "ddp", (), "current", "cpu") for n in numbers]
)


@given(CELLS, st.data())
def test_parts_are_disjoint_complete_and_balanced(cells: list[Cell], data: Any) -> None:
    count = data.draw(st.integers(1, len(cells)))
    seconds = {cell: data.draw(st.sampled_from([0.1, 1.0, 2.0, 30.0])) for cell in cells}
    parts = [select(cells, (number, count), seconds) for number in range(1, count + 1)]
    assert sorted(c.case for part in parts for c in part) == sorted(c.case for c in cells)
    loads = [sum(seconds[cell] for cell in part) for part in parts]
    assert max(loads) - min(loads) <= max(seconds.values()) + 1e-9
    shuffled = data.draw(st.permutations(cells))
    for number, part in enumerate(parts, 1):
        assert set(select(shuffled, (number, count), seconds)) == set(part), "whoever lists them otherwise agrees"


@pytest.mark.parametrize("text", ["0/8", "9/8", "2", "2/", "a/b", "1/0", "-1/2", "1.5/2", ""])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="PART/PARTS"):
        parse(text)
    assert parse("2/8") == (2, 8) and parse(None) is None


def test_more_parts_than_cells_are_refused() -> None:
    cell = Cell("c", "m", "ddp", (), "current", "cpu")
    with pytest.raises(ConfigError, match="only 1 cells"):
        select([cell], (1, 2), {cell: 1.0})


def test_a_session_has_its_part_of_the_selection() -> None:
    texts = ["case=fsdp-generate,fsdp-uniform-dtype", "hardware=cpu"]
    whole = session.prepare(texts, build_stacks=False)
    parts = [session.prepare([*texts, f"shard={n}/2"], build_stacks=False) for n in (1, 2)]
    keys = [[plan.cell.key for plan in each.plans] for each in (whole, *parts)]
    assert sorted(keys[0]) == sorted(keys[1] + keys[2]) and keys[1] and keys[2]
    for number, each in enumerate(parts, 1):
        assert each.shard and (each.shard.shard, each.shard.selection) == (number, tuple(sorted(texts)))
        assert each.shard.repeat == {plan.cell.case: 1 for plan in each.plans}
    assert whole.shard is None
    nightly = session.prepare([*texts, "+matrix=nightly", "shard=1/2"], build_stacks=False).shard
    assert nightly and set(nightly.repeat.values()) == {3}, "as the named matrix says"
    assert nightly.selection == ("+matrix=nightly", *sorted(texts))


def test_variants_that_are_right_for_the_selection_are_right_for_its_shards() -> None:
    """The shard whose cases have none of them ended with "unknown variant": half of the run could not be made."""
    texts = ["case=train-step,ddp-ready-once", "model=qwen1.5-0.5b", "strategy=ddp", "hardware=cpu"]

    def variants(*more: str) -> dict[str, list[str]]:
        found = session.prepare([*texts, *more], build_stacks=False).plans
        return {plan.cell.case: [variant.variant for variant in plan.variants] for plan in found}

    asked = "variants=[unfixed,no-check*]"
    parts = [variants(asked, f"shard={number}/2") for number in (1, 2)]
    assert parts[0] | parts[1] == variants(asked) == {
        "train-step": ["control"], "ddp-ready-once": ["unfixed", "no-checkpointing"]
    } and all(len(part) == 1 for part in parts)  # fmt: skip
    for number in (1, 2):
        with pytest.raises(ConfigError, match="unknown variant 'unfxed'"):
            variants("variants=[unfxed]", f"shard={number}/2")


def made(root: Path, number: int, cells: list[str], complete: bool = True, **changed: Any) -> Path:
    """A part's results, with documents of its cells."""
    folder = root / f"part-{number}"
    listed = [Cell(name, "m", "ddp", (), "current", "cpu") for name in cells]
    versions = {"torch": changed.get("torch", "2.13.0"), "pip": "26.0"}
    selection = session.selected_by(overrides.parse([*changed.get("texts", ["case=c*"]), "jobs=3"]))
    repeat = dict.fromkeys(cells, changed.get("repeat", 1))
    names = tuple((cell.hardware, cell.stack, cell.key) for cell in listed)
    said_commit, dirty = changed.get("commit", "c0ffee"), changed.get("dirty", False)
    stacks = {"current": versions}
    runs.write_manifest(
        folder,
        runs.ShardManifest(number, changed.get("of", 2), tuple(selection), repeat, names, said_commit, dirty, stacks),
    )
    for cell in listed[: None if complete else -1]:
        wrote = document({"unfixed": [("passed", observation(ok(0), ok(1)))]}, {}, case=cell.case, cell_id=cell.key)
        wrote["provenance"]["git_commit"] = said_commit
        wrote["stack"]["versions"] = {"torch": versions["torch"]}  # the relevant ones, as a run writes them
        path = folder / "cpu" / "torch2.13.0" / f"{cell.key}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(wrote))
    return folder


def merge(*folders: Path, to: Path) -> int:
    return cli.main(["merge", *map(str, folders), "--to", str(to)])


def test_all_parts_are_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = made(tmp_path, 1, ["a", "b"]), made(tmp_path, 2, ["c"])
    assert merge(one, other, to=tmp_path / "all") == 0
    found = {path.parent.name for path in (tmp_path / "all").rglob("*.json")}
    assert found == {"a", "b", "c"} and "every shard is there and whole" in capsys.readouterr().out
    assert merge(one, other, to=tmp_path / "all") == 2, "what is there is not written over"


def test_a_missing_part_and_a_missing_cell_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = made(tmp_path, 1, ["a", "b"], complete=False)
    (one / "cpu" / "torch2.13.0" / "a" / "damaged.json").write_text("{")
    assert merge(one, to=tmp_path / "all") == 3
    said = capsys.readouterr().out
    assert "missing: shard 2 of 2; it is made by: repro matrix 'case=c*' shard=2/2" in said
    assert "incomplete: shard 1/2 lacks 1 cell: cpu current b/m-ddp" in said


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda one: one["provenance"].update(git_commit="older"), "measured at another commit: older"),
        (lambda one: one["provenance"].update(git_dirty=True), "measured at another commit: c0ffee with changed files"),
        (lambda one: one["stack"]["versions"].update(torch="2.12.0"), "measured with other versions"),
        (lambda one: one["variants"]["unfixed"].update(attempts=[]), "not complete"),
        (lambda one: one.update(complete=False), "not complete"),
    ],
)
def test_what_an_earlier_run_left_in_the_folder_is_not_the_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: Any, told: str
) -> None:
    one, other = made(tmp_path, 1, ["a"]), made(tmp_path, 2, ["b"])
    [path] = other.rglob("*.json")
    wrote = json.loads(path.read_text(encoding="utf-8"))
    edit(wrote)
    path.write_text(json.dumps(wrote), encoding="utf-8")
    assert merge(one, other, to=tmp_path / "all") == 3
    assert f"incomplete: shard 2/2 lacks 1 cell: cpu current b/m-ddp ({told}" in capsys.readouterr().out


def test_a_part_that_was_asked_for_three_attempts_is_not_whole_with_one(tmp_path: Path) -> None:
    asked = {"texts": ["case=c*"], "repeat": 3}
    assert merge(made(tmp_path, 1, ["a"], **asked), made(tmp_path, 2, ["b"], **asked), to=tmp_path / "all") == 3


def test_a_merge_that_cannot_be_written_leaves_nothing_and_a_folder_is_taken_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the documents had stayed, were taken for the run, and kept the next merge from being made there."""
    one, other, to = made(tmp_path, 1, ["a"]), made(tmp_path, 2, ["b"]), tmp_path / "all"
    before = sorted(tmp_path.iterdir())

    def full(source: Path, target: Path) -> None:
        if other in source.parents:
            raise OSError(28, "No space left on device")
        Path(target).write_bytes(Path(source).read_bytes())

    with monkeypatch.context() as small:
        small.setattr("shutil.copyfile", full)
        assert merge(one, other, to=to) == 2
        assert f"{to}: cannot be written: No space left" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
    for folders, target, told in (
        ((one, one), to, "is given twice"),
        ((one, tmp_path / "x" / ".." / "part-1"), to, "is given twice"),
        ((one, other), one / "all", "lies in a shard's own folder"),
    ):
        assert merge(*folders, to=target) == 2 and told in capsys.readouterr().err
    to.mkdir()
    assert merge(one, other, to=to) == 0 and len(list(to.rglob("*.json"))) == 2


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"commit": "other"}, "commit is c0ffee in .* and other in "),
        ({"torch": "2.12.0"}, "stack current: torch is 2.13.0 in .* and 2.12.0 in "),
        ({"texts": ["case=d*"]}, r"selection is .*case=c\*.* in .* and .*case=d\*.* in "),
        ({"dirty": True}, "changed is False in .* and True in "),
        ({"of": 3}, "of is 2 in .* and 3 in "),
    ],
)
def test_parts_of_different_runs_are_refused_by_name(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    one, other = made(tmp_path, 1, ["a"]), made(tmp_path, 2, ["b"], **changed)
    with pytest.raises(ResultsError, match=told):
        runs.missing_shards({str(folder): runs.read_manifest(folder) for folder in (one, other)})


def test_a_part_given_twice_or_a_cell_in_two_parts_is_refused(tmp_path: Path) -> None:
    one, same = made(tmp_path / "x", 1, ["a"]), made(tmp_path / "y", 1, ["b"])
    with pytest.raises(ResultsError, match="shard 1/2 is in two folders"):
        runs.missing_shards({"x": runs.read_manifest(one), "y": runs.read_manifest(same)})
    with pytest.raises(ResultsError, match=r"cell .* is in two folders"):
        runs.missing_shards({"x": runs.read_manifest(one), "y": runs.read_manifest(made(tmp_path / "z", 2, ["a"]))})


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 9}', '{"schema": 1, "shard": "x"}'])
def test_what_holds_no_part_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ResultsError, match="not the results of one shard"):
        runs.read_manifest(tmp_path)
    (tmp_path / f"shard-1-of-2.manifest").write_text(text)
    with pytest.raises(ResultsError, match=r"shard-1-of-2\.manifest: damaged"):
        runs.read_manifest(tmp_path)
