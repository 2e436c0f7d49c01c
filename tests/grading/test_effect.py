"""What a variant names took effect, or its attempt is no evidence: decided from what the ranks measured."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import as_promised, case, check, observation, ok, record
from repro_matrix.config.schema import Case
from repro_matrix.grading.effect import missing_effect, unread_change
from repro_matrix.grading.grade import grade
from repro_matrix.grading.observation import Attempt
from repro_matrix.grading.verdict import judge
from repro_matrix.records.outcome import Outcome

SHARDED = {"parameters": "shard", "gradients": "shard", "updates": "shard", "collectives": ["gather"]}
WHOLE = {"parameters": "whole", "gradients": "whole", "updates": "whole", "collectives": ["gather"]}
PART = {"parameters": "part", "gradients": "part", "updates": "part", "collectives": ["gather"]}
TRAINING: dict[str, Any] = {"kind": "training", "checks": ["logits"]}
Items = dict[str, dict[str, Any] | None]


def training(**changes: Any) -> Case:
    return case(pass_criteria={**TRAINING, **changes})


def attempt(
    changes: Items | None = None, invariants: dict[str, Any] | None = None, ranks: int = 2, every: bool = False,
    settings: dict[str, Any] | None = None, records: dict[str, Any] | None = None, **strategy: Any,
) -> dict[str, Any]:  # fmt: skip
    """An observation in which all took effect, but for ``changes`` of the last rank's (or of every rank's) evidence.

    ``changes``: what -> its item; None: it was not measured.
    """
    named = {"slug": "fsdp", "invariants": SHARDED if invariants is None else invariants, "options": {}, **strategy}
    settings = {"flags": {"call": "inner", "cache": True}, **(settings or {}), "strategy": named}
    made = []
    for rank in range(ranks):
        evidence = as_promised(settings, ranks)
        if every or rank == ranks - 1:
            items = {item["what"]: item for item in evidence["effects"]}
            items |= {what: {"what": what, **item} for what, item in (changes or {}).items() if item is not None}
            missing = {what for what, item in (changes or {}).items() if item is None}
            evidence["effects"] = [item for what, item in items.items() if what not in missing]
        elif "extra" in (changes or {}):
            evidence["effects"].append({"what": "extra", "actual": 1})
        made.append(ok(rank, record=record(rank, **evidence, **(records or {}))))
    return observation(*made, settings=settings)


def missing(known: Case | None = None, variant: str = "unfixed", **more: Any) -> str | None:
    return missing_effect(known or training(), variant, Attempt(attempt(**more)))


def held(actual: Any, whole: Any = 1000) -> dict[str, Any]:
    return {"actual": actual, "whole": whole}


def test_last_measurement_of_a_rank_counts() -> None:
    known, seen = training(), attempt()
    assert grade(known, "unfixed", seen, [known]).outcome == "passed"
    seen["ranks"][1]["record"]["effects"].insert(0, {"what": "parameters", **held(1000)})
    assert grade(known, "unfixed", seen, [known]).outcome == "passed"


def test_attempt_without_effect_is_no_evidence() -> None:
    known = training()
    outcome = grade(known, "unfixed", attempt({"parameters": held(1000)}, every=True), [known])
    assert (outcome.outcome, outcome.infra_error) == ("infra_error", "no_effect")
    verdict = judge(known, {"unfixed": [outcome], "fix": [Outcome("passed", "")]})["fix"]
    assert verdict.name == "INCONCLUSIVE" and not verdict.measured


@pytest.mark.parametrize(
    ("changes", "part"),  # what the last rank measured instead, and what the reason names; None: no reason
    [
        ({}, None), ({"group": None}, "no evidence of a process group on rank 1"),
        ({"group": {"actual": 1, "backend": "gloo"}}, "has 1 of 2 ranks"),
        ({"group": {"actual": 2, "backend": "mpi"}}, "rank 1 used mpi"), ({"group": {"actual": 2}}, "rank 1 used none"),
        ({"parameters": None}, "parameters were not measured on rank 1"),
        ({"gradients": None}, "gradients were not measured on rank 1"),
        ({"updates": None}, "updates were not measured on rank 1"),
        ({"parameters": held("x")}, "left no evidence: parameters on rank 1"),
        ({"parameters": held(float("nan"))}, "left no evidence: parameters on rank 1"),
        ({"parameters": held(5, 0)}, "left no evidence: parameters on rank 1"),
        ({"parameters": held(-1)}, "left no evidence: parameters on rank 1"), ({"parameters": held(560)}, None),
        ({"parameters": held(570)}, "rank 1 holds 57% of the parameters"), ({"parameters": held(410)}, None),
        ({"parameters": held(390)}, "together hold 89% of the parameters"), ({"gradients": held(610)}, None),
        ({"gradients": held(640)}, "together hold 114% of the gradients"),
        ({"collectives": None}, "collectives were not counted on rank 1"),
        ({"collectives": {"actual": {"gather": 0}}}, "no gather between ranks in a step of rank 1"),
        ({"collectives": {"actual": {"gather": "many"}}}, "no gather between ranks in a step of rank 1"),
        ({"collectives": {"actual": "x"}}, "no gather between ranks in a step of rank 1"),
        ({"extra": {"actual": 1, "least": 1, "most": 1}}, None), ({"extra": {"actual": 3}}, None),
        ({"extra": None}, "extra left no evidence on rank 1"),  # another rank measured it
        ({"extra": {"actual": 0, "least": 1}}, "got 0, promised at least 1"),
        ({"extra": {"actual": 3, "least": 1, "most": 2, "subject": "y"}}, "at least 1 and at most 2 (y)"),
        ({"extra": {"actual": 3, "least": None}}, "extra was not in effect on rank 1"),
        ({"extra": {"actual": "x", "most": 2}}, "extra was not in effect on rank 1"),
        ({"extra": {"actual": True, "least": 0}}, "extra was not in effect on rank 1"),
    ],
)  # fmt: skip
def test_every_promise_is_measured_on_every_rank(changes: Items, part: str | None) -> None:
    reason = missing(changes=changes)
    assert reason is None if part is None else part in str(reason)


EVERY: dict[str, dict[str, Any]] = {what: held(1000) for what in ("parameters", "gradients", "updates")}
HYBRID: dict[str, Any] = {"options": {"sharding": "HYBRID"}, "replicas": {"sharding": {"HYBRID": 2}}}


@pytest.mark.parametrize(
    ("invariants", "changes", "more", "part"),
    [
        (SHARDED, EVERY, {}, "every rank holds all parameters"),
        ({**SHARDED, "parameters": "part"}, {"parameters": held(600), "gradients": held(1000)}, {}, "all gradients"),
        ({"updates": "shard"}, {"updates": held(1000)}, {}, "every rank updates all"),
        (WHOLE, EVERY, {}, None),
        (WHOLE, {"parameters": held(900)}, {}, None),
        (WHOLE, {"parameters": held(890)}, {}, "holds 89% of the parameters"),
        (PART, {}, {}, None),
        (PART, {"parameters": held(310)}, {"every": False}, None),
        (PART, {"parameters": held(290)}, {"every": False}, "together hold 89%"),
        (PART, EVERY, {}, "every rank holds all parameters"),
        (SHARDED, EVERY, {"ranks": 1}, None),
        (SHARDED, {"parameters": held(500)}, {"ranks": 4, **HYBRID}, "gradients"),  # a quarter, half was promised
        (SHARDED, {what: held(500) for what in EVERY}, {"ranks": 4, **HYBRID}, None),
        (SHARDED, {what: held(500) for what in EVERY}, {"ranks": 4}, "1/4 was promised"),
        (WHOLE, {"collectives": {"actual": {}}}, {"ranks": 1}, None),  # one rank calls no collectives
    ],
)  # fmt: skip
def test_whole_part_shard_and_replicas(invariants: Any, changes: Any, more: Any, part: str | None) -> None:
    reason = missing(changes=changes, invariants=invariants, **{"every": True, **more})
    assert reason is None if part is None else part in str(reason)


def test_inference_needs_its_parameters_only() -> None:
    inference = case(pass_criteria={**TRAINING, "kind": "inference"})
    assert missing(inference, changes={"gradients": None, "updates": None, "collectives": None}, every=True) is None
    assert "parameters were not measured" in str(missing(inference, changes={"parameters": None}))


@pytest.mark.parametrize("backend", ["", "auto"])
def test_any_backend_is_accepted_where_none_was_requested(backend: str) -> None:
    seen = attempt({"group": {"actual": 2, "backend": "mpi"}})
    seen["attempt"]["backend"] = backend
    assert missing_effect(training(), "unfixed", Attempt(seen)) is None


@pytest.mark.parametrize("invariants", [{}, None])
def test_settings_without_promises_are_no_evidence(invariants: Any) -> None:
    seen = attempt()
    seen["attempt"]["settings"]["strategy"]["invariants"] = invariants
    assert "no promises" in str(missing_effect(training(), "unfixed", Attempt(seen)))


@pytest.mark.parametrize(
    ("kind", "devices", "split", "peaks", "part"),
    [
        ("training", 2, False, (512.0, 1.0), None), ("training", 2, False, (512.0, 0), "rank 1"),
        ("training", 2, False, (512.0, None), "rank 1"), ("training", 2, False, (512.0, float("nan")), "rank 1"),
        ("inference", 2, False, (0, 512.0), "rank 0"),
        ("loading", 2, False, (None, None), None),  # what is loaded may stay on the host
        ("training", 4, False, (512.0, 512.0), "split over 4"), ("training", 4, True, (512.0, 512.0), None),
    ],
)  # fmt: skip
def test_every_rank_must_use_its_gpus(kind: str, devices: int, split: bool, peaks: Any, part: str | None) -> None:
    checks = [check(), *([check("split")] if split else [])]
    seen = attempt(settings={"device": "cuda", "devices": devices}, records={"checks": checks})
    for rank, peak in zip(seen["ranks"], peaks):
        rank["record"]["peak_gpu_mb"] = peak
    reason = missing_effect(case(pass_criteria={**TRAINING, "kind": kind}), "unfixed", Attempt(seen))
    assert reason is None if part is None else part in str(reason)
    how = {"simulated": "devices", "accelerator": "cpu", "launch": {"backend": "fake"}}
    simulated = case(**how, pass_criteria={**TRAINING, "kind": kind})
    assert missing_effect(simulated, "unfixed", Attempt(seen)) is None


def test_promises_of_a_variant_replace_those_of_the_strategy() -> None:
    known = training()
    variants = {**known.model_dump()["variants"], "fix": {"flags": {"call": "root"}, "invariants": WHOLE}}
    known = Case.model_validate({**known.model_dump(), "variants": variants})
    seen = attempt(EVERY, every=True)
    assert missing_effect(known, "fix", Attempt(seen)) is None
    assert missing_effect(known, "unfixed", Attempt(seen)) is not None


def test_effect_that_the_case_lists_must_be_measured() -> None:
    known = training(effects=["lora"])
    assert "lora left no evidence" in str(missing(known))
    assert missing(known, changes={"lora": {"actual": 4, "least": 4}}, every=True) is None
    assert "lora was not in effect" in str(missing(known, changes={"lora": {"actual": 0, "least": 1}}, every=True))


@pytest.mark.parametrize(
    ("variant", "flags", "read", "unread"),
    [
        ("fix", {"call": "root", "cache": True}, {"flags": ["call"]}, None),
        ("fix", {"call": "root", "cache": True}, {"flags": ["cache"]}, "call"),
        ("fix", {"call": "inner", "cache": True}, {}, None),  # as it is by default
        ("fix", {"call": "inner", "cache": 1}, {}, "cache"),  # 1 is not True
        ("no-such-variant", {"call": "root"}, {}, None), ("staged", {}, {}, "stage"),
        ("staged", {}, {"options": ["stage"]}, None),
        ("other", {}, {}, None),  # another strategy reads its own options
    ],
)  # fmt: skip
def test_changed_flags_and_options_must_have_been_read(variant: str, flags: Any, read: Any, unread: str | None) -> None:
    variants = {"unfixed": {}, "fix": {"flags": {"call": "root"}}, "staged": {"options": {"stage": 2}},
            "other": {"strategy": "ddp", "options": {"x": 1}}}  # fmt: skip
    known = case(variants=variants)
    ranks = [ok(rank, record=record(rank, read=read if rank else {})) for rank in (0, 1)]
    seen = Attempt(observation(*ranks, settings={"flags": flags}))
    reasons = (unread_change(known, variant, seen), missing_effect(known, variant, seen))
    for reason in reasons:
        assert reason is None if unread is None else f" {unread} was never read" in str(reason)


numbers = st.one_of(st.floats(), st.integers(-(10**6), 10**6), st.none(), st.text(max_size=3), st.booleans())


@given(actual=numbers, whole=numbers)
def test_only_a_share_near_the_promised_one_passes(actual: Any, whole: Any) -> None:
    changes: Items = {what: held(actual, whole) for what in EVERY}
    right = (
        not isinstance(actual, (bool, str, type(None))) and not isinstance(whole, (bool, str, type(None)))
        and whole > 0 and abs(actual) != float("inf") and abs(whole) != float("inf") and 0.45 <= actual / whole <= 0.56
    )  # fmt: skip
    assert (missing(changes=changes, every=True) is None) is right
