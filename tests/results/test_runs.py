"""A folder for each run, ``latest``, what --resume continues, and which runs are kept."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.cli import main as cli
from repro_matrix.config.settings import RunSettings
from repro_matrix.results import runs
from repro_matrix.results.store import Store
from repro_matrix.runner import run as workspace
from repro_matrix.runner.engine import RunTotals


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(runs, "scratch", lambda: tmp_path / "scratch")
    return tmp_path / "scratch"


def run(root: Path, *texts: str, state: str = runs.ENDED, cell: str | None = "cell") -> Path:
    folder = runs.create_run(root, texts)
    if cell:
        (folder / "cpu" / "stack" / "case").mkdir(parents=True)
        (folder / "cpu" / "stack" / "case" / f"{cell}.json").write_text("{}")
    runs.note(folder, texts, state)
    return folder


@given(count=st.integers(1, 8), kept=st.integers(1, 5), used=st.sets(st.integers(0, 7)))
def test_prune_keeps_the_last_runs_and_those_in_use(
    tmp_path_factory: pytest.TempPathFactory, count: int, kept: int, used: set[int]
) -> None:
    root = tmp_path_factory.mktemp("runs")
    made, stores = [run(root) for _ in range(count)], []
    for number in used & set(range(count)):
        stores.append(Store(made[number]))
        stores[-1].open()
    runs.prune_runs(root, kept)
    gone = [each for each in made if not each.exists()]
    assert gone == [
        each for number, each in enumerate(made[: max(0, count - kept)]) if number not in used
    ]
    assert [each.folder for each in runs.list_runs(root)] == [
        each for each in made if each not in gone
    ]
    for store in stores:
        store.close()


def test_resumed_continues_the_last_interrupted_selection(
    scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["matrix", "--resume"]) == 2
    run(scratch, "case=a")
    assert cli.main(["matrix", "--resume"]) == 2
    assert "holds no interrupted run" in capsys.readouterr().err
    run(scratch, "case=a", state=runs.UNFINISHED)
    wanted = run(scratch, "case=b", "jobs=2", state=runs.UNFINISHED)
    assert workspace.resumed([]) == (["case=b", "jobs=2"], wanted)
    assert workspace.resumed(["jobs=5"]) == (
        ["case=b", "jobs=5"],
        wanted,
    )  # how it is measured, not what
    assert capsys.readouterr().err.endswith(f"continuing {wanted}: case=b jobs=2\n")
    assert workspace.resumed(["case=b", "jobs=1"])[1] == wanted
    assert workspace.resumed(["case=x"]) == (
        ["case=x"],
        None,
    ), "a job that may run again resumes its first run, too"
    assert workspace.resumed(["case=b", f"results='{scratch}'"])[1] is None, (
        "a folder that was named is its own"
    )
    store = Store(wanted)
    store.open()
    assert workspace.resumed([])[1] != wanted, "in use"
    store.close()


def measuring(settings: RunSettings, texts: list[str], continued: Path | None = None) -> Any:
    prepared: Any = Namespace(settings=settings, catalogue=Namespace(cases={}), stacks={}, plans=[])
    return workspace.folder(prepared, texts, continued)


def test_folder_records_how_the_run_ended(scratch: Path, tmp_path: Path) -> None:
    named, before = tmp_path / "mine", run(scratch, "case=a")
    run(scratch, "case=b")
    for results, continued in ((str(named), None), (None, before), (None, None)):
        settings = RunSettings(results=results)
        with measuring(settings, ["case=a"], continued) as finish:
            used = Path(str(settings.results))
            found = runs.read_run(used)
            assert (
                used == (named if results else continued or used)
                and found
                and found.state == runs.UNFINISHED
            )
            assert (runs.last_run(scratch).resolve() == used.resolve()) is (results is None), (
                "it is the last one now"
            )
            finish(RunTotals(interrupted=used == named))
        found = runs.read_run(used)
        assert found and found.state == (runs.UNFINISHED if used == named else runs.ENDED)
    assert len(runs.list_runs(scratch)) == 3
    for results, continued in ((str(named), None), (None, before), (None, None)):
        with (
            pytest.raises(ZeroDivisionError),
            measuring(RunSettings(results=results), [], continued),
        ):
            raise ZeroDivisionError
        assert named.is_dir() and before.is_dir() and len(runs.list_runs(scratch)) == 3, (
            "only a new folder is removed"
        )


def test_folder_with_results_option_stores_its_selection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, absent = RunSettings(results=str(tmp_path / "mine")), f"results={tmp_path / 'absent'}"
    cell: Any = Namespace(hardware="cpu", stack="current", key="a/m-ddp")
    with measuring(settings, ["case=a", f"results={settings.results}"]) as finish:
        finish(RunTotals(interrupted=True, not_started=[cell]))
    found = runs.read_run(tmp_path / "mine")
    assert found and found.left == ("cpu current a/m-ddp",), "what the time limit left"
    assert workspace.resumed([f"results={settings.results}"]) == (
        ["case=a", f"results={settings.results}"],
        None,
    )
    assert "holds no results" not in capsys.readouterr().err
    assert workspace.resumed([absent]) == ([absent], None)
    assert "holds no results" in capsys.readouterr().err


@pytest.mark.ranks
@pytest.mark.xdist_group("stack")
def test_second_run_overwrites_nothing(
    scratch: Path, capsys: pytest.CaptureFixture[str], runs_are_warm: None
) -> None:
    words = ["ddp-unfinished-reduction", "variants=[unfixed]", "hardware=cpu"]
    found = []
    for _ in range(2):
        assert cli.main(["run", *words]) == 0
        capsys.readouterr()
        found.append(runs.last_run(scratch))
    assert found[0] != found[1]
    documents = [
        sorted(path.relative_to(folder) for path in folder.rglob("*.json")) for folder in found
    ]
    assert documents[0] == documents[1] and len(documents[0]) == 1
    assert cli.main(["diff", str(found[0]), str(scratch)]) == 0
    capsys.readouterr()
    assert cli.main(["run", *words, "--resume"]) == 0
    assert "1 attempt of an earlier run used again, 0 launched" in capsys.readouterr().out
    assert (
        runs.last_run(scratch) == found[1]
        and [each.state for each in runs.list_runs(scratch)] == [runs.ENDED] * 2
    )
