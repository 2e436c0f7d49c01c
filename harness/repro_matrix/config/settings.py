"""The run's settings: conf/config.yaml composed by Hydra against a structured schema, with the overrides."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from repro_matrix.config.project import conf_folders
from repro_matrix.errors import ConfigError, nearest, unknown
from repro_matrix.paths import CONF


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
    """The settings of a run; conf/config.yaml describes each key."""

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
OVERRIDE_GROUPS = ("case", "model", "strategy", "ranks", "stack", "hardware", "flags.<name>", "+matrix")


def compose_run(overrides: Sequence[str], conf: Path = CONF) -> RunSettings:
    """Compose conf/config.yaml with ``overrides``. Raise ConfigError for an unknown key or an invalid value."""
    # The value of a variable is taken literally: Hydra would read true as a boolean and eth0,eth1 as a sweep.
    env = {text[4:].partition("=")[0]: _unquoted(text.partition("=")[2]) for text in overrides if _is_env(text)}
    overrides = [as_path(_as_list(text)) for text in overrides if not _is_env(text)]
    names = [each.name for each in fields(RunSettings)]
    for override in overrides:
        key = override.lstrip("+~").split("=", 1)[0]
        if override.startswith("matrix="):
            raise ConfigError(f"override {override!r}: add a named matrix with a plus sign: +{override}")
        if key.split(".")[0] not in names:
            raise ConfigError(f"override {override!r}: unknown key {key!r}{nearest(key, [*names, *OVERRIDE_GROUPS])}")
    settings = _compose(overrides, conf_folders(conf))
    named = next((text for text in overrides if text.startswith("+matrix=")), None)
    if named and "matrix" in settings.matrix:
        raise ConfigError(f"{named}: the file of a named matrix begins with the line '# @package _global_'")
    if named and not settings.matrix:  # it would select the whole catalogue
        raise ConfigError(f"{named}: it has no block. Add 'matrix:' with a name and axes below it.")
    settings.env |= env
    for name in settings.env:
        reason = refused(name)
        if reason:
            raise ConfigError(f"env.{name}: {reason}")
    for name, least in AT_LEAST.items():
        value = getattr(settings, name)
        if value is not None and value < least:
            raise ConfigError(f"{name}={value}: must be at least {least}")
    if settings.results is not None and not settings.results.strip():
        raise ConfigError("results=: the folder's name is missing. Leave results= out to use results/scratch.")
    if settings.deadline is not None and settings.deadline <= 0:
        raise ConfigError(f"deadline={settings.deadline:g}: must be more than 0 seconds")
    return settings


def _compose(overrides: list[str], folders: Sequence[Path]) -> RunSettings:
    # Hydra takes half a second to import.
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import MarkedYAMLError

    ConfigStore.instance().store(name="run_schema", node=RunSettings)
    conf, *more = folders
    search_path = [f"hydra.searchpath=[{','.join(quoted(f'file://{folder}') for folder in more)}]"] if more else []
    try:
        with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
            settings = OmegaConf.to_object(compose("config", overrides=[*overrides, *search_path]))
    except MissingConfigException as error:
        name = str(error.missing_cfg_file or "").removeprefix("matrix/")
        known = [path.stem for folder in folders for path in (folder / "matrix").glob("*.yaml")]
        raise unknown("matrix", name, known, f"{conf.name}/matrix") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{mark.name}:{mark.line + 1}" if mark else "a file of conf/matrix"
        raise ConfigError(f"{where}: not valid YAML: {error.problem}") from None
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ or error
        text = " ".join(str(cause).splitlines()[:2])
        kind = re.search("could not be converted to (Integer|Float)", text)
        given = [each for each in overrides if each.partition("=")[0] == getattr(cause, "full_key", None)]
        if kind and given:
            raise ConfigError(f"{given[0]}: expected {'an integer' if kind[1] == 'Integer' else 'a number'}") from None
        choices = re.search(r"expected one of \[(.+)\]", text)
        if choices and given:
            word = given[0].partition("=")[2]
            raise ConfigError(f"{given[0]}: {word!r} is not valid{nearest(word, choices[1].split(', '))}") from None
        key = re.search(r"Key '([^']+)' (?:is )?not in", str(error))
        hint = nearest(key[1], [*(each.name for each in fields(RunSettings)), *OVERRIDE_GROUPS]) if key else ""
        raise ConfigError(f"conf/config.yaml with {' '.join(overrides) or 'no overrides'}: {text}{hint}") from None
    assert isinstance(settings, RunSettings)
    return settings


def quoted(value: str) -> str:
    """Quote a value for Hydra's grammar, where a backslash escapes only quotes."""
    return "'" + value.replace("'", "\\'") + "'"


def as_path(override: str) -> str:
    """Quote the value of ``results=``: Hydra's grammar has neither spaces nor letters such as ö."""
    key, _, value = override.partition("=")
    plain = value in ("", "null") or value[0] in "'\""
    return override if key != "results" or plain else f"results={quoted(value)}"


def _as_list(override: str) -> str:
    """Write ``variants=unfixed`` and ``variants=a,b`` as a list instead of a sweep."""
    key, _, value = override.partition("=")
    is_list = value in ("", "null") or value.startswith("[")
    return override if key != "variants" or is_list else f"variants=[{value}]"


def _is_env(override: str) -> bool:
    return override.startswith("env.") and "=" in override


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


# -- what of the user's environment a rank inherits: an allow-list. All else is no input of a measurement.
#
# A verbosity hides the warning that a signature waits for, PYTHONOPTIMIZE removes the assertion, a debug level of
# torch.distributed crashes DDP: each would be a false statement about upstream. What a person must be able to pass is a
# setting (``env.NCCL_SOCKET_IFNAME=eth0``): it is recorded with the attempt, and part of the variant's fingerprint.

# Where programs, libraries and the user's own folders are, and how text is encoded.
_PLACES = {
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "LD_LIBRARY_PATH", "XDG_CACHE_HOME",
    "CUDA_HOME", "CUDA_PATH", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "SYSTEMROOT",
}  # fmt: skip
# Which compiler makes an extension: torch compiles one again when its command line changed, inside the attempt.
_TOOLCHAIN = {
    "CC", "CXX", "CUDACXX", "CUDAHOSTCXX", "NVCC_CCBIN", "TORCH_CUDA_ARCH_LIST", "CPATH", "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "CONDA_PREFIX",
}  # fmt: skip
# What it takes to reach the hub, and where real weights are kept: with ``weights=hub`` only.
_HUB = {
    "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN",
    "HF_ENDPOINT", "HF_HUB_OFFLINE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
}  # fmt: skip
# Set by the launch itself, for every attempt anew.
_CONTRACT = re.compile(
    r"(?:RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|CUDA_VISIBLE_DEVICES|TMPDIR"
    r"|(?:GROUP|ROLE|TORCHELASTIC|PET|REPRO)_.*)"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def inherited(hub: bool = False, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The part of ``given`` (default: this process's environment) that a process of a stack starts from."""
    names = _PLACES | _TOOLCHAIN | (_HUB if hub else set())
    environ = os.environ if given is None else given
    return {name: value for name, value in environ.items() if name in names or name.startswith("LC_")}


def building(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The same for a process that compiles extensions: compilers read more than ranks may."""
    environ = os.environ if given is None else given
    flags = {"CFLAGS", "CXXFLAGS", "LDFLAGS", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "MAX_JOBS", "TMPDIR"}
    return {**inherited(given=environ), **{name: value for name, value in environ.items() if name in flags}}


def set_by_launch(name: str) -> bool:
    """Whether a variable is part of a launch's contract with its ranks (RANK, MASTER_PORT ...)."""
    return bool(_CONTRACT.fullmatch(name))


def refused(name: str) -> str | None:
    """Why a variable cannot be given by the setting ``env``, or None."""
    if not _NAME.fullmatch(name):
        return "not the name of an environment variable"
    if _CONTRACT.fullmatch(name):
        return "the launch itself sets it for every attempt"
    if name in ("PYTHONPATH", "PYTHONHOME"):
        return "what is imported is the stack's to say: stack=python:/path/to/python, stack=current+package@release"
    return None
