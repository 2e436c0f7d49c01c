"""The claims ledger: what upholds, what refutes, and what says nothing."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import case, control, document, observation, ok, record
from repro_matrix.analysis.claims import ClaimRow, ledger
from repro_matrix.config.schema import Case
from repro_matrix.results.summary import Row, rows_of


def claiming(*predicts: dict[str, Any], slug: str = "some-case", **claim: Any) -> Case:
    made = {"id": "c1", "text": "it fixes it", "source": "somewhere", **claim}
    return case(slug, claims=[{**made, "predicts": list(predicts)} if predicts else made])


def rows(known: Case, *documents: dict[str, Any]) -> list[Row]:
    """The summary rows of documents as they are, without grading them."""
    return [one for d in documents for one in rows_of(d, known, {}, evidence=d.get("path", ""))]  # type: ignore[arg-type]


def row(known: Case, *documents: dict[str, Any]) -> ClaimRow:
    (found,) = ledger([known], rows(known, *documents))
    assert json.dumps(found.to_json())
    return found


def cell(verdict: str, **changes: Any) -> dict[str, Any]:
    arms: Any = {"broken": [("fires", observation(ok(0)))], "fix": [("clean", observation(ok(0)))]}
    return document(arms, {"fix": verdict}, **changes)


def stack(name: str, torch: str, transformers: str = "5.0.0") -> dict[str, Any]:
    return {"name": name, "python": "3.11.7", "versions": {"torch": torch, "transformers": transformers}}


HOLDS = {"arm": "fix", "verdict": "FIX_HOLDS"}
OLD, NEW = stack("old", "2.2.2"), stack("new", "2.13.0")


def test_upheld_and_refuted_with_their_evidence() -> None:
    upheld = row(claiming(HOLDS), cell("FIX_HOLDS", path="results/x.json"))
    assert (upheld.status, upheld.detail) == ("upheld", "1 measurement: fix FIX_HOLDS (because)")
    (evidence,) = upheld.evidence
    assert (evidence.document, evidence.holds, evidence.stack) == (
        "results/x.json", True, "current (torch 2.13.0, transformers 5.23.0)",
    )  # fmt: skip
    assert row(claiming(HOLDS), cell("FIX_BROKEN")).status == "refuted"
    assert row(claiming(HOLDS), cell("FIX_UNMASKS")).status == "refuted"
    either = {"arm": "fix", "verdict": ["FIX_BROKEN", "FIX_UNMASKS"]}
    assert row(claiming(either), cell("FIX_UNMASKS")).status == "upheld"


@pytest.mark.parametrize("verdict", ["NOT_FIRING", "UPSTREAM_FIXED", "CHANGED", "FIX_HARMFUL"])
def test_a_fix_cannot_be_tested_where_nothing_is_broken(verdict: str) -> None:
    found = row(claiming(HOLDS), cell(verdict))
    assert found.status == "untested"
    assert "could not be tested on this stack: broken does not fire" in found.detail
    beside = row(claiming(HOLDS), cell(verdict, stack=NEW), cell("FIX_HOLDS", stack=OLD))
    assert beside.status == "upheld"
    assert "not decided: could not be tested" in beside.detail


@pytest.mark.parametrize("verdict", ["INCONCLUSIVE", "FLAKY"])
def test_inconclusive_and_flaky_decide_nothing(verdict: str) -> None:
    assert row(claiming(HOLDS), cell(verdict)).status == "untested"
    assert row(claiming({"arm": "fix", "verdict": "NOT_FIRING"}), cell(verdict)).status == "untested"
    assert row(claiming(HOLDS), cell(verdict, stack=NEW), cell("FIX_BROKEN", stack=OLD)).status == "refuted"


def test_predictions_that_nothing_fires() -> None:
    quiet = claiming({"arm": "fix", "verdict": "NOT_FIRING"})
    assert row(quiet, cell("NOT_FIRING")).status == "upheld"
    assert row(quiet, cell("UPSTREAM_FIXED")).status == "upheld"
    assert row(quiet, cell("FIX_HOLDS")).status == "refuted"
    assert row(quiet, cell("CHANGED")).status == "refuted"
    fixed = claiming({"arm": "fix", "verdict": "UPSTREAM_FIXED"})
    assert row(fixed, cell("NOT_FIRING")).status == "untested"
    assert row(fixed, cell("FIX_HOLDS")).status == "refuted"
    harmful = claiming({"arm": "fix", "verdict": "FIX_HARMFUL"})
    assert row(harmful, cell("FIX_HOLDS")).status == "untested"
    assert row(harmful, cell("NOT_FIRING")).status == "refuted"


def test_untested_says_why() -> None:
    assert row(claiming(untestable="no release does so")).detail == "no release does so"
    nothing = row(claiming({**HOLDS, "model": "m", "hardware": "gpu2"}))
    assert nothing.detail == "no stored measurement of some-case, arm fix [m] [gpu2]"
    skipped = document({"broken": "needs 2 GPUs", "fix": "needs 2 GPUs"}, {"fix": "INCONCLUSIVE"})
    assert (row(claiming(HOLDS), skipped).status, row(claiming(HOLDS), skipped).detail) == (
        "untested", "skipped: needs 2 GPUs",
    )  # fmt: skip
    assert row(claiming({"arm": "other-fix", "verdict": "FIX_HOLDS"}), cell("FIX_HOLDS")).detail == (
        "arm other-fix was not run"
    )
    partial = document({"broken": [], "fix": []})
    assert row(claiming(HOLDS), partial).detail == "arm fix has no verdict"
    assert row(claiming({"arm": "broken", "outcome": "fires"}), partial).detail == "not run"


def test_axes_choose_the_documents() -> None:
    at = claiming({**HOLDS, "stack": "old", "strategy": "fsdp"})
    assert row(at, cell("FIX_BROKEN", stack=NEW), cell("FIX_HOLDS", stack=OLD)).status == "upheld"
    assert row(at, cell("FIX_HOLDS", stack=OLD, strategy="ddp")).status == "untested"
    elsewhere = claiming({**HOLDS, "case": "other-case"})
    assert row(elsewhere, cell("FIX_BROKEN"), cell("FIX_HOLDS", case="other-case")).status == "upheld"


def test_that_a_warning_is_harmless_is_seen_on_the_attempt_that_warns() -> None:
    """An arm without the warning that trains well proves nothing of it; and an exception is no warning."""
    harmless = claiming({"arm": "broken", "otherwise": "clean"})

    def fired(otherwise: str | None, name: str = "fires", **changes: Any) -> dict[str, Any]:
        made = document({"broken": [(name, observation(ok(0)))], "fix": [("clean", observation(ok(0)))]}, **changes)
        made["arms"]["broken"]["attempts"][0]["outcome"]["otherwise"] = otherwise
        return made

    assert row(harmless, fired("clean", stack=NEW)).detail == "1 measurement: broken but for the remark clean 1/1"
    assert row(harmless, fired("other_error")).status == "refuted", "it warns, and trains wrongly"
    assert row(harmless, fired(None)).status == "refuted", "what fires is an exception"
    assert row(harmless, fired("infra")).status == "untested", "a proof that is not there"
    quiet = row(harmless, fired(None, "clean"))
    assert (quiet.status, quiet.detail) == ("untested", "could not be tested on this stack: broken does not fire")
    assert row(harmless, fired("clean", stack=NEW), fired(None, stack=OLD)).status == "conditional"


# --- conditional


def test_conditional_on_the_predictions_own_words() -> None:
    known = claiming({**HOLDS, "model": "m", "when": "hidden 1024"}, {**HOLDS, "model": "n", "when": "hidden 2048"})
    found = row(known, cell("FIX_HOLDS"), cell("FIX_BROKEN", model="n"))
    assert (found.status, found.detail) == ("conditional", "holds in hidden 1024; not in hidden 2048")


def test_conditional_on_the_axis_that_differs() -> None:
    found = row(claiming(HOLDS), cell("FIX_HOLDS", stack=OLD), cell("FIX_BROKEN", stack=NEW))
    assert found.status == "conditional"
    assert found.detail == "holds in torch 2.2.2; not in torch 2.13.0"
    scales = row(claiming(HOLDS), cell("FIX_HOLDS"), cell("FIX_BROKEN", scale="full"))
    assert scales.detail == "holds in setting tiny random weights; not in setting full random weights"


def test_conditional_names_the_first_axis_that_tells_both_sides_apart() -> None:
    found = row(claiming(HOLDS), cell("FIX_HOLDS", stack=OLD, model="a"), cell("FIX_BROKEN", stack=NEW, model="b"))
    assert found.detail == "holds in model a; not in model b"
    releases = [cell("FIX_HOLDS" if minor < 6 else "FIX_BROKEN", stack=stack(f"s{minor}", f"2.{minor}"))
                for minor in (10, 9, 3, 2, 1, 0)]  # fmt: skip
    assert row(claiming(HOLDS), *releases).detail == "holds in torch 2.0, 2.1, 2.2, 2.3; not in torch 2.9, 2.10"


def test_measurements_that_nothing_tells_apart_are_counted() -> None:
    one, other = cell("FIX_HOLDS"), cell("FIX_BROKEN")
    other["hardware"] = {**other["hardware"], "cpu": "another"}
    assert row(claiming(HOLDS), one, other).detail.startswith("measurements of the same cell disagree: 1 for it, 1 ag")


def test_conditional_on_several_axes_together() -> None:
    found = row(
        claiming(HOLDS),
        cell("FIX_HOLDS", stack=OLD, model="a"),
        cell("FIX_BROKEN", stack=NEW, model="a"),
        cell("FIX_BROKEN", stack=OLD, model="b"),
        cell("FIX_HOLDS", stack=NEW, model="b"),
    )
    assert found.detail == (
        "holds in (model a, torch 2.2.2) (model b, torch 2.13.0); not in (model a, torch 2.13.0) (model b, torch 2.2.2)"
    )


def at(started: float) -> dict[str, Any]:
    return {"provenance": {**cell("FIX_HOLDS")["provenance"], "started": started}}


def test_of_the_same_cell_the_newest_that_decides_counts() -> None:
    older, newer = cell("FIX_BROKEN", **at(1.0)), cell("FIX_HOLDS", **at(2.0))
    assert row(claiming(HOLDS), older, newer).status == row(claiming(HOLDS), newer, older).status == "upheld"
    assert row(claiming(HOLDS), newer, cell("INCONCLUSIVE", **at(3.0))).status == "upheld"
    assert row(claiming(HOLDS), older, cell("FIX_HOLDS", **at(2.0), stack=OLD)).status == "conditional"


def test_a_simulation_is_said_to_be_one() -> None:
    assert row(claiming(HOLDS), cell("FIX_HOLDS", simulated="fake tensors")).evidence[0].setting.endswith("simulated")


def test_a_simulation_decides_only_where_no_real_measurement_does() -> None:
    known = claiming(HOLDS)
    simulated = cell("FIX_BROKEN", simulated="fake tensors", model="n")
    alone = row(known, simulated)
    assert (alone.status, alone.detail) == ("refuted", "1 simulated measurement: fix FIX_BROKEN (because)")
    beside = row(known, simulated, cell("FIX_HOLDS"))
    assert (beside.status, beside.detail.split(";")[0]) == ("upheld", "1 measurement: fix FIX_HOLDS (because)")
    (left_out,) = [item for item in beside.evidence if item.simulated]
    assert left_out.holds is None and left_out.measured.startswith("simulated, and a real measurement decides")
    undecided = row(known, simulated, cell("INCONCLUSIVE"))
    assert undecided.status == "refuted", "a real measurement that decides nothing does not silence the simulation"


# --- outcomes


def ran(*names: str, **changes: Any) -> dict[str, Any]:
    return document({"broken": [(name, observation(ok(0))) for name in names], "fix": []}, **changes)


def test_outcomes_are_predicted_of_any_arm() -> None:
    clean = claiming({"arm": "broken", "outcome": "clean"})
    assert row(clean, ran("clean", "clean", "infra")).status == "upheld"
    refuted = row(clean, ran("fires", "fires"))
    assert (refuted.status, refuted.evidence[0].measured) == ("refuted", "fires 2/2 (because)")
    assert row(clean, ran("clean", "fires")).detail == "flaky: clean 1/2, fires 1/2"
    assert row(clean, ran("infra")).detail == "infra: because"
    assert row(clean, ran("hang")).status == "untested", "a hang is inconclusive"
    assert row(claiming({"arm": "broken", "outcome": ["hang", "fires"]}), ran("hang", "fires")).status == "upheld"


def test_controls_are_predicted_by_their_verdict() -> None:
    healthy = {"id": "c1", "text": "x", "predicts": [{"arm": "control", "verdict": "HEALTHY"}]}
    known = control(claims=[healthy])
    measured = document({"control": [("clean", observation(ok(0)))]}, {"control": "UNHEALTHY"}, case=known.slug)
    assert row(known, measured).status == "refuted"


# --- metrics


def measured(fix: list[Any], broken: list[Any], name: str = "loss", outcomes: str = "clean") -> dict[str, Any]:
    def attempts(values: list[Any]) -> list[tuple[str, dict[str, Any]]]:
        return [
            (outcomes, observation(*(ok(r, record=record(r, metrics={name: v})) for r, v in enumerate(per_rank))))
            for per_rank in values
        ]

    return document({"broken": attempts(broken), "fix": attempts(fix)})


def metric(name: str = "loss", arm: str = "fix", **how: Any) -> Case:
    return claiming({"arm": arm, "metric": {"name": name, **how}})


def test_a_metric_is_the_greatest_of_the_ranks_and_the_median_of_the_attempts() -> None:
    there = measured([[1.0, 5.0], [5.1, 2.0], [4.0, 3.0]], [[10.0, 1.0]] * 3)
    found = row(metric(below="broken"), there)
    assert found.status == "upheld"
    assert found.evidence[0].measured == "loss: fix 5 (4 to 5.1), broken 10 (medians of 3 and 3)"
    assert row(metric(below="broken", factor=0.3), there).status == "refuted"
    assert row(metric(above="broken"), there).status == "refuted"
    assert row(metric(above="broken", factor=0.3), there).status == "upheld"


def test_a_difference_within_the_noise_decides_nothing() -> None:
    """1050, 1740 and 8117 tokens/s were the same arm."""
    wild = [[1050.0], [1740.0], [8117.0]]
    found = row(metric(below="broken"), measured(wild, [[3000.0]] * 3))
    assert found.status == "untested" and found.detail.startswith("noise: the attempts scatter by more than the arms")
    assert row(metric(above="broken"), measured(wild, [[3000.0]] * 3)).status == "untested"
    assert row(metric(above="broken"), measured([[3000.0]] * 3, wild)).status == "untested", "either arm's"
    assert (
        row(metric(below="broken"), measured([[10.0], [11.0], [12.0]], [[13.0], [14.0], [13.0]])).status == "untested"
    )
    assert row(metric(below="broken"), measured([[10.0], [11.0], [12.0]], [[15.0], [14.5], [15.0]])).status == "upheld"


def test_a_metric_needs_three_attempts_of_each_arm() -> None:
    for fix, broken in (([[1.0]] * 2, [[9.0]] * 3), ([[1.0]] * 3, [[9.0]] * 2), ([[1.0]], [[9.0]])):
        found = row(metric(below="broken"), measured(fix, broken))
        assert found.status == "untested" and found.detail.startswith("noise: fewer than 3 attempts")
    assert row(metric(below="broken"), measured([[1.0]] * 3, [[9.0]] * 3)).status == "upheld"


def test_counts_that_never_scatter_decide_also_where_they_are_equal() -> None:
    same = measured([[4.0]] * 3, [[4.0]] * 3)
    assert row(metric(below="broken"), same).status == row(metric(above="broken"), same).status == "upheld"


def test_a_metric_that_was_not_measured_decides_nothing() -> None:
    there = measured([[1.0]], [[2.0]])
    assert row(metric("speed", below="broken"), there).detail == "no attempt of arm fix measured speed"
    assert row(metric(below="other-fix"), there).detail == "arm other-fix was not run"
    assert row(metric(below="broken"), measured([[float("nan")]], [[2.0]])).status == "untested"
    assert row(metric(below="broken"), measured([["fast"]], [[True]])).status == "untested"
    failed = measured([[1.0]], [[2.0]], outcomes="other_error")
    assert row(metric(below="broken"), failed).detail == "no attempt of arm fix finished"
    crashed = observation(ok(0, record=record(0, done=False, metrics={"loss": 1.0})))
    there["arms"]["broken"] = document({"broken": [("fires", crashed)]})["arms"]["broken"]
    assert row(metric(below="broken"), there).detail == "no attempt of arm broken finished"


def test_a_figure_that_an_arms_attempts_took_in_different_ways_is_none() -> None:
    by_script = observation(ok(0, record=record(0, metrics={"wall_s": 1.0})), wall_s=1)
    mixed = [("clean", by_script), ("clean", observation(ok(0), wall_s=1)), ("clean", by_script)]
    there = document({"broken": [("clean", by_script)] * 3, "fix": mixed})
    found = row(metric("wall_s", below="broken"), there)
    assert (found.status, found.detail) == (
        "untested",
        "wall_s of fix was measured in different ways (by the script, whole attempt, launcher torchrun)",
    )


def test_what_was_predicted_is_said() -> None:
    def predicted(**how: Any) -> str:
        return row(claiming({"arm": "fix", **how}), measured([[1.0]] * 3, [[2.0]] * 3)).evidence[0].predicted

    assert predicted(metric={"name": "loss", "below": "broken"}) == "loss below broken"
    assert predicted(metric={"name": "loss", "above": "broken", "factor": 0.5}) == "loss above broken x 0.5"
    assert predicted(outcome=["hang", "clean"]) == "clean or hang"
    assert predicted(otherwise="clean") == "clean but for the remark"
    assert predicted(verdict=["FIX_HOLDS", "FIX_BROKEN"]) == "FIX_BROKEN or FIX_HOLDS"


def test_a_rows_json_and_its_words() -> None:
    both = row(claiming(HOLDS), cell("FIX_HOLDS", stack=OLD), cell("FIX_HOLDS", stack=NEW, flags={"call": "root"}))
    told = both.to_json()
    assert (told["status"], told["brief"], told["id"], told["source"]) == (
        "upheld",
        "2 measurements",
        "c1",
        "somewhere",
    )
    assert {e["setting"] for e in told["evidence"]} == {"tiny random weights", "call=root tiny random weights"}
    assert [e["ranks"] for e in told["evidence"]] == ["2 ranks"] * 2
    assert told["evidence"][0]["document"] == "some-case", "one that is stored nowhere"
    four = row(claiming(HOLDS), cell("FIX_HOLDS", ranks=4, variant=["ranks=4", "tp_size=2"]))
    assert four.evidence[0].setting == "tp_size=2 tiny random weights" and four.evidence[0].ranks == "4 ranks"
    nothing = row(claiming({**HOLDS, "ranks": 8, "strategy": "ddp", "stack": "old"}), cell("FIX_HOLDS"))
    assert nothing.detail == "no stored measurement of some-case, arm fix [ddp] [ranks=8] [old]"


def test_figures_that_are_always_there() -> None:
    small = observation(ok(0, record=record(0, peak_rss_mb=100)), ok(1, record=record(1, peak_rss_mb=200)), wall_s=1)
    large = observation(ok(0, record=record(0, peak_rss_mb=500)), wall_s=9, cpu_s=None)
    there = document({"broken": [("clean", large)] * 3, "fix": [("clean", small)] * 3})
    rss = row(metric("peak_rss_mb", below="broken"), there)
    assert rss.evidence[0].measured.startswith("peak_rss_mb: fix 200, broken 500")
    assert row(metric("wall_s", above="broken"), there).status == "refuted"
    assert row(metric("peak_gpu_mb", below="broken"), there).status == "untested"
    assert "measured differently" in row(metric("cpu_s", below="broken"), there).detail
    large["attempt"]["launcher"] = "warm"
    other = document({"broken": [("clean", large)], "fix": [("clean", small)]})
    assert "measured differently" in row(metric("wall_s", below="broken"), other).detail


# --- properties

VERDICTS = ["FIX_HOLDS", "FIX_BROKEN", "FIX_UNMASKS", "NOT_FIRING", "UPSTREAM_FIXED", "FIX_HARMFUL", "CHANGED", "FLAKY",
            "INCONCLUSIVE"]  # fmt: skip
CELLS = st.lists(st.tuples(st.sampled_from(VERDICTS), st.sampled_from("abc"), st.sampled_from([OLD, NEW])), max_size=5)


@given(st.sampled_from(VERDICTS), CELLS)
def test_status_follows_from_what_was_decided(wanted: str, cells: list[Any]) -> None:
    found = row(
        claiming({"arm": "fix", "verdict": wanted}), *(cell(v, model=model, stack=on) for v, model, on in cells)
    )
    decided = {item.holds for item in found.evidence} - {None}
    status = {(): "untested", (True,): "upheld", (False,): "refuted", (False, True): "conditional"}
    assert found.status == status[tuple(sorted(decided))]  # type: ignore[type-var]
    assert found.detail


@given(CELLS, st.sampled_from(["INCONCLUSIVE", "FLAKY", "NOT_FIRING", "skip"]))
def test_more_that_decides_nothing_never_changes_the_status(cells: list[Any], extra: str) -> None:
    there = [cell(v, model=model, stack=on) for v, model, on in cells]
    skipped = document({"broken": "no GPU", "fix": "no GPU"}, {"fix": "INCONCLUSIVE"}, model="d")
    more = skipped if extra == "skip" else cell(extra, model="d")
    assert row(claiming(HOLDS), *there).status == row(claiming(HOLDS), *there, more).status


# --- only where the failure is there


def pair(broken: str, fix: str, **changes: Any) -> dict[str, Any]:
    return document({"broken": [(broken, observation(ok(0)))], "fix": [(fix, observation(ok(0)))]}, **changes)


@pytest.mark.parametrize("fix", ["clean", "fires", "other_error"])
def test_an_outcome_says_nothing_where_the_broken_arm_does_not_fire(fix: str) -> None:
    for wanted in ("clean", "fires", "other_error"):
        known = claiming({"arm": "fix", "outcome": wanted})
        for broken in ("clean", "other_error", "hang", "infra"):
            found = row(known, pair(broken, fix))
            assert (found.status, found.detail) == (
                "untested", "could not be tested on this stack: broken does not fire",
            )  # fmt: skip
        assert row(known, pair("fires", fix)).status == ("upheld" if fix == wanted else "refuted")


def test_that_the_broken_arm_fires_is_predicted_only_where_it_does() -> None:
    fires = claiming({"arm": "broken", "outcome": "fires"})
    assert row(fires, pair("other_error", "clean"), pair("fires", "clean", stack=OLD)).status == "upheld"
    assert row(fires, pair("clean", "clean")).status == "untested"
    assert row(claiming({"arm": "broken", "outcome": "clean"}), pair("clean", "clean")).status == "upheld"
    assert row(claiming({"arm": "broken", "outcome": "clean"}), pair("other_error", "clean")).status == "refuted"


def three(other: str, fix: str) -> dict[str, Any]:
    arms: Any = {arm: [(name, observation(ok(0)))] for arm, name in
                 (("broken", "fires"), ("other-fix", other), ("fix", fix))}  # fmt: skip
    return document(arms, {"fix": "FIX_HOLDS", "other-fix": "FIX_BROKEN"})


def test_an_arm_that_changes_several_things_is_tried_against_one_that_shares_the_others() -> None:
    against = claiming({**HOLDS, "against": "other-fix"})
    assert row(against, three("clean", "clean")).status == "untested", "the other change alone had spared it"
    assert "FIX_HOLDS against other-fix" in row(against, three("fires", "clean")).detail
    assert row(against, three("fires", "clean")).status == "upheld"
    assert row(against, three("fires", "fires")).status == "refuted"
    outcome = claiming({"arm": "fix", "outcome": "clean", "against": "other-fix"})
    assert row(outcome, three("clean", "clean")).status == "untested"
    assert row(outcome, three("fires", "clean")).status == "upheld"


CONTROL = {"kind": "control", "case": "train-step"}


def of_strategy(slug: str, fix: str = "other_error") -> dict[str, Any]:
    made = document({"broken": [("fires", observation(ok(0)))], "fix": [(fix, observation(ok(0)))]},
                    {"fix": "FIX_HOLDS" if fix == "clean" else "FIX_UNMASKS"})  # fmt: skip
    made["arms"]["fix"]["settings"] = {"strategy": {"slug": slug}}
    return made


def healthy(name: str, strategy: str = "fsdp2", **changes: Any) -> dict[str, Any]:
    seen = "clean" if name == "HEALTHY" else "other_error"
    return document(
        {"control": [(seen, observation(ok(0)))]}, {"control": name}, strategy=strategy, **CONTROL, **changes
    )


def test_an_arm_whose_strategy_does_not_run_there_at_all_decides_nothing() -> None:
    failed = of_strategy("fsdp2")
    assert row(claiming(HOLDS), failed).status == "refuted"
    found = row(claiming(HOLDS), failed, healthy("UNHEALTHY"))
    assert found.status == "untested"
    assert found.detail == "strategy fsdp2 does not run here: its control is unhealthy (train-step m)"
    assert row(claiming(HOLDS), failed, healthy("UNHEALTHY"), healthy("HEALTHY", model="n")).status == "refuted"
    assert row(claiming(HOLDS), failed, healthy("UNHEALTHY", "ddp")).status == "refuted", "another strategy's"
    assert row(claiming(HOLDS), failed, healthy("UNHEALTHY", stack=OLD)).status == "refuted", "another stack's"
    gpu = {**failed["hardware"], "profile": "gpu1"}
    assert row(claiming(HOLDS), failed, healthy("UNHEALTHY", hardware=gpu)).status == "refuted", "another machine's"
    assert row(claiming(HOLDS), of_strategy("fsdp2", "clean"), healthy("UNHEALTHY")).status == "upheld", "it ran"
    own = row(
        claiming(HOLDS), of_strategy("fsdp"), healthy("INCONCLUSIVE", "fsdp"), healthy("UNHEALTHY", "fsdp", model="n")
    )
    assert own.detail.endswith("its control is unhealthy (train-step n)"), "a failure under it is no control"
    lost = row(claiming(HOLDS), of_strategy("fsdp"), healthy("INCONCLUSIVE", "fsdp"))
    assert lost.status == "refuted", "what was lost says nothing of the strategy"


def test_what_a_strategy_says_that_it_needs_of_the_hardware_counts_likewise() -> None:
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


def test_why_nothing_was_decided_is_said_in_a_few_words() -> None:
    lost = [document({"broken": f"needs {n} GPUs", "fix": f"needs {n} GPUs and " + "x" * 300}, model=str(n))
            for n in range(9)]  # fmt: skip
    found = row(claiming(HOLDS), *lost)
    assert found.detail.startswith("skipped: needs 0 GPUs and xxx") and found.detail.endswith("...; and 6 more")
    assert len(found.detail) < 600 and len(found.evidence) == 9
