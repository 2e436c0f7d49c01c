"""Compare two sets of rows: outcomes, verdicts, failure ids, flakiness and coverage. Pure.

A variant has at most one change. Comparing B with A gives the opposite of comparing A with B. Where
a fix has another verdict only because the failure itself appeared or disappeared, that change is
listed for the unfixed variant alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import comb
from typing import Any

from repro_matrix.config import catalog
from repro_matrix.config.vocabulary import OutcomeName
from repro_matrix.grading.expected import settings_difference
from repro_matrix.results.rows import Row
from repro_matrix.results.runs import Run
from repro_matrix.text import counted, list_some

# In the order of importance to a reader.
KINDS = {
    "new_failure": "fails now, did not fail before",
    "fix_stopped_working": "the fix worked and fails now",
    "different_failure": "failed before and fails now, with a different failure",
    "reproduces_now": "the known failure occurs now, did not occur before",
    "no_longer_reproduces": "the known failure no longer occurs",
    "became_flaky": "attempts agreed before and disagree now",
    "failure_gone": "failed before, does not fail now",
    "fix_works_now": "the fix failed and works now",
    "became_steady": "attempts disagreed before and agree now",
    "not_measured": "measured before, not measured now",
    "cell_removed": "the cell has no result now",
    "newly_measured": "not measured before",
    "cell_added": "the cell had no result before",
}
RESULTS = frozenset(list(KINDS)[:9])  # the other kinds concern coverage
LESS = frozenset({"not_measured", "cell_removed"})
RARE = 0.001


@dataclass(frozen=True)
class Change:
    """A change of a variant, or of a whole cell (``variant`` is empty)."""

    kind: str
    variant: str
    before: Row | None
    after: Row | None

    @property
    def row(self) -> Row:
        row = self.after or self.before
        assert row is not None
        return row


@dataclass(frozen=True)
class Diff:
    """The comparison of two sides.

    ``cells``: present on both sides. ``variants``: measured on both. ``incomparable``: (row,
    reason). ``across``: axis -> the two values, if each side has one value and they differ.
    ``excused``: why the second side need not have some results -> their number.
    """

    changes: tuple[Change, ...]
    cells: int
    variants: int
    incomparable: tuple[tuple[Row, str], ...]
    across: Mapping[str, tuple[str, str]]
    excused: Mapping[str, int] = field(default_factory=dict)

    def select(self, kinds: Iterable[str]) -> list[Change]:
        return [change for change in self.changes if change.kind in kinds]

    def without_unrequested(self, runs: Sequence[Run]) -> Diff:
        """Return the comparison without results that the second side's runs did not request."""
        there = {axis: pair[1] for axis, pair in self.across.items()}
        changes = []
        excused = Counter[str]()
        for change in self.changes:
            cell, stack, hardware = change.row.cell
            place = cell, there.get("stack", stack), there.get("hardware", hardware)
            left_out = change.variant if change.variant and change.after is None else ""
            reason = excuse_for(place, runs, left_out) if change.kind in LESS else ""
            excused[reason] += 1
            if not reason:
                changes.append(change)
        del excused[""]
        return replace(self, changes=tuple(changes), excused=excused)

    @property
    def exit_code(self) -> int:
        """Return 1 if a result differs, else 3 if the second side lacks results, else 0."""
        return 1 if self.select(RESULTS) else 3 if self.select(LESS) else 0


CellId = tuple[str, str, str]  # cell id, stack, hardware; "" if the comparison goes across it
Cells = dict[CellId, dict[str, Row]]  # each cell's variants


def excuse_for(place: CellId, runs: Sequence[Run], left_out: str) -> str:
    """Return why these runs need not have measured a variant of a cell; "" if they should have.

    ``left_out``: a variant without which the cell was measured. That needs a reason: the run
    selected other variants, or the catalog has it no longer. A shard should have measured what its
    run planned, which only the other shards know.
    """
    if any(" ".join(place[::-1]) in (run.left or ()) for run in runs):
        return "no time left"
    planned = [name.partition(" ")[2] for run in runs for name in run.planned]
    known = planned and not any(text.startswith("shard=") for run in runs for text in run.texts)
    selects = any(text.lstrip("+").startswith("variants=") for run in runs for text in run.texts)
    if left_out and not selects:
        case = catalog.load().cases.get(place[0].partition("/")[0])
        return "no longer in the catalog" if case and left_out not in case.variants else ""
    requested = not left_out and f"{place[1]} {place[0]}" in planned
    return "not requested" if known and not requested else ""


def newest(rows: Iterable[Row]) -> Cells:
    """Group rows by cell, and keep the newest result of each cell."""
    cells: dict[CellId, dict[tuple[float, str], dict[str, Row]]] = {}
    for row in rows:
        measured = cells.setdefault(row.cell, {}).setdefault((row.started, row.evidence), {})
        measured[row.variant] = row
    return {cell_id: versions[max(versions)] for cell_id, versions in cells.items()}


def pair_cells(
    before: Iterable[Row], after: Iterable[Row]
) -> tuple[Cells, Cells, dict[str, tuple[str, str]]]:
    """Return both sides' cells under common ids, and the axes that the comparison goes across."""
    sides = newest(before), newest(after)
    across = {}
    for index, axis in ((1, "stack"), (2, "hardware")):
        left, right = ({cell_id[index] for cell_id in side} for side in sides)
        if len(left) == len(right) == 1 and left != right:
            across[axis] = (left.pop(), right.pop())
    for side in sides if across else ():
        for cell, stack, hardware in list(side):
            variants = side.pop((cell, stack, hardware))
            stack, hardware = (
                "" if axis in across else value
                for axis, value in (("stack", stack), ("hardware", hardware))
            )
            side[cell, stack, hardware] = variants
    return *sides, across


def pair_variants(one: Cells, other: Cells) -> Iterator[tuple[Row | None, Row | None]]:
    """Yield both sides' results of each variant of the common cells."""
    for cell_id in sorted(one.keys() & other.keys()):
        for variant in {**one[cell_id], **other[cell_id]}:
            yield one[cell_id].get(variant), other[cell_id].get(variant)


def compare_rows(before: Iterable[Row], after: Iterable[Row]) -> Diff:
    """Return the changes from ``before`` to ``after``."""
    one, other, across = pair_cells(before, after)
    changes: list[Change] = []
    incomparable: list[tuple[Row, str]] = []
    variants = 0
    for old, new in pair_variants(one, other):
        if old and new and old.kinds and new.kinds:
            variants += 1
            if reason := settings_difference(old.settings, new.settings):
                incomparable.append((new, reason))
            elif kind := result_change(old, new):
                changes.append(Change(kind, new.variant, old, new))
        elif old and old.kinds:
            changes.append(Change("not_measured", old.variant, old, new))
        elif new and new.kinds:
            changes.append(Change("newly_measured", new.variant, old, new))
    for cell_id, cell in {**one, **other}.items():
        row = next(iter(cell.values()))
        if cell_id not in other:
            changes.append(Change("cell_removed", "", row, None))
        elif cell_id not in one:
            changes.append(Change("cell_added", "", None, row))
    kinds = list(KINDS)
    changes.sort(key=lambda c: (kinds.index(c.kind), c.row.case, *c.row.cell, c.variant))
    both = len(one.keys() & other.keys())
    return Diff(tuple(changes), both, variants, tuple(incomparable), across)


Pools = Sequence[tuple[Counter[OutcomeName], Counter[OutcomeName]]]  # outcomes before and after


def result_change(old: Row, new: Row, pools: Pools = ()) -> str | None:
    """Return the kind of change in a variant's result, one of ``KINDS``; None: nothing changed.

    If attempts disagree, their shares are compared: in each of ``pools``, else of the two results.
    """
    if not (old.kinds or new.kinds):
        return None
    if not new.kinds:
        return "not_measured"
    if not old.kinds:
        return "newly_measured"
    pools = pools or [(Counter(old.kinds), Counter(new.kinds))]
    if all(chance_explains(*pool) for pool in pools) or _both_expected(old, new):
        return None
    before = set(old.failure_ids)
    after = set(new.failure_ids)
    if before != after:
        if old.first and new.first and "control" not in (old.kind, new.kind):
            reproduced = "reproduced" in new.kinds
            if ("reproduced" in old.kinds) != reproduced:
                return "reproduces_now" if reproduced else "no_longer_reproduces"
        elif not before and stopped_working(old.stored_verdict, new.stored_verdict, new.kinds):
            return "fix_stopped_working"
        elif not after and stopped_working(new.stored_verdict, old.stored_verdict, old.kinds):
            return "fix_works_now"
        if before < after:
            return "new_failure"
        return "failure_gone" if after < before else "different_failure"
    if old.steady != new.steady or any(len(earlier) > 1 for earlier, _ in pools):
        return "became_steady" if new.steady else "became_flaky"
    return None


def stopped_working(
    before: str | None, now: str | None, outcomes: Iterable[OutcomeName | str]
) -> bool:
    """Return whether a fix that worked fails now, by its verdicts and the outcomes that count.

    A hang counts as a failure; on a machine that is only slow, it is not an outcome that counts. If
    the failure itself is another one, the fix is not to blame.
    """
    worked = before == "FIXED" and now not in ("SIGNATURE_MISMATCH", "FIX_BREAKS")
    return worked and any(outcome != "passed" for outcome in outcomes)


def chance_explains(before: Counter[OutcomeName], after: Counter[OutcomeName]) -> bool:
    """Return whether chance explains the difference between two sides' attempts.

    The attempts of a side disagree, the sides share an outcome, and Fisher's exact test finds no
    difference between the shares of any outcome (less than 1 in 1000, if there is none).
    """
    together = before + after
    if not before.keys() & after.keys() or len(together) < 2:
        return False
    return all(
        _tail(after[outcome], after.total(), before[outcome], before.total()) > RARE
        for outcome in together
    )


def _tail(count: int, attempts: int, other_count: int, other_attempts: int) -> float:
    """Return the chance of as few, or as many, counted ones among these attempts.

    The smaller of the two.
    """
    counted_ones = count + other_count
    everything = attempts + other_attempts

    def ways(numbers: range) -> int:
        rest = everything - counted_ones
        return sum(comb(counted_ones, n) * comb(rest, attempts - n) for n in numbers)

    # comb(n, k) is 0 where k is greater than n
    fewer = ways(range(count + 1))
    more = ways(range(count, attempts + 1))
    return min(fewer, more) / comb(everything, attempts)


def _both_expected(old: Row, new: Row) -> bool:
    """Return whether the reviewed expectation lists both failures for the same stack.

    Which one comes first is chance.
    """
    return (
        old.stack.name == new.stack.name
        and old.stack.versions in ({}, new.stack.versions)
        and old.stored_verdict == new.stored_verdict
        and old.state == new.state == "expected"
    )


# -- as text and as JSON

SHOWN = 12  # changes of a kind; all of them with --all


def describe_side(name: str, rows: Iterable[Row]) -> str:
    """Return a line: how many cells, on which hardware, stacks and commit."""
    cells = [next(iter(variants.values())) for variants in newest(rows).values()]
    stacks: dict[str, str] = {}
    for row in cells:
        releases = [
            f"{p} {row.stack.versions[p]}"
            for p in ("torch", "transformers")
            if p in row.stack.versions
        ]
        stacks.setdefault(row.stack.name, f"{row.stack.name} ({', '.join(releases)})")
    commits = {(row.commit or "no commit")[:10] for row in cells}
    hardware = ", ".join(sorted({f"{row.hardware.profile}{_gpus(row)}" for row in cells}))
    commit = commits.pop() if len(commits) == 1 else f"{len(commits)} commits"
    return (
        f"{name}: {counted(len(cells), 'cell')}; {hardware}; {list_some(list(stacks.values()), 3)};"
        f" {commit}"
    )


def _gpus(row: Row) -> str:
    names = Counter(row.hardware.gpus)
    return f" ({', '.join(f'{count}x {name}' for name, count in names.items())})" if names else ""


def describe_row(row: Row | None) -> str:
    """Return verdict, outcomes, failure ids and text of a variant."""
    if row is None:
        return "no result is stored"
    kinds = sorted(row.kinds.items(), key=lambda item: (-item[1], item[0]))
    outcomes = ", ".join(f"{kind} {count}/{row.kinds.total()}" for kind, count in kinds)
    verdict = f"{row.stored_verdict}, " if row.stored_verdict else ""
    text = verdict + (outcomes or row.skipped or row.text or "not measured")
    if row.failure_ids:
        text += f" ({', '.join(row.failure_ids)})"
        text += f": {row.text}" if row.text else ""
    return text


def describe_diff(diff: Diff, everything: bool) -> Iterator[str]:
    """Yield lines, the most important first.

    Changes of one case with the same text are listed together.
    """
    for kind in KINDS:
        groups: dict[tuple[str, ...], list[Change]] = {}
        for change in diff.select([kind]):
            texts = (describe_row(change.before), describe_row(change.after))
            groups.setdefault((change.row.case, *(texts if change.variant else ())), []).append(
                change
            )
        if not groups:
            continue
        yield ""
        yield f"{kind.upper()}: {sum(map(len, groups.values()))} ({KINDS[kind]})"
        listed = list(groups.items())
        for key, group in listed if everything else listed[:SHOWN]:
            yield f"  {key[0]} {_places(group, everything)}"
            for label, text in zip(("before: ", "now:    "), key[1:]):
                yield f"    {label}{text}"
        if len(listed) > SHOWN and not everything:
            yield f"  and {sum(len(group) for _, group in listed[SHOWN:])} more: --all"
    reasons: dict[str, list[Row]] = {}
    for row, reason in diff.incomparable:
        reasons.setdefault(reason, []).append(row)
    if reasons:
        variants = counted(len(diff.incomparable), "variant")
        yield ""
        yield f"NOT_COMPARED: {variants}, measured with other settings"
    for reason, rows in reasons.items():
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        yield f"  {reason}: {rows[0].cell_id} variant {rows[0].variant}{more}"
    changed = len(diff.select(RESULTS))
    one_side = len([change for change in diff.changes if change.variant]) - changed
    same = counted(diff.variants - changed - len(diff.incomparable), "variant")
    summary = f"{counted(diff.cells, 'cell')} on both sides: {same} unchanged, {changed} changed"
    if one_side:
        summary += f", {one_side} measured on one side only"
    yield ""
    yield summary


def _places(changes: Sequence[Change], everything: bool) -> str:
    cells: dict[str, list[str]] = {}
    for change in changes:
        place = " ".join(change.row.axes) + (
            "" if change.variant else f" ({change.row.stack.name}, {change.row.hardware.profile})"
        )
        cells.setdefault(place, []).append(change.variant)
    places = [
        f"{place}: {', '.join(variants)}" if any(variants) else place
        for place, variants in cells.items()
    ]
    return list_some(places, len(places) if everything else 3, "; ")


def diff_to_json(diff: Diff) -> dict[str, Any]:
    """Return the comparison under stable keys."""
    return {
        "schema": 1,
        "cells": diff.cells,
        "variants": diff.variants,
        "across": {axis: list(pair) for axis, pair in diff.across.items()},
        "not_compared": [
            {**place_to_json(row, row), "reason": reason} for row, reason in diff.incomparable
        ],
        "changes": [
            {
                "kind": c.kind,
                **place_to_json(c.before, c.after),
                "variant": c.variant or None,
                "before": values_to_json(c.before, c.variant),
                "after": values_to_json(c.after, c.variant),
            }
            for c in diff.changes
        ],
    }


def place_to_json(before: Row | None, after: Row | None) -> dict[str, Any]:
    row: Any = after or before
    documents = [(each and each.evidence) or None for each in (before, after)]
    return {
        "case": row.case,
        "cell": row.cell_id,
        "axes": list(row.axes),
        "hardware": row.hardware.profile,
        "stack": row.stack.name,
        "variant": row.variant,
        "documents": documents,
    }


def values_to_json(row: Row | None, variant: str = "any") -> dict[str, Any] | None:
    if row is None or not variant:
        return None
    return {
        "verdict": row.stored_verdict,
        "expected": row.state,
        "kinds": dict(row.kinds),
        "failure_ids": row.failure_ids,
        "text": row.text,
        "skipped": row.skipped,
        "error_at": row.error_at,
    }
