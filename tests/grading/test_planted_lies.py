"""Planted lies: an honest observation with one thing changed, which must not count as what it pretends to be.

The honest ones are a control's training (HEALTHY), and a failure with its fix (FIX_HOLDS), of cases of the catalogue.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from judging import PEER, as_promised, check, ended, failed, frame, observation, ok, record
from repro_matrix.config import catalog as catalogue
from repro_matrix.grading.grade import grade
from repro_matrix.grading.outcome import Outcome
from repro_matrix.grading.verdict import Verdict, judge

Json = dict[str, Any]
Plant = Callable[[Json], Any]
KNOWN = catalogue.load()
SIGNATURE = "Expected to have finished reduction in the prior iteration before starting a new one"
VERSIONS = {"torch": "2.13.0", "transformers": "5.23.0"}
STEPS = check("steps", got=2, want=2, tolerance=0)


def settings(case: str, strategy: str) -> Json:
    flags = {name: flag.default for name, flag in KNOWN.cases[case].flags.items()}
    return {"strategy": copy.deepcopy(KNOWN.raw["strategy"][strategy]), "flags": flags, "steps": 2}


def trained(rank: int, case: str, strategy: str) -> Json:
    """A rank that trained, with all the checks and effects that the case asks for."""
    checks = [
        copy.deepcopy(STEPS), *(check(name) for name in ("gradient", "updates", "rounding")),
        check("loss", got=[2.1, 2.0], want=[2.1, 2.0]), check("batches", got=[2, 2], want=[2, 2], tolerance=0),
        check("checkpoint", got=0, want=0, tolerance=0),
    ]  # fmt: skip
    more = as_promised(settings(case, strategy), 2, KNOWN.cases[case].proof.in_force)
    return ok(rank, pid=100 + rank, record=record(rank, checks=checks, pid=100 + rank, versions=VERSIONS, **more))


def fires(rank: int) -> Json:
    def placed(origin: str) -> Json:
        return {**frame(origin, "forward"), "place": origin}

    script = {**placed("repros.ddp_unfinished_reduction"), "file": "/x/repros/ddp_unfinished_reduction.py"}
    error = {
        "type": "RuntimeError", "module": "builtins", "bases": ["Exception"], "message": SIGNATURE,
        "frames": [script, placed("torch.nn.parallel.distributed")], "cause": None,
    }  # fmt: skip
    return failed(rank, error)


def graded(case: str, arm: str, seen: Json) -> Outcome:
    return grade(KNOWN.cases[case], arm, seen, KNOWN.cases)


def training(plant: Plant) -> tuple[Verdict, Outcome]:
    ranks = [trained(rank, "train-step", "fsdp") for rank in (0, 1)]
    seen = observation(*ranks, settings=settings("train-step", "fsdp"), versions=VERSIONS)
    plant(seen)
    outcome = graded("train-step", "control", seen)
    return judge(KNOWN.cases["train-step"], {"control": [outcome]})["control"], outcome


def failure_and_fix(plant: Plant) -> tuple[Verdict, dict[str, Outcome]]:
    made = settings("ddp-unfinished-reduction", "ddp")
    fixed = {**made, "flags": {**made["flags"], "find_unused": True}}
    arms = {
        "broken": observation(fires(0), fires(1), settings=made),
        "find-unused": observation(*(trained(n, "ddp-unfinished-reduction", "ddp") for n in (0, 1)), settings=fixed),
    }
    plant(arms)
    outcomes = {arm: graded("ddp-unfinished-reduction", arm, seen) for arm, seen in arms.items()}
    each = {arm: [outcome] for arm, outcome in outcomes.items()}
    return judge(KNOWN.cases["ddp-unfinished-reduction"], each)["find-unused"], outcomes


# -- changes of a training's observation


def checked(name: str, **changes: Any) -> Plant:
    """Change every rank's check of that name."""
    return lambda seen: [
        one.update(changes) for rank in seen["ranks"] for one in rank["record"]["checks"] if one["name"] == name
    ]


def last(**changes: Any) -> Plant:
    """Change the last rank; ``record`` is merged into its record."""

    def plant(seen: Json) -> None:
        rank = seen["ranks"][1]
        if isinstance(changes.get("record"), dict):
            rank.update({**changes, "record": {**rank["record"], **changes["record"]}})
        else:
            rank.update(changes)

    return plant


def measured(what: str, every: bool = True, **changes: Any) -> Plant:
    return lambda seen: [
        item.update(changes)
        for rank in seen["ranks"][0 if every else 1 :]
        for item in rank["record"]["in_force"]
        if item["what"] == what
    ]


def without(key: str) -> Plant:
    return lambda seen: seen["ranks"][1]["record"].pop(key)


def without_check(seen: Json) -> None:
    made = seen["ranks"][1]["record"]
    made["checks"] = [one for one in made["checks"] if one["name"] != "updates"]


def promises(value: Any) -> Plant:
    return lambda seen: seen["attempt"]["settings"]["strategy"].update(promises=value)


def first_rank_twice(seen: Json) -> None:
    seen["ranks"][1] = copy.deepcopy(seen["ranks"][0])


def one_process(seen: Json) -> None:
    for rank in seen["ranks"]:
        rank["pid"] = rank["record"]["pid"] = 100


def two_releases(seen: Json) -> None:
    """No plan names which it should have been."""
    del seen["attempt"]["versions"]
    seen["ranks"][1]["record"]["versions"] = {**VERSIONS, "torch": "2.12.0"}


SAMPLE = {"at_s": 1.0, "ended": False, "cpu_s": 1.0, "io": 10, "busy": True, "phase": "step 0", "stack": "a",
          "entered": "a", "inside": "", "spins": False}  # fmt: skip


def slow(seen: Json) -> None:
    seen["attempt"].update(timed_out=True, hang={"starting": False, "never_meet": None, "limit_s": 120})
    for rank in seen["ranks"]:
        rank.update({**ended(rank["rank"], "deadline", "SIGKILL"), "pid": None})
        rank["looks"] = [SAMPLE, {**SAMPLE, "at_s": 5.0, "phase": "step 1"}]


TRAINING: dict[str, tuple[Plant, str]] = {  # lie -> (what is changed, the kind of infra, or other_error)
    "passed=True with wrong numbers": (checked("updates", got=0.5), "no-proof"),
    "passed=False with right numbers": (checked("updates", passed=False), "no-proof"),
    "a NaN that calls itself passed": (checked("updates", got="nan"), "no-proof"),
    "a NaN among other numbers": (checked("loss", got=[2.1, "nan"], passed=False), "other_error"),
    "a tolerance that lets a zero pass": (checked("steps", tolerance=2), "no-proof"),
    "nine tenths of an update as rounding": (checked("updates", got=0.9, tolerance=0.95), "no-proof"),
    "a check without a subject": (
        checked("steps", got=True, want=True, tolerance=None, looked_at=""), "no-proof"),
    "a check after done": (checked("updates", at=11.0), "no-proof"),
    "a check made twice": (lambda seen: seen["ranks"][1]["record"]["checks"].append(dict(STEPS)), "no-proof"),
    "a check not made on one rank": (without_check, "no-proof"),
    "fewer steps than were asked for": (checked("steps", got=1, want=1), "no-proof"),
    "an older kit's record with wrong numbers": (
        lambda seen: (last(record={"schema": 1})(seen), checked("updates", got=0.9)(seen)), "no-proof"),
    "a record forged by another process": (last(record={"pid": 4711}), "no-proof"),
    "a record of another rank": (last(record={"rank": 0}), "no-proof"),
    "one process as two ranks": (one_process, "no-proof"),
    "yesterday's record": (last(record={"started": -1e5}), "no-proof"),
    "a record of one rank alone": (last(record={"world_size": 1}), "no-proof"),
    "one rank's record twice": (first_rank_twice, "no-proof"),
    "a missing rank": (lambda seen: seen["ranks"].pop(), "other_error"),
    "exit 0 without done": (last(record={"done": False, "done_at": None}), "other_error"),
    "exit 0 without a record": (last(record=None), "other_error"),
    "done, and then killed": (last(exit_code=None, signal="SIGSEGV"), "other_error"),
    "done, and exit code 1": (last(exit_code=1), "other_error"),
    "sharded in name only": (measured("parameters", got=1000), "not-in-force"),
    "gradients that are not sharded": (measured("gradients", got=1000), "not-in-force"),
    "one rank that updates nothing": (measured("updates", False, got=0), "not-in-force"),
    "shares of NaN": (measured("parameters", got="nan"), "not-in-force"),
    "a process group of one": (measured("group", got=1), "not-in-force"),
    "a backend that was not asked for": (measured("group", backend="mpi"), "not-in-force"),
    "no reduction in a step": (measured("collectives", got={"gather": 3}), "not-in-force"),
    "effects on one rank only": (last(record={"in_force": []}), "not-in-force"),
    "a record without effects": (without("in_force"), "not-in-force"),
    "recomputation on one rank only": (
        lambda seen: seen["ranks"][0]["record"]["in_force"].append({"what": "checkpointing", "got": 4, "least": 1}),
        "not-in-force"),
    "settings without promises": (promises(None), "not-in-force"),
    "promises of nothing": (promises({}), "not-in-force"),
    "a rank on another release": (last(record={"versions": {"transformers": "4.39.3"}}), "stack changed"),
    "ranks on two releases": (two_releases, "stack changed"),
    "slow ranks as a hang": (slow, "too slow"),
    "an interrupted attempt that was done": (lambda seen: seen["attempt"].update(interrupted=True), "interrupted"),
}  # fmt: skip


def test_honest_training_is_healthy() -> None:
    assert training(lambda seen: None)[0].name == "HEALTHY"


@pytest.mark.parametrize("lie", TRAINING)
def test_lie_about_a_training_is_not_healthy(lie: str) -> None:
    plant, expected = TRAINING[lie]
    verdict, outcome = training(plant)
    assert (outcome.infra or outcome.outcome) == expected
    assert verdict.name == ("UNHEALTHY" if expected == "other_error" else "INCONCLUSIVE")
    assert verdict.measured is (expected == "other_error")


# -- changes of a failure's observations: the broken arm must not fire, or the fix must not hold


def on(arm: str, plant: Plant) -> Plant:
    return lambda arms: plant(arms[arm])


def raised_at(origin: str, file: str | None = None) -> Plant:
    """Move the innermost frame somewhere else."""

    def plant(seen: Json) -> None:
        for rank in seen["ranks"]:
            inner = rank["record"]["exception"]["frames"][-1]
            inner.update({"place": origin, **({"file": file} if file else {})})

    return plant


def error(**changes: Any) -> Plant:
    return lambda seen: [rank["record"]["exception"].update(changes) for rank in seen["ranks"]]


def printed(seen: Json) -> None:
    for number, rank in enumerate(seen["ranks"]):
        honest = trained(number, "ddp-unfinished-reduction", "ddp")
        rank.update(honest, log_tail=f"RuntimeError: {SIGNATURE}\n")


def by_the_peer(seen: Json) -> None:
    """A lost connection of one rank; the other was killed."""
    raised_at("torch.distributed.distributed_c10d")(seen)
    error(message=PEER)(seen)
    seen["ranks"][0].update(exit_code=None, signal="SIGKILL", ended_by="self")
    seen["ranks"][0]["record"].update(exception=None, ended=None)


def as_a_cause(seen: Json) -> None:
    """The known failure was being handled when another error was raised."""
    for rank in seen["ranks"]:
        known = rank["record"]["exception"]
        frames = [known["frames"][0], {**frame("accelerate.x", "y"), "place": "accelerate.x"}]
        rank["record"]["exception"] = {**known, "message": "out of patience", "frames": frames, "cause": known}


def unread(seen: Json) -> None:
    for rank in seen["ranks"]:
        rank["record"]["read"]["flags"].remove("find_unused")


FAILURE: dict[str, tuple[Plant, str, str]] = {  # lie -> (what is changed, verdict, the kind of infra or outcome)
    "a script that raises the signature": (
        on("broken", raised_at("repros.x", "/x/repros/x.py")), "INCONCLUSIVE", "script"),
    "exec with a borrowed file name": (on("broken", raised_at("")), "INCONCLUSIVE", "script"),
    "a package in a work folder": (on("broken", raised_at("", "/elsewhere/x/torch/nn.py")), "INCONCLUSIVE", "script"),
    "another package with the known text": (on("broken", raised_at("accelerate.utils")), "CHANGED", "other_error"),
    "another type with the known text": (on("broken", error(type="ValueError")), "CHANGED", "other_error"),
    "another text of the known type": (on("broken", error(message="Expected something")), "CHANGED", "other_error"),
    "the known failure as a handled cause": (on("broken", as_a_cause), "CHANGED", "other_error"),
    "output that prints the signature": (on("broken", printed), "NOT_FIRING", "clean"),
    "a peer's error as the known one": (on("broken", by_the_peer), "CHANGED", "other_error"),
    "the failure of a machine without memory": (
        on("broken", lambda seen: seen.update(infra={"kind": "memory", "message": "x"})), "INCONCLUSIVE", "memory"),
    "a flag that is never read": (on("find-unused", unread), "INCONCLUSIVE", "not-in-force"),
    "a fix that does not train": (
        on("find-unused", checked("steps", got=0, passed=False)), "FIX_UNMASKS", "other_error"),
    "a fix that proves nothing": (on("find-unused", without_check), "INCONCLUSIVE", "no-proof"),
    "a fix on one rank of two": (on("find-unused", lambda seen: seen["ranks"].pop()), "FIX_UNMASKS", "other_error"),
}  # fmt: skip


def test_honest_failure_and_fix_hold() -> None:
    assert failure_and_fix(lambda arms: None)[0].name == "FIX_HOLDS"


@pytest.mark.parametrize("lie", FAILURE)
def test_lie_about_a_failure_or_a_fix_does_not_hold(lie: str) -> None:
    plant, name, expected = FAILURE[lie]
    verdict, outcomes = failure_and_fix(plant)
    changed = outcomes["find-unused" if outcomes["broken"].outcome == "fires" else "broken"]
    assert (verdict.name, changed.infra or changed.outcome) == (name, expected), verdict.reason
