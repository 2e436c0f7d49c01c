"""Judges at their edges: signatures, comparable, the rest. Each was a small change (`make mutants`) that nobody saw."""

from __future__ import annotations

from typing import Any

import pytest
from judging import (
    DIST,
    SCRIPT,
    SITE,
    case,
    check,
    document,
    ended,
    exception,
    failed,
    frame,
    observation,
    ok,
    record,
)  # fmt: skip
from repro_matrix.analysis.claims import evaluate as predicted
from repro_matrix.analysis.claims import metrics
from repro_matrix.analysis.claims.conditions import Point, rules
from repro_matrix.analysis.claims.support import Grounds
from repro_matrix.config.axes import Strategy
from repro_matrix.config.predictions import Prediction
from repro_matrix.config.signatures import Signature
from repro_matrix.grading import consistency as genuine
from repro_matrix.grading import effect as in_force
from repro_matrix.grading import regrade as again
from repro_matrix.grading import specificity as foreign
from repro_matrix.grading.comparability import settings_difference
from repro_matrix.grading.expectations import _value
from repro_matrix.grading.hangs import progress as looks
from repro_matrix.grading.hangs.deadlock import Standing
from repro_matrix.grading.observation import Attempt, is_project_code, module_names
from repro_matrix.grading.root_cause import find_failures
from repro_matrix.grading.signature import matches, near_misses

CASE = case()


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
    return near_misses([Signature.model_validate({"name": "s", **signature})], attempt, find_failures(attempt))


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
    assert near_misses(two, attempt, find_failures(attempt)) == said


# -- comparable


def test_measurements_are_alike_in_what_was_set() -> None:
    one = {
        "strategy": {"slug": "fsdp", "options": {}},
        "model": {"slug": "m", "config": {"h": 1}},
        "flags": {},
        "steps": 3,
    }
    assert settings_difference(one, dict(one)) is None
    assert settings_difference(one, {**one, "strategy": {"slug": "ddp", "options": {}}}) is not None
    assert settings_difference(one, {**one, "steps": 4}) is not None


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
    assert str(settings_difference({"model": {"slug": "m", "weights": "random"}}, theirs)).startswith("weights ")  # type: ignore[typeddict-item, arg-type]
    assert str(settings_difference({"model": {"slug": "n", "weights": "hub"}}, theirs)).startswith("model slug ")  # type: ignore[typeddict-item, arg-type]


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
    assert module_names("C:\\env\\Lib\\site-packages\\torch\\nn\\functional.py") == ("torch.nn.functional",)


def test_a_message_is_quoted_by_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    item = foreign.unrelated_messages()[0]
    monkeypatch.setattr(foreign, "matched", lambda case, signature: [f"first\nsecond{item.message}"])
    assert str(foreign.overbroad_signature(CASE)).endswith("that are not its failure: 'first'")


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
    assert is_project_code("repros.train_step", "/elsewhere/x.py") and is_project_code("repro_kit.run", "/elsewhere/x.py")
    assert not is_project_code("reprosx", "/elsewhere/x.py") and not is_project_code("torch.nn", "/elsewhere/x.py")


def test_what_decides_nothing_where_the_failure_is_not_there() -> None:
    quiet: Any = document({"broken": [("clean", observation(ok(0)))], "fix": [("clean", observation(ok(0)))]})
    for arm, decides in (("control", True), ("fix", False)):
        found = predicted._not_there(Prediction(arm=arm, outcome="clean"), frozenset({"clean"}), quiet)
        assert (found is None) == decides
    assert predicted._by_verdict(frozenset({"CHANGED"}), "NOT_FIRING") == (
        None, "could not be tested on this stack: broken is clean",
    )  # fmt: skip
    assert predicted._by_verdict(frozenset({"FIX_HOLDS"}), "FIX_BROKEN") == (False, "")
