"""Which expectation applies to a variant, and whether a verdict agrees with it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import case, document, observation, ok
from pydantic import ValidationError
from repro_matrix.config.expectations import Expectation
from repro_matrix.config.schema import Case
from repro_matrix.grading.expectations import compare, comparison, expected, failure_note, predicted
from repro_matrix.records.outcome import FailureId, Verdict
from repro_matrix.results.expectations import expectations, measured

NOW = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}
TORCH_213 = {"torch": ">=2.13,<2.14"}


def entry(verdict: str = "FIXED", variant: str = "fix", **changes: Any) -> dict[str, Any]:
    return {"verdicts": {variant: verdict}, "measured_at": [{}], "reason": "measured", **changes}


def expecting(verdict: str, *ids: str, variant: str = "fix") -> Expectation:
    return Expectation.model_validate(entry(verdict, variant) | ({"failure_ids": {variant: list(ids)}} if ids else {}))


def having(*entries: dict[str, Any]) -> Case:
    return case(expect=list(entries))


def applying(
    known: Case, where: str = "m/fsdp", variant: str = "fix", versions: Any = NOW, hardware: str = "cpu"
) -> Any:
    applies = expected(known, where, variant, versions, hardware)
    return next(iter(applies.verdicts.values())) if applies else None


@pytest.mark.parametrize(
    ("changes", "at", "applies"),
    [
        ({}, {}, True), ({}, {"variant": "other-fix"}, False), ({}, {"hardware": "gpu1"}, False),
        ({}, {"versions": {"torch": "2.12.1"}}, False), ({}, {"versions": {"transformers": "5.23.0"}}, False),
        ({}, {"versions": {"torch": "unknown"}}, False), ({"hardware": "a100x8"}, {"hardware": "a100x8"}, True),
        ({"versions": {"torch": ">=2.13"}}, {"versions": {"torch": "2.14.0.dev20260101+cu130"}}, True),
    ],
)  # fmt: skip
def test_expectation_applies_by_variant_hardware_and_versions(changes: Any, at: Any, applies: bool) -> None:
    assert (applying(having(entry(**{"versions": TORCH_213, **changes})), **at) is not None) is applies


@pytest.mark.parametrize(
    ("cells", "where", "applies"),
    [
        ([], 'm/fsdp/call="root"', True), (["m/fsdp"], "m/fsdp", True), ([], "m/fsdp/ranks=4", False),
        (["m/fsdp"], "m/fsdp/ranks=4", False), (["m/fsdp/ranks=4"], "m/fsdp/ranks=4", True),
        (["m/fsdp/ranks=4"], "m/fsdp/scale=full", False), (["m/fsdp/ranks=4"], 'm/fsdp/ranks=4/call="root"', False),
        (["x/ddp", "m/fsdp"], "m/fsdp", True), (["m/ddp"], "m/fsdp", False),
        (["m/fsdp"], 'm/fsdp/call="root"', False), (['m/fsdp/call="root"'], "m/fsdp", False),
        (['m/fsdp/call="root"'], 'm/fsdp/call="root"', True), 
        (['m/fsdp/call="root"'], 'm/fsdp/call="root"/cache=false', False),
        (['m/fsdp/cache=false/call="root"'], 'm/fsdp/call="root"/cache=false', True),
        (["m/fsdp"], 'm/fsdp/call="inner"/cache=true', True), (["m/fsdp/cache=true"], "m/fsdp", True),
        (['m/fsdp/call="a/b"'], 'm/fsdp/call="a/b"', True),
    ],
)  # fmt: skip
def test_cells_are_named_by_axes_and_changed_flags(cells: list[str], where: str, applies: bool) -> None:
    assert (applying(having(entry(cells=cells)), where) is not None) == applies


def test_most_specific_expectation_wins() -> None:
    anywhere, named, later = entry("FLAKY"), entry(cells=["m/fsdp"]), entry("SIGNATURE_MISMATCH")
    narrow = entry("NOT_REPRODUCED", versions=TORCH_213)
    assert applying(having(named, anywhere)) == "FIXED"
    assert applying(having(narrow, anywhere)) == "NOT_REPRODUCED" and applying(having(narrow, named)) == "FIXED"
    assert applying(having(anywhere, later)) == "SIGNATURE_MISMATCH"


def test_comparison_is_stored_beside_a_verdict() -> None:
    known = having(entry(capabilities={}), entry("NOT_FIXED", "other-fix", hardware="elsewhere"))

    def compared(name: Any, hardware: str, variant: str = "fix") -> tuple[Any, ...]:
        return tuple(comparison(known, "m/fsdp", variant, Verdict(name, "x"), NOW, hardware).values())

    assert compared("FIXED", "cpu") == ("expected", "FIXED", "")
    assert compared("NOT_FIXED", "gpu1") == ("differs_from_cpu", "FIXED", "")
    assert compared("FIXED", "gpu1") == ("matches_cpu", "FIXED", "")
    assert compared("FIXED", "cpu", "other-fix") == ("no_expectation", None, "")


LOST = Verdict("INCONCLUSIVE", "skipped", measured=False)
HANGS = Verdict("INCONCLUSIVE", "it hangs")
HEALTHY, FAILING = (expecting(name, variant="control") for name in ("PASSED", "FAILED"))


def failing(*names: str) -> Verdict:
    return Verdict("DIFFERENT_FAILURE", "x", failure_ids=tuple(FailureId(check=name) for name in names))


@pytest.mark.parametrize(
    ("verdict", "expectation", "prediction", "control", "compared"),
    [
        ("FIXED", expecting("FIXED"), None, False, "expected"),
        ("NOT_FIXED", expecting("FIXED"), None, False, "unexpected"),
        (HANGS, expecting("FIXED"), None, False, "unexpected"), ("FIXED", None, None, False, "no_expectation"),
        (LOST, expecting("FIXED"), None, False, "no_expectation"),
        # whether it was fixed upstream depends on other stacks' stored measurements
        ("FIXED_UPSTREAM", expecting("NOT_REPRODUCED"), None, False, "expected"),
        ("NOT_REPRODUCED", expecting("FIXED_UPSTREAM"), None, False, "expected"),
        ("FIX_BREAKS", expecting("NOT_REPRODUCED"), None, False, "unexpected"),
        ("FIXED", None, expecting("FIXED"), False, "matches_cpu"),
        ("NOT_FIXED", None, expecting("FIXED"), False, "differs_from_cpu"),
        (LOST, None, expecting("FIXED"), False, "no_expectation"),
        # a control needs no expectation: it must train
        ("FAILED", None, None, True, "unexpected"), ("FLAKY", None, None, True, "unexpected"),
        (HANGS, None, None, True, "unexpected"), ("PASSED", None, None, True, "no_expectation"),
        (LOST, None, None, True, "no_expectation"), ("FAILED", FAILING, None, True, "expected"),
        ("FAILED", None, FAILING, True, "matches_cpu"), ("FAILED", None, HEALTHY, True, "unexpected"),
    ],
)  # fmt: skip
def test_compare(verdict: Any, expectation: Any, prediction: Any, control: bool, compared: str) -> None:
    verdict = Verdict(verdict, "x") if isinstance(verdict, str) else verdict
    assert compare(verdict, expectation, prediction, control) == compared


def test_cpu_measurement_predicts_other_hardware_only() -> None:
    known, own = having(entry()), having(entry(), entry("NOT_FIXED", hardware="a100x8"))
    prediction = predicted(known, "m/fsdp", "fix", NOW, "a100x8")
    assert prediction is not None and prediction.verdicts == {"fix": "FIXED"}
    assert predicted(known, "m/fsdp", "fix", NOW, "cpu") is None
    assert predicted(own, "m/fsdp", "fix", NOW, "a100x8") is None, "it has an expectation of its own"
    assert predicted(having(entry(versions={"torch": "<2.3"})), "m/fsdp", "fix", NOW, "gpu1") is None


# -- failure ids


@pytest.mark.parametrize(
    ("verdict", "expectation", "compared", "note"),
    [
        (failing("updates"), expecting("DIFFERENT_FAILURE", "ValueError in x.f"), "unexpected", True),
        (failing("updates"), expecting("DIFFERENT_FAILURE", "check updates"), "expected", False),
        (failing("a", "b"), expecting("DIFFERENT_FAILURE", "check b", "check a"), "expected", False),
        (failing("a", "c"), expecting("DIFFERENT_FAILURE", "check b", "check a"), "unexpected", True),
        (failing("updates"), expecting("DIFFERENT_FAILURE"), "expected", True),  # none is listed, and that is noted
        (failing("updates"), expecting("FIXED"), "unexpected", False),  # the verdict differs already
        (Verdict("FIXED", "x"), expecting("FIXED"), "expected", False),
    ],
)
def test_verdict_of_a_failure_needs_an_expected_failure_id(
    verdict: Verdict, expectation: Expectation, compared: str, note: bool
) -> None:
    assert compare(verdict, expectation) == compared
    assert bool(failure_note(verdict, expectation)) is note and failure_note(verdict, None) == ""


def test_expectation_is_narrowed_to_its_variant() -> None:
    verdicts = {"fix": "DIFFERENT_FAILURE", "other-fix": "NOT_FIXED"}
    ids = {"fix": "check updates", "other-fix": "some-case/norm"}
    narrowed = expected(having({**entry(), "verdicts": verdicts, "failure_ids": ids}), "m/fsdp", "fix", {}, "cpu")
    assert narrowed and (narrowed.verdicts, narrowed.failure_ids) == (
        {"fix": "DIFFERENT_FAILURE"}, {"fix": "check updates"},
    )  # fmt: skip
    with pytest.raises(ValidationError, match="typo"):
        Expectation.model_validate({**entry(), "failure_ids": {"typo": "check updates"}})


def test_release_with_another_failure_id_begins_another_range() -> None:
    def stored(release: str, verdict: Verdict) -> Any:
        return {"params": "m/fsdp", "verdicts": {"fix": verdict.to_json()}, "variants": {"unfixed": {}, "fix": {}},
                "stack": {"versions": {"transformers": release}}, "hardware": {"profile": "cpu"}}  # fmt: skip

    shown = {
        "4.38.0": failing("a"),
        "4.39.0": failing("a"),
        "4.40.0": failing("b", "a"),
        "4.41.0": Verdict("FIXED", "x"),
    }
    ranges = expectations([item for at, v in shown.items() for item in measured(case(), stored(at, v), at)], "r")
    assert [(each.versions["transformers"], each.failure_ids) for each in ranges] == [
        (">=4.38,<4.40", {"fix": "check a"}), (">=4.40,<4.41", {"fix": ["check b", "check a"]}), (">=4.41,<4.42", {}),
    ]  # fmt: skip


@given(st.lists(st.sampled_from("abc"), max_size=3), st.lists(st.sampled_from("abc"), min_size=1, unique=True))
def test_verdict_agrees_when_no_other_id_occurred(occurred: list[str], listed: list[str]) -> None:
    wanted = expecting("DIFFERENT_FAILURE", *(f"check {name}" for name in listed))
    assert (compare(failing(*occurred), wanted) == "expected") == (set(occurred) <= set(listed))


# -- capabilities

FIX = {"flags": {"call": "root"}, "depends_on_capabilities": ["cpu_fp16"]}
FP16 = {"variants": {"unfixed": {}, "fix": FIX, "other-fix": {}}}


@pytest.mark.parametrize("here", [{"cpu_fp16": True}, {}, {"cpu_bf16": False}])
def test_nothing_is_expected_where_a_capability_differs(here: dict[str, bool]) -> None:
    both = {**entry(), "verdicts": {"fix": "DIFFERENT_FAILURE", "other-fix": "FIXED"}}
    known = case(expect=[{**both, "capabilities": {"cpu_fp16": False}}], **FP16)
    assert expected(known, "m/fsdp", "fix", NOW, "cpu", {"cpu_fp16": False}) is not None
    assert expected(known, "m/fsdp", "fix", NOW, "cpu", here) is None
    assert predicted(known, "m/fsdp", "fix", NOW, "gpu1", here) is None
    assert expected(known, "m/fsdp", "other-fix", NOW, "cpu", here) is not None, "it does not depend on it"
    unknown = case(expect=[both], **FP16)
    assert expected(unknown, "m/fsdp", "fix", NOW, "cpu", {"cpu_fp16": False}) is None


def test_expectation_carries_the_capabilities_that_its_variants_depend_on() -> None:
    reproduced = [("reproduced", observation(ok(0)))]
    made: Any = document({"unfixed": reproduced, "fix": reproduced}, {"fix": "NOT_FIXED"}, params="m/fsdp")
    made["hardware"]["capabilities"] = {"cpu_fp16": False, "cpu_capability": "AVX2"}
    for known, facts in ((case(**FP16), {"cpu_fp16": False}), (case(), {})):
        (one,) = expectations(measured(known, made, "baseline/x.json"), "why")
        assert one.capabilities == facts
