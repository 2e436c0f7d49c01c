"""The claims ledger: what upholds, what refutes, and what says nothing."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import case, control, document, observation, ok, record
from repro_matrix.analysis.claims import ClaimRow, ledger
from repro_matrix.config.schema import Case
from repro_matrix.results.summary import Row, rows_of


def claiming(*predictions: dict[str, Any], slug: str = "some-case", **claim: Any) -> Case:
    made = {"id": "c1", "text": "it fixes it", "source": "somewhere", **claim}
    return case(slug, claims=[{**made, "predictions": list(predictions)} if predictions else made])


def rows(known: Case, *documents: dict[str, Any]) -> list[Row]:
    """The summary rows of documents as they are, without grading them."""
    return [one for d in documents for one in rows_of(d, {}, evidence=d.get("path", ""))]  # type: ignore[arg-type]


def row(known: Case, *documents: dict[str, Any]) -> ClaimRow:
    (found,) = ledger([known], rows(known, *documents))
    assert json.dumps(found.to_json())
    return found


def cell(verdict: str, **changes: Any) -> dict[str, Any]:
    variants: Any = {"unfixed": [("reproduced", observation(ok(0)))], "fix": [("passed", observation(ok(0)))]}
    return document(variants, {"fix": verdict}, **changes)


def stack(name: str, torch: str, transformers: str = "5.0.0") -> dict[str, Any]:
    return {"name": name, "python": "3.11.7", "versions": {"torch": torch, "transformers": transformers}}


HOLDS = {"variant": "fix", "verdict": "FIXED"}
OLD, NEW = stack("old", "2.2.2"), stack("new", "2.13.0")


def test_ledger_gives_supported_or_refuted_with_evidence() -> None:
    supported = row(claiming(HOLDS), cell("FIXED", path="results/x.json"))
    assert (supported.status, supported.detail) == ("supported", "1 measurement: fix FIXED (because)")
    (evidence,) = supported.evidence
    assert (evidence.document, evidence.holds, evidence.stack) == (
        "results/x.json", True, "current (torch 2.13.0, transformers 5.23.0)",
    )  # fmt: skip
    assert row(claiming(HOLDS), cell("NOT_FIXED")).status == "refuted"
    assert row(claiming(HOLDS), cell("DIFFERENT_FAILURE")).status == "refuted"
    either = {"variant": "fix", "verdict": ["NOT_FIXED", "DIFFERENT_FAILURE"]}
    assert row(claiming(either), cell("DIFFERENT_FAILURE")).status == "supported"


@pytest.mark.parametrize("verdict", ["NOT_REPRODUCED", "FIXED_UPSTREAM", "SIGNATURE_MISMATCH", "FIX_BREAKS"])
def test_claim_where_unfixed_does_not_reproduce_is_untested(verdict: str) -> None:
    found = row(claiming(HOLDS), cell(verdict))
    assert found.status == "untested"
    assert "could not be tested on this stack: unfixed does not reproduce" in found.detail
    beside = row(claiming(HOLDS), cell(verdict, stack=NEW), cell("FIXED", stack=OLD))
    assert beside.status == "supported"
    assert "not decided: could not be tested" in beside.detail


@pytest.mark.parametrize("verdict", ["INCONCLUSIVE", "FLAKY"])
def test_claim_with_inconclusive_or_flaky_results_is_untested(verdict: str) -> None:
    assert row(claiming(HOLDS), cell(verdict)).status == "untested"
    assert row(claiming({"variant": "fix", "verdict": "NOT_REPRODUCED"}), cell(verdict)).status == "untested"
    assert row(claiming(HOLDS), cell(verdict, stack=NEW), cell("NOT_FIXED", stack=OLD)).status == "refuted"


def test_claim_that_predicts_no_failure_is_decided_by_verdict() -> None:
    quiet = claiming({"variant": "fix", "verdict": "NOT_REPRODUCED"})
    assert row(quiet, cell("NOT_REPRODUCED")).status == "supported"
    assert row(quiet, cell("FIXED_UPSTREAM")).status == "supported"
    assert row(quiet, cell("FIXED")).status == "refuted"
    assert row(quiet, cell("SIGNATURE_MISMATCH")).status == "refuted"
    fixed = claiming({"variant": "fix", "verdict": "FIXED_UPSTREAM"})
    assert row(fixed, cell("NOT_REPRODUCED")).status == "untested"
    assert row(fixed, cell("FIXED")).status == "refuted"
    harmful = claiming({"variant": "fix", "verdict": "FIX_BREAKS"})
    assert row(harmful, cell("FIXED")).status == "untested"
    assert row(harmful, cell("NOT_REPRODUCED")).status == "refuted"


def test_untested_claim_gives_the_reason() -> None:
    assert row(claiming(untestable="no release does so")).detail == "no release does so"
    nothing = row(claiming({**HOLDS, "model": "m", "hardware": "gpu2"}))
    assert nothing.detail == "no stored measurement of some-case, variant fix [m] [gpu2]"
    skipped = document({"unfixed": "needs 2 GPUs", "fix": "needs 2 GPUs"}, {"fix": "INCONCLUSIVE"})
    assert (row(claiming(HOLDS), skipped).status, row(claiming(HOLDS), skipped).detail) == (
        "untested", "skipped: needs 2 GPUs",
    )  # fmt: skip
    assert row(claiming({"variant": "other-fix", "verdict": "FIXED"}), cell("FIXED")).detail == (
        "variant other-fix was not run"
    )
    partial = document({"unfixed": [], "fix": []})
    assert row(claiming(HOLDS), partial).detail == "variant fix has no verdict"
    assert row(claiming({"variant": "unfixed", "outcome": "reproduced"}), partial).detail == "not run"


def test_prediction_with_axes_uses_matching_cells_only() -> None:
    at = claiming({**HOLDS, "stack": "old", "strategy": "fsdp"})
    assert row(at, cell("NOT_FIXED", stack=NEW), cell("FIXED", stack=OLD)).status == "supported"
    assert row(at, cell("FIXED", stack=OLD, strategy="ddp")).status == "untested"
    ambiguous_with = claiming({**HOLDS, "case": "other-case"})
    assert row(ambiguous_with, cell("NOT_FIXED"), cell("FIXED", case="other-case")).status == "supported"


def test_outcome_without_warning_is_taken_from_attempts_that_warn() -> None:
    harmless = claiming({"variant": "unfixed", "outcome_without_warning": "passed"})

    def fired(outcome_without_warning: str | None, name: str = "reproduced", **changes: Any) -> dict[str, Any]:
        made = document({"unfixed": [(name, observation(ok(0)))], "fix": [("passed", observation(ok(0)))]}, **changes)
        made["variants"]["unfixed"]["attempts"][0]["outcome"]["outcome_without_warning"] = outcome_without_warning
        return made

    assert row(harmless, fired("passed", stack=NEW)).detail == "1 measurement: unfixed but for the remark passed 1/1"
    assert row(harmless, fired("other_failure")).status == "refuted", "it warns, and trains wrongly"
    assert row(harmless, fired(None)).status == "refuted", "what reproduces is an exception"
    assert row(harmless, fired("infra_error")).status == "untested", "a proof that is not there"
    quiet = row(harmless, fired(None, "passed"))
    assert (quiet.status, quiet.detail) == ("untested", "could not be tested on this stack: unfixed does not reproduce")
    assert row(harmless, fired("passed", stack=NEW), fired(None, stack=OLD)).status == "mixed"


# --- conditional


def test_mixed_claim_uses_the_conditions_of_its_predictions() -> None:
    known = claiming(
        {**HOLDS, "model": "m", "condition": "hidden 1024"}, {**HOLDS, "model": "n", "condition": "hidden 2048"}
    )
    found = row(known, cell("FIXED"), cell("NOT_FIXED", model="n"))
    assert (found.status, found.detail) == ("mixed", "holds in hidden 1024; not in hidden 2048")


def test_mixed_claim_names_the_axis_that_differs() -> None:
    found = row(claiming(HOLDS), cell("FIXED", stack=OLD), cell("NOT_FIXED", stack=NEW))
    assert found.status == "mixed"
    assert found.detail == "holds in torch 2.2.2; not in torch 2.13.0"
    supports_other_world_sizes = row(claiming(HOLDS), cell("FIXED"), cell("NOT_FIXED", scale="full"))
    assert (
        supports_other_world_sizes.detail == "holds in setting tiny random weights; not in setting full random weights"
    )


def test_mixed_claim_names_the_first_axis_that_separates_the_sides() -> None:
    found = row(claiming(HOLDS), cell("FIXED", stack=OLD, model="a"), cell("NOT_FIXED", stack=NEW, model="b"))
    assert found.detail == "holds in model a; not in model b"
    releases = [cell("FIXED" if minor < 6 else "NOT_FIXED", stack=stack(f"s{minor}", f"2.{minor}"))
                for minor in (10, 9, 3, 2, 1, 0)]  # fmt: skip
    assert row(claiming(HOLDS), *releases).detail == "holds in torch 2.0, 2.1, 2.2, 2.3; not in torch 2.9, 2.10"


def test_mixed_claim_without_a_differing_axis_counts_measurements() -> None:
    one, other = cell("FIXED"), cell("NOT_FIXED")
    other["hardware"] = {**other["hardware"], "cpu": "another"}
    assert row(claiming(HOLDS), one, other).detail.startswith("measurements of the same cell disagree: 1 for it, 1 ag")


def test_mixed_claim_names_several_axes_together() -> None:
    found = row(
        claiming(HOLDS),
        cell("FIXED", stack=OLD, model="a"),
        cell("NOT_FIXED", stack=NEW, model="a"),
        cell("NOT_FIXED", stack=OLD, model="b"),
        cell("FIXED", stack=NEW, model="b"),
    )
    assert found.detail == (
        "holds in (model a, torch 2.2.2) (model b, torch 2.13.0); not in (model a, torch 2.13.0) (model b, torch 2.2.2)"
    )


def at(started: float) -> dict[str, Any]:
    return {"provenance": {**cell("FIXED")["provenance"], "started": started}}


def test_claim_uses_the_newest_decisive_result_of_a_cell() -> None:
    older, newer = cell("NOT_FIXED", **at(1.0)), cell("FIXED", **at(2.0))
    assert row(claiming(HOLDS), older, newer).status == row(claiming(HOLDS), newer, older).status == "supported"
    assert row(claiming(HOLDS), newer, cell("INCONCLUSIVE", **at(3.0))).status == "supported"
    assert row(claiming(HOLDS), older, cell("FIXED", **at(2.0), stack=OLD)).status == "mixed"


def test_evidence_of_a_simulation_is_marked() -> None:
    assert row(claiming(HOLDS), cell("FIXED", simulated="fake tensors")).evidence[0].setting.endswith("simulated")


def test_simulation_decides_only_without_a_real_measurement() -> None:
    known = claiming(HOLDS)
    simulated = cell("NOT_FIXED", simulated="fake tensors", model="n")
    alone = row(known, simulated)
    assert (alone.status, alone.detail) == ("refuted", "1 simulated measurement: fix NOT_FIXED (because)")
    beside = row(known, simulated, cell("FIXED"))
    assert (beside.status, beside.detail.split(";")[0]) == ("supported", "1 measurement: fix FIXED (because)")
    (left_out,) = [item for item in beside.evidence if item.simulated]
    assert left_out.holds is None and left_out.measured.startswith("simulated, and a real measurement decides")
    undecided = row(known, simulated, cell("INCONCLUSIVE"))
    assert undecided.status == "refuted", "a real measurement that decides nothing does not silence the simulation"


# --- outcomes


def ran(*names: str, **changes: Any) -> dict[str, Any]:
    return document({"unfixed": [(name, observation(ok(0))) for name in names], "fix": []}, **changes)


def test_outcome_prediction_is_decided_for_any_variant() -> None:
    passed = claiming({"variant": "unfixed", "outcome": "passed"})
    assert row(passed, ran("passed", "passed", "infra_error")).status == "supported"
    refuted = row(passed, ran("reproduced", "reproduced"))
    assert (refuted.status, refuted.evidence[0].measured) == ("refuted", "reproduced 2/2 (because)")
    assert row(passed, ran("passed", "reproduced")).detail == "flaky: passed 1/2, reproduced 1/2"
    assert row(passed, ran("infra_error")).detail == "infra_error: because"
    assert row(passed, ran("hang")).status == "untested", "a hang is inconclusive"
    assert (
        row(claiming({"variant": "unfixed", "outcome": ["hang", "reproduced"]}), ran("hang", "reproduced")).status
        == "supported"
    )


def test_control_prediction_is_decided_by_its_verdict() -> None:
    healthy = {"id": "c1", "text": "x", "predictions": [{"variant": "control", "verdict": "PASSED"}]}
    known = control(claims=[healthy])
    measured = document({"control": [("passed", observation(ok(0)))]}, {"control": "FAILED"}, case=known.slug)
    assert row(known, measured).status == "refuted"


# --- metrics


def measured(fix: list[Any], unfixed: list[Any], name: str = "loss", outcomes: str = "passed") -> dict[str, Any]:
    def attempts(values: list[Any]) -> list[tuple[str, dict[str, Any]]]:
        return [
            (outcomes, observation(*(ok(r, record=record(r, metrics={name: v})) for r, v in enumerate(per_rank))))
            for per_rank in values
        ]

    return document({"unfixed": attempts(unfixed), "fix": attempts(fix)})


def metric(name: str = "loss", variant: str = "fix", **how: Any) -> Case:
    return claiming({"variant": variant, "metric": {"name": name, **how}})


def test_metric_is_the_maximum_over_ranks_and_median_over_attempts() -> None:
    there = measured([[1.0, 5.0], [5.1, 2.0], [4.0, 3.0]], [[10.0, 1.0]] * 3)
    found = row(metric(below="unfixed"), there)
    assert found.status == "supported"
    assert found.evidence[0].measured == "loss: fix 5 (4 to 5.1), unfixed 10 (medians of 3 and 3)"
    assert row(metric(below="unfixed", factor=0.3), there).status == "refuted"
    assert row(metric(above="unfixed"), there).status == "refuted"
    assert row(metric(above="unfixed", factor=0.3), there).status == "supported"


def test_metric_difference_within_noise_is_undecided() -> None:
    wild = [[1050.0], [1740.0], [8117.0]]
    found = row(metric(below="unfixed"), measured(wild, [[3000.0]] * 3))
    assert found.status == "untested" and found.detail.startswith(
        "noise: the attempts scatter by more than the variants"
    )
    assert row(metric(above="unfixed"), measured(wild, [[3000.0]] * 3)).status == "untested"
    assert row(metric(above="unfixed"), measured([[3000.0]] * 3, wild)).status == "untested", "either variant's"
    assert (
        row(metric(below="unfixed"), measured([[10.0], [11.0], [12.0]], [[13.0], [14.0], [13.0]])).status == "untested"
    )
    assert (
        row(metric(below="unfixed"), measured([[10.0], [11.0], [12.0]], [[15.0], [14.5], [15.0]])).status == "supported"
    )


def test_metric_with_fewer_than_three_attempts_is_undecided() -> None:
    for fix, unfixed in (([[1.0]] * 2, [[9.0]] * 3), ([[1.0]] * 3, [[9.0]] * 2), ([[1.0]], [[9.0]])):
        found = row(metric(below="unfixed"), measured(fix, unfixed))
        assert found.status == "untested" and found.detail.startswith("noise: fewer than 3 attempts")
    assert row(metric(below="unfixed"), measured([[1.0]] * 3, [[9.0]] * 3)).status == "supported"


def test_metric_without_scatter_decides_equal_values() -> None:
    same = measured([[4.0]] * 3, [[4.0]] * 3)
    assert row(metric(below="unfixed"), same).status == row(metric(above="unfixed"), same).status == "supported"


def test_metric_that_was_not_measured_is_undecided() -> None:
    there = measured([[1.0]], [[2.0]])
    assert row(metric("speed", below="unfixed"), there).detail == "no attempt of variant fix measured speed"
    assert row(metric(below="other-fix"), there).detail == "variant other-fix was not run"
    assert row(metric(below="unfixed"), measured([[float("nan")]], [[2.0]])).status == "untested"
    assert row(metric(below="unfixed"), measured([["fast"]], [[True]])).status == "untested"
    failed = measured([[1.0]], [[2.0]], outcomes="other_failure")
    assert row(metric(below="unfixed"), failed).detail == "no attempt of variant fix finished"
    crashed = observation(ok(0, record=record(0, done=False, metrics={"loss": 1.0})))
    there["variants"]["unfixed"] = document({"unfixed": [("reproduced", crashed)]})["variants"]["unfixed"]
    assert row(metric(below="unfixed"), there).detail == "no attempt of variant unfixed finished"


def test_metric_measured_in_different_ways_is_undecided() -> None:
    by_script = observation(ok(0, record=record(0, metrics={"wall_s": 1.0})), wall_s=1)
    mixed = [("passed", by_script), ("passed", observation(ok(0), wall_s=1)), ("passed", by_script)]
    there = document({"unfixed": [("passed", by_script)] * 3, "fix": mixed})
    found = row(metric("wall_s", below="unfixed"), there)
    assert (found.status, found.detail) == (
        "untested",
        "wall_s of fix was measured in different ways (by the script, whole attempt, launcher torchrun)",
    )


def test_evidence_describes_the_prediction() -> None:
    def predicted(**how: Any) -> str:
        return row(claiming({"variant": "fix", **how}), measured([[1.0]] * 3, [[2.0]] * 3)).evidence[0].predicted

    assert predicted(metric={"name": "loss", "below": "unfixed"}) == "loss below unfixed"
    assert predicted(metric={"name": "loss", "above": "unfixed", "factor": 0.5}) == "loss above unfixed x 0.5"
    assert predicted(outcome=["hang", "passed"]) == "hang or passed"
    assert predicted(outcome_without_warning="passed") == "passed but for the remark"
    assert predicted(verdict=["FIXED", "NOT_FIXED"]) == "FIXED or NOT_FIXED"


def test_claim_row_to_json_has_settings_and_ranks() -> None:
    both = row(claiming(HOLDS), cell("FIXED", stack=OLD), cell("FIXED", stack=NEW, flags={"call": "root"}))
    told = both.to_json()
    assert (told["status"], told["brief"], told["id"], told["source"]) == (
        "supported",
        "2 measurements",
        "c1",
        "somewhere",
    )
    assert {e["setting"] for e in told["evidence"]} == {"tiny random weights", "call=root tiny random weights"}
    assert [e["ranks"] for e in told["evidence"]] == ["2 ranks"] * 2
    assert told["evidence"][0]["document"] == "some-case", "one that is stored nowhere"
    four = row(claiming(HOLDS), cell("FIXED", ranks=4, overrides=["ranks=4", "tp_size=2"]))
    assert four.evidence[0].setting == "tp_size=2 tiny random weights" and four.evidence[0].ranks == "4 ranks"
    nothing = row(claiming({**HOLDS, "ranks": 8, "strategy": "ddp", "stack": "old"}), cell("FIXED"))
    assert nothing.detail == "no stored measurement of some-case, variant fix [ddp] [ranks=8] [old]"


def test_built_in_metrics_are_always_available() -> None:
    small = observation(ok(0, record=record(0, peak_rss_mb=100)), ok(1, record=record(1, peak_rss_mb=200)), wall_s=1)
    large = observation(ok(0, record=record(0, peak_rss_mb=500)), wall_s=9, cpu_s=None)
    there = document({"unfixed": [("passed", large)] * 3, "fix": [("passed", small)] * 3})
    rss = row(metric("peak_rss_mb", below="unfixed"), there)
    assert rss.evidence[0].measured.startswith("peak_rss_mb: fix 200, unfixed 500")
    assert row(metric("wall_s", above="unfixed"), there).status == "refuted"
    assert row(metric("peak_gpu_mb", below="unfixed"), there).status == "untested"
    assert "measured differently" in row(metric("cpu_s", below="unfixed"), there).detail
    large["attempt"]["launcher"] = "forkserver"
    other = document({"unfixed": [("passed", large)], "fix": [("passed", small)]})
    assert "measured differently" in row(metric("wall_s", below="unfixed"), other).detail


# --- properties

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
CELLS = st.lists(st.tuples(st.sampled_from(VERDICTS), st.sampled_from("abc"), st.sampled_from([OLD, NEW])), max_size=5)


@given(st.sampled_from(VERDICTS), CELLS)
def test_status_follows_from_decided_evidence(wanted: str, cells: list[Any]) -> None:
    found = row(
        claiming({"variant": "fix", "verdict": wanted}), *(cell(v, model=model, stack=on) for v, model, on in cells)
    )
    decided = {item.holds for item in found.evidence} - {None}
    status = {(): "untested", (True,): "supported", (False,): "refuted", (False, True): "mixed"}
    assert found.status == status[tuple(sorted(decided))]  # type: ignore[type-var]
    assert found.detail


@given(CELLS, st.sampled_from(["INCONCLUSIVE", "FLAKY", "NOT_REPRODUCED", "skip"]))
def test_status_ignores_undecided_evidence(cells: list[Any], extra: str) -> None:
    there = [cell(v, model=model, stack=on) for v, model, on in cells]
    skipped = document({"unfixed": "no GPU", "fix": "no GPU"}, {"fix": "INCONCLUSIVE"}, model="d")
    more = skipped if extra == "skip" else cell(extra, model="d")
    assert row(claiming(HOLDS), *there).status == row(claiming(HOLDS), *there, more).status


# --- only where the failure is there


def pair(unfixed: str, fix: str, **changes: Any) -> dict[str, Any]:
    return document({"unfixed": [(unfixed, observation(ok(0)))], "fix": [(fix, observation(ok(0)))]}, **changes)


@pytest.mark.parametrize("fix", ["passed", "reproduced", "other_failure"])
def test_outcome_prediction_needs_a_reproducing_unfixed_variant(fix: str) -> None:
    for wanted in ("passed", "reproduced", "other_failure"):
        known = claiming({"variant": "fix", "outcome": wanted})
        for unfixed in ("passed", "other_failure", "hang", "infra_error"):
            found = row(known, pair(unfixed, fix))
            assert (found.status, found.detail) == (
                "untested", "could not be tested on this stack: unfixed does not reproduce",
            )  # fmt: skip
        assert row(known, pair("reproduced", fix)).status == ("supported" if fix == wanted else "refuted")


def test_reproduced_prediction_is_never_refuted_by_a_missing_failure() -> None:
    reproduced = claiming({"variant": "unfixed", "outcome": "reproduced"})
    assert (
        row(reproduced, pair("other_failure", "passed"), pair("reproduced", "passed", stack=OLD)).status == "supported"
    )
    assert row(reproduced, pair("passed", "passed")).status == "untested"
    assert row(claiming({"variant": "unfixed", "outcome": "passed"}), pair("passed", "passed")).status == "supported"
    assert (
        row(claiming({"variant": "unfixed", "outcome": "passed"}), pair("other_failure", "passed")).status == "refuted"
    )


def three(other: str, fix: str) -> dict[str, Any]:
    variants: Any = {variant: [(name, observation(ok(0)))] for variant, name in
                 (("unfixed", "reproduced"), ("other-fix", other), ("fix", fix))}  # fmt: skip
    return document(variants, {"fix": "FIXED", "other-fix": "NOT_FIXED"})


def test_relative_to_variant_must_reproduce() -> None:
    against = claiming({**HOLDS, "relative_to": "other-fix"})
    assert row(against, three("passed", "passed")).status == "untested", "the other change alone had spared it"
    assert "FIXED against other-fix" in row(against, three("reproduced", "passed")).detail
    assert row(against, three("reproduced", "passed")).status == "supported"
    assert row(against, three("reproduced", "reproduced")).status == "refuted"
    outcome = claiming({"variant": "fix", "outcome": "passed", "relative_to": "other-fix"})
    assert row(outcome, three("passed", "passed")).status == "untested"
    assert row(outcome, three("reproduced", "passed")).status == "supported"


CONTROL = {"kind": "control", "case": "train-step"}


def of_strategy(slug: str, fix: str = "other_failure") -> dict[str, Any]:
    made = document({"unfixed": [("reproduced", observation(ok(0)))], "fix": [(fix, observation(ok(0)))]},
                    {"fix": "FIXED" if fix == "passed" else "DIFFERENT_FAILURE"})  # fmt: skip
    made["variants"]["fix"]["settings"] = {"strategy": {"slug": slug}}
    return made


def healthy(name: str, strategy: str = "fsdp2", **changes: Any) -> dict[str, Any]:
    seen = "passed" if name == "PASSED" else "other_failure"
    return document(
        {"control": [(seen, observation(ok(0)))]}, {"control": name}, strategy=strategy, **CONTROL, **changes
    )


def test_variant_whose_strategy_control_failed_is_undecided() -> None:
    failed = of_strategy("fsdp2")
    assert row(claiming(HOLDS), failed).status == "refuted"
    found = row(claiming(HOLDS), failed, healthy("FAILED"))
    assert found.status == "untested"
    assert found.detail == "strategy fsdp2 does not run here: its control failed (train-step m)"
    assert row(claiming(HOLDS), failed, healthy("FAILED"), healthy("PASSED", model="n")).status == "refuted"
    assert row(claiming(HOLDS), failed, healthy("FAILED", "ddp")).status == "refuted", "another strategy's"
    assert row(claiming(HOLDS), failed, healthy("FAILED", stack=OLD)).status == "refuted", "another stack's"
    gpu = {**failed["hardware"], "profile": "gpu1"}
    assert row(claiming(HOLDS), failed, healthy("FAILED", hardware=gpu)).status == "refuted", "another machine's"
    assert row(claiming(HOLDS), of_strategy("fsdp2", "passed"), healthy("FAILED")).status == "supported", "it ran"
    own = row(
        claiming(HOLDS), of_strategy("fsdp"), healthy("INCONCLUSIVE", "fsdp"), healthy("FAILED", "fsdp", model="n")
    )
    assert own.detail.endswith("its control failed (train-step n)"), "a failure under it is no control"
    lost = row(claiming(HOLDS), of_strategy("fsdp"), healthy("INCONCLUSIVE", "fsdp"))
    assert lost.status == "refuted", "what was lost says nothing of the strategy"


def test_variant_whose_strategy_requirements_are_unmet_is_undecided() -> None:
    class Needy:
        requires = ("torch>=2.4",)
        requires_on: ClassVar[Any] = {"cpu": ["torch>=2.14"]}

    def status(**strategies: Any) -> str:
        return ledger([claiming(HOLDS)], rows(claiming(HOLDS), of_strategy("fsdp2")), strategies)[0].status

    class Content:
        requires = ("torch>=2.4",)

    assert status(fsdp2=Needy) == "untested"
    assert status(fsdp2=Content) == "refuted", "it has what it needs"
    assert status(ddp=Needy) == status() == "refuted"


def test_untested_claim_limits_its_reasons() -> None:
    lost = [document({"unfixed": f"needs {n} GPUs", "fix": f"needs {n} GPUs and " + "x" * 300}, model=str(n))
            for n in range(9)]  # fmt: skip
    found = row(claiming(HOLDS), *lost)
    assert found.detail.startswith("skipped: needs 0 GPUs and xxx") and found.detail.endswith("...; and 6 more")
    assert len(found.detail) < 600 and len(found.evidence) == 9
