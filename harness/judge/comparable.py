"""Like with like: which two measurements of one arm may be compared, and which were made on one machine. Pure.

A failure that a smaller shape does not trigger would otherwise be called fixed upstream. What may differ is what a
comparison is about: the stack, and with it the day.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from repro_matrix.judge.evidence import items, mapping, text

Document = Mapping[str, Any]
# Parts of an arm's settings, in the order in which a difference is named.
_PLAIN = ("world_size", "tp_size", "steps", "seed", "device", "backend")


def comparable(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Why two arms' settings are not alike, in words; None where they are.

    A flag or an option that only one of them has did not exist for the other, and was at its default there; of the
    model's configuration every key counts. Settings that say nothing (from before they were stored) are alike.
    """
    if not one or not other:
        return None
    mine, theirs = mapping(one.get("model")), mapping(other.get("model"))
    for key in ("slug", "scale", "weights"):
        if mine.get(key) != theirs.get(key):
            return _differ(f"model {key}" if key == "slug" else key, mine.get(key), theirs.get(key))
    found = _first(mapping(mine.get("config")), mapping(theirs.get("config")), strict=True)
    found = found or _first(mapping(one.get("flags")), mapping(other.get("flags")))
    mine, theirs = mapping(one.get("strategy")), mapping(other.get("strategy"))
    if not found and mine.get("slug") != theirs.get("slug"):
        return _differ("strategy", mine.get("slug"), theirs.get("slug"))
    found = found or _first(mapping(mine.get("options")), mapping(theirs.get("options")))
    return found or _first({k: one.get(k) for k in _PLAIN if k in one}, {k: other.get(k) for k in _PLAIN if k in other})


def comparable_documents(
    one: Document, other: Document, arms: Iterable[str] | None = None, facts: Iterable[str] = ()
) -> str | None:
    """Why two cells' measurements are not alike: the hardware's kind, a fact that counts, or an arm's settings.

    ``arms``: those to be compared; None: all that both have. ``facts``: what of the machine the case depends on.
    """
    mine, theirs = mapping(one.get("hardware")), mapping(other.get("hardware"))
    if mine.get("accelerator") != theirs.get("accelerator"):
        return _differ("accelerator", mine.get("accelerator"), theirs.get("accelerator"))
    for fact in facts:
        left, right = mapping(mine.get("facts")).get(fact), mapping(theirs.get("facts")).get(fact)
        if left != right and None not in (left, right):  # one from before facts were stored says nothing of them
            return _differ(f"fact {fact}", left, right)
    for key in ("ranks", "variant"):
        if key in one and key in other and one[key] != other[key]:
            return _differ(key, one[key], other[key])
    held, others = mapping(one.get("arms")), mapping(other.get("arms"))
    for arm in held if arms is None else arms:
        if arm in held and arm in others:
            why = comparable(mapping(held[arm].get("settings")), mapping(others[arm].get("settings")))
            if why:
                return f"arm {arm}: {why}"
    return None


def machine(document: Document) -> dict[str, Any]:
    """Which machine a document was measured on, as far as it says; what changes from day to day is left out."""
    hardware = mapping(document.get("hardware"))
    gpus = sorted(text(gpu.get("name")) for gpu in items(hardware.get("gpus")))
    found = {key: hardware.get(key) for key in ("accelerator", "cpu", "cores", "driver")}
    return {**found, "gpus": gpus}


def _first(one: Mapping[str, Any], other: Mapping[str, Any], strict: bool = False) -> str | None:
    """The first key in which two mappings differ; ``strict``: also one that only one of them has."""
    keys = one.keys() | other.keys() if strict else one.keys() & other.keys()
    for key in sorted(keys):
        if one.get(key) != other.get(key):
            return _differ(key, one.get(key), other.get(key))
    return None


def _differ(what: str, one: Any, other: Any) -> str:
    return f"{what} {one} against {other}"
