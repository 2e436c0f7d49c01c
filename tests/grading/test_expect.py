"""Expectations: which one applies, and whether a verdict is that."""

from __future__ import annotations

from typing import Any

import pytest
from judging import case
from repro_matrix.config.expectation import Expectation
from repro_matrix.config.schema import Case
from repro_matrix.grading.expectations import compare, expected, predicted, told
from repro_matrix.grading.verdict import Verdict

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


def test_an_expectation_applies_by_arm_hardware_and_versions() -> None:
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
def test_cells_are_named_by_their_axes_and_the_flags_that_are_not_at_their_default(
    cells: list[str], where: str, applies: bool
) -> None:
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


def test_what_stands_beside_a_verdict() -> None:
    known = having(entry(facts={}), entry("FIX_BROKEN", "other-fix", hardware="elsewhere"))
    at = ("m/fsdp", "fix")
    assert told(known, *at, Verdict("FIX_HOLDS", ""), NOW, "cpu") == {
        "expected": "expected", "expectation": "FIX_HOLDS", "met_note": "",
    }  # fmt: skip
    assert told(known, *at, Verdict("FIX_BROKEN", ""), NOW, "gpu1")["expected"] == "differs from cpu"
    assert told(known, *at, Verdict("FIX_HOLDS", ""), NOW, "gpu1")["expectation"] == "FIX_HOLDS", "as predicted"
    unset = {"expected": "unset", "expectation": None, "met_note": ""}
    assert told(known, "m/fsdp", "other-fix", Verdict("FIX_HOLDS", ""), NOW, "cpu") == unset


def test_compare() -> None:
    wanted = Expectation.model_validate(entry())
    assert compare(Verdict("FIX_HOLDS", "x"), wanted) == "expected"
    assert compare(Verdict("FIX_BROKEN", "x"), wanted) == "unexpected"
    assert compare(Verdict("INCONCLUSIVE", "the fix hangs"), wanted) == "unexpected"
    assert compare(Verdict("INCONCLUSIVE", "skipped: no GPU", measured=False), wanted) == "unset"
    assert compare(Verdict("FIX_HOLDS", "x"), None) == "unset"


def test_a_control_that_fails_is_red_without_any_expectation() -> None:
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


def test_fixed_upstream_is_what_an_expectation_of_not_firing_says() -> None:
    """Which of the two it is, other stacks' stored measurements decide: publishing one of those is no difference."""
    wanted = Expectation.model_validate(entry("NOT_FIRING"))
    assert compare(Verdict("UPSTREAM_FIXED", ""), wanted) == "expected"
    assert compare(Verdict("NOT_FIRING", ""), Expectation.model_validate(entry("UPSTREAM_FIXED"))) == "expected"
    assert compare(Verdict("FIX_HARMFUL", ""), wanted) == "unexpected"


def test_on_other_hardware_what_a_cpu_showed_is_a_prediction() -> None:
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
