"""Draft the first files of a case: YAML with a proposed signature, and a script.

The script has no trigger yet. A draft starts empty, from a training log, or from another case.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from repro_matrix.config import project
from repro_matrix.errors import ConfigError
from repro_matrix.grading.tracebacks import Error
from repro_matrix.paths import CHECKOUT, CONF, REPROS

Json = dict[str, Any]
TODO = "TODO"
COPIED = (
    "pass_criteria",
    "requires",
    "steps",
    "supports_other_world_sizes",
    "allow_gpu_sharing",
    "min_ranks",
    "accelerator",
    "launch",
    "axes",
    "options",
    "preserve_config",
    "tiny_config",
    "flags",
    "variants",
)
CASE, SCRIPT = (Path(__file__).with_name(f"template.{kind}.txt") for kind in ("yaml", "py"))


def draft(like: Json | None) -> Json:
    """Return a case's file without its slug, with the flags, variants and checks of ``like``."""
    case: Json = yaml.safe_load(CASE.read_text(encoding="utf-8"))
    if like is None:
        return case
    own = {key: value for key, value in case.items() if key not in COPIED}
    return own | {key: like[key] for key in COPIED if key in like}


def write_draft(slug: str, case: Json, script: str) -> list[Path]:
    """Write the files into the project's folders, all or none. Raise ConfigError if one exists."""
    folder, scripts = _case_folders()
    last = ("signatures", "variants")
    ordered = {"slug": slug, **{key: value for key, value in case.items() if key not in last}}
    ordered |= {key: case[key] for key in last}
    text = yaml.safe_dump(ordered, sort_keys=False, width=118, allow_unicode=True)
    texts = {folder / f"{slug}.yaml": text, scripts / f"{slug.replace('-', '_')}.py": script}
    written: list[Path] = []
    try:
        for path, content in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "x", encoding="utf-8") as file:
                written.append(path)
                file.write(content)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise ConfigError(
            f"{error.filename or folder} cannot be written: {error.strerror}."
        ) from None
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


def signature_of_error(error: Error) -> Json:
    """Return a signature for an error of a log: its type, its text as a pattern, its package."""
    files = [str(frame["file"]).replace("\\", "/") for frame in error.places]
    packages = [
        file.rpartition("-packages/")[2].partition("/")[0] for file in files if "-packages/" in file
    ]
    package = packages[-1].removesuffix(".py") if packages else f"{TODO}-package"
    kind = error.type.rpartition(".")[2]
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", kind).lower().removesuffix("-error") or "raised"
    first = pattern(error.message.strip().partition("\n")[0][:160])
    return {
        "name": name,
        "kind": "exception",
        "type": kind,
        "message": first or TODO,
        "package": package,
    }


def pattern(text: str) -> str:
    """Return a regular expression for this text with any other numbers and paths."""
    parts = re.split(r"((?:/[\w.+-]+){2,}|0x[0-9a-fA-F]+|\d+)", text)
    for number, part in enumerate(parts):
        variable = r"\S+" if part.startswith(("/", "0x")) else r"\d+"
        parts[number] = variable if number % 2 else re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", part)
    return "".join(parts)
