"""The memory plan: arithmetic by its laws, model facts against published parameter counts, skips with numbers."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.cli import main as cli
from repro_matrix.config import catalog as catalogue
from repro_matrix.config import selection as overrides
from repro_matrix.config.settings import RunSettings, Scale
from repro_matrix.environment.gpus import Gpu
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile, settle_planned
from repro_matrix.environment.stacks import Stack
from repro_matrix.environment.stacks.spec import existing
from repro_matrix.errors import ConfigError
from repro_matrix.planning import cells as matrix
from repro_matrix.planning import duration
from repro_matrix.planning.fit import best, fitted, too_much, with_layers
from repro_matrix.planning.memory import (
    CONNECTED,
    CONNECTIONS,
    GIB,
    MIB,
    Facts,
    Layout,
    MemoryPlan,
    chunks,
    parts,
    plan,
    weights_held,
)
from repro_matrix.planning.placing import place
from repro_matrix.planning.plan import CellPlan, Planner
from repro_matrix.runner.durations import MEMORY_PER_RANK_GB, expect
from repro_matrix.runner.prerequisites import ModelFacts, with_memory

CATALOGUE = catalogue.load()
STRATEGIES = ("ddp", "fsdp", "fsdp2", "zero2", "zero3", "tp")
SHARDED = ("fsdp", "fsdp2", "zero3")
LAPTOP = Machine((), None, "cpu", 4, 16.0, "linux")
CPU = Profile("cpu", "cpu", "gloo", ())


def facts(layers: int, layer: int, root: int, size: int = 2, trainable: float = 1.0) -> Facts:
    total = layers * layer + root
    return Facts(
        parameters=total, trainable=round(total * trainable), bytes=size, buffers=1000, tied=False, layers=layers,
        layer=layer, root=root, largest=max(root // 2, layer // 4), split=total - total // 50,
        activations={2: 10 * layer, 4: 19 * layer},
    )  # fmt: skip


# As of Qwen-14B: 40 layers of 315 M, embedding and head 1557 M.
QWEN_14B = facts(40, 315_253_760, 1_557_140_480)
models = st.builds(
    facts,
    layers=st.integers(1, 80),
    layer=st.integers(1000, 10**9),
    root=st.integers(1000, 3 * 10**9),
    size=st.sampled_from([2, 4]),
    trainable=st.sampled_from([1.0, 0.01]),
)
places = st.sampled_from(["cpu", "cuda"])


def peak(found: MemoryPlan) -> int:
    return found.device_rank or found.host_rank


@given(models, st.sampled_from(STRATEGIES), places, st.integers(1, 15))
def test_more_ranks_never_need_more_each_while_training(model: Facts, strategy: str, place: Any, ranks: int) -> None:
    def training(n: int) -> int:
        found = plan(model, Layout(strategy, n, place, reference="none"))
        return sum(next(phase for phase in found.device or found.host if phase.name == "training").each.values())

    # DDP's buckets and FSDP's whole units come with the second rank; rounding up costs a few elements.
    if ranks > 1:
        assert training(ranks + 1) <= training(ranks) + 64


@given(models, st.sampled_from(SHARDED), st.integers(1, 16))
def test_sharded_weights_are_one_nth_and_ddp_has_all_of_them(model: Facts, strategy: str, ranks: int) -> None:
    whole = model.bytes * model.parameters
    assert 0 <= weights_held(model, Layout(strategy, ranks)) * ranks - whole < model.bytes * ranks
    assert weights_held(model, Layout("ddp", ranks)) == weights_held(model, Layout("zero2", ranks)) == whole
    tensor_parallel = weights_held(model, Layout("tp", ranks))
    assert whole // ranks <= tensor_parallel <= whole


@given(models, st.sampled_from(STRATEGIES), places, st.integers(1, 16), st.integers(0, 4))
def test_a_peak_is_the_sum_of_its_parts(model: Facts, strategy: str, place: Any, ranks: int, copies: int) -> None:
    found = plan(model, Layout(strategy, ranks, place, copies=copies, reference="none" if copies else "host"))
    for phase in (*found.host, *found.device):
        assert sum(parts(phase).values()) == phase.rank() >= 0
        assert phase.node(ranks) <= ranks * phase.rank()
    assert found.host_rank == max(phase.rank() for phase in found.host)
    assert found.host_node >= found.host_rank
    told = found.to_json()
    assert abs(sum(told["host"]["parts_mb"].values()) - told["host_rank_mb"]) < 1


@given(models, st.sampled_from(STRATEGIES), places, st.integers(2, 16))
def test_the_reference_is_on_two_ranks_at_most_and_on_one_in_turns(
    model: Facts, strategy: str, place: Any, ranks: int
) -> None:
    beside, turns = (plan(model, Layout(strategy, ranks, place, reference=where)) for where in ("host", "turns"))
    assert turns.host_node <= beside.host_node
    for found, runs in ((beside, 2), (turns, 1)):
        reference = next(phase for phase in found.host if phase.name == "reference")
        assert reference.node(ranks) - ranks * sum(reference.each.values()) == runs * sum(reference.once.values())
        assert reference.once["weights"] == model.bytes * model.parameters


def test_a_node_never_holds_a_large_model_on_every_rank() -> None:
    """Qwen-14B on eight ranks: 1.3 TB on the host when each kept its copies."""
    assert plan(QWEN_14B, Layout("fsdp", 8, "cpu", base=350 * MIB)).host_node < 150 * GIB
    found = plan(QWEN_14B, Layout("fsdp", 8, "cuda", base=350 * MIB))
    assert found.host_node < 150 * GIB
    assert plan(QWEN_14B, Layout("fsdp", 8, "cuda", reference="device")).host_node < 50 * GIB
    assert found.disk == pytest.approx(3 * 2 * 14.17e9, rel=0.01), "after two steps, and a checkpoint"


@given(model=models, strategy=st.sampled_from(STRATEGIES), place=places, ranks=st.integers(1, 16))
def test_a_case_that_only_runs_forward_needs_no_gradients_and_nothing_to_load(
    model: Facts, strategy: str, place: Any, ranks: int
) -> None:
    layout = Layout(strategy, ranks, place, reference="none")
    forward = plan(model, replace(layout, trains=False))
    assert {phase.name for phase in forward.host + forward.device} <= {"drawing", "forward", "comparing", "reference"}
    assert not any("gradients" in parts(phase) or "buckets" in parts(phase) for phase in forward.host + forward.device)
    assert forward.host_rank <= plan(model, layout).host_rank


@given(model=models, strategy=st.sampled_from(STRATEGIES), place=places, ranks=st.integers(1, 16))
def test_who_loads_nothing_has_no_second_model(model: Facts, strategy: str, place: Any, ranks: int) -> None:
    """A phase that such a case never has was its fullest one: up to 37 % above what was measured."""
    layout = Layout(strategy, ranks, place, reference="none")
    found, less = plan(model, layout), plan(model, replace(layout, loads=False))
    assert "loading" not in {phase.name for phase in less.host + less.device}
    assert less.host_rank <= found.host_rank and less.device_rank <= found.device_rank


@pytest.mark.parametrize(("strategy", "layers"), [("fsdp", 8), ("fsdp2", 12)])
def test_small_units_are_not_found_again_in_the_heap(strategy: str, layers: int) -> None:
    """Measured: what two layers of 17 MiB take in a step under gloo is 7.9 and 11.2 times one of them, where three are
    alive; of 65 MiB, it is those three."""

    def units(layer_mib: int, place: Any = "cpu", trains: bool = True) -> int:
        model = facts(2, layer_mib * MIB // 4, 1000, size=4)
        found = plan(model, Layout(strategy, 2, place, reference="none", trains=trains))
        phase = next(p for p in (found.device or found.host) if p.name in ("training", "forward"))
        return round(phase.each["units"] / (layer_mib * MIB))

    assert units(17) == layers and units(65) == 3
    assert units(17, "cuda") == 3, "a device has an allocator of its own"
    assert units(17, trains=False) == layers / 4 * (1 if strategy == "fsdp" else 4 / 3)


@pytest.mark.parametrize("case", ["fsdp-tied-embeddings", "fsdp-cpu-offload-state-dict", "train-step"])
def test_only_what_is_saved_or_checked_to_come_back_is_loaded(case: str) -> None:
    cells = matrix.enumerate_cells(CATALOGUE, overrides.parse([f"case={case}", "strategy=fsdp"]))
    roomy = replace(LAPTOP, memory_gb=1e6)
    stacks = {name: replace(STACK, name=name) for name in ("current", "torch2.2-tf4.39")}
    placed = place(CATALOGUE, cells[:1], [CPU], auto=False).cells
    made = Planner(CATALOGUE, RunSettings(), {"cpu": CPU}, roomy, stacks, {}).plan(placed)[0]
    found = fitted(made, CATALOGUE, CPU, roomy, lambda arm: (QWEN_14B, 350.0)).arms[0].memory
    assert found and ("loading" in {phase.name for phase in found.host}) == (case != "fsdp-tied-embeddings")


def test_what_a_comparison_has_beside_a_tensor_is_no_larger_than_the_tensor() -> None:
    tiny = replace(facts(2, 1000, 1000), largest=500)
    assert chunks(tiny) == 4 * 4 * 500
    assert chunks(replace(tiny, largest=10**9)) == 64 * MIB  # repros/repro_kit/norms.py goes on chunk by chunk


@given(models, st.integers(2, 64))
def test_activations_are_linear_in_the_sequences(model: Facts, sequences: int) -> None:
    step = model.activation_bytes(4) - model.activation_bytes(3)
    assert abs(model.activation_bytes(sequences) - model.activation_bytes(2) - step * (sequences - 2)) <= sequences


# --- what the stack says of the real models ---------------------------------------------------------------------------

PUBLISHED = {
    "qwen1.5-0.5b": 463_987_712,
    "qwen1.5-1.8b": 1_836_828_672,
    "llama-2-7b": 6_738_415_616,
    "qwen-7b": 7_721_324_544,
    "qwen-14b": 14_167_290_880,
}


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The worker's own functions, with remote code copied to a folder of the test's own."""
    pytest.importorskip("transformers")
    import transformers.dynamic_module_utils as dynamic

    root = Path(__file__).resolve().parents[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.syspath_prepend(str(root / "harness/repro_matrix/launch/worker"))
        patch.syspath_prepend(str(root / "repros"))
        import model_facts

        yield model_facts
        sys.modules.pop("model_facts", None)


def asked(name: str, scale: str = "full", **changes: Any) -> dict[str, Any]:
    from repro_kit.settings import model_settings

    model = model_settings(CATALOGUE.raw["model"][name], scale, "random")
    return {
        "model": model, "dtype": "bfloat16", "lora": False, "checkpointing": False, "sizes": [2, 4], "length": 16,
        **changes,
    }  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_real_models_have_the_published_number_of_parameters(name: str, asking: Any) -> None:
    found = asking.facts(asked(name, sizes=[2, 4] if name == "qwen1.5-0.5b" else []))
    assert found["parameters"] == found["trainable"] == PUBLISHED[name]
    config = CATALOGUE.raw["model"][name]["config"]
    assert found["layers"] == config["num_hidden_layers"]
    assert found["layers"] * found["layer"] + found["root"] == PUBLISHED[name]
    assert found["tied"] == config["tie_word_embeddings"]
    assert found["largest"] == config["vocab_size"] * config["hidden_size"]
    assert 0.99 * PUBLISHED[name] < found["split"] < PUBLISHED[name]
    if found["activations"]:
        assert Facts.from_json(found).activation_bytes(2) > 0


def test_checkpointing_saves_activations_and_lora_trains_a_little(asking: Any) -> None:
    plain = asking.facts(asked("llama-2-7b", "tiny", dtype="float32"))
    saving = asking.facts(asked("llama-2-7b", "tiny", dtype="float32", checkpointing=True))
    assert saving["activations"]["4"]["saved"] < plain["activations"]["4"]["saved"]
    pytest.importorskip("peft")
    small = asking.facts(asked("llama-2-7b", "tiny", dtype="float32", lora=True))
    assert 0 < small["trainable"] < small["parameters"] / 20


@pytest.mark.ranks  # a process of the stack's own
@pytest.mark.slow
def test_the_stack_says_what_a_rank_holds_before_any_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path))
    known = ModelFacts(existing("current", sys.executable))
    assert known.ask([], [("transformers",)]) is None
    warm, cold = known.base_mb(("transformers",)), known.base_mb(("transformers",), "cold")
    assert warm and cold and 50 < warm <= cold
    assert ModelFacts(known.stack).bases == known.bases, "remembered"


# --- laid over a plan -------------------------------------------------------------------------------------------------


STACK = Stack(
    "current",
    sys.executable,
    {"torch": "2.13.0", "transformers": "5.23.0", "accelerate": "1.15.0", "deepspeed": "0.19.8"},
)


def cell(strategy: str, profile: Profile, machine: Machine, deadline: float | None = None) -> CellPlan:
    cells = matrix.enumerate_cells(
        CATALOGUE,
        overrides.parse(["case=train-step", "model=qwen-14b", f"strategy={strategy}"]),
    )
    settings = RunSettings(scale=Scale.full, deadline=deadline)
    placed = place(CATALOGUE, cells, [profile], auto=False).cells
    made = Planner(CATALOGUE, settings, {profile.name: profile}, machine, {"current": STACK}, {}).plan(placed)[0]
    return fitted(made, CATALOGUE, profile, machine, lambda arm: (QWEN_14B, 350.0), deadline)


def test_full_size_on_a_laptop_is_a_skip_with_the_numbers() -> None:
    found = cell("fsdp", CPU, LAPTOP)
    assert found.skipped and found.arms[0].memory
    assert "GiB on the host for 2 ranks" in found.skipped and "this machine has 16" in found.skipped
    assert "weights 13.2" in found.skipped and "gradients 13.2" in found.skipped


@pytest.mark.parametrize(
    "case, phase", [("train-step", "training"), ("qwen15-fsdp-kv-cache", "forward"), ("fsdp-generate", "forward")]
)
def test_inference_and_generation_are_planned_as_forward_only(case: str, phase: str) -> None:
    """The phase that a case's proof says it has; the other one is in no plan of it."""
    roomy = replace(LAPTOP, memory_gb=1e6)
    cells = matrix.enumerate_cells(CATALOGUE, overrides.parse([f"case={case}", "model=qwen1.5-0.5b"]))
    placed = place(CATALOGUE, cells[:1], [CPU], auto=False).cells
    stacks = {name: replace(STACK, name=name) for name in ("current", "torch2.2-tf4.39")}
    made = Planner(CATALOGUE, RunSettings(), {"cpu": CPU}, roomy, stacks, {}).plan(placed)[0]
    found = fitted(made, CATALOGUE, CPU, roomy, lambda arm: (QWEN_14B, 350.0)).arms[0].memory
    assert found is not None
    assert {"training", "forward"} & {each.name for each in found.host} == {phase}


def test_what_fits_is_not_skipped_and_is_packed_by_its_plan() -> None:
    found = cell("fsdp", CPU, replace(LAPTOP, memory_gb=1000.0)).arms[0]
    assert found.skipped is None and found.settings["reference"] == "host"
    assert expect({}, "", found).memory_gb == pytest.approx(found.memory.host_node / GIB)  # type: ignore[union-attr]
    assert expect({}, "", replace(found, memory=None)).memory_gb == MEMORY_PER_RANK_GB * 2


def gpus(count: int, gib: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(index, f"A100-{gib}GB", f"GPU-{index}", gib * 1024) for index in range(count))


def test_a_device_that_is_too_small_is_named_with_what_fills_it() -> None:
    large = Machine(gpus(8, 40), None, "cpu", 96, 1000.0, "linux")
    found = cell("ddp", Profile("gpu8", "cuda", "nccl", gpus(8, 40)), large)
    assert found.skipped and "GiB a rank on the device (" in found.skipped and "A100-40GB has 40" in found.skipped
    assert "weights" in found.skipped and "buckets" in found.skipped


def test_the_reference_goes_where_it_fits() -> None:
    machine = Machine(gpus(8, 80), None, "cpu", 96, 1000.0, "linux")
    profile = Profile("gpu8", "cuda", "nccl", gpus(8, 80))
    assert cell("fsdp", profile, machine).arms[0].settings["reference"] == "device"
    layout = Layout("fsdp", 8, "cuda", base=350 * MIB)
    for gib, host, where in ((80, 1000, "device"), (40, 1000, "host"), (40, 90, "turns")):
        small, there = replace(profile, gpus=gpus(8, gib)), replace(machine, memory_gb=float(host))
        found, reference = best(QWEN_14B, layout, small, there)
        assert reference == where and too_much(found, small, there) is None
    assert "on the host for 8 ranks" in (too_much(found, small, replace(machine, memory_gb=32.0)) or "")
    # With the weights on disk the devices have room for what is computed with, and a small host for what is read.
    small, there = replace(profile, gpus=gpus(8, 40)), replace(machine, memory_gb=44.0)
    found, reference = best(QWEN_14B, layout, small, there)
    assert reference == "layers" and too_much(found, small, there) is None
    assert not next(phase for phase in found.device if phase.name == "reference").once["weights"]
    assert found.disk == pytest.approx(4 * 2 * 14.17e9, rel=0.01), "and once more on disk"


@given(models, st.sampled_from(STRATEGIES), places, st.integers(2, 16))
def test_layer_by_layer_the_reference_has_no_part_that_grows_with_the_layers(
    model: Facts, strategy: str, place: Any, ranks: int
) -> None:
    def once(of: Facts) -> int:
        found = plan(of, Layout(strategy, ranks, place, reference="layers"))
        assert all(phase.runs == 1 for phase in found.host + found.device if phase.once)
        return max(sum(phase.once.values()) for phase in found.host + found.device)

    deeper = replace(model, parameters=model.parameters + 50 * model.layer, layers=model.layers + 50)
    assert once(deeper) == once(model), "but its activations, which are the same here"


def test_a_skip_says_how_many_layers_would_fit_and_they_do() -> None:
    laptop = replace(LAPTOP, memory_gb=32.0)
    found = cell("fsdp", CPU, laptop)
    assert found.skipped and "; cut to model.config.num_hidden_layers=" in found.skipped and " of 40" in found.skipped
    layers = int(found.skipped.partition("num_hidden_layers=")[2].split()[0])
    assert 0 < layers < 40
    for count, fits in ((layers, True), (layers + 1, False)):
        made = best(with_layers(QWEN_14B, count), Layout("fsdp", 2, base=350 * MIB), CPU, laptop)[0]
        assert (too_much(made, CPU, laptop) is None) == fits
    assert with_layers(QWEN_14B, 40) == QWEN_14B
    tiny = replace(LAPTOP, memory_gb=16.0)
    assert "cut to" not in (cell("fsdp", CPU, tiny).skipped or "cut to"), "not even one"


def test_only_an_engine_of_deepspeed_has_its_connections() -> None:
    """Arms that load under ``zero.Init``, or only run forward, were planned 15 to 19 % above their peak for them."""
    trained = plan(QWEN_14B, Layout("zero3", 2))
    loaded = plan(QWEN_14B, Layout("zero3", 2, engine=False))
    assert trained.host_rank - loaded.host_rank == CONNECTIONS["zero3"] - CONNECTED > 0
    for strategy in ("ddp", "fsdp", "tp"):
        same = [plan(QWEN_14B, Layout(strategy, 2, engine=engine)).host_rank for engine in (True, False)]
        assert same[0] == same[1]


def test_what_others_hold_of_the_host_is_not_ours() -> None:
    """Qwen-14B with one layer, 23 GiB by the plan, was launched where 21.5 of 23.5 were free, and was killed for it."""
    laptop = replace(LAPTOP, memory_gb=1000.0)
    assert cell("fsdp", CPU, laptop).arms[0].skipped is None
    needs = cell("fsdp", CPU, laptop).arms[0].memory.host_node / GIB  # type: ignore[union-attr]
    found = cell("fsdp", CPU, replace(laptop, free_gb=8.0)).skipped
    assert found and "this machine has 1000, of which 8 are free" in found
    assert cell("fsdp", CPU, replace(laptop, free_gb=needs + 1)).skipped is None
    whole = cell("tp", CPU, laptop).arms[0].memory.host_node / GIB  # type: ignore[union-attr]
    turns = cell("tp", CPU, replace(laptop, free_gb=whole - 1)).arms[0]
    assert turns.skipped is None and turns.settings["reference"] != "host", "a smaller reference, where that is enough"


def test_a_full_disk_is_said_before_it_is_full() -> None:
    large = replace(LAPTOP, memory_gb=1000.0)
    assert cell("fsdp", CPU, replace(large, disk_gb=500.0)).skipped is None
    found = cell("fsdp", CPU, replace(large, disk_gb=20.0)).skipped
    assert found and found.startswith("needs 79.2 GiB of disk") and "20 are free" in found, (
        "not even more, layer by layer"
    )


@given(models, st.sampled_from(STRATEGIES), places, st.integers(1, 16), st.integers(1, 96), st.floats(1, 1000))
def test_a_deadline_is_many_times_what_is_expected_and_never_below_the_cases(
    model: Facts, strategy: str, place: Any, ranks: int, cores: int, least: float
) -> None:
    layout = Layout(strategy, ranks, place)
    found = duration.deadline(model, layout, cores, least)
    assert found >= least and found >= duration.MARGIN * duration.seconds(model, layout, cores)
    bigger = replace(model, parameters=2 * model.parameters)
    assert duration.deadline(bigger, layout, cores, least) >= found
    assert duration.seconds(model, layout, cores + 1) <= duration.seconds(model, layout, cores)


def test_the_deadline_follows_from_the_plan_unless_the_user_gives_one() -> None:
    large = replace(LAPTOP, memory_gb=1000.0)
    planned_for = cell("fsdp", CPU, large).arms[0]
    assert planned_for.deadline > 3600 > 120 == CATALOGUE.cases["train-step"].launch.deadline
    assert planned_for.expected_s and planned_for.expected_s * duration.MARGIN == planned_for.deadline
    assert cell("fsdp", CPU, large, deadline=77.0).arms[0].deadline == 77.0


def test_a_model_that_nobody_knows_is_neither_planned_nor_skipped() -> None:
    made = cell("fsdp", CPU, LAPTOP)
    bare = replace(made, arms=tuple(replace(arm, memory=None, skip=None) for arm in made.arms))
    assert fitted(bare, CATALOGUE, CPU, LAPTOP, lambda arm: None) == bare


class Everything:
    """A stack that has answered every question: the model is always qwen-14b."""

    def __init__(self, stack: Stack) -> None: ...

    def ask(self, asked: list[object], imports: list[object]) -> None:
        self.asked = asked

    def model(self, asked: object) -> Facts:
        return QWEN_14B

    def base_mb(self, imports: object, start: str) -> float:
        return 350.0


@pytest.mark.parametrize(("case", "fits"), [("train-step", False), ("card-zero-simulated", True)])
def test_fake_tensors_hold_nothing_of_a_model_at_full_size(
    case: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("repro_matrix.runner.prerequisites.ModelFacts", Everything)
    cells = matrix.enumerate_cells(CATALOGUE, overrides.parse([f"case={case}", "strategy=ddp", "ranks=8"]))
    placed = place(CATALOGUE, cells, [CPU], auto=False).cells
    planner = Planner(CATALOGUE, RunSettings(scale=Scale.full), {CPU.name: CPU}, LAPTOP, {"current": STACK}, {})
    found, _ = with_memory(planner.plan(placed), CATALOGUE, {"current": STACK}, LAPTOP, planner.settings, ask=True)
    assert found and all((plan.skipped is None) == fits for plan in found), [plan.skipped for plan in found]


def test_hardware_that_is_not_here_can_be_planned_for_but_not_mistaken() -> None:
    (profile,), machine, only = settle_planned(["a100x8"], CATALOGUE.hardware, replace(LAPTOP, free_gb=2.0))
    assert machine.free_gb is None, "what is free here says nothing of it"
    assert only and len(profile.gpus) == 8 and profile.gpus[0].memory_mb == 80 * 1024 and machine.memory_gb == 1000
    assert settle_planned(["cpu"], CATALOGUE.hardware, LAPTOP) == ([CPU], LAPTOP, False)
    with pytest.raises(ConfigError, match="did you mean"):
        settle_planned(["a100x"], CATALOGUE.hardware, LAPTOP)


def test_what_no_plan_is_made_for_is_named_by_reason(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "hardware=a100x8", "case=card-zero-simulated"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "not launched: " in said and "runs on the CPU only" in said and "own-card" not in said
    assert cli.main([*words, "--all"]) == 0
    assert "own-card" in capsys.readouterr().out


def test_units_are_named_in_words() -> None:
    found = plan(QWEN_14B, Layout("fsdp", 8, "cuda", base=300 * MIB))
    assert too_much(found, Profile("gpu8", "cuda", "nccl", gpus(8, 80)), replace(LAPTOP, memory_gb=500)) is None
    assert json.dumps(found.to_json())
