"""Errors that a user can act on: they name the file, the key and the nearest valid choice."""

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
    """Something that the user can mend: usage, configuration, results folder."""

    exit_code: int = ExitCode.USAGE


class ConfigError(ReproError):
    """A file under conf/ or an override is wrong."""


class ResultsError(ReproError):
    """The results folder cannot be used, or a document in it is damaged."""


class MeasureError(ReproError):
    """Less could be measured than was requested."""

    exit_code = ExitCode.INCOMPLETE


def suggestion(word: str, choices: Iterable[str]) -> str:
    """ "; did you mean 'x'?", or nothing if no choice is near."""
    plain = {_stem(each): each for each in sorted(set(choices))}
    near = difflib.get_close_matches(_stem(word), plain, n=1, cutoff=NEAR)
    return f"; did you mean {plain[near[0]]!r}?" if near else ""


def nearest(word: str, choices: Iterable[str]) -> str:
    """ "; did you mean 'x'? (there are: ...)"; only the choices where none is near, only the near
    one where they are many: forty names behind it hide it."""
    known = sorted(set(choices))
    hint = suggestion(word, known)
    if hint and len(known) > FEW:
        return hint
    shown = ", ".join(known[:40]) + (" ..." if len(known) > 40 else "")
    return f"{hint} (there are: {shown or 'none'})"


def _stem(word: str) -> str:
    """Without what it has in common with any other of its kind: two dashes, or .py, make no name
    near another."""
    text = word.lstrip("-")
    return next(
        (text[: -len(kind)] for kind in FILES if text.endswith(kind) and text != kind), text
    )


class Options(dict[str, V]):
    """Options by name, and those whose file is wrong, each with what is wrong with it. ``unknown``
    tells it of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.left_out: dict[str, ConfigError] = {}


def as_yaml(value: Any) -> str:
    """Return a value as it is written in YAML and on the command line: ``null``, ``false``,
    ``text``."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def unknown(what: str, word: str, choices: Iterable[str], where: str = "") -> ConfigError:
    left_out = choices.left_out if isinstance(choices, Options) else {}
    wrong = next(
        (why for name, why in left_out.items() if name == word or fnmatchcase(name, word)), None
    )
    if wrong:
        return ConfigError(
            f"{where}: needs {what} {word!r}, which is left out: {wrong}" if where else str(wrong)
        )
    return ConfigError(
        f"{where + ': ' if where else ''}unknown {what} {word!r}{nearest(word, choices)}"
    )


def describe_validation(
    error: ValidationError, model: type[BaseModel], path: Path | str
) -> ConfigError:
    """pydantic's complaints as lines `file: key: what is wrong; did you mean ...`."""
    lines = []
    for item in sorted(
        error.errors(), key=lambda item: item["type"] != "extra_forbidden"
    ):  # a typo explains the rest
        location = [str(part) for part in item["loc"]]
        key = ".".join(location) or "(the whole file)"
        if item["type"] == "extra_forbidden":
            lines.append(
                f"{path}: unknown key"
                f" {key!r}{nearest(location[-1], _fields_at(model, item['loc'][:-1]))}"
            )
        elif item["type"] == "missing":
            lines.append(f"{path}: key {key!r} is missing{_choices_at(model, item['loc'])}")
        elif item["type"] == "literal_error":
            expected = [
                part.strip(" '")
                for part in str(item["ctx"]["expected"]).replace(" or ", ",").split(",")
            ]
            lines.append(
                f"{path}: {key}: {item['input']!r} is not"
                f" valid{nearest(str(item['input']), expected)}"
            )
        else:
            message = item["msg"].removeprefix("Value error, ")
            given = item["input"]
            shown = f" (given: {given!r})" if isinstance(given, (str, int, float, bool)) else ""
            lines.append(f"{path}: {key}: {message}{shown}")
    return ConfigError("\n".join(dict.fromkeys(lines)))


def _fields_at(model: Any, location: tuple[int | str, ...]) -> dict[str, FieldInfo]:
    """Return the keys that are valid at a place in a model: follow fields, and the items of lists
    and mappings."""
    found = _model_of(model)
    for part in map(str, location):
        if found and part in found.model_fields:  # else: an index of a list, or a key of a mapping
            found = _model_of(found.model_fields[part].annotation)
    return found.model_fields if found else {}


def _choices_at(model: Any, location: tuple[int | str, ...]) -> str:
    """List the values of a key that takes only some."""
    kind = getattr(_fields_at(model, location[:-1]).get(str(location[-1])), "annotation", None)
    return nearest("", get_args(kind)) if get_origin(kind) is Literal else ""


def _model_of(kind: Any) -> type[BaseModel] | None:
    """Return a type that is a model, or the first model among the items of a container or a
    union."""
    inner = map(_model_of, get_args(kind))
    return (
        next(filter(None, inner), None)
        if get_args(kind)
        else kind
        if hasattr(kind, "model_fields")
        else None
    )
