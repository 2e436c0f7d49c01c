"""Lists for `claims`, `list`, `doctor` and `matrix --dry-run`: lines of at most so many columns. Pure.

Claims stand under their case, cells that run in a line, those that do not under their reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from repro_matrix.report.labels import label
from repro_matrix.report.terminal import named
from repro_matrix.text import counted, one_line, wrap

if TYPE_CHECKING:
    from repro_matrix.analysis.claims import ClaimRow, Evidence

STATUSES = ("refuted", "mixed", "supported", "untested")
DECISIONS = {True: "supports", False: "contradicts", None: "inconclusive"}


def claims(rows: Sequence[ClaimRow], width: int, simulated: Iterable[str] = ()) -> Iterator[str]:
    """Yield for each claim its status, its text and when it holds, under its case."""
    marked = set(simulated)
    for case in dict.fromkeys(row.case for row in rows):
        yield from ("", named(case, case in marked))
        for row in rows:
            if row.case == case:
                yield from wrap(f"{label(row.status).text:<9}  {row.id}: {row.text}", "  ", 11, width)
                yield from wrap(row.brief or row.detail, " " * 13, 0, width)
    if rows:
        counts = Counter(str(row.status) for row in rows)
        parts = ", ".join(f"{counts[name]} {label(name).text}" for name in STATUSES if counts[name])
        yield ""
        yield from wrap(f"{counted(len(rows), 'claim')}: {parts}. Evidence: repro claims ID", width=width)


def evidence(row: ClaimRow, width: int) -> Iterator[str]:
    """Yield one claim with its measurements, those that decide it first."""
    yield from wrap(f"{row.id}: {row.text}", width=width)
    yield from wrap(f"case {row.case}; source: {row.source or 'none, tried beside the other variants'}", "  ", 2, width)
    yield from wrap(f"{label(row.status).text}: {row.detail}", "  ", 2, width)
    for decision, title in DECISIONS.items():
        items = [item for item in row.evidence if item.holds is decision]
        if items:
            yield from ("", f"{title}: {len(items)}")
            yield from (
                by_reason(((i.measured, i.variant) for i in items), width)
                if decision is None
                else _measured(items, width)
            )


def _measured(items: Iterable[Evidence], width: int) -> Iterator[str]:
    for item in items:
        when = f" ({item.when})" if item.when else ""
        place = f"{item.variant}{when}: {item.model}/{item.strategy}, {item.ranks}, {item.hardware}, {item.stack}"
        yield from wrap(f"- {place}", "  ", 2, width)
        yield from wrap(f"{item.measured} (predicted: {item.predicted})", "    ", 2, width)
        yield f"    {one_line(item.document)}"  # in one piece, to be copied


def cases(entries: Sequence[Mapping[str, Any]], width: int) -> Iterator[str]:
    """Yield failures, then simulated ones, then controls. ``entries``: case, title, kind, simulated, cells, variants,
    models, strategies."""
    groups: dict[str, list[Mapping[str, Any]]] = {
        "known failures": [],
        "simulated (no device takes part)": [],
        "controls (must train as a single process does)": [],
    }  # fmt: skip
    for entry in entries:
        index = 2 if entry["kind"] == "control" else 1 if entry["simulated"] else 0
        list(groups.values())[index].append(entry)
    names = max((len(entry["case"]) for entry in entries), default=0)
    for title, members in groups.items():
        if members:
            yield from ("", title)
        for entry in members:
            size = f"{counted(entry['cells'], 'cell')}, {counted(entry['variants'], 'variant')}: {_axes(entry)}"
            yield from wrap(f"{entry['case']:<{names}}  {size}", "  ", names + 2, width)
            yield from wrap(entry["title"], "      ", 0, width)


def _axes(entry: Mapping[str, Any]) -> str:
    return " / ".join(
        ", ".join(names) if len(names) < 3 else f"{len(names)} {what}"
        for what, names in (("models", sorted(entry["models"])), ("strategies", sorted(entry["strategies"])))
    )


def planned(items: Sequence[Mapping[str, Any]], width: int) -> Iterator[str]:
    """Yield a line for each case that would be launched, then what would not, by reason. ``items``: case, cell, model,
    strategy, attempts and skipped (the reason, or None) of each variant."""
    launched = [item for item in items if not item["skipped"]]
    names = max((len(item["case"]) for item in launched), default=0)
    for case in dict.fromkeys(item["case"] for item in launched):
        variants = [item for item in launched if item["case"] == case]
        axes = _axes(
            {"models": {item["model"] for item in variants}, "strategies": {item["strategy"] for item in variants}}
        )
        yield from wrap(f"{case:<{names}}  {_size(variants)}: {axes}", "", names + 2, width)
    yield from not_launched(items, width)
    if items:
        yield ""
        yield from wrap(f"{_size(launched)}; --all lists every variant", width=width)


def _size(variants: Sequence[Mapping[str, Any]]) -> str:
    cells, attempts = len({item["cell"] for item in variants}), sum(item["attempts"] for item in variants)
    return f"{counted(cells, 'cell')}, {counted(len(variants), 'variant')}, {counted(attempts, 'attempt')}"


def not_launched(items: Iterable[Mapping[str, Any]], width: int) -> Iterator[str]:
    """Yield the reasons of skipped variants, each with its number and its cases. ``items`` as for ``planned``."""
    skipped = [(item["skipped"], item["case"]) for item in items if item["skipped"]]
    if skipped:
        yield from ("", f"not launched: {counted(len(skipped), 'variant')}")
        yield from by_reason(skipped, width)


def runs_here(rows: Sequence[Mapping[str, Any]], width: int) -> Iterator[str]:
    """Yield the cases that run, then cells and variants that do not, by reason. ``rows``: case, simulated, runs,
    reason, skipped_variants (name -> reason)."""
    partly = {row["case"] for row in rows if not row["runs"] or row["skipped_variants"]}
    whole = dict.fromkeys(named(row["case"], row["simulated"]) for row in rows if row["case"] not in partly)
    if whole:
        yield ""
        yield from wrap(f"run here with all their variants: {', '.join(whole)}", width=width, most=None)
    cells = [(row["reason"], row["case"]) for row in rows if not row["runs"]]
    if cells:
        yield from ("", "cells that cannot run here")
        yield from by_reason(cells, width)
    variants = [
        (reason, f"{row['case']}/{variant}") for row in rows for variant, reason in row["skipped_variants"].items()
    ]
    if variants:
        yield from ("", "variants that cannot run here, of cases that can")
        yield from by_reason(variants, width)


def by_reason(items: Iterable[tuple[Any, str]], width: int) -> Iterator[str]:
    """Yield each reason with its number and the names that it is of, the most frequent first."""
    found: dict[str, list[str]] = {}
    for reason, name in items:
        found.setdefault(str(reason), []).append(name)
    for reason, names in sorted(found.items(), key=lambda item: -len(item[1])):
        yield from wrap(f"{len(names):4}  {reason} [{', '.join(dict.fromkeys(names))}]", "", 6, width, None)
