"""Two sets of briefs -> what differs between them. Pure; read backwards it says the opposite.

An arm has at most one change of its answer, and may beside it be slower or need more memory. What follows from the
broken arm alone (a fix whose verdict is another because the failure no longer fires) is said once, of the broken arm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from repro_matrix.analysis import noise
from repro_matrix.analysis.brief import ArmBrief, Brief, Parts, latest, placed, unlike
from repro_matrix.errors import ConfigError

# In the order in which a reader wants them; kind -> (what it is read backwards, in words).
KINDS: dict[str, tuple[str, str]] = {
    "new failure": ("gone failure", "a failure that was not there before"),
    "fix ceased": ("fix began", "a fix that held meets a failure"),
    "other failure": ("other failure", "it failed and fails, with another failure"),
    "fires now": ("stopped firing", "the known failure fires, and did not before"),
    "stopped firing": ("fires now", "a known failure no longer fires: news"),
    "flaky now": ("steady now", "attempts that agreed no longer do"),
    "gone failure": ("new failure", "a failure that was there before is gone"),
    "fix began": ("fix ceased", "a fix that met a failure holds now"),
    "steady now": ("flaky now", "attempts that disagreed agree now"),
    "changed text": ("changed text", "the same failure in other words"),
    "unmeasured": ("measured", "measured before, and not now"),
    "vanished": ("appeared", "a cell that is not there any more"),
    "measured": ("unmeasured", "not measured before"),
    "appeared": ("vanished", "a cell that was not there before"),
    "slower": ("faster", "slower beyond the noise of its attempts"),
    "more memory": ("less memory", "more memory beyond the noise of its attempts"),
    "faster": ("slower", "faster beyond the noise of its attempts"),
    "less memory": ("more memory", "less memory beyond the noise of its attempts"),
}
ORDER = {kind: index for index, kind in enumerate(KINDS)}
ANSWERS = frozenset(list(KINDS)[:10])  # the others say nothing of what happens, but of what was measured, and its cost
LESS = ("unmeasured", "vanished")


@dataclass(frozen=True)
class Change:
    """``before``, ``after``: the arm on both sides; None where a side has none. ``arm``: empty for a whole cell."""

    kind: str
    case: str
    axes: tuple[str, ...]
    hardware: str
    stack: str
    arm: str
    before: ArmBrief | None
    after: ArmBrief | None
    factor: float | None = None  # of time (without the common factor) or memory
    documents: tuple[str, str] = ("", "")  # where either side's cell is stored

    @property
    def where(self) -> str:
        """The cell as a command line takes it."""
        return placed(self.case, self.axes)

    def backwards(self) -> Change:
        factor = None if self.factor is None else 1 / self.factor
        return replace(
            self,
            kind=KINDS[self.kind][0],
            before=self.after,
            after=self.before,
            factor=factor,
            documents=self.documents[::-1],
        )


@dataclass(frozen=True)
class Diff:
    """``cells``, ``arms``: in both. ``slower``: by how much the second is slower as a whole. ``unknown_noise``: arms
    whose time or memory cannot be compared. ``unlike``: cell and arm -> why it was not measured alike."""

    changes: tuple[Change, ...]
    cells: int
    arms: int
    slower: float
    unknown_noise: int
    unlike: Mapping[str, str]
    across: Mapping[str, tuple[str, str]]  # axis -> the two values that are compared: stack, hardware

    def of(self, *kinds: str) -> list[Change]:
        return [change for change in self.changes if change.kind in kinds]

    @property
    def answers(self) -> list[Change]:
        """The changes that are not only of what was measured, and its cost."""
        return self.of(*ANSWERS)

    @property
    def exit_code(self) -> int:
        """1: an answer differs; else 3: the second lacks something that the first measured; else 0."""
        kinds = {change.kind for change in self.changes}
        return 1 if kinds & ANSWERS else 3 if kinds & set(LESS) else 0


Identity = tuple[str, str, str]


def compare(one: Iterable[Brief], other: Iterable[Brief], parts: Parts, need_common: bool = True) -> Diff:
    """What ``other`` says otherwise than ``one``. Raises ConfigError where they have no cell in common."""
    mine, theirs, across = sides_by_cell(one, other, need_common)
    both = sorted(mine.keys() & theirs.keys())
    pairs = [(mine[at], theirs[at]) for at in both]
    changes: list[Change] = []
    differing: dict[str, str] = {}
    timed: list[tuple[Brief, str, ArmBrief, ArmBrief]] = []
    arms = 0
    for before, after in pairs:
        alike = before.arms.keys() == after.arms.keys()
        for name in before.arms if alike else dict.fromkeys([*before.arms, *after.arms]):
            was, now = before.arms.get(name), after.arms.get(name)
            if was is None or now is None:
                changes += _come_or_gone(after, name, was, now)
                continue
            arms += 1
            why = unlike(was, now, parts)
            if why:
                differing[f"{after.where} {name}"] = why
                continue
            kind = _answer(name == before.first == after.first and not (before.control or after.control), was, now)
            if kind:
                changes.append(_change(kind, after, name, was, now))
            if was.steady and now.steady and was.kinds.keys() == now.kinds.keys() and "hang" not in was.kinds:
                timed.append((after, name, was, now))
    shift = noise.common((was.wall_s, now.wall_s) for _, _, was, now in timed)
    unknown = 0
    for cell, name, was, now in timed:
        unknown += not noise.known(was.wall_s, now.wall_s)
        if min(was.measured, now.measured) >= noise.LEAST:
            changes += _cost(cell, name, was, now, shift)
    for at in sorted(mine.keys() - theirs.keys()):
        changes.append(_change("vanished", mine[at], "", None, None))
    for at in sorted(theirs.keys() - mine.keys()):
        changes.append(_change("appeared", theirs[at], "", None, None))
    stored: dict[Any, tuple[str, str]] = {}
    for at in mine.keys() | theirs.keys():
        was_here, is_here = mine.get(at), theirs.get(at)
        shown = is_here or mine[at]
        places = was_here.path if was_here else "", is_here.path if is_here else ""
        stored[shown.case, shown.axes, shown.hardware, shown.stack] = places
    changes = [replace(c, documents=stored[c.case, c.axes, c.hardware, c.stack]) for c in changes]
    changes.sort(key=lambda change: (ORDER[change.kind], change.case, change.where, change.stack, change.arm))
    return Diff(tuple(changes), len(both), arms, math.exp(shift), unknown, differing, across)


def sides_by_cell(
    one: Iterable[Brief], other: Iterable[Brief], need_common: bool = True
) -> tuple[dict[Identity, Brief], dict[Identity, Brief], dict[str, tuple[str, str]]]:
    """(the first's newest cells, the second's, under the same identities; the axes that this goes across).
    Raises ConfigError where they have no cell in common."""
    left, right = latest(one), latest(other)
    across = _across(left.values(), right.values())
    mine, theirs = (_by_identity(side, across) for side in (left, right))
    if need_common and not mine.keys() & theirs.keys():
        raise ConfigError(
            f"the two have no cell in common: the first has {_described(left.values())}; "
            f"the second has {_described(right.values())}"
        )
    return mine, theirs, across


def _change(kind: str, cell: Brief, arm: str, was: ArmBrief | None, now: ArmBrief | None) -> Change:
    return Change(kind, cell.case, cell.axes, cell.hardware, cell.stack, arm, was, now)


def _come_or_gone(cell: Brief, name: str, was: ArmBrief | None, now: ArmBrief | None) -> list[Change]:
    """An arm that only one side's case has: news where it was measured."""
    if was is not None and was.measured:
        return [_change("unmeasured", cell, name, was, None)]
    return [_change("measured", cell, name, None, now)] if now is not None and now.measured else []


def _answer(broken: bool, was: ArmBrief, now: ArmBrief) -> str | None:
    """The kind of an arm's change of answer, or None."""
    if not was.measured or not now.measured:
        return None if was.measured == now.measured else "unmeasured" if was.measured else "measured"
    if was.met != now.met and (before := set(was.met)) != (after := set(now.met)):
        if broken:
            fired, fires = ("fires" in side.kinds for side in (was, now))
            if fired != fires:
                return "fires now" if fires else "stopped firing"
        elif not before and was.verdict == "FIX_HOLDS":
            return "fix ceased"
        elif not after and now.verdict == "FIX_HOLDS":
            return "fix began"
        return "new failure" if before < after else "gone failure" if after < before else "other failure"
    if was.steady != now.steady:
        return "flaky now" if was.steady else "steady now"
    return "changed text" if was.text != now.text else None


def _cost(cell: Brief, name: str, was: ArmBrief, now: ArmBrief, shift: float) -> list[Change]:
    found = []
    for words, one, other, taken in (
        (("slower", "faster"), was.wall_s, now.wall_s, shift),
        (("more memory", "less memory"), was.peak_mb, now.peak_mb, 0.0),
    ):
        told = noise.beyond(one, other, taken)
        if told:
            factor = math.exp(noise.common([(one, other)]) - taken)
            found.append(replace(_change(words[told < 0], cell, name, was, now), factor=factor))
    return found


def _across(one: Iterable[Brief], other: Iterable[Brief]) -> dict[str, tuple[str, str]]:
    """The axes that the comparison goes across: each side has one value there, and they differ."""
    left, right = list(one), list(other)
    found = {}
    for axis in ("hardware", "stack"):
        mine, theirs = ({str(getattr(brief, axis)) for brief in side} for side in (left, right))
        if len(mine) == len(theirs) == 1 and mine != theirs:
            found[axis] = (mine.pop(), theirs.pop())
    return found


def _by_identity(side: Mapping[Identity, Brief], across: Mapping[str, Any]) -> dict[Identity, Brief]:
    def short(at: Identity) -> Identity:
        key, hardware, stack = at
        return key, "" if "hardware" in across else hardware, "" if "stack" in across else stack

    return {short(at): brief for at, brief in side.items()}


def _described(side: Iterable[Brief]) -> str:
    found = list(side)
    if not found:
        return "none"

    def few(names: Sequence[str]) -> str:
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    axes = {axis: sorted({str(getattr(b, axis)) for b in found}) for axis in ("case", "hardware", "stack")}
    return f"{len(found)} ({'; '.join(f'{axis} {few(names)}' for axis, names in axes.items())})"
