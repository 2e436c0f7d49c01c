"""A case's own mistakes are no verdicts: errors of its script, signatures that just miss, failures never seen."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from judging import (
    EXCEPTION,
    case,
    check,
    control,
    document,
    exception,
    failed,
    frame,
    observation,
    ok,
    outcome,
    record,
)
from launching import attempt_of, launched
from repro_matrix.config.schema import Case
from repro_matrix.grading import script_errors as own
from repro_matrix.grading import verdict
from repro_matrix.grading.grade import grade
from repro_matrix.launch import observe
from repro_matrix.launch.forkserver import WarmLauncher
from repro_matrix.results.exit_code import exit_code

SCRIPT = "/home/me/project/repros/some_case.py"


def placed(where: str, function: str = "forward", file: str = "", line: int = 31) -> dict[str, Any]:
    made = frame(where, function, file or None)
    return {**made, "place": where, "line": line}


OWN = placed("repros.some_case", "body", SCRIPT)
KIT = placed("repros.kit.models", "build", "/home/me/project/repros/repro_kit/models.py", 7)
NORM = placed("transformers.models.qwen2.modeling_qwen2")
TORCH = placed("torch.nn.functional", "layer_norm")
STANDARD = placed("json.decoder", "decode")
GENERATED = placed("", "<module>", "<string>", 1)
FORGED = placed("", "forward", "/venv/lib/python3.11/site-packages/transformers/models/x.py", 12)


def judged(frames: list[dict[str, Any]], kind: str = "NameError", known: Case | None = None) -> Any:
    error = exception(kind, "name 'x' is not defined", frames)
    known = known or case()
    return grade(known, next(iter(known.arms)), observation(failed(0, error), failed(1, error)), [known])


@pytest.mark.parametrize(
    ("frames", "where"),
    [
        ([OWN], "repros/some_case.py:31"),
        ([OWN, NORM, OWN], "repros/some_case.py:31"),  # a hook of the script's
        ([OWN, KIT], "repros/repro_kit/models.py:7"),
        ([OWN, STANDARD], "repros/some_case.py:31"),
        ([OWN, GENERATED], "repros/some_case.py:31"),
        ([OWN, GENERATED, STANDARD], "repros/some_case.py:31"),
    ],
)
@pytest.mark.parametrize("kind", ["NameError", "ValueError", "ImportError"])
def test_what_the_script_or_the_kit_raises_is_no_evidence(frames: list[dict[str, Any]], where: str, kind: str) -> None:
    for known in (case(), control()):
        found = judged(frames, kind, known)
        assert found.outcome == "infra"
        assert found.reason == f"script: the script itself fails: {where} {kind}: name 'x' is not defined"


@pytest.mark.parametrize("frames", [[OWN, NORM], [OWN, NORM, GENERATED], [OWN, TORCH, STANDARD], [OWN, KIT, TORCH]])
def test_what_upstream_raises_is_not_the_scripts(frames: list[dict[str, Any]]) -> None:
    assert judged(frames).outcome == "other_error"


def test_code_that_pretends_to_be_an_installed_file_is_no_evidence() -> None:
    found = judged([OWN, TORCH, FORGED])
    assert found.outcome == "infra" and "x.py:12" in found.reason and "not what" in found.reason


def test_an_older_record_is_judged_as_it_was() -> None:
    frames = [{k: v for k, v in OWN.items() if k != "place"}]
    assert judged(frames).outcome == "other_error"


def test_the_first_failure_decides() -> None:
    """A rank whose script gives up because another rank failed upstream is a consequence."""
    late, early = exception("TimeoutError", "rank 0 did not write", [OWN]), exception(frames=[OWN, NORM])
    assert grade(case(), "broken", observation(failed(0, early, 1.0), failed(1, late, 9.0)), []).outcome == "fires"
    assert grade(case(), "broken", observation(failed(0, early, 9.0), failed(1, late, 1.0)), []).outcome == "infra"


# --- what just missed


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (exception(frames=[OWN, TORCH]), "norm: type ok, message ok, package: torch, declared transformers"),
        (
            exception("ValueError", frames=[OWN, NORM]),
            "type: ValueError, declared RuntimeError, message ok",
        ),
        (exception(message="other", frames=[OWN, NORM]), "message: other, declared size mismatch in norm, package ok"),
    ],
)
def test_a_near_miss_says_what_missed(error: dict[str, Any], says: str) -> None:
    found = grade(case(), "broken", observation(failed(0, error), failed(1, error)), [])
    assert found.outcome == "other_error" and says in found.reason
    assert "nearly" not in grade(case(), "fix", observation(failed(0, error), failed(1, error)), []).reason


def test_a_missing_frame_an_absent_check_a_foreign_speaker_are_said() -> None:
    framed = case(signatures=[{**EXCEPTION, "frames": [{"module": "a", "function": "b"}]}])
    error = exception(frames=[OWN, NORM])
    assert "no frame a b" in grade(framed, "broken", observation(failed(0, error), failed(1, error)), []).reason
    oracle = case(signatures=[{"name": "wrong", "kind": "oracle", "check": "absent"}])
    both = observation(ok(0), ok(1))
    assert "wrong: check absent was made by no rank" in grade(oracle, "broken", both, []).reason
    log = case(signatures=[{"name": "said", "kind": "log", "message": "old", "package": "transformers"}])
    entry = {"logger": "x", "message": "old", "file": "f.py", "place": "torch.x"}
    there = observation(ok(0, record=record(0, logs=[entry])), ok(1))
    assert "package: torch.x, declared transformers" in grade(log, "broken", there, []).reason


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("/home/me/repros/train.py", "repros/train.py"), ("/x/repros/repro_kit/run.py", "repros/repro_kit/run.py"),
        ("C:\\work\\repros\\train.py", "repros/train.py"), ("/home/me/train.py", "train.py"), ("train.py", "train.py"),
        ("/venv/site-packages/torch/nn.py", "torch/nn.py"), ("/dist-packages/a/site-packages/torch/x.py", "torch/x.py"),
        ("/venv/site-packages/x/repros/a.py", "x/repros/a.py"),
    ],
)  # fmt: skip
def test_a_file_is_named_from_where_it_means_the_same_on_any_machine(file: str, said: str) -> None:
    assert own.shown(file) == said


def test_far_misses_say_nothing() -> None:
    error = exception("KeyError", "other", [OWN, TORCH])
    assert "nearly" not in grade(case(), "broken", observation(failed(0, error), failed(1, error)), []).reason


# --- a failure that nothing stored expects


@pytest.mark.parametrize("broken", ["clean", "other_error"])
@pytest.mark.parametrize("fix", ["clean", "other_error", "fires"])
def test_a_new_case_that_does_not_fire_is_inconclusive(broken: str, fix: str) -> None:
    outcomes = {"broken": [outcome(broken, "why")], "fix": [outcome(fix)]}
    new, old = case(expect=[]), case()
    found = verdict.judge(new, outcomes)["fix"]
    assert found.name == "INCONCLUSIVE" and found.unseen and "why" in found.reason
    assert not verdict.judge(old, outcomes)["fix"].unseen
    stored = document({"broken": [(broken, observation(ok(0)))], "fix": [(fix, observation(ok(0)))]})
    assert exit_code([{**stored, "verdicts": {"fix": found.to_json()}}], 1) == 3


def test_a_new_case_that_fires_or_fired_is_judged() -> None:
    fires = {"broken": [outcome("fires")], "fix": [outcome("clean")]}
    assert verdict.judge(case(expect=[]), fires)["fix"].name == "FIX_HOLDS"
    clean = {"broken": [outcome("clean")], "fix": [outcome("clean")]}
    older = document({"broken": [("fires", observation(ok(0)))]})
    assert verdict.judge(case(expect=[]), clean, [older])["fix"].name == "UPSTREAM_FIXED"


# --- a script that dies before its first record


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f'Traceback (most recent call last):\n  File "{SCRIPT}", line 9, in <module>\n    x\nNameError: x', "script"),
        (f'  File "{SCRIPT}", line 9\n    x x\nSyntaxError: invalid syntax', "script"),
        (f'  File "{SCRIPT}", line 9, in <module>\n  File "/v/site-packages/t/u.py", line 3\nImportError: x', "import"),
    ],
)
def test_an_error_before_the_record_is_read_from_the_log(text: str, found: str) -> None:
    kind, said = observe._of_log(text)  # type: ignore[misc]
    assert kind == found and ("repros/some_case.py:9 " in said) == (found == "script")


@pytest.mark.ranks
def test_a_real_rank_that_raises_by_itself(tmp_path: Path, warm: WarmLauncher) -> None:
    attempt = attempt_of(tmp_path / "a", "raises", world_size=1)
    promised = {"slug": "none", "options": {}, "promises": {"parameters": "whole"}}
    attempt.settings.update(case="a-control", arm="control", strategy=promised)
    seen = launched(warm, attempt)
    found = grade(control(), "control", seen, [])
    assert found.outcome == "infra" and "misbehave.py:" in found.reason and "does not want to" in found.reason
    frames = seen["ranks"][0]["record"]["exception"]["frames"]
    assert [item["place"].partition(".")[0] for item in frames] == ["repros"] * len(frames)
    assert Path(seen["ranks"][0]["record"]["packages"]["torch"]).is_relative_to(sys.prefix)
    assert check()
