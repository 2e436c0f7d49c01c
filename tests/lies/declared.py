"""Lies in what a case declares: its YAML, edited in a copy of conf/, loaded and asked for signatures that match all;
and variables of the user's, asked of what a rank inherits."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from hostile import HOSTILE
from launching import attempt_of
from repro_matrix.config import catalog as catalogue
from repro_matrix.errors import ReproError
from repro_matrix.grading.signature import overbroad_signature
from repro_matrix.launch.attempt import environment
from repro_matrix.launch.forkserver import server_environment
from repro_matrix.paths import CONF

from .lie import Bench, Lie

CASE = "fsdp-silently-untied"


def _load(plants: Sequence[Any]) -> list[str]:
    said = []
    with tempfile.TemporaryDirectory() as folder:
        conf = Path(shutil.copytree(CONF, Path(folder) / "conf"))  # one: what is not edited is not read again
        for plant in plants:
            with _planted(conf, plant):
                try:
                    cases = catalogue.load(conf, strict=True).cases
                    asked = [cases[plant[0]]] if plant else cases.values()
                    said.append("; ".join(filter(None, map(overbroad_signature, asked))) or "loaded")
                except ReproError as error:
                    said.append(f"refused: {error}".replace(str(folder), ""))
    return said


@contextmanager
def _planted(conf: Path, plant: Any) -> Iterator[None]:
    """A case's file edited, and as it was again."""
    if not plant:
        yield
        return
    slug, change = plant
    path = conf / "case" / f"{slug}.yaml"
    text = path.read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    change(data)
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    yield
    path.write_text(text, encoding="utf-8")


def message(text: str) -> Any:
    return "ddp-unfinished-reduction", lambda case: case["signatures"][0].update(message=text)


def arm(slug: str, **changes: Any) -> Any:
    return slug, lambda case: case["arms"].update({"lie": {"help": "a lie", **changes}})


DECLARED = Bench(
    "declared",
    "its YAML edited, loaded",
    "^loaded$",
    _load,
    (
        Lie("a signature that matches everything", "P5", message(".*"), "refused.*matches anything"),
        Lie("a signature that matches the empty message", "P5", message("^$"), "refused.*matches anything"),
        Lie("a signature of one common word", "P5", message("Expected"), "matches .* not its failure"),
        Lie("two arms with equal settings", "own", arm("ddp-unfinished-reduction", flags={"touch": True}),
            "refused.*settings are those of 'touch'"),
        Lie("an arm that sets a default", "own", arm("ddp-unfinished-reduction", flags={"touch": False}),
            "refused.*settings are those of 'broken'"),
        Lie("a typo in an option", "own", arm(CASE, options={"wraps": "layer"}), "refused.*wraps.*wrap"),
        Lie("an option's value that there is not", "own", arm(CASE, options={"sharding": "FULL"}), "refused.*FULL"),
        Lie("a flag that is not declared", "own", arm("ddp-unfinished-reduction", flags={"tuch": True}), "refused"),
        Lie("a flag's value that there is not", "own", arm("ddp-unfinished-reduction", flags={"touch": "yes"}),
            "refused"),
        Lie("a claim about an arm that there is not", "P9",
            ("ddp-unfinished-reduction", lambda case: case["claims"][0]["predicts"][0].update(arm="find")), "refused"),
        Lie("a failure without a signature", "own",
            ("ddp-unfinished-reduction", lambda case: case.update(signatures=[])), "refused"),
        Lie("a proof without checks", "own",
            ("train-step", lambda case: case["proof"].update(checks=[])), "refused"),
    ),
)  # fmt: skip


def _environment(plants: Sequence[Any]) -> list[str]:
    said = []
    with tempfile.TemporaryDirectory() as folder:
        for plant in plants:
            with mock.patch.dict(os.environ, plant or {}):
                attempt = attempt_of(Path(folder) / "a", "nothing")
                seen = [environment(attempt), server_environment(attempt)[0]]
            kept = sorted({name for name, value in (plant or {"PATH": os.environ["PATH"]}).items()
                           for env in seen if env.get(name) == value})  # fmt: skip
            said.append(f"inherited: {', '.join(kept) or 'nothing of it'}")
    return said


NAMED = ("TRANSFORMERS_VERBOSITY", "PYTHONOPTIMIZE", "TORCH_DISTRIBUTED_DEBUG")
REST = {name: value for name, value in HOSTILE.items() if name not in NAMED}

INHERITED = Bench(
    "inherited",
    "in the shell, asked of a rank's environment",
    "^inherited: PATH$",
    _environment,
    (
        *(Lie(f"{name}={HOSTILE[name]}", "P13", {name: HOSTILE[name]}, "nothing of it") for name in NAMED),
        Lie(f"{len(REST)} more hostile variables", "P13", REST, "nothing of it"),
    ),
)
