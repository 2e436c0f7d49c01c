"""Facts of the machine that an answer can depend on: what the ranks said of them, and which an arm depends on. Pure.

The profile's name is too coarse a key: whether a CPU computes fp16 makes a fix hold or fail under one name, ``cpu``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from repro_matrix.conf.schema import Case
from repro_matrix.judge.evidence import items, mapping


def seen(document: Mapping[str, Any]) -> dict[str, Any]:
    """Each fact that ranks of the document's attempts said, all the same; one on which they differ is left out."""
    found: dict[str, list[Any]] = {}
    for arm in mapping(document.get("arms")).values():
        for attempt in items(mapping(arm).get("attempts")):
            for rank in items(mapping(mapping(attempt).get("observation")).get("ranks")):
                said = mapping(mapping(mapping(rank.get("record")).get("facts")).get("machine"))
                for name, value in said.items():
                    if value not in found.setdefault(name, []):
                        found[name].append(value)
    return {name: values[0] for name, values in sorted(found.items()) if len(values) == 1}


def depends_on(case: Case, arm: str) -> list[str]:
    """The facts on which this arm's answer depends."""
    return list(dict.fromkeys([*case.depends_on, *(case.arms[arm].depends_on if arm in case.arms else ())]))


def differs(wanted: Iterable[str], here: Mapping[str, Any], there: Mapping[str, Any]) -> str | None:
    """The first of the facts that is not known to be the same on both sides, in words. An unknown one is not."""
    for fact in wanted:
        one, other = here.get(fact), there.get(fact)
        if one is None or one != other:
            return f"{fact} {_said(one)} against {_said(other)}"
    return None


def _said(value: Any) -> str:
    return "unknown" if value is None else str(value)
