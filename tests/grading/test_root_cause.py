"""Which rank failed first and why: by itself, by the script's error or by a lost peer; and the failure's id."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import attempt_of, launched
from observations import (
    PEER,
    SITE,
    case,
    check,
    control,
    ended,
    exception,
    failed,
    frame,
    observation,
    ok,
    peer_failed,
    record,
)  # fmt: skip
from repro_matrix.grading.grade import grade
from repro_matrix.grading.observation import NO_RECORD, Attempt, RaisedException, Rank
from repro_matrix.grading.root_cause import (
    all_failure_ids,
    failure_ids,
    failure_of,
    find_failures,
    is_peer_error,
    script_error,
)  # fmt: skip
from repro_matrix.grading.verdict import judge
from repro_matrix.launch.forkserver import ForkserverLauncher
from repro_matrix.records.document import validate_record
from repro_matrix.records.outcome import FailureId, Outcome, Primary, Recognized

# -- lost peers


@pytest.mark.parametrize(
    ("kind", "message", "lost"),
    [
        ("DistStoreError", "", True), ("DistNetworkError", "anything", True), ("EOFError", "x", True),
        ("BrokenPipeError", "", True), ("ConnectionResetError", "[Errno 104]", True), ("RuntimeError", PEER, True),
        ("RuntimeError", "[pair.cc:525] Read error [127.0.0.1]:1: Connection reset by peer", True),
        ("RuntimeError", "Broken pipe", True), ("OSError", "Broken pipe", True),
        ("DistBackendError", "NCCL error: remote process exited or there was a network error, NCCL 2.21.5", True),
        ("DistBackendError", "[3] is setting up NCCL communicator: Socket Timeout", True),
        ("DistBackendError", "ncclRemoteError: x", True), ("ConnectionError", "Connection refused", True),
        ("RuntimeError", "NCCL communicator was aborted on rank 1", True),
        ("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete", True),
        ("TimeoutError", "wait timeout after 10 ms", True),
        ("ValueError", PEER, False), ("RuntimeError", "size mismatch", False), ("DistBackendError", "invalid", False),
    ],
)  # fmt: skip
def test_peer_error_by_type_and_message(kind: str, message: str, lost: bool) -> None:
    assert is_peer_error(RaisedException(kind, frozenset({kind}), message, ())) is lost
    there = Attempt(observation(failed(0, exception(kind, message), at=101.0), failed(1, at=102.0)))
    assert find_failures(there).ranks == ({1} if lost else {0, 1}), "it came first, and still is not the failure"


def test_first_failure_is_the_earliest_primary_one() -> None:
    found = find_failures(
        Attempt(observation(peer_failed(0, 101.0), failed(1, at=109.0), failed(2, at=108.0), ended(3)))
    )
    assert [failure.rank for failure in found.primary] == [2, 1] and found.first is found.primary[0]
    assert found.ranks == {1, 2} and found.excused == {0, 3}


def test_lost_peer_is_the_failure_where_it_is_the_only_one() -> None:
    found = find_failures(Attempt(observation(peer_failed(0), ok(1))))
    assert found.ranks == {0} and found.excused == set()
    assert find_failures(Attempt(observation(ok(0), ok(1)))).first is None


# -- how one rank failed

UNDONE = record(0, done=False, phase="body")
EXIT_15 = record(0, done=False, exception=exception("SystemExit", "15"))


@pytest.mark.parametrize(
    ("changes", "kind", "type_", "where", "secondary"),
    [
        ({}, None, "", "", False),
        ({"exit_code": -11, "record": UNDONE, "stack": "    f (/a/torch/x.py:1)"}, "signal", "SIGSEGV", "a.torch.x.f",
         False),
        ({"exit_code": -6}, "signal", "SIGABRT", "teardown, after its done marker", False),
        ({"exit_code": -6, "record": UNDONE, "log_tail": f"{PEER}\nAborted\n"}, "signal", "SIGABRT", "", True),
        ({"exit_code": -11, "record": UNDONE, "log_tail": PEER}, "signal", "SIGSEGV", "", False),
        ({"exit_code": 3, "record": UNDONE}, "exit", "exit code 3", "", False),
        ({"exit_code": 3, "record": UNDONE, "log_tail": f"{PEER}\n\n"}, "exit", "exit code 3", "", True),
        ({"exit_code": 3, "record": UNDONE, "log_tail": f"{PEER}\nbad"}, "exit", "exit code 3", "", False),
        ({"record": UNDONE}, "left", "exit code 0", "", False),
        ({"terminated_by": "launcher", "exit_code": None, "signal": "SIGTERM", "record": UNDONE}, None, "", "", False),
        ({"terminated_by": "launcher", "exit_code": 1, "record": EXIT_15}, "exception", "SystemExit",
         "transformers.models.qwen2.modeling_qwen2.forward", True),
        ({"exit_code": 1, "record": EXIT_15}, "exception", "SystemExit",
         "transformers.models.qwen2.modeling_qwen2.forward", False),
    ],
)  # fmt: skip
def test_how_a_rank_failed(changes: Any, kind: str | None, type_: str, where: str, secondary: bool) -> None:
    failure = failure_of(Attempt(observation(ok(0, **changes))).ranks[0])
    if kind is None:
        assert failure is None
    else:
        assert failure and (failure.kind, failure.type, failure.location) == (kind, type_, where)
        assert failure.secondary is secondary


# -- reading records


def test_rank_without_record_is_empty() -> None:
    assert validate_record(dict(NO_RECORD)) == NO_RECORD
    silent = Attempt(observation(ok(0, record=None))).ranks[0]
    assert (silent.checks, silent.log_entries, silent.chain, silent.ended_at) == ([], [], [], None)
    assert not silent.done and not silent.wrote and silent.packages == {} and silent.collective_frames == ()


@pytest.mark.parametrize(
    ("wrapper", "cause", "length"),
    [("caught: the size is wrong here", "the size is wrong here", 2), ("another", "the size is wrong here", 1),
     ("so wrong", "wrong", 1)],
)  # fmt: skip
def test_cause_counts_where_the_wrapper_repeats_its_message(wrapper: str, cause: str, length: int) -> None:
    error = exception("RuntimeError", wrapper, cause=exception("ValueError", cause))
    assert len(Attempt(observation(failed(0, error))).ranks[0].chain) == length


def test_collective_frames_are_those_of_waiting_entries() -> None:
    def frames(*entries: Any, **more: Any) -> list[str]:
        rank = ok(0, collectives={"groups": {}, "collectives": list(entries), "complete": True}, **more)
        return [str(each) for each in Attempt(observation(rank)).ranks[0].collective_frames]

    listed = [[f"{SITE}/torch/x.py", "f"]]
    assert frames({"waits": True, "frames": listed}) == ["torch.x.f"]
    assert frames({"waits": False, "frames": listed}, {"waits": True}) == []
    installed = record(0, packages={"torch": f"{SITE}/torch"})
    assert frames({"waits": True, "frames": listed}, record=installed) == ["torch.x.f"]


# -- errors of the script

SCRIPT_FILE = "/home/me/project/repros/some_case.py"


def placed(origin: str, file: str = "", line: int = 31) -> dict[str, Any]:
    return {**frame(origin, "forward", file or None), "code_location": origin, "line": line}


OWN = placed("repros.some_case", SCRIPT_FILE)
KIT = placed("repros.kit.models", "/home/me/project/repros/repro_kit/models.py", 7)
NORM, TORCH = placed("transformers.models.qwen2.modeling_qwen2"), placed("torch.nn.functional")
STANDARD, GENERATED = placed("json.decoder"), placed("", "<string>", 1)
IMITATED = placed("", "/venv/lib/python3.11/site-packages/transformers/models/x.py", 12)


@pytest.mark.parametrize(
    ("frames", "where"),
    [
        ([OWN], "repros/some_case.py:31"),
        ([OWN, NORM, OWN], "repros/some_case.py:31"),  # a hook of the script's
        ([OWN, KIT], "repros/repro_kit/models.py:7"),
        ([OWN, STANDARD], "repros/some_case.py:31"),
        ([OWN, GENERATED, STANDARD], "repros/some_case.py:31"),
        ([OWN, TORCH, IMITATED], "transformers/models/x.py:12"),
        ([OWN, NORM], None), ([OWN, NORM, GENERATED], None), ([OWN, TORCH, STANDARD], None), ([OWN, KIT, TORCH], None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["NameError", "ImportError"])
def test_script_error_by_its_innermost_frame(frames: list[dict[str, Any]], where: str | None, kind: str) -> None:
    error = exception(kind, "name 'x' is not defined", frames)
    for known in (case(), control()):
        outcome = grade(known, next(iter(known.variants)), observation(failed(0, error), failed(1, error)), [known])
        assert outcome.infra_error == ("script_error" if where else None)
        assert where is None or where in outcome.reason


def test_script_error_counts_only_where_it_came_first() -> None:
    late, early = exception("TimeoutError", "rank 0 did not write", [OWN]), exception(frames=[OWN, NORM])
    for at, infra_error in ((1.0, None), (9.0, "script_error")):
        seen = observation(failed(0, early, at), failed(1, late, 5.0))
        assert grade(case(), "unfixed", seen, []).infra_error == infra_error
    lost = Attempt(observation(failed(0, exception("RuntimeError", PEER, [OWN])), ended(1)))
    assert script_error(lost, find_failures(lost)) is None, "a lost peer is no mistake of the script"


# -- failure ids

CASE = case()
REFUSED = exception("ValueError", "Type fp16 is not supported", [frame("deepspeed.runtime.engine", "_check")])
REFUSED_ID = "ValueError in deepspeed.runtime.engine._check"


def ids_of(found: Iterable[FailureId]) -> list[str]:
    return [str(item) for item in found]


def graded(*ranks: dict[str, Any]) -> Outcome:
    return grade(CASE, "fix", observation(*ranks), [CASE])


def wrong(rank: int, *names: str) -> dict[str, Any]:
    return ok(rank, record=record(rank, checks=[check(), *(check(name, False) for name in names)]))


@pytest.mark.parametrize(
    ("ranks", "ids"),
    [
        ([ok(0), ok(1)], []), ([failed(0), failed(1)], ["some-case/norm"]), ([failed(0, REFUSED), ok(1)], [REFUSED_ID]),
        ([wrong(0, "updates"), wrong(1, "updates")], ["check updates"]),
        ([wrong(0, "updates"), wrong(1, "losses")], ["check updates", "check losses"]),
        ([ok(0, record=record(0, checks=[])), ok(1)], []),  # a missing check is no evidence
        ([ok(0, exit_code=None, signal="SIGSEGV", stack="    f (/a/torch/x.py:1)"), ok(1)], ["SIGSEGV"]),
        ([ok(0, exit_code=7), ok(1)], ["exit code 7"]), ([ok(0), ok(1, terminated_by="launcher")], ["unfinished"]),
    ],
)  # fmt: skip
def test_failure_ids_of_one_attempt(ranks: Any, ids: list[str]) -> None:
    assert ids_of(failure_ids(CASE.slug, graded(*ranks))) == ids


def test_failure_of_another_case_is_identified_by_its_signature() -> None:
    tied, warns = Recognized("tied", "lm-head", (0,), "exception", "x"), Recognized("old", "warns", (0,), "log", "y")
    other = Outcome("other_failure", "x", (tied, warns), Primary(0, "RuntimeError", "m", "torch.nn.linear"))
    assert ids_of(failure_ids("some-case", other)) == ["tied/lm-head"]
    assert ids_of(failure_ids("some-case", replace(other, recognized=(warns,)))) == ["RuntimeError in torch.nn.linear"]
    assert failure_ids("some-case", replace(other, outcome="hang")) == ()
    both = (tied, Recognized("some-case", "norm", (1,), "exception", "z"))
    assert ids_of(failure_ids("some-case", replace(other, outcome="reproduced", recognized=both))) == ["some-case/norm"]


@pytest.mark.parametrize(
    ("unfixed", "fix", "ids"),
    [
        ("reproduced", "refused", [REFUSED_ID]), ("reproduced", "reproduced", ["some-case/norm"]),
        ("passed", "refused", [REFUSED_ID]), ("refused", "passed", [REFUSED_ID]),
        ("refused", "reproduced", [REFUSED_ID]),  # of SIGNATURE_MISMATCH: the unfixed variant's
        ("reproduced", "passed", []), ("passed", "passed", []),
    ],
)  # fmt: skip
def test_verdict_carries_the_ids_of_the_failing_variant(unfixed: str, fix: str, ids: list[str]) -> None:
    outcomes = {"reproduced": graded(failed(0), failed(1)), "refused": graded(failed(0, REFUSED), ok(1)),
                "passed": graded(ok(0), ok(1))}  # fmt: skip
    verdict = judge(CASE, {"unfixed": [outcomes[unfixed]], "fix": [outcomes[fix]]})["fix"]
    assert ids_of(verdict.failure_ids) == ids


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=3).map(tuple), max_size=4), st.randoms(use_true_random=False))
def test_failure_ids_do_not_depend_on_the_order_of_attempts(attempts: list[Any], random: Any) -> None:
    outcomes = [Outcome("other_failure", "x", failed=names) for names in attempts if names]
    before = all_failure_ids("some-case", outcomes)
    random.shuffle(outcomes)
    assert all_failure_ids("some-case", outcomes) == before
    assert {item.check for item in before} == {name for names in attempts for name in names}


@pytest.mark.parametrize(
    ("code_location", "portable"),
    [
        ("transformers_modules.qwen_4711.modeling_qwen.generate", "transformers_modules.*.modeling_qwen.generate"),
        ("transformers_modules.Qwen.7B.ef3.modeling_qwen.generate", "transformers_modules.*.modeling_qwen.generate"),
        ("transformers_modules.*.modeling_qwen.generate", "transformers_modules.*.modeling_qwen.generate"),
        ("torch.nn.modules.module.__getattr__", "torch.nn.modules.module.__getattr__"),
    ],
)  # fmt: skip
def test_remote_code_has_the_same_location_in_every_process(code_location: str, portable: str) -> None:
    """transformers names its module by the folder that it was read from."""
    assert FailureId(type="E", code_location=code_location).code_location == portable


@pytest.mark.ranks
def test_error_raised_by_a_real_script_is_a_script_error(tmp_path: Path, warm: ForkserverLauncher) -> None:
    attempt = attempt_of(tmp_path / "a", "raises", world_size=1)
    promised = {"slug": "none", "options": {}, "invariants": {"parameters": "whole"}}
    attempt.settings.update(case="a-control", variant="control", strategy=promised)
    seen = launched(warm, attempt)
    outcome = grade(control(), "control", seen, [])
    assert outcome.infra_error == "script_error" and "misbehave.py:" in outcome.reason
    rank = Rank(seen["ranks"][0])
    assert rank.raised and all(each.is_project for each in rank.raised.frames)
    assert Path(seen["ranks"][0]["record"]["packages"]["torch"]).is_relative_to(sys.prefix)
