"""Hydra's override grammar -> what a run selects: groups (commas sweep, globs match), flags, patches, run settings."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, field_validator

from repro_matrix.config.project import conf_folders
from repro_matrix.config.settings import RunSettings, as_path, quoted
from repro_matrix.config.vocabulary import Strict
from repro_matrix.errors import ConfigError, describe_validation, unknown
from repro_matrix.paths import CONF

GROUPS = ("case", "model", "strategy", "stack", "hardware")


@dataclass
class Selection:
    """What the command line asks for. An axis left out is None: whatever the case's file says."""

    case: list[str] = field(default_factory=lambda: ["*"])
    model: list[str] | None = None
    strategy: list[str] | None = None
    ranks: list[int] | None = None
    stack: list[str] = field(default_factory=lambda: ["current"])
    hardware: list[str] = field(default_factory=lambda: ["auto"])  # one cell a profile; auto: where each can run
    flags: dict[str, list[Any]] = field(default_factory=dict)
    patches: dict[str, list[tuple[list[str], Any]]] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)  # the keys of patches that were written with +
    run: list[str] = field(default_factory=list)  # overrides of conf/config.yaml, for repro_matrix.config.settings
    given: set[str] = field(default_factory=set)  # the axes that the command line names
    words: list[tuple[str, str]] = field(default_factory=list, compare=False)  # key -> the override as it was written
    # Of a named matrix: which block it is, and the axes of the command line that only narrow what its cases list.
    source: str = ""
    narrows: frozenset[str] = frozenset()

    def having(self, key: str, value: Any) -> Selection:
        """The same, and what an override of this key would say with a value at hand (a list: of an axis, several)."""
        group, _, rest = key.partition(".")
        more: dict[str, Any] = {"words": [*self.words, (key, said(key, value))]}
        if key in (*GROUPS, "ranks"):
            given = self.given | {key}
            more |= {key: value if isinstance(value, list) else [value], "given": given}
            if self.source:  # a block of a named matrix, as named.blocks lays the line over it
                more["narrows"] = frozenset() if "case" in given else frozenset(given)
        elif group == "flags":
            more["flags"] = {**self.flags, rest: [value]}
        elif group in GROUPS:
            more["patches"] = {**self.patches, group: [*self.patches.get(group, []), (rest.split("."), value)]}
        return replace(self, **more)

    def less(self, dropped: Callable[[str], bool]) -> Selection:
        """The same without what was said of these keys."""
        axes = {axis: getattr(Selection(), axis) for axis in (*GROUPS, "ranks") if axis in self.given and dropped(axis)}
        patches = {
            group: [change for change in changes if not dropped(".".join([group, *change[0]]))]
            for group, changes in self.patches.items()
        }
        return replace(
            self,
            **axes,
            given={axis for axis in self.given if not dropped(axis)},
            flags={name: values for name, values in self.flags.items() if not dropped(f"flags.{name}")},
            patches={group: changes for group, changes in patches.items() if changes},
            added=[key for key in self.added if not dropped(key)],
            words=[(key, text) for key, text in self.words if not dropped(key)],
        )


def parse(overrides: Iterable[str]) -> Selection:
    """Raises ConfigError that quotes the override which cannot be understood."""
    selection = Selection()
    texts = list(overrides)
    if not texts:
        return selection
    # Hydra takes half a second to import: only when there is something to parse.
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ChoiceSweep, Glob, RangeSweep
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    for text in texts:
        if re.fullmatch(r"[\w.*?-]+", text):
            raise ConfigError(f"{text!r} is not NAME=VALUE; is case={text} meant?")
        if "=" not in text and not text.startswith("~"):  # Hydra says "missing EQUAL at '<EOF>'"
            raise ConfigError(f"{text!r} is not NAME=VALUE")
        try:
            override = parser.parse_overrides([as_path(text)])[0]
            value = override.value()
        except HydraException as error:
            detail = str(error).replace("\n", " ").split("See https")[0].strip()
            raise ConfigError(f"override {text!r} is not NAME=VALUE in Hydra's grammar: {detail}") from None
        values: list[Any]
        if isinstance(value, ChoiceSweep):
            values = [_plain(item) for item in value.list]
        elif isinstance(value, Glob):
            values = list(value.include)
        elif isinstance(value, RangeSweep):
            start, stop, step = int(value.start or 0), int(value.stop or 0), int(value.step)
            values = list(range(start, stop, step))
        else:
            values = [_plain(value)]
        key = override.key_or_group
        if (
            key in selection.given or key.removeprefix("flags.") in selection.flags
        ):  # Hydra would take the last: less would be measured than requested
            raise ConfigError(f"override {text!r}: {key}= is given twice; separate values with commas")
        selection.words.append((key, text))
        group, _, rest = key.partition(".")
        if key in GROUPS:
            _select(selection, key, values, text)
            selection.given.add(key)
        elif key == "ranks":
            selection.ranks = _numbers(values, text)
            selection.given.add(key)
        elif group == "flags" and rest:
            selection.flags[rest] = values
        elif group in GROUPS and rest:
            if len(values) > 1:
                raise ConfigError(f"override {text!r}: sweep a group or a flag, not a key inside {group}")
            selection.patches.setdefault(group, []).append((rest.split("."), values[0]))
            selection.added += [key] if override.is_add() else []
        else:
            selection.run.append(text)
    return selection


def _select(selection: Selection, group: str, values: list[Any], text: str) -> None:
    names = [str(item) for value in values for item in (value if isinstance(value, list) else [value])]
    if group == "hardware" and "auto" in names and len(names) > 1:
        raise ConfigError(f"override {text!r}: auto takes what is there; name the profiles or leave it alone")
    setattr(selection, group, list(dict.fromkeys(names)))


def _numbers(values: list[Any], text: str) -> list[int]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"override {text!r}: {value!r} is no number of ranks (1, 2, 4 ...)")
    return list(dict.fromkeys(values))


def _plain(value: Any) -> Any:
    text = getattr(value, "text", None)  # Hydra's QuotedString
    return text if isinstance(text, str) else value


def said(key: str, value: Any) -> str:
    """An override to be pasted; a plain word needs no quotes, and a variable's value is text as it stands."""
    if key.startswith("env."):
        return f"{key}={value}"
    if isinstance(value, list):
        return f"{key}={','.join(map(_said, value))}"
    return f"{key}={_said(value)}"


def _said(value: Any) -> str:
    if isinstance(value, Enum):
        value = value.value
    if not isinstance(value, str):
        return json.dumps(value)
    plain = re.fullmatch(r"[A-Za-z_][\w.-]*", value) and value.lower() not in ("null", "true", "false", "nan", "inf")
    return value if plain else quoted(value)


def expand(what: str, patterns: Iterable[str], known: Collection[str], where: str = "") -> list[str]:
    """Names matching the patterns, in the catalogue's order; a pattern without a match is an error with the nearest."""
    names = list(known)
    chosen: set[str] = set()
    for pattern in patterns:
        hits = [pattern] if pattern in names else fnmatch.filter(names, pattern)
        if not hits:
            raise unknown(what, pattern, known, where)
        chosen.update(hits)
    return [name for name in names if name in chosen]


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
    told = {name: _value(value) for name, value in asdict(settings).items() if name != "matrix"}
    axes = {name: _axes(each) for name, each in zip(names, listed)}
    lines = ["# @package _global_", *(f"{key}: {json.dumps(value)}" for key, value in told.items()), "matrix:"]
    for name, block in axes.items():
        lines.append(f"  {name}:" + ("" if block else " {}"))
        lines += [f"    {key}: {json.dumps(value)}" for key, value in block.items()]
    for group, changes in sorted((listed[0].patches if listed else {}).items()):
        lines += [f"# and, of the command line: {group}.{'.'.join(keys)}={value}" for keys, value in changes]
    return "\n".join(lines)


def _axes(selection: Selection) -> dict[str, Any]:
    usual = Selection()
    found = {axis: getattr(selection, axis) for axis in (*AXES, "flags")}
    return {axis: value for axis, value in found.items() if value != getattr(usual, axis)}


def _value(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value
