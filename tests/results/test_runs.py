"""A folder for each run, ``latest``, what --resume goes on with, which runs are kept, and who reads which."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.cli import main as cli
from repro_matrix.config.settings import RunSettings
from repro_matrix.errors import ConfigError, MeasureError
from repro_matrix.results import runs
from repro_matrix.results.store import Store
from repro_matrix.runner import workspace as going_on
from repro_matrix.runner.engine import Summary


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(runs, "scratch", lambda: tmp_path / "scratch")
    return tmp_path / "scratch"


def run(root: Path, *texts: str, state: str = runs.ENDED, cell: str | None = "cell") -> Path:
    folder = runs.begin(root, texts)
    if cell:
        (folder / "cpu" / "stack" / "case").mkdir(parents=True)
        (folder / "cpu" / "stack" / "case" / f"{cell}.json").write_text("{}")
    runs.note(folder, texts, state)
    return folder


def test_begin_creates_a_folder_and_latest_points_at_it(tmp_path: Path) -> None:
    first, second = run(tmp_path, "case=a"), run(tmp_path, "case=b")
    assert first != second and first.is_dir()
    assert [each.folder for each in runs.listed(tmp_path)] == [first, second]
    assert runs.of(tmp_path).resolve() == second.resolve() == (tmp_path / "latest").resolve()
    runs.point(first)  # gone on with
    assert runs.of(tmp_path).resolve() == first.resolve()
    (tmp_path / "latest").unlink()  # a file system without links
    assert runs.of(tmp_path) == second
    assert runs.of(first) == first  # a run stands for itself, and so does any other folder
    assert runs.of(tmp_path / "nowhere") == tmp_path / "nowhere"


def test_of_ignores_latest_without_a_run(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "latest").symlink_to("other")
    assert runs.of(tmp_path) == tmp_path


@given(count=st.integers(1, 8), kept=st.integers(1, 5), used=st.sets(st.integers(0, 7)))
def test_prune_keeps_the_last_runs_and_those_in_use(
    tmp_path_factory: pytest.TempPathFactory, count: int, kept: int, used: set[int]
) -> None:
    root = tmp_path_factory.mktemp("runs")
    made, stores = [run(root) for _ in range(count)], []
    for number in used & set(range(count)):
        stores.append(Store(made[number]))
        stores[-1].open()
    runs.prune(root, kept)
    gone = [each for each in made if not each.exists()]
    assert gone == [each for number, each in enumerate(made[: max(0, count - kept)]) if number not in used]
    assert [each.folder for each in runs.listed(root)] == [each for each in made if each not in gone]
    for store in stores:
        store.close()


def test_resumed_continues_the_last_interrupted_selection(scratch: Path) -> None:
    run(scratch, "case=a", state=runs.UNFINISHED)
    wanted = run(scratch, "case=b", "repeat=2", state=runs.UNFINISHED)
    run(scratch, "case=c")
    assert going_on.resumed([]) == (["case=b", "repeat=2"], wanted)
    assert going_on.resumed(["jobs=1"]) == (["case=b", "repeat=2", "jobs=1"], wanted)  # how, not what
    assert going_on.resumed(["case=a"])[1] != wanted  # its own
    assert going_on.resumed(["case=x"]) == (["case=x"], None), "a job that may run again resumes its first run, too"


def test_resumed_ignores_a_run_in_use(scratch: Path) -> None:
    store = Store(runs.begin(scratch, ["case=a"]))
    store.open()
    with pytest.raises(ConfigError, match="no interrupted run"):
        going_on.resumed([])
    store.close()
    assert going_on.resumed([])[0] == ["case=a"]


def test_resume_without_an_interrupted_run_is_an_error(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["matrix", "--resume"]) == 2
    run(scratch, "case=a")
    assert cli.main(["matrix", "--resume"]) == 2
    assert "holds no interrupted run" in capsys.readouterr().err


def test_folder_with_results_option_stores_its_selection(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = RunSettings(results=str(tmp_path / "mine"))
    cell: Any = Namespace(hardware="cpu", stack="current", key="a/m-ddp")
    prepared: Any = Namespace(settings=settings, catalogue=Namespace(cases={}))
    with going_on.folder(prepared, ["case=a", f"results={settings.results}"]) as finish:
        finish(Summary(interrupted=True, not_started=[cell]))
    said = runs.read(tmp_path / "mine")
    assert said and said.left == ("cpu current a/m-ddp",), "what the time limit left"
    assert going_on.resumed([f"results={settings.results}"]) == (["case=a", f"results={settings.results}"], None)
    assert "holds no results" not in capsys.readouterr().err
    absent = f"results={tmp_path / 'absent'}"
    assert going_on.resumed([absent]) == ([absent], None)
    assert "holds no results" in capsys.readouterr().err


def test_resumed_new_overrides_replace_stored_ones(scratch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = run(scratch, "case=b", "jobs=2", state=runs.UNFINISHED)
    assert going_on.resumed(["jobs=5"]) == (["case=b", "jobs=5"], wanted)
    assert capsys.readouterr().err == f"continuing {wanted}: case=b jobs=2\n"
    every = run(scratch, state=runs.UNFINISHED)
    assert going_on.resumed([]) == ([], every) and capsys.readouterr().err.endswith(": everything\n")
    alike = [run(scratch, "case=c", state=state) for state in (runs.ENDED, runs.UNFINISHED)]
    run(scratch, "case=d")
    assert going_on.resumed(["case=c", "jobs=1"]) == (["case=c", "jobs=1"], alike[1]), "the last of that selection"
    assert going_on.resumed(["case=c", f"results='{scratch}'"])[1] is None, "a folder that was named is its own"


def test_folder_records_how_the_run_ended(scratch: Path, tmp_path: Path) -> None:
    def state(folder: Path) -> str:
        found = runs.read(folder)
        assert found is not None
        return found.state

    named, before = tmp_path / "mine", run(scratch, "case=a")
    run(scratch, "case=b")
    for asked, where in ((str(named), None), (None, before), (None, None)):
        settings = RunSettings(results=asked)
        with going_on.folder(Namespace(settings=settings, catalogue=Namespace(cases={})), ["case=a"], where) as finish:  # type: ignore[arg-type]
            used = Path(str(settings.results))
            assert used == (named if asked else where or used) and used.is_dir() and state(used) == runs.UNFINISHED
            assert (runs.of(scratch).resolve() == used.resolve()) is (asked is None), "it is the last one now"
            finish(Summary(interrupted=used == named))
        assert state(used) == (runs.UNFINISHED if used == named else runs.ENDED)
    assert len(runs.listed(scratch)) == 3, "two there were, and a new one"
    for asked, where in ((str(named), None), (None, before)):
        settings = RunSettings(results=asked)
        with (
            pytest.raises(ZeroDivisionError),
            going_on.folder(Namespace(settings=settings, catalogue=Namespace(cases={})), [], where),
        ):  # type: ignore[arg-type]
            raise ZeroDivisionError
        assert Path(str(settings.results)).is_dir(), "what was there before is not taken back"


def test_folder_without_measurements_is_removed(scratch: Path) -> None:
    before = run(scratch, "case=a")
    settings = RunSettings()
    with (
        pytest.raises(ZeroDivisionError),
        going_on.folder(Namespace(settings=settings, catalogue=Namespace(cases={})), ["case=b"]),
    ):  # type: ignore[arg-type]
        assert Path(str(settings.results)).parent == scratch and runs.of(scratch) != before
        raise ZeroDivisionError
    assert [each.folder for each in runs.listed(scratch)] == [before]
    assert runs.of(scratch).resolve() == before.resolve()


def test_load_folder_reads_the_last_run(scratch: Path) -> None:
    from repro_matrix.analysis.inputs import load_folder, load_side

    run(scratch)
    run(scratch, cell="later")
    told = load_folder(runs.of(scratch)).notes
    assert told and all("later.json" in note for note in told)
    with pytest.raises(MeasureError, match=r"later.json"):
        load_side(str(scratch))  # the document is empty: the file that is named is the last run's


@pytest.mark.ranks
@pytest.mark.xdist_group("stack")
def test_second_run_overwrites_nothing(scratch: Path, capsys: pytest.CaptureFixture[str], runs_are_warm: None) -> None:
    words = ["ddp-unfinished-reduction", "variants=[unfixed]", "hardware=cpu"]
    found = []
    for _ in range(2):
        assert cli.main(["run", *words]) == 0
        capsys.readouterr()
        found.append(runs.of(scratch))
    assert found[0] != found[1]
    documents = [sorted(path.relative_to(folder) for path in folder.rglob("*.json")) for folder in found]
    assert documents[0] == documents[1] and len(documents[0]) == 1
    assert cli.main(["diff", str(found[0]), str(scratch)]) == 0
    capsys.readouterr()
    assert cli.main(["run", *words, "--resume"]) == 0
    assert "0 attempts (1 more reused)" in capsys.readouterr().out
    assert runs.of(scratch) == found[1] and [each.state for each in runs.listed(scratch)] == [runs.ENDED] * 2
