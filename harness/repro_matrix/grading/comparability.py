"""Like with like: which two measurements of one arm may be compared, and which were made on one machine. Pure.

A failure that a smaller shape does not trigger would otherwise be called fixed upstream. What may differ is what a
comparison is about: the stack, and with it the day.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from repro_matrix.records.document import Cell
from repro_matrix.records.observation import Settings

# Parts of an arm's settings, in the order in which a difference is named.
_PLAIN = ("world_size", "tp_size", "steps", "seed", "device", "backend")


def comparable(one: Settings, other: Settings) -> str | None:
    """Why two arms' settings are not alike, in words; None where they are.

    A flag or an option that only one of them has did not exist for the other, and was at its default there; of the
    model's configuration every key counts. Settings that say nothing (from before they were stored) are alike.
    """
    if not one or not other:
        return None
    mine, theirs = one.get("model") or {}, other.get("model") or {}
    for key in ("slug", "scale", "weights"):
        if mine.get(key) != theirs.get(key):
            return _differ(f"model {key}" if key == "slug" else key, mine.get(key), theirs.get(key))
    found = _first(mine.get("config") or {}, theirs.get("config") or {}, strict=True)
    found = found or _first(one.get("flags") or {}, other.get("flags") or {})
    sharded, others = one.get("strategy") or {}, other.get("strategy") or {}
    if not found and sharded.get("slug") != others.get("slug"):
        return _differ("strategy", sharded.get("slug"), others.get("slug"))
    found = found or _first(sharded.get("options") or {}, others.get("options") or {})
    return found or _first({k: one.get(k) for k in _PLAIN if k in one}, {k: other.get(k) for k in _PLAIN if k in other})


def comparable_documents(
    one: Cell, other: Cell, arms: Iterable[str] | None = None, facts: Iterable[str] = ()
) -> str | None:
    """Why two cells' measurements are not alike: the hardware's kind, a fact that counts, or an arm's settings.

    ``arms``: those to be compared; None: all that both have. ``facts``: what of the machine the case depends on.
    """
    mine, theirs = one["hardware"], other["hardware"]
    if mine["accelerator"] != theirs["accelerator"]:
        return _differ("accelerator", mine["accelerator"], theirs["accelerator"])
    for fact in facts:
        left, right = mine.get("facts", {}).get(fact), theirs.get("facts", {}).get(fact)
        if left != right and None not in (left, right):  # one from before facts were stored says nothing of them
            return _differ(f"fact {fact}", left, right)
    if one["ranks"] != other["ranks"]:
        return _differ("ranks", one["ranks"], other["ranks"])
    if one["variant"] != other["variant"]:
        return _differ("variant", one["variant"], other["variant"])
    held, others = one["arms"], other["arms"]
    for arm in held if arms is None else arms:
        if arm in held and arm in others:
            why = comparable(held[arm]["settings"], others[arm]["settings"])
            if why:
                return f"arm {arm}: {why}"
    return None


def machine(document: Cell) -> dict[str, Any]:
    """Which machine a document was measured on; what changes from day to day is left out."""
    hardware = document["hardware"]
    found = {key: hardware.get(key) for key in ("accelerator", "cpu", "cores", "driver")}
    return {**found, "gpus": sorted(gpu["name"] for gpu in hardware["gpus"])}


def _first(one: Mapping[str, Any], other: Mapping[str, Any], strict: bool = False) -> str | None:
    """The first key in which two mappings differ; ``strict``: also one that only one of them has."""
    keys = one.keys() | other.keys() if strict else one.keys() & other.keys()
    for key in sorted(keys):
        if one.get(key) != other.get(key):
            return _differ(key, one.get(key), other.get(key))
    return None


def _differ(what: str, one: Any, other: Any) -> str:
    return f"{what} {one} against {other}"
