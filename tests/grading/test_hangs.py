"""What a hang is: no progress between two samples, and ranks that are deadlocked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import (
    DIST,
    SITE,
    case,
    ended,
    exception,
    failed,
    matches,
    observation,
    ok,
    peer_failed,
)
from repro_matrix.config.schema import Signature
from repro_matrix.grading import hangs
from repro_matrix.grading.grade import grade
from repro_matrix.grading.hangs import (
    Entry,
    RankCollectives,
    attempt_progress,
    find_deadlock,
    rank_progress,
)
from repro_matrix.grading.observation import Evidence

# -- two samples of a rank

SAMPLE: dict[str, Any] = {
    "time_s": 10.0,
    "cpu_s": 5.0,
    "io": 0,
    "busy": False,
    "busy_waiting": False,
    "phase": "body",
    "stack": "f (x.py:1)",
    "collectives_digest": "c3",
    "ended": False,
}
LATER = {**SAMPLE, "time_s": 20.0}
SPINS, BLIND = {"busy_waiting": True, "busy": True}, {"stack": None, "collectives_digest": None}


@pytest.mark.parametrize(
    ("before", "after", "progress"),
    [
        ({}, {}, "stuck"),
        ({}, {"time_s": 11.4}, "unknown"),
        ({}, {"time_s": 11.5}, "stuck"),
        ({}, {"cpu_s": 5.05 + 0.03 * 10}, "stuck"),
        ({}, {"cpu_s": 5.36}, "progress"),
        ({}, {"cpu_s": None}, "unknown"),
        ({}, {"io": 64 << 10}, "stuck"),
        ({}, {"io": (64 << 10) + 1}, "progress"),
        *(({}, {key: "x"}, "progress") for key in ("phase", "stack", "collectives_digest")),
        *(({}, {key: None}, "stuck") for key in ("phase", "stack", "collectives_digest", "io")),
        ({}, BLIND, "unknown"),
        ({}, {"ended": True}, "progress"),
        ({"ended": True}, {"ended": True}, "stuck"),
        ({}, {"busy": True}, "unknown"),  # it waits for a core
        ({"busy": True}, {}, "unknown"),
        ({"busy": True}, {"busy": True}, "progress"),
        (SPINS, {**SPINS, "cpu_s": 14.0}, "stuck"),
        (SPINS, {**SPINS, "stack": "x"}, "progress"),
        ({"busy": True}, {**SPINS, "cpu_s": 14.0}, "progress"),  # it did not spin before
    ],
)
def test_rank_progress(before: Any, after: Any, progress: str) -> None:
    assert rank_progress({**SAMPLE, **before}, {**LATER, **after}) == progress


def test_attempt_progress_of_several_ranks() -> None:
    still, over = (SAMPLE, LATER), {**LATER, "ended": True}
    assert attempt_progress({0: still, 1: (None, LATER)}) == "unknown" == attempt_progress({})
    assert attempt_progress({0: (over, over)}) == "unknown", "no rank is left that could be stuck"
    assert attempt_progress({0: (over, over), 1: still}) == "stuck"


places = st.sampled_from([None, "a", "b"])
samples = st.fixed_dictionaries(
    {
        "time_s": st.floats(0, 100),
        "cpu_s": st.none() | st.floats(0, 50),
        "io": st.none() | st.integers(0, 1 << 20),
        "phase": places,
        "stack": places,
        "collectives_digest": places,
        "ended": st.booleans(),
        "busy": st.booleans(),
        "busy_waiting": st.booleans(),
    }
)
maybe = st.none() | samples
pairs = st.dictionaries(st.integers(0, 7), st.tuples(maybe, maybe), min_size=1)


@given(maybe, maybe)
def test_stuck_rank_does_not_differ_between_samples(first: Any, second: Any) -> None:
    if rank_progress(first, second) == "stuck" and not second["ended"]:
        for key in ("phase", "stack", "collectives_digest"):
            assert None in (first[key], second[key]) or first[key] == second[key]
        assert second["time_s"] - first["time_s"] >= hangs.MIN_INTERVAL_S
        if not (first["busy_waiting"] and second["busy_waiting"]):
            assert not first["busy"] and not second["busy"]


@given(pairs, samples)
def test_one_moving_rank_is_progress_of_all(others: Any, one: Any) -> None:
    moved = {**one, "ended": False, "phase": "body"}
    assert attempt_progress({**others, 8: (moved, {**moved, "phase": "save"})}) == "progress"


# -- at the timeout


def timed_out(first: Any, second: Any, *, rank: Any = None, **attempt: Any) -> Any:
    ranks = [
        (rank or ended(0, "timeout")) | {"samples": first},
        ended(1, "timeout") | {"samples": second},
    ]
    return hangs.timeout_without_hang(
        Evidence(observation(*ranks, **{"timed_out": True, **attempt}))
    )


STILL, MOVED = [SAMPLE, LATER], [SAMPLE, {**LATER, "phase": "step 3"}]
HANG = {"deadlock": None, "limit_s": 30.0, "starting": False}


def test_timeout_of_stuck_ranks_is_a_hang() -> None:
    assert (
        timed_out(STILL, STILL)
        is timed_out(None, None)
        is timed_out(STILL, MOVED, timed_out=False)
        is None
    )
    assert timed_out(None, MOVED, rank=failed(0)) is None, "one failed by itself"
    assert timed_out(None, MOVED, rank=peer_failed(0))[0] == "timeout_while_progressing"


@pytest.mark.parametrize(
    ("first", "second", "hang", "kind", "text"),
    [
        (STILL, MOVED, None, "timeout_while_progressing", "120 s: rank 1 (phase step 3)"),
        (STILL, MOVED, HANG, "timeout_while_progressing", "after 30 s"),
        (
            STILL,
            STILL,
            {**HANG, "starting": True},
            "startup_timeout",
            "30 s (rank 0: body, rank 1: body)",
        ),
        (STILL, STILL[:1], None, "unknown", "(rank 1: not sampled twice)"),
        (STILL, [SAMPLE, {**LATER, "busy": True}], None, "unknown", "(rank 1: about to run)"),
        (
            STILL,
            [SAMPLE, {**LATER, "cpu_s": None}],
            None,
            "unknown",
            "(rank 1: its CPU time could not be read)",
        ),
        ([{**SAMPLE, **BLIND}, {**LATER, **BLIND}], STILL, None, "unknown", "(rank 0: no stack)"),
    ],
)
def test_timeout_is_no_hang(first: Any, second: Any, hang: Any, kind: str, text: str) -> None:
    found = timed_out(first, second, hang=hang)
    assert found[0] == kind and text in found[1]


# -- what ranks entered

GROUP = ("default", (0, 1))
THREE = ("default", (0, 1, 2))
A, B = ("a", (0, 1)), ("b", (0, 1))


def entry(
    sequence: int = 1, op: str = "all_reduce", waits: bool = True, group: Any = GROUP
) -> Entry:
    return Entry(group, sequence, op, waits)


def rank(number: int, *entries: Entry, blocking_call: str = "wait", **more: Any) -> RankCollectives:
    return RankCollectives(
        number, blocking_call=blocking_call, entries=entries, **{"complete": True, **more}
    )


def test_collective_kind_whatever_a_release_calls_it() -> None:
    names = {
        "allgather": "all_gather_into_tensor _allgather_base ALLGATHER_coalesced",
        "reduce": "reduce",
        "reducescatter": "_reduce_scatter_base",
        "allreduce": "allreduce_coalesced",
        "alltoall": "all_to_all_single",
        "barrier": "all_reduce_barrier",
        "scatter": "scatter_",
        "gather": "gather",
        "": "new_group forward",
    }
    for kind, ops in names.items():
        assert {hangs.collective_kind(op) for op in ops.split()} == {kind}
    assert hangs.collective_kind("SEND 0->1") == "send"


def test_find_mismatches_puts_contradictions_first() -> None:
    ranks = [rank(0, entry(1, group=A), entry(2, group=B)), rank(1, entry(2, "broadcast", group=B))]
    found = hangs.find_mismatches(ranks)
    assert [(each.sequence, each.missing, each.contradicts) for each in found] == [
        (2, (), True),
        (1, (1,), False),
    ]


# -- deadlock


def calls(*functions: str) -> list[RankCollectives]:
    return [
        RankCollectives(number, blocking_call=function) for number, function in enumerate(functions)
    ]


G, H = ("g", (0, 1)), ("h", (1, 2))
AT_WORK, THIRD = rank(0, blocking_call=""), entry(group=THREE)
GONE = RankCollectives(1, ended=True, entries=(), complete=True)
# name -> (ranks, whether they wait on GPUs, whether they are deadlocked)
DEADLOCKS: dict[str, tuple[list[RankCollectives], bool, bool]] = {
    "one has ended": ([rank(0, entry()), GONE], False, True),
    "one of which nothing is known has ended": (
        [rank(0, entry()), RankCollectives(1, ended=True)],
        False,
        True,
    ),
    "different collectives": ([rank(0, entry()), rank(1, entry(op="broadcast"))], False, True),
    "the same collective": ([rank(0, entry()), rank(1, entry())], False, False),
    "at work": ([rank(0, entry()), rank(1, blocking_call="")], False, False),
    "at work, one has ended": (
        [AT_WORK, rank(1, entry(group=THREE)), RankCollectives(2, True)],
        False,
        False,
    ),
    "crosswise groups": ([rank(0, entry(group=A)), rank(1, entry(group=B))], False, True),
    "two wait for a third that waits": ([rank(0, THIRD), rank(1, THIRD), rank(2)], False, True),
    "a chain that ends at work": (
        [AT_WORK, rank(1, entry(group=G)), rank(2, entry(group=H))],
        False,
        False,
    ),
    "two that meet": (
        [rank(0, entry(group=A)), rank(1, entry(group=A)), rank(2, THIRD)],
        False,
        False,
    ),
    "a receive without entry": (
        [rank(0, entry(op="barrier")), rank(1, blocking_call="recv")],
        False,
        True,
    ),
    "a receive, a third at work": (
        [AT_WORK, rank(1, THIRD), rank(2, blocking_call="recv")],
        False,
        False,
    ),
    "overwritten entries": (
        [rank(0, entry()), rank(1, blocking_call="all_reduce", complete=False)],
        False,
        False,
    ),
    "the host stands elsewhere": ([rank(0, entry(), blocking_call=""), GONE], False, False),
    "the host stands elsewhere and spins": ([rank(0, entry(), blocking_call=""), GONE], True, True),
    "one spins without entry": (
        [rank(0, entry(), blocking_call=""), rank(1, blocking_call="")],
        True,
        False,
    ),
    "all have ended": ([RankCollectives(0, ended=True)], False, False),
    "no ranks": ([], False, False),
    # without a recorder
    "calls of different kinds": (calls("barrier", "all_gather"), False, True),
    "calls of one kind": (calls("all_reduce", "allreduce_c"), False, False),
    "an unknown call": (calls("barrier", "wait"), False, False),
    "no call": (calls("barrier", ""), False, False),
    "send and receive": (calls("send", "recv"), False, False),
    "a call, and one has ended": ([*calls("barrier"), RankCollectives(1, ended=True)], False, True),
}


@pytest.mark.parametrize("name", DEADLOCKS)
def test_find_deadlock(name: str) -> None:
    ranks, busy_waiting, expected = DEADLOCKS[name]
    assert bool(find_deadlock(ranks, busy_waiting)) is expected


@given(
    st.lists(
        st.tuples(st.sampled_from(["0", "a", "b"]), st.integers(1, 4), st.booleans()), max_size=4
    )
)
def test_ranks_with_equal_collectives_are_not_deadlocked(listed: Any) -> None:
    entries = [
        entry(sequence, waits=waits, group=(name, (0, 1))) for name, sequence, waits in listed
    ]
    assert find_deadlock([rank(0, *entries), rank(1, *entries)]) is None


# -- what a stack shows

STACK = 'Thread 1 (idle): "MainThread"\n    {0}\n    body (/home/me/repros/x.py:3)\n'
C10D = f"{DIST}/distributed_c10d.py:1"


@pytest.mark.parametrize(
    ("frames", "call"),
    [
        (f"wait ({C10D})", "wait"),
        (f"monitored_barrier ({C10D})", "monitored_barrier"),
        (f"new_group ({C10D})", ""),
        (f"barrier ({DIST}/elastic/utils/store.py:1)", ""),
        ("all_reduce (/home/me/mine.py:1)", ""),
        (f"nap (/x/repros/a.py:1)\n    barrier ({C10D})", ""),
        (
            (
                f"__call__ ({SITE}/torch/_ops.py:1)\n    all_reduce"
                f" ({DIST}/_functional_collectives.py:1)"
            ),
            "all_reduce",
        ),
        (
            f"f ({SITE}/torch/_library/autograd.py:1)\n    wait_tensor ({DIST}/_f.py:1)",
            "wait_tensor",
        ),
        (
            f"_distributed_broadcast_coalesced ({SITE}/torch/nn/parallel/distributed.py:7)",
            "broadcast",
        ),
        ("_distributed_broadcast_coalesced (/x/repros/distributed.py:7)", ""),
    ],
)
def test_blocking_call_of_the_main_thread(frames: str, call: str) -> None:
    assert hangs.blocking_call(STACK.format(frames)) == call
    assert hangs.blocking_call(STACK.replace("MainThread", "other").format(frames)) == ""


def test_in_backward_without_a_python_hook() -> None:
    engine = f"_engine_run_backward ({SITE}/torch/autograd/graph.py:1)"
    assert hangs.in_backward(STACK.format(engine)) and not hangs.in_backward("")
    assert not hangs.in_backward(STACK.format(f"hook (x.py:1)\n    {engine}"))


def test_stable_stack_drops_the_monitor_and_threads_outside_torch() -> None:
    others = {
        "pin": "/a/torch/utils/pin.py",
        "sleep": "/home/x.py",
        "look": "/r/repros/repro_kit/rank_monitor.py:1)\n    f (/a/torch/x.py",
    }
    stack = STACK.format("wait (/a/torch/distributed/x.py:1)")
    stack += "".join(
        f'Thread 2 (idle): "t"\n    {name} ({file}:1)\n' for name, file in others.items()
    )
    kept = hangs.stable_stack(stack)
    assert [name for name in ("wait", "\n\n", *others) if name in kept] == ["wait", "\n\n", "pin"]


# -- signatures, from NCCL's flight recorder (made up after the documented schema; no GPU has run
# them)


def nccl(name: str) -> dict[str, Any]:
    """An observation whose ranks stand in a synchronize, with the answers of a file of
    ``nccl_dumps``."""
    path = Path(__file__).parents[1] / "nccl_dumps" / f"{name}.json"
    answers = json.loads(path.read_text(encoding="utf-8"))["ranks"]
    stack = STACK.format(f"synchronize ({SITE}/torch/cuda/__init__.py:9)")
    ranks = [
        {**ended(n, by="timeout", stack=stack), "collectives": each}
        for n, each in enumerate(answers)
    ]
    return observation(*ranks, timed_out=True, backend="nccl")


LONELY, MISSING = "synthetic_lonely_all_gather", "synthetic_missing_rank"
CALLS = [
    {"module": r"torch\.distributed\.distributed_c10d", "function": name}
    for name in ("_?all_gather.*", "barrier")
]


@pytest.mark.parametrize(
    ("collective", "frames", "dump", "expected"),
    [
        ({"kinds": ["allgather", "barrier"]}, CALLS, LONELY, (0, 1)),
        (None, CALLS, LONELY, (0, 1)),
        ({"kinds": ["allgather", "barrier"]}, CALLS, MISSING, None),
        ({"kinds": ["allgather", "reduce"]}, CALLS, LONELY, None),
        ({"kinds": ["allreduce"]}, [], MISSING, (0, 2)),
        ({"kinds": ["allreduce"]}, [], LONELY, None),
    ],
)
def test_hang_signature_matches_the_flight_recorder(
    collective: Any, frames: Any, dump: str, expected: Any
) -> None:
    signature = Signature.model_validate(
        {"name": "s", "kind": "hang", "collective": collective, "frames": frames}
    )
    found = matches(signature, nccl(dump))
    assert (found.ranks if found else None) == expected


PATTERNS = {"kinds": ["allgather", "barrier|allreduce"]}
OTHER = [{"module": r"torch\.distributed\.tensor\..*", "function": "full_tensor"}, CALLS[1]]


def lonely(change: Any, **attempt: Any) -> Any:
    """The lonely all-gather; ``change`` is made to rank 1 (and its barrier)."""
    seen = nccl(LONELY)
    seen["attempt"] |= attempt
    change(seen["ranks"][1], seen["ranks"][1]["collectives"]["collectives"][-1])
    return seen


def passed_barrier(rank: Any, barrier: Any) -> None:
    barrier.update(waits=False, frames=[], state="completed")


def ended_after_barrier(rank: Any, barrier: Any) -> None:
    rank.update(ok(1, stack=None), collectives=None)


def raised_after_barrier(rank: Any, barrier: Any) -> None:
    passed_barrier(rank, barrier)
    entered = rank.pop("collectives")
    rank.update(failed(1, exception("FileNotFoundError", "No such file: model.pt")))
    rank["record"]["collectives"] = entered


@pytest.mark.parametrize(
    ("change", "backend", "frames", "expected"),
    [
        (passed_barrier, "nccl", CALLS, (0, 1)),
        (passed_barrier, "gloo", CALLS, None),
        (
            passed_barrier,
            "nccl",
            OTHER,
            None,
        ),  # rank 0 shows its frames: they are another signature's
        (ended_after_barrier, "nccl", CALLS, (0,)),
        (ended_after_barrier, "gloo", CALLS, None),
        (raised_after_barrier, "nccl", CALLS, None),  # a failure of its own
    ],
)
def test_nccl_may_complete_one_of_two_different_collectives(
    change: Any, backend: str, frames: Any, expected: Any
) -> None:
    """Not seen yet: over sockets, NCCL 2.28.9 completed none of ten (test_real_gpu.py:
    nccl.mismatched.*)."""
    signature = Signature.model_validate(
        {"name": "s", "kind": "hang", "collective": PATTERNS, "frames": frames}
    )
    found = matches(signature, lonely(change, backend=backend))
    assert (found.ranks if found else None) == expected


def test_other_failure_after_mismatched_collectives_describes_them() -> None:
    known = case()
    for backend in ("nccl", "gloo"):
        outcome = grade(
            known,
            "unfixed",
            lonely(raised_after_barrier, backend=backend, timed_out=False),
            [known],
        )
        assert outcome.outcome == "other_failure"
        assert ("rank 0 in _all_gather_base, rank 1 in" in outcome.reason) == (backend == "nccl")


def test_mismatch_that_nccl_completed_on_every_rank_is_found_behind_the_hang() -> None:
    """The ranks entered different collectives as the same one, both completed; rank 0 waits alone
    in the next."""
    alone = rank(0, entry(1, "all_gather", waits=False), entry(2, "all_gather"))
    ended = rank(1, entry(1, "barrier", waits=False), ended=True)
    assert [one.sequence for one in hangs.find_mismatches([alone, ended])] == [2]
    first, second = hangs.find_mismatches([alone, ended], completed=True)
    assert first.contradicts and first.kinds == ("allgather", "barrier") and second.missing == (1,)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["0", "a"]),
            st.integers(1, 4),
            st.sampled_from(["all_reduce", "barrier"]),
            st.booleans(),
        ),
        max_size=5,
    )
)
def test_completed_collectives_only_add_contradictions(listed: Any) -> None:
    ranks = [
        rank(
            number,
            *(
                entry(n, op, waits, group=(name, (0, 1)))
                for name, n, op, waits in listed[number::2]
            ),
        )
        for number in (0, 1)
    ]
    pending, every = hangs.find_mismatches(ranks), hangs.find_mismatches(ranks, completed=True)
    assert set(map(str, pending)) <= set(map(str, every))
    assert all(one.contradicts for one in every if str(one) not in map(str, pending))
