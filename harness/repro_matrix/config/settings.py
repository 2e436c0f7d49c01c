"""The run's settings: conf/config.yaml composed by Hydra against a structured schema, with the overrides."""

from __future__ import annotations

import copy
import functools
import re
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from repro_matrix.config.env_allowlist import refused
from repro_matrix.config.project import conf_folders
from repro_matrix.errors import ConfigError, nearest, unknown
from repro_matrix.paths import CONF, file_state


class Scale(str, Enum):
    tiny = "tiny"
    full = "full"


class Weights(str, Enum):
    random = "random"
    hub = "hub"


class LauncherName(str, Enum):
    auto = "auto"
    torchrun = "torchrun"
    forkserver = "forkserver"


class Order(str, Enum):
    longest = "longest"
    declared = "declared"


@dataclass
class RunSettings:
    """One run of the matrix; what each key means stands in conf/config.yaml."""

    scale: Scale = Scale.tiny
    weights: Weights = Weights.random
    repeat: int | None = None
    jobs: int | None = None
    tp_size: int | None = None
    steps: int | None = None
    seed: int = 0
    deadline: float | None = None
    variants: list[str] | None = None
    launcher: LauncherName = LauncherName.auto
    order: Order = Order.longest
    results: str | None = None
    keep_files: bool = False
    min_cells: int = 1
    shard: str | None = None
    time_limit: str | None = None
    matrix: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


AT_LEAST = {"repeat": 1, "jobs": 1, "tp_size": 1, "steps": 1, "min_cells": 0}


def compose_run(overrides: list[str], conf: Path = CONF) -> RunSettings:
    """Hydra's composition of conf/config.yaml with ``overrides``; raises ConfigError on an unknown key or bad value."""
    names = [each.name for each in fields(RunSettings)]
    # A variable's value is text as it stands: Hydra would make True of true, and a list of eth0,eth1.
    given = {text[4:].partition("=")[0]: _unquoted(text.partition("=")[2]) for text in overrides if _is_env(text)}
    overrides = [as_path(_as_list(text)) for text in overrides if not _is_env(text)]
    for override in overrides:
        key = override.lstrip("+~").split("=", 1)[0]
        if key == "world_size":
            raise ConfigError(f"override {override!r}: the number of ranks is an axis now: ranks=2,4,8")
        if override.startswith("matrix="):
            raise ConfigError(f"override {override!r}: a named matrix is added: +{override}")
        if key.split(".")[0] not in names:
            raise ConfigError(f"override {override!r}: unknown key {key!r}{nearest(key, [*names, *OVERRIDE_GROUPS])}")
    folders = tuple(conf_folders(conf))
    files = [conf / "config.yaml", *(path for folder in folders for path in sorted((folder / "matrix").glob("*.yaml")))]
    settings = copy.deepcopy(_composed(tuple(overrides), folders, tuple(file_state(path) for path in files)))
    _has_blocks(settings, overrides)
    settings.env = {**settings.env, **given}
    for name in settings.env:
        why = refused(name)
        if why:
            raise ConfigError(f"env.{name}: {why}")
    for name, least in AT_LEAST.items():
        value = getattr(settings, name)
        if value is not None and value < least:
            raise ConfigError(f"{name}={value}: must be at least {least}")
    if settings.results is not None and not settings.results.strip():
        raise ConfigError("results=: which folder? A value is missing (without results= it is results/scratch)")
    if settings.deadline is not None and settings.deadline <= 0:
        raise ConfigError(f"deadline={settings.deadline:g}: must be more than 0 seconds")
    return settings


@functools.lru_cache(maxsize=64)
def _composed(
    overrides: tuple[str, ...], folders: tuple[Path, ...], states: tuple[tuple[int, ...], ...]
) -> RunSettings:
    """``states``: of conf/config.yaml and the named matrices. A search composes the same settings for each probe."""
    import yaml
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    ConfigStore.instance().store(name="run_schema", node=RunSettings)
    conf, *more = folders
    names = [each.name for each in fields(RunSettings)]
    search_path = [f"hydra.searchpath=[{','.join(quoted(f'file://{folder}') for folder in more)}]"] if more else []
    try:
        with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
            settings = OmegaConf.to_object(compose("config", overrides=[*overrides, *search_path]))
    except MissingConfigException as error:
        name = str(error.missing_cfg_file or "").removeprefix("matrix/")
        # Of several that add up (+matrix=[a,b]) Hydra does not say what there is.
        there = [path.stem for folder in folders for path in (folder / "matrix").glob("*.yaml")]
        raise unknown("matrix", name, there, f"{conf.name}/matrix") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{mark.name}:{mark.line + 1}" if mark else "a file of conf/matrix"
        raise ConfigError(f"{where}: not valid YAML: {error.problem}") from None
    except (HydraException, OmegaConfBaseException) as error:
        first, *more_lines = str(error.__cause__ or error).splitlines()
        text = f"{first} {more_lines[0]}" if first.endswith(":") and more_lines else first
        key = re.search(r"Key '([^']+)' (?:is )?not in", str(error))
        hint = nearest(key[1], [*names, *(group.partition(".")[0] for group in OVERRIDE_GROUPS[:-1])]) if key else ""
        raise ConfigError(f"conf/config.yaml with {' '.join(overrides) or 'no overrides'}: {text}{hint}") from None
    assert isinstance(settings, RunSettings)
    return settings


def _has_blocks(settings: RunSettings, overrides: list[str]) -> None:
    """Raises ConfigError for a named matrix that names nothing: it would stand for the whole catalogue."""
    named = next((text for text in overrides if text.startswith("+matrix=")), None)
    if named and "matrix" in settings.matrix:
        raise ConfigError(f"{named}: the file of a named matrix begins with the line '# @package _global_'")
    if named and not settings.matrix:
        raise ConfigError(f"{named}: it has no block: 'matrix:' with a name and axes below it")


def quoted(value: str) -> str:
    """A value as Hydra's grammar takes it (a backslash says something only before a quote)."""
    return "'" + value.replace("'", "\\'") + "'"


def as_path(override: str) -> str:
    """``results=Ergebnis ö`` as the folder of that name: Hydra's grammar has neither the space nor the letter."""
    key, _, value = override.partition("=")
    plain = value in ("", "null") or value[0] in "'\""
    return override if key != "results" or plain else f"results={quoted(value)}"


def _as_list(override: str) -> str:
    """``variants=unfixed`` and ``variants=a,b`` as the lists that are meant."""
    key, _, value = override.partition("=")
    return (
        f"variants=[{value}]"
        if key == "variants" and value and not value.startswith("[") and value != "null"
        else override
    )


def _is_env(override: str) -> bool:
    return override.startswith("env.") and "=" in override


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


OVERRIDE_GROUPS = ("case", "model", "strategy", "ranks", "stack", "hardware", "flags.<name>", "+matrix")
