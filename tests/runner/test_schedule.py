"""Which attempt starts next and where, and what is expected of it by earlier attempts."""

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
from repro_matrix.planning.cells import place
from repro_matrix.planning.plan import Planner
from repro_matrix.runner.schedule import (
    MOST_PER_CORE,
    OTHER_USER_S,
    UNKNOWN_S,
    Capacity,
    Schedule,
    Task,
    expect,
    in_order,
    neighbours,
    pick,
    recorded,
)

CPU = Capacity(cores=2, gpus=0, memory_gb=20)
NODE = Capacity(cores=64, gpus=8, memory_gb=1000)


def tasks_of(*widths: tuple[int, float]) -> list[Task]:
    return [Task(number, "unfixed", 0, seconds, gpus) for number, (gpus, seconds) in enumerate(widths)]


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
    big = Task(0, "unfixed", 0, 1.0, memory_gb=12.0)
    small = Task(1, "unfixed", 0, 1.0, memory_gb=1.0)
    assert pick([big, small], [big], CPU, 0, idle=True) is small
    huge = Task(2, "unfixed", 0, 1.0, memory_gb=99.0)
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
        "cell_id": key,
        "scale": scale,
        "provenance": {"started": started},
        "variants": {
            variant: {"attempts": [{"observation": {"attempt": {"wall_s": wall}, "ranks": ranks}} for wall in each]}
            for variant, each in walls.items()
        },
    }


def test_the_latest_measurement_is_what_is_expected() -> None:
    known = recorded([document(2.0, {"unfixed": [1.0, 3.0, 30.0]}), document(1.0, {"unfixed": [50.0], "fix": [4.0]})])
    assert known["a/b", "unfixed"].seconds == 3.0 and known["a/b", "fix"].seconds == 4.0
    assert known["a/b", "unfixed"].memory_gb == pytest.approx(1.0)
    assert recorded([document(1.0, {"unfixed": [1.0]}, rss=None)])["a/b", "unfixed"].memory_gb is None


def test_what_was_never_measured_takes_what_its_case_does_but_never_longer_than_its_deadline() -> None:
    """One run at full size (1350 s) made every attempt that was new as long as that: a plan of 13 hours."""
    found = catalogue.load()
    cells = matrix.enumerate_cells(found, overrides.parse(["case=qwen15-fsdp-norm-shard"]))
    stack = Stack("current", "/usr/bin/python3", {"python": "3.11", "torch": "2.13.0", "transformers": "5.23.0"})
    machine, cpu = Machine((), None, "cpu", 2, 24.0, "linux"), Profile("cpu", "cpu", "gloo")
    planner = Planner(found, RunSettings(deadline=60.0), {"cpu": cpu}, machine, {"current": stack}, {})
    plans = planner.plan(place(found, cells, [cpu], auto=False).cells)
    variant = plans[0].variants[0]
    key = "qwen15-fsdp-norm-shard/new"

    def seconds(*documents: dict[str, Any]) -> float:
        return expect(recorded(documents), key, variant).seconds

    own = document(1.0, {"unfixed": [2.0], "fix": [4.0], "other": [40.0]}, key="qwen15-fsdp-norm-shard/old")
    full = document(2.0, {"unfixed": [1350.0]}, key="qwen15-fsdp-norm-shard/full", scale="full")
    assert seconds() == seconds(full) == seconds(document(1.0, {"unfixed": [40.0]})) == UNKNOWN_S
    assert seconds(own) == seconds(own, full) == 4.0
    assert seconds(document(1.0, {"unfixed": [400.0]}, key="qwen15-fsdp-norm-shard/slow")) == 60.0


# -- on GPUs

EIGHT = [f"GPU-{index}" for index in range(8)]


def schedule_of(tasks: list[Task], gpus: list[str] = EIGHT, **models: str) -> Schedule:
    schedule = Schedule(NODE, "longest", {uuid: models.get(uuid.replace("-", ""), "A100") for uuid in gpus})
    schedule.add(tasks)
    return schedule


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, 4, 8]), st.floats(0.5, 60)), min_size=1, max_size=40),
    st.sampled_from([2, 4, 8]),
    st.randoms(use_true_random=False),
)
def test_schedule_starts_every_task_once_and_gives_no_gpu_to_two(
    widths: list[tuple[int, float]], count: int, draw: Any
) -> None:
    gpus = EIGHT[:count]
    tasks = [Task(number, "a", 0, seconds, min(width, count), 0.0) for number, (width, seconds) in enumerate(widths)]
    schedule, held, started = schedule_of(tasks, gpus), dict[Task, list[str]](), list[Task]()
    while schedule.waiting or schedule.running:
        while found := schedule.next(
            [uuid for uuid in gpus if not any(uuid in each for each in held.values())], gpus, idle=False
        ):
            task, where = found
            assert len(set(where)) == task.gpus and not any(set(where) & set(each) for each in held.values())
            schedule.start(task)
            held[task] = where
            started.append(task)
        ended = draw.choice(schedule.running)
        schedule.end(ended)
        del held[ended]
    assert sorted(started, key=tasks.index) == tasks


def test_schedule_prefers_equal_gpus_and_the_smallest_group() -> None:
    schedule = schedule_of([Task(0, "two", 0, 10.0, 2), Task(1, "one", 0, 5.0, 1)], EIGHT[:4], GPU0="H200")
    first = schedule.next(EIGHT[:4], EIGHT[:4], False)
    assert first and first[1] == ["GPU-2", "GPU-3"]
    schedule.start(first[0])
    second = schedule.next(["GPU-0", "GPU-1"], EIGHT[:4], False)
    assert second and second[1] == ["GPU-0"], "two of the larger group may be needed later"
    assert schedule._same_model(EIGHT[:2], 2) == EIGHT[:2], "unequal ones where there are not enough equal ones"


def test_schedule_repeats_a_task_first_and_on_other_gpus() -> None:
    task, wide = Task(0, "a", 0, 10.0, 1), Task(1, "b", 0, 10.0, 2)
    schedule = schedule_of([task, wide], EIGHT[:2])
    schedule.waiting.remove(task)
    schedule.repeat(task, {"avoid": ("GPU-0",)})
    assert schedule.next(["GPU-0"], EIGHT[:2], False) is None, "the other GPU will be free"
    found = schedule.next(EIGHT[:2], EIGHT[:2], False)
    assert found and found[0].cell == 0 and found[1] == ["GPU-1"]
    found = schedule.next(["GPU-0"], ["GPU-0"], False)
    assert found and found[1] == ["GPU-0"], "there is no other GPU any more"


def test_schedule_drops_what_cannot_start_any_more() -> None:
    schedule = schedule_of([Task(0, "wide", 0, 10.0, 2), Task(1, "narrow", 0, 10.0, 1)], EIGHT[:2])
    assert [task.cell for task in schedule.drop_hopeless(usable=1, working=1, now=0.0)] == [0], "a GPU has failed"
    schedule.add([Task(0, "wide", 0, 10.0, 2)])
    assert schedule.drop_hopeless(usable=1, working=2, now=0.0) == [], "a narrow one can start beside the other user"
    schedule.waiting = [task for task in schedule.waiting if task.gpus == 2]
    assert schedule.drop_hopeless(usable=1, working=2, now=10.0) == []
    assert schedule.drop_hopeless(usable=2, working=2, now=20.0) == [], "the other user has left"
    assert schedule.drop_hopeless(usable=1, working=2, now=30.0) == []
    assert len(schedule.drop_hopeless(usable=1, working=2, now=30.0 + OTHER_USER_S)) == 1


def test_neighbours_are_preferred_and_wide_gaps_stay() -> None:
    free = [uuid for uuid in EIGHT if uuid != "GPU-0"]
    assert neighbours(EIGHT, EIGHT, 2) == ["GPU-0", "GPU-1"]
    assert neighbours(EIGHT, free, 2) == ["GPU-2", "GPU-3"]
    assert neighbours(EIGHT, free, 4) == ["GPU-4", "GPU-5", "GPU-6", "GPU-7"]
    assert neighbours(EIGHT, ["GPU-0", "GPU-1", "GPU-2", "GPU-5"], 1) == ["GPU-2"]
    assert neighbours(EIGHT, ["GPU-1", "GPU-2", "GPU-4", "GPU-7"], 3) == ["GPU-1", "GPU-2", "GPU-4"]
    assert neighbours(EIGHT, EIGHT, 0) == []
