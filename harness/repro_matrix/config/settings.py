"""Compose a run's settings from conf/config.yaml and the overrides, and validate them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from repro_matrix.config.catalog import parse_file, read_yaml
from repro_matrix.config.launchers import AUTO, SHIPPED, launchers
from repro_matrix.config.project import conf_folders
from repro_matrix.errors import ConfigError, describe_validation, nearest, unknown
from repro_matrix.paths import CONF, file_state

Count = Annotated[int, Field(strict=True, gt=0)]
Seconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class RunSettings(BaseModel):
    """Define the settings of a run; conf/config.yaml describes each key."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    scale: Literal["tiny", "full"] = "tiny"
    weights: Literal["random", "hub"] = "random"
    repeat: Count | None = None
    jobs: Count | None = None
    steps: Count | None = None
    seed: Annotated[int, Field(strict=True)] = 0
    deadline: Seconds | None = None
    nodes: Count | None = None
    node_command: str | None = None
    rendezvous: str | None = None
    variants: list[str] | None = None
    launcher: str = AUTO
    order: Literal["longest", "declared"] = "longest"
    results: str | None = Field(default=None, min_length=1)
    min_cells: Annotated[int, Field(strict=True, ge=0)] = 1
    shard: str | None = None
    time_limit: str | None = None
    matrix: dict[str, Any] = {}
    env: dict[str, str] = {}

    @field_validator("node_command")
    @classmethod
    def _program_of_node_command(cls, command: str | None) -> str | None:
        words = shlex.split(command or "")
        if command is not None and not (words and shutil.which(words[0])):
            raise ValueError(f"no program {words[0] if words else ''!r} on this machine")
        return command

    @field_validator("launcher")
    @classmethod
    def _launcher(cls, name: str) -> str:
        if name in (AUTO, *SHIPPED):  # reading the entry points takes time
            return name
        known = [AUTO, *launchers()]
        if name not in known:
            raise ValueError(f"no such launcher{nearest(name, known)}")
        return name


OVERRIDE_GROUPS = (
    "case",
    "area",
    "silent",
    "model",
    "strategy",
    "ranks",
    "stack",
    "hardware",
    "flags.<name>",
    "+matrix",
    "executor",
)


def stored_run() -> RunSettings:
    """Return the settings of conf/config.yaml.

    Raises ConfigError for an unknown key or an invalid value.
    """
    path = CONF / "config.yaml"
    values = read_yaml(path)
    if values.pop("defaults", ["_self_"]) != ["_self_"]:
        return compose_run([])  # Hydra takes half a second to import
    return parse_file(RunSettings, values, path)


def compose_run(overrides: Sequence[str], conf: Path = CONF) -> RunSettings:
    """Compose conf/config.yaml with ``overrides``.

    Raises ConfigError for an unknown key or an invalid value.
    """
    # The value of a variable is taken literally: Hydra would read true as a boolean and eth0,eth1
    # as a sweep.
    env = {
        text[4:].partition("=")[0]: _unquoted(text.partition("=")[2])
        for text in overrides
        if _is_env(text)
    }
    overrides = [as_path(_as_list(text)) for text in overrides if not _is_env(text)]
    names = list(RunSettings.model_fields)
    for override in overrides:
        key = override.lstrip("+~").split("=", 1)[0]
        if override.startswith("matrix="):
            raise ConfigError(
                f"override {override!r}: add a named matrix with a plus sign: +{override}"
            )
        if key.split(".")[0] not in names:
            raise ConfigError(
                f"override {override!r}: unknown key"
                f" {key!r}{nearest(key, [*names, *OVERRIDE_GROUPS])}"
            )
    folders = conf_folders(conf)
    files = [path for each in folders for path in (each / "config.yaml", *_matrices(each))]
    states = tuple((path, file_state(path)) for path in files)
    settings = _compose(tuple(overrides), tuple(folders), states).model_copy(deep=True)
    named = next((text for text in overrides if text.startswith("+matrix=")), None)
    if named and "matrix" in settings.matrix:
        raise ConfigError(
            f"{named}: the file of a named matrix begins with the line '# @package _global_'"
        )
    if named and not settings.matrix:  # it would select the whole catalogue
        raise ConfigError(f"{named}: it has no block. Add 'matrix:' with a name and axes below it.")
    settings.env |= env
    for name in settings.env:
        if reason := _refused(name):
            raise ConfigError(f"env.{name}: {reason}")
    return settings


def _matrices(conf: Path) -> list[Path]:
    return sorted((conf / "matrix").glob("*.yaml"))


@lru_cache(maxsize=64)  # a search asks for each probe
def _compose(
    overrides: tuple[str, ...], folders: tuple[Path, ...], states: tuple[Any, ...]
) -> RunSettings:
    # Hydra takes half a second to import.
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import MarkedYAMLError

    conf, *more = folders
    search_path = (
        [f"hydra.searchpath=[{','.join(quoted(f'file://{folder}') for folder in more)}]"]
        if more
        else []
    )
    try:
        with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
            composed = compose("config", overrides=[*overrides, *search_path])
        return RunSettings.model_validate(OmegaConf.to_container(composed, resolve=True))
    except ValidationError as error:
        raise describe_validation(
            error, RunSettings, _value_source(error, overrides, folders)
        ) from None
    except MissingConfigException as error:
        name = str(error.missing_cfg_file or "").removeprefix("matrix/")
        known = [path.stem for folder in folders for path in _matrices(folder)]
        raise unknown("matrix", name, known, f"{conf.name}/matrix") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{mark.name}:{mark.line + 1}" if mark else "a file of conf/matrix"
        raise ConfigError(f"{where}: not valid YAML: {error.problem}") from None
    except (HydraException, OmegaConfBaseException) as error:
        text = " ".join(str(error.__cause__ or error).splitlines()[:2])
        raise ConfigError(
            f"conf/config.yaml with {' '.join(overrides) or 'no overrides'}: {text}"
        ) from None


def _value_source(error: ValidationError, overrides: Iterable[str], folders: Sequence[Path]) -> str:
    """Return where a wrong value comes from: the command line, a named matrix or config.yaml."""
    key, values = error.errors()[0]["loc"][0], dict(text.partition("=")[::2] for text in overrides)
    if key in {name.lstrip("+~").partition(".")[0] for name in values}:
        return "run settings"
    files = [folder / "matrix" / f"{values.get('+matrix')}.yaml" for folder in folders]
    return str(
        next(
            (path for path in files if path.is_file() and key in read_yaml(path)),
            folders[0] / "config.yaml",
        )
    )


def quoted(value: str) -> str:
    """Quote a value for Hydra's grammar, where a backslash escapes only quotes."""
    return "'" + value.replace("'", "\\'") + "'"


QUOTED = ("results", "node_command")


def as_path(override: str) -> str:
    """Quote the value of a path or a command: Hydra's grammar has no spaces, braces or ö."""
    key, _, value = override.partition("=")
    plain = value in ("", "null") or value[0] in "'\""
    return override if key not in QUOTED or plain else f"{key}={quoted(value)}"


def _as_list(override: str) -> str:
    """Write ``variants=unfixed`` and ``variants=a,b`` as a list instead of a sweep."""
    key, _, value = override.partition("=")
    is_list = value in ("", "null") or value.startswith("[")
    return override if key != "variants" or is_list else f"variants=[{value}]"


def _is_env(override: str) -> bool:
    return override.startswith("env.") and "=" in override


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


# -- the environment of a rank (environment.yaml)

# Set by the launch itself, for every attempt anew.
_CONTRACT = re.compile(
    r"(?:RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|CUDA_VISIBLE_DEVICES"
    r"|CUDA_DEVICE_ORDER|TMPDIR|(?:GROUP|ROLE|TORCHELASTIC|PET|REPRO)_.*)"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@cache
def _variables() -> dict[str, list[str]]:
    return read_yaml(Path(__file__).with_name("environment.yaml"))


def inherited(*more: str, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the user's variables with which a process of a stack starts.

    ``more``: the group ``hub`` for a rank with real weights, ``build`` for a process that compiles
    extensions. ``given`` defaults to this process's.
    """
    names = {name for group in ("places", "toolchain", *more) for name in _variables()[group]}
    environ = os.environ if given is None else given
    return {
        name: value for name, value in environ.items() if name in names or name.startswith("LC_")
    }


def set_by_launch(name: str) -> bool:
    """Return whether a launch itself sets a variable for its ranks (RANK, MASTER_PORT ...)."""
    return bool(_CONTRACT.fullmatch(name))


def _refused(name: str) -> str | None:
    """Return why the setting ``env`` cannot set a variable, or None."""
    if not _NAME.fullmatch(name):
        return "not the name of an environment variable"
    if set_by_launch(name):
        return "the launch itself sets it for every attempt"
    if name in ("PYTHONPATH", "PYTHONHOME"):
        return (
            "what is imported is the stack's to say: stack=python:/path/to/python,"
            " stack=current+package@release"
        )
    return None
