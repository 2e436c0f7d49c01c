"""Planted lies: an honest observation with one thing changed, which must not count as what it
pretends to be.

The honest ones are a control's training (PASSED), and a failure with its fix (FIXED), of cases of
the catalogue.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from observations import (
    PEER,
    as_promised,
    check,
    ended,
    exception,
    failed,
    frame,
    observation,
    ok,
    record,
)
from repro_matrix.config import catalog as catalogue
from repro_matrix.grading.grade import grade
from repro_matrix.grading.verdict import judge
from repro_matrix.records.outcome import Outcome, Verdict

Json = dict[str, Any]
Plant = Callable[[Json], Any]
KNOWN = catalogue.load()
SIGNATURE = "Expected to have finished reduction in the prior iteration before starting a new one"
VERSIONS = {"torch": "2.13.0", "transformers": "5.23.0"}


def settings(case: str, strategy: str) -> Json:
    flags = {name: flag.default for name, flag in KNOWN.cases[case].flags.items()}
    return {"strategy": copy.deepcopy(KNOWN.raw["strategy"][strategy]), "flags": flags, "steps": 2}


def trained(rank: int, case: str, strategy: str) -> Json:
    """A rank that trained, with all the checks and effects that the case asks for."""
    lists = {"loss": [2.1, 2.0], "batches": [2, 2], "steps": 2}
    names = ("steps", "gradient", "updates", "rounding", "loss", "batches", "checkpoint")
    checks = [
        check(
            name, **({key: lists[name] for key in ("actual", "expected")} if name in lists else {})
        )
        for name in names
    ]
    more = as_promised(settings(case, strategy), 2, KNOWN.cases[case].pass_criteria.effects)
    return ok(
        rank,
        pid=100 + rank,
        record=record(rank, checks=checks, pid=100 + rank, versions=VERSIONS, **more),
    )


def placed(origin: str, **changes: Any) -> Json:
    return {**frame(origin, "forward"), "code_location": origin, **changes}


def reproduced(rank: int) -> Json:
    script = placed("repros.ddp_unfinished_reduction", file="/x/repros/ddp_unfinished_reduction.py")
    return failed(
        rank,
        exception("RuntimeError", SIGNATURE, [script, placed("torch.nn.parallel.distributed")]),
    )


def graded(case: str, variant: str, seen: Json) -> Outcome:
    return grade(KNOWN.cases[case], variant, seen, KNOWN.cases)


def training(plant: Plant) -> tuple[Verdict, Outcome]:
    ranks = [trained(rank, "train-step", "fsdp") for rank in (0, 1)]
    seen = observation(*ranks, settings=settings("train-step", "fsdp"), versions=VERSIONS)
    plant(seen)
    outcome = graded("train-step", "control", seen)
    return judge(KNOWN.cases["train-step"], {"control": [outcome]})["control"], outcome


def failure_and_fix(plant: Plant) -> tuple[Verdict, dict[str, Outcome]]:
    made = settings("ddp-unfinished-reduction", "ddp")
    fixed = {**made, "flags": {**made["flags"], "find_unused": True}}
    variants = {
        "unfixed": observation(reproduced(0), reproduced(1), settings=made),
        "find-unused": observation(
            *(trained(n, "ddp-unfinished-reduction", "ddp") for n in (0, 1)), settings=fixed
        ),
    }
    plant(variants)
    outcomes = {
        variant: graded("ddp-unfinished-reduction", variant, seen)
        for variant, seen in variants.items()
    }
    each = {variant: [outcome] for variant, outcome in outcomes.items()}
    return judge(KNOWN.cases["ddp-unfinished-reduction"], each)["find-unused"], outcomes


# -- changes of a training's observation


def changed(part: str, name: str = "", ranks: tuple[int, ...] = (0, 1), **changes: Any) -> Plant:
    """Change one part of what these ranks left; ``name``: of the checks or effects."""

    def parts(rank: Json) -> list[Json]:
        wrote = rank["record"]
        named = {"check": (wrote["checks"], "name"), "effect": (wrote["effects"], "what")}
        if part in named:
            return [one for one in named[part][0] if one[named[part][1]] == name]
        if part in ("rank", "record"):
            return [rank if part == "rank" else wrote]
        return [wrote["exception"] if part == "exception" else wrote["exception"]["frames"][-1]]

    return lambda seen: [
        one.update(changes) for number in ranks for one in parts(seen["ranks"][number])
    ]


def last(**changes: Any) -> Plant:
    return changed("record", ranks=(1,), **changes)


def without_check(seen: Json) -> None:
    checks = seen["ranks"][1]["record"]["checks"]
    checks.remove(next(one for one in checks if one["name"] == "updates"))


def twice(seen: Json) -> None:
    seen["ranks"][1]["record"]["checks"] *= 2


def one_process(seen: Json) -> None:
    changed("rank", pid=100)(seen)
    changed("record", pid=100)(seen)


def two_releases(seen: Json) -> None:
    """No plan names which it should have been."""
    del seen["attempt"]["versions"]
    seen["ranks"][1]["record"]["versions"] = {**VERSIONS, "torch": "2.12.0"}


def slow(seen: Json) -> None:
    seen["attempt"].update(
        timed_out=True, hang={"starting": False, "deadlock": None, "limit_s": 120}
    )
    for rank in seen["ranks"]:
        rank.update({**ended(rank["rank"], "timeout", "SIGKILL"), "pid": None})
        rank["samples"] = [
            {"time_s": at, "ended": False, "phase": f"step {at}"} for at in (1.0, 5.0)
        ]


TRAINING: dict[
    str, tuple[Plant, str]
] = {  # lie -> (what is changed, the kind of infra, or other_failure)
    "passed=True with wrong numbers": (
        changed("check", "updates", actual=0.5),
        "missing_check",
    ),
    "a NaN that calls itself passed": (
        changed("check", "updates", actual="nan"),
        "missing_check",
    ),
    "a NaN among other numbers": (
        changed("check", "loss", actual=[2.1, "nan"], passed=False),
        "other_failure",
    ),
    "a tolerance that lets a zero pass": (
        changed("check", "steps", tolerance=2),
        "missing_check",
    ),
    "a check after done": (changed("check", "updates", at=11.0), "missing_check"),
    "a check made twice": (twice, "missing_check"),
    "a check not made on one rank": (without_check, "missing_check"),
    "fewer steps than were asked for": (
        changed("check", "steps", actual=1, expected=1),
        "missing_check",
    ),
    "a record forged by another process": (last(pid=4711), "missing_check"),
    "a record of another rank": (last(rank=0), "missing_check"),
    "one process as two ranks": (one_process, "missing_check"),
    "yesterday's record": (last(started=-1e5), "missing_check"),
    "a record of one rank alone": (last(world_size=1), "missing_check"),
    "a missing rank": (lambda seen: seen["ranks"].pop(), "other_failure"),
    "exit 0 without done": (last(done=False, done_at=None), "other_failure"),
    "done, and then killed": (
        changed("rank", ranks=(1,), exit_code=None, signal="SIGSEGV"),
        "other_failure",
    ),
    "sharded in name only": (changed("effect", "parameters", actual=1000), "no_effect"),
    "a process group of one": (changed("effect", "group", actual=1), "no_effect"),
    "no reduction in a step": (
        changed("effect", "collectives", actual={"gather": 3}),
        "no_effect",
    ),
    "recomputation on one rank only": (
        lambda seen: seen["ranks"][0]["record"]["effects"].append(
            {"what": "checkpointing", "actual": 4, "least": 1}
        ),
        "no_effect",
    ),
    "a rank on another release": (
        last(versions={"transformers": "4.39.3"}),
        "environment_changed",
    ),
    "ranks on two releases": (two_releases, "environment_changed"),
    "slow ranks as a hang": (slow, "timeout_while_progressing"),
    "an interrupted attempt that was done": (
        lambda seen: seen["attempt"].update(interrupted=True),
        "interrupted",
    ),
}


def test_honest_observations_pass_and_are_fixed() -> None:
    assert training(lambda seen: None)[0].name == "PASSED"
    assert failure_and_fix(lambda variants: None)[0].name == "FIXED"


@pytest.mark.parametrize("lie", TRAINING)
def test_changed_training_does_not_pass(lie: str) -> None:
    plant, expected = TRAINING[lie]
    verdict, outcome = training(plant)
    assert (outcome.infra_error or outcome.outcome) == expected
    assert verdict.name == ("FAILED" if expected == "other_failure" else "INCONCLUSIVE")
    assert verdict.measured is (expected == "other_failure")


# -- changes of a failure's observations: the unfixed variant must not reproduce, or the fix must
# not hold


def raised_at(origin: str, **changes: Any) -> Plant:
    """Move the innermost frame somewhere else."""
    return changed("frame", code_location=origin, **changes)


def printed(seen: Json) -> None:
    for number, rank in enumerate(seen["ranks"]):
        rank.update(
            trained(number, "ddp-unfinished-reduction", "ddp"),
            log_tail=f"RuntimeError: {SIGNATURE}\n",
        )


def by_the_peer(seen: Json) -> None:
    """A lost connection of one rank; the other was killed."""
    raised_at("torch.distributed.distributed_c10d")(seen)
    changed("exception", message=PEER)(seen)
    seen["ranks"][0].update(exit_code=None, signal="SIGKILL", terminated_by="self")
    seen["ranks"][0]["record"].update(exception=None, ended=None)


def as_a_cause(seen: Json) -> None:
    """The known failure was being handled when another error was raised."""
    for rank in seen["ranks"]:
        known = rank["record"]["exception"]
        rank["record"]["exception"] = exception(
            "RuntimeError", "no", [placed("accelerate.x")], cause=known
        )


def unread(seen: Json) -> None:
    for rank in seen["ranks"]:
        rank["record"]["read"]["flags"].remove("find_unused")


NO_MEMORY = {"kind": "memory", "message": "x"}
FAILURE: dict[
    str, tuple[str, Plant, str, str]
] = {  # lie -> (variant, change, verdict, kind of infra or outcome)
    "a script that raises the signature": (
        "unfixed",
        raised_at("repros.x", file="/x/repros/x.py"),
        "INCONCLUSIVE",
        "script_error",
    ),
    "exec with a borrowed file name": (
        "unfixed",
        raised_at(""),
        "INCONCLUSIVE",
        "script_error",
    ),
    "torch._check with its text": (
        "unfixed",
        raised_at("torch", function="_check"),
        "INCONCLUSIVE",
        "script_error",
    ),
    "a package in a work folder": (
        "unfixed",
        raised_at("", file="/x/torch/nn.py"),
        "INCONCLUSIVE",
        "script_error",
    ),
    "another package": (
        "unfixed",
        raised_at("accelerate.utils"),
        "SIGNATURE_MISMATCH",
        "other_failure",
    ),
    "another type": (
        "unfixed",
        changed("exception", type="ValueError"),
        "SIGNATURE_MISMATCH",
        "other_failure",
    ),
    "another text": (
        "unfixed",
        changed("exception", message="Expected x"),
        "SIGNATURE_MISMATCH",
        "other_failure",
    ),
    "the known failure as a handled cause": (
        "unfixed",
        as_a_cause,
        "SIGNATURE_MISMATCH",
        "other_failure",
    ),
    "output that prints the signature": ("unfixed", printed, "NOT_REPRODUCED", "passed"),
    "a peer's error as the known one": (
        "unfixed",
        by_the_peer,
        "SIGNATURE_MISMATCH",
        "other_failure",
    ),
    "the failure of a machine without memory": (
        "unfixed",
        lambda seen: seen.update(infra_error=NO_MEMORY),
        "INCONCLUSIVE",
        "memory",
    ),
    "a flag that is never read": ("find-unused", unread, "INCONCLUSIVE", "no_effect"),
    "a fix that does not train": (
        "find-unused",
        changed("check", "steps", actual=0, passed=False),
        "DIFFERENT_FAILURE",
        "other_failure",
    ),
    "a fix that proves nothing": (
        "find-unused",
        without_check,
        "INCONCLUSIVE",
        "missing_check",
    ),
    "a fix on one rank of two": (
        "find-unused",
        lambda seen: seen["ranks"].pop(),
        "DIFFERENT_FAILURE",
        "other_failure",
    ),
}


@pytest.mark.parametrize("lie", FAILURE)
def test_changed_failure_or_fix_is_not_fixed(lie: str) -> None:
    variant, plant, name, expected = FAILURE[lie]
    verdict, outcomes = failure_and_fix(lambda variants: plant(variants[variant]))
    changed = outcomes[variant]
    assert (verdict.name, changed.infra_error or changed.outcome) == (
        name,
        expected,
    ), verdict.reason
