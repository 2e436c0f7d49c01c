"""What an arm names was in force, or its attempt is no evidence: judged from numbers that the ranks measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.config import catalog as catalogue
from repro_matrix.config.schema import Case
from repro_matrix.errors import ConfigError
from repro_matrix.grading.grade import grade
from repro_matrix.grading.outcome import Outcome
from repro_matrix.grading.verdict import judge

from tests.judging import case, observation, ok, record

SHARDED = {"parameters": "shard", "gradients": "shard", "updates": "shard", "collectives": ["gather", "reduce"]}
REPLICATED = {"parameters": "whole", "gradients": "whole", "updates": "whole", "collectives": ["reduce"]}


def training(**changes: Any) -> Case:
    return case(proof={"kind": "training", "checks": ["logits"], **changes})


def share(what: str, got: Any, whole: Any = 1000) -> dict[str, Any]:
    return {"what": what, "got": got, "whole": whole, "bytes": 4}


def evidence(got: float = 500, calls: dict[str, int] | None = None, **more: Any) -> list[dict[str, Any]]:
    return [
        {"what": "group", "got": 2, "backend": "gloo", **more},
        *(share(what, got) for what in ("parameters", "gradients", "updates")),
        {"what": "collectives", "got": {"gather": 2, "reduce": 1} if calls is None else calls},
    ]


def graded(
    *ranks: list[dict[str, Any]] | None,
    known: Case | None = None,
    promises: dict[str, Any] | None = None,
    arm: str = "broken",
    flags: dict[str, Any] | None = None,
    read: list[str] | None = None,
    strategy: dict[str, Any] | None = None,
) -> Outcome:
    known = known or training()
    settings = {
        "flags": flags or {"call": "inner", "cache": True},
        "strategy": {"slug": "fsdp", "options": {}, "promises": promises or SHARDED, **(strategy or {})},
    }
    made = [
        ok(n, record=record(n, **({} if items is None else {"in_force": items, "read": {"flags": read or []}})))
        for n, items in enumerate(ranks)
    ]
    return grade(known, arm, observation(*made, settings=settings), [known])


def test_what_was_in_force_is_clean() -> None:
    assert graded(evidence(), evidence()).outcome == "clean"


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ((evidence(1000), evidence(1000)), "fsdp was not in force: every rank holds all parameters"),
        ((evidence(800), evidence(200)), "rank 0 holds 80% of the parameters"),
        ((evidence(100), evidence(100)), "the ranks together hold 20% of the parameters"),
        ((evidence(calls={"gather": 2}), evidence()), "no reduce between ranks"),
        ((evidence(got=float("nan")), evidence()), "left no evidence"),
        ((evidence(calls={"gather": 2, "reduce": "many"}), evidence()), "no reduce"),  # type: ignore[dict-item]
        ((evidence()[:1], evidence()), "parameters were not measured on rank 0"),
        ((evidence(), evidence()[:-1]), "collectives were not counted on rank 1"),
        ((evidence()[1:], evidence()), "no evidence of a process group on rank 0"),
        ((evidence(), [{"what": "group", "got": 1, "backend": "gloo"}, *evidence()[1:]]), "has 1 of 2 ranks"),
        (([{"what": "group", "got": 2, "backend": "mpi"}, *evidence()[1:]], evidence()), "rank 0 used mpi"),
        ((None, None), "no evidence"),  # settings that promise, and a record that says nothing
    ],
)
def test_what_was_not_in_force_is_no_evidence(ranks: tuple[Any, ...], says: str) -> None:
    found = graded(*ranks)
    assert found.outcome == "infra" and found.reason.startswith("not-in-force: ") and says in found.reason
    verdict = judge(training(), {"broken": [found], "fix": [Outcome("clean", "")]}, [], None)["fix"]
    assert verdict.name == "INCONCLUSIVE" and not verdict.measured and says in verdict.reason


def test_what_trains_nothing_holds_its_parameters_as_promised() -> None:
    inference = case(proof={"kind": "inference", "checks": ["logits"]})
    assert graded(evidence()[:2], evidence()[:2], known=inference).outcome == "clean"
    assert "parameters were not measured on rank 0" in graded(evidence()[:1], evidence()[:1], known=inference).reason


def test_gradients_and_updates_are_asked_for_as_well() -> None:
    for what, says in (("gradients", "every rank holds all gradients"), ("updates", "every rank updates all")):
        wrong = [share(what, 1000) if item["what"] == what else item for item in evidence()]
        assert says in graded(wrong, wrong).reason


def test_replicated_means_whole_on_every_rank() -> None:
    assert graded(evidence(1000), evidence(1000), promises=REPLICATED).outcome == "clean"
    assert "all were promised" in graded(evidence(1000), evidence(500), promises=REPLICATED).reason


def test_a_part_is_less_than_the_whole() -> None:
    part = {**SHARDED, "parameters": "part", "gradients": "part", "updates": "part"}
    assert graded(evidence(600), evidence(600), promises=part).outcome == "clean"
    assert "every rank holds all" in graded(evidence(1000), evidence(1000), promises=part).reason


def test_copies_of_the_model_are_counted() -> None:
    hybrid = {"options": {"sharding": "HYBRID"}, "copies": {"sharding": {"HYBRID": 2}}}
    four = [[{"what": "group", "got": 4, "backend": "gloo"}, *evidence()[1:]] for _ in range(4)]
    assert graded(*four, strategy=hybrid).outcome == "clean"
    assert graded(*four).outcome == "infra"  # half of it on each of four ranks, a quarter was promised


def on_cards(known: Case | None, devices: int, split: bool, *peaks: Any) -> Outcome:
    checks = [{**ok(0)["record"]["checks"][0], "name": "split"}] if split else []
    ranks = [ok(n, record=record(n, in_force=evidence(), read={}, peak_gpu_mb=mb)) for n, mb in enumerate(peaks)]
    for rank in ranks:
        rank["record"]["checks"] += checks
    settings = {"device": "cuda", "devices": devices, "flags": {}, "strategy": {"slug": "fsdp", "promises": SHARDED}}
    known = known or training()
    return grade(known, "broken", observation(*ranks, settings=settings), [known])


def test_what_was_given_cards_computed_on_them() -> None:
    """gloo, and a lone process, compute on the CPU without an error: HEALTHY "on a GPU" where no card did anything."""
    assert on_cards(None, 2, False, 512.0, 1.0).outcome == "clean"
    for peak in (0, 0.0, None, float("nan"), "512"):
        found = on_cards(None, 2, False, 512.0, peak)
        assert found.outcome == "infra" and "no card was in force: rank 1 used no memory of one" in found.reason
    loading = case(proof={"kind": "loading", "checks": ["logits"]})
    assert on_cards(loading, 2, False, None, None).outcome == "clean", "what is loaded may stay on the host"


def test_what_was_given_more_cards_than_ranks_was_split_over_them() -> None:
    assert "rank 0 that the model was split over 4 cards" in on_cards(None, 4, False, 512.0, 512.0).reason
    assert on_cards(None, 4, True, 512.0, 512.0).outcome == "clean"


def test_an_arm_may_promise_something_else() -> None:
    known = training()
    arms = {**known.model_dump()["arms"], "fix": {"flags": {"call": "root"}, "promises": REPLICATED}}
    known = Case.model_validate({**known.model_dump(), "arms": arms})
    changed = {"call": "root", "cache": True}
    found = graded(evidence(1000), evidence(1000), known=known, arm="fix", flags=changed, read=["call"])
    assert found.outcome == "clean"


def test_a_flag_that_nobody_read_changes_nothing() -> None:
    changed = {"call": "root", "cache": True}
    found = graded(evidence(), evidence(), arm="fix", flags=changed, read=["cache"])
    assert found.outcome == "infra" and "flag call was never read" in found.reason
    assert graded(evidence(), evidence(), arm="fix", flags=changed, read=["call"]).outcome == "clean"


def test_what_the_case_lists_must_have_been_measured_and_hold() -> None:
    known = training(in_force=["lora"])
    assert "lora left no evidence" in graded(evidence(), evidence(), known=known).reason
    for got, least, held in ((4, 4, True), (0, 1, False), (float("nan"), 0, False), ("4", 1, False), (True, 0, False)):
        items = [*evidence(), {"what": "lora", "got": got, "least": least, "looked_at": "adapters"}]
        found = graded(items, items, known=known)
        assert (found.outcome == "clean") is held, found
        assert held or "lora was not in force" in found.reason
    assert graded(*[[*evidence(), {"what": "lora", "got": 1, "least": "x"}]] * 2, known=known).outcome == "infra"


def test_a_failure_that_fires_needs_no_evidence() -> None:
    from tests.judging import failed

    settings = {"strategy": {"slug": "fsdp", "promises": SHARDED}}
    seen = observation(failed(0), failed(1), settings=settings)
    assert grade(training(), "broken", seen, [training()]).outcome == "fires"


def test_an_arm_whose_change_nobody_read_is_not_broken_by_what_it_changes() -> None:
    """It failed as the broken arm does because it is the broken arm: no evidence about the fix."""
    from tests.judging import failed

    def found(*read: Any) -> Any:
        ranks = [failed(number) for number in range(len(read))]
        for rank, names in zip(ranks, read):
            rank["record"].update({} if names is None else {"read": {"flags": names, "options": []}})
        return grade(training(), "fix", observation(*ranks, settings={"flags": {"call": "root"}}), [training()])

    assert found(["cache"], []).outcome == "infra" and "flag call was never read" in found(["cache"], []).reason
    assert found(["cache"], ["call"]).outcome == "fires", "one rank read it"
    assert found(["cache"], None).outcome == "fires", "a rank was ended before it could say"
    assert found(None, None).outcome == "fires", "an older record"


def test_older_observations_are_judged_as_before() -> None:
    assert grade(training(), "broken", observation(ok(0), ok(1)), [training()]).outcome == "clean"


numbers = st.one_of(st.floats(), st.integers(-(10**6), 10**6), st.none(), st.text(max_size=3), st.booleans())


@given(got=numbers, whole=numbers)
def test_only_a_number_near_its_share_is_clean(got: Any, whole: Any) -> None:
    items = [share(item["what"], got, whole) if "whole" in item else item for item in evidence()]
    found = graded(items, items)
    right = (
        not isinstance(got, (bool, str, type(None))) and not isinstance(whole, (bool, str, type(None)))
        and whole > 0 and abs(got) != float("inf") and abs(whole) != float("inf") and 0.45 <= got / whole <= 0.56
    )  # fmt: skip
    assert (found.outcome == "clean") is right


# What a catalogue may not hold.


def edit(conf: Path, name: str, old: str, new: str) -> None:
    path = conf / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def complaint(conf: Path, repros: Path, **patches: Any) -> str:
    with pytest.raises(ConfigError) as error:
        catalogue.load(conf, repros, patches or None, strict=True)
    return str(error.value)


NORM = "case/qwen15-fsdp-norm-shard.yaml"


def test_a_mistyped_option_of_an_arm_is_refused(conf: Path, repros: Path) -> None:
    edit(conf, NORM, "options: {use_orig_params: false}", "options: {use_orig_param: false}")
    text = complaint(conf, repros)
    assert NORM in text and "arms.no-orig-params" in text and "did you mean 'use_orig_params'" in text


def test_a_value_that_an_option_does_not_take_is_refused(conf: Path, repros: Path) -> None:
    edit(conf, NORM, "  layer-wrap: {options: {wrap: layer}", "  layer-wrap: {options: {wrap: layers}")
    assert "did you mean 'layer'" in complaint(conf, repros)


def test_a_mistyped_option_of_a_case_and_of_a_strategy_is_refused(conf: Path, repros: Path) -> None:
    edit(conf, NORM, "options: {wrap: size, min_num_params: 2000}", "options: {wrap: size, min_params: 2000}")
    assert "did you mean 'min_num_params'" in complaint(conf, repros)
    edit(conf, NORM, "min_params: 2000", "min_num_params: two")
    assert "not of type int" in complaint(conf, repros)
    edit(conf, NORM, "min_num_params: two", "min_num_params: 2000")
    edit(conf, "strategy/fsdp.yaml", "sharding: FULL_SHARD", "sharding: FULL")
    assert "strategy/fsdp.yaml" in complaint(conf, repros)


@pytest.mark.parametrize(("instead", "says"), [("", "key 'promises' is missing"), ("promises: {}", "promises: none")])
def test_a_strategy_that_promises_nothing_is_refused(conf: Path, repros: Path, instead: str, says: str) -> None:
    """Nothing could show that it was in force: what it measured would be no evidence."""
    promised = "promises: {parameters: whole, gradients: whole, updates: whole, collectives: [reduce]}"
    edit(conf, "strategy/ddp.yaml", promised, instead)
    text = complaint(conf, repros)
    assert "strategy/ddp.yaml" in text and says in text


def test_a_mistyped_option_on_the_command_line_is_refused(conf: Path, repros: Path) -> None:
    text = complaint(conf, repros, strategy=[(["options", "shardng"], "NO_SHARD")])
    assert "did you mean 'sharding'" in text
    found = catalogue.load(conf, repros, {"strategy": [(["options", "sharding"], "NO_SHARD")]})
    assert found.raw["strategy"]["fsdp"]["options"]["sharding"] == "NO_SHARD"
    assert "sharding" not in found.raw["strategy"]["ddp"]["options"]  # it has none


@pytest.mark.parametrize("twin", ["{}", "{flags: {call: inner}}", "{strategy: fsdp}", "{options: {wrap: size}}"])
def test_an_arm_that_changes_nothing_is_refused(conf: Path, repros: Path, twin: str) -> None:
    edit(conf, NORM, "\nclaims:", f"\n  twin: {twin}\nclaims:")
    text = complaint(conf, repros)
    assert "arms.twin" in text and "'broken'" in text and "changes nothing" in text


def test_equal_fix_arms_are_refused(conf: Path, repros: Path) -> None:
    edit(conf, NORM, "\nclaims:", "\n  again: {help: other words, flags: {call: root}}\nclaims:")
    assert "changes nothing" in complaint(conf, repros)


def test_a_strategy_says_where_it_runs() -> None:
    fsdp2 = catalogue.load().strategies["fsdp2"]
    assert fsdp2.needs_on("cuda") == ["torch>=2.4"] and fsdp2.needs_on("cpu") == ["torch>=2.4", "torch>=2.7"]
