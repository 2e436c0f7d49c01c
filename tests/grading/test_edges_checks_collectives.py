"""Judges at their edges: checks, collectives, looks. Each was a small change (`make mutants`) that nobody saw."""

from __future__ import annotations

import math
from typing import Any

import pytest
from judging import (
    DIST,
    SITE,
    ended,
    failed,
    made,
    observation,
    peer_failed,
)  # fmt: skip
from repro_matrix.grading.checks import judged, same
from repro_matrix.grading.hangs import progress as looks
from repro_matrix.grading.hangs.deadlock import Entry, Standing, family, mismatches, standing
from repro_matrix.grading.observation import Attempt

# -- checks


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "passed"),
        ({"got": 1.1 - 1e-12, "want": 1.0}, "passed"),
        ({"got": 1.2, "passed": False}, "failed"),
        ({"got": 1.2}, "void"),  # the rank says that it passed
        ({"passed": None}, "void"),
        ({"tolerance": 1.0}, "void"),  # a zero would pass
        ({"tolerance": 0.999}, "passed"),
        ({"tolerance": -0.1}, "void"),
        ({"tolerance": 0, "got": 1.0}, "passed"),
        ({"tolerance": 0, "got": 1.5, "passed": False}, "failed"),
        ({"tolerance": "inf"}, "void"),
        ({"tolerance": True}, "void"),
        ({"tolerance": "wide"}, "void"),
        ({"want": 0.0, "got": 0.4, "tolerance": 0.49}, "passed"),
        ({"want": 0.0, "got": 0.4, "tolerance": 0.5}, "void"),  # half of it is no rounding
        ({"got": "nan", "passed": False}, "failed"),
        ({"got": "-inf", "passed": False}, "failed"),
        ({"want": "inf", "got": "inf", "passed": False}, "failed"),
        ({"got": 10**400, "passed": False}, "failed"),
        ({"got": "one"}, "void"),
        ({"got": [1.0], "want": 1.0}, "void"),
        ({"got": [1.0], "want": [1.0]}, "passed"),
        ({"got": [1.0, 1.0], "want": [1.0]}, "void"),
        ({"got": [], "want": []}, "void"),
        ({"got": [1.0, True], "want": [1.0, 1.0]}, "void"),
        ({"got": [1.0, 3.0], "want": [1.0, 1.0], "passed": False}, "failed"),
        ({"at": 2.0}, "passed"),
        ({"at": 2.5}, "void"),  # after the script was done
        ({"at": None}, "void"),
        ({"at": "nan"}, "void"),
        ({"tolerance": None}, "void"),  # numbers without one
        ({"tolerance": None, "got": 1.0, "want": "a"}, "void"),
        ({"tolerance": None, "got": "a", "want": 1.0, "passed": False}, "void"),
        ({"tolerance": None, "got": "a", "want": "a"}, "passed"),
        ({"tolerance": None, "got": "a", "want": "b", "passed": False}, "failed"),
        ({"tolerance": None, "got": "a", "want": "a", "looked_at": " "}, "void"),
        ({"tolerance": None, "got": "a", "want": "a", "looked_at": None}, "void"),
        ({"tolerance": None, "got": True, "want": True}, "passed"),
    ],
)  # fmt: skip
def test_a_check_is_judged_by_its_numbers(changes: dict[str, Any], state: str) -> None:
    found = judged(made(**changes), 2, 2.0)
    assert found.state == state, found.says
    assert found.failed is (state == "failed") is (found.severity > 0), "only what failed is wrong by so much"


def test_how_wrong_a_check_is() -> None:
    assert judged(made(got=1.4, passed=False), 2, 2.0).severity == pytest.approx(4.0)
    assert judged(made(got=1.4, tolerance=0, passed=False), 2, 2.0).severity == math.inf
    assert judged(made(got="a", want="b", tolerance=None, passed=False), 2, 2.0).severity == math.inf
    assert judged(made(got="nan", passed=False), 2, 2.0).severity == math.inf
    assert judged(made(), 2, 2.0).severity == 0.0
    assert judged(made(), 2, None).state == "void", "nobody knows when the script was done"
    assert [judged({"passed": said}, 1).state for said in (True, False, None)] == ["passed", "failed", "void"]
    assert judged({"passed": False}, 1).name == "?" and judged({"name": "", "passed": True}, 1).name == "?"
    assert "tolerance 0.1" in judged(made(), 2, 2.0).says and judged(made(), 2, 2.0).says.endswith(": it")
    assert judged(made(looked_at="l" * 81), 2, 2.0).says.endswith(f": {'l' * 77}...")
    assert judged(made(looked_at="l" * 80), 2, 2.0).says.endswith(f": {'l' * 80}")
    assert judged(made(got=0.123456789, want=0.1, tolerance=0.05), 2, 2.0).says.startswith("got 0.1235, want 0.1, tol")


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ([1, "a"], [1, "a"], True), ([1], [1, 1], False), ([1], [2], False), ({"a": [1]}, {"a": [1]}, True),
        ({"a": 1}, {"b": 1}, False), ({"a": 1}, {"a": 2}, False), (True, 1, False), (1, 1.0, False),
        (math.nan, math.nan, False), ("a", "a", True), (None, None, True), ([True], [1], False),
    ],
)  # fmt: skip
def test_the_same_json(one: Any, other: Any, alike: bool) -> None:
    assert same(one, other) is alike and same(other, one) is alike


# -- collectives

GROUP = ("default", (0, 1))


def entry(sequence: int = 1, op: str = "all_reduce", waits: bool = True, group: Any = GROUP) -> Entry:
    return Entry(group, sequence, op, waits)


def stands(rank: int, *entries: Entry, inside: str = "wait", **more: Any) -> Standing:
    return Standing(rank, inside=inside, entries=entries, **{"complete": True, **more})


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("all_gather_into_tensor", "allgather"), ("_allgather_base", "allgather"),
        ("reduce_scatter_tensor", "reducescatter"),
        ("all_reduce", "allreduce"), ("allreduce_coalesced", "allreduce"), ("all_to_all_single", "alltoall"),
        ("broadcast", "broadcast"), ("barrier", "barrier"), ("allreduce_barrier", "barrier"), ("gather", "gather"),
        ("scatter_", "scatter"), ("reduce", "reduce"), ("SEND 0->1", "send"), ("recv 0<-1", "recv"), ("forward", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_a_collective_is_known_by_whatever_name(op: str, kind: str) -> None:
    assert family(op) == kind


def test_what_a_rank_is_known_to_have_entered() -> None:
    one = stands(0, entry(3, waits=False), entry(5))
    assert [each.sequence for each in one.pending] == [5] and one.last(GROUP) == 5
    assert one.last(("other", (0, 1))) == 0 and stands(0, complete=False).last(GROUP) is None
    assert Standing(0).last(GROUP) is None and Standing(0).pending == ()


def test_what_a_witness_says_is_taken_as_far_as_it_is_well_formed() -> None:
    listed = [
        {"sequence": 1, "group": "g", "op": "all_reduce", "waits": True},
        {"sequence": 2, "group": "g", "op": "send", "p2p": True, "waits": True},
        {"sequence": True, "group": "g", "op": "all_reduce"},
        {"sequence": "3", "group": "g", "op": "all_reduce"},
        {"sequence": 4, "group": "unknown", "op": "all_reduce"},
        {"sequence": 5, "group": "g", "op": 5, "waits": 1},
        "nonsense",
    ]
    groups = {"g": [1, 0], "h": ["0"], "i": 3}
    seen = standing(0, False, "wait", {"groups": groups, "collectives": listed, "complete": True})
    assert seen.entries == (Entry(("g", (0, 1)), 1, "all_reduce", True), Entry(("g", (0, 1)), 5, "", False))
    assert seen.complete and not standing(0, False, "", {"collectives": [], "complete": 1}).complete
    assert standing(0, False, "", {"groups": groups}).entries is None
    assert standing(0, True, "", None) == Standing(0, True)


def test_who_waits_for_whom() -> None:
    missing = mismatches([stands(0, entry(2), entry(1, waits=False)), stands(1, entry(1, waits=False))])
    (one,) = missing
    assert (one.sequence, one.missing, dict(one.ops), one.contradicts) == (2, (1,), {0: "all_reduce"}, False)
    assert str(one) == "collective 2 of group default (ranks 0, 1): rank 0 in all_reduce; rank 1 did not enter it"
    (other,) = mismatches([stands(0, entry()), stands(1, entry(op="broadcast"))])
    assert other.contradicts and other.kinds == ("allreduce", "broadcast") and not other.missing
    assert mismatches([stands(0, entry()), stands(1, entry(op="allreduce_coalesced"))]) == []
    assert mismatches([stands(0, entry()), stands(1, entry(waits=False))]) == [], "it was there"
    assert mismatches([stands(0, entry()), stands(1, complete=False)]) == [], "nothing is known of it"
    assert mismatches([stands(0, entry())]) == [], "nor of one that is not looked at"
    (late,) = mismatches([stands(0, entry(3)), stands(1, entry(2, waits=False), complete=False)])
    assert late.missing == (1,)
    (gone,) = mismatches([stands(0, entry()), Standing(1, ended=True)])
    assert gone.missing == (1,), "it has ended, and nothing is known of what it entered"
    three = ("default", (0, 1, 2))
    (both,) = mismatches([stands(0, entry(group=three)), stands(1), stands(2)])
    assert str(both).endswith("; ranks 1, 2 did not enter it")
    a, b = ("a", (0, 1)), ("b", (0, 1))
    order = mismatches([stands(0, entry(1, group=a), entry(2, group=b)), stands(1, entry(2, "broadcast", group=b))])
    assert [each.sequence for each in order] == [2, 1], "contradictions first"


def test_whether_they_can_ever_go_on() -> None:
    lonely = [stands(0, entry()), Standing(1, ended=True, entries=(), complete=True)]
    assert "rank 1 did not enter it" in str(find_deadlock(lonely))
    assert find_deadlock([stands(0, entry()), stands(1, inside="")]) is None, "it is at work elsewhere"
    assert find_deadlock([stands(0, entry(), inside=""), Standing(1, ended=True, complete=True, entries=())]) is None
    assert find_deadlock([stands(0, entry(), inside=""), Standing(1, ended=True, complete=True, entries=())], spins=True)
    assert find_deadlock([Standing(0, ended=True)]) is None and find_deadlock([]) is None
    assert find_deadlock([stands(0, entry()), stands(1, entry())]) is None
    assert find_deadlock([stands(0, entry()), stands(1, entry(op="broadcast"))])
    two = (("a", (0, 1)), ("b", (0, 1)))
    crossed = [stands(0, entry(group=two[0])), stands(1, entry(group=two[1]))]
    assert find_deadlock(crossed), "each waits for the other"
    three = (0, 1, 2)
    assert find_deadlock([stands(0, entry(group=("g", three))), stands(1, entry(group=("g", three))), stands(2)])
    chain = [stands(0, entry(group=("g", (0, 1)))), stands(1, entry(group=("h", (1, 2)))), stands(2, inside="")]
    assert find_deadlock(chain) is None, "the last one is at work"
    h = ("h", (1, 2))
    late = [stands(0, entry(group=("g", (0, 1)))), stands(1, entry(group=h)), stands(2, entry(group=h))]
    assert find_deadlock(late) is None, "the one that is missing meets another first, and may come then"
    # by their places alone
    here = [Standing(0, inside="all_reduce"), Standing(1, inside="broadcast")]
    assert find_deadlock(here) == "rank 0 in all_reduce, rank 1 in broadcast"
    assert find_deadlock([here[0], Standing(1, inside="all_reduce_coalesced")]) is None
    assert find_deadlock([here[0], Standing(1, inside="monitored")]) is None, "what that is is not known"
    assert find_deadlock([Standing(0, inside="send"), Standing(1, inside="recv")]) is None
    assert find_deadlock([here[0], Standing(1, ended=True)]) == "rank 0 in all_reduce; rank 1 ended"
    assert str(find_deadlock([here[0], Standing(1, ended=True), Standing(2, ended=True)])).endswith("; ranks 1, 2 ended")


# -- looks

LOOK: dict[str, Any] = {
    "at_s": 10.0, "cpu_s": 5.0, "io": 0, "busy": False, "spins": False, "phase": "body", "stack": "f (x.py:1)",
    "entered": 3, "ended": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "stuck"),
        ({"at_s": 11.4}, "unknown"),
        ({"at_s": 11.5}, "stuck"),
        ({"at_s": None}, "unknown"),
        ({"cpu_s": 5.05 + 0.03 * 10}, "stuck"),
        ({"cpu_s": 5.36}, "progress"),
        ({"cpu_s": None}, "unknown"),
        ({"io": 64 << 10}, "stuck"),
        ({"io": (64 << 10) + 1}, "progress"),
        ({"io": None}, "stuck"),
        ({"phase": "end"}, "progress"),
        ({"phase": None}, "stuck"),
        ({"stack": "g (x.py:2)"}, "progress"),
        ({"entered": 4}, "progress"),
        ({"stack": None}, "stuck"),
        ({"stack": None, "entered": None}, "unknown"),
        ({"ended": True}, "progress"),
        ({"busy": True}, "unknown"),
        ({"spins": True, "cpu_s": 14.0}, "progress"),  # it did not spin before
    ],
)
def test_whether_a_rank_moved(changes: dict[str, Any], said: str) -> None:
    assert looks.of_rank(LOOK, {**LOOK, "at_s": 20.0, **changes}) == said


def test_two_looks_are_needed() -> None:
    later = {**LOOK, "at_s": 20.0}
    assert looks.of_rank(None, later) == looks.of_rank(LOOK, None) == "unknown"
    over = {**later, "ended": True}
    assert looks.of_rank({**LOOK, "ended": True}, over) == "stuck"
    busy = {**LOOK, "busy": True}
    assert looks.of_rank(busy, {**busy, "at_s": 20.0}) == "progress" and looks.of_rank(busy, later) == "unknown"
    spins = {**LOOK, "spins": True}
    assert looks.of_rank(spins, {**spins, "at_s": 20.0, "cpu_s": 99.0, "busy": True}) == "stuck"
    assert looks.pair(None) == (None, None) == looks.pair([])
    assert looks.pair([LOOK]) == (None, LOOK) and looks.pair([later, LOOK, over]) == (LOOK, over)
    still, moved = (LOOK, later), (LOOK, {**later, "entered": 9})
    assert looks.of_attempt({0: still, 1: still}) == "stuck" and looks.of_attempt({0: still, 1: moved}) == "progress"
    assert looks.of_attempt({0: still, 1: (None, later)}) == "unknown" == looks.of_attempt({})
    assert looks.of_attempt({0: ({**LOOK, "ended": True}, over)}) == "unknown", "nobody is left who could be stuck"


STACK = 'Thread 1 (idle): "MainThread"\n    {0}\n    body (/home/me/repros/x.py:3)\n'


@pytest.mark.parametrize(
    ("line", "function"),
    [
        (f"all_reduce ({DIST}/distributed_c10d.py:1)", "all_reduce"),
        (f"wait ({DIST}/distributed_c10d.py:1)", "wait"),
        (f"monitored_barrier ({DIST}/distributed_c10d.py:1)", "monitored_barrier"),
        (f"new_group ({DIST}/distributed_c10d.py:1)", ""),
        (f"barrier ({DIST}/elastic/utils/store.py:1)", ""),
        ("all_reduce (/home/me/mine.py:1)", ""),
        (f"__call__ ({SITE}/torch/_ops.py:1)\n    all_reduce ({DIST}/_functional_collectives.py:1)", "all_reduce"),
    ],
)  # fmt: skip
def test_where_a_main_thread_waits_for_others(line: str, function: str) -> None:
    assert looks.inside(STACK.format(line)) == function
    assert (
        looks.inside("") == ""
        and looks.inside('Thread 2 (idle): "other"\n    wait (/torch/distributed/x.py:1)\n') == ""
    )


def test_the_backward_pass_and_what_stays_the_same() -> None:
    engine = f"_engine_run_backward ({SITE}/torch/autograd/graph.py:1)"
    assert looks.backward(STACK.format(engine)) and not looks.backward(STACK.format(f"hook (x.py:1)\n    {engine}"))
    assert not looks.backward("")
    both = STACK.format("wait (/a/torch/distributed/x.py:1)")
    both += 'Thread 2 (idle): "t"\n    pin (/a/torch/utils/pin.py:1)\nThread 3 (idle): "w"\n'
    both += "    look (/r/repros/repro_kit/rank_monitor.py:1)\n"
    both += '    f (/a/torch/x.py:1)\nThread 4 (idle): "u"\n    sleep (/home/x.py:9)\n'
    kept = looks.still(both)
    assert "wait" in kept and "pin" in kept and "look" not in kept and "sleep" not in kept and "\n\n" in kept


def hung(*ranks: dict[str, Any], hang: dict[str, Any] | None = None, **more: Any) -> Attempt:
    return Attempt(observation(*ranks, timed_out=True, hang=hang, **more))


def test_when_the_deadline_is_no_hang() -> None:
    still, moved = [LOOK, {**LOOK, "at_s": 20.0}], [LOOK, {**LOOK, "at_s": 20.0, "phase": "step 3"}]
    stopped = [ended(rank, "deadline") for rank in (0, 1)]

    def seen(one: Any, other: Any, **more: Any) -> Any:
        return looks.no_hang(hung({**stopped[0], "looks": one}, {**stopped[1], "looks": other}, **more))

    assert seen(still, still) is None and seen(None, None) is None
    assert seen(still, moved) == ("too slow", "still at work after 120 s: rank 1 (phase step 3)")
    kind, said = seen(still, still[:1])
    assert (
        kind == "unknown"
        and said.startswith("after 120 s, and whether")
        and said.endswith("(rank 1: not looked at twice)")
    )
    for change, why in (({"busy": True}, "about to run"), ({"cpu_s": None}, "its CPU time could not be read")):
        assert seen(still, [LOOK, {**LOOK, "at_s": 20.0, **change}])[1].endswith(f"(rank 1: {why})")
    blind = {**LOOK, "stack": None, "entered": None}
    assert seen([blind, {**blind, "at_s": 20.0}], still)[1].endswith("(rank 0: no backtrace)")
    starting = {"never_meet": None, "limit_s": 30.0, "starting": True}
    assert seen(still, still, hang=starting) == (
        "start-up too slow",
        "not started after 30 s (rank 0: body, rank 1: body)",
    )
    assert seen(still, moved, hang={**starting, "starting": False})[1].startswith("still at work after 30 s")
    assert looks.no_hang(Attempt(observation(*stopped))) is None, "its time was not over"
    own = failed(0)
    assert looks.no_hang(hung(own, {**stopped[1], "looks": moved})) is None, "one failed by itself"
    lost = peer_failed(0)
    assert looks.no_hang(hung({**lost, "looks": None}, {**stopped[1], "looks": moved}))[0] == "too slow"  # type: ignore[index]
