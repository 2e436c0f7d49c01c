"""Draft the first files of a case: YAML with a proposed signature, and a script without its trigger.

A draft begins with nothing, with a training log, or with another case.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from repro_matrix.config import project
from repro_matrix.errors import ConfigError
from repro_matrix.launch.tracebacks import Error
from repro_matrix.paths import CHECKOUT, CONF, REPROS

Json = dict[str, Any]
TODO = "TODO"
SHAPE: Json = {
    "pass_criteria": {"kind": "training", "checks": ["steps", "loss", "updates", "batches"]},
    "launch": {"world_size": 2, "deadline": 120, "imports": ["transformers"]},
    "axes": {"model": ["qwen1.5-0.5b"], "strategy": ["ddp"]},
    "flags": {"fixed": {"default": False, "choices": [True, False], "help": f"{TODO}: what the fix changes"}},
    "variants": {"unfixed": {"help": f"{TODO}: as the reports do it"},
                 "fixed": {"role": "fix", "flags": {"fixed": True}, "help": f"{TODO}: the documented fix"}},
}  # fmt: skip
COPIED = (
    "pass_criteria", "requires", "steps", "supports_other_world_sizes", "allow_gpu_sharing", "min_ranks",
    "accelerator", "launch", "axes", "options", "preserve_config", "tiny_config", "flags", "variants",
)  # fmt: skip
UNKNOWN_EXCEPTION = {
    "name": "raised", "kind": "exception", "type": "RuntimeError",
    "message": f"{TODO}: the error's text, as a regular expression", "package": "torch",
}  # fmt: skip
SCRIPT = Path(__file__).with_name("template.py.txt")


@dataclass(frozen=True)
class Draft:
    """The contents of a new case's files. ``shape``: another case's file, or SHAPE."""

    shape: Json = field(default_factory=lambda: SHAPE)
    script: str = field(default_factory=lambda: SCRIPT.read_text(encoding="utf-8"))
    signatures: Sequence[Json] = (UNKNOWN_EXCEPTION,)

    def case_text(self, slug: str) -> str:
        data = {"slug": slug, "title": f"{TODO}: what fails", "kind": "failure", "references": [],
                "summary": f"{TODO}: why it fails, in two sentences.",
                **{key: self.shape[key] for key in COPIED if key in self.shape},
                "signatures": [dict(each) for each in self.signatures]}  # fmt: skip
        data["variants"] = data.pop("variants")
        return yaml.safe_dump(data, sort_keys=False, width=118, allow_unicode=True)

    def write(self, slug: str) -> list[Path]:
        """Write the files into the project's folders, all or none. Raises ConfigError; nothing is overwritten."""
        folder, scripts = _case_folders()
        texts = {folder / f"{slug}.yaml": self.case_text(slug), scripts / f"{slug.replace('-', '_')}.py": self.script}
        written: list[Path] = []
        try:
            for path, text in texts.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "x", encoding="utf-8") as file:
                    written.append(path)
                    file.write(text)
        except OSError as error:
            for path in written:
                path.unlink(missing_ok=True)
            raise ConfigError(f"{error.filename or folder} cannot be written: {error.strerror}.") from None
        return written


def _case_folders() -> tuple[Path, Path]:
    """Return the folders of the project's cases and of their scripts."""
    here = project.current()
    if here.conf:
        folder = here.conf[0] / "case"
        return folder, here.scripts[0] if here.scripts else folder
    if not CHECKOUT:
        raise ConfigError(
            f"{here.folder}: no repro.toml names the folder of your own cases. "
            'Create repro.toml with the line: conf = ["failures"]'
        )
    return CONF / "case", REPROS


# -- signatures


def signature_of_error(error: Error) -> Json:
    """Return the signature that an error of a log proposes: its type, its text without what changes, who raised it."""
    files = [str(frame["file"]).replace("\\", "/") for frame in error.places]
    packages = [file.rpartition("-packages/")[2].partition("/")[0] for file in files if "-packages/" in file]
    package = packages[-1].removesuffix(".py") if packages else f"{TODO}-package"
    kind = error.type.rpartition(".")[2]
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", kind).lower().removesuffix("-error") or "raised"
    first = pattern(error.message.strip().partition("\n")[0][:160])
    return {"name": name, "kind": "exception", "type": kind, "message": first or TODO, "package": package}


def pattern(text: str) -> str:
    """Return a regular expression for this text with any numbers and paths."""
    parts = re.split(r"((?:/[\w.+-]+){2,}|0x[0-9a-fA-F]+|\d+)", text)
    for number, part in enumerate(parts):
        variable = r"\S+" if part.startswith(("/", "0x")) else r"\d+"
        parts[number] = variable if number % 2 else re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", part)
    return "".join(parts)
