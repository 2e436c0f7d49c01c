"""Weights drawn one parameter at a time: the same whoever draws them, and never a whole model at once."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from harness import catalogue
from harness.paths import REPROS

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if str(REPROS) not in sys.path:
    sys.path.insert(0, str(REPROS))

from repros.arm_settings import model_settings  # noqa: E402

CATALOGUE = catalogue.load()


def run_of(name: str) -> Any:
    """As much of a Run as building and wrapping a model needs."""
    model = model_settings(CATALOGUE.raw["model"][name], "tiny", "random")
    model["config"] = {**model["config"], "num_hidden_layers": 4}
    return SimpleNamespace(
        model=model, seed=3, device=torch.device("cpu"), options={}, world_size=1, tp_size=1, fact=lambda *_: None
    )


def test_nothing_is_allocated_before_it_is_drawn_and_buffers_are_real() -> None:
    from kit.models import drawable

    model, weights = drawable(run_of("llama-3.2-1b"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
    assert model.lm_head.weight is model.get_input_embeddings().weight, "tied before"
    weights.fill(model)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert model.lm_head.weight is model.get_input_embeddings().weight, "and after"


@pytest.mark.parametrize("name", ["qwen1.5-0.5b", "llama-2-7b"])
def test_a_parameter_depends_on_seed_and_name_alone(name: str) -> None:
    from kit.models import build, drawable

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
    from kit.models import drawable
    from kit.weights import DRAWN, parameters_on_meta

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
