"""A comparison in words and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from repro_matrix.analysis.brief import ArmBrief, Brief
from repro_matrix.analysis.diff import KINDS, Change, Diff
from repro_matrix.text import WIDTH, counted, one_line, wrap

SHOWN = 12  # changes of a kind; all with --all
COST = ("slower", "faster", "more memory", "less memory")


def described(name: str, briefs: Iterable[Brief]) -> str:
    """A side in a line: what it is, where and when it was measured."""
    found = list(briefs)
    stacks: dict[str, str] = {}
    for each in found:
        releases = [f"{p} {each.versions[p]}" for p in ("torch", "transformers") if p in each.versions]
        stacks.setdefault(each.stack, f"{each.stack} ({', '.join(releases)})")
    commits = sorted({(each.commit or "no commit")[:10] for each in found})
    hardware = ", ".join(sorted({each.hardware for each in found}))
    shown = list(stacks.values())[:3] + ([f"{len(stacks) - 3} more"] if len(stacks) > 3 else [])
    commit = commits[0] if len(commits) == 1 else f"{len(commits)} commits"
    return f"{name}: {counted(len(found), 'cell')}; {hardware}; {', '.join(shown)}; {commit}"


def lines(found: Diff, every: bool = False, width: int = WIDTH) -> Iterator[str]:
    """The important first; one line for what is the same. ``width``: in columns."""
    for kind in KINDS:
        changes = found.of(kind)
        if not changes:
            continue
        yield ""
        yield from wrap(f"{kind.upper()}: {len(changes)} ({KINDS[kind][1]})", "", 2, width)
        groups = list(_alike(changes).values())
        for group in groups if every else groups[:SHOWN]:
            yield from _group(group, width)
        left = sum(map(len, groups[SHOWN:]))
        if left and not every:
            yield f"  and {left} more: --all"
    if found.unlike:
        yield from ("", f"NOT COMPARED, measured otherwise: {_arms(len(found.unlike))}")
        reasons: dict[str, list[str]] = {}
        for at, why in found.unlike.items():
            reasons.setdefault(why, []).append(at)
        for why, places in reasons.items():
            yield from wrap(f"{len(places):4}  {why} [{places[0]}{' ...' if len(places) > 1 else ''}]", "", 6, width)
    yield ""
    told = len({(c.where, c.stack, c.hardware, c.arm) for c in found.changes if c.arm and c.before and c.after})
    same = found.arms - told - len(found.unlike)
    yield from wrap(f"{counted(found.cells, 'cell')} in both: {_arms(same)} the same, {told} not", "", 2, width)
    if abs(found.slower - 1) >= 0.1:
        words = f"{found.slower:.2f} times as long as" if found.slower > 1 else f"{found.slower:.2f} of the time of"
        taken = f"as a whole the second took {words} the first; that is taken out of each arm's time above"
        yield from wrap(taken, "", 2, width)
    if found.unknown_noise:
        arms = _arms(found.unknown_noise)
        why = f"time and memory of {arms} are not compared: with one attempt the noise is unknown"
        yield from wrap(why, "", 2, width)


def _arms(count: int) -> str:
    return f"{count} arm" if count == 1 else f"{count} arms"


def _alike(changes: Iterable[Change]) -> dict[tuple[str, ...], list[Change]]:
    """Changes of one case that say the same, together: the cells and arms of a case often change as one."""
    found: dict[tuple[str, ...], list[Change]] = {}
    for change in changes:
        said = (cost(change),) if change.kind in COST else (told(change.before), told(change.after))
        of = () if change.arm else (change.stack, change.hardware)
        found.setdefault((change.case, *of, *said), []).append(change)
    return found


def _group(group: Sequence[Change], width: int) -> Iterator[str]:
    change = group[0]
    cells: dict[str, list[str]] = {}
    for each in group:
        cells.setdefault(" ".join(each.axes), []).append(each.arm)
    by_arms: dict[str, list[str]] = {}
    for where, arms in cells.items():
        by_arms.setdefault(", ".join(arms), []).append(where)
    places = [f"{'; '.join(where)}" + (f": {arms}" if arms else "") for arms, where in by_arms.items()]
    head = f"{change.case} {' | '.join(places)}"
    if change.kind in COST:
        yield from wrap(f"{head}: {cost(change)}", "  ", 4, width)
    elif not change.arm:
        yield from wrap(f"{head} [{change.stack} on {change.hardware}]", "  ", 4, width)
    else:
        yield from wrap(head, "  ", 4, width)
        yield from wrap(f"before: {told(change.before)}", "    ", 8, width)
        yield from wrap(f"now:    {told(change.after)}", "    ", 8, width)


def cost(change: Change) -> str:
    """``1.80 times: 0.61-0.66 -> 1.10-1.21 s``."""
    time = change.kind in ("slower", "faster")
    sides = [arm.wall_s if time else arm.peak_mb for arm in (change.before, change.after) if arm]
    unit, digits = ("s", 2) if time else ("MiB", 0)
    shown = [f"{min(side):.{digits}f}-{max(side):.{digits}f}" for side in sides]
    return f"{change.factor or 1:.2f} times: {' -> '.join(shown)} {unit}"


def told(arm: ArmBrief | None) -> str:
    """One side of a change: how often what, and what was met in its own words."""
    if arm is None:
        return "nothing is stored of this arm"
    met = f" ({', '.join(arm.met)})" if arm.met else ""
    verdict = f"{arm.verdict}, " if arm.verdict else ""
    return one_line(f"{verdict}{arm.counted()}{met}" + (f": {arm.text}" if arm.met and arm.text else ""))


def as_json(found: Diff) -> dict[str, Any]:
    """Stable keys. ``factor`` of a change and ``slower``: see harness/repro_matrix/analysis/noise.py."""
    return {
        "schema": 1,
        "cells": found.cells,
        "arms": found.arms,
        "slower": round(found.slower, 3),
        "unknown_noise": found.unknown_noise,
        "across": {axis: list(values) for axis, values in found.across.items()},
        "unlike": dict(found.unlike),
        "changes": [
            {
                "kind": c.kind, "case": c.case, "where": c.where, "hardware": c.hardware, "stack": c.stack,
                "arm": c.arm or None, "before": _side(c.before), "after": _side(c.after),
                "documents": [path or None for path in c.documents],
                "factor": None if c.factor is None else round(c.factor, 3),
            }
            for c in found.changes
        ],
        "exit_code": found.exit_code,
    }  # fmt: skip


def _side(arm: ArmBrief | None) -> dict[str, Any] | None:
    if arm is None:
        return None
    shown = {key: value for key, value in arm._asdict().items() if key != "settings"}
    return {**shown, "kinds": dict(arm.kinds)}
