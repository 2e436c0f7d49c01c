"""Which measurements may be compared: settings, machines, capabilities, releases."""

from __future__ import annotations

import copy
import importlib
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import case, document, observation, ok
from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import Capability
from repro_matrix.grading.comparability import (
    capability_difference,
    depends_on_capabilities,
    machine,
    recorded_capabilities,
    same_release,
    settings_difference,
)
from repro_matrix.paths import REPROS

SETTINGS: dict[str, Any] = {
    "case": "some-case", "variant": "unfixed",
    "model": {"slug": "m", "title": "M", "config": {"hidden_size": 256, "layers": 2}, "scale": "tiny",
              "weights": "random"},
    "strategy": {"slug": "fsdp", "title": "FSDP", "options": {"wrap": "layer"}}, "flags": {"call": "inner"},
    "pass_criteria": {}, "world_size": 2, "tp_size": 1, "seed": 0, "steps": 3, "device": "cpu", "backend": "gloo",
}  # fmt: skip
DECIDING = [
    ("model", "slug"), ("model", "scale"), ("model", "weights"), ("model", "config", "hidden_size"),
    ("model", "config", "new"), ("strategy", "slug"), ("strategy", "options", "wrap"), ("flags", "call"),
    ("world_size",), ("tp_size",), ("seed",), ("steps",), ("device",), ("backend",),
]  # fmt: skip
# A flag or option that only one has did not exist for the other, and was at its default there.
OTHERS = [("case",), ("model", "title"), ("strategy", "title"), ("pass_criteria",), ("flags", "new"),
          ("strategy", "options", "new")]  # fmt: skip


def changed(*paths: tuple[str, ...]) -> Any:
    made = copy.deepcopy(SETTINGS)
    for path in paths:
        inner = made
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = "other"
    return made


@pytest.mark.parametrize("path", [*DECIDING, *OTHERS])
def test_settings_difference_names_the_setting(path: tuple[str, ...]) -> None:
    difference = settings_difference(changed(), changed(path))
    assert (difference is not None) is (path in DECIDING)
    assert difference is None or (path[-1].replace("slug", "") in difference and difference.endswith("against other"))


@given(st.sets(st.sampled_from(DECIDING)), st.sets(st.sampled_from(DECIDING)))
def test_settings_difference_is_symmetric(one: set[Any], other: set[Any]) -> None:
    left, right = changed(*one), changed(*other)
    assert settings_difference(left, left) is settings_difference(left, {}) is settings_difference({}, left) is None
    assert (settings_difference(left, right) is None) == (settings_difference(right, left) is None) == (one == other)


def test_machine_ignores_what_changes_from_day_to_day() -> None:
    def of(**hardware: Any) -> dict[str, Any]:
        made: Any = document({})
        return machine({**made, "hardware": {**made["hardware"], **hardware}})

    gpus = [{"name": "B", "uuid": "2", "memory_mb": 1}, {"name": "A", "uuid": "1", "memory_mb": 1}]
    here = of(gpus=gpus, memory_gb=1.0)
    assert here == of(gpus=gpus[::-1], memory_gb=2.0) and here["gpus"] == ["A", "B"]
    for other in ({"cpu": "x"}, {"cores": 9}, {"driver": "2"}, {"gpus": gpus[:1]}, {"accelerator": "cuda"}):
        assert of(**{"gpus": gpus, **other}) != here


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("2.2.0", "2.2.0", True), ("2.2.0+cu121", "2.2.0", True), ("2.2.0+cu121", "2.2.0+cpu", False),
     ("2.2.0", "2.2.1", False), ("2.2.0+cpu", "2.2.1", False), ("2.2.0+cpu", "2.2.1+cpu", False)],
)  # fmt: skip
def test_same_release_ignores_a_build_that_only_one_names(one: str, other: str, same: bool) -> None:
    assert same_release(one, other) is same is same_release(other, one)


# -- capabilities


def test_recorded_capability_is_the_same_on_all_ranks() -> None:
    def recording(*facts: dict[str, Any]) -> dict[str, Any]:
        ranks = [ok(number) for number in range(len(facts))]
        for rank, each in zip(ranks, facts):
            rank["record"]["facts"] = {"machine": each}
        return observation(*ranks)

    mixed = recording({"cpu_fp16": True, "cpu_bf16": True}, {"cpu_fp16": False, "cpu_bf16": True})
    mixed["ranks"].append(ok(2, record=None))
    stored: Any = document({"unfixed": [("reproduced", recording({"cpu_bf16": True}, {}))], "fix": [("passed", mixed)]})
    assert recorded_capabilities(stored) == {"cpu_bf16": True}


@given(st.dictionaries(st.sampled_from(["cpu_fp16", "cpu_bf16"]), st.booleans()))
def test_unknown_capability_is_never_the_same(facts: dict[str, bool]) -> None:
    assert (capability_difference(["cpu_fp16", "cpu_bf16"], facts, facts) is None) == (len(facts) == 2)
    assert capability_difference([], facts, {}) is None


def test_capability_difference_names_the_first() -> None:
    assert capability_difference(["a", "b"], {"a": True, "b": "9.0"}, {"a": True, "b": "8.0"}) == "b 9.0 against 8.0"
    assert capability_difference(["a"], {}, {"a": False}) == "a unknown against False"


def test_variant_depends_on_the_capabilities_of_its_case_and_its_own() -> None:
    fix = {"flags": {"call": "root"}, "depends_on_capabilities": ["cpu_fp16"]}
    variants = {"unfixed": {}, "fix": fix, "other-fix": {}}
    known = case(depends_on_capabilities=["cpu_bf16", "cpu_fp16"], variants=variants)
    assert depends_on_capabilities(known, "fix") == depends_on_capabilities(known, "gone") == ["cpu_bf16", "cpu_fp16"]
    assert depends_on_capabilities(case(variants=variants), "fix") == ["cpu_fp16"]
    assert depends_on_capabilities(case(variants=variants), "unfixed") == []
    with pytest.raises(ValueError, match="cpu_fp16"):
        Case.model_validate({**case().model_dump(), "depends_on_capabilities": ["cpu_fp61"]})


def test_kit_records_every_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPROS))
    torch, machine_facts = importlib.import_module("torch"), importlib.import_module("repro_kit.machine").machine_facts
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert machine_facts().keys() == set(get_args(Capability))
    assert machine_facts()["gpu_capability"] == "9.0" and isinstance(machine_facts()["cpu_fp16"], bool)
