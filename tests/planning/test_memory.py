"""The memory plan: its parts and their order of size, what does not fit, where the reference goes,
deadlines."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from typing import Any

from repro_kit.settings import model_settings

import pytest
from repro_matrix.config import catalog
from repro_matrix.config import selection as overrides
from repro_matrix.config.settings import RunSettings
from repro_matrix.environment.gpus import Gpu
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile
from repro_matrix.environment.stacks import Stack
from repro_matrix.planning import cells as matrix
from repro_matrix.planning.memory import (
    DEADLINE_FACTOR,
    GIB,
    GPU_DEADLINE_S,
    Layout,
    ModelSizes,
    add_memory,
    choose_reference,
    model_sizes,
    plan,
    too_much,
)
from repro_matrix.planning.plan import CellPlan, Planner

CATALOGUE = catalog.load()
STRATEGIES = sorted(CATALOGUE.strategies)
LAPTOP = Machine((), None, "cpu", 4, 16.0, "linux")
ROOMY = replace(LAPTOP, memory_gb=1000.0)
CPU = Profile("cpu", "cpu", "gloo", ())
VERSIONS = {
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "accelerate": "1.15.0",
    "deepspeed": "0.19.8",
}
STACK = Stack("current", sys.executable, VERSIONS)


def sizes_of(model: str, **changes: Any) -> ModelSizes:
    """Return the sizes of a model at full size in bfloat16."""
    settings = model_settings(CATALOGUE.raw["model"][model], "full", "random")
    flags = {name: changes.pop(name) for name in ("lora", "checkpointing") if name in changes}
    settings["config"] |= changes
    found = model_sizes({"model": settings, "flags": {"dtype": "bfloat16", **flags}})
    assert found
    return found


def layout(strategy: str, ranks: int, place: Any = "cpu") -> Layout:
    spec = CATALOGUE.strategies[strategy]
    shards = 1 if spec.invariants.parameters == "whole" else ranks
    assert spec.memory
    return Layout(spec.memory, ranks, shards, place)


QWEN_14B = sizes_of("qwen-14b")
HALF_B = sizes_of("qwen1.5-0.5b")
TWO_LAYERS = sizes_of("llama-2-7b", num_hidden_layers=2)


@pytest.mark.parametrize(
    ("model", "billions"),
    [  # as published, but for norms and biases
        ("llama-2-7b", 6.738),
        ("llama-3.2-1b", 1.236),
        ("qwen-1.8b", 1.837),
        ("qwen-7b", 7.721),
        ("qwen-14b", 14.167),
        ("qwen1.5-0.5b", 0.464),
        ("qwen1.5-1.8b", 1.837),
        ("qwen2.5-0.5b", 0.494),
    ],
)
def test_model_sizes_are_the_published_ones(model: str, billions: float) -> None:
    assert sizes_of(model).parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_model_sizes_with_checkpointing_and_lora_need_less() -> None:
    plain = plan(TWO_LAYERS, layout("ddp", 2), "host").host_node
    assert sizes_of("llama-2-7b", checkpointing=True).activation_bytes(1) < sizes_of(
        "llama-2-7b"
    ).activation_bytes(1)
    assert plan(replace(TWO_LAYERS, trained=0.01), layout("ddp", 2), "host").host_node < plain


@pytest.mark.parametrize(
    ("model", "strategy", "measured_gib"),
    [
        *(
            (HALF_B, *row) for row in zip(STRATEGIES, (3.78, 3.19, 3.66, 3.05, 5.30, 5.39))
        ),  # docs/guides/full-size.md
        (TWO_LAYERS, "fsdp", 4.37),
        (TWO_LAYERS, "tp", 2.99),
    ],
)
def test_plan_is_near_the_measured_peak(
    model: ModelSizes, strategy: str, measured_gib: float
) -> None:
    need = plan(model, layout(strategy, 2), "host")
    assert 0.9 < sum(need.host.values()) / GIB / measured_gib < 1.3


def planned(
    text: str = "train-step",
    strategy: str = "fsdp",
    profile: Profile = CPU,
    machine: Machine = ROOMY,
    deadline: float | None = None,
    scale: Any = "full",
    model: str = "qwen-14b",
) -> CellPlan:
    """The first cell of a case, planned."""
    selection = overrides.parse_overrides(
        [f"case={text}", f"model={model}", f"strategy={strategy}"]
    )
    cells = matrix.place(
        CATALOGUE, matrix.enumerate_cells(CATALOGUE, selection)[:1], [profile], auto=False
    )[0]
    stacks = {name: replace(STACK, name=name) for name in ("current", "torch2.2-tf4.39")}
    settings = RunSettings(scale=scale, deadline=deadline)
    (cell,) = Planner(CATALOGUE, settings, {profile.name: profile}, machine, stacks, {}).plan(cells)
    return add_memory(cell, CATALOGUE, machine, deadline)[0]


def gpus(count: int, gib: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(index, f"A100-{gib}GB", f"GPU-{index}", gib * 1024) for index in range(count))


def test_case_that_does_not_train_needs_no_gradients() -> None:
    roomy = replace(LAPTOP, memory_gb=1e6)
    trained, generated = (
        planned(case, machine=roomy).variants[0].memory
        for case in ("train-step", "qwen15-fsdp-kv-cache")
    )
    assert trained and generated and "gradients and copies" in trained.host
    assert not generated.host.get("gradients and copies") and generated.host != trained.host


@pytest.mark.parametrize(
    ("strategy", "profile", "machine", "texts"),
    [
        (
            "fsdp",
            CPU,
            LAPTOP,
            ["GiB on the host for 2 ranks", "this machine has 16", "weights 13.1"],
        ),
        ("fsdp", CPU, replace(ROOMY, free_gb=8.0), ["has 1000, of which 8 are free"]),
        (
            "ddp",
            Profile("gpu8", "cuda", "nccl", gpus(8, 40)),
            replace(ROOMY, gpus=gpus(8, 40)),
            ["GiB a rank on the device (", "gradients and copies 52.7", "A100-40GB has 40"],
        ),
    ],
)
def test_add_memory_skips_what_does_not_fit_with_the_numbers(
    strategy: str, profile: Profile, machine: Machine, texts: list[str]
) -> None:
    found = planned(strategy=strategy, profile=profile, machine=machine)
    assert (
        found.variants[0].skip
        and found.variants[0].skip.kind == "memory"
        and found.variants[0].memory
    )
    assert all(text in str(found.skipped) for text in texts), found.skipped


def test_add_memory_keeps_what_fits() -> None:
    variant = planned().variants[0]
    assert variant.skipped is None and variant.settings["reference"] == "host" and variant.memory
    rank = sum(variant.memory.host.values())
    assert variant.memory.to_json()["host_rank_mb"] == round(rank / 2**20, 1)
    assert rank <= variant.memory.host_node <= 2 * rank


@pytest.mark.parametrize("missing", ["strategy", "model"])
def test_add_memory_says_what_it_does_not_know(missing: str) -> None:
    known, cell = CATALOGUE, planned(scale="tiny")
    variant = planned().variants[0]
    if missing == "strategy":
        silent = CATALOGUE.strategies["fsdp"].model_copy(update={"memory": None})
        known = replace(CATALOGUE, strategies={**CATALOGUE.strategies, "fsdp": silent})
    else:
        variant = replace(variant, settings=copy.deepcopy(variant.settings))
        variant.settings["model"]["config"]["num_experts"] = 8
    bare = replace(cell, variants=(replace(variant, memory=None, skip=None),))
    found, notes = add_memory(bare, known, LAPTOP)
    assert found == bare and len(notes) == 1
    assert f"{missing} {'fsdp' if missing == 'strategy' else 'qwen-14b'}" in notes.pop()


def test_choose_reference_takes_the_first_that_fits() -> None:
    way = layout("fsdp", 8, "cuda")
    for gib, host, expected in (
        (80, 1000, "device"),
        (32, 1000, "host"),
        (32, 80, "turns"),
        (32, 50, "layers"),
    ):
        profile = Profile("gpu8", "cuda", "nccl", gpus(8, gib))
        machine = replace(LAPTOP, memory_gb=float(host))
        found, reference = choose_reference(QWEN_14B, way, profile, machine)
        assert reference == expected and too_much(found, 8, profile, machine) is None
    assert "on the host for 8 ranks" in str(
        too_much(found, 8, profile, replace(machine, memory_gb=20.0))
    )


def test_deadline_follows_from_the_plan_unless_the_user_sets_one() -> None:
    variant = planned().variants[0]
    assert variant.deadline > 3600 > CATALOGUE.cases["train-step"].launch.deadline
    assert variant.expected_s and variant.expected_s * DEADLINE_FACTOR["cpu"] == variant.deadline
    assert planned(deadline=77.0).variants[0].deadline == 77.0
    node = {
        "profile": Profile("gpu8", "cuda", "nccl", gpus(8, 80)),
        "machine": replace(ROOMY, gpus=gpus(8, 80)),
    }
    assert planned(**node).variants[0].deadline == GPU_DEADLINE_S
    assert planned(**node, deadline=4000.0).variants[0].deadline == 4000, (
        "the user's own is not capped"
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", [name for name, spec in CATALOGUE.hardware.items() if spec.gpus])
def test_full_size_on_a_profile_fits_in_memory_or_is_skipped_and_never_runs_for_hours(
    name: str, strategy: str
) -> None:
    spec = CATALOGUE.hardware[name]
    for gib in (16, 40, 80):
        listed = gpus(spec.gpus, gib)
        profile = Profile(name, "cuda", str(spec.backend), listed, spec.shared)
        cell = planned(strategy=strategy, profile=profile, machine=replace(ROOMY, gpus=listed))
        for variant in cell.variants:
            assert variant.deadline <= GPU_DEADLINE_S
            if variant.memory and not variant.skipped:
                sharing = variant.world_size if spec.shared else 1
                assert variant.memory.device_rank * sharing <= gib * GIB


def test_ranks_that_share_a_gpu_need_its_memory_together() -> None:
    """Two ranks of Qwen-14B under FSDP: 50 GiB each fit two GPUs, not one that they share."""
    for profile, fits in (
        (Profile("gpu2", "cuda", "nccl", gpus(2, 80)), True),
        (Profile("shared", "cuda", "gloo", gpus(1, 80), shared=True), False),
    ):
        need, _ = choose_reference(QWEN_14B, layout("fsdp", 2, "cuda"), profile, ROOMY)
        reason = too_much(need, 2, profile, ROOMY)
        assert (reason is None) == fits, reason
        assert fits or "for 2 ranks" in str(reason)


@pytest.mark.parametrize(
    ("backend", "shared", "scale", "share_gib"),
    [
        ("gloo", True, "tiny", 4.4),  # of two ranks, by what is known of any tiny model
        ("nccl", True, "tiny", 4.4),
        ("nccl", False, "tiny", 0),
    ],
)
def test_attempts_whose_memory_is_known_may_share_a_gpu(
    backend: str, shared: bool, scale: Any, share_gib: float
) -> None:
    profile = Profile("gpu1", "cuda", backend, gpus(2 - shared, 80), shared=shared)
    variant = planned(strategy="ddp", profile=profile, scale=scale).variants[0]
    assert variant.skipped is None and variant.share_mb == pytest.approx(share_gib * 1024, abs=1)
    known = planned(strategy="ddp", profile=profile, model="qwen1.5-0.5b").variants[0]
    assert known.memory and (
        not share_gib or known.share_mb == pytest.approx(2 * known.memory.device_rank / 2**20, 1)
    )
