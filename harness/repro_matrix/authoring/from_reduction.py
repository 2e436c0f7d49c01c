"""Draft the first files of a case from the result of `repro reduce --json`: of a script, or of another case."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from repro_matrix.authoring import draft
from repro_matrix.errors import ConfigError, unknown

Json = dict[str, Any]


@dataclass(frozen=True)
class Files:
    """The files that `repro new` writes. ``models``: name -> text of a smaller model."""

    shape: Json
    script: str
    signatures: list[Json]
    references: list[str] = field(default_factory=list)
    models: dict[str, str] = field(default_factory=dict)


def read(path: str) -> Json:
    """Raises ConfigError: no file, or not what `repro reduce --json` prints."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--from-reduction {path}: {error.strerror}") from None
    except ValueError:
        found = None
    keys = ("failure", "what", "command") + (
        ("case", "overrides") if isinstance(found, dict) and "case" in found else ("script", "nproc", "args")
    )
    if not isinstance(found, dict) or found.get("kind") != "reduced" or not all(key in found for key in keys):
        raise ConfigError(f"--from-reduction {path}: not a result of `repro reduce ... --json > {Path(path).name}`.")
    return found


def files(slug: str, found: Json, path: str) -> Files:
    return _of_case(slug, found, path) if "case" in found else _of_script(found, path)


# -- of a script


def _of_script(found: Json, path: str) -> Files:
    lines = found.get("lines") or {}
    text = lines.get("text") or _text(str(found["script"]), path)
    script = draft.script_from(text, Path(found["script"]).name, [str(arg) for arg in found["args"]])
    shape = draft.script_shape(text)
    ranks = int(found["nproc"])
    shape = {**shape, "min_ranks": min(2, ranks), "launch": {**shape["launch"], "world_size": ranks}}
    return Files(shape, script, [_signature(found)])


def _text(script: str, path: str) -> str:
    try:
        return Path(script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--from-reduction {path}: its script {script} cannot be read: {error}") from None


def _signature(found: Json) -> Json:
    """Of the error that the smallest one showed: its stored measurement says who raised it."""
    kind, _, message = str(found["failure"]).partition(":")
    package = f"{draft.TODO}-package"
    primary = _primary(found.get("document"))
    if primary:
        kind, message = str(primary["type"]), str(primary["message"])
        where = str(primary.get("location") or "")
        if where and "/" not in where:  # a path: the script's own code, which is nobody's defect
            package = where.partition(".")[0]
    if not re.fullmatch(r"[A-Za-z_][\w.]*", kind.strip()):
        return {**draft.unknown_exception(), "package": package}
    return draft.exception(kind.strip(), message, package)


def _primary(document: Any) -> Mapping[str, Any] | None:
    try:
        attempts = json.loads(Path(str(document)).read_text(encoding="utf-8"))["variants"]["unfixed"]["attempts"]
        return next((a["outcome"]["primary"] for a in attempts if a["outcome"]["outcome"] == "reproduced"), None)
    except (OSError, ValueError, KeyError, TypeError):
        return None


# -- of a case


def _of_case(slug: str, found: Json, path: str) -> Files:
    """That case with its smallest cell as what the unfixed variant is; of its other variants those that differ in flags
    and options alone."""
    from repro_matrix.config import catalog as catalogue
    from repro_matrix.config import selection as overrides
    from repro_matrix.config.settings import compose_run

    name = str(found["case"])
    known = catalogue.load()
    if name not in known.cases:
        raise unknown("case", name, known.cases, f"--from-reduction {path}")
    selection = overrides.parse(map(str, found["overrides"]))
    patched = catalogue.load(patches=selection.patches, cases=[name])
    shape = copy.deepcopy(patched.raw["case"][name])
    for flag, values in selection.flags.items():
        shape["flags"][flag]["default"] = values[0]
    models = {}
    model = (selection.model or shape["axes"]["model"])[0]
    if patched.raw["model"][model] != known.raw["model"][model]:
        models[slug] = _model(slug, patched.raw["model"][model], shape.pop("preserve_config", []))
        model = slug
    shape["axes"] = {"model": [model], "strategy": (selection.strategy or shape["axes"]["strategy"])[:1]}
    launch = shape.setdefault("launch", {})
    launch["world_size"] = (selection.ranks or [launch.get("world_size", 2)])[0]
    settings = compose_run(selection.run)
    if settings.steps:
        shape["steps"] = settings.steps
    if settings.env:
        launch["env"] = {**launch.get("env", {}), **settings.env}
    other_axes = {"model", "strategy", "stack", "tp_size", "world_size", "env"}
    first = next(iter(shape["variants"]))
    shape["variants"] = {
        variant: {"help": spec.get("help", draft.TODO)} if variant == first else spec
        for variant, spec in shape["variants"].items()
        if variant == first or (not other_axes & set(spec) and _differs(spec, shape))
    }
    script = known.script(known.cases[name]).read_text(encoding="utf-8")
    return Files(shape, script, shape["signatures"], list(shape.get("references", [])), models)


def _differs(variant: Mapping[str, Any], shape: Mapping[str, Any]) -> bool:
    """Not the smallest cell itself, which may have taken what this variant changes."""
    options = shape.get("options", {})
    return any(value != shape["flags"][name]["default"] for name, value in variant.get("flags", {}).items()) or any(
        name not in options or value != options[name] for name, value in variant.get("options", {}).items()
    )


def _model(slug: str, raw: Mapping[str, Any], preserve_config: list[str]) -> str:
    """The model as small as it was found, at every scale."""
    tiny = {key: value for key, value in (raw.get("tiny") or {}).items() if key not in preserve_config}
    made = {**raw, "slug": slug, "title": f"{raw['title']}, as small as the failure of {slug} allows",
            "config": {**raw["config"], **tiny}, "tiny": {}}  # fmt: skip
    return yaml.safe_dump(made, sort_keys=False, width=118, allow_unicode=True)
