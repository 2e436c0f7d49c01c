"""The memory plan: its parts and their order of size, what does not fit, where the reference goes,
deadlines."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
from repro_matrix.config import catalog
from repro_matrix.config import selection as overrides
from repro_matrix.config.settings import RunSettings
from repro_matrix.environment.gpus import Gpu
from repro_matrix.environment.machine import Machine, Profile
from repro_matrix.environment.stacks import Stack
from repro_matrix.paths import PACKAGE, REPROS
from repro_matrix.planning import cells as matrix
from repro_matrix.planning.memory import (
    DEADLINE_FACTOR,
    GIB,
    GPU_DEADLINE_S,
    Layout,
    ModelSizes,
    Phase,
    add_memory,
    choose_reference,
    plan,
    too_much,
)
from repro_matrix.planning.plan import CellPlan, Planner

WORKER = PACKAGE / "launch" / "worker" / "model_facts.py"
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


QWEN_14B = ModelSizes(
    parameters=14167290880,
    trainable=14167290880,
    bytes=2,
    buffers=1000,
    tied=False,
    layers=40,
    layer=315253760,
    root=1557140480,
    largest=778570240,
    split=13883945063,
    token=12474368,
)
HALF_B = ModelSizes(
    parameters=463987712,
    trainable=463987712,
    bytes=2,
    buffers=128,
    tied=True,
    layers=24,
    layer=12850176,
    root=155583488,
    largest=155582464,
    split=463937536,
    token=3101184,
)
TWO_LAYERS = ModelSizes(
    parameters=666914816,
    trainable=666914816,
    bytes=2,
    buffers=256,
    tied=False,
    layers=2,
    layer=202383360,
    root=262148096,
    largest=131072000,
    split=666894336,
    token=809984,
)


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
    assert 0.94 < plan(model, Layout(strategy, 2)).host_rank / GIB / measured_gib < 1.2


def planned(
    text: str = "train-step",
    strategy: str = "fsdp",
    profile: Profile = CPU,
    machine: Machine = ROOMY,
    deadline: float | None = None,
    scale: Any = "full",
    facts: ModelSizes | None = QWEN_14B,
) -> CellPlan:
    """The first cell of a case, whose model is Qwen-14B at full size."""
    selection = overrides.parse_overrides(
        [f"case={text}", "model=qwen-14b", f"strategy={strategy}"]
    )
    cells = matrix.place(
        CATALOGUE, matrix.enumerate_cells(CATALOGUE, selection)[:1], [profile], auto=False
    )[0]
    stacks = {name: replace(STACK, name=name) for name in ("current", "torch2.2-tf4.39")}
    settings = RunSettings(scale=scale, deadline=deadline)
    (cell,) = Planner(CATALOGUE, settings, {profile.name: profile}, machine, stacks, {}).plan(cells)
    return add_memory(cell, CATALOGUE.cases[text], machine, lambda variant: facts, deadline)


def gpus(count: int, gib: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(index, f"A100-{gib}GB", f"GPU-{index}", gib * 1024) for index in range(count))


@pytest.mark.parametrize(
    ("case", "phases"),
    [
        ("train-step", {"training", "loading"}),
        ("fsdp-tied-embeddings", {"training"}),  # nothing of it is loaded
        ("qwen15-fsdp-kv-cache", {"forward"}),
        ("fsdp-generate", {"forward"}),
    ],
)
def test_add_memory_plans_the_phases_that_a_case_has(case: str, phases: set[str]) -> None:
    memory = planned(case, machine=replace(LAPTOP, memory_gb=1e6)).variants[0].memory
    assert memory and {phase.name for phase in memory.host} - {"reference", "drawing"} == phases


@pytest.mark.parametrize(
    ("strategy", "profile", "machine", "texts"),
    [
        (
            "fsdp",
            CPU,
            LAPTOP,
            ["GiB on the host for 2 ranks", "this machine has 16", "weights 13.19"],
        ),
        ("fsdp", CPU, replace(ROOMY, free_gb=8.0), ["has 1000, of which 8 are free"]),
        (
            "ddp",
            Profile("gpu8", "cuda", "nccl", gpus(8, 40)),
            replace(ROOMY, gpus=gpus(8, 40)),
            ["GiB a rank on the device (", "buckets", "A100-40GB has 40"],
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


def test_add_memory_keeps_what_fits_and_what_is_unknown() -> None:
    variant = planned().variants[0]
    assert variant.skipped is None and variant.settings["reference"] == "host" and variant.memory
    fullest = max(variant.memory.host, key=Phase.rank)
    assert variant.memory.to_json()["host_rank_mb"] == round(sum(fullest.parts.values()) / 2**20, 1)
    assert fullest.rank() <= variant.memory.host_node <= 2 * fullest.rank()
    bare = replace(planned(machine=LAPTOP), variants=(replace(variant, memory=None, skip=None),))
    assert add_memory(bare, CATALOGUE.cases["train-step"], LAPTOP, lambda variant: None) == bare


def test_choose_reference_takes_the_first_that_fits() -> None:
    layout = Layout("fsdp", 8, "cuda")
    for gib, host, expected in (
        (80, 1000, "device"),
        (32, 1000, "host"),
        (32, 80, "turns"),
        (32, 50, "layers"),
    ):
        profile = Profile("gpu8", "cuda", "nccl", gpus(8, gib))
        machine = replace(LAPTOP, memory_gb=float(host))
        found, reference = choose_reference(QWEN_14B, layout, profile, machine)
        assert reference == expected and too_much(found, profile, machine) is None
    assert "on the host for 8 ranks" in str(
        too_much(found, profile, replace(machine, memory_gb=20.0))
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
        need, _ = choose_reference(QWEN_14B, Layout("fsdp", 2, "cuda"), profile, ROOMY)
        reason = too_much(need, profile, ROOMY)
        assert (reason is None) == fits, reason
        assert fits or "for 2 ranks" in str(reason)


@pytest.mark.parametrize(
    ("backend", "shared", "scale", "share_gib"),
    [
        ("gloo", True, "tiny", 4.4),  # of two ranks, by what is known of any tiny model
        ("gloo", True, "full", 0),  # nobody knows
        ("nccl", True, "tiny", 4.4),
        ("nccl", False, "tiny", 0),
    ],
)
def test_attempts_whose_memory_is_known_may_share_a_gpu(
    backend: str, shared: bool, scale: Any, share_gib: float
) -> None:
    profile = Profile("gpu1", "cuda", backend, gpus(2 - shared, 80), shared=shared)
    variant = planned(strategy="ddp", profile=profile, scale=scale, facts=None).variants[0]
    assert variant.skipped is None and variant.share_mb == pytest.approx(share_gib * 1024, abs=1)
    known = planned(strategy="ddp", profile=profile, scale=scale, facts=HALF_B).variants[0]
    assert known.memory and (
        not share_gib or known.share_mb == pytest.approx(2 * known.memory.device_rank / 2**20, 1)
    )


# -- what the stack reports of the real models


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """worker/model_facts.py, with remote code copied to a folder of the test."""
    pytest.importorskip("transformers")
    import transformers.dynamic_module_utils as dynamic

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.syspath_prepend(str(WORKER.parent))
        patch.syspath_prepend(str(REPROS))
        import model_facts

        yield model_facts
        sys.modules.pop("model_facts", None)


def request(name: str, scale: str = "full", **changes: Any) -> dict[str, Any]:
    from repro_kit.settings import model_settings

    model = model_settings(CATALOGUE.raw["model"][name], scale, "random")
    usual = {"dtype": "bfloat16", "lora": False, "checkpointing": False}
    return {"model": model, **usual, **changes}


def test_model_facts_have_the_published_number_of_parameters(worker: Any) -> None:
    found, config = (
        worker.facts(request("qwen1.5-0.5b")),
        CATALOGUE.raw["model"]["qwen1.5-0.5b"]["config"],
    )
    assert (
        found["parameters"]
        == found["trainable"]
        == found["layers"] * found["layer"] + found["root"]
        == 463_987_712
    )
    assert (
        found["layers"] == config["num_hidden_layers"]
        and found["tied"] == config["tie_word_embeddings"]
    )
    assert found["largest"] == config["vocab_size"] * config["hidden_size"]
    assert 0.99 * found["parameters"] < found["split"] < found["parameters"]
    assert ModelSizes(**found) == HALF_B


def test_model_facts_with_checkpointing_and_lora_need_less(worker: Any) -> None:
    pytest.importorskip("peft")
    changes: list[dict[str, Any]] = [{}, {"checkpointing": True}, {"lora": True}]
    plain, saving, lora = (worker.facts(request("llama-2-7b", "tiny", **each)) for each in changes)
    assert saving["token"] < plain["token"]
    assert 0 < lora["trainable"] < lora["parameters"] / 20
