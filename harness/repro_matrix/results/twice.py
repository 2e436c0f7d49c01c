"""A cell that a folder of results tells twice, and a document that bears another cell's name. Pure.

A run writes a cell to one file, named by its key: a second one in the same stack's folder is somebody's copy. Counted
as a cell of its own it would be a measurement that nobody made; and of two that say otherwise one is not what was
measured. (Several folders side by side, nights, and what lies in a history are other measurements.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, NamedTuple

from repro_matrix.records import paths as place


class Held(NamedTuple):
    """A document. ``says``: what two of them that began at the same time are compared by."""

    path: str
    key: str
    hardware: str
    stack: str
    started: float
    says: Any

    @property
    def named(self) -> bool:
        """Whether its file is the one of its cell; of a file that lies in no tree of results nobody can tell."""
        at = place.read(self.path)
        if at.line is not None or at.hardware != self.hardware or self.key.count("/") != 1:
            return True
        return f"{at.case}/{PurePath(at.file).name}" == f"{self.key}.json"

    @property
    def tree(self) -> str:
        at = place.read(self.path)
        return at.file if at.line is not None else str(PurePath(at.file).parent.parent)


@dataclass
class Sorted:
    """``dropped``: paths that count no more. ``notes``: what is only said; ``wrong``: of two that contradict each other
    the one that is left out."""

    dropped: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def sort_out(held: Iterable[Held]) -> Sorted:
    """Of each cell one document: that of its own name, else the newest."""
    found = Sorted()
    cells: dict[tuple[str, str, str, str], list[Held]] = {}
    for one in held:
        cells.setdefault((one.tree, one.key, one.hardware, one.stack), []).append(one)
    for own in cells.values():
        first, *others = sorted(own, key=lambda one: (not one.named, -one.started, one.path))
        if not first.named:
            found.notes.append(f"{first.path}: holds the cell {first.key}, and not the one of its name")
        for other in others:
            found.dropped.add(other.path)
            if (other.started, other.says) == (first.started, first.says):
                found.notes.append(f"{other.path}: the same document as {first.path}: counted once")
            else:
                told = f"holds the cell of {first.path} once more and says otherwise: one of them was not measured so"
                found.wrong.append(f"{other.path}: left out: {told}")
    return found
