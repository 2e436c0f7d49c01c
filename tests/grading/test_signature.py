"""Signatures against observations: what is the known failure, and above all what is not."""

from __future__ import annotations

from typing import Any

import pytest
from judging import (
    EXCEPTION,
    NORM,
    PEER,
    SCRIPT,
    SITE,
    check,
    ended,
    exception,
    failed,
    frame,
    observation,
    ok,
    peer_failed,
    record,
)  # fmt: skip
from repro_matrix.config.signatures import Signature
from repro_matrix.grading.observation import Attempt, is_project_code, module_names, stack_places
from repro_matrix.grading.root_cause import find_failures
from repro_matrix.grading.signature import Match, matches

PY_SPY = f"""# py-spy
Process 15841: /opt/venv/bin/python h.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 15849 (idle): "Thread-1"
    wait (/usr/lib/python3.11/threading.py:324)
Thread 15841 (idle): "MainThread"
    barrier ({SITE}/torch/distributed/distributed_c10d.py:5356)
    _exception_logger.<locals>.wrapper ({SITE}/torch/distributed/c10d_logger.py:83)
    <module> (/home/me/project/repros/some_case.py:7)
"""
FAULTHANDLER = f"""# faulthandler (py-spy: not allowed)
Current thread 0x00007f9bfc5e4b80 (most recent call first):
  File "{SITE}/torch/distributed/distributed_c10d.py", line 5356 in barrier
  File "{SITE}/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/project/repros/some_case.py", line 7 in <module>
"""


def signature(**changes: Any) -> Signature:
    return Signature.model_validate({**EXCEPTION, **changes})


def seen(error: dict[str, Any], **attempt: Any) -> dict[str, Any]:
    return observation(failed(0, error), failed(1, error), **attempt)


# --- exception


def test_exception_matches_by_type_message_and_package() -> None:
    assert matches(signature(), seen(exception())) == Match("norm", (0, 1), "size mismatch in norm")


def test_exception_matches_by_a_base_of_its_type() -> None:
    error = exception("OutOfCheese", bases=["RuntimeError", "Exception", "BaseException"])
    assert matches(signature(), seen(error))


@pytest.mark.parametrize(
    "error",
    [
        exception(type_="ValueError"),
        exception(message="size mismatch elsewhere"),
        exception(frames=[SCRIPT]),
        exception(frames=[SCRIPT, frame("torch.nn.functional", "linear")]),
        exception(frames=[]),
    ],
    ids=["type", "message", "script", "package", "no frames"],
)
def test_a_wrong_error_never_fires(error: dict[str, Any]) -> None:
    assert matches(signature(), seen(error)) is None


def test_a_script_that_raises_its_own_signature_is_refused() -> None:
    """Even where upstream calls back into the script: the innermost frame is the script's."""
    back = exception(frames=[SCRIPT, NORM, SCRIPT])
    by_kit = exception(
        frames=[SCRIPT, NORM, frame("repro_kit.models", "build", "/home/me/project/repros/repro_kit/models.py")]
    )
    by_exec = exception(frames=[SCRIPT, frame("", "<module>", "<string>")])
    by_file = exception(frames=[frame("transformers.fake", "forward", "/home/me/project/repros/some_case.py")])
    for error in (back, by_kit, by_exec, by_file):
        assert matches(signature(), seen(error)) is None


@pytest.mark.parametrize(
    "file",
    [
        "/home/me/repros/.venv/lib/python3.11/site-packages/torch/nn/functional.py",
        "/home/me/repros/cache/transformers_modules/qwen/modeling_qwen.py",
        "/usr/lib/python3.11/json/decoder.py",
    ],
)
def test_a_checkout_in_a_folder_named_repros_does_not_make_everything_the_projects_own(file: str) -> None:
    assert not is_project_code("x.y", file)


def test_generated_code_without_a_module_is_skipped_for_the_frame_around_it() -> None:
    error = exception(frames=[SCRIPT, NORM, frame("", "<lambda>", "<string>"), frame("builtins", "len", "<frozen>")])
    assert matches(signature(), seen(error))


def test_a_frame_without_module_is_placed_by_its_file() -> None:
    error = exception(frames=[SCRIPT, frame("", "forward", f"{SITE}/transformers/modeling.py")])
    assert matches(signature(), seen(error))


def test_declared_frames_must_all_be_upstream_frames() -> None:
    inner = {"function": "forward", "module": r"transformers\.models\.qwen2\..*"}
    assert matches(signature(frames=[inner]), seen(exception()))
    assert matches(signature(frames=[inner, {"function": "body"}]), seen(exception())) is None
    assert matches(signature(frames=[{"function": "forw"}]), seen(exception())) is None


def test_a_cause_counts_only_behind_a_mere_wrapper() -> None:
    inner = exception()
    wrapper = exception("ImportError", f"it failed because of: {inner['message']}", [SCRIPT], cause=inner)
    another = exception("ValueError", "something else went wrong", [SCRIPT], cause=inner)
    assert matches(signature(), seen(wrapper))
    assert matches(signature(), seen(another)) is None


def test_backend_variants_are_preferred_to_the_common_message() -> None:
    both = signature(message="common text", variants={"nccl": "nccl text", "gloo": "gloo text"})
    only = signature(message=None, variants={"nccl": "nccl text"})
    assert matches(both, seen(exception(message="gloo text"), backend="gloo"))
    assert matches(both, seen(exception(message="nccl text"), backend="nccl"))
    assert matches(both, seen(exception(message="nccl text"), backend="gloo")) is None
    assert matches(both, seen(exception(message="common text"), backend="mpi"))
    assert matches(both, seen(exception(message="nccl text"), backend="cpu:gloo,cuda:nccl"))
    assert matches(only, seen(exception(message="nccl text"), backend="gloo")) is None
    assert matches(only, seen(exception(message="nccl text"), backend="gloo"), backend="nccl")


# --- ranks and secondary errors


def test_all_ranks_means_all_that_could() -> None:
    every = signature(ranks="all")
    assert matches(every, observation(failed(0), failed(1)))
    assert matches(every, observation(failed(0), ended(1)))
    assert matches(every, observation(failed(0), ended(1, by="deadline"), timed_out=True))
    assert matches(every, observation(failed(0), peer_failed(1)))
    assert matches(every, observation(failed(0), ok(1))) is None
    assert matches(every, observation(failed(0), failed(1, exception("ValueError")))) is None
    assert matches(every, observation(failed(0), world_size=2)) is None
    assert matches(signature(), observation(failed(0), ok(1))).ranks == (0,)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("type_", "message"),
    [
        ("RuntimeError", PEER),
        ("RuntimeError", "[pair.cc:525] Read error [127.0.0.1]:1: Connection reset by peer"),
        ("RuntimeError", "Broken pipe"),
        ("DistBackendError", "NCCL error: remote process exited or there was a network error, NCCL version 2.21.5"),
        ("DistBackendError", "[3] is setting up NCCL communicator: Socket Timeout"),
        ("DistNetworkError", "anything"),
        ("DistStoreError", "wait timeout after 30000ms, keys: /worker/1"),
        ("ConnectionResetError", "[Errno 104]"),
    ],
)
def test_a_lost_peer_is_secondary(type_: str, message: str) -> None:
    """It comes first by the clock, and still is not the failure while another rank has one of its own."""
    lost = exception(type_, message, [SCRIPT, frame("torch.distributed.distributed_c10d", "all_reduce")])
    there = observation(failed(0, lost, at=101.0), failed(1, at=102.0))
    assert matches(signature(), there).ranks == (1,)  # type: ignore[union-attr]
    own = signature(type=type_, package="torch").model_copy(update={"message": ".*"})
    assert matches(own, there) is None
    assert matches(own, observation(failed(0, lost), ended(1))), "nobody else failed: then it is the failure"


@pytest.mark.parametrize(
    ("type_", "message"),
    [("RuntimeError", "mismatch"), ("ValueError", "Connection reset by peer"), ("DistBackendError", "invalid usage")],
)
def test_an_error_of_its_own_is_not_secondary(type_: str, message: str) -> None:
    there = observation(failed(0, exception(type_, message)), failed(1))
    assert find_failures(Attempt(there)).ranks == {0, 1}


def test_errors_are_ordered_by_the_ranks_clocks() -> None:
    there = Attempt(observation(failed(0, exception("A"), at=103.0), failed(1, exception("B"), at=102.0)))
    assert [failure.type for failure in find_failures(there).primary] == ["B", "A"]


def test_an_exception_stays_the_ranks_own_when_the_launcher_ends_it_later() -> None:
    late = failed(1) | {"exit_code": None, "signal": "SIGTERM", "ended_by": "launcher"}
    assert matches(signature(ranks="all"), observation(failed(0), late)).ranks == (0, 1)  # type: ignore[union-attr]
    reached = failed(1, exception("KeyboardInterrupt", "")) | {"ended_by": "launcher"}
    assert matches(signature(ranks="all"), observation(failed(0), reached)).ranks == (0,)  # type: ignore[union-attr]


# --- log

LOG = {"name": "old", "kind": "log", "message": "old version of the checkpointing format", "package": "transformers"}
OLD = "You are using an old version of the checkpointing format"


def noted(**item: Any) -> dict[str, Any]:
    kind = "warnings" if "category" in item else "logs"
    entry = {"message": OLD, "file": f"{SITE}/transformers/modeling_utils.py", **item}
    return observation(ok(0, record=record(0, **{kind: [entry]})), ok(1))


def test_log_matches_records_and_warnings_of_the_package() -> None:
    log = Signature.model_validate(LOG)
    assert matches(log, noted(logger="transformers.modeling_utils")).ranks == (0,)  # type: ignore[union-attr]
    assert matches(log, noted(category="UserWarning"))
    overlay = "/opt/overlay/transformers/modeling_utils.py"
    assert matches(log, noted(logger="x", file=overlay)), "a package on PYTHONPATH has no site-packages in its path"
    assert matches(log, noted(logger="transformers.x", file="<string>"))
    assert matches(log, noted(logger="x", message="other")) is None
    assert matches(log, noted(category="UserWarning", file=f"{SITE}/torch/x.py")) is None


def test_log_that_the_script_writes_itself_never_counts() -> None:
    log = Signature.model_validate(LOG)
    mine = "/home/me/project/repros/some_case.py"
    assert matches(log, noted(logger="transformers.modeling_utils", file=mine)) is None
    assert matches(log, noted(category="UserWarning", file=mine)) is None
    assert matches(log, noted(category="UserWarning", module="__main__")) is None


def test_upstream_warning_that_blames_the_scripts_line_counts() -> None:
    mine = "/home/me/project/repros/some_case.py"
    log = Signature.model_validate(LOG)
    assert matches(log, noted(category="FutureWarning", file=mine, module="transformers.modeling_utils"))


def test_log_can_name_the_logger_or_category() -> None:
    log = Signature.model_validate({**LOG, "logger": "FutureWarning"})
    assert matches(log, noted(category="FutureWarning"))
    assert matches(log, noted(category="UserWarning")) is None


# --- oracle, signal, hang


def test_oracle_is_a_failed_check_on_a_rank_that_finished() -> None:
    oracle = Signature.model_validate({"name": "wrong", "kind": "oracle", "check": "logits"})
    bad = record(1, checks=[check(), check(passed=False)])
    assert matches(oracle, observation(ok(0), ok(1, record=bad))).ranks == (1,)  # type: ignore[union-attr]
    assert matches(oracle, observation(ok(0), ok(1))) is None
    assert matches(oracle, observation(ok(0), ok(1, record={**bad, "done": False}))) is None
    unknown = record(1, checks=[{"name": "logits", "passed": None}])
    assert matches(oracle, observation(ok(0), ok(1, record=unknown))) is None


def test_signal_is_one_that_a_rank_died_of_by_itself() -> None:
    crash = Signature.model_validate({"name": "crash", "kind": "signal", "signal": "SIGABRT"})
    died = ended(1, by="self", signal="SIGABRT")
    assert matches(crash, observation(ended(0), died)).ranks == (1,)  # type: ignore[union-attr]
    assert matches(crash, observation(ended(0), ended(1, signal="SIGABRT"))) is None
    assert matches(crash, observation(ok(0), ok(1, exit_code=-6)))
    lost = {**died, "log_tail": f"terminate called after throwing an instance of 'gloo::IoException'\n{PEER}"}
    assert matches(crash, observation(failed(0), lost)) is None, "aborted over the peer that failed"


@pytest.mark.parametrize("stack", [PY_SPY, FAULTHANDLER])
def test_hang_matches_where_ranks_are_stuck(stack: str) -> None:
    frames = [{"module": r"torch\.distributed\.distributed_c10d", "function": "barrier"}]
    frames.append({"module": r"torch\.distributed\..*", "function": "wrapper"})
    stuck = Signature.model_validate({"name": "stuck", "kind": "hang", "frames": frames, "ranks": "all"})
    both = [ended(rank, by="deadline", signal="SIGKILL", stack=stack) for rank in (0, 1)]
    there = observation(*both, timed_out=True)
    found = matches(stuck, there)
    assert found == Match("stuck", (0, 1), "stuck in torch.distributed.distributed_c10d.barrier")
    assert matches(stuck, observation(*both)) is None
    elsewhere = ended(1, by="deadline", stack='Thread 1 (idle): "MainThread"\n    sleep (x.py:1)\n')
    assert matches(stuck, observation(both[0], elsewhere, timed_out=True)) is None
    anywhere = stuck.model_copy(update={"ranks": "any"})
    assert matches(anywhere, observation(ok(0), both[1], timed_out=True)).ranks == (1,)  # type: ignore[union-attr]
    assert matches(anywhere, observation(failed(0), both[1], timed_out=True)) is None, "it waits for another"


def test_hang_never_matches_a_frame_of_the_script() -> None:
    mine = Signature.model_validate({"name": "mine", "kind": "hang", "frames": [{"function": "<module>"}]})
    assert matches(mine, observation(ended(0, by="deadline", stack=PY_SPY), timed_out=True)) is None


def test_stacks_list_the_main_thread_first() -> None:
    assert [place.function for place in stack_places(PY_SPY)] == ["barrier", "wrapper", "<module>", "wait"]
    assert [place.function for place in stack_places(FAULTHANDLER)] == ["barrier", "wrapper", "<module>"]


def test_module_of_a_file() -> None:
    assert module_names(f"{SITE}/torch/distributed/fsdp/__init__.py") == ("torch.distributed.fsdp",)
    assert module_names("/usr/lib/python3.11/threading.py") == ("threading",)
    assert "torch.distributed.x" in module_names("/opt/overlay/torch/distributed/x.py")
    assert module_names("torch/x.py")[0] == "torch.x"
