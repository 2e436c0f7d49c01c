"""Packing on cards against a counted clock: widths, failing and busy cards, wrong expectations, two runs at once."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from repro_matrix.environment.gpus import Gpu, Seen, stranger
from repro_matrix.runner.gpu_pool import Cards
from repro_matrix.runner.schedule import Capacity, Task, lower_bound
from repro_matrix.runner.scheduler import PATIENCE, PATIENCE_S, Board, neighbours
from repro_matrix.runner.simulate import Change, Ended, Machine, Run, View, makespan, simulate

EIGHT = [f"card{index}" for index in range(8)]
FEW = settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
NODE = Capacity(cores=64, gpus=8, memory_gb=1000)
MIXES = {"even": (1, 1, 1, 1, 1), "as recorded": (30, 45, 5, 15, 5), "wide": (5, 50, 0, 25, 20)}  # of 1, 2, 3, 4, 8


def plan(seed: int, mix: str = "as recorded", cells: int = 500) -> list[Task]:
    """Attempts of 2 s to 2 min, most of them about 12 s."""
    draw = random.Random(seed)
    return [
        Task(cell, "a", 0, min(120.0, 2 + draw.lognormvariate(2.3, 0.8)), width, 0.0)
        for cell, width in enumerate(draw.choices((1, 2, 3, 4, 8), MIXES[mix], k=cells))
    ]


def off(tasks: list[Task], times: float, seed: int) -> dict[int, float]:
    """How long each really takes: up to ``times`` longer or shorter than expected."""
    draw = random.Random(seed)
    return {task.cell: task.seconds * times ** draw.uniform(-1, 1) for task in tasks}


def run_of(machine: Machine, tasks: list[Task], name: str = "run", really: dict[int, float] | None = None) -> Run:
    run = Run(name, machine, NODE, takes=lambda task: really[task.cell] if really else task.seconds)
    run.board.add(tasks)
    return run


def least(tasks: list[Task], really: dict[int, float]) -> float:
    return lower_bound([replace(task, seconds=really[task.cell]) for task in tasks], NODE)


def took(ended: list[Ended]) -> float:
    return max(each.ended for each in ended)


# --- within 5 % of the best possible


@pytest.mark.parametrize("mix", MIXES)
def test_500_cells_of_mixed_widths_end_within_5_percent_of_the_bound(mix: str) -> None:
    tasks = plan(1, mix)
    assert makespan(tasks, NODE) <= 1.05 * lower_bound(tasks, NODE)


@pytest.mark.parametrize("mix", MIXES)
def test_also_when_they_take_up_to_three_times_longer_or_shorter_than_expected(mix: str) -> None:
    tasks = plan(2, mix)
    really = off(tasks, 3.0, 2)
    assert took(simulate([run_of(Machine(EIGHT), tasks, really=really)])) <= 1.05 * least(tasks, really)


def test_also_when_half_of_them_come_late() -> None:
    tasks = plan(3)
    run = run_of(Machine(EIGHT), tasks[:250])
    run.later = [(60.0, tasks[250:])]  # a stack that was built meanwhile: wide ones among what is running
    assert took(simulate([run])) <= 1.05 * lower_bound(tasks, NODE)


@pytest.mark.parametrize("times", [1.0, 3.0])
def test_also_when_another_run_takes_cards(times: float) -> None:
    """Wide attempts in the one, narrow ones in the other: each gets its turns, and the cards stay in use."""
    machine = Machine(EIGHT)
    wide, narrow = plan(4, "wide", 250), plan(5, "as recorded", 250)
    narrow = [replace(task, cell=task.cell + 1000) for task in narrow]
    really = off([*wide, *narrow], times, 4)
    ended = simulate([run_of(machine, wide, "wide", really), run_of(machine, narrow, "narrow", really)])
    assert took(ended) <= 1.05 * least([*wide, *narrow], really)
    half = took(ended) / 2
    assert all(min(each.began for each in ended if each.run == name) < half for name in ("wide", "narrow"))


def test_also_when_cards_leave_and_come() -> None:
    tasks = plan(6)
    absent = [(300.0, 500.0, "card2"), (300.0, 700.0, "card3"), (900.0, 1000.0, "card7")]
    changes = [Change(at, card, "taken") for at, _, card in absent] + [
        Change(to, card, "free") for _, to, card in absent
    ]
    ended = simulate([run_of(Machine(EIGHT), tasks)], changes)
    missed = 0.0  # card-seconds that no schedule has: an attempt that is at work when somebody comes goes on
    for at, to, card in absent:
        ours = [each.ended for each in ended if card in each.cards and each.began < to]
        missed += max(0.0, min(to, took(ended)) - max([at, *ours]))
    assert missed > 100 and took(ended) <= 1.05 * (lower_bound(tasks, NODE) + missed / 8)
    assert all(each.infra is None for each in ended) and len(ended) == len(tasks)


@FEW
@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.floats(0.5, 60)), min_size=1, max_size=40),
    st.sampled_from([2, 4, 8]),
)
def test_no_schedule_beats_the_lower_bound(widths: list[tuple[int, float]], cards: int) -> None:
    tasks = [Task(number, "a", 0, seconds, min(gpus, cards)) for number, (gpus, seconds) in enumerate(widths)]
    node = Capacity(64, cards, 1000.0)
    assert lower_bound(tasks, node) <= makespan(tasks, node) * (1 + 1e-9)


def test_the_lower_bound_knows_that_of_three_cards_wide_only_two_fit_side_by_side() -> None:
    tasks = [Task(number, "a", 0, 10.0, 3) for number in range(6)]
    assert lower_bound(tasks, NODE) == makespan(tasks, NODE) == 30.0  # spread evenly: 22.5


def test_four_of_two_ranks_run_side_by_side_on_eight_cards() -> None:
    ended = simulate([run_of(Machine(EIGHT), [Task(number, "a", 0, 10.0, 2) for number in range(4)])])
    assert took(ended) == 10.0
    assert sorted(each.cards for each in ended) == [
        ("card0", "card1"),
        ("card2", "card3"),
        ("card4", "card5"),
        ("card6", "card7"),
    ]


# --- whatever happens: one holder, one end, everybody's turn

cases = st.fixed_dictionaries(
    {
        "runs": st.lists(
            st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, 4, 8]), st.floats(0.5, 60)), min_size=1, max_size=25),
            min_size=1,
            max_size=3,
        ),
        "changes": st.lists(
            st.builds(
                Change,
                st.floats(0, 200),
                st.sampled_from(EIGHT[1:]),
                st.sampled_from(["fails", "taken", "free", "free"]),
            ),
            max_size=8,
        ),
        "seed": st.integers(0, 99),
        "times": st.sampled_from([1.0, 3.0]),
    }
)


@FEW
@given(cases)
def test_a_card_has_one_holder_and_every_attempt_ends_once_or_is_said_to_be_infra(case: dict) -> None:  # type: ignore[type-arg]
    machine, runs, really = Machine(EIGHT), [], {}
    for number, widths in enumerate(case["runs"]):
        tasks = [Task(1000 * number + at, "a", 0, seconds, gpus, 0.0) for at, (gpus, seconds) in enumerate(widths)]
        really |= off(tasks, case["times"], case["seed"])
        runs.append(run_of(machine, tasks, f"run{number}", really))
    ended = simulate(runs, case["changes"], limit=1e5)
    for card in EIGHT:
        held = sorted((each.began, each.ended) for each in ended if card in each.cards)
        assert all(before[1] <= after[0] for before, after in pairwise(held))
        failed = [change.at for change in case["changes"] if change.card == card and change.what == "fails"]
        assert all(began <= min(failed, default=1e9) + 1 for began, _ in held)  # seen within a second
    for number, widths in enumerate(case["runs"]):
        for at in range(len(widths)):
            found = [each for each in ended if each.task.cell == 1000 * number + at]
            assert [each.infra for each in found].count(None) + bool(found[-1].infra) == 1
            assert len(found) <= 2 and (len(found) == 1 or (found[0].infra and found[1].task.again))
    if not any(change.what != "free" for change in case["changes"]):
        assert all(each.infra is None and len(each.cards) == each.task.gpus for each in ended)


@settings(FEW, max_examples=12)
@given(st.integers(0, 999), st.sampled_from([1.0, 3.0]), st.sampled_from([1, 2]), st.sampled_from([3, 4, 8]))
def test_a_wide_attempt_starts_within_a_bounded_time_and_number_of_completions(
    seed: int, times: float, others: int, width: int
) -> None:
    """Narrow ones of 5 to 20 s, of its own run or another, would keep some card busy for ever."""
    draw = random.Random(seed)
    narrow = [Task(number, "a", 0, draw.uniform(5, 20), draw.choice([1, 2]), 0.0) for number in range(250)]
    wide = Task(5000, "wide", 0, 10.0, width, 0.0)
    really = off([*narrow, wide], times, seed)
    machine = Machine(EIGHT)
    runs = [run_of(machine, narrow[number::others], f"narrow{number}", really) for number in range(others)]
    late = runs[0] if others == 1 else run_of(machine, [], "wide", really)
    late.later = [(30.0, [wide])]
    ended = simulate(runs if late is runs[0] else [*runs, late])
    began = next(each.began for each in ended if each.task.cell == 5000)
    longest = max(really.values())
    turn = PATIENCE_S + 2 * longest  # waits; then what runs, and what was let in because it was to end before that
    assert began <= 30 + turn + PATIENCE * turn * 2 / 8 + turn  # after the turn of one that is two cards wide
    assert sum(30 <= each.ended <= began for each in ended) <= 8 * (1 + (began - 30) / min(really.values()))


def test_an_attempt_is_made_on_equal_cards_where_so_many_are_free() -> None:
    machine, four = Machine(EIGHT[:4]), EIGHT[:4]
    kinds = dict(zip(four, ["H200", "A100", "A100", "A100"], strict=True))
    board = Board(Capacity(64, 4, 1000), "listed", View(machine, "a"), machine.cards, kinds)
    board.add([Task(0, "two", 0, 10.0, 2), Task(1, "one", 0, 5.0, 1)])
    used = []
    for _ in range(2):
        placed = board.start([card for card in four if card not in machine.held], four, True, 0.0)
        assert placed
        used.append([kinds[card] for card in placed.cards])
    assert used == [["A100", "A100"], ["H200"]], "the smaller group first: two of the larger may be wanted yet"
    assert board._equal(four[:2], 2) == four[:2], "where there are not as many, what is there"


def test_once_kept_for_only_what_ends_in_time_is_let_in() -> None:
    machine = Machine(EIGHT[:2])
    board = Board(Capacity(64, 2, 1000), "longest", View(machine, "a"), machine.cards)
    other = View(machine, "b")
    long, wide = Task(0, "long", 0, 100.0, 1), Task(1, "wide", 0, 10.0, 2)
    board.add([long])
    assert board.start(EIGHT[:2], EIGHT[:2], False, 0.0)
    board.add([wide, Task(2, "short", 0, 20.0, 1), Task(3, "too long", 0, 95.0, 1)])
    ready = ["card1"]
    started = board.start(ready, EIGHT[:2], False, 1.0)
    assert started and started.task.arm == "too long"  # before anything is kept: whatever fits
    board.end(started)
    del machine.held["card1"]
    board.waiting = [wide]
    assert board.start(ready, EIGHT[:2], False, 2.0) is None and board.kept is None
    assert board.start(ready, EIGHT[:2], False, 2.0 + PATIENCE_S) is None
    assert board.kept and board.kept.cards == {"card0", "card1"} and board.kept.due == 100.0
    assert other.kept() == board.kept and not other.keep(["card1"], 0.0)
    board.add([Task(2, "short", 0, 20.0, 1), Task(3, "too long", 0, 95.0, 1)])
    started = board.start(ready, EIGHT[:2], False, 20.0)
    assert started and started.task.arm == "short"
    board.end(started)
    del machine.held["card1"]
    board.add([Task(4, "short", 1, 20.0, 1)])
    assert board.start(ready, EIGHT[:2], False, 81.0) is None  # it would end at 101
    board.end(board.running[0])
    machine.held.clear()
    started = board.start(EIGHT[:2], EIGHT[:2], False, 130.0)
    assert started and started.task is wide and other.kept() is None


def test_cpu_attempts_fill_the_cores_while_cards_are_held() -> None:
    """`gpu1` and `cpu` side by side in one run: the cards do not limit the CPU's attempts, nor the other way round."""
    machine = Machine(EIGHT[:1])
    run = Run("both", machine, Capacity(cores=2, gpus=1, memory_gb=100))
    run.board.add([Task(n, "gpu", 0, 10.0, 1) for n in range(3)] + [Task(n, "cpu", 0, 10.0, 0) for n in range(3, 9)])
    ended = simulate([run])
    at_once = [sum(each.began <= at < each.ended and not each.cards for each in ended) for at in (1, 11, 21, 31)]
    assert at_once[:3] == [1, 1, 1] and at_once[3] == 2  # one core is the GPU's process's own while that runs
    assert [each.ended for each in ended if each.cards] == [10.0, 20.0, 30.0]


def test_neighbouring_cards_are_preferred_and_wide_gaps_kept() -> None:
    assert neighbours(EIGHT, EIGHT, 2) == ["card0", "card1"]
    assert neighbours(EIGHT, [card for card in EIGHT if card != "card0"], 2) == ["card2", "card3"]
    assert neighbours(EIGHT, [card for card in EIGHT if card != "card0"], 4) == ["card4", "card5", "card6", "card7"]
    assert neighbours(EIGHT, ["card0", "card1", "card2", "card5"], 1) == ["card2"]
    assert neighbours(EIGHT, ["card1", "card2", "card4", "card7"], 3) == ["card1", "card2", "card4"]
    assert neighbours(EIGHT, EIGHT, 0) == []
    assert neighbours(EIGHT, ["card0", "card4", "card5"], 2, ["card4", "card5"]) == ["card4", "card5"]


# --- strangers and failures


def cards_of(machine: Machine, said: list[str]) -> Cards:
    gpus = [Gpu(index, "A100", uuid, 80_000) for index, uuid in enumerate(machine.cards)]
    view = View(machine, "run")
    return Cards(gpus, view, view, said.append)


def test_a_card_with_a_stranger_on_it_is_left_out_by_pid_and_size_until_he_leaves() -> None:
    machine, said = Machine(EIGHT[:2]), []  # type: ignore[var-annotated]
    cards = cards_of(machine, said)
    machine.strangers.add("card1")
    assert cards.look((), 0.0) == set() and cards.ready(()) == ["card0"]
    assert said == ["gpu1 (card1) is left out while it is in use: process 4711 (30000 MiB)"] == cards.notes
    assert cards.blame(2) == "needs 2 GPUs; 1 can be used (gpu1 is in use: process 4711 (30000 MiB))"
    machine.strangers.clear()
    assert cards.ready(()) == ["card0"]  # looked at once in a while
    cards.look((), 1.5)
    assert cards.ready(()) == ["card0", "card1"] and said[-1] == "gpu1 is free again"


def test_who_is_a_stranger() -> None:
    assert stranger(Seen()) is None and stranger(Seen({7: 10}, 500)) is None  # a monitor; a desktop
    assert stranger(Seen({7: 400, 8: None}, 400)) == "process 7 (400 MiB), process 8 (memory unknown)"
    assert stranger(Seen({}, 20_000)) == "20000 MiB by processes that the driver does not name"  # in a container


def test_a_wide_attempt_is_given_up_when_nothing_else_is_left_and_its_cards_stay_in_use() -> None:
    tasks = [Task(0, "wide", 0, 10.0, 2), Task(1, "narrow", 0, 200.0, 1)]
    machine = Machine(EIGHT[:2])
    ended = simulate([run_of(machine, tasks)], [Change(0.0, "card1", "taken")])
    narrow, wide = ended
    assert narrow.infra is None and narrow.ended == 200.0
    assert wide.ended >= 260.0 and wide.infra and "process 4711 (30000 MiB)" in wide.infra
    machine = Machine(EIGHT[:2])
    ended = simulate([run_of(machine, tasks)], [Change(0.0, "card1", "taken"), Change(230.0, "card1", "free")])
    assert [each.infra for each in ended] == [None, None]


def test_a_card_that_fails_is_never_used_again_and_its_attempt_made_elsewhere() -> None:
    tasks = [Task(0, "a", 0, 100.0, 1), Task(1, "b", 0, 100.0, 1), Task(2, "all", 0, 10.0, 2)]
    ended = simulate([run_of(Machine(EIGHT[:2]), tasks)], [Change(50.0, "card0", "fails")])
    by = {arm: [each for each in ended if each.task.arm == arm] for arm in ("a", "b", "all")}
    assert by["all"][0].infra is None  # the widest came first
    lost, again = next(found for found in by.values() if len(found) == 2)
    assert lost.infra == "a card failed" and lost.cards == ("card0",) and lost.ended < 52
    assert again.cards == ("card1",) and again.infra is None and again.task.again
