"""Like with like: which measurements may be compared, and the capabilities of the machines."""

from __future__ import annotations

import copy
import importlib
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import case, document, failed, observation, ok
from repro_matrix.config import catalog as catalogue
from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import Capability
from repro_matrix.grading.comparability import (
    capability_difference,
    depends_on_capabilities,
    machine,
    recorded_capabilities,
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
    ("strategy", "slug"), ("strategy", "options", "wrap"), ("flags", "call"), ("world_size",), ("tp_size",), ("seed",),
    ("steps",), ("device",), ("backend",),
]  # fmt: skip


def changed(*paths: tuple[str, ...]) -> dict[str, Any]:
    made = copy.deepcopy(SETTINGS)
    for path in paths:
        inner = made
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = "other"
    return made


@pytest.mark.parametrize("path", DECIDING)
def test_deciding_settings_differ(path: tuple[str, ...]) -> None:
    difference = settings_difference(SETTINGS, changed(path))  # type: ignore[arg-type]
    assert difference and path[-1].replace("slug", "") in difference and difference.endswith("against other")


@pytest.mark.parametrize(
    "path",
    [("case",), ("model", "title"), ("strategy", "title"), ("pass_criteria",), ("flags", "new"),
     ("strategy", "options", "new")],
)  # fmt: skip
def test_other_settings_and_new_flags_do_not_differ(path: tuple[str, ...]) -> None:
    """A flag or option that only one has did not exist for the other, and was at its default there."""
    assert settings_difference(SETTINGS, changed(path)) is None  # type: ignore[arg-type]


def test_new_key_of_the_models_configuration_differs_and_empty_settings_do_not() -> None:
    assert settings_difference(SETTINGS, changed(("model", "config", "new"))) == "new None against other"  # type: ignore[arg-type]
    assert settings_difference(SETTINGS, {}) is None and settings_difference({}, SETTINGS) is None  # type: ignore[arg-type]


@given(st.sets(st.sampled_from(DECIDING)), st.sets(st.sampled_from(DECIDING)))
def test_difference_is_symmetric(one: set[Any], other: set[Any]) -> None:
    left: Any = changed(*one)
    right: Any = changed(*other)
    assert settings_difference(left, left) is None
    assert (settings_difference(left, right) is None) == (settings_difference(right, left) is None) == (one == other)


def cell(**hardware: Any) -> Any:
    made = document({"unfixed": [("reproduced", observation(failed(0)))], "fix": [("passed", observation(ok(0)))]})
    for variant in made["variants"].values():
        variant["settings"] = copy.deepcopy(SETTINGS)
    made["hardware"] |= hardware
    return made


def test_machine_ignores_what_changes_from_day_to_day() -> None:
    gpus = [{"name": "B", "uuid": "2", "memory_mb": 1}, {"name": "A", "uuid": "1", "memory_mb": 1}]
    here = machine(cell(gpus=gpus, memory_gb=1.0))
    assert here == machine(cell(gpus=gpus[::-1], memory_gb=2.0)) and here["gpus"] == ["A", "B"]
    for other in ({"cpu": "x"}, {"cores": 9}, {"driver": "2"}, {"gpus": gpus[:1]}, {"accelerator": "cuda"}):
        assert machine(cell(gpus=gpus, **other) if "gpus" not in other else cell(**other)) != here


# -- capabilities


def recording(*facts: dict[str, Any]) -> dict[str, Any]:
    """An observation whose ranks recorded these capabilities."""
    ranks = [ok(number) for number in range(len(facts))]
    for rank, each in zip(ranks, facts):
        rank["record"]["facts"] = {"machine": each}
    return observation(*ranks)


def test_capability_is_what_all_ranks_recorded() -> None:
    mixed = recording({"cpu_fp16": True, "cpu_bf16": True}, {"cpu_fp16": False, "cpu_bf16": True})
    mixed["ranks"].append(ok(2, record=None))
    stored: Any = document({"unfixed": [("reproduced", recording({"cpu_bf16": True}, {}))], "fix": [("passed", mixed)]})
    assert recorded_capabilities(stored) == {"cpu_bf16": True}


@given(st.dictionaries(st.sampled_from(["cpu_fp16", "cpu_bf16"]), st.booleans()))
def test_unknown_capability_is_never_the_same(facts: dict[str, bool]) -> None:
    assert (capability_difference(["cpu_fp16", "cpu_bf16"], facts, facts) is None) == (len(facts) == 2)
    assert capability_difference([], facts, {}) is None


def test_first_different_capability_is_named() -> None:
    assert capability_difference(["a", "b"], {"a": True, "b": "9.0"}, {"a": True, "b": "8.0"}) == "b 9.0 against 8.0"
    assert capability_difference(["a"], {}, {"a": False}) == "a unknown against False"


def test_variant_depends_on_the_cases_capabilities_and_its_own() -> None:
    variants = {
        "unfixed": {},
        "fix": {"flags": {"call": "root"}, "depends_on_capabilities": ["cpu_fp16"]},
        "other-fix": {},
    }
    known = case(depends_on_capabilities=["cpu_bf16", "cpu_fp16"], variants=variants)
    assert depends_on_capabilities(known, "fix") == depends_on_capabilities(known, "gone") == ["cpu_bf16", "cpu_fp16"]
    assert (
        depends_on_capabilities(case(variants=variants), "fix") == ["cpu_fp16"]
        and depends_on_capabilities(case(variants=variants), "unfixed") == []
    )
    real = catalogue.load().cases["device-map-distributed"]
    assert (
        depends_on_capabilities(real, "fp16-zero2-no-map") == ["cpu_fp16"]
        and depends_on_capabilities(real, "unfixed") == []
    )


def test_capability_that_no_machine_reports_is_refused() -> None:
    with pytest.raises(ValueError, match="cpu_fp16"):
        Case.model_validate({**case().model_dump(), "depends_on_capabilities": ["cpu_fp61"]})


def test_every_capability_is_one_that_the_kit_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPROS))
    torch, machine_facts = importlib.import_module("torch"), importlib.import_module("repro_kit.machine").machine_facts
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert machine_facts().keys() == set(get_args(Capability))
    assert machine_facts()["gpu_capability"] == "9.0" and isinstance(machine_facts()["cpu_fp16"], bool)
