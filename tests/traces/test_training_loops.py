"""Training loops of users, in this process: what the comparison of two of them names, and that
healthy ones agree."""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from repro_matrix.traces.comparison import locate
from repro_matrix.traces.location import Location
from repro_matrix.traces.reader import read_trace

torch = pytest.importorskip("torch")
from repro_matrix.launch.worker import tracer

functional = torch.nn.functional


class Chunked(torch.nn.Module):
    """Its head is never called: the loss uses the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh())
        self.head = torch.nn.Linear(16, 4)

    def loss(self, batch: Any, targets: Any) -> Any:
        return functional.cross_entropy(
            functional.linear(self.body(batch), self.head.weight, self.head.bias), targets
        )


def train(bug: str) -> None:
    """Train three steps. ``bug``: what the bad side does otherwise."""
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Dropout(0.1).eval(), torch.nn.Linear(16, 4)
    )
    model = Chunked() if bug.startswith("chunked") else model
    scale = torch.nn.Parameter(torch.ones(4))
    owners = [*(copy.deepcopy(model) if bug == "copied optimizer" else model).parameters(), scale]
    optimizer = torch.optim.SGD(owners, 0.1, momentum=0.9 if bug.startswith("momentum") else 0.0)
    for step in range(3):
        batch, targets = torch.randn(6, 8), torch.randint(0, 4, (6,))
        if bug == "evaluation":
            with torch.no_grad():
                model(batch)
        optimizer.zero_grad()
        if isinstance(model, Chunked):
            loss = model.loss(batch, targets)
        else:
            loss = functional.cross_entropy(
                model(batch) * (scale.detach() if bug == "detached" else scale), targets
            )
        loss.backward()
        if bug == "edited":
            model[2].bias.grad.mul_(1.05)
        if bug == "no gradient":
            model[2].bias.grad = None
        if bug == "chunked head" and step == 2:
            model.head.weight.grad.neg_()
        if bug == "outside":
            scale.grad.zero_()
        torch.nn.utils.clip_grad_norm_(owners, 0.1)
        optimizer.step()
        if bug in ("swapped", "momentum swapped") and not step:
            model = copy.deepcopy(model)
            owners = [*model.parameters(), scale]
            optimizer = torch.optim.SGD(owners, 0.1, momentum=optimizer.defaults["momentum"])


def train_two(loop: str, accumulation: int, wrong: int = -1) -> None:
    """Train two models, one of which gets what the other one made, for two steps of four samples.
    ``wrong``: the micro-batch whose features are not right."""
    torch.manual_seed(0)
    first, second = (
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()),
        torch.nn.Linear(8, 8),
    )
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for number, batch in enumerate(torch.randn(4, 8).chunk(accumulation)):
            loss = LOOPS[loop](first, second, batch)
            loss = loss * 1.5 if number == wrong else loss
            (loss.mean() / accumulation).backward()
        optimizer.step()


def no_grad(model: Any, batch: Any) -> Any:
    with torch.no_grad():
        return model(batch)


LOOPS: dict[str, Any] = {
    "one after another": lambda first, second, batch: second(first(batch)),
    "code between": lambda first, second, batch: second(first(batch) * 2),
    "frozen encoder": lambda first, second, batch: second(no_grad(first, batch)),
    "frozen encoder, code between": lambda first, second, batch: second(no_grad(first, batch) * 2),
    "teacher": lambda first, second, batch: (no_grad(first, batch) - second(batch)) ** 2,
    "discriminator": lambda first, second, batch: second(first(batch).detach()) - second(batch + 1),
    "real data first": lambda first, second, batch: second(batch + 1) - second(first(batch)),
}


def compare(folder: Path, monkeypatch: pytest.MonkeyPatch, good: Any, bad: Any) -> Location:
    """Trace ``good`` and ``bad``, and ``good`` twice more with noise."""
    traces = []
    for name, train, noise in (
        ("good", good, ""),
        ("noise1", good, "1"),
        ("noise2", good, "2"),
        ("bad", bad, ""),
    ):
        (folder / name).mkdir()
        monkeypatch.setenv("REPRO_TRACE_NOISE", noise)
        tracer.install(str(folder / name), 0, 1)
        train()
        tracer.close("exit")
        traces.append(read_trace(folder / name))
    return locate(traces[0], traces[3], traces[1:3])


@pytest.mark.parametrize(
    "good, bad, step, stage, place",
    [
        ("chunked", "chunked head", 2, "gradient before the optimizer", "optimizer.2"),
        ("", "outside", 0, "gradient before the optimizer", "optimizer.4"),
        ("", "detached", 0, "gradient before the optimizer", "optimizer.4"),
        ("", "edited", 0, "gradient before the optimizer", "2.bias"),
        ("", "no gradient", 0, "gradient before the optimizer", "2.bias"),
        ("", "copied optimizer", 0, "update", "0.weight"),
        ("momentum", "momentum swapped", 1, "optimizer setting", "group 0: state"),
    ],
)
def test_an_error_of_a_training_loop_is_named(tmp_path, monkeypatch, good, bad, step, stage, place):
    found = compare(tmp_path, monkeypatch, partial(train, good), partial(train, bad))
    assert (found.verdict, found.step, found.stage, found.place) == (
        "differs",
        step,
        stage,
        place,
    ), found.sentence()


@pytest.mark.parametrize("bad", ["swapped", "evaluation"])
def test_a_model_that_is_copied_and_an_evaluation_beside_the_training_agree(
    tmp_path, monkeypatch, bad
):
    found = compare(tmp_path, monkeypatch, partial(train, ""), partial(train, bad))
    assert found.verdict == "agrees" and found.coverage.steps == 3, found.sentence()


@pytest.mark.parametrize("loop", LOOPS)
def test_two_models_agree_whatever_the_accumulation(tmp_path, monkeypatch, loop):
    good, bad = partial(train_two, loop, 1), partial(train_two, loop, 2)
    found = compare(tmp_path, monkeypatch, good, bad)
    assert found.verdict == "agrees" and found.coverage.steps == 2, found.sentence()


def test_the_calls_of_each_model_are_counted_by_themselves(tmp_path, monkeypatch):
    loop = "frozen encoder, code between"
    found = compare(
        tmp_path, monkeypatch, partial(train_two, loop, 2), partial(train_two, loop, 2, wrong=1)
    )
    assert (found.verdict, found.stage, found.micro) == (
        "differs",
        "loss weight",
        (1,),
    ), found.sentence()


def train_student(wrong: bool) -> None:
    """Train a second model on what the first one, which stays as it is, says."""
    torch.manual_seed(0)
    teacher, student = (
        torch.nn.Linear(8, 8),
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)),
    )
    student[1].eps = 1.0 if wrong else 1e-5
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    for batch in torch.randn(2, 4, 8):
        optimizer.zero_grad()
        ((no_grad(teacher, batch) - student(batch)) ** 2).mean().backward()
        optimizer.step()


def test_a_wrong_module_of_a_second_model_is_named_though_the_first_one_agrees(
    tmp_path, monkeypatch
):
    found = compare(
        tmp_path, monkeypatch, partial(train_student, False), partial(train_student, True)
    )
    assert (found.stage, found.place) == ("forward", "root1.1"), found.sentence()
    assert any("root1 is a Sequential" in note for note in found.coverage.notes)


def train_parts(apart: bool, factor: float = 1.0) -> None:
    """Train a model by its forward, or by calls of its two parts."""
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh())
    model: Any = torch.nn.Sequential(OrderedDict(body=body, head=torch.nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in torch.randn(3, 4, 8):
        optimizer.zero_grad()
        (model.head(model.body(batch)) if apart else model(batch)).square().mean().backward()
        model.head.bias.grad.mul_(factor)
        optimizer.step()


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_the_parts_of_a_model_see_its_samples_not_others(tmp_path, monkeypatch, factor):
    found = compare(
        tmp_path, monkeypatch, partial(train_parts, False), partial(train_parts, True, factor)
    )
    assert found.stage != "data", found.sentence()
    assert found.verdict == ("agrees" if factor == 1.0 else "differs"), found.sentence()


def train_gan(rate: float) -> None:
    """Train a discriminator, then a generator, on the same generated batch."""
    torch.manual_seed(0)
    generator, discriminator = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
    of_one, of_other = (
        torch.optim.SGD(each.parameters(), rate) for each in (discriminator, generator)
    )
    for real in torch.randn(3, 4, 8):
        fake = generator(torch.randn(4, 4))
        of_one.zero_grad()
        (discriminator(fake.detach()) - discriminator(real)).mean().backward()
        of_one.step()
        of_other.zero_grad()
        (-discriminator(fake)).mean().backward()
        of_other.step()


def test_a_generated_batch_keeps_its_samples_in_the_step_of_the_second_optimizer(
    tmp_path, monkeypatch
):
    found = compare(tmp_path, monkeypatch, partial(train_gan, 0.1), partial(train_gan, 0.1))
    assert found.verdict == "agrees" and found.coverage.steps == 3, found.sentence()
    assert found.coverage.seldom == (2, 1) and "of which 1 updated 2 parameters" in found.sentence()
    (tmp_path / "wrong").mkdir()
    found = compare(
        tmp_path / "wrong", monkeypatch, partial(train_gan, 0.1), partial(train_gan, 0.2)
    )
    assert (found.verdict, found.stage) == ("differs", "optimizer setting"), found.sentence()
    assert "root1.weight" in found.relation, found.relation  # the discriminator's optimizer


def train_and_save(folder: Path, save: str, wrong: str = "") -> None:
    """Train a step, save the model, and train another. ``wrong``: what the file contains instead."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    start = copy.deepcopy(model.state_dict())
    for batch in torch.randn(2, 4, 8):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    weights = {name: each.detach().clone() for name, each in model.state_dict().items()}
    weights["seen"] = torch.tensor([8], dtype=torch.int8)
    contents: dict[str, dict[str, Any]] = {
        "": weights,
        "empty": {**weights, "bias": torch.empty(0)},
        "nothing": {},
        "stale": {**weights, "weight": start["weight"]},
        "reshaped": {**weights, "weight": weights["weight"].reshape(-1).clone()},
        "counted": {**weights, "seen": weights["seen"] + 1},
        "lacking": {name: each for name, each in weights.items() if name != "bias"},
        "more": {**weights, "module.bias": weights["bias"].clone()},
    }
    if save == "safetensors":
        save_file(contents[wrong], folder / f"model.{save}")
        return
    (folder / "other").mkdir(exist_ok=True)
    sparse = torch.eye(3).to_sparse()
    with open(folder / f"model.{save}", "wb") as file:
        torch.save({"model": contents[wrong], "epoch": 1, "sparse": sparse}, file)
    torch.save({"model": weights}, folder / "other" / f"model.{save}")


@pytest.mark.parametrize("save", ["safetensors", "pt"])
@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ("empty", "bias"),
        ("nothing", ""),
        ("stale", "weight"),
        ("reshaped", "weight"),
        ("counted", "seen"),
        ("lacking", "bias"),
    ],
)
def test_a_saved_file_without_the_trained_values_is_named(
    tmp_path, monkeypatch, save, wrong, place
):
    pytest.importorskip("safetensors")
    good = partial(train_and_save, tmp_path, save)
    found = compare(tmp_path, monkeypatch, good, partial(good, wrong))
    assert (found.verdict, found.step, found.stage) == ("differs", 1, "saved"), found.sentence()
    inside = "" if save == "safetensors" else "model."
    assert found.place == f"model.{save}" + (f": {inside}{place}" if place else "")
    assert ("shape" in found.relation) == (wrong in ("empty", "reshaped")), found.relation
    (tmp_path / "more").mkdir()
    found = compare(tmp_path / "more", monkeypatch, good, partial(good, "more"))
    tensors = 3 if save == "safetensors" else 6
    assert found.verdict == "agrees" and found.coverage.stages["saved"] == tensors, found.sentence()


def test_files_that_only_one_side_saved_are_noted(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    good, bad = (partial(train_and_save, tmp_path, save) for save in ("pt", "safetensors"))
    found = compare(tmp_path, monkeypatch, good, bad)
    assert found.verdict == "agrees" and "saved" not in found.coverage.stages
    notes = " ".join(found.coverage.notes)
    assert "good side saved model.pt" in notes and "bad side saved model.safetensors" in notes
