"""What is expected of releases that nobody measured: it comes from the nearest measured ones, and
says so."""

from __future__ import annotations

from typing import Any

import pytest
from observations import case, control
from repro_matrix.config.expectations import Expectation
from repro_matrix.grading.expected import Situation, comparison, expected
from repro_matrix.records.outcome import FailureId, Verdict

STACK = ("torch", "transformers", "peft")


def entry(at: str, verdict: str = "FIXED", failure: str = "", **changes: Any) -> dict[str, Any]:
    """An expectation measured with these releases of torch, transformers and peft; it holds for
    their minor ones."""
    releases = dict(zip(STACK, at.split()))
    minor = {name: text.rpartition(".")[0] for name, text in releases.items()}
    ids = {"failure_ids": {"fix": failure}} if failure else {}
    return {
        "verdicts": {"fix": verdict},
        "measured_at": [releases],
        "reason": "measured",
        **ids,
        "versions": {name: f">={text},<{text}.999" for name, text in minor.items()},
        **changes,
    }


def found(
    entries: list[dict[str, Any]],
    at: str,
    verdict: Any = "FIXED",
    hardware: str = "cpu",
    of: Any = None,
) -> Any:
    known = (of or case)(expect=entries)
    verdict = verdict if isinstance(verdict, Verdict) else Verdict(verdict, "x")
    versions = {name: text for name, text in zip(STACK, at.split()) if text != "-"}
    return comparison(
        known,
        next(iter(entries[0]["verdicts"])),
        Situation("m/fsdp", versions, hardware),
        verdict,
    )


OLD, NEW = "2.6.0 4.51.3 0.15.2", "2.13.0+cpu 5.23.0 0.21.2"
AGREE = [entry(OLD), entry(NEW)]
CHANGED = [entry(OLD), entry(NEW, "NOT_FIXED", "check a")]


@pytest.mark.parametrize(
    ("entries", "at", "state", "fails"),  # the state of a fix that works, and of one that does not
    [
        (AGREE, "2.11.0 5.17.0 0.21.0", "interpolated", "unexpected"),
        (AGREE, "2.11.0 5.17.0 0.20.0", "interpolated", "unexpected"),
        (
            AGREE,
            "2.11.0 5.17.0 -",
            "interpolated",
            "unexpected",
        ),  # what is not installed took no part
        (AGREE, "2.13.0 5.23.0 -", "interpolated", "unexpected"),
        (AGREE, "2.13.1+cu130 5.23.0 0.21.0", "expected", "unexpected"),
        (
            AGREE,
            "2.11.0a0+git5228986 4.57.0 0.17.0",
            "interpolated",
            "unexpected",
        ),  # of a vendor's container
        (
            AGREE,
            "2.13.0.dev20260101+cu130 5.17.0 0.17.0",
            "interpolated",
            "unexpected",
        ),  # before 2.13.0
        # beyond what was measured: a prediction, and only a fix that worked with an older release
        # stopped working
        (AGREE, "2.14.0.dev20260701+cu130 5.23.0 0.21.2", "predicted", "unexpected"),
        (AGREE, "2.11.0 5.24.0 0.21.2", "predicted", "unexpected"),
        (AGREE, "2.11.0 5.17.0 0.22.0", "predicted", "unexpected"),  # one package is enough
        (AGREE, "2.4.1 4.45.0 0.13.0", "predicted", "differs_from_prediction"),  # older than all
        (AGREE, "2.4.1 5.17.0 0.15.2", "predicted", "differs_from_prediction"),
        (
            AGREE[1:],
            "2.11.0 5.17.0 0.21.0",
            "predicted",
            "differs_from_prediction",
        ),  # a lone measurement
        (AGREE[1:], "2.15.0 5.30.0 0.21.0", "predicted", "unexpected"),
        (AGREE[:1], "2.6.0 4.51.0 0.16.0", "predicted", "unexpected"),
        (
            [entry("2.6.0 5.17.0 0.21.0"), entry("2.11.0 4.51.3 0.21.0")],
            "2.11.0 5.17.0 0.21.0",
            "predicted",
            "unexpected",
        ),  # each release was measured, and not together
        # a change lies between them: either is possible
        (CHANGED, "2.11.0 5.17.0 0.21.0", "possible", "possible"),
        (
            [*AGREE, entry("2.6.0 5.23.0 0.15.2", "NOT_FIXED", "check a")],
            "2.11.0 5.17.0 0.21.0",
            "possible",
            "possible",
        ),
        (
            [*AGREE, entry("2.5.0 4.51.3 0.15.2", "NOT_FIXED", "check a")],
            "2.11.0 5.17.0 0.21.0",
            "interpolated",
            "unexpected",
        ),  # the nearest count
        (
            [*CHANGED, entry("2.10.0 5.0.0 0.18.0", "NOT_FIXED", "check a")],
            "2.11.0 5.17.0 0.21.0",
            "unexpected",
            "interpolated",
        ),
        # nearer in one package, farther in another: both count
        (
            [*AGREE, entry("2.10.0 4.40.0 0.15.2", "NOT_FIXED", "check a")],
            "2.11.0 5.17.0 0.21.0",
            "possible",
            "possible",
        ),
        # nothing to compare with
        (AGREE, "- 5.17.0 0.21.0", "no_expectation", "differs_from_documentation"),
        (AGREE, "2.11.0 unknown 0.21.0", "no_expectation", "differs_from_documentation"),
        (
            [entry(OLD, cells=["m/ddp"])],
            "2.11.0 5.17.0 0.21.0",
            "no_expectation",
            "differs_from_documentation",
        ),
        (
            [entry("2.6.0 5.23.0 0.15.2")],
            "2.11.0 4.51.3 0.15.2",
            "no_expectation",
            "differs_from_documentation",
        ),
    ],
)
def test_release_that_nobody_measured_is_compared_with_the_nearest(
    entries: list[dict[str, Any]], at: str, state: str, fails: str
) -> None:
    failed = Verdict("NOT_FIXED", "x", failure_ids=(FailureId(check="a"),), fix_n=3)
    assert found(entries, at)["expected"] == state
    assert found(entries, at, failed)["expected"] == fails
    nearest = found(entries, at)["nearest"]
    assert bool(nearest) == (state not in ("expected", "no_expectation"))
    assert found(entries, at)["beyond"] == ("predicted" in (state, fails))


def test_nearest_releases_are_named() -> None:
    middle = found(AGREE, "2.11.0 5.17.0 0.21.0")
    assert middle["nearest"] == (
        "torch 2.6.0 + transformers 4.51.3",
        "torch 2.13.0 + transformers 5.23.0",
    )
    assert all(name in middle["failure_note"] for name in middle["nearest"])
    (other,) = found(AGREE, "2.13.0 5.23.0 0.22.0")["nearest"]
    assert other.endswith("peft 0.21.2"), "the package that differs"


def test_another_error_in_a_gap_is_news() -> None:
    entries = [entry(at, "NOT_FIXED", "check a") for at in (OLD, NEW)]
    states = [
        found(
            entries,
            "2.11.0 5.17.0 0.21.0",
            Verdict("NOT_FIXED", "x", failure_ids=(FailureId(check=name),)),
        )
        for name in "ab"
    ]
    assert [each["expected"] for each in states] == ["interpolated", "unexpected"]
    assert "check a" in states[1]["failure_note"] and "check b" in states[1]["failure_note"]
    wrong = found(
        CHANGED,
        "2.11.0 5.17.0 0.21.0",
        Verdict("NOT_FIXED", "x", failure_ids=(FailureId(check="b"),)),
    )
    assert wrong["expected"] == "unexpected", "like neither of two that disagree"


@pytest.mark.parametrize(
    "verdict",
    [Verdict("FLAKY", "x"), Verdict("INCONCLUSIVE", "hang"), Verdict("FIXED", "x", measured=False)],
)
def test_what_shows_nothing_stable_is_not_compared(verdict: Verdict) -> None:
    nothing = found(AGREE, "2.11.0 5.17.0 0.21.0", verdict)
    assert nothing == {
        "expected": "no_expectation",
        "expectation": None,
        "failure_note": "",
        "nearest": (),
        "beyond": False,
    }


def test_documented_fix_that_is_flaky_is_not_compared_with_a_prediction() -> None:
    flaky = found(AGREE, "2.11.0 5.17.0 0.21.0", Verdict("FLAKY", "x", fix_k=2, fix_n=3))
    assert (flaky["expected"], flaky["nearest"]) == ("differs_from_documentation", ()) and flaky[
        "failure_note"
    ]


@pytest.mark.parametrize(
    ("entries", "verdict", "state"),
    [
        (AGREE, "FIXED", "matches_cpu"),
        (AGREE, "NOT_FIXED", "differs_from_cpu"),
        (CHANGED, "FIXED", "possible"),
        (
            [*AGREE, entry(OLD, "FIX_BREAKS", hardware="sm_90")],
            "FIX_BREAKS",
            "predicted",
        ),  # its own hardware first
    ],
)
def test_other_hardware_is_compared_with_a_cpu(
    entries: list[dict[str, Any]], verdict: str, state: str
) -> None:
    compared = found(entries, "2.11.0 5.17.0 0.21.0", verdict, hardware="sm_90")
    assert compared["expected"] == state and compared["nearest"]
    assert ("CPU" in compared["failure_note"]) == (state != "predicted")


def test_a_control_must_train_where_the_nearest_releases_disagree() -> None:
    def state(*verdicts: str) -> str:
        entries = [
            {**entry(at), "verdicts": {"control": name}} for at, name in zip((OLD, NEW), verdicts)
        ]
        return str(found(entries, "2.11.0 5.17.0 0.21.0", "FAILED", of=control)["expected"])

    assert state("FAILED", "PASSED") == state("PASSED", "PASSED") == "unexpected"
    assert state("FAILED", "FAILED") == "interpolated"


def test_variant_with_a_stack_of_its_own_has_no_nearest_releases() -> None:
    own: Any = case(expect=AGREE)
    variant = own.variants["fix"].model_copy(update={"stack": "newer"})
    own = own.model_copy(update={"variants": {**own.variants, "fix": variant}})
    versions = {"torch": "2.11.0", "transformers": "5.17.0"}
    here = Situation("m/fsdp", versions, "cpu")
    assert comparison(own, "fix", here, Verdict("FIXED", "x"))["expected"] == "no_expectation"


def test_nothing_between_is_expected_as_if_it_was_measured() -> None:
    """`repro accept`, claims and bisection read this."""
    known = case(expect=[Expectation.model_validate(one).model_dump() for one in AGREE])
    versions = dict(zip(STACK, ("2.11.0", "5.17.0", "0.21.0")))
    assert expected(known, "fix", Situation("m/fsdp", versions, "cpu")) is None
