"""Like with like: measurements of other settings are left out of a comparison, and that is said."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import case, document, failed, observation, ok
from repro_matrix.analysis.claims.ledger import ledger
from repro_matrix.analysis.upgrade import compare
from repro_matrix.grading.comparability import cell_difference, machine, settings_difference
from repro_matrix.grading.regrade import regrade
from repro_matrix.grading.verdict import judge

SETTINGS: dict[str, Any] = {
    "case": "some-case", "arm": "broken",
    "model": {"slug": "m", "title": "M", "config": {"hidden_size": 256, "layers": 2}, "scale": "tiny",
              "weights": "random"},
    "strategy": {"slug": "fsdp", "title": "FSDP", "options": {"wrap": "layer"}}, "flags": {"call": "inner"},
    "proof": {}, "world_size": 2, "tp_size": 1, "seed": 0, "steps": 3, "device": "cpu", "backend": "gloo",
}  # fmt: skip
PATHS = [
    ("model", "slug"), ("model", "scale"), ("model", "weights"), ("model", "config", "hidden_size"),
    ("strategy", "slug"), ("strategy", "options", "wrap"), ("flags", "call"), ("world_size",), ("tp_size",), ("seed",),
    ("steps",), ("device",), ("backend",),
]  # fmt: skip


def changed(path: tuple[str, ...], value: Any = "other") -> dict[str, Any]:
    made = copy.deepcopy(SETTINGS)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return made


@pytest.mark.parametrize("path", PATHS)
def test_whatever_decides_an_answer_tells_two_measurements_apart(path: tuple[str, ...]) -> None:
    why = settings_difference(SETTINGS, changed(path))
    assert why is not None and path[-1].replace("slug", "") in why and "against other" in why


def test_what_does_not_decide_is_no_difference() -> None:
    for path in (("case",), ("model", "title"), ("strategy", "title"), ("proof",)):
        assert settings_difference(SETTINGS, changed(path)) is None
    assert settings_difference(SETTINGS, changed(("flags", "new"))) is None, "it did not exist then, and was at its default"
    assert settings_difference(SETTINGS, changed(("strategy", "options", "new"))) is None
    assert settings_difference(SETTINGS, changed(("model", "config", "new"))) == "new None against other"
    assert settings_difference(SETTINGS, {}) is None and settings_difference({}, SETTINGS) is None


@given(st.sets(st.sampled_from(PATHS)), st.sets(st.sampled_from(PATHS)))
def test_it_is_symmetric_and_of_itself_nothing_differs(one: set[Any], other: set[Any]) -> None:
    def with_all(paths: set[Any]) -> dict[str, Any]:
        made = copy.deepcopy(SETTINGS)
        for path in paths:
            inner = made
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = "other"
        return made

    left, right = with_all(one), with_all(other)
    assert settings_difference(left, left) is None
    assert (settings_difference(left, right) is None) == (settings_difference(right, left) is None) == (one == other)


def cell(hidden: int = 256, broken: Any = None, torch: str = "2.13.0", started: float = 99.0) -> dict[str, Any]:
    seen = broken or observation(failed(0), failed(1))
    fired = "clean" if broken else "fires"
    made = document(
        {"broken": [(fired, seen)], "fix": [("clean", observation(ok(0), ok(1)))]},
        {"fix": "NOT_FIRING" if broken else "FIX_HOLDS"}, key="some-case/m-fsdp",
        stack={"name": f"torch{torch}", "python": "3.11.7", "versions": {"torch": torch}},
    )  # fmt: skip
    for arm in made["arms"].values():
        arm["settings"] = changed(("model", "config", "hidden_size"), hidden)
    made["provenance"]["started"] = started
    return made


CLEAN = observation(ok(0), ok(1))
CASE = case()


def test_a_failure_that_a_smaller_shape_does_not_trigger_is_not_fixed_upstream() -> None:
    """Older stacks were measured with hidden size 1024, today's with 256."""
    now = cell(256, CLEAN)

    def fix(older: dict[str, Any]) -> tuple[str, str]:
        found = regrade([now, older], {CASE.slug: CASE}).documents[0]["verdicts"]["fix"]
        return found["name"], found["reason"]

    assert fix(cell(256, torch="2.2.2"))[0] == "UPSTREAM_FIXED"
    name, reason = fix(cell(1024, torch="2.2.2"))
    assert name == "NOT_FIRING"
    assert reason.endswith("; not compared with torch2.2.2 (torch 2.2.2), where it fired: hidden_size 256 against 1024")


def test_the_judge_itself_compares_like_with_like() -> None:
    graded = {"broken": [judged(cell(256, CLEAN), "broken")], "fix": [judged(cell(256, CLEAN), "fix")]}
    settings = cell()["arms"]["broken"]["settings"]
    versions = {"torch": "2.13.0"}
    for hidden, wanted in ((256, "UPSTREAM_FIXED"), (1024, "NOT_FIRING")):
        found = judge(CASE, graded, [cell(hidden, torch="2.2.2")], versions, settings)
        assert found["fix"].name == wanted


def test_a_changed_environment_says_nothing_of_a_release() -> None:
    """A patch beside the packages made UPSTREAM_FIXED of a failure that the release has."""

    def fix(now: dict[str, Any], older: dict[str, Any]) -> tuple[str, str]:
        found = regrade([now, older], {CASE.slug: CASE}).documents[0]["verdicts"]["fix"]
        return found["name"], found["reason"]

    patched, older = cell(256, CLEAN), cell(256, torch="2.2.2")
    assert fix(patched, older)[0] == "UPSTREAM_FIXED"
    patched["stack"]["changed"] = ["torch/a.py is not as torch 2.13.0 was installed"]
    name, reason = fix(patched, older)
    assert name == "NOT_FIRING"
    assert reason.endswith("where it fired: here, torch/a.py is not as torch 2.13.0 was installed")
    older["stack"]["changed"] = ["patch.pth runs in every process"]
    assert fix(cell(256, CLEAN), older)[0] == "NOT_FIRING", "nor does one in which a patch made it fire"


def judged(made: dict[str, Any], arm: str) -> Any:
    from repro_matrix.grading.grade import grade

    return grade(CASE, arm, made["arms"][arm]["attempts"][0]["observation"], [CASE])


def test_an_upgrade_compares_like_with_like() -> None:
    alike = compare([cell(256, torch="2.2.2")], [cell(256, CLEAN)])
    assert [change.kind for change in alike.changes if change.arm == "broken"] == ["leaves"]
    other = compare([cell(1024, torch="2.2.2")], [cell(256, CLEAN)])
    assert other.changes == ()
    assert ("some-case/m-fsdp", "broken", "not measured alike: hidden_size 1024 against 256", False) in other.unknown


def test_a_claim_leaves_out_what_was_not_measured_as_the_newest_was() -> None:
    known = case(claims=[{"id": "c", "text": "t", "predicts": [{"arm": "fix", "verdict": "FIX_HOLDS"}]}])
    old, new = cell(1024, torch="2.2.2", started=1.0), cell(256, started=2.0)
    old["verdicts"]["fix"]["name"] = "FIX_BROKEN"
    (found,) = ledger([known], [old, new])
    assert found.status == "upheld"
    assert "left out: arm fix: hidden_size 1024 against 256" in found.detail
    for arm in old["arms"].values():
        arm["settings"] = changed(("model", "config", "hidden_size"), 256)
    assert ledger([known], [old, new])[0].status == "conditional"


def test_documents_differ_by_their_hardware_and_the_facts_that_count() -> None:
    one, other = cell(), cell()
    assert cell_difference(one, other) is None
    other["hardware"] = {**other["hardware"], "facts": {"cpu_fp16": True}}
    assert cell_difference(one, other) is None
    assert cell_difference(one, other, facts=["cpu_fp16"]) is None, "from before facts were stored"
    one["hardware"] = {**one["hardware"], "facts": {"cpu_fp16": False}}
    assert cell_difference(one, other, facts=["cpu_bf16"]) is None
    assert cell_difference(one, other, facts=["cpu_fp16"]) == "fact cpu_fp16 False against True"
    other["hardware"]["accelerator"] = "cuda"
    assert cell_difference(one, other) == "accelerator cpu against cuda"
    assert cell_difference({**one, "ranks": 2}, {**one, "ranks": 4}) == "ranks 2 against 4"
    apart = cell(1024)
    apart["arms"]["broken"] = one["arms"]["broken"]
    assert cell_difference(one, apart, ["broken"]) is None
    assert cell_difference(one, apart) == "arm fix: hidden_size 256 against 1024"


def test_a_machine_is_what_does_not_change_from_day_to_day() -> None:
    one, other = cell(), cell()
    other["hardware"] = {**other["hardware"], "os": "newer kernel", "memory_gb": 7.9}
    assert machine(one) == machine(other)
    for key in ("cpu", "cores", "driver"):
        assert machine(one) != machine({**one, "hardware": {**one["hardware"], key: "other"}})


def test_a_strategy_is_named_and_what_only_one_says_is_no_difference() -> None:
    one = {"strategy": {"slug": "ddp"}, "steps": 2, "device": "cpu"}
    assert "strategy ddp" in str(settings_difference(one, {**one, "strategy": {"slug": "fsdp"}}))
    assert settings_difference(one, {"strategy": {"slug": "ddp"}, "device": "cpu"}) is None
    assert settings_difference({"strategy": {"slug": "ddp"}, "device": "cpu"}, one) is None
    assert "steps 2" in str(settings_difference(one, {**one, "steps": 3}))
