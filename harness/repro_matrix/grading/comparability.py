"""Decide which measurements may be compared: the same settings, on machines with the same capabilities. Pure.

A failure that a smaller shape does not trigger would otherwise count as fixed upstream. What may differ is what a
comparison is about: the stack, and with it the day.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from repro_matrix.config.schema import Case
from repro_matrix.records.attempt import Settings
from repro_matrix.records.document import Cell

_SCALARS = ("world_size", "tp_size", "steps", "seed", "device", "backend")  # the order of differences that are named


def settings_difference(one: Settings, other: Settings) -> str | None:
    """Return the first difference between two variants' settings; None where they are comparable.

    A flag or an option that only one of them has did not exist for the other, and was at its default there; of the
    model's configuration every key counts. Empty settings are comparable with all.
    """
    if not one or not other:
        return None
    model, other_model = one.get("model", {}), other.get("model", {})
    for key in ("slug", "scale", "weights"):
        if model.get(key) != other_model.get(key):
            return _differ(f"model {key}" if key == "slug" else key, model.get(key), other_model.get(key))
    strategy, other_strategy = one.get("strategy", {}), other.get("strategy", {})
    return (
        _first(model.get("config"), other_model.get("config"), strict=True)
        or _first(one.get("flags"), other.get("flags"))
        or _first({"strategy": strategy.get("slug")}, {"strategy": other_strategy.get("slug")})
        or _first(strategy.get("options"), other_strategy.get("options"))
        or _first({k: one[k] for k in _SCALARS if k in one}, {k: other[k] for k in _SCALARS if k in other})  # type: ignore[literal-required]
    )


def machine(document: Cell) -> dict[str, Any]:
    """Return what identifies the machine of a measurement, without what changes from day to day."""
    hardware = document["hardware"]
    identity = {key: hardware.get(key) for key in ("accelerator", "cpu", "cores", "driver")}
    return {**identity, "gpus": sorted(gpu["name"] for gpu in hardware["gpus"])}


# -- capabilities: a profile's name is too coarse. Whether a CPU computes fp16 decides whether some fixes hold there.


def recorded_capabilities(document: Cell) -> dict[str, str | bool]:
    """Return each capability that all ranks of the document's attempts recorded alike."""
    values: dict[str, set[str | bool]] = {}
    for variant in document["variants"].values():
        for attempt in variant["attempts"]:
            for record in (rank["record"] for rank in attempt["observation"]["ranks"]):
                for name, value in record["facts"].get("machine", {}).items() if record else ():
                    values.setdefault(name, set()).add(value)
    return {name: next(iter(each)) for name, each in sorted(values.items()) if len(each) == 1}


def depends_on_capabilities(case: Case, variant: str) -> list[str]:
    """Return the capabilities on which this variant's answer depends."""
    also = case.variants[variant].depends_on_capabilities if variant in case.variants else ()
    return list(dict.fromkeys([*case.depends_on_capabilities, *also]))


def capability_difference(wanted: Iterable[str], here: Mapping[str, Any], there: Mapping[str, Any]) -> str | None:
    """Return the first capability that is not known to be the same on both sides; an unknown one is not."""
    for fact in wanted:
        one, other = here.get(fact), there.get(fact)
        if one is None or one != other:
            return _differ(fact, *("unknown" if value is None else value for value in (one, other)))
    return None


def same_release(one: str, other: str) -> bool:
    """Compare two versions; a build (+cu121) that only one of them names is ignored: metadata may leave it out."""
    if "+" in one and "+" in other:
        return one == other
    return one.partition("+")[0] == other.partition("+")[0]


def _first(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None, strict: bool = False) -> str | None:
    """Return the first difference between two mappings; ``strict``: also a key that only one of them has."""
    one, other = one or {}, other or {}
    for key in sorted(one.keys() | other.keys() if strict else one.keys() & other.keys()):
        if one.get(key) != other.get(key):
            return _differ(key, one.get(key), other.get(key))
    return None


def _differ(what: str, one: Any, other: Any) -> str:
    return f"{what} {one} against {other}"
