"""A case over the nights: for each arm of each cell a strip, a column a night. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from repro_matrix.analysis.brief import ArmBrief, placed
from repro_matrix.analysis.night import Night, arm_of
from repro_matrix.report.summary import WORDS
from repro_matrix.text import WIDTH, counted, one_line, wrap

# Verdicts in capitals, what a broken arm did in small letters.
LETTERS = {
    "FIX_HOLDS": "H", "FIX_BROKEN": "B", "FIX_UNMASKS": "U", "FIX_HARMFUL": "X", "NOT_FIRING": "N", "CHANGED": "C",
    "INCONCLUSIVE": "?", "HEALTHY": "W", "UNHEALTHY": "S", "FLAKY": "~", "fires": "f", "clean": "c",
    "other_error": "e", "hang": "h", "skipped": "-", "absent": "·",
}  # fmt: skip
SAID = {name: one for name, (one, _) in WORDS.items()} | {
    "fires": "fires", "clean": "clean", "other_error": "another error", "hang": "hangs", "skipped": "not measured",
    "absent": "no such cell that night",
}  # fmt: skip
NONE = ("skipped", "absent", "INCONCLUSIVE")  # no answer: neither a change nor the end of one
MOST, BESIDE = 60, 24  # nights that are drawn (older ones are counted), and columns that stay for what is beside them


@dataclass(frozen=True)
class Entry:
    """An arm in a night. ``name``: its verdict, what a broken arm did, ``FLAKY``, ``skipped`` or ``absent`` (no such
    cell that night). ``otherwise``: attempts, of ``attempts``, that did not do what most did."""

    name: str
    met: tuple[str, ...] = ()
    attempts: int = 0
    otherwise: int = 0
    told: str = ""
    document: str | None = None  # while it is there
    error_at: str | None = None  # file:line

    @property
    def letter(self) -> str:
        return LETTERS.get(self.name, "!")

    @property
    def answer(self) -> tuple[str, tuple[str, ...]]:
        return self.name, self.met


ABSENT = Entry("absent")


@dataclass(frozen=True)
class Turn:
    """Where an answer changed: index of the night, and of the last one before it that had an answer."""

    night: int
    before: int


@dataclass(frozen=True)
class Strip:
    case: str
    axes: tuple[str, ...]
    hardware: str
    stack: str
    arm: str
    entries: tuple[Entry, ...]

    @property
    def where(self) -> str:
        """The cell as a command line takes it."""
        return placed(self.case, self.axes)

    @property
    def letters(self) -> str:
        return "".join(entry.letter for entry in self.entries)

    @property
    def flaky(self) -> tuple[int, int]:
        """(attempts that did not do what most of their night did, all attempts)"""
        return sum(e.otherwise for e in self.entries), sum(e.attempts for e in self.entries)

    @property
    def turns(self) -> list[Turn]:
        """Nights in which it answered otherwise than when it last answered."""
        found = []
        last: int | None = None
        for index, entry in enumerate(self.entries):
            if entry.name in NONE:
                continue
            if last is not None and self.entries[last].answer != entry.answer:
                found.append(Turn(index, last))
            last = index
        return found


def entry(arm: ArmBrief) -> Entry:
    """What a strip shows of an arm in a night."""
    n = arm.measured
    if not n:
        return Entry("skipped" if arm.skipped else "INCONCLUSIVE", told=arm.skipped or arm.text)
    name = arm.verdict or (next(iter(arm.kinds)) if arm.steady else "FLAKY")
    return Entry(name, tuple(arm.met), n, n - max(arm.kinds.values()), arm.counted())


def strips(nights: Sequence[Night], case: str | None = None) -> list[Strip]:
    """One for each arm of each cell that any night has, in the order of the newest night's arms."""
    cells: dict[str, Mapping[str, Any]] = {}
    arms: dict[str, dict[str, None]] = {}
    for night in reversed(nights):
        for at, cell in night.cells.items():
            if case is None or cell["case"] == case:
                cells.setdefault(at, cell)
                arms.setdefault(at, {}).update(dict.fromkeys(cell["arms"]))
    found = []
    for at, cell in sorted(cells.items(), key=lambda item: (item[1]["case"], item[0])):
        for arm in arms[at]:
            told = [n.cells.get(at, {}).get("arms", {}).get(arm) for n in nights]
            entries = tuple(
                ABSENT if one is None else _placed(entry(arm_of(one)), night, at, arm)
                for one, night in zip(told, nights)
            )
            found.append(Strip(cell["case"], tuple(cell["axes"]), cell["hardware"], cell["stack"], arm, entries))
    return found


def _placed(entry: Entry, night: Night, at: str, arm: str) -> Entry:
    """The same with its evidence, where the night still has it."""
    seen = night.evidence.get(at)
    return replace(entry, document=seen.document or None, error_at=seen.error_at.get(arm)) if seen else entry


def lines(nights: Sequence[Night], found: Sequence[Strip], width: int = WIDTH) -> Iterator[str]:
    """One case's strips: arms that went alike in a line, then where answers changed. ``width``: in columns."""
    shown = nights[-min(MOST, max(8, width - BESIDE)) :]
    span = f"{_name(shown[0])} to {_name(shown[-1])}" if len(shown) > 1 else _name(shown[0])
    left = len(nights) - len(shown)
    older = f"; {left} older ones are not drawn (--json has all)" if left else ""
    case = found[0].case if found else ""
    yield from wrap(f"{case} over {counted(len(shown), 'night')}, a column each: {span}{older}", "", 2, width)
    cells: dict[tuple[tuple[str, ...], str, str], list[Strip]] = {}
    for strip in found:
        cells.setdefault((strip.axes, strip.hardware, strip.stack), []).append(strip)
    for (axes, hardware, stack), own in cells.items():
        yield ""
        yield from wrap(f"{' '.join(axes)} on {hardware}, stack {stack}", "", 2, width)
        alike: dict[tuple[str, str], list[Strip]] = {}
        for strip in own:
            alike.setdefault((strip.letters[-len(shown) :], _flaky(strip)), []).append(strip)
        for (letters, flaky), group in alike.items():
            arms = ", ".join(strip.arm for strip in group)
            yield from wrap(f"{letters}  {arms}" + (f": {flaky}" if flaky else ""), "  ", len(letters) + 2, width)
        for text in _turned(nights, own):
            yield from wrap(text, "    ", 4, width)
    used = {e.name for strip in found for e in strip.entries[-len(shown) :]}
    listed = [f"{letter} {SAID[name]}" for name, letter in LETTERS.items() if name in used]
    yield ""
    yield from wrap("; ".join(listed), "", 2, width)


def _flaky(strip: Strip) -> str:
    k, n = strip.flaky
    return f"{k} of {n} attempts went otherwise than most of their night" if k else ""


def _turned(nights: Sequence[Night], own: Iterable[Strip]) -> Iterator[str]:
    """Where answers changed, arms that changed alike together; the newest first."""
    found: dict[tuple[int, str], list[str]] = {}
    for strip in own:
        for turn in strip.turns:
            was, now = strip.entries[turn.before], strip.entries[turn.night]
            found.setdefault((turn.night, f"{_said(was)} -> {_said(now)}"), []).append(strip.arm)
    ordered = sorted(found.items(), key=lambda item: -item[0][0])
    for (night, told), arms in ordered[:8]:
        yield f"{_name(nights[night])}: {', '.join(arms)}: {told}"
    if len(ordered) > 8:
        yield f"and {len(ordered) - 8} older changes"


def _said(entry: Entry) -> str:
    return f"{SAID.get(entry.name, entry.name)} ({', '.join([entry.told, *entry.met])})"


def _name(night: Night) -> str:
    return one_line(night.name)[: WIDTH // 3]


def as_json(nights: Sequence[Night], found: Iterable[Strip]) -> dict[str, Any]:
    """Stable keys."""
    return {
        "schema": 1,
        "nights": [{"name": n.name, "started": n.started, "commit": n.commit, "exit_code": n.code} for n in nights],
        "strips": [
            {
                "case": s.case, "where": s.where, "hardware": s.hardware, "stack": s.stack, "arm": s.arm,
                "letters": s.letters, "otherwise": s.flaky[0], "attempts": s.flaky[1],
                "entries": [
                    {"verdict": e.name, "met": list(e.met), "attempts": e.attempts, "otherwise": e.otherwise,
                     "error_at": e.error_at, "document": e.document}
                    for e in s.entries
                ],
                "changes": [{"night": nights[t.night].name, "before": nights[t.before].name} for t in s.turns],
            }
            for s in found
        ],
    }  # fmt: skip
