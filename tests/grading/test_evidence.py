"""What counts as evidence: checks, evaluated by their numbers, and that what a variant names took
effect."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import as_promised, case, check, exception, failed, made, observation, ok, record
from repro_matrix.config.schema import Case
from repro_matrix.grading.checks import evaluate
from repro_matrix.grading.effect import missing_effect, never_on_gpu, unread_change
from repro_matrix.grading.grade import grade
from repro_matrix.grading.observation import Evidence
from repro_matrix.paths import REPROS

sys.path.insert(0, str(REPROS))
from repro_kit.record import holds, plain

BAD = {"passed": False}
TEXT: dict[str, Any] = {"tolerance": None, "actual": "a", "expected": "a"}
PASSED: list[dict[str, Any]] = [
    {},
    {"actual": 1.1 - 1e-12},
    {"tolerance": 0},
    {"actual": [1.0], "expected": [1.0]},
    {"actual": 3, "expected": 3, "tolerance": 0},
    {"tolerance": 0.999},
    {"expected": 0.0, "actual": 0.4, "tolerance": 0.49},
    {"at": 2.0},
    TEXT,
    {"tolerance": None, "actual": True, "expected": True},
    {"tolerance": None, "actual": [[1, 2]], "expected": [[1, 2]]},
    # empty, and the subject says of how many
    {"tolerance": None, "actual": {}, "expected": {}, "subject": "21 tensors, of 1023 rows"},
]
FAILED: list[dict[str, Any]] = [
    {"actual": 1.2},
    {"tolerance": 0, "actual": 1.5},
    {"actual": [1.0, 3.0], "expected": [1.0, 1.0]},
    {**TEXT, "expected": "b"},
    {**TEXT, "expected": {}, "actual": {"a": 2}},
    {**TEXT, "expected": None},
    {**TEXT, "expected": [["a"]], "actual": [["a"], ["a"]]},
    {**TEXT, "expected": {"a": "b"}, "actual": {"c": "b"}},
    {**TEXT, "expected": {"a": 1}, "actual": {"a": True}},
    {**TEXT, "expected": {"a": 1}, "actual": {"a": 1.0}},
    {**TEXT, "expected": {"a": math.nan}, "actual": {"a": math.nan}},
    # not finite
    {"actual": "nan"},
    {"actual": "-inf"},
    {"actual": math.nan},
    {"actual": [1.0, "nan"], "expected": [1.0, 1.0]},
    {"actual": 10**400},
    {"actual": "inf", "expected": "inf"},
    {"actual": 1e308, "expected": -1e308, "tolerance": 1e307},  # the difference overflows
]
VOID: list[dict[str, Any]] = [
    # contradictory: the rank states something else than its numbers
    {"actual": 1.2},
    {"actual": "nan"},
    BAD,
    {"passed": 1},
    {"passed": None},
    {**TEXT, "expected": "b"},
    # not numbers, or not as many
    {"actual": "one"},
    {"actual": "fine", "expected": "fine"},
    {"actual": True, "expected": True},
    {"actual": [], "expected": []},
    {"actual": [1.0, True], "expected": [1.0, 1.0]},
    {"actual": [1.0, 1.0], "expected": [1.0]},
    {"actual": [1.0], "expected": 1.0},
    # a tolerance that proves nothing: a zero would pass, half of a share is not rounding, not a
    # number
    {"tolerance": 1.0},
    {"expected": 0.0, "actual": 0.4, "tolerance": 0.5},
    {"tolerance": -0.1},
    {"tolerance": math.nan},
    {"tolerance": math.inf},
    {"tolerance": "inf"},
    {"tolerance": True},
    {"tolerance": "wide"},
    {"tolerance": None},
    {"tolerance": None, "actual": 1.0, "expected": "a"},
    {"tolerance": None, "actual": "a", "expected": 1.0, **BAD},
    {"tolerance": -0.1, "actual": 2.0, **BAD},
    # after the script was done (2.0), or at no known time
    {"at": 2.5},
    {"at": None},
    {"at": "nan"},
    {"at": True},
    # without a subject
    {**TEXT, "subject": " "},
    {**TEXT, "subject": None},
    # nothing was compared
    {**TEXT, "actual": [], "expected": []},
    {**TEXT, "actual": {"a": [[]]}, "expected": {"a": [[]]}},
    {**TEXT, "actual": [], "expected": [], "subject": "0 files"},
    {"actual": 0, "expected": 0, "tolerance": 0, "subject": "0 tensors"},
]


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        *((each, "passed") for each in PASSED),
        *(({**each, **BAD}, "failed") for each in FAILED),
        *((each, "void") for each in VOID),
    ],
)
def test_evaluate(changes: dict[str, Any], state: str) -> None:
    result = evaluate(made(**changes), done_at=2.0)
    assert result.state == state, result.details
    assert result.failed is (state == "failed") is (result.severity > 0)
    assert evaluate(made(**changes), done_at=None).state == "void", (
        "it is unknown when the script was done"
    )


def test_severity_is_the_worst_difference_in_tolerances() -> None:
    for changes, severity in (
        ({"actual": [1.4, 1.2], "expected": [1.0, 1.0]}, 4.0),
        ({"actual": "nan"}, math.inf),
    ):
        assert evaluate(made(**changes, **BAD), done_at=2.0).severity == pytest.approx(severity)


def test_checks_of_one_name_are_void_unless_one_failed() -> None:
    checks = [made(), made(actual=1.4, passed=False), made(name="y")]
    (rank,) = Evidence(observation(ok(0, record=record(0, done_at=2.0, checks=checks)))).ranks
    assert [one.state for one in rank.checks] == ["void", "failed", "passed"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(JSON, JSON, st.none() | st.floats() | st.integers())
def test_kit_and_grader_agree_on_what_passes(actual: Any, expected: Any, tolerance: Any) -> None:
    """A check that the kit records never contradicts itself; what the grader passes, the kit
    passed."""
    actual, expected, tolerance = plain(actual), plain(expected), plain(tolerance)
    check = made(
        actual=actual,
        expected=expected,
        tolerance=tolerance,
        passed=holds(actual, expected, tolerance),
    )
    result = evaluate(check, done_at=2.0)
    assert "contradictory" not in result.details, result
    assert result.state != "passed" or check["passed"]


@given(
    st.dictionaries(
        st.sampled_from(["actual", "expected", "tolerance", "passed", "at", "subject"]), JSON
    )
)
def test_evaluate_accepts_any_values(check: dict[str, Any]) -> None:
    assert evaluate({**check, "name": "x"}, done_at=9.0).state in ("passed", "failed", "void")


# -- effects

SHARDED = {
    "parameters": "shard",
    "gradients": "shard",
    "updates": "shard",
    "collectives": ["gather"],
}
WHOLE = {"parameters": "whole", "gradients": "whole", "updates": "whole", "collectives": ["gather"]}
PART = {"parameters": "part", "gradients": "part", "updates": "part", "collectives": ["gather"]}
TRAINING: dict[str, Any] = {"kind": "training", "checks": ["logits"]}
Items = dict[str, dict[str, Any] | None]


def training(**changes: Any) -> Case:
    return case(pass_criteria={**TRAINING, **changes})


def attempt(
    changes: Items | None = None,
    invariants: dict[str, Any] | None = None,
    ranks: int = 2,
    every: bool = False,
    settings: dict[str, Any] | None = None,
    records: dict[str, Any] | None = None,
    **strategy: Any,
) -> dict[str, Any]:
    """An observation in which all took effect, but for ``changes`` of the last rank's (or of every
    rank's) evidence.

    ``changes``: what -> its item; None: it was not measured.
    """
    named = {
        "slug": "fsdp",
        "invariants": SHARDED if invariants is None else invariants,
        "options": {},
        **strategy,
    }
    settings = {"flags": {"call": "inner", "cache": True}, **(settings or {}), "strategy": named}
    wrote = []
    for rank in range(ranks):
        evidence = as_promised(settings, ranks)
        if every or rank == ranks - 1:
            items = {item["what"]: item for item in evidence["effects"]}
            items |= {
                what: {"what": what, **item}
                for what, item in (changes or {}).items()
                if item is not None
            }
            missing = {what for what, item in (changes or {}).items() if item is None}
            evidence["effects"] = [item for what, item in items.items() if what not in missing]
        elif "extra" in (changes or {}):
            evidence["effects"].append({"what": "extra", "actual": 1})
        wrote.append(ok(rank, record=record(rank, **evidence, **(records or {}))))
    return observation(*wrote, settings=settings)


def missing(known: Case | None = None, variant: str = "unfixed", **more: Any) -> str | None:
    return missing_effect(known or training(), variant, Evidence(attempt(**more)))


def held(actual: Any, whole: Any = 1000) -> dict[str, Any]:
    return {"actual": actual, "whole": whole}


EVERY: dict[str, dict[str, Any]] = {
    what: held(1000) for what in ("parameters", "gradients", "updates")
}


@pytest.mark.parametrize(
    (
        "changes",
        "part",
    ),  # what the last rank measured instead, and what the reason names; None: no reason
    [
        ({}, None),
        ({"group": None}, "no evidence of a process group on rank 1"),
        ({"group": {"actual": 1, "backend": "gloo"}}, "has 1 of 2 ranks"),
        ({"group": {"actual": 2, "backend": "mpi"}}, "rank 1 used mpi"),
        ({"group": {"actual": 2}}, "rank 1 used none"),
        *(({what: None}, f"{what} were not measured on rank 1") for what in EVERY),
        *(
            ({"parameters": wrong}, "left no evidence: parameters on rank 1")
            for wrong in (held("x"), held(float("nan")), held(5, 0), held(-1))
        ),
        ({"parameters": held(560)}, None),
        ({"parameters": held(0)}, "together hold 50% of the parameters"),
        ({"parameters": held(570)}, "rank 1 holds 57% of the parameters"),
        ({"parameters": held(410)}, None),
        ({"parameters": held(390)}, "together hold 89% of the parameters"),
        ({"gradients": held(610)}, None),
        ({"gradients": held(640)}, "together hold 114% of the gradients"),
        ({"collectives": None}, "collectives were not counted on rank 1"),
        *(
            ({"collectives": {"actual": calls}}, "no gather between ranks in a step of rank 1")
            for calls in ({"gather": 0}, {"gather": "many"}, "x")
        ),
        ({"extra": {"actual": 1, "least": 1, "most": 1}}, None),
        ({"extra": {"actual": 3}}, None),
        ({"extra": None}, "extra left no evidence on rank 1"),  # another rank measured it
        ({"extra": {"actual": 0, "least": 1}}, "got 0, promised at least 1"),
        (
            {"extra": {"actual": 3, "least": 1, "most": 2, "subject": "y"}},
            "at least 1 and at most 2 (y)",
        ),
        *(
            ({"extra": wrong}, "extra was not in effect on rank 1")
            for wrong in (
                {"actual": 3, "least": None},
                {"actual": "x", "most": 2},
                {"actual": True, "least": 0},
            )
        ),
    ],
)
def test_every_promise_is_measured_on_every_rank(changes: Items, part: str | None) -> None:
    reason = missing(changes=changes)
    assert reason is None if part is None else part in str(reason)


HYBRID: dict[str, Any] = {
    "options": {"sharding": "HYBRID"},
    "replicas": {"sharding": {"HYBRID": 2}},
}


@pytest.mark.parametrize(
    ("invariants", "changes", "more", "part"),
    [
        (SHARDED, EVERY, {}, "every rank holds all parameters"),
        (
            {**SHARDED, "parameters": "part"},
            {"parameters": held(600), "gradients": held(1000)},
            {},
            "all gradients",
        ),
        ({"updates": "shard"}, {"updates": held(1000)}, {}, "every rank updates all"),
        (WHOLE, {**EVERY, "parameters": held(900)}, {}, None),
        (WHOLE, {"parameters": held(890)}, {}, "holds 89% of the parameters"),
        (PART, {"parameters": held(310)}, {"every": False}, None),
        (PART, {"parameters": held(290)}, {"every": False}, "together hold 89%"),
        (PART, EVERY, {}, "every rank holds all parameters"),
        (PART, EVERY, {"ranks": 1}, None),
        (SHARDED, EVERY, {"ranks": 1}, None),
        (
            SHARDED,
            {"parameters": held(500)},
            {"ranks": 4, **HYBRID},
            "gradients",
        ),  # a quarter, half was promised
        (SHARDED, {what: held(500) for what in EVERY}, {"ranks": 4, **HYBRID}, None),
        (SHARDED, {what: held(500) for what in EVERY}, {"ranks": 4}, "1/4 was promised"),
        (SHARDED, EVERY, HYBRID, None),
        (PART, EVERY, HYBRID, "every rank holds all parameters"),  # a replica each
        (
            WHOLE,
            {"collectives": {"actual": {}}},
            {"ranks": 1},
            None,
        ),  # one rank calls no collectives
    ],
)
def test_whole_part_shard_and_replicas(
    invariants: Any, changes: Any, more: Any, part: str | None
) -> None:
    reason = missing(changes=changes, invariants=invariants, **{"every": True, **more})
    assert reason is None if part is None else part in str(reason)


def test_inference_needs_its_parameters_only() -> None:
    inference = training(kind="inference")
    assert (
        missing(
            inference, changes={"gradients": None, "updates": None, "collectives": None}, every=True
        )
        is None
    )
    assert "parameters were not measured" in str(missing(inference, changes={"parameters": None}))


def test_any_backend_is_accepted_where_none_was_requested() -> None:
    for backend in ("", "auto"):
        seen = attempt({"group": {"actual": 2, "backend": "mpi"}})
        seen["attempt"]["backend"] = backend
        assert missing_effect(training(), "unfixed", Evidence(seen)) is None
    assert "no promises" in str(missing(invariants={}))


@pytest.mark.parametrize(
    ("kind", "devices", "checks", "peaks", "part"),
    [
        *(("training", 2, ["x"], (512.0, peak), "rank 1") for peak in (0, None, float("nan"))),
        ("inference", 2, ["x"], (0, 512.0), "rank 0"),
        ("training", 2, ["x"], (512.0, 1.0), None),
        ("loading", 2, ["x"], (None, None), None),  # what is loaded may stay on the host
        ("training", 4, ["x"], (512.0, 512.0), "split over 4"),
        ("training", 4, ["x", "split"], (512.0, 512.0), None),
    ],
)
def test_every_rank_must_use_its_gpus(
    kind: str, devices: int, checks: Any, peaks: Any, part: str | None
) -> None:
    made = {"checks": [check(name) for name in checks]}
    seen = Evidence(attempt(settings={"device": "cuda", "devices": devices}, records=made))
    for rank, peak in zip(seen.ranks, peaks):
        rank.record["peak_gpu_bytes"] = peak
    reason = missing_effect(training(kind=kind), "unfixed", seen)
    assert reason is None if part is None else part in str(reason)
    for rank, peak in zip(seen.ranks, peaks):  # of an older record
        del rank.record["peak_gpu_bytes"]
        rank.record["peak_gpu_mb"] = peak
    assert missing_effect(training(kind=kind), "unfixed", seen) == reason
    simulated = training(kind=kind).model_copy(update={"simulated": "devices"})
    assert missing_effect(simulated, "unfixed", seen) is None


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("ended", [112.0, None], ids=["ended", "hung or killed"])
def test_failure_of_ranks_that_began_without_their_gpus_is_no_evidence(
    backend: str, ended: float | None
) -> None:
    stored = observation(failed(0), failed(1), settings={"device": "cuda"})
    stored["attempt"]["backend"] = backend
    stored["ranks"][0]["record"]["device"] = "cuda:0"
    away = stored["ranks"][1]["record"]
    away["ended"] = ended
    away.pop("device", None)
    assert "rank 1" in str(never_on_gpu(training(), Evidence(stored)))
    for phase in ("start", "init_process_group"):  # it could not start: that is another failure
        away["phase"] = phase
        assert never_on_gpu(training(), Evidence(stored)) is None
    away.update(phase="body", device="cuda:1")
    assert never_on_gpu(training(), Evidence(stored)) is None
    stored["attempt"]["gpus"] = ["GPU-a", "GPU-b"]
    for uuid, right in (
        ("GPU-b", True),
        (None, True),
        ("GPU-a", False),
    ):  # None: no release of torch before 2.5 tells
        away["gpu_uuid"] = uuid
        assert (never_on_gpu(training(), Evidence(stored)) is None) == right
    away.update(device="cuda:0", gpu_uuid="GPU-b")
    assert "leased to it: GPU-b, not GPU-a" in str(never_on_gpu(training(), Evidence(stored)))
    stored["ranks"][1]["record"] = None  # killed before its first record
    assert never_on_gpu(training(), Evidence(stored)) is None


@pytest.mark.parametrize("kind", ["training", "saving", "loading", "inference"])
@pytest.mark.parametrize("how", ["passes", "another error", "hangs"])
def test_whatever_a_rank_without_its_gpu_shows_is_no_evidence(kind: str, how: str) -> None:
    ranks = (
        [failed(0, exception("ValueError", "x")), failed(1)]
        if how == "another error"
        else [ok(0), ok(1)]
    )
    stored = observation(*ranks, settings={"device": "cuda"})
    stored["attempt"]["timed_out"] = how == "hangs"
    for rank in stored["ranks"]:
        rank["record"]["device"] = "cuda:0"
    known = training(kind=kind)
    assert grade(known, "unfixed", stored, [known]).infra_error != "no_effect" or how == "passes"
    del stored["ranks"][1]["record"]["device"]
    assert grade(known, "unfixed", stored, [known]).infra_error == "no_effect"


def test_promises_of_a_variant_replace_those_of_the_strategy() -> None:
    variants = {"unfixed": {}, "fix": {"flags": {"call": "root"}, "invariants": WHOLE}}
    known = case(pass_criteria=TRAINING, variants=variants)
    assert missing(known, "fix", changes=EVERY, every=True) is None
    assert missing(known, "unfixed", changes=EVERY, every=True) is not None


def test_effect_that_the_case_lists_must_be_measured() -> None:
    assert "lora left no evidence" in str(missing(training(effects=["lora"])))


FIX, CHANGED = {"flags": {"call": "root"}}, {"call": "root", "cache": True}
STAGED, OTHER = {"options": {"stage": 2}}, {"strategy": "ddp", "options": {"x": 1}}


@pytest.mark.parametrize(
    ("fix", "flags", "read", "unread"),
    [
        (FIX, CHANGED, {"flags": ["call"]}, None),
        (FIX, CHANGED, {"flags": ["cache"]}, "call"),
        (FIX, {"call": "inner", "cache": True}, {}, None),  # as it is by default
        (FIX, {"call": "inner", "cache": 1}, {}, "cache"),  # 1 is not True
        (STAGED, {}, {}, "stage"),
        (STAGED, {}, {"options": ["stage"]}, None),
        (OTHER, {}, {}, None),  # another strategy reads its own options
    ],
)
def test_changed_settings_must_have_been_read(
    fix: Any, flags: Any, read: Any, unread: str | None
) -> None:
    known = case(variants={"unfixed": {}, "fix": fix})
    reads = ({name: [] for name in read}, read)  # one rank is enough
    ranks = [ok(rank, record=record(rank, read=each)) for rank, each in enumerate(reads)]
    seen = Evidence(observation(*ranks, settings={"flags": flags}))
    for reason in (unread_change(known, "fix", seen), missing_effect(known, "fix", seen)):
        assert reason is None if unread is None else f" {unread} was never read" in str(reason)
    assert unread_change(known, "gone", seen) is None


numbers = st.one_of(
    st.floats(), st.integers(-(10**6), 10**6), st.none(), st.text(max_size=3), st.booleans()
)


@given(actual=numbers, whole=numbers)
def test_only_a_share_near_the_promised_one_passes(actual: Any, whole: Any) -> None:
    changes: Items = {what: held(actual, whole) for what in EVERY}
    right = (
        not isinstance(actual, (bool, str, type(None)))
        and not isinstance(whole, (bool, str, type(None)))
        and whole > 0
        and abs(actual) != float("inf")
        and abs(whole) != float("inf")
        and 0.45 <= actual / whole <= 0.56
    )
    assert (missing(changes=changes, every=True) is None) is right
