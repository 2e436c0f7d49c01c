"""Asks a stack what its models consist of, in a process of that stack, and remembers the answer."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from repro_matrix.environment.stacks import Stack
from repro_matrix.paths import REPROS, cache_dir
from repro_matrix.planning.memory import Facts

WORKER = Path(__file__).resolve().parents[1] / "launch" / "worker" / "model_facts.py"
LIMIT_S = 600
SIZES, LENGTH = (2, 4), 16  # sequences and their length: the batch of repros/repro_kit/models.py and its double

Json = dict[str, Any]


def question(settings: Mapping[str, Any]) -> Json:
    """What is asked about one arm's model, from its settings."""
    flags = settings["flags"]
    return {
        "model": settings["model"],
        "dtype": flags.get("dtype") or flags.get("base") or "float32",
        "lora": bool(flags.get("lora")),
        "checkpointing": bool(flags.get("checkpointing")),
        "sizes": list(SIZES),
        "length": LENGTH,
    }


def key_of(asked: Mapping[str, Any]) -> str:
    model = {name: asked["model"].get(name) for name in ("model_type", "remote_code", "config")}
    return _hash(json.dumps({**asked, "model": model}, sort_keys=True))


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


class Known:
    """What one stack has said so far, in the user's cache: a file per stack and version of the code that asks."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        asking = [
            WORKER,
            *(REPROS / "repro_kit" / name for name in ("models.py", "weights.py", "lora_training.py", "tp_plan.py")),
        ]
        asking += sorted((REPROS / "remote_code").rglob("*.py"))
        code = _hash(*(path.read_text(encoding="utf-8") for path in asking))
        self.path = cache_dir() / "facts" / f"{stack.key}-{code}.json"
        self.models: dict[str, Json] = {}
        self.bases: dict[str, dict[str, float]] = {}
        try:
            stored = json.loads(self.path.read_bytes())
            self.models, self.bases = stored["models"], stored["bases"]
        except (OSError, ValueError, KeyError):
            pass

    def ask(self, asked: Iterable[Json], imports: Iterable[tuple[str, ...]]) -> str | None:
        """Have all of these answered, by one process for those that are not known. Returns what went wrong, if it did.

        Takes some ten seconds of CPU: importing torch and transformers, and running each model on meta tensors.
        """
        models = {key_of(each): each for each in asked}
        models = {key: each for key, each in models.items() if key not in self.models}
        bases = [list(names) for names in dict.fromkeys(imports) if ",".join(names) not in self.bases]
        if not models and not bases:
            return None
        env = {**os.environ, **self.stack.environment(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        env["HF_MODULES_CACHE"] = str(cache_dir() / "facts" / f"modules-{self.stack.key}")
        env["CUDA_VISIBLE_DEVICES"] = ""
        command = [self.stack.python, str(WORKER), str(REPROS)]
        request = json.dumps({"models": models, "bases": bases})
        try:
            done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=LIMIT_S, env=env)
            answer = json.loads(done.stdout.splitlines()[-1])
        except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
            said = (done.stderr.strip().splitlines() or ["?"])[-1] if "done" in locals() else str(error)
            return f"stack {self.stack.name} does not say what its models need: {said}"
        self.models.update(answer["models"])
        self.bases.update(answer["bases"])
        self._save()
        return None

    def _save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"models": self.models, "bases": self.bases}), encoding="utf-8")
        os.replace(temporary, self.path)

    def model(self, asked: Json) -> Facts | None:
        """None: not known, or this stack cannot build the model."""
        found = self.models.get(key_of(asked))
        return None if found is None or "error" in found else Facts.from_json(found)

    def base_mb(self, imports: Iterable[str], start: str = "warm") -> float | None:
        return self.bases.get(",".join(imports), {}).get(start)
