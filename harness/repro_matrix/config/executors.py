"""Read the executor of a command line: where the cells of a run are measured (conf/executor)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml
from pydantic import Field, PositiveFloat, PositiveInt

from repro_matrix.config.catalog import parse_file, read_yaml
from repro_matrix.config.project import conf_folders
from repro_matrix.config.vocabulary import Strict
from repro_matrix.errors import ConfigError, unknown
from repro_matrix.paths import CONF

LOCAL = "local"
_OWN = re.compile(r"\+?executor(\.[\w.]+)?=(.*)", re.DOTALL)


class SlurmExecutor(Strict):
    """Measure in jobs of SLURM; conf/executor/slurm.yaml describes each key."""

    slug: str
    title: str
    shards: PositiveInt | None = None
    array_parallelism: PositiveInt = 8
    nodes: PositiveInt = 1
    timeout_min: PositiveInt = 60
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gpus_per_node: PositiveInt | None = None
    cpus_per_task: PositiveInt | None = None
    mem_gb: PositiveFloat | None = None
    additional_parameters: dict[str, Any] = Field(default={})
    retries: int = Field(default=1, ge=0)
    poll_s: PositiveFloat = 10.0


def split(texts: Sequence[str]) -> tuple[SlurmExecutor | None, list[str]]:
    """Return the executor that overrides select (None: this machine), and the other overrides.

    Raises ConfigError: no such executor, an unknown key, or an invalid value.
    """
    found = [match for text in texts if (match := _OWN.fullmatch(text))]
    rest = [text for text in texts if not _OWN.fullmatch(text)]
    names = [match[2] for match in found if not match[1]]
    name = names[-1] if names else LOCAL
    files = {
        path.stem: path for conf in conf_folders(CONF) for path in conf.glob("executor/*.yaml")
    }
    if name not in files:
        raise unknown("executor", name, files, "conf/executor")
    changed = [match for match in found if match[1]]
    if name == LOCAL:
        if changed:
            raise ConfigError(f"{changed[0][0]}: add executor=slurm.")
        return None, rest
    values = read_yaml(files[name])
    for match in changed:
        *groups, key = match[1][1:].split(".")
        target = values
        for group in groups:
            target = target.setdefault(group, {})
        target[key] = yaml.safe_load(match[2])
    source = f"executor={name}" if changed else files[name]
    return parse_file(SlurmExecutor, values, source), rest
