"""What is launched and what is skipped with which reason; nothing here launches anything."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import catalogue, matrix, overrides
from harness.config import RunSettings
from harness.errors import ConfigError
from harness.hardware import Gpu, Machine, Profile, settle
from harness.plan import CellPlan, plan_cells, unmet_requirement

CATALOGUE = catalogue.load()
CPU = Machine((), None, "cpu", 2, 24.0, "linux")
CPU_PROFILE = Profile("cpu", "cpu", "gloo", (), None)


def gpus(count: int, name: str = "NVIDIA A100-SXM4-80GB") -> tuple[Gpu, ...]:
    return tuple(Gpu(index, name, f"GPU-{index}", 81920) for index in range(count))


@dataclass
class FakeStack:
    name: str = "current"
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
    cells = matrix.enumerate_cells(known, overrides.parse(texts))
    stacks = {"current": stack or FakeStack()}
    return plan_cells(known, cells, settings or RunSettings(), profile, machine, stacks, {})


NORM = "case=qwen15-fsdp-norm-shard"


def test_every_arm_is_planned_with_its_settings() -> None:
    plan = plans(NORM)[0]
    assert [arm.arm for arm in plan.arms] == list(CATALOGUE.cases["qwen15-fsdp-norm-shard"].arms)
    by_name = {arm.arm: arm for arm in plan.arms}
    assert by_name["broken"].settings["flags"]["call"] == "inner"
    assert by_name["root-call"].settings["flags"]["call"] == "root"
    assert by_name["broken"].settings["model"]["config"]["hidden_size"] == 1024


def test_fewer_gpus_than_ranks_is_a_skip_with_the_reason() -> None:
    profile = Profile("gpu1", "cuda", "nccl", gpus(1), None)
    plan = plans(NORM, profile=profile)[0]
    assert plan.skipped and "needs 2 GPUs" in plan.skipped and "has 1" in plan.skipped


def test_a_world_size_that_was_asked_for_and_cannot_be_is_an_error() -> None:
    profile = Profile("gpu2", "cuda", "nccl", gpus(2), None)
    with pytest.raises(ConfigError, match="world_size=3"):
        plans(NORM, settings=RunSettings(world_size=3), profile=profile)
    with pytest.raises(ConfigError, match="at most"):
        plans(NORM, settings=RunSettings(world_size=4096))


def test_missing_package_names_what_is_missing() -> None:
    without = FakeStack(versions={"torch": "2.13.0"})
    plan = plans("case=train-step", "strategy=zero3", "model=qwen1.5-0.5b", stack=without)[0]
    assert plan.skipped and "deepspeed" in plan.skipped


def test_a_stack_that_is_not_there_skips_with_its_reason() -> None:
    plan = plans(NORM, stack="no interpreter at /x")[0]
    assert plan.skipped and "no interpreter at /x" in plan.skipped


def test_when_the_broken_arm_is_skipped_the_whole_cell_is() -> None:
    profile = Profile("gpu1", "cuda", "nccl", gpus(1), None)
    assert all(arm.skipped for plan in plans(profile=profile) for arm in plan.arms if plan.skipped)


@given(st.sampled_from(["torch>=2.4", "torch<2.4", "torch==2.13.0", "transformers<5", "colossalai", "torch"]))
def test_requirements_are_met_or_named(text: str) -> None:
    unmet = unmet_requirement(text, FakeStack().versions)
    assert (unmet is None) == (text in ("torch>=2.4", "torch==2.13.0", "torch"))
    assert unmet is None or text in unmet


def test_fingerprint_follows_what_the_answer_depends_on() -> None:
    def prints(**changes: object) -> list[str]:
        return [arm.fingerprint for arm in plans(NORM, settings=replace(RunSettings(), **changes))[0].arms]

    assert prints() == prints() == prints(jobs=7, keep=True)
    assert set(prints()).isdisjoint(prints(seed=1))
    newer = FakeStack(versions={**FakeStack().versions, "torch": "2.14.0"})
    assert set(prints()).isdisjoint(arm.fingerprint for arm in plans(NORM, stack=newer)[0].arms)
    case = CATALOGUE.cases["qwen15-fsdp-norm-shard"]
    arms = {**case.arms, "summon": case.arms["summon"].model_copy(update={"env": {"NCCL_DEBUG": "INFO"}})}
    other = replace(CATALOGUE, cases={**CATALOGUE.cases, case.slug: case.model_copy(update={"arms": arms})})
    changed = [arm.fingerprint for arm in plans(NORM, known=other)[0].arms]
    assert [arm for arm, one, two in zip(case.arms, prints(), changed) if one != two] == ["summon"]


@pytest.mark.parametrize(
    "found, name",
    [
        ((), "cpu"),
        (gpus(1), "gpu1"),
        (gpus(2), "gpu2"),
        (gpus(6), "gpu4"),
        (gpus(8), "a100x8"),
        (gpus(8, "NVIDIA H200"), "gpu8"),
    ],
)
def test_auto_takes_the_largest_profile_that_fits(found: tuple[Gpu, ...], name: str) -> None:
    machine = replace(CPU, gpus=found)
    assert settle("auto", CATALOGUE.hardware, machine).name == name


def test_a_gpu_profile_on_a_cpu_machine_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="hardware=gpu2 needs 2 GPUs; this machine has: none"):
        settle("gpu2", CATALOGUE.hardware, CPU)
    with pytest.raises(ConfigError, match="did you mean 'gpu2'"):
        settle("gpu22", CATALOGUE.hardware, CPU)
    with pytest.raises(ConfigError, match="8 A100 GPUs"):
        settle("a100x8", CATALOGUE.hardware, replace(CPU, gpus=gpus(8, "NVIDIA H200")))
