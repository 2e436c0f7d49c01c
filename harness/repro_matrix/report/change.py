"""What an arm changes against the broken one, as a diff of settings. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import NoneType
from typing import Any, NamedTuple

Flat = dict[str, Any]  # settings, by their dotted names

# What names an arm, or says how it is judged, and is no setting of what is run.
_NO_SETTING = {"arm", "case", "proof"}


class Change(NamedTuple):
    key: str  # flags.call, strategy, world_size ...
    before: str | None  # in the broken arm; None: it has no such setting
    after: str | None


def changes(broken: Mapping[str, Any], own: Mapping[str, Any]) -> list[Change]:
    """Settings that differ, by their dotted names. Of another model or strategy its name says enough."""
    return differing(flat(broken), own)


def differing(broken: Flat, own: Mapping[str, Any]) -> list[Change]:
    """The same where the broken arm's have been laid flat already: a cell has many arms."""
    one, other = broken, flat(own)
    for group in ("model", "strategy"):
        if _said(one, f"{group}.slug") != _said(other, f"{group}.slug"):
            one, other = ({key: value for key, value in found.items() if not _is_of(key, group)}
                          for found in (one, other))  # fmt: skip
    keys = [*one, *(key for key in other if key not in one)]
    told = [Change(_named(key), _said(one, key), _said(other, key)) for key in keys if not _are_one(one, other, key)]
    return [each for each in told if each.before != each.after]


def flat(settings: Mapping[str, Any]) -> Flat:
    """Settings by their dotted names."""
    found: Flat = {}
    for key, value in settings.items():
        if key not in _NO_SETTING:
            _lay(found, key, value)
    return found


def _lay(found: Flat, name: str, value: Any) -> None:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            _lay(found, f"{name}.{key}", inner)
    else:
        found[name] = value


def _is_of(key: str, group: str) -> bool:
    """Whether it goes without saying where the group is another one."""
    return key.startswith(f"{group}.") and key != f"{group}.slug" and not key.startswith("strategy.options.")


def _are_one(one: Flat, other: Flat, key: str) -> bool:
    """Values that need not be written to be known as one: nearly all."""
    a, b = one.get(key, one), other.get(key, other)
    return type(a) is type(b) and isinstance(a, (str, int, NoneType)) and bool(a == b)


def _said(found: Flat, key: str) -> str | None:
    if key not in found:
        return None
    value = found[key]
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _named(key: str) -> str:
    return key.replace("strategy.options.", "options.").replace(".slug", "")
