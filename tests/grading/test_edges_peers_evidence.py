"""Judges at their edges: peers, evidence. Each was a small change (`make mutants`) that nobody saw."""

from __future__ import annotations

import math
from typing import Any

import pytest
from judging import (
    PEER,
    SITE,
    ended,
    exception,
    failed,
    made,
    observation,
    ok,
    peer_failed,
    record,
)  # fmt: skip
from repro_matrix.grading.observation import (
    NO_RECORD,
    Attempt,
    Place,
    Raised,
    is_project_code,
    lies_in,
    module_names,
    number,
    parse_threads,
    within,
)
from repro_matrix.grading.root_cause import failure_of, fatal_signal, find_failures, is_peer_error
from repro_matrix.records import validate as doubt_of

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
    assert fatal_signal(rank(signal="SIGSEGV", exit_code=None)) == "SIGSEGV"
    assert fatal_signal(rank(exit_code=-11)) == "SIGSEGV" and fatal_signal(rank(exit_code=-999)) == "" == fatal_signal(
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
    found = find_failures(Attempt(observation(peer_failed(0, 101.0), failed(1, at=109.0), failed(2, at=108.0), ended(3))))
    assert [f.rank for f in found.primary] == [2, 1] and found.first is found.primary[0]
    assert found.ranks == {1, 2} and found.excused == {0, 3}
    alone = find_failures(Attempt(observation(peer_failed(0), ok(1))))
    assert [f.rank for f in alone.primary] == [0] and alone.excused == set(), "then it is the failure"
    assert find_failures(Attempt(observation(ok(0), ok(1)))).first is None


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
    assert states(2, made(), made()) == ["void", "void"] and states(2, made(), bad) == [
        "void",
        "failed",
    ]
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
    assert module_names(f"{SITE}/torch/nn/modules/__init__.py") == ("torch.nn.modules",)
    assert module_names("/usr/lib/python3.11/json/decoder.py") == ("json.decoder",)
    assert module_names("/opt/over/torch/x.py") == ("opt.over.torch.x", "over.torch.x", "torch.x", "x")
    assert within("torch.nn", "torch") and within("torch", "torch") and not within("torchvision", "torch")
    assert is_project_code("__main__", "") and is_project_code("repro_kit.run", "") and is_project_code("", "/home/me/repros/repro_kit/run.py")
    assert not is_project_code("kitchen", "") and not is_project_code("", "/x/repros.py") and not is_project_code("", "/x/repros/x.so")


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
    main, other = parse_threads(text)
    assert main.main and main.places[0].function == "b" and other.places[0].function == "a" and not other.main
    (hand,) = parse_threads('Current thread 0x1 (most recent call first):\n  File "/x/c.py", line 3 in c\nThread 0x2:\n')
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
