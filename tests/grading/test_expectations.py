"""Expectations: which one applies, and whether a verdict agrees with it."""

from __future__ import annotations

from dataclasses import asdict, replace
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
from repro_matrix.results.version_ranges import expectations, measured

NOW = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}


def entry(verdict: str = "FIXED", variant: str = "fix", **changes: Any) -> dict[str, Any]:
    return {"verdicts": {variant: verdict}, "measured_at": [{}], "reason": "measured", **changes}


def having(*entries: dict[str, Any]) -> Case:
    return case(expect=list(entries))


def found(
    known: Case, where: str = "m/fsdp", variant: str = "fix", versions: Any = NOW, hardware: str = "cpu"
) -> str | None:
    applies = expected(known, where, variant, versions, hardware)
    return next(iter(applies.verdicts.values())) if applies else None


def test_expectation_applies_by_variant_hardware_and_versions() -> None:
    known = having(entry(versions={"torch": ">=2.13,<2.14"}))
    assert found(known) == "FIXED"
    assert found(known, variant="other-fix") is None
    assert found(known, hardware="gpu1") is None
    assert found(known, versions={"torch": "2.12.1"}) is None
    assert found(known, versions={"transformers": "5.23.0"}) is None, "a package that is not there is in no range"
    assert found(known, versions={"torch": "unknown"}) is None
    assert found(having(entry(hardware="*")), hardware="a100x8") == "FIXED"
    nightly = having(entry(versions={"torch": ">=2.13"}))
    assert found(nightly, versions={"torch": "2.14.0.dev20260101+cu130"}) == "FIXED"


@pytest.mark.parametrize(
    ("cells", "where", "applies"),
    [
        ([], 'm/fsdp/call="root"', True),
        (["m/fsdp"], "m/fsdp", True),
        ([], "m/fsdp/ranks=4", False),
        (["m/fsdp"], "m/fsdp/ranks=4", False),
        (["m/fsdp/ranks=4"], "m/fsdp/ranks=4", True),
        (["m/fsdp/ranks=4"], "m/fsdp/scale=full", False),
        (["m/fsdp/ranks=4"], 'm/fsdp/ranks=4/call="root"', False),
        (["x/ddp", "m/fsdp"], "m/fsdp", True),
        (["m/ddp"], "m/fsdp", False),
        (["*/fsdp"], "m/fsdp", True),
        (["m/fsdp"], 'm/fsdp/call="root"', False),
        (['m/fsdp/call="root"'], "m/fsdp", False),
        (['m/fsdp/call="root"'], 'm/fsdp/call="root"', True),
        (["m/fsdp/call=root"], 'm/fsdp/call="root"', True),
        (["m/fsdp/call=root"], 'm/fsdp/call="root"/cache=false', False),
        (["m/fsdp/cache=false/call=root"], 'm/fsdp/call="root"/cache=false', True),
        (["m/fsdp"], 'm/fsdp/call="inner"/cache=true', True),
        (["m/fsdp/cache=True"], "m/fsdp", True),
        (['m/fsdp/call="a/b"'], 'm/fsdp/call="a/b"', True),
    ],
)
def test_cells_are_named_by_axes_and_changed_flags(cells: list[str], where: str, applies: bool) -> None:
    assert (found(having(entry(cells=cells)), where) is not None) == applies


def test_the_most_specific_wins() -> None:
    anywhere, pattern, named = entry("FLAKY"), entry("SIGNATURE_MISMATCH", cells=["*/fsdp"]), entry(cells=["m/fsdp"])
    assert found(having(named, pattern, anywhere)) == "FIXED"
    assert found(having(pattern, anywhere)) == "SIGNATURE_MISMATCH"
    narrow = entry("NOT_REPRODUCED", versions={"torch": ">=2.13,<2.14"})
    assert found(having(narrow, anywhere)) == "NOT_REPRODUCED"
    assert found(having(narrow, named)) == "FIXED"
    assert found(having(anywhere, entry("SIGNATURE_MISMATCH"))) == "SIGNATURE_MISMATCH", "of two alike the later"
    assert found(having(entry("SIGNATURE_MISMATCH"), entry("FLAKY", hardware="*"))) == "SIGNATURE_MISMATCH"


def test_comparison_stored_beside_a_verdict() -> None:
    known = having(entry(capabilities={}), entry("NOT_FIXED", "other-fix", hardware="elsewhere"))
    at = ("m/fsdp", "fix")
    assert comparison(known, *at, Verdict("FIXED", ""), NOW, "cpu") == {
        "expected": "expected", "expectation": "FIXED", "failure_note": "",
    }  # fmt: skip
    assert comparison(known, *at, Verdict("NOT_FIXED", ""), NOW, "gpu1")["expected"] == "differs_from_cpu"
    assert comparison(known, *at, Verdict("FIXED", ""), NOW, "gpu1")["expectation"] == "FIXED", "matches_cpu"
    no_expectation = {"expected": "no_expectation", "expectation": None, "failure_note": ""}
    assert comparison(known, "m/fsdp", "other-fix", Verdict("FIXED", ""), NOW, "cpu") == no_expectation


def test_compare() -> None:
    wanted = Expectation.model_validate(entry())
    assert compare(Verdict("FIXED", "x"), wanted) == "expected"
    assert compare(Verdict("NOT_FIXED", "x"), wanted) == "unexpected"
    assert compare(Verdict("INCONCLUSIVE", "the fix hangs"), wanted) == "unexpected"
    assert compare(Verdict("INCONCLUSIVE", "skipped: no GPU", measured=False), wanted) == "no_expectation"
    assert compare(Verdict("FIXED", "x"), None) == "no_expectation"


def test_failing_control_is_unexpected_without_any_expectation() -> None:
    for name in ("FAILED", "FLAKY", "INCONCLUSIVE"):  # the last: it hangs
        assert compare(Verdict(name, "x"), None, control=True) == "unexpected"
    assert compare(Verdict("PASSED", "x"), None, control=True) == "no_expectation"
    assert compare(Verdict("INCONCLUSIVE", "skipped", measured=False), None, control=True) == "no_expectation"
    known = Expectation.model_validate(entry() | {"verdicts": {"control": "FAILED"}})
    assert compare(Verdict("FAILED", "x"), known, control=True) == "expected"
    assert compare(Verdict("FAILED", "x"), None, known, control=True) == "matches_cpu"
    healthy = Expectation.model_validate(entry() | {"verdicts": {"control": "PASSED"}})
    assert compare(Verdict("FAILED", "x"), None, healthy, control=True) == "unexpected"


def test_compare_takes_what_expected_returns() -> None:
    known = having(entry() | {"verdicts": {"other-fix": "NOT_FIXED", "fix": "FIXED"}})
    applies = expected(known, "m/fsdp", "fix", NOW, "cpu")
    assert applies is not None and applies.verdicts == {"fix": "FIXED"}
    assert compare(Verdict("NOT_FIXED", "x"), applies) == "unexpected"


def test_fixed_upstream_agrees_with_not_firing() -> None:
    """Which of the two it is, other stacks' stored measurements decide: publishing one of those is no difference."""
    wanted = Expectation.model_validate(entry("NOT_REPRODUCED"))
    assert compare(Verdict("FIXED_UPSTREAM", ""), wanted) == "expected"
    assert compare(Verdict("NOT_REPRODUCED", ""), Expectation.model_validate(entry("FIXED_UPSTREAM"))) == "expected"
    assert compare(Verdict("FIX_BREAKS", ""), wanted) == "unexpected"


def test_cpu_measurement_predicts_other_hardware() -> None:
    known = having(entry("FIXED"))
    assert predicted(known, "m/fsdp", "fix", NOW, "cpu") is None, "there it is the expectation"
    guess = predicted(known, "m/fsdp", "fix", NOW, "a100x8")
    assert guess is not None and guess.verdicts == {"fix": "FIXED"}
    assert compare(Verdict("FIXED", ""), None, guess) == "matches_cpu"
    assert compare(Verdict("NOT_FIXED", ""), None, guess) == "differs_from_cpu"
    assert compare(Verdict("INCONCLUSIVE", "", measured=False), None, guess) == "no_expectation"
    own = having(entry("FIXED"), entry("NOT_FIXED", hardware="a100x8"))
    assert predicted(own, "m/fsdp", "fix", NOW, "a100x8") is None, "it has an expectation of its own"
    assert compare(Verdict("FIXED", ""), expected(own, "m/fsdp", "fix", NOW, "a100x8"), guess) == "unexpected"
    assert predicted(known, "m/fsdp", "fix", {"transformers": "5.23.0"}, "gpu1") is not None
    old = having(entry(versions={"torch": "<2.3"}))
    assert predicted(old, "m/fsdp", "fix", NOW, "gpu1") is None, "releases count there, too"


# -- failure ids


def unmasks(*names: str) -> Verdict:
    return Verdict("DIFFERENT_FAILURE", "", failure_ids=tuple(FailureId(check=name) for name in names))


def expecting(verdict: str = "DIFFERENT_FAILURE", *ids: str) -> Expectation:
    return Expectation.model_validate(entry(verdict) | ({"failure_ids": {"fix": list(ids)}} if ids else {}))


@pytest.mark.parametrize(
    ("verdict", "expectation", "compared", "note"),
    [
        (unmasks("updates"), expecting("DIFFERENT_FAILURE", "ValueError in x.f"), "unexpected", True),
        (unmasks("updates"), expecting("DIFFERENT_FAILURE", "check updates"), "expected", False),
        (
            unmasks("updates", "losses"),
            expecting("DIFFERENT_FAILURE", "check losses", "check updates"),
            "expected",
            False,
        ),
        (
            unmasks("updates", "steps"),
            expecting("DIFFERENT_FAILURE", "check losses", "check updates"),
            "unexpected",
            True,
        ),
        (
            unmasks("updates"),
            expecting("DIFFERENT_FAILURE"),
            "expected",
            True,
        ),  # none is written down, and that is noted
        (unmasks("updates"), expecting("FIXED"), "unexpected", False),  # another verdict says enough
        (Verdict("FIXED", ""), expecting("FIXED"), "expected", False),
    ],
)
def test_verdict_of_a_failure_needs_an_expected_failure_id(
    verdict: Verdict, expectation: Expectation, compared: str, note: bool
) -> None:
    assert compare(verdict, expectation) == compared
    assert bool(failure_note(verdict, expectation)) is note and failure_note(verdict, None) == ""


def test_expectation_is_narrowed_to_its_variants_failure_ids() -> None:
    listed = {**entry("DIFFERENT_FAILURE"), "verdicts": {"fix": "DIFFERENT_FAILURE", "other-fix": "NOT_FIXED"},
              "failure_ids": {"fix": "check updates", "other-fix": "some-case/norm"}}  # fmt: skip
    narrowed = expected(having(listed), "m/fsdp", "fix", {}, "cpu")
    assert narrowed and (narrowed.verdicts, narrowed.failure_ids) == (
        {"fix": "DIFFERENT_FAILURE"},
        {"fix": "check updates"},
    )
    with pytest.raises(ValidationError, match="typo"):
        Expectation.model_validate({**entry(), "failure_ids": {"typo": "check updates"}})


def stored(release: str, name: str, *checks: str) -> dict[str, Any]:
    verdict = asdict(replace(unmasks(*checks), name=name))  # type: ignore[arg-type]
    return {"params": "m/fsdp", "verdicts": {"fix": verdict}, "variants": {"unfixed": {}, "fix": {}},
            "stack": {"versions": {"transformers": release}}, "hardware": {"profile": "cpu"}}  # fmt: skip


def test_releases_with_another_failure_id_are_another_range() -> None:
    line = [stored("4.38.0", "DIFFERENT_FAILURE", "updates"), stored("4.39.0", "DIFFERENT_FAILURE", "updates"),
            stored("4.40.0", "DIFFERENT_FAILURE", "losses", "updates"), stored("4.41.0", "FIXED")]  # fmt: skip
    ranges = expectations(
        [item for d in line for item in measured(case(), d, d["stack"]["versions"]["transformers"])], "r"
    )
    assert [(each.versions["transformers"], each.failure_ids) for each in ranges] == [
        (">=4.38,<4.40", {"fix": "check updates"}),
        (">=4.40,<4.41", {"fix": ["check losses", "check updates"]}),
        (">=4.41,<4.42", {}),
    ]


@given(
    st.lists(st.sampled_from("abc"), max_size=3), st.lists(st.sampled_from("abc"), min_size=1, unique=True),
)  # fmt: skip
def test_verdict_agrees_when_no_other_id_occurred(occurred: list[str], listed: list[str]) -> None:
    wanted = expecting("DIFFERENT_FAILURE", *(f"check {name}" for name in listed))
    assert (compare(unmasks(*occurred), wanted) == "expected") == (set(occurred) <= set(listed))


# -- capabilities


FP16 = {
    "variants": {
        "unfixed": {},
        "fix": {"flags": {"call": "root"}, "depends_on_capabilities": ["cpu_fp16"]},
        "other-fix": {},
    }
}


def test_nothing_is_expected_where_a_capability_differs() -> None:
    both = {"verdicts": {"fix": "DIFFERENT_FAILURE", "other-fix": "FIXED"}, "measured_at": [{}], "reason": "measured"}
    known = case(expect=[{**both, "capabilities": {"cpu_fp16": False}}], **FP16)
    assert expected(known, "m/fsdp", "fix", NOW, "cpu", {"cpu_fp16": False}) is not None
    for here in ({"cpu_fp16": True}, {}, {"cpu_bf16": False}):
        assert expected(known, "m/fsdp", "fix", NOW, "cpu", here) is None
        assert predicted(known, "m/fsdp", "fix", NOW, "gpu1", here) is None
        assert expected(known, "m/fsdp", "other-fix", NOW, "cpu", here) is not None, "it does not depend on it"
    unknown = case(expect=[both], **FP16)
    assert expected(unknown, "m/fsdp", "fix", NOW, "cpu", {"cpu_fp16": False}) is None


def test_expectation_carries_the_capabilities_that_its_variants_depend_on() -> None:
    reproduced = [("reproduced", observation(ok(0)))]
    made = document({"unfixed": reproduced, "fix": reproduced}, {"fix": "NOT_FIXED"}, params="m/fsdp")
    made["hardware"]["capabilities"] = {"cpu_fp16": False, "cpu_capability": "AVX2"}
    for known, facts in ((case(**FP16), {"cpu_fp16": False}), (case(), {})):
        (one,) = expectations(measured(known, made, "baseline/x.json"), "why")
        assert one.capabilities == facts


def test_flag_values_are_the_same_in_any_order() -> None:
    nested = having(entry(cells=["m/fsdp/call={b: 1, a: 2}"]))
    assert found(nested, 'm/fsdp/call={"a": 2, "b": 1}') == "FIXED"
    assert found(nested, "m/fsdp/call={b: 2, a: 1}") is None
