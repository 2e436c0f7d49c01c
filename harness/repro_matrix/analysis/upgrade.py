"""Two stacks' measurements of the same cells -> what an upgrade changes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from repro_matrix.grading.comparability import settings_difference
from repro_matrix.records.document import Document
from repro_matrix.search.labels import CLEAN, FIRES, Answer, of_cell

# For the worse, for the better, neither: in the order in which a reader wants them.
WORSE = ("enters", "breaks", "stops working", "is needed now")
KINDS = (*WORSE, "changes its text", "leaves", "heals", "starts working", "needless")
MEANING = {
    "enters": "the known failure fires now",
    "breaks": "an error that is not the known failure",
    "stops working": "the fix was clean and is no longer",
    "is needed now": "the fix was clean and is now what keeps the failure away",
    "changes its text": "it failed and fails, in other words",
    "leaves": "the known failure no longer fires",
    "heals": "the other error is gone",
    "starts working": "the fix was not clean and is now",
    "needless": "nothing fires without the fix any more",
}
CAUSED_ELSEWHERE = ("needless", "is needed now")  # by what changed in the broken arm


@dataclass(frozen=True)
class Change:
    """One arm of one cell that answers otherwise."""

    kind: str
    case: str
    key: str  # the cell
    arm: str
    before: Answer
    after: Answer
    documents: tuple[str | None, str | None] = (None, None)  # before and after


class Unknown(NamedTuple):
    """An arm of which it is not known on both stacks. ``declared``: because something that it needs is not there."""

    cell: str
    arm: str
    reason: str
    declared: bool = False


@dataclass(frozen=True)
class Compared:
    changes: tuple[Change, ...]
    unknown: tuple[Unknown, ...]
    same: int


def compare(before: Iterable[Document], after: Iterable[Document]) -> Compared:
    """``before`` and ``after``: the documents of the two stacks. Arms on a stack of their own are left out."""
    older = {document["key"]: document for document in before}
    changes: list[Change] = []
    unknown: list[Unknown] = []
    same = 0
    for document in after:
        other = older.get(document["key"])
        if other is None:
            continue
        found = _cell(other, document)
        for item in found.values():
            if isinstance(item, Change):
                changes.append(item)
            elif item is not None:
                unknown.append(item)
            else:
                same += 1
    changes.sort(key=lambda change: KINDS.index(change.kind))
    return Compared(tuple(changes), tuple(unknown), same)


def _cell(before: Document, after: Document) -> dict[str, Change | Unknown | None]:
    """Arm -> its change, None where it answers alike, or why that cannot be known."""
    case, key = after["case"], after["key"]
    out: dict[str, Change | Unknown | None] = {}
    old, new = _answers(case, before), _answers(case, after)
    first, paths = next(iter(after["arms"]), ""), (before.get("path"), after.get("path"))
    for arm, (one, other) in {arm: (old[arm], new[arm]) for arm in new if arm in old}.items():
        found: Change | Unknown | None = None
        unlike = settings_difference(before["arms"][arm]["settings"], after["arms"][arm]["settings"])
        if unlike:
            found = Unknown(key, arm, f"not measured alike: {unlike}")
        elif one.label is None or other.label is None:
            sides = [f"{word}: {a.detail}" for word, a in (("from", one), ("to", other)) if a.label is None]
            found = Unknown(key, arm, "; ".join(sides), one.skipped or other.skipped)
        else:
            broken = (old[first], new[first]) if arm != first and first in old else None
            kind = kind_of(one, other) if broken is None else _fix_kind(one, other, *broken)
            found = Change(kind, case, key, arm, one, other, paths) if kind else None
        out[arm] = found
    return out


def _answers(case: str, document: Document) -> dict[str, Answer]:
    stack = document["stack"]["name"]
    return {name: of_cell(case, arm) for name, arm in document["arms"].items() if arm.get("stack", stack) == stack}


def kind_of(one: Answer, other: Answer) -> str | None:
    """Of the broken arm, or of a control."""
    if one.label == other.label:
        return None if one.whole == other.whole or one.label != FIRES else "changes its text"
    if FIRES in (one.label, other.label):
        return "enters" if other.label == FIRES else "leaves"
    if CLEAN in (one.label, other.label):
        return "heals" if other.label == CLEAN else "breaks"
    return "changes its text"


def _fix_kind(one: Answer, other: Answer, broken: Answer, broken_now: Answer) -> str | None:
    was, now = one.label == CLEAN, other.label == CLEAN
    if was and now:
        if broken.label == FIRES and broken_now.label == CLEAN:
            return "needless"
        return "is needed now" if broken.label == CLEAN and broken_now.label == FIRES else None
    if was or now:
        return "stops working" if was else "starts working"
    return "changes its text" if one.whole != other.whole else None
