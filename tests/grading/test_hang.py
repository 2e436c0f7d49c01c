"""What a hang is: no progress between two looks, and ranks that can never meet. The pure parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import SITE, ended, failed, frame, observation, ok
from judging import exception as raised
from repro_matrix.config.signatures import Signature
from repro_matrix.grading.hangs import progress as looks
from repro_matrix.grading.hangs.deadlock import family, mismatches, standing
from repro_matrix.grading.observation import Attempt, parse_threads
from repro_matrix.grading.signature import matches
from repro_matrix.launch.attempt import COSTS
from repro_matrix.runner.retry import LONGER, again, told

NCCL = Path(__file__).parents[1] / "nccl_dumps"
LOOK = {
    "at_s": 10.0, "ended": False, "cpu_s": 3.0, "io": 1000, "busy": False, "phase": "save", "stack": "a1", "inside": "",
    "entered": "c1", "spins": False,
}  # fmt: skip


def look(**changes: Any) -> dict[str, Any]:
    return {**LOOK, **changes}


def later(**changes: Any) -> dict[str, Any]:
    return look(at_s=13.0, **changes)


# --- two looks at a rank


@pytest.mark.parametrize(
    "change",
    [{"cpu_s": 3.5}, {"stack": "b2"}, {"phase": "barrier"}, {"entered": "c2"}, {"io": 1 << 20}, {"ended": True}],
)
def test_whatever_changes_between_two_looks_is_progress(change: dict[str, Any]) -> None:
    assert looks.of_rank(look(), later()) == "stuck"
    assert looks.of_rank(look(), later(**change)) == "progress"


def test_a_rank_that_waits_for_a_core_is_not_stuck() -> None:
    assert looks.of_rank(look(busy=True), later(busy=True)) == "progress"
    assert looks.of_rank(look(), later(busy=True)) == "unknown"


def test_a_rank_that_spins_in_a_wait_is_judged_by_where_it_stands() -> None:
    spinning = {"spins": True, "busy": True}
    assert looks.of_rank(look(**spinning), later(**spinning, cpu_s=6.0)) == "stuck"
    assert looks.of_rank(look(**spinning), later(**spinning, cpu_s=6.0, entered="c2")) == "progress"
    assert looks.of_rank(look(busy=True), later(**spinning, cpu_s=6.0)) == "progress"


def test_without_two_looks_that_tell_something_it_is_unknown() -> None:
    assert looks.of_rank(None, later()) == looks.of_rank(look(), None) == "unknown"
    assert looks.of_rank(look(), look(at_s=10.1)) == "unknown"
    nothing = {"stack": None, "entered": None}
    assert looks.of_rank(look(**nothing), later(**nothing)) == "unknown"
    assert looks.of_rank(look(cpu_s=None), later()) == "unknown"


seen = st.fixed_dictionaries(
    {
        "at_s": st.one_of(st.none(), st.floats(0, 100)),
        "ended": st.booleans(),
        "cpu_s": st.one_of(st.none(), st.floats(0, 50)),
        "io": st.one_of(st.none(), st.integers(0, 1 << 20), st.text()),
        "busy": st.booleans(),
        "phase": st.sampled_from([None, "body", "save"]),
        "stack": st.sampled_from([None, "a", "b"]),
        "entered": st.sampled_from([None, "a", "b"]),
        "spins": st.booleans(),
    }
)
maybe = st.one_of(st.none(), seen, st.just({}))


@given(maybe, maybe)
def test_stuck_needs_two_looks_in_which_nothing_differs(first: Any, second: Any) -> None:
    answer = looks.of_rank(first, second)
    assert answer in ("progress", "stuck", "unknown")
    if answer == "stuck" and not second["ended"]:
        for key in ("phase", "stack", "entered"):
            assert None in (first[key], second[key]) or first[key] == second[key]
        assert second["at_s"] - first["at_s"] >= looks.APART_S
        if not (first["spins"] and second["spins"]):
            assert not first["busy"] and not second["busy"]


@given(st.dictionaries(st.integers(0, 7), st.tuples(maybe, maybe), min_size=1), seen)
def test_one_rank_that_moves_is_progress_of_all(pairs: Any, one: Any) -> None:
    moved = {**one, "ended": False, "phase": "body"}
    pairs = {**pairs, 8: (moved, {**moved, "phase": "save"})}
    assert looks.of_attempt(pairs) == "progress"


@given(st.dictionaries(st.integers(0, 7), st.tuples(maybe, maybe), min_size=1))
def test_a_rank_of_which_nothing_is_known_never_makes_a_hang(pairs: Any) -> None:
    assert looks.of_attempt({**pairs, 8: (None, None)}) in ("progress", "unknown")


# --- can they ever meet


def entered(group: str = "0", waits: bool = True, sequence: int = 3, op: str = "all_reduce") -> dict[str, Any]:
    return {"group": group, "sequence": sequence, "op": op, "p2p": False, "waits": waits, "frames": []}


def stands(rank: int, *entries: dict[str, Any], inside: str = "wait", gone: bool = False, ranks: int = 2) -> Any:
    groups = {"0": list(range(ranks)), "a": [0, 1], "b": [0, 1]}
    answer = {"groups": groups, "collectives": list(entries), "complete": True}
    return standing(rank, gone, inside, None if gone else answer)


def test_different_collectives_under_one_number_never_meet() -> None:
    why = find_deadlock([stands(0, entered(op="_all_gather_base")), stands(1, entered(op="barrier"))])
    assert why == "collective 3 of group 0 (ranks 0, 1): rank 0 in _all_gather_base, rank 1 in barrier"


def test_the_same_collective_meets() -> None:
    assert find_deadlock([stands(0, entered(op="all_gather")), stands(1, entered(op="_all_gather_base"))]) is None


def test_two_groups_entered_crosswise_never_meet() -> None:
    assert find_deadlock([stands(0, entered("a", sequence=1)), stands(1, entered("b", sequence=1))])


def test_a_rank_that_has_ended_never_comes() -> None:
    why = find_deadlock([stands(0, gone=True), stands(1, entered())])
    assert why is not None and "rank 0 did not enter it" in why


def test_ranks_that_wait_for_one_at_work_may_meet() -> None:
    """It computes, sleeps, compiles, or makes a group: it stands in no collective."""
    assert find_deadlock([stands(0, inside=""), stands(1, entered())]) is None
    assert find_deadlock([stands(0, inside=""), stands(1, entered(), ranks=3), stands(2, gone=True, ranks=3)]) is None


def test_ranks_that_wait_for_others_which_can_still_go_on_may_meet() -> None:
    """Ranks 0 and 1 are in one collective that all of its members have entered; rank 2 waits for them."""
    pair = [stands(rank, entered("a", sequence=1), ranks=3) for rank in (0, 1)]
    assert find_deadlock([*pair, stands(2, entered(), ranks=3)]) is None


def test_a_receive_that_the_recorder_does_not_hold_waits_for_all_others() -> None:
    assert find_deadlock([stands(0, entered(op="barrier")), stands(1, inside="recv")])
    assert find_deadlock([stands(0, entered(op="barrier"), ranks=3), stands(1, inside="recv", ranks=3),
                       stands(2, inside="", ranks=3)]) is None  # fmt: skip


def test_what_the_recorder_has_overwritten_is_not_known() -> None:
    lost = standing(1, False, "all_reduce", {"groups": {"0": [0, 1]}, "collectives": [], "complete": False})
    assert find_deadlock([stands(0, entered()), lost]) is None


def test_without_a_recorder_different_collectives_never_meet_and_like_ones_may() -> None:
    def at(*places: str) -> Any:
        return find_deadlock([standing(rank, False, place, None) for rank, place in enumerate(places)])

    assert at("barrier", "all_gather_into_tensor") and at("barrier", "recv", "barrier")
    assert at("barrier", "barrier") is None and at("send", "recv") is None and at("wait", "barrier") is None
    assert at("barrier", "") is None


def test_on_a_gpu_the_host_stands_elsewhere_than_in_the_collective() -> None:
    ranks = [
        stands(0, entered(op="_all_gather_base"), inside=""),
        stands(1, entered(op="all_reduce_barrier"), inside=""),
    ]
    assert find_deadlock(ranks) is None and find_deadlock(ranks, spins=True)
    assert find_deadlock([ranks[0], stands(1, inside="")], spins=True) is None


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 5), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=8,
)


@given(json_values, st.sampled_from(["groups", "collectives", "complete"]))
def test_a_damaged_answer_is_no_evidence(value: Any, key: str) -> None:
    whole = {"groups": {"0": [0, 1]}, "collectives": [entered()], "complete": True}
    find_deadlock([standing(0, False, "wait", {**whole, key: value}), standing(1, False, "wait", value)])


@given(st.lists(st.tuples(st.sampled_from(["0", "a", "b"]), st.integers(1, 4), st.booleans()), max_size=4))
def test_ranks_that_entered_the_same_can_always_meet(listed: Any) -> None:
    entries = [entered(group, waits, number) for group, number, waits in listed]
    assert find_deadlock([stands(0, *entries), stands(1, *entries)]) is None


@pytest.mark.parametrize(
    ("op", "kind"),
    [("_all_gather_base", "allgather"), ("ALLGATHER_coalesced", "allgather"), ("all_reduce_barrier", "barrier"),
     ("allreduce_coalesced", "allreduce"), ("_reduce_scatter_base", "reducescatter"), ("new_group", ""),
     ("send 0->1", "send")],
)  # fmt: skip
def test_names_of_collectives(op: str, kind: str) -> None:
    assert family(op) == kind


# --- where a main thread stands


def trace(*frames: str, other: str = "") -> str:
    main = "\n".join(f"    {each}" for each in frames)
    witness = f'Thread 2 (idle): "kit-witness"\n    _serve (/x/repros/repro_kit/rank_monitor.py:9){other}'
    return f'# py-spy\n{witness}\nThread 1 (idle): "MainThread"\n{main}\n'


def test_where_a_main_thread_waits_for_others() -> None:
    c10d = f"{SITE}/torch/distributed/distributed_c10d.py"
    assert looks.inside(trace(f"barrier ({c10d}:7)", "body (/x/repros/a.py:1)")) == "barrier"
    library = f"forward_no_grad ({SITE}/torch/_library/autograd.py:1)"
    dispatch = (f"OpOverload.redispatch ({SITE}/torch/_ops.py:1)", library)
    assert looks.inside(trace(*dispatch, f"wait_tensor ({SITE}/torch/distributed/_f.py:1)"))
    ddp = f"_distributed_broadcast_coalesced ({SITE}/torch/nn/parallel/distributed.py:7)"
    assert looks.inside(trace(ddp, "body (/x/repros/a.py:1)")) == "broadcast", "of buffers: no frame of a collective"
    assert not looks.inside(trace("_distributed_broadcast_coalesced (/x/repros/distributed.py:7)"))
    assert not looks.inside(trace(f"new_group ({c10d}:7)"))
    assert not looks.inside(trace("nap (/x/repros/a.py:1)", f"barrier ({c10d}:7)"))
    assert not looks.inside(trace(f"wait ({SITE}/torch/distributed/elastic/x.py:7)")) and not looks.inside("")


def test_the_witness_and_what_is_not_torch_do_not_count_as_movement() -> None:
    one, two = (
        trace("barrier (/x/torch/distributed/c.py:7)", other=f"\n    run (/usr/lib/python3.11/x.py:{n})")
        for n in (1, 2)
    )
    assert looks.still(one) == looks.still(two) and "barrier" in looks.still(one)
    assert [thread.main for thread in parse_threads(one)] == [True, False]


# --- at the deadline


def timed_out(first: dict[str, Any], second: dict[str, Any], **attempt: Any) -> dict[str, Any]:
    ranks = [{**ended(n, by="deadline"), "looks": [look(), later()] if n else [first, second]} for n in (0, 1)]
    return observation(*ranks, timed_out=True, **attempt)


def test_ranks_that_move_at_the_deadline_are_too_slow() -> None:
    slow = looks.no_hang(Attempt(timed_out(look(), later(cpu_s=5.0, phase="save"))))
    assert slow is not None and slow[0] == "too slow" and "rank 0 (phase save)" in slow[1]
    assert looks.no_hang(Attempt(timed_out(look(), later()))) is None
    assert looks.no_hang(Attempt(timed_out(look(), later(busy=True))))[0] == "unknown"  # type: ignore[index]
    assert looks.no_hang(Attempt(observation(ended(0, by="deadline"), timed_out=True))) is None, "an older launcher's"


def test_an_attempt_that_never_began_its_work_is_no_hang() -> None:
    never = timed_out(look(), later(), hang={"starting": True, "never_meet": None, "limit_s": 100.0})
    assert looks.no_hang(Attempt(never))[0] == "start-up too slow"  # type: ignore[index]


def test_limits_grow_with_ranks_and_know_the_accelerator() -> None:
    cpu, cuda = COSTS["cpu"], COSTS["cuda"]
    assert cpu.work_limit(25, 8) == 25 and cuda.work_limit(25, 8) == 25 + 60
    assert cuda.start_limit(8) > cpu.start_limit(8) > cpu.start_limit(1)


def test_an_attempt_that_was_too_slow_gets_one_with_a_longer_deadline() -> None:
    slow = observation(ok(0), ok(1), infra={"kind": "too slow", "message": "still at work"}, deadline_s=10.0)
    changes = again(slow)
    assert changes == {"again": slow["infra"], "deadline": LONGER * 10}
    assert told(changes) == "too slow: still at work; deadline 30 s"
    assert again({**slow, "attempt": {**slow["attempt"], "again": "too slow"}}) is None, "once"
    assert again({**slow, "attempt": {**slow["attempt"], "interrupted": True}}) is None


# --- signatures, from NCCL's flight recorder (made up after the documented schema; no GPU has run them)


def nccl(name: str) -> dict[str, Any]:
    """An observation whose ranks stand in a synchronize, with the answers of a file beside this test."""
    answers = json.loads((NCCL / f"{name}.json").read_text(encoding="utf-8"))
    stack = trace(f"synchronize ({SITE}/torch/cuda/__init__.py:9)", "body (/x/repros/a.py:1)")
    ranks = [{**ended(n, by="deadline", stack=stack), "collectives": each} for n, each in enumerate(answers["ranks"])]
    return observation(*ranks, timed_out=True, backend="nccl")


LONELY = Signature.model_validate(
    {
        "name": "lonely", "kind": "hang", "collective": {"kinds": ["allgather", "barrier"]},
        "frames": [{"module": r"torch\.distributed\.distributed_c10d", "function": "all_gather.*|_all_gather_base"},
                   {"module": r"torch\.distributed\.distributed_c10d", "function": "barrier"}],
    }
)  # fmt: skip


def test_a_hang_signature_matches_nccls_flight_recorder() -> None:
    found = matches(LONELY, nccl("synthetic_lonely_all_gather"))
    assert found is not None and found.ranks == (0, 1) and "rank 1 in all_reduce_barrier" in found.message
    without = LONELY.model_copy(update={"collective": None})
    assert matches(without, nccl("synthetic_lonely_all_gather")), "frames of the call alone"
    assert matches(LONELY, nccl("synthetic_missing_rank")) is None
    missing = Signature.model_validate(
        {"name": "m", "kind": "hang", "collective": {"kinds": ["allreduce"], "missing": True}}
    )
    assert matches(missing, nccl("synthetic_missing_rank")) and not matches(
        missing, nccl("synthetic_lonely_all_gather")
    )


def test_the_first_mismatch_names_its_ranks() -> None:
    answers = nccl("synthetic_missing_rank")["ranks"]
    first = mismatches(standing(rank["rank"], False, "", rank["collectives"]) for rank in answers)[0]
    assert (first.sequence, dict(first.ops), first.missing) == (7, {0: "all_reduce", 2: "all_reduce"}, (1,))
    assert (
        find_deadlock([standing(n, False, "", rank["collectives"]) for n, rank in enumerate(answers)], spins=True) is None
    )


def test_a_failure_beside_it_is_no_hang_of_its_own() -> None:
    seen = nccl("synthetic_lonely_all_gather")
    seen["ranks"][1] = failed(1, raised("ValueError", "no", [frame("x", "y")]))
    assert matches(LONELY, seen) is None
