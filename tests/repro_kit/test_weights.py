"""Weights drawn one parameter at a time: the same whoever draws them, and never a whole model at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from repro_matrix.config import catalog as catalogue
from repro_matrix.paths import REPROS

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if str(REPROS) not in sys.path:
    sys.path.insert(0, str(REPROS))

from repro_kit.settings import model_settings

CATALOGUE = catalogue.load()


def run_of(name: str, strategy: str = "ddp", **changes: Any) -> Any:
    """As much of a Run as building and wrapping a model needs."""
    model = model_settings(CATALOGUE.raw["model"][name], "tiny", "random")
    model["config"] = {**model["config"], "num_hidden_layers": 4}
    options = dict(CATALOGUE.raw["strategy"][strategy]["options"])
    record = SimpleNamespace(data={"in_force": [], "metrics": {}, "facts": {}})
    values = {
        "model": model, "seed": 3, "device": torch.device("cpu"), "options": options, "world_size": 1, "tp_size": 1,
        "flags": {}, "fact": lambda *_: None, "record": record, "rank": 0,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def test_nothing_is_allocated_before_it_is_drawn_and_buffers_are_real() -> None:
    from repro_kit.models import drawable

    model, weights = drawable(run_of("llama-3.2-1b"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
    assert model.lm_head.weight is model.get_input_embeddings().weight, "tied before"
    with weights.filled(model) as filled:
        assert filled is model and {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    weights.fill(model)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert model.lm_head.weight is model.get_input_embeddings().weight, "and after"


@pytest.mark.parametrize("name", ["qwen1.5-0.5b", "llama-2-7b"])
def test_a_parameter_depends_on_seed_and_name_alone(name: str) -> None:
    from repro_kit.models import build, drawable

    run = run_of(name)
    whole = build(run).state_dict()
    model, weights = drawable(run)
    for layer in reversed(model.model.layers):  # another order, in pieces
        weights.fill(layer)
    weights.fill(model)
    assert all(torch.equal(value, whole[key]) for key, value in model.state_dict().items())
    other = build(run, seed=4).state_dict()
    key = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(other[key], whole[key])
    assert not torch.equal(whole[key], whole["model.layers.1.mlp.up_proj.weight"])
    assert 0.015 < float(whole[key].std()) < 0.025
    assert torch.isfinite(build(run)(torch.zeros(1, 4, dtype=torch.long)).logits).all()


def test_nothing_is_drawn_into_parameters_on_meta() -> None:
    """It would be computed, in Python, for nothing: a quarter of an attempt's time once."""
    from repro_kit.models import drawable
    from repro_kit.weights import DRAWN, parameters_on_meta

    from torch.utils._python_dispatch import TorchDispatchMode

    drawn: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__.partition(".")[0] in DRAWN and args[0].is_meta:
                drawn.append(str(func))
            return func(*args, **(kwargs or {}))

    with Seen():
        drawable(run_of("qwen2.5-0.5b"))
    assert drawn == []
    with parameters_on_meta():
        own = torch.zeros(3).fill_(2.0)  # what is not on meta is computed as ever
        assert own.tolist() == [2.0, 2.0, 2.0]
    assert not [name for name in DRAWN if name in vars(torch.Tensor)], "put back"


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def four() -> Iterator[None]:
    """Four ranks, of which this is the first: collectives do nothing, shards are real."""
    import torch.distributed as dist

    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2", "tp"])
def test_no_rank_holds_more_than_one_unit_whole(strategy: str, four: None) -> None:
    """Counted: the memory of all drawn parameters that still exist whenever another one is drawn."""
    from repro_kit.models import drawable
    from repro_kit.strategies import STRATEGIES

    run = run_of("llama-2-7b", strategy, world_size=4, tp_size=4 if strategy == "tp" else 1)
    model, weights = drawable(run)
    total = sum(parameter.numel() for parameter in model.parameters())
    layer = max(sum(p.numel() for p in layer.parameters()) for layer in model.model.layers)
    largest = max(p.numel() for p in model.parameters())
    unit = largest if strategy == "tp" else max(layer, total - 4 * layer)
    most, draw = 0, weights.draw

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal most
        out = draw(*args, **kwargs)
        alive = [parameter for made in weights.made.values() if (parameter := made()) is not None]
        local = [p.to_local() if hasattr(p, "to_local") else p for p in alive]
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() // 4 for p in local}
        most = max(most, out.numel() + sum(storages.values()))
        return out

    weights.draw = counting  # type: ignore[method-assign]
    STRATEGIES[strategy](run, model, 0.1, weights)
    assert 0 < most <= total / 4 + 1.1 * unit < total, "its shards, and the unit that is being drawn"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2", "tp"])
def test_what_is_drawn_unit_by_unit_is_what_one_process_draws(strategy: str, group: None) -> None:
    from repro_kit.models import build, drawable
    from repro_kit.strategies import STRATEGIES

    for name in ("llama-2-7b", "qwen1.5-0.5b"):  # untied, and tied
        model, weights = drawable(run_of(name, strategy))
        got = dict(STRATEGIES[strategy](run_of(name, strategy), model, 0.1, weights).each())
        want = dict(build(run_of(name)).named_parameters())
        assert set(got) == set(want) and all(torch.equal(got[key], want[key]) for key in want)


@pytest.mark.parametrize("name", ["llama-2-7b", "qwen-14b"])
def test_an_adapter_is_drawn_with_the_model_and_in_its_dtype(name: str) -> None:
    pytest.importorskip("peft")
    from repro_kit.lora_training import lora_to_draw
    from repro_kit.models import drawable

    run = run_of(name)
    model, weights = drawable(run, torch.bfloat16)
    model = lora_to_draw(run, model, weights)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    with weights.filled(model):
        trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
        assert trained and all("lora_" in key and float(p.detach().float().norm()) > 0 for key, p in trained.items())


def test_published_weights_are_read_parameter_by_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder as the hub gives it, in several files; offline."""
    from repro_kit.models import build, drawable

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    whole = build(run_of("qwen1.5-0.5b"), torch.bfloat16)
    whole.save_pretrained(str(tmp_path), max_shard_size="300KB")
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    run = run_of("qwen1.5-0.5b")
    run.model = {**run.model, "weights": "hub", "hub": str(tmp_path)}
    model, weights = drawable(run, torch.bfloat16)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    weights.fill(model)
    want = dict(whole.named_parameters())
    assert all(torch.equal(value, want[name]) for name, value in model.named_parameters())
    other, drawn = drawable(run, torch.bfloat16, seed=9)  # what a checkpoint is loaded into: not the published weights
    assert not torch.equal(drawn.fill(other).lm_head.weight, want["model.embed_tokens.weight"])


# --- bfloat16 on a CPU that has no instructions for it


def test_products_in_float32_are_bfloat16s_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from repro_kit import bf16_matmul as products

    monkeypatch.setattr(products, "BLOCK", 7)
    a, b, bias = (torch.randn(*shape).bfloat16() for shape in ((20, 30), (30, 16), (16,)))
    want = a.double() @ b.double()
    for got, exact in ((products._product(a, b, None), want), (products._product(a, b, bias), want + bias.double())):
        assert got.dtype == torch.bfloat16
        assert float((got.double() - exact).norm() / exact.norm()) < 2 * torch.finfo(torch.bfloat16).eps / 4
    out = products._mm(a.float(), b.float())  # what is float32 stays as it is
    assert torch.equal(out, a.float() @ b.float())
    assert torch.equal(
        products._addmm(bias.float(), a.float(), b.float()), torch.addmm(bias.float(), a.float(), b.float())
    )
