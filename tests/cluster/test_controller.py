"""A run on a cluster: its jobs end, fail, get lost and are cancelled; the controller comes back."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster.conftest import Make
from repro_matrix.cluster import queue
from repro_matrix.cluster.controller import Controller
from repro_matrix.config import executors
from repro_matrix.errors import ConfigError, ResultsError


def cases(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in (folder / "cpu").rglob("*.json"))


def test_shards_are_measured_in_jobs_and_their_results_are_together(
    make: Make, tmp_path: Path
) -> None:
    made = make("ends", "ends:1", "ends:3")
    totals = made.run(threading.Event())
    assert cases(tmp_path / "run") == ["shard-1", "shard-2", "shard-3"]
    assert totals.attempts == 3 and not totals.interrupted
    made_in = [document["provenance"]["job"] for document in totals.documents]
    assert [job["id"] + "_" + job["task"] for job in made_in] == [
        part.jobs[-1] for part in made.parts
    ]
    assert all(job["node"] == "n1" for job in made_in)
    assert all((tmp_path / "run" / job["log"]).is_file() for job in made_in)
    # exit code 1 is a result; 3 is less than was requested
    assert [text.partition(":")[0] for text in made.problems()] == ["shard 3"]


def test_a_shard_whose_command_fails_is_not_submitted_again(make: Make, tmp_path: Path) -> None:
    made = make("ends", "fails:2")
    made.run(threading.Event())
    [problem] = made.problems()
    assert problem.startswith("shard 2: its command ended with 2")
    assert str(tmp_path / "run" / "jobs") in problem
    assert [len(part.jobs) for part in made.parts] == [1, 1]


def test_a_lost_job_is_submitted_again_without_its_node(make: Make, tmp_path: Path) -> None:
    made = make("ends", "dies-once")
    made.run(threading.Event())
    assert not made.problems()
    assert [len(part.jobs) for part in made.parts] == [1, 2]
    assert made.parts[1].nodes == ["n1"] and made.parts[1].node in ("n2", "n1")
    assert cases(tmp_path / "run") == ["shard-1", "shard-2"]


def test_a_job_that_is_lost_again_is_reported(make: Make) -> None:
    made = make("dies-once", executor=("executor.retries=0",))
    made.run(threading.Event())
    [problem] = made.problems()
    assert "ended without a result" in problem


def test_a_shard_that_a_node_cannot_measure_is_measured_on_another(make: Make) -> None:
    made = make("unusable", "ends")
    made.run(threading.Event())
    assert not made.problems()
    assert made.parts[0].nodes == ["n1"] and len(made.parts[0].jobs) == 2


def test_what_a_failed_shard_said_is_shown(make: Make) -> None:
    made = make("unusable", "fails:2", executor=("executor.retries=0",))
    made.run(threading.Event())
    assert [text.count("(torch does not import here)") for text in made.problems()] == [1, 0]
    assert [text.count("(there is no such case)") for text in made.problems()] == [0, 1]


def test_no_other_node_than_the_one_that_lost_a_job(make: Make) -> None:
    made = make("dies-once")
    made.parts[0].nodes = ["n1", "n2"]  # both are excluded, and the queue has no other
    made.run(threading.Event())
    assert not made.problems() and len(made.parts[0].jobs) == 2


def test_an_array_above_the_limit_of_the_site_is_submitted_in_parts(
    make: Make, stand_in: Path, tmp_path: Path
) -> None:
    (stand_in / "max-array-size").write_text("2")
    made = make(*["ends"] * 5)
    made.run(threading.Event())
    assert not made.problems() and len(cases(tmp_path / "run")) == 5
    arrays = Counter(part.jobs[0].partition("_")[0] for part in made.parts)
    assert sorted(arrays.values()) == [1, 2, 2] and all(len(part.jobs) == 1 for part in made.parts)


def test_a_full_queue_is_waited_for(make: Make, stand_in: Path, tmp_path: Path) -> None:
    (stand_in / "max-submit-jobs").write_text("0")
    made = make("ends", "ends")
    watch = threading.Timer(
        0, _when, (lambda: bool(said(made)), (stand_in / "max-submit-jobs").unlink)
    )
    watch.start()
    made.run(threading.Event())
    watch.join()
    assert "MaxSubmitJob" in said(made)[0]
    assert not made.problems() and len(cases(tmp_path / "run")) == 2


def test_an_account_without_hours_is_explained(make: Make, stand_in: Path) -> None:
    (stand_in / "pending").write_text("AssocGrpCPUMinutesLimit")
    made, stop = make("sleeps"), threading.Event()
    watch = threading.Timer(0, _stop_when, (lambda: "no hours left" in "".join(said(made)), stop))
    watch.start()
    made.run(stop)
    watch.join()
    assert "1 pending (AssocGrpCPUMinutesLimit: " in said(made)[-1]


def test_a_refusal_in_mid_run_stops_one_shard(make: Make, stand_in: Path) -> None:
    made = make("dies-once", "waits")
    refuse = (stand_in / "hours").write_text
    watch = threading.Timer(
        0, _when, (made.parts[0].folder.joinpath("again").exists, lambda: refuse("0"))
    )
    watch.start()
    go = threading.Timer(
        0, _when, (lambda: bool(made.parts[0].problem), (made.parts[1].folder / "go").touch)
    )
    go.start()
    made.run(threading.Event())
    [problem] = made.problems()
    assert problem.startswith("shard 1") and "Invalid account" in problem
    assert made.parts[1].code == 0


def test_ctrl_c_cancels_the_jobs_and_keeps_what_they_stored(
    make: Make, stand_in: Path, tmp_path: Path
) -> None:
    made, stop = make("sleeps", "ends"), threading.Event()
    watch = threading.Timer(0, _stop_when, (lambda: len(cases_of_jobs(tmp_path)) == 2, stop))
    watch.start()
    totals = made.run(stop)
    watch.join()
    assert totals.interrupted
    assert cases(tmp_path / "run") == ["shard-1", "shard-2"]
    assert not queue.look([part.jobs[-1] for part in made.parts])


def test_a_controller_that_comes_back_finds_its_jobs(make: Make, tmp_path: Path) -> None:
    first = make("sleeps", "ends")
    first.jobs._submit(first.parts)
    until(lambda: len(cases_of_jobs(tmp_path)) == 2)
    jobs = [part.jobs[-1] for part in first.parts]
    first.store.close()  # as its process ends

    again, stop = make("sleeps", "ends", resume=True), threading.Event()
    assert [part.jobs[-1] for part in again.parts] == jobs
    watch = threading.Timer(0, _stop_when, (lambda: again.parts[1].code == 0, stop))
    watch.start()
    totals = again.run(stop)
    watch.join()
    assert totals.interrupted and [part.jobs[-1] for part in again.parts] == jobs

    third = make("ends", "sleeps", resume=True)  # the finished shard is not measured again
    assert not third.run(threading.Event()).interrupted
    assert [len(part.jobs) for part in third.parts] == [2, 1]


def test_other_code_measures_finished_shards_again(make: Make) -> None:
    make("ends", "ends", code={"shard-1": "a"}).run(threading.Event())
    same = make("ends", "ends", resume=True, code={"shard-1": "a"})
    same.run(threading.Event())
    other = make("ends", "ends", resume=True, code={"shard-1": "b"})
    other.run(threading.Event())
    assert [len(part.jobs) for part in same.parts] == [1, 1]
    assert [len(part.jobs) for part in other.parts] == [2, 2]


def test_results_of_other_cells_and_damaged_ones_do_not_count(make: Make, tmp_path: Path) -> None:
    made = make("ends", "ends")
    first, second = (part.folder / "cpu" / "torch2" for part in made.parts)

    made.jobs.run(made.parts, threading.Event())
    shutil.move(second / "shard-2", second / "shard-1")
    (second / "other").mkdir()
    (second / "other" / "cell.json").write_text("{")
    totals = made.run(threading.Event())
    assert len(totals.documents) == 1 and first.is_dir()
    missing, damaged = made.problems()
    assert "shard-2/m-fsdp" in missing and "other/cell.json" in damaged


def test_two_runs_in_one_folder_exclude_each_other(make: Make) -> None:
    made = make("ends")
    with pytest.raises(ResultsError):
        make("ends")
    made.run(threading.Event())
    assert make("ends", resume=True).parts[0].code == 0


def test_a_new_run_in_the_same_folder_takes_no_result_of_the_old_one(
    make: Make, tmp_path: Path
) -> None:
    make("ends", "ends").run(threading.Event())
    made = make("ends", "fails:2")
    made.run(threading.Event())
    assert len(made.problems()) == 1
    assert not (tmp_path / "run" / "jobs" / "shard-2" / "cpu").exists()


def test_another_selection_is_not_resumed(make: Make) -> None:
    make("ends", texts=("case=a",)).run(threading.Event())
    with pytest.raises(ConfigError, match="another selection: case=a"):
        make("ends", texts=("case=b",), resume=True)


def test_a_queue_that_does_not_answer_is_no_lost_job(make: Make, stand_in: Path) -> None:
    made, stop = make("sleeps"), threading.Event()
    made.jobs._submit(made.parts)
    (stand_in / "silent").touch()
    made.jobs._look(made.parts)
    time.sleep(0.4)
    made.jobs._look(made.parts)
    assert made.parts[0].open and len(made.parts[0].jobs) == 1
    (stand_in / "silent").unlink()
    stop.set()
    made.run(stop)


@pytest.mark.parametrize(
    ("texts", "part"),
    [
        (["executor=slum"], "did you mean 'slurm'"),
        (["executor.partition=gpu"], "add executor=slurm"),
        (["executor=slurm", "executor.partiton=gpu"], "did you mean 'partition'"),
        (["executor=slurm", "executor.shards=many"], "shards"),
    ],
)
def test_a_wrong_executor_is_explained(texts: list[str], part: str) -> None:
    with pytest.raises(ConfigError) as error:
        executors.split(texts)
    assert part in str(error.value)


def test_options_of_sbatch_are_passed_on(make: Make, tmp_path: Path) -> None:
    own = ("executor.mem_gb=16", "executor.qos=night", "+executor.additional_parameters.nice=5")
    made = make("ends", "ends", executor=own)
    made.run(threading.Event())
    [script] = (tmp_path / "run" / "jobs").glob("*_submission.sh")
    lines = script.read_text(encoding="utf-8").splitlines()
    assert {"#SBATCH --mem=16384M", "#SBATCH --qos=night", "#SBATCH --nice=5"} <= set(lines)


def test_a_refused_job_shows_the_message_of_sbatch(make: Make) -> None:
    made = make("ends", executor=("executor.partition=gpu",))
    with pytest.raises(ConfigError, match="invalid partition specified: gpu"):
        made.run(threading.Event())


def test_a_machine_without_slurm_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no sbatch, squeue, scancel"):
        queue.check_slurm()


def cases_of_jobs(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "run" / "jobs").glob("shard-*/run.manifest"))


def until(ready: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.05)


def said(made: Controller) -> list[str]:
    return made.said  # type: ignore[attr-defined,no-any-return]


def _when(ready: Callable[[], bool], act: Callable[[], object]) -> None:
    until(ready)
    act()


def _stop_when(ready: Callable[[], bool], stop: threading.Event) -> None:
    try:
        until(ready)
    finally:
        stop.set()
