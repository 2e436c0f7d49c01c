"""What stored measurements advise: never from releases in which the failure does not exist."""

from __future__ import annotations

import pytest
from repro_matrix.baseline.advice import advice
from repro_matrix.config import catalog
from repro_matrix.config.expectations import Expectation

CASE = catalog.load().cases["ddp-ready-once"]
OLD, NEW = {"torch": "2.2.2"}, {"torch": "2.13.0+cpu"}
RANGES = [
    Expectation(
        versions={"torch": ">=2.2,<2.3"},
        measured_at=[OLD],
        reason="r",
        verdicts={
            "non-reentrant": "FIXED",
            "static-graph": "NOT_FIXED",
            "fsdp": "FIXED",
            "bucket-view": "NOT_FIXED",
        },
    ),
    Expectation(
        versions={"torch": ">=2.13,<2.14"},
        measured_at=[NEW],
        reason="r",
        verdicts={"non-reentrant": "NOT_REPRODUCED", "static-graph": "NOT_REPRODUCED"},
    ),
]


@pytest.mark.parametrize(
    ("versions", "fits", "absent"),
    [
        ({}, False, False),
        ({"torch": "2.2.1"}, True, False),
        ({"torch": "2.13.0"}, False, True),
        ({"torch": "2.5.0"}, False, False),
        ({"numpy": "1.26"}, False, False),
    ],
)
def test_advice_is_of_releases_in_which_the_failure_exists(
    versions: dict[str, str], fits: bool, absent: bool
) -> None:
    found = advice(CASE.model_copy(update={"expect": RANGES}), versions)
    assert found and found.measured_at == OLD and (found.fits, found.absent) == (fits, absent)
    assert found.helps == ("non-reentrant",)  # fsdp is a probe: nobody claims that it is a fix
    assert set(found.does_not) == {"static-graph", "bucket-view"}


def test_advice_of_a_case_that_never_reproduced_is_none() -> None:
    assert advice(CASE.model_copy(update={"expect": RANGES[1:]}), {"torch": "2.13.0"}) is None


@pytest.mark.parametrize(
    ("torch", "transformers", "nearest"),
    [
        ("1.13.1", "4.30.0", ("2.2.2", "4.39.3")),
        ("2.3.1", "4.50.0", ("2.2.2", "4.44.2")),
        ("2.9.0", "4.30.0", ("2.6.0", "4.39.3")),
        ("9.0", "", ("2.13.0", "5.23.0")),
    ],
)
def test_nearest_measured_releases_are_those_of_the_nearest_torch(
    torch: str, transformers: str, nearest: tuple[str, str]
) -> None:
    measured = [("2.13.0", "5.23.0"), ("2.6.0", "4.39.3"), ("2.2.2", "4.44.2"), ("2.2.2", "4.39.3")]
    ranges = [
        Expectation(
            versions={"torch": f"=={one}", "transformers": f"=={other}"},
            reason="r",
            measured_at=[{"torch": one, "transformers": other}],
            verdicts={"non-reentrant": "FIXED"},
        )
        for one, other in measured
    ]
    given = {"torch": torch, "transformers": transformers}
    found = advice(CASE.model_copy(update={"expect": ranges}), given)
    assert found and not found.fits and tuple(found.measured_at.values()) == nearest
