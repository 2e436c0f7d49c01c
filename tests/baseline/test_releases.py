"""The releases in which a failure reproduces, from expectations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from repro_matrix.baseline.releases import Releases, releases_of
from repro_matrix.config import catalog
from repro_matrix.config.expectations import Expectation

BASE = catalog.load().cases["ddp-ready-once"]


def entry(
    verdict: str, first: str, last: str = "", bounds: str = "", torch: str = "2.6.0"
) -> Expectation:
    ends = [
        {"transformers": each, "torch": torch} for each in dict.fromkeys((first, last or first))
    ]
    versions = {"transformers": bounds or f">={first},<={last or first}", "torch": f"=={torch}"}
    return Expectation(verdicts={"fix": verdict}, versions=versions, measured_at=ends, reason="r")  # type: ignore


def of(*entries: Expectation) -> Releases:
    return releases_of(BASE.model_copy(update={"expect": list(entries)}))


def test_package_that_decides_and_its_ranges() -> None:
    found = of(
        entry("SIGNATURE_MISMATCH", "4.37.0", bounds=">=4.37,<4.38"),
        entry("FIXED", "4.38.0", "4.43.1", ">=4.38,<=4.43.1"),
        entry("NOT_FIXED", "4.43.2", "4.43.4", ">=4.43.2,<4.44"),
        entry("NOT_REPRODUCED", "4.44.0", "5.23.0", ">=4.44,<5.24"),
    )
    assert found.package == "transformers"
    assert [(each.state, each.first, each.last, each.follows) for each in found.ranges] == [
        ("other_failure", "4.37.0", "4.37.0", False),
        ("reproduces", "4.38.0", "4.43.4", True),
        ("absent", "4.44.0", "5.23.0", True),
    ]
    assert found.began == "" and found.ended == "in transformers 4.44.0"
    assert (
        found.sentence == "reproduces in transformers 4.38.0 to 4.43.4; another error in 4.37.0;"
        " fixed in transformers 4.44.0"
    )


@pytest.mark.parametrize(
    ("last", "bounds", "next_bounds", "phrase"),
    [
        ("4.43.4", ">=4.43,<4.44", ">=4.46,<4.47", "between transformers 4.43.4 and 4.46.0"),
        ("4.45.9", ">=4.45,<=4.45.9", ">=4.46.0,<4.47", "between transformers 4.45.9 and 4.46.0"),
        ("4.45.2", ">=4.45,<4.46", ">=4.46,<4.47", "in transformers 4.46.0"),
    ],
)
def test_release_is_named_only_where_none_lies_between(
    last: str, bounds: str, next_bounds: str, phrase: str
) -> None:
    before = entry("FIXED", last, bounds=bounds)
    assert of(before, entry("FIX_BREAKS", "4.46.0", bounds=next_bounds)).ended == phrase


def test_failure_that_no_release_changes() -> None:
    found = of(
        entry("FIXED", "4.39.3", torch="2.2.2"), entry("NOT_FIXED", "5.23.0", torch="2.13.0+cpu")
    )
    assert found.sentence == "reproduces in torch 2.2.2 to 2.13.0, transformers 4.39.3 to 5.23.0"
    assert found.ended == ""
    assert (
        of().sentence
        == of(entry("FIXED", "5.0.0")).sentence
        == of(entry("NOT_REPRODUCED", "5.0.0")).sentence
        == ""
    )


@pytest.mark.parametrize(("torch", "alone"), [("2.6.0", True), ("2.13.0", False)])
def test_a_release_is_to_blame_only_where_nothing_else_differs(torch: str, alone: bool) -> None:
    found = of(entry("NOT_REPRODUCED", "4.44.0"), entry("FIXED", "5.1.0", torch=torch))
    assert found.ranges[-1].alone == alone
    assert found.began == "between transformers 4.44.0 and 5.1.0" + (
        "" if alone else ", where other packages differ too"
    )


def test_fix_that_another_error_hid_is_named() -> None:
    found = of(
        entry("FIXED", "4.38.0"),
        entry("SIGNATURE_MISMATCH", "4.39.0"),
        entry("NOT_REPRODUCED", "4.40.0"),
    )
    assert found.after and found.after.first == "4.39.0"
    assert found.fixed == "between transformers 4.39.0 and 4.40.0"


def test_two_measured_releases_are_a_history() -> None:
    """accelerate-fsdp2-optim-load was measured on two releases, and `repro show` had no history."""
    found = of(entry("FIXED", "4.38.0"), entry("NOT_REPRODUCED", "4.40.0"))
    assert found.sentence == (
        "reproduces in transformers 4.38.0 (oldest measured);"
        " fixed between transformers 4.38.0 and 4.40.0"
    )


VERDICTS = st.sampled_from(["FIXED", "NOT_REPRODUCED", "SIGNATURE_MISMATCH"])


@given(st.lists(VERDICTS, min_size=1, max_size=8))
def test_ranges_cover_every_measured_release_with_its_state(verdicts: list[str]) -> None:
    measured: dict[str, Any] = {
        f"4.{30 + index}.0": verdict for index, verdict in enumerate(verdicts)
    }
    found = of(*(entry(verdict, version) for version, verdict in measured.items()))
    states = {
        "FIXED": "reproduces",
        "NOT_REPRODUCED": "absent",
        "SIGNATURE_MISMATCH": "other_failure",
    }
    for version, verdict in measured.items():
        (inside,) = [
            each
            for each in found.ranges
            if Version(each.first) <= Version(version) <= Version(each.last)
        ]
        assert inside.state == states[verdict]
    assert all(one.state != other.state for one, other in zip(found.ranges, found.ranges[1:]))
