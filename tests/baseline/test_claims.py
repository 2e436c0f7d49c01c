"""The claims ledger: what supports a claim, what refutes it, and what decides nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import case, document, observation, ok, record
from repro_matrix.baseline.claims import ClaimRow, ledger
from repro_matrix.config.schema import Case
from repro_matrix.results.projection import rows_of
from repro_matrix.results.rows import Row

Document = dict[str, Any]


def claiming(*predictions: dict[str, Any], slug: str = "some-case", **claim: Any) -> Case:
    claim = {"id": "c1", "text": "it fixes it", "source": "somewhere", **claim}
    return case(
        slug, claims=[{**claim, "predictions": list(predictions)} if predictions else claim]
    )


def fix(verdict: str | list[str], **more: Any) -> Case:
    """A case that claims this verdict of its variant ``fix``."""
    return claiming({"variant": "fix", "verdict": verdict, **more})


def rows(*documents: Document) -> list[Row]:
    """The summary rows of documents as they are, without grading them."""
    return [one for d in documents for one in rows_of(d, {}, evidence=d.get("path", ""))]  # type: ignore[arg-type]


def row(known: Case, *documents: Document) -> ClaimRow:
    (result,) = ledger([known], rows(*documents))
    assert json.dumps(asdict(result))
    return result


def status(known: Case, *documents: Document) -> str:
    return row(known, *documents).status


def ran(
    verdicts: dict[str, str] | None = None,
    /,
    *,
    changes: dict[str, Any] | None = None,
    **outcomes: Any,
) -> Document:
    """A document whose variants each had these outcomes, one or several."""
    names = {
        variant: [each] if isinstance(each, str) else each for variant, each in outcomes.items()
    }
    attempts: Any = {
        variant: [(name, observation(ok(0))) for name in each] for variant, each in names.items()
    }
    return document(attempts, verdicts or {}, **(changes or {}))


def cell(verdict: str, **changes: Any) -> Document:
    return ran({"fix": verdict}, changes=changes, unfixed="reproduced", fix="passed")


def stack(name: str, torch: str, transformers: str = "5.0.0") -> dict[str, Any]:
    return {
        "name": name,
        "python": "3.11.7",
        "versions": {"torch": torch, "transformers": transformers},
    }


HOLDS = {"variant": "fix", "verdict": "FIXED"}
FIXED = claiming(HOLDS)
OLD, NEW = stack("old", "2.2.2"), stack("new", "2.13.0")
UNTESTABLE = "could not be tested on this stack: unfixed does not reproduce"


@pytest.mark.parametrize(
    ("predicted", "verdicts"),
    [
        (
            "FIXED",
            {
                "supported": "FIXED",
                "refuted": "NOT_FIXED DIFFERENT_FAILURE",
                "untested": (
                    "NOT_REPRODUCED FIXED_UPSTREAM SIGNATURE_MISMATCH FIX_BREAKS INCONCLUSIVE FLAKY"
                ),
            },
        ),
        (
            "NOT_REPRODUCED",
            {
                "supported": "NOT_REPRODUCED FIXED_UPSTREAM",
                "refuted": "FIXED SIGNATURE_MISMATCH",
                "untested": "INCONCLUSIVE FLAKY",
            },
        ),
        ("FIXED_UPSTREAM", {"untested": "NOT_REPRODUCED", "refuted": "FIXED"}),
        ("FIX_BREAKS", {"untested": "FIXED", "refuted": "NOT_REPRODUCED"}),
        (
            ["NOT_FIXED", "DIFFERENT_FAILURE"],
            {"supported": "NOT_FIXED DIFFERENT_FAILURE", "refuted": "FIXED"},
        ),
    ],
)
def test_verdict_prediction_gives_status(
    predicted: str | list[str], verdicts: dict[str, str]
) -> None:
    for expected, names in verdicts.items():
        assert {status(fix(predicted), cell(name)) for name in names.split()} == {expected}


def test_untested_claim_gives_the_reason() -> None:
    skipped = document({"unfixed": "needs 2 GPUs", "fix": "needs 2 GPUs"}, {"fix": "INCONCLUSIVE"})
    partial = document({"unfixed": [], "fix": []})
    for known, documents, reason in (
        (claiming(untestable="no release does so"), [], "no release does so"),
        (
            fix("FIXED", strategy="ddp", stack="old"),
            [cell("FIXED")],
            "no stored measurement of some-case, variant fix [ddp] [old]",
        ),
        (FIXED, [skipped], "skipped: needs 2 GPUs"),
        (FIXED, [partial], "variant fix has no verdict"),
        (
            claiming({"variant": "other-fix", "verdict": "FIXED"}),
            [cell("FIXED")],
            "variant other-fix was not run",
        ),
        (claiming({"variant": "unfixed", "outcome": "reproduced"}), [partial], "not run"),
        (FIXED, [cell("NOT_REPRODUCED")], UNTESTABLE),
    ):
        result = row(known, *documents)
        assert result.status == "untested" and result.detail.startswith(reason)


def test_prediction_with_axes_uses_matching_cells_only() -> None:
    known = fix("FIXED", stack="old", strategy="fsdp")
    assert status(known, cell("NOT_FIXED", stack=NEW), cell("FIXED", stack=OLD)) == "supported"
    assert status(known, cell("FIXED", stack=OLD, strategy="ddp")) == "untested"
    assert (
        status(fix("FIXED", case="other-case"), cell("NOT_FIXED"), cell("FIXED", case="other-case"))
        == "supported"
    )


def test_claim_uses_the_newest_decisive_result_of_a_cell() -> None:
    def at(verdict: str, started: float, **changes: Any) -> Document:
        return cell(
            verdict, provenance={**cell("FIXED")["provenance"], "started": started}, **changes
        )

    older, newer = at("NOT_FIXED", 1.0), at("FIXED", 2.0)
    assert status(FIXED, older, newer) == status(FIXED, newer, older) == "supported"
    assert status(FIXED, newer, at("INCONCLUSIVE", 3.0)) == "supported"
    assert status(FIXED, older, at("FIXED", 2.0, stack=OLD)) == "mixed"


def test_claim_names_measurements_with_uncommitted_files() -> None:
    edited = cell("NOT_FIXED", provenance={**cell("FIXED")["provenance"], "git_dirty": True})
    assert "not committed" in row(FIXED, edited).brief
    assert "not committed" not in row(FIXED, cell("NOT_FIXED")).brief


def test_simulation_decides_only_without_a_real_measurement() -> None:
    simulated = cell("NOT_FIXED", simulated="fake tensors", model="n")
    alone = row(FIXED, simulated)
    assert (alone.status, alone.brief) == ("refuted", "1 simulated measurement")
    with_real = row(FIXED, simulated, cell("FIXED"))
    (left_out,) = [item for item in with_real.evidence if item.simulated]
    assert with_real.status == "supported" and left_out.holds is None
    assert status(FIXED, simulated, cell("INCONCLUSIVE")) == "refuted", (
        "the real measurement decides nothing"
    )


GRID = [
    cell("FIXED", stack=OLD, model="a"),
    cell("NOT_FIXED", stack=NEW, model="a"),
    cell("NOT_FIXED", stack=OLD, model="b"),
    cell("FIXED", stack=NEW, model="b"),
]
RELEASES = [
    cell("FIXED" if minor < 6 else "NOT_FIXED", stack=stack(f"s{minor}", f"2.{minor}"))
    for minor in (10, 9, 3, 2, 1, 0)
]
BY_MODEL = claiming(
    {**HOLDS, "model": "m", "condition": "hidden 1024"},
    {**HOLDS, "model": "n", "condition": "2048"},
)


@pytest.mark.parametrize(
    ("known", "documents", "detail"),
    [
        (BY_MODEL, [cell("FIXED"), cell("NOT_FIXED", model="n")], "holds: hidden 1024; not: 2048"),
        (
            FIXED,
            [cell("FIXED", stack=OLD), cell("NOT_FIXED", stack=NEW)],
            "holds in torch 2.2.2; not in torch 2.13.0",
        ),
        (
            FIXED,
            [cell("FIXED"), cell("NOT_FIXED", scale="full")],
            "holds in setting tiny random weights; not in setting full random weights",
        ),
        (FIXED, RELEASES, "holds in torch 2.0, 2.1, 2.2, 2.3; not in torch 2.9, 2.10"),
        (FIXED, GRID, "measurements disagree: 2 for it, 2 against it"),
    ],
)
def test_mixed_claim_names_the_separating_axis(
    known: Case, documents: list[Document], detail: str
) -> None:
    result = row(known, *documents)
    assert (result.status, result.detail) == ("mixed", detail)


PASSES, REPRODUCES = ({"variant": "unfixed", "outcome": name} for name in ("passed", "reproduced"))
RELATIVE = {"variant": "fix", "relative_to": "other-fix"}


@pytest.mark.parametrize(
    ("prediction", "outcomes", "expected"),
    [
        (PASSES, {"unfixed": ["passed", "passed", "infra_error"]}, "supported"),
        (PASSES, {"unfixed": ["reproduced", "reproduced"]}, "refuted"),
        (PASSES, {"unfixed": ["passed", "reproduced"]}, "untested"),
        (PASSES, {"unfixed": "infra_error"}, "untested"),
        (PASSES, {"unfixed": "hang"}, "untested"),
        (
            {**PASSES, "outcome": ["hang", "reproduced"]},
            {"unfixed": ["hang", "reproduced"]},
            "supported",
        ),
        (REPRODUCES, {"unfixed": "passed", "fix": "passed"}, "untested"),
        (REPRODUCES, {"unfixed": "other_failure", "fix": "passed"}, "untested"),
        *(
            (
                RELATIVE | predicted,
                {"unfixed": "reproduced", "other-fix": other, "fix": fix_},
                expected,
            )
            for predicted in ({"verdict": "FIXED"}, {"outcome": "passed"})
            for other, fix_, expected in (
                ("passed", "passed", "untested"),
                ("reproduced", "passed", "supported"),
                ("reproduced", "reproduced", "refuted"),
            )
        ),
    ],
)
def test_prediction_is_decided_by_the_outcomes(
    prediction: dict[str, Any], outcomes: dict[str, Any], expected: str
) -> None:
    assert (
        status(claiming(prediction), ran({"fix": "FIXED"}, **{"fix": [], **outcomes})) == expected
    )


@pytest.mark.parametrize("measured", ["passed", "reproduced", "other_failure"])
@pytest.mark.parametrize("wanted", ["passed", "reproduced", "other_failure"])
def test_outcome_prediction_of_a_fix_needs_a_reproducing_unfixed_variant(
    wanted: str, measured: str
) -> None:
    known = claiming({"variant": "fix", "outcome": wanted})
    for unfixed in ("passed", "other_failure", "hang", "infra_error"):
        assert row(known, ran(unfixed=unfixed, fix=measured)).detail == UNTESTABLE
    assert (status(known, ran(unfixed="reproduced", fix=measured)) == "supported") == (
        measured == wanted
    )


def test_outcome_without_warning_is_taken_from_attempts_that_warn() -> None:
    harmless = claiming({"variant": "unfixed", "outcome_without_warning": "passed"})

    def warned(without: str | None, name: str = "reproduced", **changes: Any) -> Document:
        result = ran(changes=changes, unfixed=name, fix="passed")
        result["variants"]["unfixed"]["attempts"][0]["outcome"]["outcome_without_warning"] = without
        return result

    for without, expected in (
        ("passed", "supported"),
        ("other_failure", "refuted"),
        (None, "refuted"),
        ("infra_error", "untested"),
    ):
        assert status(harmless, warned(without)) == expected, without
    assert row(harmless, warned(None, "passed")).detail == UNTESTABLE
    assert status(harmless, warned("passed", stack=NEW), warned(None, stack=OLD)) == "mixed"


def measured(
    fix_: list[Any], unfixed: list[Any], name: str = "loss", outcome: str = "passed"
) -> Document:
    """``fix_`` and ``unfixed``: for each attempt the values of its ranks, or one value."""

    def attempts(values: list[Any]) -> list[tuple[str, Any]]:
        per_rank = [each if isinstance(each, list) else [each] for each in values]
        return [
            (
                outcome,
                observation(
                    *(ok(r, record=record(r, metrics={name: v})) for r, v in enumerate(each))
                ),
            )
            for each in per_rank
        ]

    return document({"unfixed": attempts(unfixed), "fix": attempts(fix_)})


def metric(name: str = "loss", **how: Any) -> Case:
    return claiming({"variant": "fix", "metric": {"name": name, **how}})


BELOW, ABOVE = metric(below="unfixed"), metric(above="unfixed")


def test_metric_is_the_maximum_over_ranks_and_compared_between_all_attempts() -> None:
    values = measured([[1.0, 5.0], [5.1, 2.0], [4.0, 3.0]], [[10.0, 1.0]] * 3)
    result = row(BELOW, values)
    assert result.evidence[0].measured == "loss: fix 4 to 5.1, unfixed 10"
    assert (result.status, status(ABOVE, values)) == ("supported", "refuted")
    assert status(metric(below="unfixed", factor=0.3), values) == "refuted"
    assert status(metric(above="unfixed", factor=0.3), values) == "supported"


WILD = [1050.0, 1740.0, 8117.0]


@pytest.mark.parametrize(
    ("known", "fix_", "unfixed", "expected"),
    [
        (BELOW, WILD, [3000.0] * 3, "untested"),
        (ABOVE, [3000.0] * 3, WILD, "untested"),
        (BELOW, [10.0, 11.0, 12.0], [13.0, 14.0, 11.5], "untested"),
        (BELOW, [10.0, 11.0, 12.0], [13.0, 14.5, 15.0], "supported"),
        (ABOVE, [4.0] * 3, [4.0] * 3, "supported"),
    ],
)
def test_metric_is_decided_where_all_attempts_agree(
    known: Case, fix_: list[float], unfixed: list[float], expected: str
) -> None:
    result = row(known, measured(fix_, unfixed))
    assert result.status == expected and result.detail.startswith("noise: ") == (
        expected == "untested"
    )


def test_metric_that_was_not_measured_is_undecided() -> None:
    values, failed = (
        measured([1.0] * 3, [2.0] * 3),
        measured([1.0] * 3, [2.0] * 3, outcome="other_failure"),
    )
    crashed = observation(ok(0, record=record(0, done=False, metrics={"loss": 1.0})))
    half = {
        **values,
        "variants": (
            values["variants"] | document({"unfixed": [("reproduced", crashed)]})["variants"]
        ),
    }
    for known, cells, detail in (
        (metric("speed", below="unfixed"), values, "0 attempts of variant fix with speed, of 3"),
        (metric(below="other-fix"), values, "0 attempts of variant other-fix"),
        (BELOW, failed, "0 attempts of variant fix"),
        (BELOW, half, "0 attempts of variant unfixed"),
        (BELOW, measured([1.0] * 2, [9.0] * 3), "2 attempts of variant fix"),
        (BELOW, measured([1.0] * 3, [9.0] * 2), "2 attempts of variant unfixed"),
        (BELOW, measured([float("nan")] * 3, [2.0] * 3), "0 "),
        (BELOW, measured(["fast"] * 3, [True] * 3), "0 "),
    ):
        assert row(known, cells).detail.startswith(detail)


def test_claim_row_to_json_has_settings_and_ranks() -> None:
    data = asdict(
        row(FIXED, cell("FIXED", stack=OLD), cell("FIXED", stack=NEW, flags={"call": "root"}))
    )
    assert (data["status"], data["brief"], data["id"]) == ("supported", "2 measurements", "c1")
    assert data["evidence"][0]["document"] == "some-case", "its cell, where it is stored nowhere"
    assert {e["setting"] for e in data["evidence"]} == {
        "tiny random weights",
        "call=root tiny random weights",
    }
    (four,) = row(FIXED, cell("FIXED", ranks=4, overrides=["ranks=4", "tp_size=2"])).evidence
    assert (four.setting, four.ranks, four.predicted) == (
        "tp_size=2 tiny random weights",
        "4 ranks",
        "FIXED",
    )


VERDICTS = [
    "FIXED",
    "NOT_FIXED",
    "DIFFERENT_FAILURE",
    "NOT_REPRODUCED",
    "FIXED_UPSTREAM",
    "FIX_BREAKS",
    "SIGNATURE_MISMATCH",
    "FLAKY",
    "INCONCLUSIVE",
]
CELLS = st.lists(
    st.tuples(st.sampled_from(VERDICTS), st.sampled_from("abc"), st.sampled_from([OLD, NEW])),
    max_size=5,
)


@given(st.sampled_from(VERDICTS), CELLS)
def test_status_follows_from_decided_evidence(wanted: str, cells: list[Any]) -> None:
    documents = [cell(verdict, model=model, stack=on) for verdict, model, on in cells]
    result = row(fix(wanted), *documents)
    decided = {item.holds for item in result.evidence} - {None}
    expected = {(): "untested", (True,): "supported", (False,): "refuted", (False, True): "mixed"}
    assert result.status == expected[tuple(sorted(decided))]  # type: ignore[type-var]
    skipped = document({"unfixed": "no GPU", "fix": "no GPU"}, {"fix": "INCONCLUSIVE"}, model="d")
    for undecided in (skipped, cell("INCONCLUSIVE", model="d")):
        assert status(fix(wanted), *documents, undecided) == result.status
