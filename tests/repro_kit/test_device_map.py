"""The two cases about a device_map on GPUs prove that the map spans several, without a GPU: accelerate's own arithmetic
for so many cards places the model, and the scripts look at what it says."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from repro_matrix.paths import CONF, REPROS

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
if str(REPROS) not in sys.path:
    sys.path.insert(0, str(REPROS))

from repro_kit.settings import model_settings

MODELS = {"device-map-distributed": ["qwen-14b", "llama-2-7b"], "qwen-device-map-devices": ["qwen-7b", "qwen-1.8b"]}


class Run(SimpleNamespace):
    """As much of a Run as loading takes. ``checks``: name -> whether it passed."""

    def __init__(self, model: str, devices: int) -> None:
        raw = yaml.safe_load((CONF / "model" / f"{model}.yaml").read_text(encoding="utf-8"))
        super().__init__(
            model=model_settings(raw, "tiny", "random"), seed=0, devices=devices, world_size=devices,
            device_kind="cuda", flags={"device_map": "auto"}, checks={}, fact=lambda *_: None,
        )  # fmt: skip

    def check(self, name: str, *, got: Any, want: Any, looked_at: str) -> None:
        self.checks[name] = got == want


def split_checked(monkeypatch: pytest.MonkeyPatch, case: str, run: Run, places: dict[str, Any]) -> bool:
    """Whether the case's own script is content with a model that lies so."""
    name = case.replace("-", "_")
    spec = importlib.util.spec_from_file_location(f"a_{name}", REPROS / f"{name}.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    loaded = SimpleNamespace(hf_device_map=places, config=SimpleNamespace())
    loaded.train = lambda: loaded
    monkeypatch.setattr(script, "load", lambda *_, **__: loaded)
    script.load_mapped(run, "folder", True)
    return bool(run.checks["split"])


def accelerates_map(run: Run, cards: int) -> dict[str, Any]:
    """What from_pretrained(device_map="auto") makes of so many empty cards of 80 GB."""
    from repro_kit.models import config_of

    from accelerate.utils import get_balanced_memory
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        remote = bool(run.model.get("remote_code"))
        model = AutoModelForCausalLM.from_config(config_of(run), trust_remote_code=remote)
    whole = {"no_split_module_classes": model._no_split_modules, "dtype": torch.float32}
    memory = {**{card: 80 << 30 for card in range(cards)}, "cpu": 500 << 30}
    return dict(
        accelerate.infer_auto_device_map(model, max_memory=get_balanced_memory(model, memory, **whole), **whole)
    )


@pytest.mark.parametrize("cards", [2, 4, 8])
@pytest.mark.parametrize("case, model", [(case, model) for case, models in MODELS.items() for model in models])
def test_what_accelerate_spreads_over_any_number_of_cards_is_a_split(
    case: str, model: str, cards: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Four cards were asked for four parts: a tiny model has three, and every arm that keeps its map was in error."""
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path))
    run = Run(model, cards)
    assert split_checked(monkeypatch, case, run, accelerates_map(run, cards))


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("places", [{"": 0}, {"a": 1, "b": 1}, {"a": 0, "b": "cpu"}, {"a": 0, "b": "disk"}])
def test_one_card_and_the_host_are_no_split(case: str, places: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not split_checked(monkeypatch, case, Run(MODELS[case][0], 2), places)
