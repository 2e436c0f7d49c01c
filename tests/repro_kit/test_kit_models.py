"""The models of conf/model as the ranks build them, and our stand-in for first-generation Qwen."""

from __future__ import annotations

import fnmatch
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from repro_matrix.paths import CONF, REPROS

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if str(REPROS) not in sys.path:
    sys.path.insert(0, str(REPROS))

from repro_kit.settings import model_settings

MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))


def run_of(name: str) -> Any:
    """As much of a Run as building a model needs."""
    model = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text(encoding="utf-8"))
    return SimpleNamespace(model=model_settings(model, "tiny", "random"), seed=0, real=model["config"])


@pytest.fixture(scope="module", autouse=True)
def own_module_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import transformers.dynamic_module_utils as dynamic

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


@pytest.mark.parametrize("name", MODELS)
def test_tiny_keeps_what_failures_depend_on_and_the_tp_plan_fits(name: str) -> None:
    from repro_kit.models import batch, build
    from repro_kit.tp_plan import tp_plan

    run = run_of(name)
    tiny, real = run.model["config"], run.real
    for key in ("num_attention_heads", "tie_word_embeddings"):
        assert tiny[key] == real[key]
    model = build(run)
    names = [module for module, _ in model.named_modules()]
    unmatched = [pattern for pattern in tp_plan(model) if not fnmatch.filter(names, pattern)]
    assert not unmatched, "parallelize_module would only warn"
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == real["tie_word_embeddings"]
    assert torch.isfinite(model(**batch(run, 0), use_cache=False).loss)


@pytest.mark.parametrize("scale, hidden, layers", [("tiny", 2048, 2), ("full", 2048, 24)])
def test_what_a_failure_depends_on_keeps_its_real_value(scale: str, hidden: int, layers: int) -> None:
    model = yaml.safe_load((CONF / "model" / "qwen1.5-1.8b.yaml").read_text(encoding="utf-8"))
    assert model_settings(model, "tiny", "random")["config"]["hidden_size"] < hidden
    config = model_settings(model, scale, "random", keeps=["hidden_size"])["config"]
    assert (config["hidden_size"], config["num_hidden_layers"]) == (hidden, layers)


def stand_in() -> tuple[Any, torch.Tensor]:
    from repro_kit.models import batch, build

    run = run_of("qwen-7b")
    return build(run).eval(), batch(run, 0)["input_ids"]


def test_the_stand_in_has_the_published_names_hooks_and_buffers() -> None:
    model, _ = stand_in()
    layer = {name.removeprefix("transformer.h.0.") for name, _ in model.named_parameters() if ".h.0." in name}
    weights = ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.w1", "mlp.w2", "mlp.c_proj")
    assert layer == {"attn.c_attn.bias", *(f"{module}.weight" for module in weights)}
    others = {name for name, _ in model.named_parameters() if ".h." not in name}
    assert others == {"transformer.wte.weight", "transformer.ln_f.weight", "lm_head.weight"}
    buffers = {name.rsplit(".", 1)[-1] for name, _ in model.named_buffers()}
    assert buffers == {"inv_freq", "logn_tensor", "masked_bias", "registered_causal_mask"}
    assert not buffers & {name.rsplit(".", 1)[-1] for name in model.state_dict()}, "none of them is persistent"
    assert inspect.signature(model._set_gradient_checkpointing).parameters["value"].default is False


def test_the_stand_in_generates_the_same_with_and_without_its_cache() -> None:
    model, ids = stand_in()
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **call), model.generate(ids, use_cache=False, **call))


def test_the_stand_in_beyond_its_training_length_uses_dynamic_ntk_and_logn() -> None:
    model, _ = stand_in()
    base = model.transformer
    ids = torch.arange(2 * base.seq_length)[None] % 600
    with torch.no_grad():
        model(ids[:, : base.seq_length])
        assert base.rotary_emb._ntk_alpha_cached_list == [1]
        model(ids)
        assert base.rotary_emb._ntk_alpha_cached_list == [3]
    factors = base.h[0].attn.logn_tensor[0, :, 0, 0]
    assert factors[base.seq_length - 1] == 1.0 < factors[2 * base.seq_length - 1]


def test_the_stand_in_comes_back_from_disk_whole(tmp_path: Path) -> None:
    model, ids = stand_in()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, config=model.config).eval()
    for (name, saved), (_, loaded) in zip(model.state_dict().items(), again.state_dict().items()):
        assert torch.equal(saved, loaded), name
    for (name, saved), (_, loaded) in zip(model.named_buffers(), again.named_buffers()):
        assert torch.equal(saved, loaded), name
    assert torch.equal(model(ids).logits, again(ids).logits)


def test_the_published_version_demands_what_the_published_file_demands() -> None:
    from transformers.dynamic_module_utils import get_imports, get_relative_imports

    folder = REPROS / "remote_code" / "qwen_v1"
    assert not {"einops", "transformers_stream_generator"} & set(get_imports(folder / "modeling_qwen.py"))
    published = folder / "modeling_qwen_published.py"
    wanted = {"einops", "importlib", "math", "torch", "transformers", "transformers_stream_generator", "typing"}
    assert set(get_imports(published)) == wanted
    assert {"cpp_kernels", "qwen_generation_utils"} <= set(get_relative_imports(published))


COPIES = """
import shutil, sys, time
from pathlib import Path
from types import SimpleNamespace
import transformers.dynamic_module_utils as dynamic
from repro_kit import stored
folder, cache, first = sys.argv[1:]
dynamic.HF_MODULES_CACHE = cache
copy = dynamic.shutil.copyfile

def there(name, seconds=2):  # by the other one; with turns it never is
    limit = time.monotonic() + seconds
    while not Path(cache, name).exists() and time.monotonic() < limit:
        time.sleep(0.01)

def slowly(source, target, *args, **kwargs):  # the first begins anew when the second thinks that all is there
    if Path(source).name != "modeling_qwen.py":
        return copy(source, target, *args, **kwargs)
    if first == "first":
        Path(cache, "copying").touch()
        there("imported", 100)
        there("copied")
        text = Path(source).read_bytes()
        Path(target).write_bytes(text[: len(text) // 8].rpartition(b"\\n\\n\\n")[0])
        Path(cache, "half").touch()
        time.sleep(1)
        return copy(source, target, *args, **kwargs)
    copy(source, target, *args, **kwargs)
    Path(cache, "copied").touch()
    there("half")

dynamic.shutil = SimpleNamespace(copyfile=slowly)
run = SimpleNamespace(model={"remote_code": "qwen_v1"}, record=SimpleNamespace(data={"facts": {}}))
if first != "first":
    Path(cache, "imported").touch()
    there("copying", 100)
stored.files = lambda *args, **kwargs: None  # what is recorded of files is not the question
print(type(stored.load(run, folder)).__name__)
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_never_imports_code_that_another_one_is_still_copying(tmp_path: Path) -> None:
    """Without a lock the second process met an empty class: AttributeError (ranks=4 and ranks=8, one attempt each)."""
    from repro_kit.models import build

    build(run_of("qwen-1.8b")).save_pretrained(str(tmp_path / "stored"))
    cache = tmp_path / "cache"
    cache.mkdir()

    def start(which: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", COPIES, str(tmp_path / "stored"), str(cache), which]
        env = {**os.environ, "PYTHONPATH": str(REPROS), "HF_HUB_OFFLINE": "1"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)

    for process in [start("first"), start("second")]:
        out, err = process.communicate(timeout=300)
        assert out.strip() == "QWenLMHeadModel", err
