"""The scheduler's choices, and what it knows of earlier attempts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.config import catalog as catalogue
from repro_matrix.config import selection as overrides
from repro_matrix.config.settings import RunSettings
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile
from repro_matrix.environment.stacks import Stack
from repro_matrix.planning import cells as matrix
from repro_matrix.planning.placing import place
from repro_matrix.planning.plan import Planner
from repro_matrix.runner.durations import UNKNOWN_S, expect, recorded
from repro_matrix.runner.schedule import MOST_PER_CORE, Capacity, Task, in_order, pick

CPU = Capacity(cores=2, gpus=0, memory_gb=20)
NODE = Capacity(cores=64, gpus=8, memory_gb=1000)


def tasks_of(*widths: tuple[int, float]) -> list[Task]:
    return [Task(number, "broken", 0, seconds, gpus) for number, (gpus, seconds) in enumerate(widths)]


jobs = st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.floats(0.1, 100)), min_size=1, max_size=30)


@given(jobs, st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.floats(0.1, 9)), max_size=3), st.integers(0, 8))
def test_what_is_picked_fits_and_nothing_that_fits_waits(
    waiting: list[tuple[int, float]], running: list[tuple[int, float]], free: int
) -> None:
    tasks = tasks_of(*waiting)
    picked = pick(tasks, tasks_of(*running), NODE, free, idle=False)
    assert (picked is None) == all(task.gpus > free for task in tasks)
    assert picked is None or picked.gpus <= free


def test_a_long_or_wide_one_does_not_keep_the_others_waiting() -> None:
    wide, narrow = tasks_of((8, 100.0), (1, 1.0))
    assert pick([wide, narrow], tasks_of((1, 500.0)), NODE, 7, idle=False) is narrow


def test_without_devices_the_cores_and_the_idle_time_decide() -> None:
    tasks = tasks_of((0, 1.0))
    running = tasks_of((0, 1.0), (0, 1.0))
    assert pick(tasks, running[:1], CPU, 0, idle=False) is tasks[0]
    assert pick(tasks, running, CPU, 0, idle=False) is None
    assert pick(tasks, running, CPU, 0, idle=True) is tasks[0]
    assert pick(tasks, tasks_of(*[(0, 1.0)] * 2 * MOST_PER_CORE), CPU, 0, idle=True) is None


def test_jobs_is_the_limit_that_was_asked_for() -> None:
    three = Capacity(cores=64, gpus=0, memory_gb=100, jobs=3)
    tasks = tasks_of(*[(0, 1.0)] * 4)
    assert pick(tasks, tasks[:2], three, 0, idle=False) and pick(tasks, tasks[:3], three, 0, idle=True) is None


def test_memory_is_not_given_out_twice_and_never_stops_everything() -> None:
    big = Task(0, "broken", 0, 1.0, memory_gb=12.0)
    small = Task(1, "broken", 0, 1.0, memory_gb=1.0)
    assert pick([big, small], [big], CPU, 0, idle=True) is small
    huge = Task(2, "broken", 0, 1.0, memory_gb=99.0)
    assert pick([huge], [], CPU, 0, idle=False) is huge  # alone: what is recorded may be wrong, and no task is lost


def test_listed_order_is_left_alone() -> None:
    tasks = tasks_of((0, 1.0), (0, 3.0), (0, 2.0))
    assert in_order(tasks, "listed") == tasks
    assert [task.seconds for task in in_order(tasks, "longest")] == [3.0, 2.0, 1.0]


def document(
    started: float, walls: dict[str, list[float]], rss: float | None = 512.0, key: str = "a/b", scale: str = "tiny"
) -> dict[str, Any]:
    ranks = [{"record": None if rss is None else {"peak_rss_mb": rss}}] * 2
    return {
        "key": key,
        "scale": scale,
        "provenance": {"started": started},
        "arms": {
            arm: {"attempts": [{"observation": {"attempt": {"wall_s": wall}, "ranks": ranks}} for wall in each]}
            for arm, each in walls.items()
        },
    }


def test_the_latest_measurement_is_what_is_expected() -> None:
    known = recorded([document(2.0, {"broken": [1.0, 3.0, 30.0]}), document(1.0, {"broken": [50.0], "fix": [4.0]})])
    assert known["a/b", "broken"].seconds == 3.0 and known["a/b", "fix"].seconds == 4.0
    assert known["a/b", "broken"].memory_gb == pytest.approx(1.0)
    assert recorded([document(1.0, {"broken": [1.0]}, rss=None)])["a/b", "broken"].memory_gb is None


def test_what_was_never_measured_takes_what_its_case_does_but_never_longer_than_its_deadline() -> None:
    """One run at full size (1350 s) made every attempt that was new as long as that: a plan of 13 hours."""
    found = catalogue.load()
    cells = matrix.enumerate_cells(found, overrides.parse(["case=qwen15-fsdp-norm-shard"]))
    stack = Stack("current", "/usr/bin/python3", {"python": "3.11", "torch": "2.13.0", "transformers": "5.23.0"})
    machine, cpu = Machine((), None, "cpu", 2, 24.0, "linux"), Profile("cpu", "cpu", "gloo")
    planner = Planner(found, RunSettings(deadline=60.0), {"cpu": cpu}, machine, {"current": stack}, {})
    plans = planner.plan(place(found, cells, [cpu], auto=False).cells)
    arm = plans[0].arms[0]
    key = "qwen15-fsdp-norm-shard/new"

    def seconds(*documents: dict[str, Any]) -> float:
        return expect(recorded(documents), key, arm).seconds

    own = document(1.0, {"broken": [2.0], "fix": [4.0], "other": [40.0]}, key="qwen15-fsdp-norm-shard/old")
    full = document(2.0, {"broken": [1350.0]}, key="qwen15-fsdp-norm-shard/full", scale="full")
    assert seconds() == seconds(full) == seconds(document(1.0, {"broken": [40.0]})) == UNKNOWN_S
    assert seconds(own) == seconds(own, full) == 4.0
    assert seconds(document(1.0, {"broken": [400.0]}, key="qwen15-fsdp-norm-shard/slow")) == 60.0
