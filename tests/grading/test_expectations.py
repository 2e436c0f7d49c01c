"""Expectations: which one applies, and whether a verdict agrees with it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import case, document, observation, ok
from pydantic import ValidationError
from repro_matrix.config.expectation import Expectation
from repro_matrix.config.schema import Case
from repro_matrix.grading.expectations import compare, comparison, expected, failure_note, predicted
from repro_matrix.grading.root_cause import Met
from repro_matrix.grading.verdict import Verdict
from repro_matrix.results.version_ranges import expectations, measured

NOW = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}


def entry(verdict: str = "FIX_HOLDS", arm: str = "fix", **changes: Any) -> dict[str, Any]:
    return {"verdicts": {arm: verdict}, "measured": [{}], "reason": "measured", **changes}


def having(*entries: dict[str, Any]) -> Case:
    return case(expect=list(entries))


def found(
    known: Case, where: str = "m/fsdp", arm: str = "fix", versions: Any = NOW, hardware: str = "cpu"
) -> str | None:
    applies = expected(known, where, arm, versions, hardware)
    return next(iter(applies.verdicts.values())) if applies else None


def test_expectation_applies_by_arm_hardware_and_versions() -> None:
    known = having(entry(versions={"torch": ">=2.13,<2.14"}))
    assert found(known) == "FIX_HOLDS"
    assert found(known, arm="other-fix") is None
    assert found(known, hardware="gpu1") is None
    assert found(known, versions={"torch": "2.12.1"}) is None
    assert found(known, versions={"transformers": "5.23.0"}) is None, "a package that is not there is in no range"
    assert found(known, versions={"torch": "unknown"}) is None
    assert found(having(entry(hardware="*")), hardware="a100x8") == "FIX_HOLDS"
    nightly = having(entry(versions={"torch": ">=2.13"}))
    assert found(nightly, versions={"torch": "2.14.0.dev20260101+cu130"}) == "FIX_HOLDS"


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
    anywhere, pattern, named = entry("FLAKY"), entry("CHANGED", cells=["*/fsdp"]), entry(cells=["m/fsdp"])
    assert found(having(named, pattern, anywhere)) == "FIX_HOLDS"
    assert found(having(pattern, anywhere)) == "CHANGED"
    narrow = entry("NOT_FIRING", versions={"torch": ">=2.13,<2.14"})
    assert found(having(narrow, anywhere)) == "NOT_FIRING"
    assert found(having(narrow, named)) == "FIX_HOLDS"
    assert found(having(anywhere, entry("CHANGED"))) == "CHANGED", "of two alike the later"
    assert found(having(entry("CHANGED"), entry("FLAKY", hardware="*"))) == "CHANGED"


def test_comparison_stored_beside_a_verdict() -> None:
    known = having(entry(facts={}), entry("FIX_BROKEN", "other-fix", hardware="elsewhere"))
    at = ("m/fsdp", "fix")
    assert comparison(known, *at, Verdict("FIX_HOLDS", ""), NOW, "cpu") == {
        "expected": "expected", "expectation": "FIX_HOLDS", "met_note": "",
    }  # fmt: skip
    assert comparison(known, *at, Verdict("FIX_BROKEN", ""), NOW, "gpu1")["expected"] == "differs from cpu"
    assert comparison(known, *at, Verdict("FIX_HOLDS", ""), NOW, "gpu1")["expectation"] == "FIX_HOLDS", "as predicted"
    unset = {"expected": "unset", "expectation": None, "met_note": ""}
    assert comparison(known, "m/fsdp", "other-fix", Verdict("FIX_HOLDS", ""), NOW, "cpu") == unset


def test_compare() -> None:
    wanted = Expectation.model_validate(entry())
    assert compare(Verdict("FIX_HOLDS", "x"), wanted) == "expected"
    assert compare(Verdict("FIX_BROKEN", "x"), wanted) == "unexpected"
    assert compare(Verdict("INCONCLUSIVE", "the fix hangs"), wanted) == "unexpected"
    assert compare(Verdict("INCONCLUSIVE", "skipped: no GPU", measured=False), wanted) == "unset"
    assert compare(Verdict("FIX_HOLDS", "x"), None) == "unset"


def test_failing_control_is_unexpected_without_any_expectation() -> None:
    for name in ("UNHEALTHY", "FLAKY", "INCONCLUSIVE"):  # the last: it hangs
        assert compare(Verdict(name, "x"), None, control=True) == "unexpected"
    assert compare(Verdict("HEALTHY", "x"), None, control=True) == "unset"
    assert compare(Verdict("INCONCLUSIVE", "skipped", measured=False), None, control=True) == "unset"
    known = Expectation.model_validate(entry() | {"verdicts": {"control": "UNHEALTHY"}})
    assert compare(Verdict("UNHEALTHY", "x"), known, control=True) == "expected"
    assert compare(Verdict("UNHEALTHY", "x"), None, known, control=True) == "as predicted"
    healthy = Expectation.model_validate(entry() | {"verdicts": {"control": "HEALTHY"}})
    assert compare(Verdict("UNHEALTHY", "x"), None, healthy, control=True) == "unexpected"


def test_compare_takes_what_expected_returns() -> None:
    known = having(entry() | {"verdicts": {"other-fix": "FIX_BROKEN", "fix": "FIX_HOLDS"}})
    applies = expected(known, "m/fsdp", "fix", NOW, "cpu")
    assert applies is not None and applies.verdicts == {"fix": "FIX_HOLDS"}
    assert compare(Verdict("FIX_BROKEN", "x"), applies) == "unexpected"


def test_fixed_upstream_agrees_with_not_firing() -> None:
    """Which of the two it is, other stacks' stored measurements decide: publishing one of those is no difference."""
    wanted = Expectation.model_validate(entry("NOT_FIRING"))
    assert compare(Verdict("UPSTREAM_FIXED", ""), wanted) == "expected"
    assert compare(Verdict("NOT_FIRING", ""), Expectation.model_validate(entry("UPSTREAM_FIXED"))) == "expected"
    assert compare(Verdict("FIX_HARMFUL", ""), wanted) == "unexpected"


def test_cpu_measurement_predicts_other_hardware() -> None:
    known = having(entry("FIX_HOLDS"))
    assert predicted(known, "m/fsdp", "fix", NOW, "cpu") is None, "there it is the expectation"
    guess = predicted(known, "m/fsdp", "fix", NOW, "a100x8")
    assert guess is not None and guess.verdicts == {"fix": "FIX_HOLDS"}
    assert compare(Verdict("FIX_HOLDS", ""), None, guess) == "as predicted"
    assert compare(Verdict("FIX_BROKEN", ""), None, guess) == "differs from cpu"
    assert compare(Verdict("INCONCLUSIVE", "", measured=False), None, guess) == "unset"
    own = having(entry("FIX_HOLDS"), entry("FIX_BROKEN", hardware="a100x8"))
    assert predicted(own, "m/fsdp", "fix", NOW, "a100x8") is None, "it has an expectation of its own"
    assert compare(Verdict("FIX_HOLDS", ""), expected(own, "m/fsdp", "fix", NOW, "a100x8"), guess) == "unexpected"
    assert predicted(known, "m/fsdp", "fix", {"transformers": "5.23.0"}, "gpu1") is not None
    old = having(entry(versions={"torch": "<2.3"}))
    assert predicted(old, "m/fsdp", "fix", NOW, "gpu1") is None, "releases count there, too"


# -- failure ids


def unmasks(*names: str) -> Verdict:
    return Verdict("FIX_UNMASKS", "", met=tuple(Met(check=name) for name in names))


def expecting(verdict: str = "FIX_UNMASKS", *ids: str) -> Expectation:
    return Expectation.model_validate(entry(verdict) | ({"met": {"fix": list(ids)}} if ids else {}))


@pytest.mark.parametrize(
    ("verdict", "expectation", "compared", "note"),
    [
        (unmasks("updates"), expecting("FIX_UNMASKS", "ValueError in x.f"), "unexpected", True),
        (unmasks("updates"), expecting("FIX_UNMASKS", "check updates"), "expected", False),
        (unmasks("updates", "losses"), expecting("FIX_UNMASKS", "check losses", "check updates"), "expected", False),
        (unmasks("updates", "steps"), expecting("FIX_UNMASKS", "check losses", "check updates"), "unexpected", True),
        (unmasks("updates"), expecting("FIX_UNMASKS"), "expected", True),  # none is written down, and that is noted
        (unmasks("updates"), expecting("FIX_HOLDS"), "unexpected", False),  # another verdict says enough
        (Verdict("FIX_HOLDS", ""), expecting("FIX_HOLDS"), "expected", False),
    ],
)
def test_verdict_of_a_failure_needs_an_expected_failure_id(
    verdict: Verdict, expectation: Expectation, compared: str, note: bool
) -> None:
    assert compare(verdict, expectation) == compared
    assert bool(failure_note(verdict, expectation)) is note and failure_note(verdict, None) == ""


def test_expectation_is_narrowed_to_its_arms_failure_ids() -> None:
    listed = {**entry("FIX_UNMASKS"), "verdicts": {"fix": "FIX_UNMASKS", "other-fix": "FIX_BROKEN"},
              "met": {"fix": "check updates", "other-fix": "some-case/norm"}}  # fmt: skip
    narrowed = expected(having(listed), "m/fsdp", "fix", {}, "cpu")
    assert narrowed and (narrowed.verdicts, narrowed.met) == ({"fix": "FIX_UNMASKS"}, {"fix": "check updates"})
    with pytest.raises(ValidationError, match="typo"):
        Expectation.model_validate({**entry(), "met": {"typo": "check updates"}})


def stored(release: str, name: str, *checks: str) -> dict[str, Any]:
    verdict = asdict(replace(unmasks(*checks), name=name))  # type: ignore[arg-type]
    return {"where": "m/fsdp", "verdicts": {"fix": verdict}, "arms": {"broken": {}, "fix": {}},
            "stack": {"versions": {"transformers": release}}, "hardware": {"profile": "cpu"}}  # fmt: skip


def test_releases_with_another_failure_id_are_another_range() -> None:
    line = [stored("4.38.0", "FIX_UNMASKS", "updates"), stored("4.39.0", "FIX_UNMASKS", "updates"),
            stored("4.40.0", "FIX_UNMASKS", "losses", "updates"), stored("4.41.0", "FIX_HOLDS")]  # fmt: skip
    ranges = expectations(
        [item for d in line for item in measured(case(), d, d["stack"]["versions"]["transformers"])], "r"
    )
    assert [(each.versions["transformers"], each.met) for each in ranges] == [
        (">=4.38,<4.40", {"fix": "check updates"}),
        (">=4.40,<4.41", {"fix": ["check losses", "check updates"]}),
        (">=4.41,<4.42", {}),
    ]


@given(
    st.lists(st.sampled_from("abc"), max_size=3), st.lists(st.sampled_from("abc"), min_size=1, unique=True),
)  # fmt: skip
def test_verdict_agrees_when_no_other_id_occurred(occurred: list[str], listed: list[str]) -> None:
    wanted = expecting("FIX_UNMASKS", *(f"check {name}" for name in listed))
    assert (compare(unmasks(*occurred), wanted) == "expected") == (set(occurred) <= set(listed))


# -- capabilities


FP16 = {"arms": {"broken": {}, "fix": {"flags": {"call": "root"}, "depends_on": ["cpu_fp16"]}, "other-fix": {}}}


def test_nothing_is_expected_where_a_capability_differs() -> None:
    both = {"verdicts": {"fix": "FIX_UNMASKS", "other-fix": "FIX_HOLDS"}, "measured": [{}], "reason": "measured"}
    known = case(expect=[{**both, "facts": {"cpu_fp16": False}}], **FP16)
    assert expected(known, "m/fsdp", "fix", NOW, "cpu", {"cpu_fp16": False}) is not None
    for here in ({"cpu_fp16": True}, {}, {"cpu_bf16": False}):
        assert expected(known, "m/fsdp", "fix", NOW, "cpu", here) is None
        assert predicted(known, "m/fsdp", "fix", NOW, "gpu1", here) is None
        assert expected(known, "m/fsdp", "other-fix", NOW, "cpu", here) is not None, "it does not depend on it"
    unknown = case(expect=[both], **FP16)
    assert expected(unknown, "m/fsdp", "fix", NOW, "cpu", {"cpu_fp16": False}) is None


def test_expectation_carries_the_capabilities_that_its_arms_depend_on() -> None:
    fires = [("fires", observation(ok(0)))]
    made = document({"broken": fires, "fix": fires}, {"fix": "FIX_BROKEN"}, where="m/fsdp")
    made["hardware"]["facts"] = {"cpu_fp16": False, "cpu_capability": "AVX2"}
    for known, facts in ((case(**FP16), {"cpu_fp16": False}), (case(), {})):
        (one,) = expectations(measured(known, made, "baseline/x.json"), "why")
        assert one.facts == facts


def test_flag_values_are_the_same_in_any_order() -> None:
    nested = having(entry(cells=["m/fsdp/call={b: 1, a: 2}"]))
    assert found(nested, 'm/fsdp/call={"a": 2, "b": 1}') == "FIX_HOLDS"
    assert found(nested, "m/fsdp/call={b: 2, a: 1}") is None
