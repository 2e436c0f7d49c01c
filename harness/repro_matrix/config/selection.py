"""Parse overrides (Hydra's grammar) into a selection: axes, flags, patches and settings."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import filter as matching
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import Field, PositiveInt, field_validator

from repro_matrix.config.catalog import parse_file
from repro_matrix.config.project import conf_folders
from repro_matrix.config.settings import as_path, quoted
from repro_matrix.config.vocabulary import Area, Strict
from repro_matrix.errors import ConfigError, unknown
from repro_matrix.paths import CONF

GROUPS = ("case", "model", "strategy", "stack", "hardware")
AXES = ("case", "model", "strategy", "ranks", "stack", "hardware")


@dataclass
class Selection:
    """Hold the cells that a command line or a block of a named matrix selects.

    None: those of the case's file.
    """

    case: list[str] = field(default_factory=lambda: ["*"])
    area: list[str] | None = None
    silent: bool | None = None  # True: silent failures only; False: no silent failure
    model: list[str] | None = None
    strategy: list[str] | None = None
    ranks: list[int] | None = None
    stack: list[str] = field(default_factory=lambda: ["current"])
    # one cell per profile; auto: where each can run
    hardware: list[str] = field(default_factory=lambda: ["auto"])
    flags: dict[str, list[Any]] = field(default_factory=dict)
    patches: dict[str, list[tuple[list[str], Any]]] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)  # the keys of patches that were written with +
    run: list[str] = field(default_factory=list)  # overrides of conf/config.yaml, for compose_run
    given: set[str] = field(default_factory=set)  # the axes that the command line names
    # (key, override as written)
    words: list[tuple[str, str]] = field(default_factory=list, compare=False)
    source: str = ""  # file and name of the block
    # axes of the command line that only narrow what a block's cases list
    narrows: frozenset[str] = frozenset()


def parse_overrides(overrides: Iterable[str]) -> Selection:
    """Parse overrides. Raise ConfigError that quotes the invalid one."""
    selection = Selection()
    texts = list(overrides)
    if not texts:
        return selection
    # Hydra takes half a second to import: only when there is something to parse.
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    for text in texts:
        _add(selection, text, *_parsed(parser, text))
    return selection


def _parsed(parser: Any, text: str) -> tuple[Any, list[Any]]:
    """Return an override in Hydra's terms, and its values."""
    from hydra.core.override_parser.types import ChoiceSweep, Glob, RangeSweep
    from hydra.errors import HydraException

    if re.fullmatch(r"[\w.*?-]+", text):
        raise ConfigError(f"{text!r} is not NAME=VALUE; is case={text} meant?")
    try:
        override = parser.parse_overrides([as_path(text)])[0]
        value = override.value()
    except HydraException as error:
        detail = str(error).replace("\n", " ").split("See https")[0].strip()
        raise ConfigError(
            f"override {text!r} is not NAME=VALUE in Hydra's grammar: {detail}"
        ) from None
    if isinstance(value, ChoiceSweep):
        return override, [_plain(item) for item in value.list]
    if isinstance(value, Glob):
        return override, list(value.include)
    if isinstance(value, RangeSweep):
        return override, list(range(*map(int, (value.start or 0, value.stop or 0, value.step))))
    return override, [_plain(value)]


def _add(selection: Selection, text: str, override: Any, values: list[Any]) -> None:
    key = override.key_or_group
    # Hydra would take the last one.
    if key in selection.given or key.removeprefix("flags.") in selection.flags:
        raise ConfigError(f"override {text!r}: {key}= is given twice; separate values with commas")
    selection.words.append((key, text))
    group, _, rest = key.partition(".")
    if key in GROUPS:
        _set_axis(selection, key, values, text)
    elif key == "area":
        selection.area = expand(key, map(str, values), get_args(Area), text)
    elif key == "silent":
        if values not in ([True], [False]):
            raise ConfigError(f"override {text!r}: silent= takes true or false")
        selection.silent = values[0]
    elif key == "ranks":
        selection.ranks = _rank_numbers(values, text)
        selection.given.add(key)
    elif group == "flags" and rest:
        selection.flags[rest] = values
    elif group in GROUPS and rest:
        if len(values) > 1:
            raise ConfigError(
                f"override {text!r}: sweep a group or a flag, not a key inside {group}"
            )
        selection.patches.setdefault(group, []).append((rest.split("."), values[0]))
        selection.added += [key] if override.is_add() else []
    elif group != "executor":  # config/executors.py reads it
        selection.run.append(text)


def _set_axis(selection: Selection, group: str, values: list[Any], text: str) -> None:
    names = [
        str(item) for value in values for item in (value if isinstance(value, list) else [value])
    ]
    if group == "hardware" and "auto" in names and len(names) > 1:
        raise ConfigError(f"override {text!r}: auto cannot be combined with other profiles")
    setattr(selection, group, list(dict.fromkeys(names)))
    selection.given.add(group)


def _rank_numbers(values: list[Any], text: str) -> list[int]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"override {text!r}: {value!r} is not a number of ranks (1, 2, 4 ...)"
            )
    return list(dict.fromkeys(values))


def _plain(value: Any) -> Any:
    text = getattr(value, "text", None)  # Hydra's QuotedString
    return text if isinstance(text, str) else value


def override_text(key: str, value: Any) -> str:
    """Write an override that can be pasted into a command line.

    Values of variables are written literally.
    """
    if key.startswith("env."):
        return f"{key}={value}"
    if isinstance(value, list):
        return f"{key}={','.join(map(_value_text, value))}"
    return f"{key}={_value_text(value)}"


def _value_text(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    plain = re.fullmatch(r"[A-Za-z_][\w.-]*", value) and value.lower() not in (
        "null",
        "true",
        "false",
        "nan",
        "inf",
    )
    return value if plain else quoted(value)


def expand(
    what: str, patterns: Iterable[str], known: Collection[str], where: str = ""
) -> list[str]:
    """Return the known names that match the patterns.

    Raises ConfigError for a pattern without a match.
    """
    names = list(known)
    chosen: set[str] = set()
    for pattern in patterns:
        hits = [pattern] if pattern in names else matching(names, pattern)
        if not hits:
            raise unknown(what, pattern, known, where)
        chosen.update(hits)
    return [name for name in names if name in chosen]


class Block(Strict):
    """One product of axes in conf/matrix. Axes left out have the defaults of the command line."""

    case: list[str] = Field(default=["*"], min_length=1)
    model: list[str] | None = None
    strategy: list[str] | None = None
    ranks: list[PositiveInt] | None = Field(default=None, min_length=1)
    stack: list[str] = Field(default=["current"], min_length=1)
    hardware: list[str] = Field(default=["auto"], min_length=1)
    flags: dict[str, list[Any]] = Field(default={})

    @field_validator("*", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """Accept a list, one value, or names separated by commas.

        Under ``flags`` a list or one value for each.
        """
        if isinstance(value, Mapping):
            return {
                name: each if isinstance(each, list) else [each] for name, each in value.items()
            }
        if isinstance(value, str):
            return [part.strip() for part in value.split(",")]
        return [value] if isinstance(value, int) else value


def blocks(matrix: Mapping[str, Any], line: Selection) -> list[Selection]:
    """Return the selections of a named matrix, with the command line's axes and flags.

    Without a matrix, the command line's selection. Raises ConfigError with the file, the block, the
    key and the nearest valid choice.
    """
    return [_block(name, raw, line) for name, raw in matrix.items()] or [line]


def _block(name: str, raw: Any, line: Selection) -> Selection:
    source = _block_source(name)
    block = parse_file(Block, raw or {}, source)
    axes = {axis: getattr(line if axis in line.given else block, axis) for axis in AXES}
    # A model of the command line need not fit all cases that the block names: it narrows their
    # models.
    narrows = frozenset() if "case" in line.given else frozenset(line.given)
    return replace(
        line, **axes, flags={**block.flags, **line.flags}, source=source, narrows=narrows, added=[]
    )


def _block_source(name: str) -> str:
    """Return ``conf/matrix/seeds.yaml: matrix.seeds`` for messages."""
    for folder in conf_folders(CONF):
        for path in sorted((folder / "matrix").glob("*.yaml")):
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
            if isinstance(content, dict) and name in (content.get("matrix") or {}):
                return f"{Path(*path.parts[-3:])}: matrix.{name}"
    return f"matrix.{name}"
