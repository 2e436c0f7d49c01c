"""What is planned, and what is skipped for which reason. Nothing is launched."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from repro_matrix.config import catalog as catalogue
from repro_matrix.config import selection as overrides
from repro_matrix.config.settings import RunSettings, compose_run
from repro_matrix.environment.gpus import Gpu
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile, settle_all
from repro_matrix.errors import ConfigError
from repro_matrix.planning import cells as matrix
from repro_matrix.planning.cells import place, unmet_requirement
from repro_matrix.planning.plan import CellPlan, Planner, VariantPlan

CATALOGUE = catalogue.load()
CPU = Machine((), None, "cpu", 2, 24.0, "linux")
CPU_PROFILE = Profile("cpu", "cpu", "gloo")
VERSIONS = {
    "torch": "2.13.0+cpu",
    "transformers": "5.23.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "deepspeed": "0.19.8",
}


def gpus(count: int, name: str = "NVIDIA A100-SXM4-80GB") -> tuple[Gpu, ...]:
    return tuple(Gpu(index, name, f"GPU-{index}", 81920) for index in range(count))


ONE, TWO = (Profile(f"gpu{count}", "cuda", "nccl", gpus(count)) for count in (1, 2))
EXCLUSIVE = replace(TWO, gpus=(TWO.gpus[0], replace(TWO.gpus[1], mode="exclusive_process")))
SHARED = Profile("gpu1-shared", "cuda", "gloo", gpus(1), shared=True)
HOSTS = replace(SHARED, name="gpu1-nccl", backend="nccl")


@dataclass
class FakeStack:
    name: str = "current"
    python: str = "/python"
    key: str = "fake"
    changed: tuple[str, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=lambda: dict(VERSIONS))
    probe: dict[str, Any] = field(default_factory=dict)


def plans(
    *texts: str,
    settings: RunSettings | None = None,
    profile: Profile = CPU_PROFILE,
    stack: FakeStack | str | None = None,
    known: catalogue.Catalogue = CATALOGUE,
) -> list[CellPlan]:
    settings = settings or RunSettings()
    cells = place(
        known,
        matrix.enumerate_cells(known, overrides.parse_overrides(texts)),
        [profile],
        auto=False,
    )[0]
    return Planner(
        known, settings, {profile.name: profile}, CPU, {"current": stack or FakeStack()}, {}
    ).plan(cells)  # type: ignore[dict-item]


def variants(*texts: str, **options: Any) -> dict[str, VariantPlan]:
    return {variant.variant: variant for variant in plans(*texts, **options)[0].variants}


NORM = "case=qwen15-fsdp-norm-shard"
TRAIN, TP = ("case=train-step", "model=qwen1.5-0.5b"), "strategy=tp"


def test_plan_gives_every_variant_its_settings() -> None:
    by_name = variants(NORM)
    assert list(by_name) == list(CATALOGUE.cases["qwen15-fsdp-norm-shard"].variants)
    assert by_name["unfixed"].settings["flags"]["call"] == "inner"
    assert by_name["root-call"].settings["flags"]["call"] == "root"
    assert by_name["unfixed"].settings["model"]["config"]["hidden_size"] == 1024


ALONE = FakeStack(versions={"torch": "2.11.0+cu130"})
NO_NVCC = FakeStack(
    probe={"imports": {"deepspeed": "MissingCUDAException: CUDA_HOME does not exist"}}
)
OLDER = FakeStack(versions={**VERSIONS, "torch": "2.7.1"})
WITHOUT = {name: version for name, version in VERSIONS.items() if name != "deepspeed"}
UNBUILT = FakeStack(missing={"deepspeed": "no C++ compiler"}, versions=WITHOUT)
SKIPPED: list[tuple[tuple[str, ...], dict[str, Any], str | None, str]] = [
    ((NORM,), {}, None, ""),
    ((NORM,), {"profile": ONE}, "gpus", "needs 2 GPUs; hardware gpu1 has 1"),
    ((NORM,), {"profile": SHARED}, "shared", "does not declare `allow_gpu_sharing`"),
    ((*TRAIN, "strategy=zero3"), {"profile": SHARED}, "shared", "strategy zero3 does not declare"),
    ((*TRAIN, "strategy=fsdp"), {"profile": SHARED}, None, ""),
    (
        (*TRAIN, "strategy=fsdp"),
        {"profile": SHARED, "stack": OLDER},
        "packages",
        "shared_gpu needs torch>=2.8",
    ),
    (
        (*TRAIN, "strategy=fsdp2"),
        {"profile": SHARED, "stack": OLDER},
        "packages",
        "shared_gpu needs torch>=2.13",
    ),
    *(
        ((*TRAIN, f"strategy={name}"), {"profile": HOSTS}, None, "")
        for name in CATALOGUE.strategies
    ),
    ((NORM,), {"profile": HOSTS}, None, ""),
    (
        ("case=device-map-distributed",),
        {"profile": HOSTS},
        "shared",
        "compute on each other's GPUs",
    ),
    (("case=qwen-device-map-devices",), {"profile": HOSTS}, "gpus", "needs 2 GPUs"),
    (("case=qwen-remote-code-run",), {"profile": TWO}, "accelerator", "hardware gpu2"),
    (
        ("case=device-map-distributed",),
        {"profile": EXCLUSIVE},
        "gpu_mode",
        "GPU 1 is in exclusive_process mode",
    ),
    ((NORM,), {"profile": EXCLUSIVE}, None, ""),  # one rank a GPU is what that mode is for
    ((NORM,), {"stack": "no interpreter at /x"}, "stack", "no interpreter at /x"),
    ((*TRAIN, "strategy=ddp"), {"stack": ALONE}, "packages", "(it has none)"),
    (
        ("case=train-step", "model=qwen-7b"),
        {"stack": ALONE},
        "packages",
        "transformers",
    ),  # its script imports it
    ((*TRAIN, "strategy=zero3"), {"stack": FakeStack(versions=WITHOUT)}, "packages", "deepspeed"),
    ((*TRAIN, "strategy=zero3"), {"stack": UNBUILT}, "build", "no C++ compiler"),
    (
        (*TRAIN, "strategy=zero3"),
        {"stack": NO_NVCC, "profile": TWO},
        "build",
        "CUDA_HOME does not exist",
    ),
    ((*TRAIN, "strategy=zero3"), {"stack": NO_NVCC}, None, ""),  # on the CPU it imports
    (("case=tp-heads-not-divisible", "ranks=8"), {}, "ranks", "needs exactly 4"),
    (("case=tp-heads-not-divisible",), {}, None, ""),  # that is what it is about
    (
        ("case=train-step", TP, "model=qwen2.5-0.5b", "ranks=8"),
        {},
        "divisible",
        "14 attention heads",
    ),
    ((*TRAIN, TP, "ranks=4"), {}, None, ""),
    (
        ("case=train-step", "model=llama-2-7b", TP, "flags.lora=true"),
        {},
        "flags",
        "the strategy is tp",
    ),
]


@pytest.mark.parametrize(("texts", "options", "kind", "words"), SKIPPED)
def test_plan_skips_what_cannot_run_with_its_kind(
    texts: tuple[str, ...], options: dict[str, Any], kind: str | None, words: str
) -> None:
    plan, *_ = plans(*texts, **options)
    skip = plan.variants[0].skip
    assert (skip.kind if skip else None) == kind and words in str(plan.skipped)
    assert kind is None or all(variant.skipped for variant in plan.variants), (
        "a fix without the unfixed proves nothing"
    )


def test_plan_more_ranks_than_the_machine_holds_raises() -> None:
    with pytest.raises(ConfigError, match=r"ranks=4096.*at most"):
        plans(NORM, "ranks=4096")


def test_unmet_requirement_names_the_requirement() -> None:
    assert not any(
        unmet_requirement(text, VERSIONS) for text in ("torch>=2.4", "torch==2.13.0", "torch")
    )
    assert all(
        text in str(unmet_requirement(text, VERSIONS)) for text in ("torch<2.4", "colossalai")
    )


def test_fingerprint_covers_everything_that_a_result_depends_on() -> None:
    def prints(**options: Any) -> list[str]:
        return [variant.fingerprint for variant in variants(NORM, **options).values()]

    assert prints() == prints(settings=RunSettings(jobs=7))
    newer = FakeStack(versions=VERSIONS | {"torch": "2.14.0"})
    edited, again = (
        FakeStack(key=key, changed=("torch/a.py",)) for key in ("one", "two")
    )  # two patches of one file
    others = [
        prints(settings=RunSettings(seed=1)),
        *(prints(stack=stack) for stack in (newer, edited, again)),
    ]
    assert len(set().union(prints(), *others)) == 5 * len(prints())
    case = CATALOGUE.cases["qwen15-fsdp-norm-shard"]
    summon = {"summon": case.variants["summon"].model_copy(update={"env": {"NCCL_DEBUG": "INFO"}})}
    other = case.model_copy(update={"variants": case.variants | summon})
    changed = prints(known=replace(CATALOGUE, cases={**CATALOGUE.cases, case.slug: other}))
    assert [
        variant for variant, one, two in zip(case.variants, prints(), changed) if one != two
    ] == ["summon"]


def on(count: int, name: str, *texts: str) -> list[CellPlan]:
    """What `auto` plans on a node with so many GPUs."""
    machine = replace(CPU, gpus=gpus(count, name))
    profiles = settle_all(["auto"], CATALOGUE.hardware, machine)
    cells = place(
        CATALOGUE,
        matrix.enumerate_cells(CATALOGUE, overrides.parse_overrides(texts)),
        profiles,
        auto=True,
    )[0]
    by_name = {profile.name: profile for profile in profiles}
    return Planner(CATALOGUE, RunSettings(), by_name, machine, {"current": FakeStack()}, {}).plan(
        cells
    )  # type: ignore[dict-item]


def test_plan_rank_sweep_keeps_pinned_ranks() -> None:
    sizes = {name: variant.world_size for name, variant in variants(NORM, "ranks=8").items()}
    assert (
        sizes["unfixed"] == sizes["ddp"] == 8
        and sizes["three-ranks"] == 3
        and sizes["four-ranks"] == 4
    )
    four = variants(NORM, "ranks=4")  # where a variant equals the unfixed one, it proves nothing
    assert (
        four["four-ranks"].skip
        and four["four-ranks"].skip.kind == "same"
        and four["three-ranks"].skip is None
    )


@given(st.sampled_from(sorted(CATALOGUE.cases)), st.sampled_from([1, 2, 3, 4, 8]))
def test_plan_too_few_ranks_are_skipped(case: str, ranks: int) -> None:
    found, own = CATALOGUE.cases[case], CATALOGUE.cases[case].launch.world_size
    for plan in plans(f"case={case}", f"ranks={ranks}"):
        if ranks < found.min_ranks or (ranks != own and not found.supports_other_world_sizes):
            assert plan.variants[0].skip and plan.variants[0].skip.kind == "ranks"
        for variant in plan.variants:
            assert variant.skipped or variant.world_size == (
                found.variants[variant.variant].world_size or ranks
            )


def test_plan_counts_devices_apart_from_ranks() -> None:
    by_name = variants("case=qwen-device-map-devices", profile=TWO)
    by_name |= {"single": variants("case=device-map-distributed", profile=TWO)["single-process"]}
    sizes = {name: (variant.world_size, variant.gpus) for name, variant in by_name.items()}
    assert sizes["hooks-removed"] == sizes["single"] == (1, 2) and sizes["whole"] == (1, 1)


def test_place_measures_on_the_cpu_what_the_gpus_cannot_show() -> None:
    for plan in on(
        8, "NVIDIA A100-SXM4-80GB", "case=qwen-remote-code-*,fsdp-cpu-offload-state-dict"
    ):
        assert plan.cell.hardware == plan.profile.name == "cpu" and all(
            variant.gpus == 0 for variant in plan.variants
        )
    cells = matrix.enumerate_cells(
        CATALOGUE, overrides.parse_overrides(["case=device-map-distributed"])
    )
    placed, elsewhere = place(CATALOGUE, cells, [EXCLUSIVE, CPU_PROFILE], auto=True)
    assert {cell.hardware for cell in placed} == {"cpu"} and list(elsewhere.values()) == [
        len(cells)
    ]


def test_place_one_gpu_measures_what_it_can() -> None:
    found = on(1, "NVIDIA H200")
    where = {(plan.cell.case, plan.cell.strategy): plan.cell.hardware for plan in found}
    assert where["train-step", "ddp"] == "gpu1-shared" and where["train-step", "fsdp"] == "cpu"
    on_gpu = [
        variant
        for plan in found
        if plan.cell.hardware == "gpu1-shared"
        for variant in plan.variants
    ]
    shared = [variant for variant in on_gpu if not variant.skipped]
    assert shared and all(
        variant.gpus == 1 and variant.settings["backend"] == "gloo" for variant in shared
    )
    assert {
        plan.variants[0].settings["strategy"]["slug"] for plan in found if plan.profile.shared
    } == {"ddp"}
    assert sum(not plan.skipped for plan in found) >= sum(not plan.skipped for plan in plans())


def test_sweeps_have_distinct_keys() -> None:
    def keys(*texts: str) -> set[str]:
        selection = overrides.parse_overrides(
            ["case=train-step", "model=qwen1.5-0.5b", "strategy=ddp", *texts]
        )
        changes = matrix.overrides_of(compose_run(selection.run), selection.patches)
        return {
            cell.key for cell in matrix.enumerate_cells(CATALOGUE, selection, overrides=changes)
        }

    sweeps = [
        ["ranks=2,4,8"],
        ["steps=5"],
        ["seed=3"],
        ["scale=full"],
        ["model.config.num_hidden_layers=4"],
        ["env.OMP_NUM_THREADS=1"],
        ["env.OMP_NUM_THREADS=2"],
        ["env.CUDA_MODULE_LOADING=a/b"],
        ["env.CUDA_MODULE_LOADING=a:b"],
    ]
    found = [keys(*texts) for texts in sweeps]
    usual = [keys("ranks=2"), keys("repeat=3", "jobs=1"), keys("env.NCCL_SOCKET_IFNAME=eth0")]
    assert [keys()] * 3 == usual == [{"train-step/qwen1.5-0.5b-ddp"}] * 3
    assert len(set().union(*found)) == 11 and all(
        key.count("/") == 1 for some in found for key in some
    )


@pytest.mark.parametrize("value", ["1", "true", "a b/c", "", "x=y,z", "it's {1}"])
def test_variable_of_the_environment_is_an_override(value: str) -> None:
    (word,) = matrix.overrides_of(RunSettings(env={"OMP_NUM_THREADS": value}), {})
    assert compose_run([word]).env == {"OMP_NUM_THREADS": value}


def test_plan_fewer_layers_are_in_the_key_and_the_settings() -> None:
    texts = [
        "case=train-step",
        "model=qwen-14b",
        "strategy=fsdp",
        "model.config.num_hidden_layers=2",
    ]
    selection = overrides.parse_overrides(texts)
    known, full = catalogue.load(patches=selection.patches), RunSettings(scale="full")
    named = matrix.enumerate_cells(
        known, selection, overrides=matrix.overrides_of(full, selection.patches)
    )
    assert "scale=full" in named[0].key and "num_hidden_layers=2" in named[0].key
    found = plans(*texts, settings=full, known=known)[0].variants[0].settings
    assert (
        found["model"]["config"]["num_hidden_layers"] == 2
        and found["model"]["config"]["hidden_size"] == 5120
    )
    assert found["flags"]["dtype"] == "bfloat16"


def test_stack_without_torch_is_one_reason_for_everything() -> None:
    found = plans("case=*", stack=FakeStack(versions={"transformers": "5.23.0"}))
    (reason,) = {plan.skipped for plan in found if "GPU" not in (plan.skipped or "")}
    assert reason and reason.endswith(
        "--python /python torch transformers accelerate peft deepspeed"
    )


def test_fix_that_is_a_newer_release_is_named_on_a_stack_that_has_it() -> None:
    skipped = variants("case=fsdp-generate", "model=qwen1.5-0.5b", "strategy=fsdp")[
        "newer-transformers"
    ].skipped
    assert skipped == "the fix is a newer release, which stack current already has"


def test_cell_over_two_nodes_needs_two() -> None:
    one = variants(*TRAIN, "strategy=ddp", settings=RunSettings(nodes=2))["control"]
    assert one.skip and one.skip.kind == "nodes" and one.skip.needs == ("2 nodes",)
    here = RunSettings(nodes=2, node_command="env")
    two = variants(*TRAIN, "strategy=ddp", settings=here)["control"]
    assert two.skip is None and two.settings["nodes"] == 2 and two.settings["devices"] == 1
    three = variants(*TRAIN, "strategy=ddp", "ranks=3", settings=here)["control"]
    assert three.skip and three.skip.kind == "ranks"


def test_case_for_two_nodes_is_skipped_as_a_whole_on_one() -> None:
    skipped = variants("case=dcp-node-local")
    assert {variant.skip and variant.skip.kind for variant in skipped.values()} == {"nodes"}
    there = variants("case=dcp-node-local", settings=RunSettings(node_command="env"))
    assert there["one-node"].settings.get("nodes") is None and not there["one-node"].skip


@pytest.mark.parametrize("command", ["no-such-program {node}", ""])
def test_program_of_node_command_must_exist(command: str) -> None:
    with pytest.raises(ValidationError, match="no program"):
        RunSettings(nodes=2, node_command=command)
