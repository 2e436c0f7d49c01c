"""The claims ledger: what supports a claim, what refutes it, and what decides nothing."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import case, control, document, observation, ok, record
from repro_matrix.analysis.claims import ClaimRow, ledger
from repro_matrix.config.schema import Case
from repro_matrix.results.summary import Row, rows_of

Document = dict[str, Any]


def claiming(*predictions: dict[str, Any], slug: str = "some-case", **claim: Any) -> Case:
    claim = {"id": "c1", "text": "it fixes it", "source": "somewhere", **claim}
    return case(slug, claims=[{**claim, "predictions": list(predictions)} if predictions else claim])


def fix(verdict: str | list[str], **more: Any) -> Case:
    """A case that claims this verdict of its variant ``fix``."""
    return claiming({"variant": "fix", "verdict": verdict, **more})


def rows(*documents: Document) -> list[Row]:
    """The summary rows of documents as they are, without grading them."""
    return [one for d in documents for one in rows_of(d, {}, evidence=d.get("path", ""))]  # type: ignore[arg-type]


def row(known: Case, *documents: Document) -> ClaimRow:
    (result,) = ledger([known], rows(*documents))
    assert json.dumps(result.to_json())
    return result


def status(known: Case, *documents: Document) -> str:
    return row(known, *documents).status


def ran(
    verdicts: dict[str, str] | None = None, /, *, changes: dict[str, Any] | None = None, **outcomes: Any
) -> Document:
    """A document whose variants each had these outcomes, one or several."""
    names = {variant: [each] if isinstance(each, str) else each for variant, each in outcomes.items()}
    attempts: Any = {variant: [(name, observation(ok(0))) for name in each] for variant, each in names.items()}
    return document(attempts, verdicts or {}, **(changes or {}))


def cell(verdict: str, **changes: Any) -> Document:
    return ran({"fix": verdict}, changes=changes, unfixed="reproduced", fix="passed")


def stack(name: str, torch: str, transformers: str = "5.0.0") -> dict[str, Any]:
    return {"name": name, "python": "3.11.7", "versions": {"torch": torch, "transformers": transformers}}


HOLDS = {"variant": "fix", "verdict": "FIXED"}
FIXED = claiming(HOLDS)
OLD, NEW = stack("old", "2.2.2"), stack("new", "2.13.0")
UNTESTABLE = "could not be tested on this stack: unfixed does not reproduce"


# -- verdicts


@pytest.mark.parametrize(
    ("predicted", "verdicts"),
    [
        ("FIXED", {"supported": "FIXED", "refuted": "NOT_FIXED DIFFERENT_FAILURE",
                   "untested": "NOT_REPRODUCED FIXED_UPSTREAM SIGNATURE_MISMATCH FIX_BREAKS INCONCLUSIVE FLAKY"}),
        ("NOT_REPRODUCED", {"supported": "NOT_REPRODUCED FIXED_UPSTREAM", "refuted": "FIXED SIGNATURE_MISMATCH",
                            "untested": "INCONCLUSIVE FLAKY"}),
        ("FIXED_UPSTREAM", {"untested": "NOT_REPRODUCED", "refuted": "FIXED"}),
        ("FIX_BREAKS", {"untested": "FIXED", "refuted": "NOT_REPRODUCED"}),
        (["NOT_FIXED", "DIFFERENT_FAILURE"], {"supported": "NOT_FIXED DIFFERENT_FAILURE", "refuted": "FIXED"}),
    ],
)  # fmt: skip
def test_verdict_prediction_gives_status(predicted: str | list[str], verdicts: dict[str, str]) -> None:
    for expected, names in verdicts.items():
        assert {status(fix(predicted), cell(name)) for name in names.split()} == {expected}


def test_supported_claim_has_evidence() -> None:
    supported = row(FIXED, cell("FIXED", path="results/x.json"))
    (evidence,) = supported.evidence
    assert (supported.detail, evidence.document, evidence.holds, evidence.stack) == (
        "1 measurement: fix FIXED (because)", "results/x.json", True, "current (torch 2.13.0, transformers 5.23.0)",
    )  # fmt: skip


@pytest.mark.parametrize("verdict", ["NOT_REPRODUCED", "SIGNATURE_MISMATCH", "INCONCLUSIVE", "FLAKY"])
def test_claim_with_one_decisive_result_ignores_the_others(verdict: str) -> None:
    for decisive, expected in (("FIXED", "supported"), ("NOT_FIXED", "refuted")):
        assert status(FIXED, cell(verdict, stack=NEW), cell(decisive, stack=OLD)) == expected


def test_untested_claim_gives_the_reason() -> None:
    skipped = document({"unfixed": "needs 2 GPUs", "fix": "needs 2 GPUs"}, {"fix": "INCONCLUSIVE"})
    partial = document({"unfixed": [], "fix": []})
    for known, documents, reason in (
        (claiming(untestable="no release does so"), [], "no release does so"),
        (fix("FIXED", model="m", hardware="gpu2"), [], "no stored measurement of some-case, variant fix [m] [gpu2]"),
        (fix("FIXED", ranks=8, strategy="ddp", stack="old"), [cell("FIXED")],
         "no stored measurement of some-case, variant fix [ddp] [ranks=8] [old]"),
        (FIXED, [skipped], "skipped: needs 2 GPUs"),
        (claiming({"variant": "other-fix", "verdict": "FIXED"}), [cell("FIXED")], "variant other-fix was not run"),
        (FIXED, [partial], "variant fix has no verdict"),
        (claiming({"variant": "unfixed", "outcome": "reproduced"}), [partial], "not run"),
        (FIXED, [cell("NOT_REPRODUCED")], UNTESTABLE),
    ):  # fmt: skip
        result = row(known, *documents)
        assert result.status == "untested" and result.detail.startswith(reason)


def test_untested_claim_limits_its_reasons() -> None:
    lost = [document({"unfixed": f"needs {n} GPUs", "fix": f"needs {n} GPUs and " + "x" * 300}, model=str(n))
            for n in range(9)]  # fmt: skip
    result = row(FIXED, *lost)
    assert result.detail.startswith("skipped: needs 0 GPUs and xxx") and result.detail.endswith("...; and 6 more")
    assert len(result.detail) < 600 and len(result.evidence) == 9


def test_prediction_with_axes_uses_matching_cells_only() -> None:
    known = fix("FIXED", stack="old", strategy="fsdp")
    assert status(known, cell("NOT_FIXED", stack=NEW), cell("FIXED", stack=OLD)) == "supported"
    assert status(known, cell("FIXED", stack=OLD, strategy="ddp")) == "untested"
    assert status(fix("FIXED", case="other-case"), cell("NOT_FIXED"), cell("FIXED", case="other-case")) == "supported"


def test_claim_uses_the_newest_decisive_result_of_a_cell() -> None:
    def at(verdict: str, started: float, **changes: Any) -> Document:
        return cell(verdict, provenance={**cell("FIXED")["provenance"], "started": started}, **changes)

    older, newer = at("NOT_FIXED", 1.0), at("FIXED", 2.0)
    assert status(FIXED, older, newer) == status(FIXED, newer, older) == "supported"
    assert status(FIXED, newer, at("INCONCLUSIVE", 3.0)) == "supported"
    assert status(FIXED, older, at("FIXED", 2.0, stack=OLD)) == "mixed"


def test_simulation_decides_only_without_a_real_measurement() -> None:
    simulated = cell("NOT_FIXED", simulated="fake tensors", model="n")
    alone = row(FIXED, simulated)
    assert (alone.status, alone.detail) == ("refuted", "1 simulated measurement: fix NOT_FIXED (because)")
    assert alone.evidence[0].setting.endswith("simulated")
    with_real = row(FIXED, simulated, cell("FIXED"))
    (left_out,) = [item for item in with_real.evidence if item.simulated]
    assert with_real.status == "supported" and left_out.holds is None
    assert status(FIXED, simulated, cell("INCONCLUSIVE")) == "refuted", "the real measurement decides nothing"


# -- mixed


GRID = [cell("FIXED", stack=OLD, model="a"), cell("NOT_FIXED", stack=NEW, model="a"),
        cell("NOT_FIXED", stack=OLD, model="b"), cell("FIXED", stack=NEW, model="b")]  # fmt: skip
RELEASES = [cell("FIXED" if minor < 6 else "NOT_FIXED", stack=stack(f"s{minor}", f"2.{minor}"))
            for minor in (10, 9, 3, 2, 1, 0)]  # fmt: skip
BY_MODEL = claiming({**HOLDS, "model": "m", "condition": "hidden 1024"}, {**HOLDS, "model": "n", "condition": "2048"})


@pytest.mark.parametrize(
    ("known", "documents", "detail"),
    [
        (BY_MODEL, [cell("FIXED"), cell("NOT_FIXED", model="n")], "holds in hidden 1024; not in 2048"),
        (FIXED, [cell("FIXED", stack=OLD), cell("NOT_FIXED", stack=NEW)], "holds in torch 2.2.2; not in torch 2.13.0"),
        (FIXED, [cell("FIXED"), cell("NOT_FIXED", scale="full")],
         "holds in setting tiny random weights; not in setting full random weights"),
        (FIXED, [cell("FIXED", stack=OLD, model="a"), cell("NOT_FIXED", stack=NEW, model="b")],
         "holds in model a; not in model b"),
        (FIXED, RELEASES, "holds in torch 2.0, 2.1, 2.2, 2.3; not in torch 2.9, 2.10"),
        (FIXED, GRID, "measurements disagree: 2 for it, 2 against it"),
    ],
    ids=["conditions", "stack", "scale", "first axis that separates", "releases in order", "no axis"],
)  # fmt: skip
def test_mixed_claim_names_the_separating_axis(known: Case, documents: list[Document], detail: str) -> None:
    result = row(known, *documents)
    assert (result.status, result.detail) == ("mixed", detail)


# -- outcomes


def test_outcome_prediction_of_unfixed_is_decided_by_its_attempts() -> None:
    passed = claiming({"variant": "unfixed", "outcome": "passed"})
    assert status(passed, ran(unfixed=["passed", "passed", "infra_error"], fix=[])) == "supported"
    refuted = row(passed, ran(unfixed=["reproduced", "reproduced"], fix=[]))
    assert (refuted.status, refuted.evidence[0].measured) == ("refuted", "reproduced 2/2 (because)")
    flaky = row(passed, ran(unfixed=["passed", "reproduced"], fix=[]))
    assert (flaky.status, flaky.detail) == ("untested", "flaky: passed 1/2, reproduced 1/2")
    assert {status(passed, ran(unfixed=name, fix=[])) for name in ("infra_error", "hang")} == {"untested"}
    either = claiming({"variant": "unfixed", "outcome": ["hang", "reproduced"]})
    assert status(either, ran(unfixed=["hang", "reproduced"], fix=[])) == "supported"


@pytest.mark.parametrize("measured", ["passed", "reproduced", "other_failure"])
def test_outcome_prediction_of_a_fix_needs_a_reproducing_unfixed_variant(measured: str) -> None:
    for wanted in ("passed", "reproduced", "other_failure"):
        known = claiming({"variant": "fix", "outcome": wanted})
        for unfixed in ("passed", "other_failure", "hang", "infra_error"):
            result = row(known, ran(unfixed=unfixed, fix=measured))
            assert (result.status, result.detail) == ("untested", UNTESTABLE)
        expected = "supported" if measured == wanted else "refuted"
        assert status(known, ran(unfixed="reproduced", fix=measured)) == expected


def test_reproduced_prediction_is_never_refuted_by_a_missing_failure() -> None:
    known = claiming({"variant": "unfixed", "outcome": "reproduced"})
    other, passed = ran(unfixed="other_failure", fix="passed"), ran(unfixed="passed", fix="passed")
    there = ran(changes={"stack": OLD}, unfixed="reproduced", fix="passed")
    assert (status(known, other, there), status(known, passed)) == ("supported", "untested")


def test_outcome_without_warning_is_taken_from_attempts_that_warn() -> None:
    harmless = claiming({"variant": "unfixed", "outcome_without_warning": "passed"})

    def warned(without: str | None, name: str = "reproduced", **changes: Any) -> Document:
        result = ran(changes=changes, unfixed=name, fix="passed")
        result["variants"]["unfixed"]["attempts"][0]["outcome"]["outcome_without_warning"] = without
        return result

    for without, expected in (("passed", "supported"), ("other_failure", "refuted"), (None, "refuted"),
                              ("infra_error", "untested")):  # fmt: skip
        assert status(harmless, warned(without)) == expected, without
    assert row(harmless, warned(None, "passed")).detail == UNTESTABLE
    assert status(harmless, warned("passed", stack=NEW), warned(None, stack=OLD)) == "mixed"


def test_control_prediction_is_decided_by_its_verdict() -> None:
    passes = {"id": "c1", "text": "x", "predictions": [{"variant": "control", "verdict": "PASSED"}]}
    known = control(claims=[passes])
    assert status(known, ran({"control": "FAILED"}, changes={"case": known.slug}, control="passed")) == "refuted"


@pytest.mark.parametrize("predicted", [{"verdict": "FIXED"}, {"outcome": "passed"}])
def test_relative_to_variant_must_reproduce(predicted: dict[str, str]) -> None:
    known = claiming({"variant": "fix", "relative_to": "other-fix", **predicted})

    def three(other: str, fix_: str) -> Document:
        verdicts = {"fix": "FIXED", "other-fix": "NOT_FIXED"}
        return ran(verdicts, **{"unfixed": "reproduced", "other-fix": other, "fix": fix_})

    assert status(known, three("passed", "passed")) == "untested", "the other change alone avoids the failure"
    assert status(known, three("reproduced", "passed")) == "supported"
    assert status(known, three("reproduced", "reproduced")) == "refuted"


# -- controls and requirements of a variant's strategy


def of_strategy(slug: str, fix_: str = "other_failure") -> Document:
    verdict = "FIXED" if fix_ == "passed" else "DIFFERENT_FAILURE"
    result = ran({"fix": verdict}, unfixed="reproduced", fix=fix_)
    result["variants"]["fix"]["settings"] = {"strategy": {"slug": slug}}
    return result


def control_of(verdict: str, strategy: str = "fsdp2", **changes: Any) -> Document:
    outcome = "passed" if verdict == "PASSED" else "other_failure"
    changes = {"kind": "control", "case": "train-step", "strategy": strategy, **changes}
    return ran({"control": verdict}, changes=changes, control=outcome)


GPU = {**cell("FIXED")["hardware"], "profile": "gpu1"}


@pytest.mark.parametrize(
    ("controls", "expected"),
    [
        ([], "refuted"),
        ([control_of("FAILED")], "untested"),
        ([control_of("FAILED"), control_of("PASSED", model="n")], "refuted"),
        ([control_of("FAILED", "ddp")], "refuted"),
        ([control_of("FAILED", stack=OLD)], "refuted"),
        ([control_of("FAILED", hardware=GPU)], "refuted"),
        ([control_of("INCONCLUSIVE")], "refuted"),
        ([control_of("INCONCLUSIVE"), control_of("FAILED", model="n")], "untested"),
    ],
    ids=["none", "failed", "one passed", "strategy", "stack", "machine", "inconclusive", "inconclusive and failed"],
)
def test_variant_whose_strategy_control_failed_is_undecided(controls: list[Document], expected: str) -> None:
    assert status(FIXED, of_strategy("fsdp2"), *controls) == expected
    assert status(FIXED, of_strategy("fsdp2", "passed"), *controls) == "supported", "it ran"


def test_variant_whose_strategy_requirements_are_unmet_is_undecided() -> None:
    unmet = SimpleNamespace(requires=("torch>=2.4",), requires_on={"cpu": ["torch>=2.14"]})
    met = SimpleNamespace(requires=("torch>=2.4",))

    def with_strategies(**strategies: Any) -> str:
        return ledger([FIXED], rows(of_strategy("fsdp2")), strategies)[0].status

    assert with_strategies(fsdp2=unmet) == "untested"
    assert with_strategies(fsdp2=met) == with_strategies(ddp=unmet) == with_strategies() == "refuted"


# -- metrics


def measured(fix_: list[Any], unfixed: list[Any], name: str = "loss", outcome: str = "passed") -> Document:
    """``fix_`` and ``unfixed``: for each attempt the values of its ranks, or one value."""

    def attempts(values: list[Any]) -> list[tuple[str, Any]]:
        per_rank = [each if isinstance(each, list) else [each] for each in values]
        return [(outcome, observation(*(ok(r, record=record(r, metrics={name: v})) for r, v in enumerate(each))))
                for each in per_rank]  # fmt: skip

    return document({"unfixed": attempts(unfixed), "fix": attempts(fix_)})


def metric(name: str = "loss", **how: Any) -> Case:
    return claiming({"variant": "fix", "metric": {"name": name, **how}})


BELOW, ABOVE = metric(below="unfixed"), metric(above="unfixed")


def test_metric_is_the_maximum_over_ranks_and_median_over_attempts() -> None:
    values = measured([[1.0, 5.0], [5.1, 2.0], [4.0, 3.0]], [[10.0, 1.0]] * 3)
    result = row(BELOW, values)
    assert result.evidence[0].measured == "loss: fix 5 (4 to 5.1), unfixed 10 (medians of 3 and 3)"
    assert (result.status, status(ABOVE, values)) == ("supported", "refuted")
    assert status(metric(below="unfixed", factor=0.3), values) == "refuted"
    assert status(metric(above="unfixed", factor=0.3), values) == "supported"


WILD = [1050.0, 1740.0, 8117.0]


@pytest.mark.parametrize(
    ("known", "fix_", "unfixed", "expected"),
    [
        (BELOW, WILD, [3000.0] * 3, "untested"),
        (ABOVE, WILD, [3000.0] * 3, "untested"),
        (ABOVE, [3000.0] * 3, WILD, "untested"),
        (BELOW, [10.0, 11.0, 12.0], [13.0, 14.0, 13.0], "untested"),
        (BELOW, [10.0, 11.0, 12.0], [15.0, 14.5, 15.0], "supported"),
        (BELOW, [1.0] * 2, [9.0] * 3, "untested"),
        (BELOW, [1.0] * 3, [9.0] * 2, "untested"),
        (BELOW, [1.0], [9.0], "untested"),
        (BELOW, [1.0] * 3, [9.0] * 3, "supported"),
        (BELOW, [4.0] * 3, [4.0] * 3, "supported"),
        (ABOVE, [4.0] * 3, [4.0] * 3, "supported"),
    ],
)
def test_metric_is_decided_beyond_noise_of_three_attempts(
    known: Case, fix_: list[float], unfixed: list[float], expected: str
) -> None:
    result = row(known, measured(fix_, unfixed))
    assert result.status == expected and result.detail.startswith("noise: ") == (expected == "untested")


def test_metric_that_was_not_measured_is_undecided() -> None:
    values = measured([1.0], [2.0])
    assert row(metric("speed", below="unfixed"), values).detail == "no attempt of variant fix measured speed"
    assert row(metric(below="other-fix"), values).detail == "variant other-fix was not run"
    assert status(BELOW, measured([float("nan")], [2.0])) == status(BELOW, measured(["fast"], [True])) == "untested"
    failed = measured([1.0], [2.0], outcome="other_failure")
    assert row(BELOW, failed).detail == "no attempt of variant fix finished"
    crashed = observation(ok(0, record=record(0, done=False, metrics={"loss": 1.0})))
    values["variants"]["unfixed"] = document({"unfixed": [("reproduced", crashed)]})["variants"]["unfixed"]
    assert row(BELOW, values).detail == "no attempt of variant unfixed finished"


def test_built_in_metrics_are_always_available() -> None:
    small = observation(ok(0, record=record(0, peak_rss_mb=100)), ok(1, record=record(1, peak_rss_mb=200)), wall_s=1)
    large = observation(ok(0, record=record(0, peak_rss_mb=500)), wall_s=9, cpu_s=None)
    both = document({"unfixed": [("passed", large)] * 3, "fix": [("passed", small)] * 3})
    rss = row(metric("peak_rss_mb", below="unfixed"), both)
    assert rss.evidence[0].measured.startswith("peak_rss_mb: fix 200, unfixed 500")
    assert status(metric("wall_s", above="unfixed"), both) == "refuted"
    assert status(metric("peak_gpu_mb", below="unfixed"), both) == "untested"
    assert "measured differently" in row(metric("cpu_s", below="unfixed"), both).detail


def test_metric_measured_in_different_ways_is_undecided() -> None:
    by_script = ("passed", observation(ok(0, record=record(0, metrics={"wall_s": 1.0})), wall_s=1))
    whole = ("passed", observation(ok(0), wall_s=1))
    forked = ("passed", observation(ok(0), wall_s=1, launcher="forkserver"))
    for unfixed, fix_ in (([by_script] * 3, [by_script, whole, by_script]), ([forked] * 3, [whole] * 3)):
        result = row(metric("wall_s", below="unfixed"), document({"unfixed": unfixed, "fix": fix_}))
        assert result.status == "untested" and "measured" in result.detail


# -- what is reported


def test_evidence_describes_the_prediction() -> None:
    values = measured([1.0] * 3, [2.0] * 3)
    for predicted, text in (
        ({"metric": {"name": "loss", "below": "unfixed"}}, "loss below unfixed"),
        ({"metric": {"name": "loss", "above": "unfixed", "factor": 0.5}}, "loss above unfixed x 0.5"),
        ({"outcome": ["hang", "passed"]}, "hang or passed"),
        ({"outcome_without_warning": "passed"}, "passed but for the remark"),
        ({"verdict": ["FIXED", "NOT_FIXED"]}, "FIXED or NOT_FIXED"),
    ):
        assert row(claiming({"variant": "fix", **predicted}), values).evidence[0].predicted == text


def test_claim_row_to_json_has_settings_and_ranks() -> None:
    data = row(FIXED, cell("FIXED", stack=OLD), cell("FIXED", stack=NEW, flags={"call": "root"})).to_json()
    assert (data["status"], data["brief"], data["id"], data["source"]) == (
        "supported", "2 measurements", "c1", "somewhere",
    )  # fmt: skip
    assert {e["setting"] for e in data["evidence"]} == {"tiny random weights", "call=root tiny random weights"}
    assert [e["ranks"] for e in data["evidence"]] == ["2 ranks"] * 2
    assert data["evidence"][0]["document"] == "some-case", "its cell, where it is stored nowhere"
    (four,) = row(FIXED, cell("FIXED", ranks=4, overrides=["ranks=4", "tp_size=2"])).evidence
    assert (four.setting, four.ranks) == ("tp_size=2 tiny random weights", "4 ranks")


# -- properties

VERDICTS = ["FIXED", "NOT_FIXED", "DIFFERENT_FAILURE", "NOT_REPRODUCED", "FIXED_UPSTREAM", "FIX_BREAKS",
            "SIGNATURE_MISMATCH", "FLAKY", "INCONCLUSIVE"]  # fmt: skip
CELLS = st.lists(st.tuples(st.sampled_from(VERDICTS), st.sampled_from("abc"), st.sampled_from([OLD, NEW])), max_size=5)


@given(st.sampled_from(VERDICTS), CELLS)
def test_status_follows_from_decided_evidence(wanted: str, cells: list[Any]) -> None:
    result = row(fix(wanted), *(cell(verdict, model=model, stack=on) for verdict, model, on in cells))
    decided = {item.holds for item in result.evidence} - {None}
    expected = {(): "untested", (True,): "supported", (False,): "refuted", (False, True): "mixed"}
    assert result.status == expected[tuple(sorted(decided))]  # type: ignore[type-var]
    assert result.detail


@given(CELLS, st.sampled_from(["INCONCLUSIVE", "FLAKY", "NOT_REPRODUCED", "skip"]))
def test_status_ignores_undecided_evidence(cells: list[Any], extra: str) -> None:
    documents = [cell(verdict, model=model, stack=on) for verdict, model, on in cells]
    skipped = document({"unfixed": "no GPU", "fix": "no GPU"}, {"fix": "INCONCLUSIVE"}, model="d")
    more = skipped if extra == "skip" else cell(extra, model="d")
    assert status(FIXED, *documents) == status(FIXED, *documents, more)
