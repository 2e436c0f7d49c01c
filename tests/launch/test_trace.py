"""The tracer in one process: what it records, that it changes no number, and that nothing stops the
script."""

from __future__ import annotations

import base64
import itertools
import json
import os
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import repro_matrix

torch = pytest.importorskip("torch")
WORKER = Path(repro_matrix.__file__).parent / "launch" / "worker"

import traced_training as training
from repro_matrix.launch.worker import tracer
from repro_matrix.launch.worker.tracer import ending
from repro_matrix.launch.worker.tracer.batches import RootBatch
from repro_matrix.launch.worker.tracer.layout import Parameter
from repro_matrix.launch.worker.tracer.sketch import BLOCK, Noise, sketch

Json = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    tracer.install(str(tmp_path), 0, 1)
    yield tmp_path
    tracer.close("exit")


def lines(folder: Path, kind: str = "", side: str = "") -> list[Json]:
    tracer.close("exit")
    path = folder / f"trace-0{'.' if side else ''}{side}.jsonl"
    every = [json.loads(line) for line in path.read_text().splitlines()]
    return [each for each in every if kind in ("", each["k"])]


def values(line: Json) -> tuple[float, ...]:
    raw = base64.b64decode(line["v"])
    return struct.unpack(f"<{len(raw) // 8}d", raw)


def step(model: Any, optimizer: Any, batch: Any, scale: float = 1.0) -> None:
    (model(input_ids=batch, labels=batch)["loss"] * scale).backward()
    optimizer.step()
    optimizer.zero_grad()


# The sketch.


def test_slices_add_up_to_the_whole() -> None:
    whole = torch.randn(2, 2 * BLOCK + 77)
    cuts = [0, 3, BLOCK - 1, BLOCK + 9, whole.shape[1]]
    parts = [sketch(whole[:, first:last], first) for first, last in itertools.pairwise(cuts)]
    torch.testing.assert_close(sum(parts), sketch(whole), rtol=1e-12, atol=1e-12)


def test_elements_in_another_order_have_the_signs_of_their_index() -> None:
    whole = torch.randn(1, BLOCK + 100)
    order = torch.randperm(whole.shape[1])
    torch.testing.assert_close(
        sketch(whole[:, order], index=order), sketch(whole), rtol=1e-12, atol=1e-9
    )


def test_products_estimate_the_size_of_a_difference() -> None:
    made = sketch(torch.randn(200, 3 * BLOCK))
    ratio = made[:, :8].square().mean(1) / made[:, 8]
    assert 0.9 < ratio.mean() < 1.1 and ratio.min() > 0.02


def test_noise_is_one_unit_in_the_last_place_and_draws_nothing_from_the_script() -> None:
    before, tensor = torch.get_rng_state(), torch.randn(1000)
    torch.set_rng_state(before)
    changed = tensor.clone()
    Noise(1).add(changed, "name")
    ulp = torch.nextafter(tensor.abs(), torch.tensor(torch.inf)) - tensor.abs()
    steps = ((changed - tensor) / ulp).abs()
    assert steps.max() <= 1 and 500 < (steps > 0).sum() < 800
    assert torch.equal(torch.get_rng_state(), before)


# The samples.


def test_samples_are_known_by_ids_that_the_mask_shows() -> None:
    nothing = lambda _: None  # noqa: E731
    ids, mask = torch.tensor([[5, 6, 0], [7, 8, 9]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    padded = RootBatch.of_call(
        (), {"input_ids": ids, "attention_mask": mask, "labels": ids}, nothing
    )
    short = RootBatch.of_call(
        (), {"input_ids": ids[:1, :2].int(), "attention_mask": mask[:1, :2]}, nothing
    )
    assert padded.samples[0] == short.samples[0] and len(set(padded.samples)) == 2 == len(
        padded.labels
    )
    assert (
        RootBatch.of_call((torch.ones(3, 2),), {}, nothing).samples
        == RootBatch.of_call((torch.ones(1, 2),), {}, nothing).samples * 3
    )
    assert RootBatch.of_call((), {}, nothing).samples == []
    masked = RootBatch.of_call((), {"attention_mask": torch.ones_like(ids), "x": ids}, nothing)
    assert masked.samples == RootBatch.of_call((ids,), {}, nothing).samples


# What is recorded.


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulation": 2}, {"checkpoint": True}, {"checkpoint": False}, {"tied": True}],
)
def test_tracing_changes_no_number(tmp_path: Path, options: Json) -> None:
    plain = training.train(**options)
    tracer.install(str(tmp_path), 0, 1)
    assert training.train(**options) == plain
    kinds = Counter(each["k"] for each in lines(tmp_path))
    micro = options.get("accumulation", 1)
    weights = 13 if options.get("tied") else 14
    assert (
        kinds["step"] == 3 and kinds["end"] == kinds["model"] == 1 and kinds["batch"] == 3 * micro
    )
    assert kinds["lgrad"] == kinds["rgrad"] == 3 * micro * weights
    assert kinds["ograd"] == kinds["param"] == kinds["state"] == 3 * weights
    assert kinds["fwd"] == kinds["bwd"] == 11 * 3 * micro  # 10 modules and the model


def test_recomputation_is_no_second_call(folder: Path) -> None:
    seen = {}
    for name, checkpoint in (("plain", None), ("reentrant", True), ("other", False)):
        tracer.side(name)
        training.train(checkpoint=checkpoint)
        every = [
            json.dumps(each)
            for each in lines(folder, side=name)
            if each["k"] in ("fwd", "bwd", "lgrad", "batch")
        ]
        seen[name] = sorted(every)
    assert seen["plain"] == seen["reentrant"] == seen["other"]


def test_inputs_made_by_functional_code_are_recorded(folder: Path) -> None:
    training.train(steps=1)
    assert [each["n"] for each in lines(folder, "in")] == [
        "blocks.0",
        "blocks.0.down",
        "blocks.1.down",
    ]


def test_window_begins_later_and_is_as_long_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPRO_TRACE_FROM", "2")
    monkeypatch.setenv("REPRO_TRACE_STEPS", "1")
    tracer.install(str(tmp_path), 0, 1)
    training.train()
    assert [each["s"] for each in lines(tmp_path, "step")] == [2]
    assert {each["s"] for each in lines(tmp_path) if "s" in each} == {2} and lines(
        tmp_path, "state"
    )
    assert lines(tmp_path, "end")[0] == {"k": "end", "steps": 1, "reason": "window"}


def test_settings_and_clipping(folder: Path) -> None:
    training.train(steps=2)
    assert (
        lines(folder, "opt")[0]["class"] == "AdamW"
        and lines(folder, "opt")[0]["groups"][0]["lr"] == 1e-2
    )
    assert (
        all(each["norm"] > training.LIMIT for each in lines(folder, "clip"))
        and len(lines(folder, "clip")) == 2
    )
    assert lines(folder, "end")[0]["reason"] == "exit" and lines(folder, "end")[0]["steps"] == 2


# Scripts of every kind.


def test_script_that_trains_nothing_or_ends_before_a_step(folder: Path) -> None:
    _, files, end = lines(folder)
    assert (
        files["files"][training.__file__] == ending.hash_of(training.__file__) and end["k"] == "end"
    )
    assert not any("site-packages" in path for path in files["files"])
    tracer.side("forward")
    training.new_model()(input_ids=training.batches(1)[0])
    tracer.close("exception")
    assert lines(folder, "end", "forward")[0] == {"k": "end", "steps": 0, "reason": "exception"}
    assert lines(folder, "fwd", "forward") and not lines(folder, "step", "forward")


def test_script_without_an_optimizer_is_one_step(folder: Path) -> None:
    model, batch = training.new_model(), training.batches(1)[0]
    model(input_ids=batch, labels=batch)["loss"].backward()
    assert [each["s"] for each in lines(folder, "step")] == [0] and len(
        lines(folder, "param")
    ) == 14


def test_two_models_and_a_reference_without_gradients(folder: Path) -> None:
    model, reference = training.new_model(), training.new_model()
    optimizer = training.adamw(model)
    for batch in training.batches(2):
        with torch.no_grad():
            reference(input_ids=batch)
        step(model, optimizer, batch)
    assert [(each["m"], each["root"]) for each in lines(folder, "batch")] == [(0, 0), (1, 1)] * 2
    assert {each["n"].startswith("root1.") for each in lines(folder, "lgrad")} == {True}
    assert {each["m"] for each in lines(folder, "bwd")} == {1}


def test_gradients_of_autograd_grad_are_the_reduced_ones_too(folder: Path) -> None:
    model, batch = training.new_model(), training.batches(1)[0]
    optimizer, weights = training.adamw(model), list(model.parameters())
    for weight, gradient in zip(
        weights, torch.autograd.grad(model(input_ids=batch, labels=batch)["loss"], weights)
    ):
        weight.grad = gradient
    optimizer.step()
    kinds = Counter(each["k"] for each in lines(folder))
    assert kinds["lgrad"] == kinds["rgrad"] == kinds["ograd"] == len(weights)


def test_a_forked_child_leaves_the_trace(folder: Path) -> None:
    model, batch = training.new_model(), training.batches(1)[0]
    step(model, training.adamw(model), batch)
    child = os.fork()
    if not child:
        step(model, training.adamw(model), batch)
        os._exit(tracer.hooks.tracer is not None)
    assert os.waitpid(child, 0)[1] == 0
    assert len(lines(folder, "step")) == 1 and len(lines(folder, "end")) == 1


def test_features_that_another_model_made_have_its_samples(folder: Path) -> None:
    first, second = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 2)
    second(first(torch.tensor([[1], [2]])) * 1.0).sum().backward()
    batches = lines(folder, "batch")
    assert batches[0]["samples"] == batches[1]["samples"] and [
        each["root"] for each in batches
    ] == [0, 1]


def test_many_calls_without_gradients_are_not_all_recorded(folder: Path) -> None:
    model, batch = training.new_model(), training.batches(1)[0]
    with torch.inference_mode():
        for _ in range(70):
            model(input_ids=batch)
    step(model, training.adamw(model), batch)
    assert len(lines(folder, "batch")) == 65 and len(lines(folder, "note")) == 1


def test_model_called_twice_per_step_and_two_optimizers(folder: Path) -> None:
    model = training.new_model()
    halves = [
        torch.optim.SGD(half, lr=0.1)
        for half in (model.blocks.parameters(), model.head.parameters())
    ]
    for batch in training.batches(2):
        (
            model(input_ids=batch, labels=batch)["loss"]
            - model(input_ids=batch.flip(1), labels=batch)["loss"]
        ).backward()
        for each in halves:
            each.step()
    assert [each["m"] for each in lines(folder, "lgrad")] == [1] * 28
    assert [each["s"] for each in lines(folder, "opt")] == [0, 0, 1, 1] and len(
        lines(folder, "step")
    ) == 2
    assert len(lines(folder, "param")) == 2 * 13  # no optimizer has the embedding


def test_model_that_is_swapped_frozen_parameters_and_unused_modules(folder: Path) -> None:
    model = training.new_model()
    model.embed.requires_grad_(False)
    model.unused = torch.nn.Linear(2, 2)
    step(model, training.adamw(model), training.batches(1)[0])
    other = training.new_model()
    step(other, training.adamw(other), training.batches(1)[0])
    models = lines(folder, "model")
    assert [each["root"] for each in models] == [0, 1] and ["unused", "Linear"] in models[0][
        "names"
    ]
    frozen = [each for each in models[0]["parameters"] if each[0] == "embed.weight"]
    assert frozen == [["embed.weight", [training.WORDS, training.SIZE], "float32", False]]
    assert {each["s"] for each in lines(folder, "lgrad") if each["n"] == "root1.embed.weight"} == {
        1
    }


def test_not_a_number_is_recorded_on(folder: Path) -> None:
    training.train(change=lambda model: model.blocks[1].norm.weight.data.fill_(torch.nan))
    broken = [
        each["n"]
        for each in lines(folder, "fwd")
        if each["s"] == 0 and values(each)[0] != values(each)[0]
    ]
    assert broken[0] == "blocks.1.norm" and len(lines(folder, "step")) == 3


def test_scaled_gradients_and_a_skipped_step(folder: Path) -> None:
    amp = getattr(torch.amp, "GradScaler", None)
    if amp is None:
        pytest.skip("torch < 2.3")
    scaler, model, batch = amp("cpu", init_scale=8.0), training.new_model(), training.batches(1)[0]
    optimizer = training.adamw(model)
    for factor in (1.0, torch.inf, 1.0):
        scaler.scale(model(input_ids=batch, labels=batch)["loss"] * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert [each["s"] for each in lines(folder, "step")] == [0, 1]
    assert [(each["s"], each["m"]) for each in lines(folder, "batch")] == [(0, 0), (1, 0), (1, 1)]
    reduced, received = (next(each for each in lines(folder, kind)) for kind in ("rgrad", "ograd"))
    assert values(reduced)[0] == pytest.approx(8 * values(received)[0])


def test_compiled_model_runs_uncompiled_under_its_names(folder: Path) -> None:
    assert os.environ["TORCH_COMPILE_DISABLE"] == "1"
    model = torch.compile(training.new_model())
    with torch._dynamo.config.patch(
        disable=True
    ):  # another test may have imported it without the variable
        step(model, training.adamw(model), training.batches(1)[0])
    assert {"", "blocks.0.up"} <= {each["n"] for each in lines(folder, "fwd")} and len(
        lines(folder, "param")
    ) == 14


def test_a_compiled_step_of_an_optimizer_is_a_step(folder: Path) -> None:
    model = training.new_model()
    optimizer = training.adamw(model)
    update = torch.compile(optimizer.step, backend="eager")
    for batch in training.batches(2):
        model(input_ids=batch, labels=batch)["loss"].backward()
        update()
    assert [each["s"] for each in lines(folder, "step")] == [0, 1] and not lines(folder, "note")


def test_a_step_that_only_makes_states_is_none(folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    model = training.new_model()
    optimizer = training.adamw(model)
    for batch in training.batches(2):
        _init_optim_state(optimizer)
        step(model, optimizer, batch)
    assert [each["s"] for each in lines(folder, "step")] == [0, 1]
    assert all("exp_avg" in each["groups"][0]["state"] for each in lines(folder, "opt"))


def test_reading_a_parametrized_weight_is_no_call_of_a_model(folder: Path) -> None:
    model = training.new_model()
    torch.nn.utils.parametrizations.weight_norm(model.head)
    model.head.weight.sum()
    model(input_ids=training.batches(1)[0])
    assert [each["root"] for each in lines(folder, "batch")] == [0]
    assert lines(folder, "model")[0]["names"][0] == ["", "Model"]


def test_schedule_and_names_of_a_group(folder: Path) -> None:
    model = training.new_model()
    optimizer = training.adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for batch in training.batches(2):
        step(model, optimizer, batch)
        scheduler.step()
        scheduler.step()
    steps = lines(folder, "opt")
    assert [each["at"] for each in steps] == [0, 2]
    assert steps[0]["names"] == [[name for name, *_ in lines(folder, "model")[0]["parameters"]]]


def test_a_model_beside_that_of_deepspeed_has_nothing_in_its_optimizer() -> None:
    """The model was trained before, or is a reference."""
    held = torch.nn.Parameter(torch.ones(2))
    held.grad = torch.ones(2)
    plain = Parameter("weight", [2], "float32", True, held, [])
    assert plain.received(None, torch.optim.SGD([torch.ones(2)])) is None
    assert plain.gradient() is not None
    held._hp_mapping = None  # another rank has it
    assert plain.of_zero and plain.received(None, torch.optim.SGD([held])) is None


def test_selective_checkpointing_does_not_see_the_tracer(tmp_path: Path) -> None:
    checkpointing = pytest.importorskip("torch.utils.checkpoint")
    if not hasattr(checkpointing, "create_selective_checkpoint_contexts"):
        pytest.skip("torch < 2.4")

    def loss() -> float:
        model, batch = training.new_model(), training.batches(1)[0]
        saved = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
        contexts = lambda: checkpointing.create_selective_checkpoint_contexts(saved)  # noqa: E731
        out = checkpointing.checkpoint(
            model.blocks[0], model.embed(batch), use_reentrant=False, context_fn=contexts
        )
        out.square().mean().backward()
        return sum(float(each.grad.abs().sum()) for each in model.blocks[0].parameters())

    plain = loss()
    tracer.install(str(tmp_path), 0, 1)
    assert loss() == plain
    assert not lines(tmp_path, "note") and lines(tmp_path, "fwd")


# Nothing stops the script.


def test_full_disk_ends_the_trace_and_not_the_script(folder: Path) -> None:
    plain = training.train()
    tracer.side("full")
    tracer.hooks.tracer.writer.file = open("/dev/full", "a")  # noqa: SIM115
    assert training.train() == plain
    assert [each["k"] for each in lines(folder, side="full")] == ["start"]


def test_error_of_the_tracer_is_a_note(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RootBatch, "rows", lambda *_: 1 / 0)
    training.train()
    assert (
        "ZeroDivisionError" in lines(folder, "note")[0]["text"]
        and lines(folder, "end")[0]["reason"] == "error"
    )


SCRIPT = """
import os, sys, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=4, num_workers=int(sys.argv[1]))
for number, batch in enumerate(data):
    model(batch).sum().backward()
    if number == 2 and sys.argv[2] == "kill":
        os.kill(os.getpid(), 9)
    if number == 2 and sys.argv[2] == "raise":
        raise ValueError("stop")
    optimizer.step()
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "end"),
    [
        pytest.param("kill", None, marks=pytest.mark.slow),
        ("raise", "exception"),
        ("workers", "window"),
    ],
)
def test_script_of_a_user_is_traced_to_its_end(tmp_path: Path, how: str, end: str | None) -> None:
    script, records, traces = tmp_path / "train.py", tmp_path / "records", tmp_path / "traces"
    script.write_text(SCRIPT)
    for each in (records, traces, tmp_path / "logs"):
        each.mkdir()
    env = {
        **os.environ,
        "PYTHONPATH": str(WORKER / "hooks"),
        "REPRO_PLAIN": "1",
        "REPRO_RECORDS": str(records),
    }
    env |= {"REPRO_TRACE": str(traces)}
    subprocess.run(
        [sys.executable, str(script), "2" if how == "workers" else "0", how],
        env=env,
        check=False,
        timeout=120,
    )
    every = lines(traces)
    assert [each["s"] for each in every if each["k"] == "step"] == (
        [0, 1, 2] if how == "workers" else [0, 1]
    )
    assert [each["reason"] for each in every if each["k"] == "end"] == ([end] if end else [])
    assert [path.name for path in traces.iterdir()] == ["trace-0.jsonl"]
