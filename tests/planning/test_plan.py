"""What is planned, and what is skipped for which reason. Nothing is launched."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from repro_kit.settings import resolve

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.config import catalog as catalogue
from repro_matrix.config import selection as overrides
from repro_matrix.config.settings import RunSettings, Scale, compose_run
from repro_matrix.environment.gpus import Gpu
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile, settle_all
from repro_matrix.errors import ConfigError
from repro_matrix.planning import cells as matrix
from repro_matrix.planning.cells import place, unmet_requirement
from repro_matrix.planning.plan import CellPlan, Planner

CATALOGUE = catalogue.load()
CPU = Machine((), None, "cpu", 2, 24.0, "linux")
CPU_PROFILE = Profile("cpu", "cpu", "gloo")


def gpus(count: int, name: str = "NVIDIA A100-SXM4-80GB") -> tuple[Gpu, ...]:
    return tuple(Gpu(index, name, f"GPU-{index}", 81920) for index in range(count))


@dataclass
class FakeStack:
    name: str = "current"
    key: str = "fake"
    changed: tuple[str, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(
        default_factory=lambda: {
            "torch": "2.13.0+cpu",
            "transformers": "5.23.0",
            "accelerate": "1.15.0",
            "peft": "0.21.2",
            "deepspeed": "0.19.8",
        }
    )


def plans(
    *texts: str,
    settings: RunSettings | None = None,
    profile: Profile = CPU_PROFILE,
    stack: FakeStack | str | None = None,
    machine: Machine = CPU,
    known: catalogue.Catalogue = CATALOGUE,
) -> list[CellPlan]:
    settings = settings or RunSettings()
    cells = place(known, matrix.enumerate_cells(known, overrides.parse(texts)), [profile], auto=False).cells
    stacks = {"current": stack or FakeStack()}
    return Planner(known, settings, {profile.name: profile}, machine, stacks, {}).plan(cells)


NORM = "case=qwen15-fsdp-norm-shard"


def test_plan_gives_every_variant_its_settings() -> None:
    plan = plans(NORM)[0]
    assert [variant.variant for variant in plan.variants] == list(CATALOGUE.cases["qwen15-fsdp-norm-shard"].variants)
    by_name = {variant.variant: variant for variant in plan.variants}
    assert by_name["unfixed"].settings["flags"]["call"] == "inner"
    assert by_name["root-call"].settings["flags"]["call"] == "root"
    assert by_name["unfixed"].settings["model"]["config"]["hidden_size"] == 1024


def test_plan_fewer_gpus_than_ranks_is_skipped() -> None:
    profile = Profile("gpu1", "cuda", "nccl", gpus(1))
    plan = plans(NORM, profile=profile)[0]
    assert plan.skipped and "needs 2 GPUs" in plan.skipped and "has 1" in plan.skipped


def test_plan_more_ranks_than_fit_raises() -> None:
    profile = Profile("gpu2", "cuda", "nccl", gpus(2))
    assert "needs 4 GPUs; hardware gpu2 has 2" in str(plans(NORM, "ranks=4", profile=profile)[0].skipped)
    with pytest.raises(ConfigError, match=r"ranks=4096.*at most"):
        plans(NORM, "ranks=4096")


def test_plan_missing_package_is_skipped() -> None:
    without = FakeStack(versions={"torch": "2.13.0"})
    plan = plans("case=train-step", "strategy=zero3", "model=qwen1.5-0.5b", stack=without)[0]
    assert plan.skipped and "deepspeed" in plan.skipped


def test_plan_needs_what_the_script_imports() -> None:
    alone = FakeStack(versions={"torch": "2.11.0+cu130"})
    found = plans("case=train-step", "strategy=ddp", stack=alone)
    assert {plan.cell.model for plan in found} > {"qwen-7b", "llama-2-7b"}
    assert all("transformers" in str(plan.skipped) for plan in found)
    assert "transformers, which it does not have" in str(
        plans("case=train-step", "model=qwen-7b", stack=alone)[0].skipped
    )


def test_plan_missing_stack_is_skipped() -> None:
    plan = plans(NORM, stack="no interpreter at /x")[0]
    assert plan.skipped and "no interpreter at /x" in plan.skipped


def test_plan_skipped_first_variant_skips_the_cell() -> None:
    profile = Profile("gpu1", "cuda", "nccl", gpus(1))
    assert all(variant.skipped for plan in plans(profile=profile) for variant in plan.variants if plan.skipped)


@given(st.sampled_from(["torch>=2.4", "torch<2.4", "torch==2.13.0", "transformers<5", "colossalai", "torch"]))
def test_unmet_requirement_names_the_requirement(text: str) -> None:
    unmet = unmet_requirement(text, FakeStack().versions)
    assert (unmet is None) == (text in ("torch>=2.4", "torch==2.13.0", "torch"))
    assert unmet is None or text in unmet


def test_fingerprint_covers_everything_that_a_result_depends_on() -> None:
    def prints(**changes: object) -> list[str]:
        return [variant.fingerprint for variant in plans(NORM, settings=replace(RunSettings(), **changes))[0].variants]

    assert prints() == prints() == prints(jobs=7, keep_files=True)
    assert set(prints()).isdisjoint(prints(seed=1))
    newer = FakeStack(versions={**FakeStack().versions, "torch": "2.14.0"})
    assert set(prints()).isdisjoint(variant.fingerprint for variant in plans(NORM, stack=newer)[0].variants)
    edited, again = FakeStack(key="one", changed=("torch/a.py",)), FakeStack(key="two", changed=("torch/a.py",))
    apart = [{variant.fingerprint for variant in plans(NORM, stack=stack)[0].variants} for stack in (edited, again)]
    assert set(prints()).isdisjoint(apart[0]) and apart[0].isdisjoint(apart[1]), "a patched environment, and its next"
    case = CATALOGUE.cases["qwen15-fsdp-norm-shard"]
    variants = {**case.variants, "summon": case.variants["summon"].model_copy(update={"env": {"NCCL_DEBUG": "INFO"}})}
    other = replace(CATALOGUE, cases={**CATALOGUE.cases, case.slug: case.model_copy(update={"variants": variants})})
    changed = [variant.fingerprint for variant in plans(NORM, known=other)[0].variants]
    assert [variant for variant, one, two in zip(case.variants, prints(), changed) if one != two] == ["summon"]


NODES = [pytest.param(8, "NVIDIA A100-SXM4-80GB", id="a100x8"), pytest.param(4, "NVIDIA H200", id="gpu4")]


def on(count: int, name: str, *texts: str) -> list[CellPlan]:
    """What `auto` plans on a node with so many GPUs."""
    machine = replace(CPU, gpus=gpus(count, name))
    profiles = settle_all(["auto"], CATALOGUE.hardware, machine)
    cells = place(CATALOGUE, matrix.enumerate_cells(CATALOGUE, overrides.parse(texts)), profiles, auto=True).cells
    by_name = {profile.name: profile for profile in profiles}
    return Planner(CATALOGUE, RunSettings(), by_name, machine, {"current": FakeStack()}, {}).plan(cells)


@pytest.mark.parametrize("count, name", NODES)
def test_plan_on_a_large_node_keeps_each_variants_ranks(count: int, name: str) -> None:
    for plan in on(count, name):
        case = CATALOGUE.cases[plan.cell.case]
        assert plan.cell.ranks == case.launch.world_size
        for variant in plan.variants:
            assert variant.world_size == (case.variants[variant.variant].world_size or case.launch.world_size)
            if variant.settings["strategy"]["slug"] == "tp":
                assert variant.settings["tp_size"] == variant.world_size


def test_plan_rank_sweep_keeps_pinned_ranks() -> None:
    eight = plans(NORM, "ranks=8")[0]
    sizes = {variant.variant: variant.world_size for variant in eight.variants}
    assert sizes["unfixed"] == sizes["ddp"] == 8 and sizes["three-ranks"] == 3 and sizes["four-ranks"] == 4
    four = {variant.variant: variant.skipped for variant in plans(NORM, "ranks=4")[0].variants}
    assert four["four-ranks"] and four["three-ranks"] is None
    pinned = plans("case=tp-heads-not-divisible", "ranks=8")[0]
    assert pinned.skipped and "needs exactly 4" in pinned.skipped


@given(st.sampled_from(sorted(CATALOGUE.cases)), st.sampled_from([1, 2, 3, 4, 8]))
def test_plan_too_few_ranks_are_skipped(case: str, ranks: int) -> None:
    found, own = CATALOGUE.cases[case], CATALOGUE.cases[case].launch.world_size
    for plan in plans(f"case={case}", f"ranks={ranks}"):
        if ranks < found.min_ranks:
            assert plan.skipped == f"needs at least {found.min_ranks} ranks; ranks={ranks}"
        elif ranks != own and not found.supports_other_world_sizes:
            assert plan.skipped and "does not declare `scales`" in plan.skipped
        for variant in plan.variants:
            assert variant.skipped or variant.world_size == (found.variants[variant.variant].world_size or ranks)


@pytest.mark.parametrize(
    ("words", "tp_size", "why"),
    [
        (("strategy=tp",), 4, "over all 2 ranks here; tp_size=4"),
        (("strategy=tp",), 1, "over all 2 ranks here; tp_size=1"),
        (("strategy=ddp",), 2, "strategy ddp has no tensor parallelism"),
        (("strategy=tp",), 2, None),
        (("strategy=tp", "ranks=4"), 4, None),
        (("strategy=tp", "ranks=4"), None, None),
    ],
)
def test_plan_tp_size_must_be_the_measured_one(words: tuple[str, ...], tp_size: int | None, why: str | None) -> None:
    (found,) = plans("case=train-step", "model=qwen1.5-0.5b", *words, settings=RunSettings(tp_size=tp_size))
    assert found.skipped is None if why is None else why in str(found.skipped)


def test_plan_indivisible_heads_are_skipped() -> None:
    plan = plans("case=train-step", "strategy=tp", "model=qwen2.5-0.5b", "ranks=8")[0]
    assert plan.skipped == "14 attention heads do not divide over 8 ranks"
    assert plans("case=train-step", "strategy=tp", "model=qwen1.5-1.8b", "ranks=8")[0].skipped is None
    assert plans("case=tp-heads-not-divisible")[0].skipped is None  # that is what it is about


def test_plan_counts_devices_apart_from_ranks() -> None:
    by_name = {variant.variant: variant for variant in plans("case=qwen-device-map-devices", profile=TWO)[0].variants}
    assert (by_name["hooks-removed"].world_size, by_name["hooks-removed"].gpus) == (1, 2)
    assert (by_name["whole"].world_size, by_name["whole"].gpus) == (1, 1)
    single = {variant.variant: variant for variant in plans("case=device-map-distributed", profile=TWO)[0].variants}[
        "single-process"
    ]
    assert (single.world_size, single.gpus) == (1, 2)


TWO = Profile("gpu2", "cuda", "nccl", gpus(2))


def test_plan_ranks_that_share_gpus_need_default_compute_mode() -> None:
    closed = Profile("gpu2", "cuda", "nccl", (TWO.gpus[0], replace(TWO.gpus[1], mode="exclusive_process")))
    for case in ("device-map-distributed", "qwen-device-map-devices"):
        assert all(plan.skipped is None for plan in plans(f"case={case}", profile=TWO))
        skipped = {plan.skipped for plan in plans(f"case={case}", profile=closed)}
        why = "its ranks compute on the same GPUs, and GPU 1 is in exclusive_process mode (nvidia-smi -c 0)"
        assert skipped == {why}
    assert plans(NORM, profile=closed)[0].skipped is None, "one rank a GPU is what that mode is for"
    cells = matrix.enumerate_cells(CATALOGUE, overrides.parse(["case=device-map-distributed"]))
    on_cpu = Profile("cpu", "cpu", "gloo")
    assert {cell.hardware for cell in place(CATALOGUE, cells, [closed, on_cpu], auto=True).cells} == {"cpu"}


def test_resolve_prefers_the_variants_sizes_to_the_users() -> None:
    raw = CATALOGUE.raw["case"]["train-step"]
    made = {**raw, "variants": {"own": {"world_size": 4, "tp_size": 2}, "other": {}}}
    at = {"model": CATALOGUE.raw["model"]["qwen1.5-0.5b"], "strategy": CATALOGUE.raw["strategy"]["tp"]}

    def sizes(variant: str, **run: int) -> tuple[int, int]:
        settings = resolve(made, variant, **at, **run)
        return settings["world_size"], settings["tp_size"]

    assert sizes("own", world_size=8, tp_size=8) == sizes("own") == (4, 2)
    assert sizes("other", world_size=8, tp_size=4) == (8, 4) and sizes("other", world_size=8) == (8, 8)


def test_place_cpu_cases_on_the_cpu_of_a_gpu_node() -> None:
    for plan in on(8, "NVIDIA A100-SXM4-80GB", "case=qwen-remote-code-*,fsdp-cpu-offload-state-dict"):
        assert plan.cell.hardware == plan.profile.name == "cpu" and all(variant.gpus == 0 for variant in plan.variants)
    assert "runs on the CPU only" in str(plans("case=qwen-remote-code-run", profile=TWO)[0].skipped)


def test_place_one_gpu_measures_what_it_can() -> None:
    found = on(1, "NVIDIA H200")
    where = {(plan.cell.case, plan.cell.strategy): plan.cell.hardware for plan in found}
    assert where["train-step", "ddp"] == "gpu1-shared" and where["train-step", "fsdp"] == "cpu"
    shared = [
        variant
        for plan in found
        if plan.cell.hardware == "gpu1-shared"
        for variant in plan.variants
        if not variant.skipped
    ]
    assert shared and all(variant.gpus == 1 and variant.settings["backend"] == "gloo" for variant in shared)
    assert {variant.settings["strategy"]["slug"] for variant in shared} == {"ddp"}
    measured = [plan for plan in found if not plan.skipped]
    assert len(measured) >= len([plan for plan in plans() if not plan.skipped])


def test_sweeps_have_distinct_keys() -> None:
    def keys(*texts: str) -> set[str]:
        selection = overrides.parse(["case=train-step", "model=qwen1.5-0.5b", "strategy=ddp", *texts])
        changes = matrix.overrides_of(compose_run(selection.run), selection.patches)
        return {cell.key for cell in matrix.enumerate_cells(CATALOGUE, selection, changes)}

    sweeps = [
        ["ranks=2,4,8"], ["steps=5"], ["seed=3"], ["scale=full"], ["model.config.num_hidden_layers=4"], ["tp_size=2"],
        ["env.OMP_NUM_THREADS=1"], ["env.OMP_NUM_THREADS=2"], ["env.CUDA_MODULE_LOADING=a/b"],
        ["env.CUDA_MODULE_LOADING=a:b"],
    ]  # fmt: skip
    found = [keys(*texts) for texts in sweeps]
    usual = [keys("ranks=2"), keys("repeat=3", "jobs=1"), keys("env.NCCL_SOCKET_IFNAME=eth0")]
    assert [keys()] * 3 == usual == [{"train-step/qwen1.5-0.5b-ddp"}] * 3
    assert len(set().union(*found)) == 12 and all(key.count("/") == 1 for some in found for key in some)


@pytest.mark.parametrize("value", ["1", "true", "a b/c", "", "x=y,z", "it's {1}"])
def test_variant_of_environment_is_an_override(value: str) -> None:
    (word,) = matrix.overrides_of(RunSettings(env={"OMP_NUM_THREADS": value}), {})
    assert compose_run([word]).env == {"OMP_NUM_THREADS": value}


def test_plan_full_size_is_bfloat16_unless_requested_otherwise() -> None:
    full = RunSettings(scale=Scale.full)
    assert plans("case=train-step", "strategy=ddp")[0].variants[0].settings["flags"]["dtype"] == "float32"
    found = plans("case=train-step", "strategy=ddp", settings=full)[0].variants[0]
    assert found.settings["flags"]["dtype"] == "bfloat16" and found.skipped is None
    asked = plans("case=train-step", "strategy=ddp", "flags.dtype=float32", settings=full)[0].variants[0]
    assert asked.settings["flags"]["dtype"] == "float32"


def test_plan_flag_unknown_to_a_strategy_is_skipped() -> None:
    found = plans("case=train-step", "model=llama-2-7b", "flags.lora=true")
    why = {plan.cell.strategy: plan.skipped for plan in found}
    assert why.pop("tp") == "flags.lora=True is for ddp, fsdp, fsdp2, zero2, zero3; the strategy is tp"
    assert set(why.values()) == {None} and len(why) == 5


def test_plan_fewer_layers_are_in_the_key_and_the_settings() -> None:
    texts = ["case=train-step", "model=qwen-14b", "strategy=fsdp", "model.config.num_hidden_layers=2"]
    selection = overrides.parse(texts)
    known, full = catalogue.load(patches=selection.patches), RunSettings(scale=Scale.full)
    named = matrix.enumerate_cells(known, selection, matrix.overrides_of(full, selection.patches))
    assert "scale=full" in named[0].key and "num_hidden_layers=2" in named[0].key
    found = plans(*texts, settings=full, known=known)[0].variants[0].settings["model"]["config"]
    assert found["num_hidden_layers"] == 2 and found["hidden_size"] == 5120
