"""`repro versions` and `repro bisect` in jobs: side by side, as on one machine, none repeated."""

from __future__ import annotations

import json
import pickle
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from probing import CASE, ScriptLab, World, before, lab, result, world
from repro_matrix.cluster import jobs, queue
from repro_matrix.cluster.queue import Job, Shard
from repro_matrix.config.executors import SlurmExecutor
from repro_matrix.config.schema import VARIANT
from repro_matrix.search import in_jobs, prober
from script_observations import FINE
from test_script_bisect import error

__all__ = ["lab", "world"]
Capsys = pytest.CaptureFixture[str]
SLURM = ("executor=slurm", "executor.poll_s=0.01")


class Lab(ScriptLab):
    def observe(self, versions: Mapping[str, str], attempt: Any) -> dict[str, Any]:
        return FINE if before(versions, "4.40") else error("KeyError", "w")


class Queue:
    """Jobs that run in this process when they are submitted, except those that ``lose`` names."""

    def __init__(self) -> None:
        self.arrays: list[list[str]] = []  # the folders of each
        self.lose: set[int] = set()  # arrays whose jobs never end
        self.running: dict[str, Job] = {}
        self.cancelled: list[str] = []

    def submit(
        self, executor: SlurmExecutor, shards: Sequence[Shard], folder: Path, exclude: Any = ()
    ) -> list[str]:
        number = len(self.arrays)
        self.arrays.append([shard.command[-1] for shard in shards])
        names = [f"{number}_{at}" for at in range(len(shards))]
        for name, shard in zip(names, shards, strict=True):
            if number in self.lose:
                self.running[name] = Job("RUNNING", "n1", "")
                continue
            code = in_jobs.main(Path(shard.command[-1]))
            (folder / f"{name}_0_result.pkl").write_bytes(pickle.dumps(("success", code)))
            (folder / f"{name}_0_log.out").touch()
        return names

    def look(self, names: Sequence[str]) -> dict[str, Job]:
        return {name: job for name, job in self.running.items() if name in names}


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue()
    monkeypatch.setattr(queue, "submit", made.submit)
    monkeypatch.setattr(queue, "look", made.look)
    monkeypatch.setattr(queue, "cancel", made.cancelled.extend)
    monkeypatch.setattr(prober, "check_slurm", lambda: None)
    monkeypatch.setattr(jobs, "GONE_S", 0.0)
    return made


def versions(world: World, capsys: Capsys, *words: str, code: int = 0) -> dict[str, Any]:
    return result(world.repro, capsys, "versions", CASE, "stack=base", *words, code=code)


def test_samples_are_measured_side_by_side_and_give_the_same_map(
    world: World, slurm: Queue, capsys: Capsys
) -> None:
    words = ("--range", "4.37..", "--samples", "4")
    found = versions(world, capsys, *words, *SLURM)
    assert len(slurm.arrays[0]) == 4
    launched, world.folder = len(world.launched), world.folder / "here"
    alone = versions(world, capsys, *words)
    assert found["variants"] == alone["variants"]
    assert launched == len(world.launched) - launched  # no probe more than on one machine
    assert sum(probe["launched"] for probe in found["probes"]) == launched


def test_a_second_call_launches_nothing(world: World, slurm: Queue, capsys: Capsys) -> None:
    first = versions(world, capsys, "--range", "4.37..", *SLURM)
    arrays, launched = len(slurm.arrays), len(world.launched)
    second = versions(world, capsys, "--range", "4.37..", *SLURM)
    assert second["variants"] == first["variants"]
    assert (len(slurm.arrays), len(world.launched)) == (arrays, launched)
    assert not any(probe["launched"] for probe in second["probes"])


def test_more_attempts_are_added_to_those_that_are_stored(
    world: World, slurm: Queue, capsys: Capsys
) -> None:
    words = ("--range", "4.37..4.38", "--samples", "2", "variants=unfixed", *SLURM)
    versions(world, capsys, *words)
    before = len(world.launched)
    found = versions(world, capsys, *words, "repeat=3")
    [one, other] = [json.loads(Path(each["document"]).read_text()) for each in found["probes"]]
    assert [len(each["variants"]["unfixed"]["attempts"]) for each in (one, other)] == [3, 3]
    assert len(world.launched) == before + 4


def test_a_command_that_ended_finds_its_running_jobs(
    world: World, slurm: Queue, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first command is killed: nobody cancels its jobs, and they end without it."""
    slurm.lose = {0}

    class Killed(BaseException): ...

    def killed(names: Sequence[str]) -> dict[str, Job]:
        if slurm.running:
            raise Killed
        return {}

    monkeypatch.setattr(queue, "look", killed)
    with pytest.raises(Killed):
        versions(world, capsys, "--range", "4.37..", "--samples", "3", *SLURM)
    for name, folder in zip(list(slurm.running), slurm.arrays[0], strict=True):
        assert in_jobs.main(Path(folder)) == 0
        del slurm.running[name]
    monkeypatch.setattr(queue, "look", slurm.look)
    launched = len(world.launched)
    found = versions(world, capsys, "--range", "4.37..", "--samples", "3", *SLURM)
    assert found["complete"] and len(slurm.arrays[0]) == 3
    again = {folder for array in slurm.arrays[1:] for folder in array}
    assert not again & set(slurm.arrays[0])  # only what follows from their results is submitted
    assert len(world.launched) - launched == sum(each["launched"] for each in found["probes"])


@pytest.mark.parametrize("ends", [(), ("--good", "4.37.0", "--bad", "4.45.0")])
def test_ctrl_c_cancels_the_jobs_and_the_same_command_continues(
    world: World,
    slurm: Queue,
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
    ends: tuple[str, ...],
) -> None:
    slurm.lose = {0}

    def look(names: Sequence[str]) -> dict[str, Job]:
        if slurm.cancelled:
            slurm.running.clear()
        elif slurm.running:
            signal.raise_signal(signal.SIGINT)
        return slurm.look(names)

    monkeypatch.setattr(queue, "look", look)
    words = ("bisect" if ends else "versions", CASE, "stack=base", *ends, *SLURM)
    assert world.repro(*words) == 130
    assert slurm.cancelled == [f"0_{at}" for at in range(len(slurm.arrays[0]))]
    assert not world.launched
    assert world.repro(*words) == 0
    capsys.readouterr()


def test_bisect_verifies_both_ends_side_by_side(world: World, slurm: Queue, capsys: Capsys) -> None:
    ends = ("--good", "4.37.0", "--bad", "4.45.0")
    data = result(world.repro, capsys, "bisect", CASE, "stack=base", *ends, *SLURM)
    stage = data["stages"][0]
    assert (stage["good"]["name"], stage["bad"]["name"]) == (
        "transformers 4.39.3",
        "transformers 4.40.0",
    )
    assert [len(each) for each in slurm.arrays][:2] == [2, 1]
    assert len(world.launched) == data["probes"]


def test_the_failure_of_a_script_is_learned_from_its_jobs(
    lab: ScriptLab, slurm: Queue, capsys: Capsys
) -> None:
    words = ("bisect", "./train.py", "stack=base", "--good", "4.37.0", "--bad", "4.45.0")
    data = result(lab.repro, capsys, *words, *SLURM)
    assert data["stages"][0]["bad"]["name"] == "transformers 4.40.0"
    document = json.loads(Path(data["stages"][0]["bad"]["document"]).read_text())
    [attempt] = document["variants"][VARIANT]["attempts"]
    assert attempt["outcome"]["outcome"] == "reproduced"  # graded by the failure that was learned
    assert len(lab.launched) == data["probes"]


def test_a_job_without_a_result_ends_the_search_with_its_log(
    world: World, slurm: Queue, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = in_jobs.main
    monkeypatch.setattr(
        in_jobs, "main", lambda folder: 70 if len(slurm.arrays) > 1 else measure(folder)
    )
    stopped = versions(world, capsys, "--range", "4.37..", "--samples", "3", *SLURM, code=3)
    assert "Log: " in str(stopped) and "_0_log.out" in str(stopped)
    monkeypatch.setattr(in_jobs, "main", measure)
    launched = len(world.launched)
    found = versions(world, capsys, "--range", "4.37..", "--samples", "3", *SLURM)
    assert found["complete"] and len(slurm.arrays[0]) == 3
    assert len(world.launched) > launched


def test_traced_probes_are_refused(lab: ScriptLab, slurm: Queue, capsys: Capsys) -> None:
    words = ("versions", "./train.py", "stack=base", "--range", "4.37..", "--numbers", "4.37.0")
    assert "one machine" in result(lab.repro, capsys, *words, *SLURM, code=2)["err"]
