"""A verb's own words (``package=transformers between=4.36..5.23``), taken out before Hydra sees the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from harness.config import RunSettings
from harness.errors import ConfigError, unknown
from harness.overrides import GROUPS

YES = ("true", "yes", "1", "on")
NO = ("false", "no", "0", "off")


def take(
    texts: Sequence[str], own: Mapping[str, str], refused: Mapping[str, str] | None = None
) -> tuple[Words, list[str]]:
    """(the verb's own words, the overrides that are left). ``refused``: groups that mean nothing here, with the reason.

    A name that neither the verb nor the run knows is an error that tells the nearest.
    """
    found: dict[str, str] = {}
    rest = []
    valid = [*own, *(name for name in GROUPS if name not in (refused or {})), *(f.name for f in fields(RunSettings))]
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals:
            raise ConfigError(f"{text!r} is not NAME=VALUE (names: {', '.join(own)})")
        if name in own:
            if name in found:
                raise ConfigError(f"{name}= is given twice")
            found[name] = _unquoted(value.strip())
            continue
        if name in (refused or {}):
            raise ConfigError(f"{text!r}: {(refused or {})[name]}")
        if name.lstrip("+~").split(".")[0] not in (*valid, "flags"):
            raise unknown("setting", name, valid)
        rest.append(text)
    return Words(found), rest


class Words:
    """Values by name, read as what they should be."""

    def __init__(self, found: Mapping[str, str]) -> None:
        self._found = dict(found)

    def get(self, name: str, default: str | None = None) -> str | None:
        value = self._found.get(name)
        if value == "":
            raise ConfigError(f"{name}=: a value is missing")
        return default if value is None else value

    def need(self, name: str, what: str) -> str:
        value = self.get(name)
        if value is None:
            raise ConfigError(f"{name}= is missing: {what}")
        return value

    def flag(self, name: str) -> bool:
        value = (self.get(name) or "false").lower()
        if value not in (*YES, *NO):
            raise ConfigError(f"{name}={value}: true or false")
        return value in YES

    def number(self, name: str, least: int = 1) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if not value.isdecimal() or int(value) < least:
            raise ConfigError(f"{name}={value}: a number of at least {least}")
        return int(value)

    def choice(self, name: str, choices: Sequence[str]) -> str:
        value = self.get(name, choices[0]) or ""
        if value not in choices:
            raise unknown(f"value of {name}", value, choices)
        return value


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def listed(own: Mapping[str, str]) -> str:
    """For --help: a line per word."""
    width = max(map(len, own))
    return "\n".join(f"  {name.ljust(width)}  {text}" for name, text in own.items())
