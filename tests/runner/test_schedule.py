"""Which attempt starts next and where, and what is expected of it by earlier attempts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.runner.schedule import (
    IDLE_PERCENT,
    MOST_PER_CORE,
    OTHER_USER_S,
    UNKNOWN_S,
    Schedule,
    Task,
    expect,
    recorded,
)

EIGHT = [f"GPU-{index}" for index in range(8)]


def tasks_of(*widths: tuple[int, float]) -> list[Task]:
    return [
        Task(number, "unfixed", 0, seconds, gpus, 0.5)
        for number, (gpus, seconds) in enumerate(widths)
    ]


def schedule_of(
    waiting: list[Task], running: list[Task] | None = None, cores: int = 2, **changes: Any
) -> Schedule:
    schedule = Schedule(cores, **{"memory_gb": 20.0, **changes})
    schedule.add(waiting)
    schedule.running += running or []
    return schedule


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 3, 4, 8]), st.floats(0.5, 60)), min_size=1, max_size=40
    ),
    st.sampled_from([2, 4, 8]),
    st.randoms(use_true_random=False),
)
def test_schedule_starts_every_task_once_and_gives_no_gpu_to_two(
    widths: list[tuple[int, float]], count: int, draw: Any
) -> None:
    gpus = EIGHT[:count]
    tasks = [
        Task(number, "a", 0, seconds, min(width, count), 0.0)
        for number, (width, seconds) in enumerate(widths)
    ]
    schedule, held, started = schedule_of(tasks), dict[Task, list[str]](), list[Task]()
    while schedule.waiting or schedule.running:
        while found := schedule.next(
            [uuid for uuid in gpus if not any(uuid in each for each in held.values())],
            gpus,
            idle=False,
        ):
            task, where = found
            assert len(set(where)) == task.gpus and not any(
                set(where) & set(each) for each in held.values()
            )
            schedule.start(task)
            held[task] = where
            started.append(task)
        free = count - sum(map(len, held.values()))
        assert all(task.gpus > free or task.gpus == 0 for task in schedule.waiting), (
            "what fits does not wait"
        )
        ended = draw.choice(schedule.running)
        schedule.end(ended)
        del held[ended]
    assert sorted(started, key=tasks.index) == tasks


@pytest.mark.parametrize(
    ("running", "idle", "starts"),
    [(1, False, True), (2, False, False), (2, True, True), (2 * MOST_PER_CORE, True, False)],
)
def test_next_without_gpus_depends_on_cores_and_measured_load(
    running: int, idle: bool, starts: bool
) -> None:
    (task,) = tasks_of((0, 1.0))
    assert schedule_of([task], tasks_of(*[(0, 1.0)] * running)).next([], [], idle) == (
        (task, []) if starts else None
    )


@pytest.mark.parametrize(
    ("free", "room", "cores", "gpu"),
    [
        ([], 5000, 4, "GPU-0"),  # beside the one that runs
        (["GPU-1"], 5000, 4, "GPU-1"),  # alone where it can be
        ([], 4999, 4, None),  # the card's memory is planned for others
        ([], 5000, 2, None),  # its ranks would wait for the cores
    ],
)
def test_next_shares_a_gpu_by_its_memory_and_the_cores(
    free: list[str], room: int, cores: int, gpu: str | None
) -> None:
    tasks = [Task(number, "a", 0, 1.0, 1, 0.5, 5000, 2) for number in range(2)]
    alone = Task(2, "b", 0, 1.0, 1, 0.5)
    schedule, usable = schedule_of(tasks[1:], tasks[:1], cores), ["GPU-0", "GPU-1"]
    assert schedule.next(free, usable, False, {"GPU-0": room}) == (
        (tasks[1], [gpu]) if gpu else None
    )
    assert schedule_of([alone], tasks[:1], cores).next([], usable, False, {"GPU-0": room}) is None


# Of the 206 attempts of the first runs on an H100, one at a time: seconds, those until the ranks
# began, CPU seconds.
MEASURED = json.loads(
    (Path(__file__).parents[1] / "data" / "gpu1_nccl_seconds.json").read_text(encoding="utf-8")
)
CATALOG = 346  # attempts of the whole catalog on gpu1-nccl


def simulate(cores: int, card: float) -> tuple[float, int]:
    """Return the seconds that a first run of the catalog takes on one card, and the most attempts
    side by side.

    Cores that are too few slow all attempts down. ``card``: the part of its ranks' work for which
    an attempt needs the card alone. It is not known: NCCL's kernels spin while they wait, and the
    card serves one process at a time.
    """
    share = 4506  # MiB that are planned for two ranks with a tiny model
    measured = {
        Task(n, "a", 0, UNKNOWN_S, 1, 1.0, share, 2): MEASURED[n % len(MEASURED)]
        for n in range(CATALOG)
    }
    schedule, now, most = schedule_of([*measured], cores=cores, memory_gb=128.0), 0.0, 0
    left: dict[
        Task, list[float]
    ] = {}  # seconds until it has begun, of its work on the host, on the card
    while schedule.waiting or left:
        used = sum(measured[task][2] / measured[task][0] for task in left)  # cores
        idle, room = used <= cores * (1 - IDLE_PERCENT / 100), {"GPU-0": 79_000 - share * len(left)}
        if found := schedule.next([] if left else ["GPU-0"], ["GPU-0"], idle, room):
            schedule.start(found[0])
            took, start, _ = measured[found[0]]
            left[found[0]] = [start, (took - start) * (1 - card), (took - start) * card]
            most = max(most, len(left))
            continue
        doing = {
            task: next(part for part in range(3) if parts[part] > 0) for task, parts in left.items()
        }
        speed = min(1.0, cores / used)
        speeds = [speed, speed, min(speed, 1 / max(1, [*doing.values()].count(2)))]
        step = min(left[task][part] / speeds[part] for task, part in doing.items())
        now += step
        for task, part in doing.items():
            rest = left[task][part] - step * speeds[part]
            left[task][part] = rest if rest > 1e-9 else 0.0
            if not any(left[task]):
                del left[task]
                schedule.end(task)
    return now, most


@pytest.mark.parametrize(("card", "limit_s"), [(0.0, 200), (0.5, 500), (0.7, 600)])
def test_whole_catalog_on_one_shared_card_takes_under_ten_minutes(
    card: float, limit_s: float
) -> None:
    seconds, most = simulate(16, card)
    assert seconds < limit_s and most >= 8
    assert sum(MEASURED[number % len(MEASURED)][0] for number in range(CATALOG)) > 1100, (
        "one at a time"
    )


def test_next_keeps_within_jobs_and_memory_and_starts_a_task_that_is_too_large_alone() -> None:
    tasks = tasks_of(*[(0, 1.0)] * 4)
    assert schedule_of(tasks, tasks[:2], cores=64, jobs=3).next([], [], False)
    assert schedule_of(tasks, tasks[:3], cores=64, jobs=3).next([], [], True) is None
    big, small, huge = (
        Task(index, "unfixed", 0, 1.0, memory_gb=size)
        for index, size in enumerate((12.0, 1.0, 99.0))
    )
    assert schedule_of([big, small], [big]).next([], [], True) == (small, [])
    assert schedule_of([huge]).next([], [], False) == (huge, [])


def test_add_sorts_unless_the_order_is_declared() -> None:
    for order, seconds in (("declared", [1.0, 3.0, 2.0]), ("longest", [3.0, 2.0, 1.0])):
        schedule = schedule_of(tasks_of((0, 1.0), (0, 3.0), (0, 2.0)), order=order)
        assert [task.seconds for task in schedule.waiting] == seconds


def test_repeated_task_starts_first_and_on_other_gpus() -> None:
    task, wide = Task(0, "a", 0, 10.0, 1), Task(1, "b", 0, 10.0, 2)
    schedule = schedule_of([task, wide])
    schedule.waiting.remove(task)
    schedule.repeat(task, {"avoid": ("GPU-0",)})
    assert schedule.next(["GPU-0"], EIGHT[:2], False) is None, "the other GPU will be free"
    found = schedule.next(EIGHT[:2], EIGHT[:2], False)
    assert found and found[0].cell == 0 and found[1] == ["GPU-1"]
    found = schedule.next(["GPU-0"], ["GPU-0"], False)
    assert found and found[1] == ["GPU-0"], "there is no other GPU any more"


def test_drop_hopeless_removes_what_cannot_start_any_more() -> None:
    wide, narrow = Task(0, "wide", 0, 10.0, 2), Task(1, "narrow", 0, 10.0, 1)
    schedule = schedule_of([wide, narrow])
    assert schedule.drop_hopeless(usable=1, working=1, now=0.0) == [wide], "a GPU has failed"
    schedule.add([wide])
    assert schedule.drop_hopeless(usable=1, working=2, now=0.0) == [], (
        "a narrow one can start beside the other user"
    )
    schedule.waiting = [wide]
    assert schedule.drop_hopeless(usable=1, working=2, now=10.0) == []
    assert schedule.drop_hopeless(usable=2, working=2, now=20.0) == [], "the other user has left"
    assert schedule.drop_hopeless(usable=1, working=2, now=30.0) == []
    assert schedule.drop_hopeless(usable=1, working=2, now=30.0 + OTHER_USER_S) == [wide]


def test_expect_is_the_latest_result_within_the_deadline() -> None:
    rows: list[Any] = [
        SimpleNamespace(
            cell_id="a/b",
            variant=variant,
            started=started,
            settings={"world_size": 2},
            attempts=[SimpleNamespace(wall_s=wall, peak_rss_mb=512.0) for wall in walls],
        )
        for started, variant, walls in [
            (2.0, "unfixed", [1.0, 3.0, 30.0]),
            (1.0, "unfixed", [50.0]),
            (1.0, "fix", [400.0]),
        ]
    ]
    known = recorded(rows)
    variant: Any = SimpleNamespace(expected_s=None, memory=None, world_size=2, deadline=60.0)
    assert (
        expect(known["a/b", "unfixed"], variant) == (3.0, 1.0)
        and expect(known["a/b", "fix"], variant)[0] == 60.0
    )
    assert expect(None, variant)[0] == UNKNOWN_S
