"""What a green night measured and tonight has no word of: it is not there, and was not skipped. Pure.

Answers can only be compared where there are two: a cell whose document was lost would never be missed, nor would all
cells of a machine that has lost a card, which are then measured under another name. Whether it is meant tonight's own
words say: what its runs were asked for (nights/asked.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from repro_matrix.analysis.brief import Brief, latest
from repro_matrix.analysis.night import Night, briefs_of
from repro_matrix.text import counted

SHOWN = 3
At = tuple[str, str, str]  # a cell's key, its hardware, its stack


@dataclass(frozen=True)
class Asked:
    """What one of tonight's runs was asked for. ``cells``: key -> stacks; None: no words of it are kept, so that it is
    all that ``arms`` has: case -> its arms, of those that were asked for. ``hardware``: patterns. ``left``: cells for
    which the budget had no room ("hardware stack key"; None: a run with a budget that does not name them). ``part``:
    the keys of a shard. ``stacks``: those that it has measured; by which name a stack was asked for may be another."""

    arms: Mapping[str, Collection[str]]
    cells: Mapping[str, Collection[str]] | None = None
    hardware: Sequence[str] = ("auto",)
    left: Collection[str] | None = ()
    part: Collection[str] | None = None
    stacks: Collection[str] = ()

    def why_not(self, cell: Brief, arms: Iterable[str]) -> str:
        """Why these arms of a cell need not be there; "" where they are asked for."""
        if not set(arms) & set(self.arms.get(cell.case, ())):
            return "not asked for"
        if self.cells is None:
            return ""
        stacks = self.cells.get(cell.key)
        if stacks is None or cell.stack not in {*stacks, *self.stacks}:
            return "not asked for"
        if self.hardware != ("auto",) and not any(fnmatchcase(cell.hardware, one) for one in self.hardware):
            return "not asked for"
        if self.part is not None and cell.key not in self.part:
            return "in another shard"
        if self.left is None or f"{cell.hardware} {cell.stack} {cell.key}" in self.left:
            return "no room in the budget"
        return ""


@dataclass(frozen=True)
class Gone:
    """``arm``: empty for a whole cell. ``night``: the newest green one that measured it. ``why``: empty where nothing
    says it. ``elsewhere``: hardware on which the cell was measured instead."""

    cell: Brief
    arm: str
    night: str
    why: str
    elsewhere: str = ""

    def __str__(self) -> str:
        arm = f" arm {self.arm}" if self.arm else ""
        return f"{self.cell.where}{arm} [{self.cell.stack} on {self.cell.hardware}]"


def gone(tonight: Sequence[Brief], kept: Sequence[Night], asked: Sequence[Asked], unread: Sequence[str]) -> list[Gone]:
    """``kept``: the nights before, the oldest first. ``unread``: what is said of files that cannot be read: their cells
    are spoken of. What need not be there is told of the last green night alone."""
    here = latest(tonight)
    greens = [night for night in reversed(kept) if night.green]
    if any(each.cells is None for each in asked):  # what was given up long ago is not known: the last of this machine
        own = {brief.hardware for brief in tonight}
        same = [night for night in greens if own & {str(cell["hardware"]) for cell in night.cells.values()}]
        greens = (same or greens)[:1]
    found: list[Gone] = []
    seen: set[tuple[At, str]] = set()
    for green in greens:
        for brief in briefs_of(green):
            at = (brief.key, brief.hardware, brief.stack)
            had = [name for name, arm in brief.arms.items() if arm.measured and (at, name) not in seen]
            seen |= {(at, name) for name in had}
            found += [
                one
                for one in _of_cell(brief, had, green.name, here, asked, unread)
                if not one.why or green is greens[0]
            ]
    return found


def _of_cell(
    cell: Brief, had: Sequence[str], night: str, here: Mapping[At, Brief], asked: Sequence[Asked], unread: Sequence[str]
) -> Iterator[Gone]:
    now = here.get((cell.key, cell.hardware, cell.stack))
    lost = [name for name in had if now is None or not _has_word(now, name)]
    for name, arms in [("", lost)] if lost and now is None else [(arm, [arm]) for arm in lost]:
        reasons = [each.why_not(cell, arms) for each in asked]
        if any(f"/{cell.key}.json" in note for note in unread):
            reasons = ["in a document that cannot be read"]
        others = sorted(b.hardware for (key, _, stack), b in here.items() if (key, stack) == (cell.key, cell.stack))
        why = "" if "" in reasons or not reasons else reasons[0]
        yield Gone(cell, name, night, why, others[0] if others and now is None else "")


def _has_word(cell: Brief, name: str) -> bool:
    """Measured, skipped with a reason, or lost with one (its run has said so by its exit code)."""
    arm = cell.arms.get(name)
    return arm is not None and bool(arm.measured or arm.skipped or arm.text)


def count(found: Sequence[Gone]) -> str:
    """``2 cells and 1 arm``"""
    cells = sum(not one.arm for one in found)
    arms = len(found) - cells
    return " and ".join([counted(n, what) for n, what in ((cells, "cell"), (arms, "arm")) if n])


def told(found: Sequence[Gone]) -> str:
    """What is not there and nobody knows why, the first few by name."""
    names = _few([str(one) for one in found])
    nights = _few(list(dict.fromkeys(one.night for one in found)), ", ")
    instead = sorted({one.elsewhere for one in found if one.elsewhere})
    other = f" Measured on {', '.join(instead)} instead." if instead else ""
    return (
        f"GONE: tonight has no word of {count(found)} that a green night ({nights}) measured: {names}.{other} "
        "Where that is meant, a run's own words say so: case=, arms=, hardware=."
    )


def notes(found: Iterable[Gone]) -> list[str]:
    by_why: dict[str, list[Gone]] = {}
    for one in found:
        by_why.setdefault(one.why, []).append(one)
    return [
        f"{count(own)} that {own[0].night} measured, tonight {why}: {_few([str(one) for one in own])}"
        for why, own in by_why.items()
    ]


def _few(names: Sequence[str], between: str = "; ") -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return between.join(names[:SHOWN]) + more
