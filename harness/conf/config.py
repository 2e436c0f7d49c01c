"""The run's settings: conf/config.yaml composed by Hydra against a structured schema, with the overrides."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path

from repro_matrix.conf.errors import ConfigError, nearest
from repro_matrix.conf.inherited import refused
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
    warm = "warm"


class Order(str, Enum):
    longest = "longest"
    listed = "listed"


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
    arms: list[str] | None = None
    launcher: LauncherName = LauncherName.auto
    order: Order = Order.longest
    results: str | None = None
    keep: bool = False
    min_measured: int = 1
    shard: str | None = None
    env: dict[str, str] = field(default_factory=dict)


AT_LEAST = {"repeat": 1, "jobs": 1, "tp_size": 1, "steps": 1, "min_measured": 0}


def compose_run(overrides: list[str], conf: Path = CONF) -> RunSettings:
    """Hydra's composition of conf/config.yaml with ``overrides``; raises ConfigError on an unknown key or bad value."""
    names = [each.name for each in fields(RunSettings)]
    # A variable's value is text as it stands: Hydra would make True of true, and a list of eth0,eth1.
    given = {text[4:].partition("=")[0]: _unquoted(text.partition("=")[2]) for text in overrides if _is_env(text)}
    overrides = [text for text in overrides if not _is_env(text)]
    for override in overrides:
        key = override.lstrip("+~").split("=", 1)[0]
        if key == "world_size":
            raise ConfigError(f"override {override!r}: the number of ranks is an axis now: ranks=2,4,8")
        if key.split(".")[0] not in names:
            raise ConfigError(f"override {override!r}: unknown key {key!r}{nearest(key, [*names, *OVERRIDE_GROUPS])}")
    settings = copy.deepcopy(_composed(tuple(overrides), conf, file_state(conf / "config.yaml")))
    settings.env = {**settings.env, **given}
    for name in settings.env:
        why = refused(name)
        if why:
            raise ConfigError(f"env.{name}: {why}")
    for name, least in AT_LEAST.items():
        value = getattr(settings, name)
        if value is not None and value < least:
            raise ConfigError(f"{name}={value}: must be at least {least}")
    if settings.deadline is not None and settings.deadline <= 0:
        raise ConfigError(f"deadline={settings.deadline:g}: must be more than 0 seconds")
    return settings


@functools.lru_cache(maxsize=64)
def _composed(overrides: tuple[str, ...], conf: Path, state: tuple[int, ...]) -> RunSettings:
    """``state``: of conf/config.yaml. A search composes the same settings for each of its probes."""
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    ConfigStore.instance().store(name="run_schema", node=RunSettings)
    try:
        with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
            settings = OmegaConf.to_object(compose("config", overrides=list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        text = str(error.__cause__ or error).splitlines()[0]
        raise ConfigError(f"conf/config.yaml with {' '.join(overrides) or 'no overrides'}: {text}") from None
    assert isinstance(settings, RunSettings)
    return settings


def _is_env(override: str) -> bool:
    return override.startswith("env.") and "=" in override


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


OVERRIDE_GROUPS = ("case", "model", "strategy", "ranks", "stack", "hardware", "flags.<name>")
