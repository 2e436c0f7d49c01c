"""Measure how often one side's results predict the other's: `repro diff --agreement`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from repro_matrix.changes.diff import (
    SHOWN,
    describe_row,
    pair_cells,
    pair_variants,
    place_to_json,
    values_to_json,
)
from repro_matrix.errors import ConfigError
from repro_matrix.grading.expected import settings_difference
from repro_matrix.grading.verdict import wilson
from repro_matrix.results.rows import Row

Pair = tuple[Row, Row]  # of both sides


@dataclass
class Agreement:
    """The variants of one case that both sides measured with the same settings."""

    case: str
    pairs: list[Pair] = field(default_factory=list)

    @property
    def disagreements(self) -> list[Pair]:
        """Return the variants with another verdict, failure or outcome."""
        return [pair for pair in self.pairs if _result(pair[0]) != _result(pair[1])]

    @property
    def across(self) -> bool:
        """Return whether a GPU was compared with a CPU."""
        return any(
            bool(one.hardware.gpus) != bool(other.hardware.gpus) for one, other in self.pairs
        )

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.pairs) - len(self.disagreements), len(self.pairs)

    @property
    def tolerance_used(self) -> dict[str, list[float]]:
        """Return the part of its tolerance that each numeric check uses at most, on each side.

        Only variants that pass count.
        """
        sides = [
            [row.tolerance_used for row in side if set(row.kinds) == {"passed"}]
            for side in zip(*self.pairs)
        ]
        names = sorted(set.intersection(*(set().union(*side) for side in sides)))
        return {
            name: [max(used.get(name, 0.0) for used in side) for side in sides] for name in names
        }


def _result(row: Row) -> tuple[Any, ...]:
    return row.stored_verdict, row.failure_ids, row.kinds.keys()


def measure_agreement(one: Iterable[Row], other: Iterable[Row]) -> list[Agreement]:
    """Return each case's agreement, the lowest first.

    Raises ConfigError: both sides have no measurement in common.
    """
    one = list(one)
    other = list(other)
    here, there = ({row.hardware.profile for row in side} for side in (one, other))
    # A run on GPUs measures on the CPU what they cannot show: a CPU's results predict the rest of
    # it.
    left, right, _ = pair_cells(
        [row for row in one if not there < here or row.hardware.profile not in there],
        [row for row in other if not here < there or row.hardware.profile not in here],
    )
    cases: dict[str, Agreement] = {}
    for first, second in pair_variants(left, right):
        if not (first and second and first.kinds and second.kinds):
            continue
        if not settings_difference(first.settings, second.settings):
            cases.setdefault(first.case, Agreement(first.case)).pairs.append((first, second))
    if not cases:
        raise ConfigError(
            "nothing to compare: no variant was measured on both sides with the same settings"
        )
    return sorted(cases.values(), key=lambda each: (each.counts[0] / each.counts[1], each.case))


def describe_agreement(cases: Sequence[Agreement], everything: bool = False) -> Iterator[str]:
    width = max(len(each.case) for each in cases)
    for each in cases:
        yield f"{each.case.ljust(width)}  {_share(each.counts, 'variants agree')}"
        if used := ", ".join(
            f"{name} {first:g} | {second:g}"
            for name, (first, second) in each.tolerance_used.items()
        ):
            yield f"    part of the tolerance used at most, first | second: {used}"
        for first, second in each.disagreements if everything else each.disagreements[:SHOWN]:
            yield f"    {' '.join(second.axes)} {second.variant}"
            yield f"      first:  {describe_row(first)}"
            yield f"      second: {describe_row(second)}"
        if (more := len(each.disagreements) - SHOWN) > 0 and not everything:
            yield f"    and {more} more: --all"
    agree, both = (sum(counts) for counts in zip(*(each.counts for each in cases)))
    yield ""
    yield _share((agree, both), "variants measured on both sides agree")


def _share(counts: tuple[int, int], what: str) -> str:
    """Return the share with its 95 % Wilson interval."""
    low, high = wilson(*counts)
    return f"{counts[0]} of {counts[1]} {what} ({100 * low:.0f} to {100 * high:.0f} %)"


def agreement_to_json(cases: Iterable[Agreement]) -> dict[str, Any]:
    return {
        "schema": 1,
        "cases": [
            {
                "case": each.case,
                "agree": each.counts[0],
                "both": each.counts[1],
                "interval": wilson(*each.counts),
                "tolerance_used": each.tolerance_used,
                "disagreements": [
                    {
                        **place_to_json(*pair),
                        "first": values_to_json(pair[0]),
                        "second": values_to_json(pair[1]),
                    }
                    for pair in each.disagreements
                ],
            }
            for each in cases
        ],
    }
