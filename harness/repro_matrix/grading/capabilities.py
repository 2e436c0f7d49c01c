"""Facts of the machine that an answer can depend on: what the ranks said of them, and which an arm depends on. Pure.

The profile's name is too coarse a key: whether a CPU computes fp16 makes a fix hold or fail under one name, ``cpu``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from repro_matrix.config.schema import Case
from repro_matrix.records.document import Cell

Fact = str | bool


def seen(document: Cell) -> dict[str, Fact]:
    """Each fact that ranks of the document's attempts said, all the same; one on which they differ is left out."""
    found: dict[str, list[Fact]] = {}
    for arm in document["arms"].values():
        for attempt in arm["attempts"]:
            for rank in attempt["observation"]["ranks"]:
                record = rank["record"]
                for name, value in record["facts"].get("machine", {}).items() if record else ():
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
