"""What tonight answers otherwise than the last green night that measured it, case by case. Pure.

A change counts until somebody has dealt with it: a night with one that nobody has is not green, so that the next one is
compared with the same green night again. Dealt with: muted, or a person has closed the issue that told of this very
change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from repro_matrix.analysis.brief import Brief, latest
from repro_matrix.analysis.diff import ANSWERS, Change, compare
from repro_matrix.analysis.night import Night, briefs_of
from repro_matrix.errors import ResultsError
from repro_matrix.text import counted

At = tuple[str, str]  # a cell's key, and its hardware


@dataclass(frozen=True)
class Changed:
    """A case whose answers changed on a stack since ``green``. ``versions``: package -> (then, now), where another."""

    case: str
    stack: str
    green: Night
    changes: tuple[Change, ...]
    versions: Mapping[str, tuple[str, str]]
    holds: tuple[str, ...]  # arms that are clean tonight wherever they were measured on this stack

    @property
    def digest(self) -> str:
        """Of what changed, and since when: the same change has the same one, whichever night meets it; one that comes
        back after a green night without it is another (the issue of the first may be closed as mended)."""
        said = sorted(
            (c.where, c.hardware, c.stack, c.arm, c.kind, c.after.verdict if c.after else None,
             list(c.after.met) if c.after else [])
            for c in self.changes
        )  # fmt: skip
        return hashlib.sha256(json.dumps([self.case, self.green.name, said]).encode()).hexdigest()[:12]


@dataclass
class Compared:
    """``notes``: stacks that could not be compared, and why. ``muted``: (cell's key, arm) of answers that changed and
    are muted -> what changed, since which night."""

    changed: list[Changed] = field(default_factory=list)
    muted: dict[tuple[str, str], str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def one_commit(briefs: Iterable[Brief]) -> None:
    """Raise ResultsError where a night's cells were measured at several commits: shards that do not belong together."""
    found: dict[str, int] = {}
    for brief in briefs:
        name = (brief.commit or "no commit")[:12]
        found[name] = found.get(name, 0) + 1
    if len(found) > 1:
        told = ", ".join(f"{name} ({counted(count, 'cell')})" for name, count in sorted(found.items()))
        raise ResultsError(f"tonight's results are of several commits: {told} (`repro merge` says which shard)")


def since_green(
    tonight: Sequence[Brief], kept: Sequence[Night], muted: Callable[[str, str], bool] = lambda key, arm: False
) -> Compared:
    """Tonight's answers, each against the newest green night that measured the same arm of the same cell: a night in
    which it was skipped, or had no room in the budget, says nothing of it. ``muted``: (cell's key, arm)."""
    found = Compared()
    for stack in sorted({brief.stack for brief in tonight}):
        now = list(latest(brief for brief in tonight if brief.stack == stack).values())
        greens = [night for night in reversed(kept) if night.green and stack in night.stacks]
        if not greens:
            found.notes.append(f"stack {stack}: no green night is kept: there is nothing to compare with yet")
            continue
        before = _before(now, greens)
        new = len(now) - len({at for _, cells in before for at in cells})
        if new == len(now):
            last = greens[0].name
            found.notes.append(f"stack {stack}: no cell in common with the last green night, {last}, nor an older one")
        elif new:
            of = counted(new, "cell")
            found.notes.append(f"stack {stack}: {of} measured in no green night: nothing to compare with")
        keys = {(brief.where, brief.hardware): brief.key for brief in now}
        answers = []
        for green, cells in before:
            for change in compare(cells.values(), now, {}, need_common=False).changes:
                at = keys.get((change.where, change.hardware), ""), change.arm
                if change.kind in ANSWERS and muted(*at):
                    found.muted[at] = f"{change.kind} since {green.name}"
                elif change.kind in ANSWERS:
                    answers.append((green, change))
        for case, name in dict.fromkeys((change.case, green.name) for green, change in answers):
            own = [(green, change) for green, change in answers if (change.case, green.name) == (case, name)]
            green, changes = own[0][0], tuple(change for _, change in own)
            found.changed.append(Changed(case, stack, green, changes, _versions(green, now), _holds(case, now)))
    return found


def _before(now: Sequence[Brief], greens: Iterable[Night]) -> list[tuple[Night, dict[At, Brief]]]:
    """``greens``: the newest first. Each with those arms of tonight's cells that no newer one has measured."""
    wanted = {(b.key, b.hardware): {name for name, arm in b.arms.items() if arm.measured} for b in now}
    found = []
    for green in greens:
        cells: dict[At, Brief] = {}
        for brief in briefs_of(green):
            at = brief.key, brief.hardware
            if brief.stack != now[0].stack or at not in wanted:
                continue
            arms = {name: arm for name, arm in brief.arms.items() if name in wanted[at] and arm.measured}
            wanted[at] -= arms.keys()
            if arms:
                cells[at] = replace(brief, arms=arms)
        if cells:
            found.append((green, cells))
    return found


def _versions(green: Night, now: Sequence[Brief]) -> dict[str, tuple[str, str]]:
    then, today = green.stacks.get(now[0].stack, {}), now[0].versions
    return {
        name: (then.get(name, "none"), today.get(name, "none"))
        for name in sorted(then.keys() | today.keys())
        if then.get(name) != today.get(name)
    }


def _holds(case: str, now: Iterable[Brief]) -> tuple[str, ...]:
    by_arm: dict[str, set[str]] = {}
    for brief in now:
        for name, arm in brief.arms.items():
            if brief.case == case and arm.measured and name != brief.first:
                by_arm.setdefault(name, set()).add(str(arm.verdict))
    return tuple(name for name, verdicts in by_arm.items() if verdicts == {"FIX_HOLDS"})
