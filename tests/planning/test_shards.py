"""Parts of a run: disjoint, complete, about as long as each other, and put together only where they
belong together."""

from __future__ import annotations

import json
import shutil
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
from repro_matrix.planning.plan import parse_shard, select_shard
from repro_matrix.results import runs
from repro_matrix.runner import session

CELLS = st.lists(st.integers(0, 40), unique=True, min_size=1, max_size=25).map(
    lambda numbers: [Cell(f"c{n}", "m", "ddp", (), "current", "cpu") for n in numbers]
)


@given(CELLS, st.data())
def test_parts_are_disjoint_complete_and_balanced(cells: list[Cell], data: Any) -> None:
    count = data.draw(st.integers(1, len(cells)))
    seconds = {cell: data.draw(st.sampled_from([0.1, 1.0, 2.0, 30.0])) for cell in cells}
    parts = [select_shard(cells, (number, count), seconds) for number in range(1, count + 1)]
    assert sorted(c.case for part in parts for c in part) == sorted(c.case for c in cells)
    loads = [sum(seconds[cell] for cell in part) for part in parts]
    assert max(loads) - min(loads) <= max(seconds.values()) + 1e-9
    shuffled = data.draw(st.permutations(cells))
    for number, part in enumerate(parts, 1):
        assert set(select_shard(shuffled, (number, count), seconds)) == set(part), (
            "another order gives the same shards"
        )


@pytest.mark.parametrize("text", ["0/8", "9/8", "2", "2/", "a/b", "1/0", "-1/2", "1.5/2", ""])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="PART/PARTS"):
        parse_shard(text)


def test_more_parts_than_cells_are_refused() -> None:
    cell = Cell("c", "m", "ddp", (), "current", "cpu")
    with pytest.raises(ConfigError, match="only 1 cells"):
        select_shard([cell], parse_shard("1/2") or (1, 1), {cell: 1.0})


def test_session_has_its_part_of_the_selection() -> None:
    texts = ["case=fsdp-generate,fsdp-uniform-dtype", "hardware=cpu"]
    whole = session.prepare(texts, build_stacks=False)
    parts = [session.prepare([*texts, f"shard={n}/2"], build_stacks=False) for n in (1, 2)]
    keys = [[plan.cell.key for plan in each.plans] for each in (whole, *parts)]
    assert (
        sorted(keys[0]) == sorted(keys[1] + keys[2]) and keys[1] and keys[2] and whole.shard is None
    )
    for number, each in enumerate(parts, 1):
        assert each.shard and (each.shard.shard, each.shard.selection) == (
            number,
            tuple(sorted(texts)),
        )
    nightly = session.prepare([*texts, "+matrix=nightly", "shard=1/2"], build_stacks=False).shard
    assert nightly and set(nightly.repeat.values()) == {3}, "as the named matrix says"
    assert nightly.selection == ("+matrix=nightly", *sorted(texts))


def test_variants_that_are_right_for_the_selection_are_right_for_its_shards() -> None:
    """The shard whose cases have none of them ended with "unknown variant": half of the run could
    not be made."""
    texts = ["case=train-step,ddp-ready-once", "model=qwen1.5-0.5b", "strategy=ddp", "hardware=cpu"]

    def variants(*more: str) -> dict[str, list[str]]:
        found = session.prepare([*texts, *more], build_stacks=False).plans
        return {plan.cell.case: [variant.variant for variant in plan.variants] for plan in found}

    one, two = (variants("variants=[unfixed,no-check*]", f"shard={number}/2") for number in (1, 2))
    assert one | two == {
        "train-step": ["control"],
        "ddp-ready-once": ["unfixed", "no-checkpointing"],
    }
    assert len(one) == len(two) == 1
    with pytest.raises(ConfigError, match="unknown variant 'unfxed'"):
        variants("variants=[unfxed]", "shard=1/2")


USUAL = {
    "texts": ["case=c*"],
    "repeat": 1,
    "of": 2,
    "commit": "c0ffee",
    "dirty": False,
    "torch": "2.13.0",
}


def make_shard(root: Path, number: int, names: list[str], **changed: Any) -> Path:
    """Write a shard's results: its manifest, and a document of each of its cells but the
    ``lacking`` ones."""
    values = USUAL | changed
    folder, commit, versions = (
        root / f"part-{number}",
        values["commit"],
        {"torch": values["torch"], "pip": "26.0"},
    )
    cells = [Cell(name, "m", "ddp", (), "current", "cpu") for name in names]
    manifest = runs.ShardManifest(
        number,
        values["of"],
        tuple(session.selected_by(overrides.parse_overrides([*values["texts"], "jobs=3"]))),
        dict.fromkeys(names, values["repeat"]),
        tuple((cell.hardware, cell.stack, cell.key) for cell in cells),
        commit,
        values["dirty"],
        {"current": versions},
    )
    runs.write_manifest(folder, manifest)
    for cell in cells:
        if cell.case in values.get("lacking", ()):
            continue
        stored = document(
            {"unfixed": [("passed", observation(ok(0), ok(1)))]},
            {},
            case=cell.case,
            cell_id=cell.key,
        )
        stored["provenance"]["git_commit"] = commit
        stored["stack"]["versions"] = {
            "torch": versions["torch"]
        }  # the relevant ones, as a run writes them
        path = folder / "cpu" / "torch2.13.0" / f"{cell.key}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(stored))
    return folder


def merge(*folders: Path, to: Path) -> int:
    return cli.main(["merge", *map(str, folders), "--to", str(to)])


def test_merge_of_all_parts_is_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = make_shard(tmp_path, 1, ["a", "b"]), make_shard(tmp_path, 2, ["c"])
    assert merge(one, other, to=tmp_path / "all") == 0
    found = {path.parent.name for path in (tmp_path / "all").rglob("*.json")}
    assert found == {"a", "b", "c"} and "every shard is complete" in capsys.readouterr().out
    assert merge(one, other, to=tmp_path / "all") == 2, "an existing folder is not overwritten"


def test_merge_names_a_missing_part_and_a_missing_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = make_shard(tmp_path, 1, ["a", "b"], lacking=["b"])
    (one / "cpu" / "torch2.13.0" / "a" / "damaged.json").write_text("{")
    assert merge(one, to=tmp_path / "all") == 3
    out = capsys.readouterr().out
    assert "missing: shard 2 of 2; to measure it: repro matrix 'case=c*' shard=2/2" in out
    assert "incomplete: shard 1/2 lacks 1 cell: cpu current b/m-ddp" in out


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (
            lambda one: one["provenance"].update(git_commit="older"),
            "measured at another commit: older",
        ),
        (
            lambda one: one["provenance"].update(git_dirty=True),
            "measured at another commit: c0ffee with changed files",
        ),
        (
            lambda one: one["stack"]["versions"].update(torch="2.12.0"),
            "measured with other versions",
        ),
        (lambda one: one["variants"]["unfixed"].update(attempts=[]), "not complete"),
        (lambda one: one.update(complete=False), "not complete"),
    ],
)
def test_merge_leaves_out_what_an_earlier_run_left_in_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: Any, reason: str
) -> None:
    one, other = make_shard(tmp_path, 1, ["a"]), make_shard(tmp_path, 2, ["b"])
    [path] = other.rglob("*.json")
    stored = json.loads(path.read_text(encoding="utf-8"))
    edit(stored)
    path.write_text(json.dumps(stored), encoding="utf-8")
    assert merge(one, other, to=tmp_path / "all") == 3
    assert (
        f"incomplete: shard 2/2 lacks 1 cell: cpu current b/m-ddp ({reason}"
        in capsys.readouterr().out
    )


def test_merge_with_fewer_attempts_than_requested_is_incomplete(tmp_path: Path) -> None:
    parts = [
        make_shard(tmp_path, number, [name], repeat=3) for number, name in ((1, "a"), (2, "b"))
    ]
    assert merge(*parts, to=tmp_path / "all") == 3
    assert cli.main(["report", str(tmp_path / "all"), "--format", "json"]) == 3, (
        "the merged folder looks complete"
    )


def test_merge_that_cannot_be_written_leaves_nothing_and_a_folder_is_taken_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the documents had stayed, were taken for the run, and kept the next merge from being
    made there."""
    one, other, to = (
        make_shard(tmp_path, 1, ["a"]),
        make_shard(tmp_path, 2, ["b"]),
        tmp_path / "all",
    )
    before, copy = sorted(tmp_path.iterdir()), shutil.copyfile

    def fill(source: Path, target: Path) -> None:
        if other in source.parents:
            raise OSError(28, "No space left on device")
        copy(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", fill)
        assert merge(one, other, to=to) == 2
        assert f"{to}: cannot be written: No space left" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
    twice = ((one, one), (one, tmp_path / "x" / ".." / "part-1"))
    for folders, target, message in (
        *((each, to, "is given twice") for each in twice),
        ((one, other), one / "all", "lies in a shard's own folder"),
    ):
        assert merge(*folders, to=target) == 2 and message in capsys.readouterr().err
    to.mkdir()
    assert merge(one, other, to=to) == 0 and len(list(to.rglob("*.json"))) == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"commit": "other"}, "commit is c0ffee in .* and other in "),
        ({"torch": "2.12.0"}, "stack current: torch is 2.13.0 in .* and 2.12.0 in "),
        ({"texts": ["case=d*"]}, r"selection is .*case=c\*.* in .* and .*case=d\*.* in "),
        ({"dirty": True}, "changed is False in .* and True in "),
        ({"of": 3}, "of is 2 in .* and 3 in "),
        ({"number": 1}, "shard 1/2 is in two folders"),
        ({"names": ["a"]}, r"cell .* is in two folders"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused_by_name(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    folders = [
        make_shard(tmp_path / "x", 1, ["a"]),
        make_shard(tmp_path / "y", **{"number": 2, "names": ["b"], **changed}),
    ]
    with pytest.raises(ResultsError, match=message):
        runs.missing_shards({str(folder): runs.read_manifest(folder) for folder in folders})


@pytest.mark.parametrize("text", [None, "{", "[]", '{"schema": 9}', '{"schema": 1, "shard": "x"}'])
def test_what_holds_no_part_is_named(tmp_path: Path, text: str | None) -> None:
    if text:
        (tmp_path / "shard-1-of-2.manifest").write_text(text)
    with pytest.raises(
        ResultsError,
        match=r"shard-1-of-2\.manifest: damaged" if text else "not the results of one shard",
    ):
        runs.read_manifest(tmp_path)
