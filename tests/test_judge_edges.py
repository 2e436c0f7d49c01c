"""The judges at their edges, each where a small change of them (`make mutants`) went unseen by the other tests."""

from __future__ import annotations

import math
from typing import Any

import pytest
from judging import (
    PEER,
    SCRIPT,
    SITE,
    as_promised,
    case,
    check,
    control,
    document,
    ended,
    exception,
    failed,
    frame,
    observation,
    ok,
    peer_failed,
    record,
)  # fmt: skip

from repro_matrix.cell import doubt as doubt_of
from repro_matrix.conf.axes import Strategy
from repro_matrix.conf.predictions import Prediction
from repro_matrix.conf.signatures import Signature
from repro_matrix.judge import again, foreign, genuine, in_force, looks, metrics, predicted
from repro_matrix.judge.checks import judged, same
from repro_matrix.judge.collectives import Entry, Standing, family, mismatches, never_meet, standing
from repro_matrix.judge.comparable import comparable
from repro_matrix.judge.conditions import Point, rules
from repro_matrix.judge.evidence import NO_RECORD, Attempt, Raised, number
from repro_matrix.judge.expect import _value
from repro_matrix.judge.grade import failed_checks, grade, same_release
from repro_matrix.judge.outcome import Outcome
from repro_matrix.judge.peers import died_of, failure_of, failures_of, is_peer_error
from repro_matrix.judge.places import Place, dotted, is_own, lies_in, threads_of, within
from repro_matrix.judge.runs_here import Grounds
from repro_matrix.judge.signature import matches, near_misses

# -- checks


def made(**changes: Any) -> dict[str, Any]:
    return {
        "name": "x",
        "got": 1.0,
        "want": 1.0,
        "tolerance": 0.1,
        "looked_at": "it",
        "at": 1.0,
        "passed": True,
        **changes,
    }


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
    assert "rank 1 did not enter it" in str(never_meet(lonely))
    assert never_meet([stands(0, entry()), stands(1, inside="")]) is None, "it is at work elsewhere"
    assert never_meet([stands(0, entry(), inside=""), Standing(1, ended=True, complete=True, entries=())]) is None
    assert never_meet([stands(0, entry(), inside=""), Standing(1, ended=True, complete=True, entries=())], spins=True)
    assert never_meet([Standing(0, ended=True)]) is None and never_meet([]) is None
    assert never_meet([stands(0, entry()), stands(1, entry())]) is None
    assert never_meet([stands(0, entry()), stands(1, entry(op="broadcast"))])
    two = (("a", (0, 1)), ("b", (0, 1)))
    crossed = [stands(0, entry(group=two[0])), stands(1, entry(group=two[1]))]
    assert never_meet(crossed), "each waits for the other"
    three = (0, 1, 2)
    assert never_meet([stands(0, entry(group=("g", three))), stands(1, entry(group=("g", three))), stands(2)])
    chain = [stands(0, entry(group=("g", (0, 1)))), stands(1, entry(group=("h", (1, 2)))), stands(2, inside="")]
    assert never_meet(chain) is None, "the last one is at work"
    h = ("h", (1, 2))
    late = [stands(0, entry(group=("g", (0, 1)))), stands(1, entry(group=h)), stands(2, entry(group=h))]
    assert never_meet(late) is None, "the one that is missing meets another first, and may come then"
    # by their places alone
    here = [Standing(0, inside="all_reduce"), Standing(1, inside="broadcast")]
    assert never_meet(here) == "rank 0 in all_reduce, rank 1 in broadcast"
    assert never_meet([here[0], Standing(1, inside="all_reduce_coalesced")]) is None
    assert never_meet([here[0], Standing(1, inside="monitored")]) is None, "what that is is not known"
    assert never_meet([Standing(0, inside="send"), Standing(1, inside="recv")]) is None
    assert never_meet([here[0], Standing(1, ended=True)]) == "rank 0 in all_reduce; rank 1 ended"
    assert str(never_meet([here[0], Standing(1, ended=True), Standing(2, ended=True)])).endswith("; ranks 1, 2 ended")


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


DIST = f"{SITE}/torch/distributed"
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
    both += "    look (/r/repros/kit/witness.py:1)\n"
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


# -- peers


def raised(kind: str, message: str) -> Raised:
    return Raised(kind, frozenset({kind}), message, ())


@pytest.mark.parametrize(
    ("kind", "message", "lost"),
    [
        ("DistStoreError", "", True), ("EOFError", "x", True), ("BrokenPipeError", "", True),
        ("ValueError", PEER, False),
        ("RuntimeError", PEER, True), ("RuntimeError", "size mismatch", False), ("OSError", "Broken pipe", True),
        ("RuntimeError", "NCCL communicator was aborted on rank 1", True),
        ("DistBackendError", "ncclRemoteError: x", True),
        ("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete", True),
        ("TimeoutError", "wait timeout after 10 ms", True), ("ConnectionError", "Connection refused", True),
    ],
)  # fmt: skip
def test_an_error_that_means_a_lost_peer(kind: str, message: str, lost: bool) -> None:
    assert is_peer_error(raised(kind, message)) is lost


def test_how_a_rank_ended() -> None:
    def rank(**changes: Any) -> Any:
        return Attempt(observation(ok(0, **changes))).ranks[0]

    undone = record(0, done=False, phase="body")
    assert died_of(rank(signal="SIGSEGV", exit_code=None)) == "SIGSEGV"
    assert died_of(rank(exit_code=-11)) == "SIGSEGV" and died_of(rank(exit_code=-999)) == "" == died_of(
        rank(exit_code=1)
    )
    assert failure_of(rank()) is None
    died = failure_of(rank(exit_code=-11, record=undone, log_tail="one\ntwo\n\n", stack="    f (/a/torch/x.py:1)"))
    assert died and (died.kind, died.type, died.message, died.where, died.secondary) == (
        "signal",
        "SIGSEGV",
        "two",
        "a.torch.x.f",
        False,
    )
    late = failure_of(rank(exit_code=-6))
    assert late and late.where == "teardown, after its done marker"
    abort = failure_of(rank(exit_code=-6, record=undone, log_tail=f"{PEER}\nAborted\n"))
    assert abort and abort.secondary, "over a lost peer"
    segv = failure_of(rank(exit_code=-11, record=undone, log_tail=PEER))
    assert segv and not segv.secondary
    left = failure_of(rank(record=undone))
    assert left and (left.kind, left.type, left.secondary) == ("left", "exit code 0", False)
    code = failure_of(rank(exit_code=3, record=undone, log_tail="bad"))
    assert code and (code.kind, code.type, code.secondary) == ("exit", "exit code 3", False)
    assert failure_of(rank(exit_code=3, record=undone, log_tail=PEER)).secondary  # type: ignore[union-attr]
    assert failure_of(rank(ended_by="launcher", exit_code=None, signal="SIGTERM", record=undone)) is None
    told = record(0, done=False, exception=exception("SystemExit", "15"))
    assert failure_of(rank(ended_by="launcher", exit_code=1, record=told)).secondary  # type: ignore[union-attr]
    assert not failure_of(rank(exit_code=1, record=told)).secondary  # type: ignore[union-attr]


def test_the_first_failure_is_the_earliest_that_is_no_consequence() -> None:
    found = failures_of(Attempt(observation(peer_failed(0, 101.0), failed(1, at=109.0), failed(2, at=108.0), ended(3))))
    assert [f.rank for f in found.primary] == [2, 1] and found.first is found.primary[0]
    assert found.ranks == {1, 2} and found.excused == {0, 3}
    alone = failures_of(Attempt(observation(peer_failed(0), ok(1))))
    assert [f.rank for f in alone.primary] == [0] and alone.excused == set(), "then it is the failure"
    assert failures_of(Attempt(observation(ok(0), ok(1)))).first is None


# -- evidence


def test_a_rank_without_a_record_has_said_nothing_and_in_the_same_words() -> None:
    assert doubt_of.record(dict(NO_RECORD)) == NO_RECORD
    silent = Attempt(observation(ok(0, record=None))).ranks[0]
    assert (silent.checks, silent.notes, silent.chain, silent.at, silent.schema) == ([], [], [], None, 1)
    assert not silent.done and not silent.wrote and silent.packages == {} and silent.called == ()


def test_a_check_made_twice_is_void_but_for_one_that_failed() -> None:
    def states(schema: int, *checks: dict[str, Any]) -> list[str]:
        wrote = record(0, schema=schema, done_at=2.0, checks=list(checks))
        return [one.state for one in Attempt(observation(ok(0, record=wrote))).ranks[0].checks]

    bad = made(got=1.4, passed=False)
    assert states(2, made(), made(name="y")) == ["passed", "passed"]
    assert states(2, made(), made()) == ["void", "void"] and states(2, made(), bad) == ["void", "failed"]
    assert states(1, made(), made()) == ["passed", "passed"], "older records were judged by each"
    twice = Attempt(observation(ok(0, record=record(0, schema=2, done_at=2.0, checks=[made(), made()])))).ranks[0]
    assert twice.checks[0].says.startswith("made 2 times; got 1")


def test_which_checks_a_rank_owes() -> None:
    old, new = (
        Attempt(observation(ok(0, record=record(0, schema=schema)))).ranks[0] for schema in (1, 2)
    )  # fmt: skip
    asked = {"proof": {"checks": ["loss"]}}
    assert old.asked(["steps"], asked) == ["loss"] and new.asked(["steps"], asked) == ["steps"]  # type: ignore[arg-type]
    assert old.asked(["steps"], {}) == ["steps"]


def test_where_the_collectives_were_called_that_a_rank_waits_in() -> None:
    def called(*entries: Any, **more: Any) -> list[str]:
        rank = ok(0, collectives={"collectives": list(entries)}, **more)
        return [str(place) for place in Attempt(observation(rank)).ranks[0].called]

    frames = [[f"{SITE}/torch/x.py", "f"], [f"{SITE}/torch/y.py", "g", 3], "z"]
    assert called({"waits": True, "frames": frames}) == ["torch.x.f"]
    assert called({"waits": False, "frames": frames}, {"waits": True}, "w") == []
    lies_there = record(0, packages={"torch": f"{SITE}/torch", "gone": ""})
    assert called({"waits": True, "frames": frames}, record=lies_there) == ["torch.x.f"]


def test_numbers_and_names() -> None:
    assert [number(v) for v in (1, 1.5, True, "1", None, math.inf, math.nan, 10**400)] == [1.0, 1.5, *[None] * 6]
    assert dotted(f"{SITE}/torch/nn/modules/__init__.py") == ("torch.nn.modules",)
    assert dotted("/usr/lib/python3.11/json/decoder.py") == ("json.decoder",)
    assert dotted("/opt/over/torch/x.py") == ("opt.over.torch.x", "over.torch.x", "torch.x", "x")
    assert within("torch.nn", "torch") and within("torch", "torch") and not within("torchvision", "torch")
    assert is_own("__main__", "") and is_own("kit.run", "") and is_own("", "/home/me/repros/kit/run.py")
    assert not is_own("kitchen", "") and not is_own("", "/x/repros.py") and not is_own("", "/x/repros/x.so")


def test_where_a_file_lies() -> None:
    packages = {"torch": f"{SITE}/torch", "tool": f"{SITE}/tool.py"}
    assert lies_in(f"{SITE}/torch/nn/functional.py", packages) == "torch.nn.functional"
    assert lies_in(f"{SITE}/torch/__init__.py", packages) == "torch" and lies_in(f"{SITE}/tool.py", packages) == "tool"
    assert lies_in("/data/site-packages/torch/nn.py", packages) == "", "it only looks like it"
    assert lies_in(f"{SITE}/other/x.py", packages) == "other.x" and lies_in("/home/me/x.py", packages) == ""
    assert lies_in("/home/me/repros/x.py", packages) is None
    assert lies_in(f"{SITE}/torchvision/x.py", packages) == "torchvision.x"


def test_a_place_counts_by_where_it_lies() -> None:
    assert Place("torch.x", "", "f", place="").modules == () and not Place("torch.x", "", "f", place="").own
    assert Place("", "", "f", place="repros.x").own and Place("", "", "f", place="repros.x").modules == ()
    assert Place("a", "", "f", place="torch.nn").modules == ("torch.nn",)
    assert Place("torch.x", "", "f").modules == ("torch.x",) and Place("builtins", "<string>", "f").modules == ()
    assert not Place("", "<string>", "f").named and Place("", "<string>", "f", place="").named
    assert str(Place("", "", "f", place="torch.nn")) == "torch.nn.f" and str(Place("", "<string>", "f")) == "?.f"


def test_threads_of_a_backtrace_the_main_one_first() -> None:
    text = 'Thread 9 (idle): "pin"\n    a (/x/a.py:1)\nThread 1 (active): "MainThread"\n    C.<locals>.b (/x/b.py:2)\n'
    main, other = threads_of(text)
    assert main.main and main.places[0].function == "b" and other.places[0].function == "a" and not other.main
    (hand,) = threads_of('Current thread 0x1 (most recent call first):\n  File "/x/c.py", line 3 in c\nThread 0x2:\n')
    assert hand.main and hand.places[0].function == "c" and hand.lines == ('File "/x/c.py", line 3 in c',)


def test_a_wrapper_repeats_the_others_message() -> None:
    inner = exception("ValueError", "the size is wrong here")
    assert (
        len(
            Attempt(observation(failed(0, exception("RuntimeError", "caught: the size is wrong here", cause=inner))))
            .ranks[0]
            .chain
        )
        == 2
    )
    assert len(Attempt(observation(failed(0, exception("RuntimeError", "another", cause=inner)))).ranks[0].chain) == 1
    short = exception("ValueError", "wrong")
    assert len(Attempt(observation(failed(0, exception("RuntimeError", "so wrong", cause=short)))).ranks[0].chain) == 1


def test_a_record_is_the_ranks_own() -> None:
    def foreign(rank: dict[str, Any]) -> str:
        return Attempt(observation(rank)).ranks[0].foreign

    assert foreign(ok(0, pid=1)) == "" == foreign(ok(0)) and foreign(ok(0, record=None)) == ""
    assert foreign(ok(0, record=record(1))) == "its record says rank 1"
    assert foreign(ok(0, pid=7)) == "its record was written by process 1, the rank was process 7"
    assert foreign(ok(0, pid=7, record=record(0, pid=None))) == ""


# -- grade


def test_the_same_release_but_for_a_build_that_only_one_names() -> None:
    for one, other, alike in (
        ("2.2.0", "2.2.0", True), ("2.2.0+cu121", "2.2.0", True), ("2.2.0+cu121", "2.2.0+cpu", False),
        ("2.2.0", "2.2.1", False), ("2.2.0+cpu", "2.2.1", False), ("2.2.0+cpu", "2.2.1+cpu", False),
    ):  # fmt: skip
        assert same_release(one, other) is alike is same_release(other, one)


CASE = case()


def graded(*ranks: dict[str, Any], arm: str = "fix", **more: Any) -> Outcome:
    return grade(CASE, arm, observation(*ranks, **more), [CASE])


def test_what_an_outcome_says() -> None:
    clean = graded(ok(0), ok(1))
    assert (clean.outcome, clean.reason) == ("clean", "every rank finished; passed: logits")
    lost = graded(ok(0, record=record(0, checks=[])), ok(1))
    assert (lost.outcome, lost.reason) == ("infra", "no-proof: check logits was not made on rank 0")
    bad = [check("logits", False), check("loss", False)]
    wrong = graded(ok(0, record=record(0, checks=bad)), ok(1, record=record(1, checks=bad[:1])))
    assert wrong.outcome == "other_error" and wrong.failed == ("logits", "loss")
    assert (
        wrong.reason.startswith("silent: check logits failed on ranks 0, 1 (")
        and "; check loss failed on rank 0 (" in wrong.reason
    )
    assert wrong.primary is None and failed_checks(CASE, Attempt(observation(ok(0), ok(1)))) == ()
    fires = graded(failed(0), failed(1))
    assert (fires.outcome, fires.reason) == ("fires", "norm on ranks 0, 1: size mismatch in norm")
    assert fires.primary and (fires.primary.rank, fires.primary.type) == (0, "RuntimeError")
    undone = graded(ok(0, record=record(0, done=False)), ok(1))
    assert (undone.outcome, undone.reason) == ("other_error", "rank 0: exit 0 without its done marker")
    killed = graded(ok(0), ok(1, ended_by="launcher", exit_code=None, signal="SIGTERM"))
    assert killed.reason == "rank 1: finished, but was ended by the launcher (SIGTERM)"
    gone = graded(ok(0), world_size=2)
    assert gone.outcome == "other_error" and gone.reason == "rank 1 left nothing behind"
    late = graded(ended(0, "deadline", stack=f"    wait ({SITE}/torch/x.py:1)"), ended(1, "deadline"), timed_out=True)
    assert late.outcome == "hang" and late.reason == "the deadline of 120 s passed; rank 0 was in torch.x.wait"
    never = {"never_meet": "rank 1 ended", "limit_s": 9.0, "starting": False}
    stood = f"    body (/home/me/repros/x.py:3)\n    wait ({SITE}/torch/x.py:1)"
    within_ours = graded(ended(0, "deadline", stack=stood), ended(1, "deadline"), timed_out=True)
    assert within_ours.reason.endswith("; rank 0 was in torch.x.wait"), "the script's own frame says nothing"
    known = graded(ended(0, "deadline"), ended(1, "deadline"), timed_out=True, hang=never)
    assert known.reason == "its ranks can never go on: rank 1 ended"
    assert graded().reason == "lost: the observation holds no rank"
    assert graded(ok(0), interrupted=True).reason == "interrupted"
    long = graded(failed(0, exception("ValueError", "w" * 900)), ok(1))
    assert long.primary and len(long.primary.message) == 500
    assert long.reason.startswith(f"rank 0: ValueError: {'w' * 185}... in transformers")


def test_an_outcome_is_read_back_as_it_was() -> None:
    fires = graded(failed(0), failed(1))
    assert Outcome.from_json(fires.to_json()) == fires
    with pytest.raises(ValueError, match="no such outcome: 'fired'"):
        Outcome.from_json({**fires.to_json(), "outcome": "fired"})
    assert Outcome.from_json({**fires.to_json(), "otherwise": "nonsense"}).otherwise is None
    assert Outcome.from_json({**fires.to_json(), "otherwise": "clean"}).otherwise == "clean"
    assert fires.others("some-case") == () and len(fires.others("another")) == 1
    whole = Outcome("other_error", "why", (), None, ("loss",), "clean", (1,), "loss", "no-proof")
    assert Outcome.from_json(whole.to_json()) == whole
    bad = [check("logits", False)]
    for seen in (graded(ok(0, record=record(0, checks=[])), ok(1)), graded(ok(0, record=record(0, checks=bad)), ok(1))):
        assert Outcome.from_json(seen.to_json()) == seen and seen.check == "logits" and seen.ranks == (0,)


def test_steps_that_were_not_asked_for_are_no_proof() -> None:
    step = {**made(want=1, got=1, tolerance=0), "name": "steps"}
    proof = [step, {**made(), "name": "logits"}]
    settings = {"steps": 3, "flags": {}, "strategy": {"slug": "fsdp", "promises": {"collectives": []}}}
    wrote = [record(rank, schema=2, done_at=2.0, checks=proof, **as_promised(settings, 2)) for rank in (0, 1)]
    found = graded(*(ok(rank, record=wrote[rank]) for rank in (0, 1)), arm="broken", settings=settings)
    assert (found.outcome, found.infra, found.check) == ("infra", "no-proof", "steps")
    assert found.reason == "no-proof: check steps on rank 0 wanted 1, the attempt 3"
    settings["steps"] = 1
    assert (
        graded(*(ok(rank, record=wrote[rank]) for rank in (0, 1)), arm="broken", settings=settings).outcome == "clean"
    )


# -- genuine


def doubt(*ranks: dict[str, Any], settings: dict[str, Any] | None = None, **more: Any) -> str | None:
    return genuine.doubt(CASE, "fix", Attempt(observation(*ranks, settings=settings or {}, **more)))


def test_records_that_cannot_be_of_this_attempt() -> None:
    assert doubt(ok(0), ok(1)) is None
    assert doubt(ok(0), settings={"case": "other"}) == "it is an attempt of case other, not some-case"
    assert doubt(ok(0), settings={"arm": "broken"}) == "it is an attempt of arm broken, not fix"
    assert doubt(ok(0), settings={"case": "some-case", "arm": "fix"}) is None
    one = record(0, pid=7), record(1, pid=7)
    assert doubt(ok(0, pid=7, record=one[0]), ok(1, pid=7, record=one[1])) == "ranks 0 and 1 are one process"
    assert doubt(ok(0, record=record(0, started=38.9)), ok(1)) == "rank 0: its record was begun 60 s before the attempt"
    assert doubt(ok(0, record=record(0, started=39.0)), ok(1)) is None
    alone = observation(ok(0), ok(1))
    alone["ranks"][1]["record"]["world_size"] = 3
    assert genuine.doubt(CASE, "fix", Attempt(alone)) == "rank 1: its record is of 3 ranks, the attempt of 2"
    assert (
        doubt(ok(0, record=record(0, done_at=1.0)))
        == "rank 0: its record says that it is an older kit's, and holds done_at"
    )
    assert doubt(ok(0, record=record(0, schema=2, ended=None))) == "rank 0: its record says done, and was never ended"
    assert doubt(ok(0, record=record(0, schema=2, ended=None, done=False))) is None
    assert doubt(ok(0, record=None)) is None
    for key in ("in_force", "read"):
        gone = observation(ok(0, record=record(0, schema=2)), ok(1, record=record(1, schema=2)))
        del gone["ranks"][1]["record"][key]
        assert genuine.doubt(CASE, "fix", Attempt(gone)) == f"rank 1: its record says done, and holds no {key}"
        gone["ranks"][1]["record"]["done"] = False
        assert genuine.doubt(CASE, "fix", Attempt(gone)) is None, "it may have failed before it knew"


@pytest.mark.parametrize("strategy", [None, {}, {"slug": "fsdp"}, {"slug": "fsdp", "promises": {}}])
@pytest.mark.parametrize("today", ["schema", "versions", "fingerprint"])
def test_what_today_made_holds_its_strategys_promises(strategy: Any, today: str) -> None:
    """Without them nothing is asked of what was in force."""
    settings = {} if strategy is None else {"strategy": strategy}
    seen = observation(ok(0), ok(1), settings=settings)
    assert genuine.doubt(CASE, "fix", Attempt(seen)) is None, "an older engine's"
    if today == "schema":
        seen["ranks"][1]["record"].update(schema=2, in_force=[], read={"flags": [], "options": []})
    else:
        seen["attempt"][today] = {"torch": "2.13.0"} if today == "versions" else "f"
    assert genuine.doubt(CASE, "fix", Attempt(seen)) == "its settings hold none of the strategy's promises"


def test_ranks_of_one_attempt_ran_on_the_same_releases() -> None:
    def apart(one: str, other: str) -> str | None:
        ranks = [ok(rank, record=record(rank, versions={"torch": said})) for rank, said in enumerate((one, other))]
        return genuine.versions_apart(Attempt(observation(*ranks)))

    assert apart("2.2", "2.2") is None is apart("unknown", "2.2") and apart("2.2", "unknown") is None
    assert apart("2.2", "2.3") == "rank 1 had torch 2.3, rank 0 2.2"


def test_steps_are_those_that_were_asked_for() -> None:
    def steps(want: int, schema: int = 2, **settings: Any) -> str | None:
        wrote = record(0, schema=schema, checks=[{**made(want=want, got=want), "name": "steps"}])
        return genuine.other_steps(Attempt(observation(ok(0, record=wrote), settings=settings)))

    assert steps(3, steps=3) is None and steps(2) is None and steps(2, schema=1, steps=3) is None
    assert steps(2, steps=3) == "check steps on rank 0 wanted 2, the attempt 3"


def test_a_document_says_what_its_attempts_ran_with() -> None:
    ran = {"model": {"slug": "m", "scale": "tiny", "weights": "random"}, "strategy": {"slug": "fsdp"}, "world_size": 2,
           "flags": {"call": "inner"}, "device": "cpu"}  # fmt: skip

    def said(arm: str = "broken", settings: dict[str, Any] | None = None, **changes: Any) -> str | None:
        seen = observation(ok(0), ok(1), settings=settings or ran)
        other = (
            {"broken": [("clean", seen)]}
            if arm == "broken"
            else {"broken": [("fires", observation(failed(0)))], arm: [("clean", seen)]}
        )
        return genuine.contradiction(document(other, {}, **changes), CASE)  # type: ignore[arg-type]

    assert said() is None
    for changes, told in (
        ({"model": "n"}, "it ran with model m, the document says n"),
        ({"strategy": "ddp"}, "it ran with strategy fsdp, the document says ddp"),
        ({"scale": "full"}, "it ran with scale tiny, the document says full"),
        ({"weights": "hub"}, "it ran with weights random, the document says hub"),
        ({"ranks": 4}, "it ran with ranks 2, the document says 4"),
        ({"flags": {"call": "root"}}, "it ran with call=inner, the document says root"),
        ({"flags": {"unknown": 1}}, None),
    ):  # fmt: skip
        assert said(**changes) == (f"arm broken: {told}" if told else None)  # type: ignore[arg-type]
    assert said("fix", model="n") is None, "a fix may be a change of axis"
    assert said(settings={**ran, "device": "cuda"}) == "arm broken: it ran on cuda, the document says cpu"
    late = document({"broken": [("clean", observation(ok(0)))]}, {})
    late["provenance"]["started"] = 180.0
    assert genuine.contradiction(late, CASE) is None  # type: ignore[arg-type]
    late["provenance"]["started"] = 180.5
    assert genuine.contradiction(late, CASE) == "it says that it was begun after its last attempt had ended"  # type: ignore[arg-type]
    at = {"path": "results/gpu1/s/some-case/m.json"}
    assert (
        said(**at) == "its folder says gpu1, and its hardware cpu"
        and said(path="results/cpu/s/some-case/m.json") is None
    )  # type: ignore[arg-type]
    assert said(path="results/gpu1/s/other-case/m.json") is None
    simulated = case(simulated="devices", accelerator="cpu", launch={"backend": "fake"})
    assert genuine.contradiction(document({"broken": [("fires", observation(failed(0)))]}, {}), simulated) == (  # type: ignore[arg-type]
        "case some-case is simulated, and it does not say so"
    )
    alone = document({"control": [("clean", observation(ok(0), ok(1), settings=ran))]}, {}, model="n")
    said_of_control = genuine.contradiction(alone, control())  # type: ignore[arg-type]
    assert said_of_control == "arm control: it ran with model m, the document says n", "a control changes no axis"
    own = case(arms={"broken": {}, "fix": {"stack": "older"}, "other-fix": {"flags": {"call": "root"}}})
    for arm, told in (("fix", None), ("other-fix", "arm other-fix was measured on stack older, the document is of")):
        made = document({"broken": [("fires", observation(failed(0)))], arm: [("clean", observation(ok(0)))]}, {})
        made["arms"][arm]["stack"] = "older"
        found = genuine.contradiction(made, own)  # type: ignore[arg-type]
        assert found is None if told is None else str(found).startswith(told)
    reseeded = document({"broken": [("clean", observation(ok(0), settings={"seed": 1}))]}, {})
    assert genuine.contradiction(reseeded, CASE) == "arm broken: its settings say seed 1, its attempt 0"  # type: ignore[arg-type]
    changed = document({"broken": [("clean", observation(ok(0), settings={"seed": 1}))]}, {})
    changed["arms"]["broken"]["settings"] = {"seed": 2}
    assert genuine.contradiction(changed, CASE) == "arm broken: its seed is not what its attempt ran with"  # type: ignore[arg-type]


# -- in force

PROMISES = {"parameters": "shard", "gradients": "shard", "updates": "shard", "collectives": ["all_gather"]}
SET = {"flags": {"call": "root"}, "strategy": {"slug": "fsdp", "promises": PROMISES, "options": {}}}


def force(
    changes: dict[str, Any] | None = None, promises: dict[str, Any] | None = None, ranks: int = 2, **more: Any
) -> Any:
    """What is doubted where rank 1's evidence differs so; ``changes``: what -> its item, None: it is not there."""
    settings = {**SET, "strategy": {**SET["strategy"], "promises": promises or PROMISES, **more}}  # type: ignore[dict-item]
    kind = case(proof={"kind": "training", "checks": ["logits"]})
    made = []
    for rank in range(ranks):
        said = as_promised(settings, ranks)
        if rank == ranks - 1:
            items = {item["what"]: item for item in said["in_force"]}
            items |= {what: {"what": what, **item} for what, item in (changes or {}).items() if item is not None}
            said["in_force"] = [item for what, item in items.items() if (changes or {}).get(what, True) is not None]
        elif "extra" in (changes or {}):
            said["in_force"].append({"what": "extra", "got": 1})
        made.append(ok(rank, record=record(rank, **said)))
    return in_force.problem(kind, "fix", Attempt(observation(*made, settings=settings)))


def held(got: Any, whole: Any = 1000) -> dict[str, Any]:
    return {"got": got, "whole": whole}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, None),
        ({"group": None}, "no evidence of a process group on rank 1"),
        ({"group": {"got": 1, "backend": "gloo"}}, "the process group of rank 1 has 1 of 2 ranks"),
        ({"group": {"got": 2, "backend": "mpi"}}, "the backend gloo was not in force: rank 1 used mpi"),
        ({"group": {"got": 2}}, "the backend gloo was not in force: rank 1 used none"),
        ({"parameters": None}, "fsdp left no evidence: parameters were not measured on rank 1"),
        ({"gradients": None}, "fsdp left no evidence: gradients were not measured on rank 1"),
        ({"parameters": held("x")}, "fsdp left no evidence: parameters on rank 1: x of 1000"),
        ({"parameters": held(5, 0)}, "fsdp left no evidence: parameters on rank 1: 5 of 0"),
        ({"parameters": held(-1)}, "fsdp left no evidence: parameters on rank 1: -1 of 1000"),
        ({"parameters": held(560)}, None),
        ({"parameters": held(570)}, "fsdp was not in force: rank 1 holds 57% of the parameters, 1/2 was promised"),
        ({"parameters": held(390)}, "fsdp was not in force: the ranks together hold 89% of the parameters"),
        ({"parameters": held(410)}, None),
        ({"gradients": held(610)}, None),
        ({"gradients": held(640)},
         "fsdp was not in force: the ranks together hold 114% of the gradients, 1 x 100% was promised"),
        ({"collectives": None}, "fsdp left no evidence: collectives were not counted on rank 1"),
        ({"collectives": {"got": {"all_gather": 0}}},
         "fsdp was not in force: no all_gather between ranks in a step of rank 1"),
        ({"collectives": {"got": {}}}, "fsdp was not in force: no all_gather between ranks in a step of rank 1"),
        ({"extra": {"got": 1, "least": 1, "most": 1}}, None),
        ({"extra": {"got": 0, "least": 1}}, "extra was not in force on rank 1: got 0, promised at least 1"),
        ({"extra": {"got": 3, "least": 1, "most": 2, "looked_at": "y"}},
         "extra was not in force on rank 1: got 3, promised at least 1 and at most 2 (y)"),
        ({"extra": {"got": 3, "least": 2, "most": 2}}, "extra was not in force on rank 1: got 3, promised 2"),
        ({"extra": {"got": 3, "least": None}},
         "extra was not in force on rank 1: got 3, promised nothing that can be judged"),
        ({"extra": {"got": "x", "most": 2}}, "extra was not in force on rank 1: got x, promised at most 2"),
        ({"extra": {"got": 3}}, None),
        ({"extra": None}, "extra left no evidence on rank 1"),  # where another rank has measured it
    ],
)  # fmt: skip
def test_what_a_strategy_promises_is_measured(changes: dict[str, Any], told: str | None) -> None:
    assert force(changes) == told


def test_whole_part_and_copies() -> None:
    whole = {"parameters": "whole"}
    assert force({"parameters": held(900)}, whole) is None
    assert force({"parameters": held(890)}, whole) == (
        "fsdp was not in force: rank 1 holds 89% of the parameters, all were promised"
    )
    part = {"parameters": "part"}
    assert force({"parameters": held(310)}, part) is None
    assert (
        force({"parameters": held(290)}, part) == "fsdp was not in force: the ranks together hold 89% of the parameters"
    )
    every = {what: held(950) for what in ("parameters",)}
    settings = {"parameters": "shard"}
    two = {"options": {"strategy": "HYBRID"}, "copies": {"strategy": {"HYBRID": 2}}}
    assert (
        force(every, settings, ranks=4, **two)
        == "fsdp was not in force: the ranks together hold 170% of the parameters"
    )
    strategy = {"options": {"a": "x", "b": 1}, "copies": {"a": {"y": 4}, "b": {"1": 2}}}
    assert in_force._copies(strategy) == 2 and in_force._copies({}) == 1  # type: ignore[typeddict-item, arg-type]
    assert in_force._copies({"options": {"a": "x"}, "copies": {"a": {"x": 0}}}) == 1  # type: ignore[typeddict-item]
    shares = in_force._shares
    assert shares("parameters", "shard", [0.95, 0.95], 2, 2) == "every rank holds all parameters"
    assert shares("gradients", "part", [0.95, 0.95], 2, 1) == "every rank holds all gradients"
    assert shares("updates", "part", [1.0, 1.0], 2, 2) == "every rank updates all parameters"
    assert (
        shares("parameters", "shard", [1.0], 1, 1) is None and shares("parameters", "shard", [1.0, 1.0], 2, 1) is None
    )


def test_what_an_arm_changes_was_read() -> None:
    def unread(read: dict[str, list[str]], arm: str = "fix", known: Any = CASE, flags: Any = None) -> str | None:
        ranks = [ok(rank, record=record(rank, read=read if rank else {})) for rank in (0, 1)]
        seen = observation(*ranks, settings={"flags": flags or {"call": "root", "cache": True}})
        return in_force.unread(known, arm, Attempt(seen))

    assert unread({"flags": ["call"]}) is None
    assert unread({}) == "the flag call was never read: the arm changes nothing by it"
    assert unread({}, "no-such-arm") is None
    assert unread({}, flags={"call": "inner", "cache": True}) is None, "as it is by default"
    assert (
        unread({}, flags={"call": "inner", "cache": 1})
        == "the flag cache was never read: the arm changes nothing by it"
    )
    options = case(
        arms={"broken": {}, "fix": {"options": {"stage": 2}}, "other": {"strategy": "ddp", "options": {"x": 1}}}
    )
    usual = {"call": "inner", "cache": True}
    assert unread({}, known=options, flags=usual) == "the option stage was never read: the arm changes nothing by it"
    assert unread({"options": ["stage"]}, known=options, flags=usual) is None
    assert unread({}, "other", options, usual) is None, "another strategy reads its own"
    silent = Attempt(observation(ok(0), ok(1), settings={"flags": {"call": "root"}}))
    assert in_force.unread(CASE, "fix", silent) is None, "older records say nothing of what was read"


# -- signatures


def shows(signature: dict[str, Any], *ranks: dict[str, Any], **more: Any) -> tuple[int, ...] | None:
    found = matches(Signature.model_validate({"name": "s", **signature}), observation(*ranks, **more))
    return found.ranks if found else None


NORM = {"kind": "exception", "type": "RuntimeError", "message": "size mismatch", "package": "transformers"}


def test_an_exception_is_that_one() -> None:
    assert shows(NORM, failed(0), failed(1)) == (0, 1)
    assert shows({**NORM, "type": "ValueError"}, failed(0)) is None
    assert shows({**NORM, "message": "another"}, failed(0)) is None
    assert shows({**NORM, "package": "torch"}, failed(0)) is None
    assert shows(NORM, failed(0, exception(frames=[SCRIPT]))) is None, "the script raised it itself"
    assert shows({**NORM, "frames": [{"module": r"transformers\..*", "function": "forward"}]}, failed(0)) == (0,)
    assert shows({**NORM, "frames": [{"module": r"transformers\..*", "function": "backward"}]}, failed(0)) is None
    assert shows({**NORM, "frames": [{"module": "transformers", "function": "forward"}]}, failed(0)) is None
    assert shows({**NORM, "ranks": "all"}, failed(0), ok(1)) is None
    assert shows({**NORM, "ranks": "all"}, failed(0), ended(1)) == (0,), "who was ended does not count against it"
    assert shows({**NORM, "ranks": "all"}, failed(0), world_size=2) is None, "who left nothing does"


def test_the_backends_own_text_counts() -> None:
    both = {**NORM, "variants": {"gloo": "of gloo", "nccl": "size mismatch"}}
    assert shows(both, failed(0)) is None and shows(both, failed(0), backend="nccl") == (0,)
    assert shows(both, failed(0), backend="cpu:gloo,cuda:nccl") == (0,)
    assert shows({**NORM, "variants": {"nccl": "other"}}, failed(0)) == (0,), "else the common one"


def test_a_silent_failure_is_of_a_rank_that_finished() -> None:
    oracle = {"kind": "oracle", "check": "logits"}
    bad = [check("logits", False)]
    assert shows(oracle, ok(0, record=record(0, checks=bad)), ok(1)) == (0,)
    assert shows(oracle, ok(0), ok(1)) is None
    assert shows(oracle, ok(0, record=record(0, checks=bad, done=False))) is None
    assert shows({**oracle, "check": "loss"}, ok(0, record=record(0, checks=bad))) is None


def test_a_signal_is_the_ranks_own() -> None:
    undone = record(0, done=False)
    died = ok(0, exit_code=-11, record=undone, stack=f"    f ({SITE}/torch/x.py:1)")
    signal = {"kind": "signal", "signal": "SIGSEGV"}
    assert shows(signal, died) == (0,) and shows({**signal, "signal": "SIGABRT"}, died) is None
    assert shows({**signal, "frames": [{"module": r"torch\.x", "function": "f"}]}, died) == (0,)
    assert shows({**signal, "frames": [{"module": r"torch\.x", "function": "g"}]}, died) is None
    assert shows(signal, {**died, "ended_by": "launcher"}) is None


def test_a_hang_stands_where_it_says() -> None:
    hang = {"kind": "hang", "frames": [{"module": r"torch\.distributed\..*", "function": "all_reduce"}]}
    there, elsewhere = (
        ended(rank, "deadline", stack=f"    {name} ({DIST}/distributed_c10d.py:1)")
        for rank, name in ((0, "all_reduce"), (1, "broadcast"))
    )
    assert shows(hang, there, elsewhere, timed_out=True) == (0,)
    assert shows(hang, there, elsewhere) is None, "its time was not over"
    assert shows({**hang, "ranks": "all"}, there, elsewhere, timed_out=True) is None
    assert shows(hang, there, failed(1), timed_out=True) is None, "it waits for one that failed"
    assert shows(hang, elsewhere, timed_out=True) is None


def test_where_a_rank_hangs_is_said_by_the_frame_that_was_declared() -> None:
    hang = {"kind": "hang", "frames": [{"module": r"torch\.distributed\..*", "function": "barrier|wait"}]}
    stack = f"    step ({SITE}/torch/optim/sgd.py:1)\n    wait ({DIST}/work.py:1)\n    barrier ({DIST}/c10d.py:1)"
    there = observation(ended(0, "deadline", stack=stack), timed_out=True)
    found = matches(Signature.model_validate({"name": "s", **hang}), there)
    assert found and found.message == "stuck in torch.distributed.work.wait", "the innermost that was declared"


def near(signature: dict[str, Any], *ranks: dict[str, Any], **more: Any) -> str:
    attempt = Attempt(observation(*ranks, **more))
    return near_misses([Signature.model_validate({"name": "s", **signature})], attempt, failures_of(attempt))


FRAMED = [{"module": r"transformers\..*", "function": "forward"}, {"module": "a", "function": "b"}]


@pytest.mark.parametrize(
    ("signature", "error", "said"),
    [
        (NORM, exception("ValueError"), "s: type: ValueError, declared RuntimeError, message ok, package ok"),
        (NORM, exception(message=" so it is\nnot"),
         "s: type ok, message: so it is, declared size mismatch, package ok"),
        (NORM, exception(message="w" * 161), f"s: type ok, message: {'w' * 160}, declared size mismatch, package ok"),
        (NORM, exception(frames=[SCRIPT]), "s: type ok, message ok, package: none, declared transformers"),
        (NORM, exception(frames=[SCRIPT, frame("torch.nn", "f")]),
         "s: type ok, message ok, package: torch, declared transformers"),
        ({**NORM, "frames": FRAMED}, exception(), "s: type ok, message ok, package ok, no frame a b"),
        (NORM, exception("ValueError", "another"), ""),
        (NORM, exception(message="another", frames=[SCRIPT, frame("torch.nn", "f")]), ""),
        ({**NORM, "variants": {"nccl": "of n"}, "message": None}, exception(),
         "s: type ok, message: size mismatch in norm, declared nccl: of n, package ok"),
    ],
)  # fmt: skip
def test_what_an_exception_missed(signature: dict[str, Any], error: dict[str, Any], said: str) -> None:
    assert near(signature, failed(0, error), ok(1)) == said


def test_what_a_check_a_signal_and_a_log_missed() -> None:
    assert near(NORM, ok(0), ok(1)) == "", "nobody raised"
    oracle = {"kind": "oracle", "check": "absent"}
    undone = record(0, done=False, phase="body")
    assert near(oracle, ok(0), ok(1)) == "s: check absent was made by no rank"
    assert near({**oracle, "check": "logits"}, ok(0), ok(1)) == "" == near(oracle, ok(0, record=undone))
    framed = [{"module": r"torch\.x", "function": "g"}]
    signal = {"kind": "signal", "signal": "SIGSEGV"}
    died = ok(0, exit_code=-11, record=undone, stack=f"    f ({SITE}/torch/x.py:1)")
    assert near({**signal, "frames": framed}, died) == r"s: signal ok, no frame torch\.x g"
    other = near({**signal, "signal": "SIGBUS", "frames": framed}, died)
    assert other == r"s: signal: SIGSEGV, declared SIGBUS, no frame torch\.x g"
    assert near({**signal, "signal": "SIGBUS"}, died) == "" == near({**signal, "frames": framed}, ok(0))
    assert near({**signal, "frames": framed}, {**died, "ended_by": "launcher"}) == ""
    log = {"kind": "log", "message": "is old", "package": "transformers"}
    noted = [{"logger": "x", "message": text, "file": "f.py", "place": "torch.x"} for text in ("new", "it is old")]
    spoke = ok(0, record=record(0, logs=noted))
    missed = "s: message ok, package: torch.x, declared transformers, logger: x, declared any"
    assert near(log, spoke) == missed and near({**log, "message": "gone"}, spoke) == ""
    nowhere = record(0, logs=[{**noted[1], "place": ""}])
    assert "package: nowhere, declared transformers" in near(log, ok(0, record=nowhere))
    older = record(0, logs=[{key: value for key, value in noted[1].items() if key != "place"}])
    assert "package: x, declared" in near(log, ok(0, record=older)), "an older record knows the logger's name only"
    assert near({"kind": "hang", "frames": framed}, ended(0, "deadline"), timed_out=True) == ""
    attempt = Attempt(observation(ok(0)))
    two = [Signature.model_validate({"name": name, **oracle}) for name in "aab"]
    said = "a: check absent was made by no rank; b: check absent was made by no rank"
    assert near_misses(two, attempt, failures_of(attempt)) == said


# -- comparable


def test_measurements_are_alike_in_what_was_set() -> None:
    one = {
        "strategy": {"slug": "fsdp", "options": {}},
        "model": {"slug": "m", "config": {"h": 1}},
        "flags": {},
        "steps": 3,
    }
    assert comparable(one, dict(one)) is None
    assert comparable(one, {**one, "strategy": {"slug": "ddp", "options": {}}}) is not None
    assert comparable(one, {**one, "steps": 4}) is not None


# -- the rest, a place each


def test_what_was_judged_before_is_only_this_very_documents() -> None:
    """``id`` is used again as soon as a document is gone."""
    one = document({"broken": [("fires", observation(failed(0)))], "fix": [("clean", observation(ok(0), ok(1)))]}, {})
    cases = {one["case"]: CASE}
    mine = again.outcomes_of(one, CASE, cases)  # type: ignore[arg-type]
    kept: again.Graded = {id(one): (one, None)}  # type: ignore[dict-item]
    assert again._once(one, CASE, cases, kept) == mine and kept[id(one)] == (one, mine)  # type: ignore[arg-type]
    kept = {id(one): (one, {"fix": []})}  # type: ignore[dict-item]
    assert again._once(one, CASE, cases, kept) == {"fix": []}, "what is kept is taken"  # type: ignore[arg-type]
    kept = {id(one): ({**one}, {"fix": []})}  # type: ignore[dict-item, typeddict-item]
    assert again._once(one, CASE, cases, kept) == mine  # type: ignore[arg-type]
    assert again._plain("2.2.0+cu118 (x/y)") == "2.2.0+cu118__x_y_"


def test_a_recorder_is_not_taken_for_complete() -> None:
    """Then a rank whose record nobody has would be "at collective 0", and every other one ahead of it."""
    assert Standing(0, entries=()).last(("default",)) is None  # type: ignore[arg-type]
    assert Standing(0, entries=(), complete=True).last(("default",)) == 0  # type: ignore[arg-type]


def test_other_weights_are_called_so() -> None:
    theirs = {"model": {"slug": "m", "weights": "hub"}}
    assert str(comparable({"model": {"slug": "m", "weights": "random"}}, theirs)).startswith("weights ")  # type: ignore[typeddict-item, arg-type]
    assert str(comparable({"model": {"slug": "n", "weights": "hub"}}, theirs)).startswith("model slug ")  # type: ignore[typeddict-item, arg-type]


def test_one_rank_calls_no_collectives() -> None:
    assert force({"collectives": {"got": {}}}, {"parameters": "whole", "collectives": ["all_reduce"]}, ranks=1) is None


def test_just_what_was_promised_is_enough() -> None:
    shares = in_force._shares
    assert shares("gradients", "shard", [0.4, 0.5], 2, 2) is None, "the whole is nine tenths"
    assert "hold 89%" in str(shares("gradients", "shard", [0.4, 0.49], 2, 2))
    bound = in_force.SHARE / 2 + in_force.SPARE
    assert shares("gradients", "shard", [bound, bound], 2, 2) is None
    assert "was promised" in str(shares("gradients", "shard", [bound, bound + 0.01], 2, 2))


@pytest.mark.parametrize(("key", "told"), [("stack", "stuck"), ("entered", "stuck"), ("other", "unknown")])
def test_a_hang_is_known_by_a_backtrace_or_by_collectives(key: str, told: str) -> None:
    look = {"at_s": 1.0, "io": 0, "cpu_s": 1.0, key: []}
    assert looks.of_rank(look, {**look, "at_s": 21.0}) == told  # type: ignore[arg-type]


def test_a_skipped_arm_has_no_figure_and_says_why() -> None:
    cell: Any = {"arms": {"fix": {"skipped": "no card", "attempts": []}}}
    assert metrics.figure(cell, "fix", "loss") == (None, "arm fix skipped: no card")
    assert metrics.figure(cell, "other", "loss") == (None, "arm other was not run")


def test_a_control_that_fails_is_never_excused() -> None:
    """What it cannot run on is said by its own verdict; else no control would ever be unhealthy."""
    arm = {"attempts": [{"outcome": {"outcome": "other_error"}}], "settings": {"strategy": {"slug": "s"}}}
    here = {
        "kind": "control", "strategy": "s", "model": "m", "case": "c", "key": "",
        "stack": {"name": "current", "versions": {"torch": "2.13.0"}, "label": "l"}, "arms": {"control": arm},
        "hardware": {"accelerator": "cpu", "profile": "cpu"},
    }  # fmt: skip
    needs = Strategy(slug="s", title="s", requires=["torch>=99"], promises={"parameters": "whole"})
    grounds = Grounds([], {"s": needs})  # type: ignore[arg-type]
    assert grounds.cannot_run("control", here) is None  # type: ignore[arg-type]
    assert grounds.cannot_run("control", {**here, "kind": "failure"})  # type: ignore[arg-type]


def test_a_file_on_windows_is_in_a_package_too() -> None:
    assert dotted("C:\\env\\Lib\\site-packages\\torch\\nn\\functional.py") == ("torch.nn.functional",)


def test_a_message_is_quoted_by_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    item = foreign.foreign_messages()[0]
    monkeypatch.setattr(foreign, "matched", lambda case, signature: [f"first\nsecond{item.message}"])
    assert str(foreign.too_wide(CASE)).endswith("that are not its failure: 'first'")


def test_flags_with_several_values_are_the_same_in_any_order() -> None:
    assert _value("{b: 1, a: 2}") == _value('{"a": 2, "b": 1}') != _value("{b: 2, a: 1}")


def test_a_release_between_two_ranges_is_of_neither() -> None:
    points = [Point(holds, {}, {"torch": version}) for version, holds in (("2.0", True), ("2.2", False), ("2.4", True))]
    (rule, *_) = rules(points)
    said = {version: rule.says(Point(True, {}, {"torch": version})) for version in ("1.9", "2.0", "2.1", "2.2", "2.5")}
    assert said == {"1.9": True, "2.0": True, "2.1": None, "2.2": False, "2.5": True}


def test_attempts_that_never_ended_are_of_no_time() -> None:
    one = document({"broken": [("fires", observation(failed(0)))], "fix": [("clean", observation(ok(0), ok(1)))]}, {})
    for arm in one["arms"].values():
        for attempt in arm["attempts"]:
            attempt["observation"]["attempt"]["ended"] = None
    assert genuine.contradiction(one, CASE) is None  # type: ignore[arg-type]
    one["provenance"]["started"] = 9e12
    assert genuine.contradiction(one, CASE) is None  # type: ignore[arg-type]


def test_a_module_of_the_scripts_is_own_wherever_its_file_lies() -> None:
    assert is_own("repros.train_step", "/elsewhere/x.py") and is_own("kit.run", "/elsewhere/x.py")
    assert not is_own("reprosx", "/elsewhere/x.py") and not is_own("torch.nn", "/elsewhere/x.py")


def test_what_decides_nothing_where_the_failure_is_not_there() -> None:
    quiet: Any = document({"broken": [("clean", observation(ok(0)))], "fix": [("clean", observation(ok(0)))]})
    for arm, decides in (("control", True), ("fix", False)):
        found = predicted._not_there(Prediction(arm=arm, outcome="clean"), frozenset({"clean"}), quiet)
        assert (found is None) == decides
    assert predicted._by_verdict(frozenset({"CHANGED"}), "NOT_FIRING") == (
        None, "could not be tested on this stack: broken is clean",
    )  # fmt: skip
    assert predicted._by_verdict(frozenset({"FIX_HOLDS"}), "FIX_BROKEN") == (False, "")
