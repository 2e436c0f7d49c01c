"""How often one hardware's answers predict the other's, case by case. Pure.

An arm agrees where both measured it, and it came out alike: the same verdict, the same failures met, steady on both or
on neither. What only one side measured says nothing and is counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from repro_matrix.analysis.brief import ArmBrief, Brief, Parts, placed, unlike
from repro_matrix.analysis.diff import sides_by_cell
from repro_matrix.analysis.show_diff import told
from repro_matrix.errors import ConfigError
from repro_matrix.grading.verdict import wilson
from repro_matrix.text import WIDTH, wrap

SHOWN = 12  # disagreements of a case


class Otherwise(NamedTuple):
    axes: tuple[str, ...]
    arm: str
    first: str
    second: str
    error_at: tuple[str | None, str | None]  # file:line, on both sides
    documents: tuple[str, str]


@dataclass
class Agreement:
    """Of one case: ``k`` of ``n`` arms that both measured came out alike. ``otherwise``: where, and both answers."""

    case: str
    k: int = 0
    n: int = 0
    alone: int = 0  # arms that only one side measured
    unlike: int = 0  # and arms that were measured with other settings
    otherwise: list[Otherwise] = field(default_factory=list)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of k/n."""
        low, high = wilson(self.k, self.n)
        return low, high


def agree(
    one: Iterable[Brief], other: Iterable[Brief], parts: Parts
) -> tuple[list[Agreement], Mapping[str, tuple[str, str]]]:
    """(each case, the worst first; the axes across which they are compared). Raises ConfigError: no cell in common."""
    mine, theirs, across = sides_by_cell(one, other)
    found: dict[str, Agreement] = {}
    for at in sorted(mine.keys() & theirs.keys()):
        here, there = mine[at], theirs[at]
        row = found.setdefault(here.case, Agreement(here.case))
        for arm in dict.fromkeys([*here.arms, *there.arms]):
            was, now = here.arms.get(arm), there.arms.get(arm)
            if was is None or now is None or not was.measured or not now.measured:
                row.alone += bool((was and was.measured) or (now and now.measured))
            elif unlike(was, now, parts):
                row.unlike += 1
            else:
                row.n += 1
                row.k += alike(was, now)
                if not alike(was, now):
                    places = (was.error_at, now.error_at)
                    both = (here.path, there.path)
                    row.otherwise.append(Otherwise(here.axes, arm, told(was), told(now), places, both))
    if not any(row.n for row in found.values()):
        raise ConfigError(
            f"nothing that both have measured: {len(mine)} and {len(theirs)} cells, {len(found)} cases in common"
        )
    rows = sorted(found.values(), key=lambda row: (row.k / row.n if row.n else 2, row.case))
    return rows, across


def alike(one: ArmBrief, other: ArmBrief) -> bool:
    """Whether the one predicts the other: how often something happened may differ, not what."""
    return (one.verdict, set(one.met), set(one.kinds)) == (other.verdict, set(other.met), set(other.kinds))


def lines(rows: Iterable[Agreement], every: bool = False, width: int = WIDTH) -> Iterator[str]:
    """``width``: in columns."""
    listed = list(rows)
    names = max(len(row.case) for row in listed)
    for row in listed:
        low, high = row.interval
        share = (
            f"{row.k:4} of {row.n:4}  ({100 * low:.0f} to {100 * high:.0f} %)"
            if row.n
            else "   nothing measured by both"
        )
        more = f"; {row.alone} measured by one only" if row.alone else ""
        more += f"; {row.unlike} with other settings" if row.unlike else ""
        yield from wrap(f"{row.case.ljust(names)}  {share}{more}", "", min(names + 2, width // 2), width)
        shown = row.otherwise if every else row.otherwise[:SHOWN]
        for each in shown:
            yield from wrap(f"{' '.join(each.axes)} {each.arm}", "    ", 4, width)
            yield from wrap(f"first:  {each.first}", "      ", 8, width)
            yield from wrap(f"second: {each.second}", "      ", 8, width)
        if len(shown) < len(row.otherwise):
            yield f"    and {len(row.otherwise) - len(shown)} more: --all"
    k, n = sum(row.k for row in listed), sum(row.n for row in listed)
    low, high = wilson(k, n)
    yield ""
    told = f"{k} of {n} arms that both measured came out alike ({100 * low:.0f} to {100 * high:.0f} %)"
    yield from wrap(told, "", 2, width)


def as_json(rows: Iterable[Agreement], across: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Stable keys."""
    return {
        "schema": 1,
        "across": {axis: list(values) for axis, values in across.items()},
        "cases": [
            {
                "case": row.case, "agree": row.k, "both": row.n, "interval": list(row.interval), "one_only": row.alone,
                "other_settings": row.unlike,
                "otherwise": [
                    {
                        "where": placed(row.case, each.axes), "arm": each.arm, "first": each.first,
                        "second": each.second, "error_at": list(each.error_at), "documents": list(each.documents),
                    }
                    for each in row.otherwise
                ],
            }
            for row in rows
        ],
    }  # fmt: skip
