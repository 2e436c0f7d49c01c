"""What an arm changes against the broken one, as a diff of settings. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

# What names an arm, or says how it is judged, and is no setting of what is run.
_NO_SETTING = {"arm", "case", "proof"}


class Change(NamedTuple):
    key: str  # flags.call, strategy, world_size ...
    before: str | None  # in the broken arm; None: it has no such setting
    after: str | None


def changes(broken: Mapping[str, Any], own: Mapping[str, Any]) -> list[Change]:
    """Settings that differ, by their dotted names. Of another model or strategy its name says enough."""
    one, other = dict(flat(broken)), dict(flat(own))
    for group in ("model", "strategy"):
        if one.get(f"{group}.slug") != other.get(f"{group}.slug"):
            for found in (one, other):
                for key in [key for key in found if key.startswith(f"{group}.") and key != f"{group}.slug"]:
                    if not key.startswith("strategy.options."):
                        del found[key]
    keys = [*one, *(key for key in other if key not in one)]
    return [Change(_named(key), one.get(key), other.get(key)) for key in keys if one.get(key) != other.get(key)]


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if not prefix and key in _NO_SETTING:
            continue
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _named(key: str) -> str:
    return key.replace("strategy.options.", "options.").replace(".slug", "")
