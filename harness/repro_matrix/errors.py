"""Describe errors that a user can correct, with the file, the key and the nearest valid choice."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from enum import IntEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails


V = TypeVar("V")
NEAR = 0.65  # above difflib's 0.6, at which `claims` is near `arms`
FILES = (".py", ".txt", ".lock")
FEW = 20  # choices that are listed beside the nearest one


class ExitCode(IntEnum):
    OK = 0
    DIFFERS = 1  # a result differs from its expectation
    USAGE = 2
    INCOMPLETE = 3  # less was measured than requested
    DEFECT = 70  # as EX_SOFTWARE of sysexits.h
    INTERRUPTED = 130


class ReproError(Exception):
    """An error that the user can correct: usage, configuration, results folder."""

    exit_code: int = ExitCode.USAGE


class ConfigError(ReproError):
    """A file under conf/ or an override is wrong."""


class ResultsError(ReproError):
    """The results folder cannot be used, or a document in it is damaged."""


class MeasureError(ReproError):
    """Less could be measured than was requested."""

    exit_code = ExitCode.INCOMPLETE


def suggestion(word: str, choices: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?``, or an empty string if no choice is near."""
    plain = {_stem(each): each for each in sorted(set(choices))}
    near = difflib.get_close_matches(_stem(word), plain, n=1, cutoff=NEAR)
    return f"; did you mean {plain[near[0]]!r}?" if near else ""


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return ``; did you mean 'x'? (there are: ...)``.

    Without a near choice, only list the choices. With many choices, only return the near one: a
    list of forty names would hide it.
    """
    known = sorted(set(choices))
    hint = suggestion(word, known)
    if hint and len(known) > FEW:
        return hint
    shown = ", ".join(known[:40]) + (" ..." if len(known) > 40 else "")
    return f"{hint} (there are: {shown or 'none'})"


def _stem(word: str) -> str:
    """Return a word without dashes and .py, which do not make two names similar."""
    text = word.lstrip("-")
    for kind in FILES:
        if text.endswith(kind) and text != kind:
            return text.removesuffix(kind)
    return text


class Options(dict[str, V]):
    """Options by name. ``left_out``: the options with an invalid file, each with its error."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out: dict[str, ConfigError] = {}


def as_yaml(value: Any) -> str:
    """Return a value as YAML and the command line write it: ``null``, ``false``, ``text``."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def unknown(what: str, word: str, choices: Iterable[str], where: str = "") -> ConfigError:
    """Return the error about a name that is not among the choices, or whose file is invalid."""
    place = f"{where}: " if where else ""
    for name, why in choices.left_out.items() if isinstance(choices, Options) else ():
        if name == word or fnmatchcase(name, word):
            needs = f"{place}needs {what} {word!r}, which is left out: " if where else ""
            return ConfigError(f"{needs}{why}")
    return ConfigError(f"{place}unknown {what} {word!r}{nearest(word, choices)}")


def describe_validation(
    error: ValidationError, model: type[BaseModel], path: Path | str
) -> ConfigError:
    """Return pydantic's errors as lines `file: key: what is wrong; did you mean ...`."""
    # A wrong key first, because it explains a missing one.
    items = sorted(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
    lines = [f"{path}: {_describe_item(item, model)}" for item in items]
    return ConfigError("\n".join(dict.fromkeys(lines)))


def _describe_item(item: ErrorDetails, model: type[BaseModel]) -> str:
    location, given = [str(part) for part in item["loc"]], item["input"]
    key = ".".join(location) or "(the whole file)"
    if item["type"] == "extra_forbidden":
        fields = _fields_at(model, item["loc"][:-1])
        return f"unknown key {key!r}{nearest(location[-1], fields)}"
    if item["type"] == "missing":
        return f"key {key!r} is missing{_choices_at(model, item['loc'])}"
    if item["type"] == "literal_error":
        parts = str(item["ctx"]["expected"]).replace(" or ", ",").split(",")
        choices = [part.strip(" '") for part in parts]
        return f"{key}: {given!r} is not valid{nearest(str(given), choices)}"
    shown = f" (given: {given!r})" if isinstance(given, (str, int, float, bool)) else ""
    return f"{key}: {item['msg'].removeprefix('Value error, ')}{shown}"


def _fields_at(model: Any, location: tuple[int | str, ...]) -> dict[str, FieldInfo]:
    """Return the valid keys at a place in a model, through fields and the items of containers."""
    found = _model_of(model)
    for part in map(str, location):
        if found and part in found.model_fields:  # else: an index of a list, or a key of a mapping
            found = _model_of(found.model_fields[part].annotation)
    return found.model_fields if found else {}


def _choices_at(model: Any, location: tuple[int | str, ...]) -> str:
    """Return the values of a key that is a Literal, as ``nearest`` lists them."""
    kind = getattr(_fields_at(model, location[:-1]).get(str(location[-1])), "annotation", None)
    return nearest("", get_args(kind)) if get_origin(kind) is Literal else ""


def _model_of(kind: Any) -> type[BaseModel] | None:
    """Return a model, or the first model among the items of a container or a union."""
    for inner in get_args(kind):
        if found := _model_of(inner):
            return found
    return kind if hasattr(kind, "model_fields") else None
