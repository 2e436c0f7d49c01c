"""First-generation Qwen as published, with single defects repaired; the cases qwen-remote-code-* load it.

remote_code/qwen_v1/modeling_qwen.py lists the defects. One failure hides the next, so a case about a later one repairs
the earlier ones (flag ``repaired``), and its fix variant repairs its own as well.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from repro_kit.models import REMOTE_CODE, config_of
from repro_kit.run import Run

CLASS = "modeling_qwen_published.QWenLMHeadModel"
STREAM_IMPORT = "from transformers_stream_generator.main import NewGenerationMixin, StreamGenerationConfig"
# Defect -> methods of the published classes; without them, those of the model that runs everywhere apply.
METHODS = {
    "head_masks": [("QWenModel", "_head_masks")],
    "cache": [
        ("QWenModel", "_past"),
        ("QWenModel", "_present"),
        ("QWenLMHeadModel", "prepare_inputs_for_generation"),
    ],
    "init_weights": [("QWenPreTrainedModel", "_init_weights")],
}


def folder(run: Run) -> Path:
    """Return this rank's copy of the published files; without the streaming import where that is repaired."""
    copy = run.work_dir / f"qwen_{os.getpid()}"
    shutil.copytree(REMOTE_CODE / "qwen_v1", copy, ignore=shutil.ignore_patterns("__pycache__"))
    if "imports" in run.flags["repaired"]:
        file = copy / "modeling_qwen_published.py"
        text = file.read_text(encoding="utf-8")
        assert STREAM_IMPORT in text
        text = text.replace(STREAM_IMPORT, "NewGenerationMixin = StreamGenerationConfig = None")
        file.write_text(text, encoding="utf-8")
    return copy


def published(run: Run, files: Path) -> Any:
    """Return the class from the folder, by transformers' dynamic import."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    model_class = get_class_from_dynamic_module(CLASS, str(files))
    classes = {kind.__name__: kind for kind in own_classes(model_class)}
    for trait, methods in METHODS.items():
        for name, method in methods if trait in run.flags["repaired"] else []:
            delattr(classes[name], method)
    return model_class


def own_classes(model_class: Any) -> list[type]:
    """Return the classes of the published version: the model's and its inner model's, without their bases."""
    kinds = [*model_class.__mro__, *model_class.model_class.__mro__]
    return [kind for kind in kinds if kind.__module__.endswith("modeling_qwen_published")]


def configuration(run: Run) -> Any:
    config = config_of(run, fp32=True)
    config.auto_map = {"AutoConfig": "configuration_qwen.QWenConfig", "AutoModelForCausalLM": CLASS}
    return config


def save_with_code(model: Any, files: Path, target: Path) -> str:
    """Save the model and its code, as in a published checkpoint."""
    model.save_pretrained(str(target))
    for file in files.glob("*.py"):
        shutil.copy(file, target)
    return str(target)
