"""Models as the ranks build them: tiny configurations, weights drawn one parameter at a time,
device maps."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from repro_kit import bf16_matmul as products
from repro_kit import models
from repro_kit.models import batch, build, drawable
from repro_kit.settings import model_settings
from repro_kit.strategies import STRATEGIES
from repro_kit.tp_plan import tp_plan

import pytest
from repro_matrix.config import catalog as catalogue
from repro_matrix.paths import REPROS

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

CATALOGUE = catalogue.load()


def run_of(name: str, strategy: str = "ddp", **changes: Any) -> Any:
    """As much of a Run as building and wrapping a model needs."""
    model = model_settings(CATALOGUE.raw["model"][name], "tiny", "random")
    record = SimpleNamespace(data={"effects": [], "metrics": {}, "facts": {}})
    values = {
        "model": model,
        "seed": 3,
        "device": torch.device("cpu"),
        "world_size": 1,
        "tp_size": 1,
        "flags": {},
        "rank": 0,
        "options": dict(CATALOGUE.raw["strategy"][strategy]["options"]),
        "fact": lambda *_: None,
        "record": record,
    }
    return SimpleNamespace(**{**values, **changes})


@pytest.fixture(scope="module", autouse=True)
def own_module_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import transformers.dynamic_module_utils as dynamic

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


@pytest.mark.parametrize("name", sorted(CATALOGUE.raw["model"]))
def test_tiny_config_keeps_preserved_keys_and_fits_tp(name: str) -> None:
    run = run_of(name)
    tiny, real = run.model["config"], CATALOGUE.raw["model"][name]["config"]
    for key in ("num_attention_heads", "tie_word_embeddings"):
        assert tiny[key] == real[key]
    model = build(run)
    names = [module for module, _ in model.named_modules()]
    unmatched = [pattern for pattern in tp_plan(model) if not fnmatch.filter(names, pattern)]
    if "num_experts" in real:  # the plan is for dense layers; no case has experts under tp
        unmatched = [pattern for pattern in unmatched if ".mlp." not in pattern]
    assert not unmatched, "parallelize_module would only warn"
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == real[
        "tie_word_embeddings"
    ]
    assert torch.isfinite(model(**batch(run, 0), use_cache=False).loss)


def stand_in() -> tuple[Any, torch.Tensor]:
    run = run_of("qwen-7b")
    return build(run).eval(), batch(run, 0)["input_ids"]


def test_remote_code_model_generates_without_cache_and_survives_saving(tmp_path: Path) -> None:
    model, ids = stand_in()
    call = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 5,
        "do_sample": False,
        "pad_token_id": 0,
    }
    assert torch.equal(model.generate(ids, **call), model.generate(ids, use_cache=False, **call))
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, config=model.config).eval()
    held, loaded = ({**each.state_dict(), **dict(each.named_buffers())} for each in (model, again))
    assert held.keys() == loaded.keys() and all(
        torch.equal(held[name], loaded[name]) for name in held
    )


@pytest.mark.parametrize("load", ["config_of", "fetch_code"])
def test_remote_code_copy_is_locked_between_ranks(
    load: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig, dynamic_module_utils

    copying = threading.Lock()

    def copy(*_: Any, **__: Any) -> SimpleNamespace:
        assert copying.acquire(blocking=False), "two ranks copy at once"
        time.sleep(0.02)
        copying.release()
        return SimpleNamespace(auto_map={"AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel"})

    monkeypatch.setattr(AutoConfig, "from_pretrained", copy)
    monkeypatch.setattr(dynamic_module_utils, "get_class_from_dynamic_module", copy)
    folder = REPROS / "remote_code" / "qwen_v1"
    run: Any = SimpleNamespace(model={"remote_code": "qwen_v1", "config": {}})
    calls = {
        "config_of": lambda: models.config_of(run),
        "fetch_code": lambda: models.fetch_code(str(folder), folder),
    }
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(calls[load]) for _ in range(4)]:
            done.result()


def kinds(tensors: Any) -> set[str]:
    return {tensor.device.type for tensor in tensors}


@pytest.mark.parametrize("name", ["qwen1.5-0.5b", "llama-2-7b"])
def test_drawn_parameter_depends_on_seed_and_name_only(name: str) -> None:
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


@pytest.fixture(params=["gloo"])
def group(request: pytest.FixtureRequest) -> Iterator[None]:
    """A process group of one; ``fake``: of four, whose first rank this is (collectives do nothing,
    shards are real)."""
    import torch.distributed as dist

    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    store, ranks = (fake.FakeStore(), 4) if request.param == "fake" else (dist.HashStore(), 1)
    dist.init_process_group(request.param, store=store, rank=0, world_size=ranks)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("group", ["fake"], indirect=True)
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2", "tp"])
def test_sharded_draw_holds_one_whole_unit_at_most(strategy: str, group: None) -> None:
    run = run_of("llama-2-7b", strategy, world_size=4, tp_size=4 if strategy == "tp" else 1)
    model, weights = drawable(run)
    total = sum(parameter.numel() for parameter in model.parameters())
    layer = max(sum(p.numel() for p in layer.parameters()) for layer in model.model.layers)
    largest = max(p.numel() for p in model.parameters())
    unit = largest if strategy == "tp" else max(layer, total - len(model.model.layers) * layer)
    most, draw = 0, weights.draw

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal most
        out = draw(*args, **kwargs)
        alive = [parameter for made in weights.made.values() if (parameter := made()) is not None]
        local = [p.to_local() if hasattr(p, "to_local") else p for p in alive]
        storages = {
            p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() // 4 for p in local
        }
        most = max(most, out.numel() + sum(storages.values()))
        return out

    weights.draw = counting  # type: ignore[method-assign]
    STRATEGIES[strategy](run, model, 0.1, weights)
    assert 0 < most <= total / 4 + 1.1 * unit < total, (
        "its shards, and the unit that is being drawn"
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2", "tp"])
def test_sharded_draw_equals_the_draw_of_one_process(strategy: str, group: None) -> None:
    for name in ("llama-2-7b", "qwen1.5-0.5b"):  # untied, and tied
        model, weights = drawable(run_of(name, strategy))
        actual = dict(STRATEGIES[strategy](run_of(name, strategy), model, 0.1, weights).each())
        expected = dict(build(run_of(name)).named_parameters())
        assert set(actual) == set(expected) and all(
            torch.equal(actual[key], expected[key]) for key in expected
        )


@pytest.mark.parametrize("name", ["llama-2-7b", "qwen-14b"])
def test_draw_includes_the_adapter_in_its_dtype(name: str) -> None:
    pytest.importorskip("peft")
    from repro_kit.lora_training import lora_to_draw

    run = run_of(name)
    model, weights = drawable(run, torch.bfloat16)
    model = lora_to_draw(run, model, weights)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    with weights.filled(model):
        trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
        assert trained and all(
            "lora_" in key and float(p.detach().float().norm()) > 0 for key, p in trained.items()
        )


def test_hub_weights_are_read_by_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    whole = build(run_of("qwen1.5-0.5b"), torch.bfloat16)
    whole.save_pretrained(str(tmp_path), max_shard_size="300KB")
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))[
        "weight_map"
    ]
    run = run_of("qwen1.5-0.5b")
    run.model = {**run.model, "weights": "hub", "hub": str(tmp_path)}
    model, weights = drawable(run, torch.bfloat16)
    assert kinds(model.parameters()) == {"meta"}
    weights.fill(model)
    expected = dict(whole.named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in model.named_parameters())
    other, drawn = drawable(
        run, torch.bfloat16, seed=9
    )  # what a checkpoint is loaded into: not the published weights
    assert not torch.equal(drawn.fill(other).lm_head.weight, expected["model.embed_tokens.weight"])


# --- bfloat16 on a CPU that has no instructions for it


def test_bf16_products_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "BLOCK", 7)
    a, b, bias = (torch.randn(*shape).bfloat16() for shape in ((20, 30), (30, 16), (16,)))
    expected = a.double() @ b.double()
    for added, exact in ((None, expected), (bias, expected + bias.double())):
        actual = products._product(a, b, added)
        assert actual.dtype == torch.bfloat16
        assert (
            float((actual.double() - exact).norm() / exact.norm())
            < 2 * torch.finfo(torch.bfloat16).eps / 4
        )
    out = products._mm(a.float(), b.float())  # what is float32 stays as it is
    assert torch.equal(out, a.float() @ b.float())
    floats = [tensor.float() for tensor in (bias, a, b)]
    assert torch.equal(products._addmm(*floats), torch.addmm(*floats))


@pytest.mark.parametrize(
    "case, model", [("device-map-distributed", "qwen-14b"), ("qwen-device-map-devices", "qwen-7b")]
)
@pytest.mark.parametrize(
    ("places", "split"),
    [
        ({"a": 0, "b": 1}, True),
        ({"": 0}, False),
        ({"a": 1, "b": 1}, False),
        ({"a": 0, "b": "cpu"}, False),
        ({"a": 0, "b": "disk"}, False),
    ],
)
def test_only_a_device_map_of_several_gpus_is_split(
    case: str, model: str, places: dict[str, Any], split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = case.replace("-", "_")
    spec = importlib.util.spec_from_file_location(f"a_{name}", REPROS / f"{name}.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    loaded = SimpleNamespace(hf_device_map=places, config=SimpleNamespace(), train=lambda: loaded)
    monkeypatch.setattr(script, "load", lambda *_, **__: loaded)
    checks: dict[str, bool] = {}

    def check(name: str, *, actual: Any, expected: Any, subject: str) -> None:
        checks[name] = actual == expected

    flags = {"device_map": "auto"}
    script.load_mapped(
        run_of(model, devices=2, world_size=2, device_kind="cuda", flags=flags, check=check),
        "x",
        True,
    )
    assert checks["split"] == split
