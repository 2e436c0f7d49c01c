"""Decide which measurements may be compared: like with like, on machines with the same capabilities. Pure.

A failure that a smaller shape does not trigger would otherwise count as fixed upstream. What may differ is what a
comparison is about: the stack, and with it the day.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from repro_matrix.config.schema import Case
from repro_matrix.records.document import Cell
from repro_matrix.records.observation import Settings

# Parts of a variant's settings, in the order in which a difference is named.
_SCALARS = ("world_size", "tp_size", "steps", "seed", "device", "backend")
Capability = str | bool


def settings_difference(one: Settings, other: Settings) -> str | None:
    """Return the first difference between two variants' settings; None where they are comparable.

    A flag or an option that only one of them has did not exist for the other, and was at its default there; of the
    model's configuration every key counts. Empty settings are comparable with all.
    """
    if not one or not other:
        return None
    model, other_model = one.get("model") or {}, other.get("model") or {}
    for key in ("slug", "scale", "weights"):
        if model.get(key) != other_model.get(key):
            return _differ(f"model {key}" if key == "slug" else key, model.get(key), other_model.get(key))
    found = _first(model.get("config") or {}, other_model.get("config") or {}, strict=True)
    found = found or _first(one.get("flags") or {}, other.get("flags") or {})
    strategy, other_strategy = one.get("strategy") or {}, other.get("strategy") or {}
    if not found and strategy.get("slug") != other_strategy.get("slug"):
        return _differ("strategy", strategy.get("slug"), other_strategy.get("slug"))
    found = found or _first(strategy.get("options") or {}, other_strategy.get("options") or {})
    return found or _first(
        {k: one.get(k) for k in _SCALARS if k in one}, {k: other.get(k) for k in _SCALARS if k in other}
    )


def cell_difference(
    one: Cell, other: Cell, variants: Iterable[str] | None = None, facts: Iterable[str] = ()
) -> str | None:
    """Return the first difference between two cells: the hardware's kind, a capability, or a variant's settings.

    ``variants``: those to compare; None: all that both have. ``facts``: the capabilities that the case depends on.
    """
    hardware, others = one["hardware"], other["hardware"]
    if hardware["accelerator"] != others["accelerator"]:
        return _differ("accelerator", hardware["accelerator"], others["accelerator"])
    for fact in facts:
        left, right = hardware.get("capabilities", {}).get(fact), others.get("capabilities", {}).get(fact)
        if left != right and None not in (left, right):  # one that was never recorded does not count
            return _differ(f"fact {fact}", left, right)
    if one["ranks"] != other["ranks"]:
        return _differ("ranks", one["ranks"], other["ranks"])
    if one["overrides"] != other["overrides"]:
        return _differ("overrides", one["overrides"], other["overrides"])
    for variant in one["variants"] if variants is None else variants:
        if variant in one["variants"] and variant in other["variants"]:
            difference = settings_difference(
                one["variants"][variant]["settings"], other["variants"][variant]["settings"]
            )
            if difference:
                return f"variant {variant}: {difference}"
    return None


def machine(document: Cell) -> dict[str, Any]:
    """Return what identifies the machine of a measurement, without what changes from day to day."""
    hardware = document["hardware"]
    identity = {key: hardware.get(key) for key in ("accelerator", "cpu", "cores", "driver")}
    return {**identity, "gpus": sorted(gpu["name"] for gpu in hardware["gpus"])}


# -- capabilities: a profile's name is too coarse. Whether a CPU computes fp16 decides whether some fixes hold there.


def recorded_capabilities(document: Cell) -> dict[str, Capability]:
    """Return each capability that all ranks of the document's attempts recorded alike."""
    values: dict[str, list[Capability]] = {}
    for variant in document["variants"].values():
        for attempt in variant["attempts"]:
            for rank in attempt["observation"]["ranks"]:
                record = rank["record"]
                for name, value in record["facts"].get("machine", {}).items() if record else ():
                    if value not in values.setdefault(name, []):
                        values[name].append(value)
    return {name: each[0] for name, each in sorted(values.items()) if len(each) == 1}


def depends_on_capabilities(case: Case, variant: str) -> list[str]:
    """Return the capabilities on which this variant's answer depends."""
    return list(
        dict.fromkeys(
            [
                *case.depends_on_capabilities,
                *(case.variants[variant].depends_on_capabilities if variant in case.variants else ()),
            ]
        )
    )


def capability_difference(wanted: Iterable[str], here: Mapping[str, Any], there: Mapping[str, Any]) -> str | None:
    """Return the first capability that is not known to be the same on both sides; an unknown one is not."""
    for fact in wanted:
        one, other = here.get(fact), there.get(fact)
        if one is None or one != other:
            return _differ(fact, *("unknown" if value is None else value for value in (one, other)))
    return None


def _first(one: Mapping[str, Any], other: Mapping[str, Any], strict: bool = False) -> str | None:
    """Return the first difference between two mappings; ``strict``: also a key that only one of them has."""
    for key in sorted(one.keys() | other.keys() if strict else one.keys() & other.keys()):
        if one.get(key) != other.get(key):
            return _differ(key, one.get(key), other.get(key))
    return None


def _differ(what: str, one: Any, other: Any) -> str:
    return f"{what} {one} against {other}"
