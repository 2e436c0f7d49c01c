"""Named matrices (conf/matrix): blocks of axes, each a product of its own; the command line wins over them.

A preset is Hydra's: ``# @package _global_``, settings beside ``matrix: {block: axes}``, so that several presets add up
and ``matrix.<block>.<axis>`` is a key like any other. Pure but for naming the file of a block that is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, field_validator

from repro_matrix.config.project import conf_folders
from repro_matrix.config.selection import Selection
from repro_matrix.config.settings import RunSettings
from repro_matrix.config.strict import Strict
from repro_matrix.errors import describe_validation
from repro_matrix.paths import CONF

AXES = ("case", "model", "strategy", "ranks", "stack", "hardware")


class Block(Strict):
    """One product of axes; what is left out is as on a command line."""

    case: list[str] = Field(default=["*"], min_length=1)
    model: list[str] | None = None
    strategy: list[str] | None = None
    ranks: list[int] | None = Field(default=None, min_length=1)
    stack: list[str] = Field(default=["current"], min_length=1)
    hardware: list[str] = Field(default=["auto"], min_length=1)
    flags: dict[str, list[Any]] = Field(default={})

    @field_validator("case", "model", "strategy", "stack", "hardware", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        """One name, a list, or names with commas between them, as a sweep is written."""
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value

    @field_validator("ranks", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return [value] if isinstance(value, int) else value

    @field_validator("ranks")
    @classmethod
    def _positive(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and min(value) < 1:
            raise ValueError("a number of ranks is 1, 2, 4 ...")
        return value

    @field_validator("flags", mode="before")
    @classmethod
    def _sweeps(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {name: each if isinstance(each, list) else [each] for name, each in value.items()}


def blocks(matrix: Mapping[str, Any], line: Selection) -> list[Selection]:
    """The selections that a composed ``matrix`` stands for, the command line's axes and flags laid over each; without
    one, the command line's own. Raises ConfigError: file, block, key, and the nearest that is valid."""
    if not matrix:
        return [line]
    return [_laid_over(name, _block(name, raw), line) for name, raw in matrix.items()]


def _block(name: str, raw: Any) -> Block:
    try:
        return Block.model_validate(raw or {})
    except ValidationError as error:
        raise describe_validation(error, Block, where_of(name)) from None


def _laid_over(name: str, block: Block, line: Selection) -> Selection:
    axes = {axis: getattr(line if axis in line.given else block, axis) for axis in AXES}
    return Selection(
        **axes,
        flags={**block.flags, **line.flags},
        patches=line.patches,
        run=line.run,
        given=set(line.given),
        source=where_of(name),
        # A preset that names its cases does not mean that a model of the command line fits all of them.
        narrows=frozenset() if "case" in line.given else frozenset(line.given),
    )


def where_of(name: str) -> str:
    """``conf/matrix/seeds.yaml: matrix.seeds``, for messages."""
    for folder in conf_folders(CONF):
        for path in sorted((folder / "matrix").glob("*.yaml")):
            if name in _blocks_in(path):
                return f"{Path(*path.parts[-3:])}: matrix.{name}"
    return f"matrix.{name}"


def _blocks_in(path: Path) -> Iterable[str]:
    try:
        found = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("matrix")
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError):
        return ()
    return found if isinstance(found, Mapping) else ()


def composed(settings: RunSettings, selections: Iterable[Selection]) -> str:
    """What ``--cfg`` prints: all settings, and the blocks as they are measured. Saved as conf/matrix/NAME.yaml it is
    that matrix."""
    listed = list(selections)
    names = list(settings.matrix) or ["line"]
    told = {name: _plain(value) for name, value in asdict(settings).items() if name != "matrix"}
    axes = {name: _axes(each) for name, each in zip(names, listed)}
    lines = ["# @package _global_", *(f"{key}: {_said(value)}" for key, value in told.items()), "matrix:"]
    for name, block in axes.items():
        lines.append(f"  {name}:" + ("" if block else " {}"))
        lines += [f"    {key}: {_said(value)}" for key, value in block.items()]
    for group, changes in sorted((listed[0].patches if listed else {}).items()):
        lines += [f"# and, of the command line: {group}.{'.'.join(keys)}={value}" for keys, value in changes]
    return "\n".join(lines)


def _axes(selection: Selection) -> dict[str, Any]:
    usual = Selection()
    found = {axis: getattr(selection, axis) for axis in (*AXES, "flags")}
    return {axis: value for axis, value in found.items() if value != getattr(usual, axis)}


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _said(value: Any) -> str:
    """JSON is YAML, in a line."""
    return json.dumps(value)
