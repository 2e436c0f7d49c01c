"""Where a cell's document is stored, as it is named everywhere. Pure.

A run writes a file per cell, ``<hardware>/<stack>/<case>/<cell>.json``; a published document is a line of its stack's
file, ``<hardware>/<stack>.jsonl.zst:<line>``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath

LINES = ".jsonl.zst"
_AT = re.compile(r"(?P<file>.+\.jsonl\.zst):(?P<line>[0-9]+)")


@dataclass(frozen=True)
class Place:
    file: str
    line: int | None = None  # from 1; None: the whole file is the document

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"

    @property
    def hardware(self) -> str:
        """What its folders say of it; "" where there are too few of them."""
        parts = PurePath(self.file).parts
        return (parts[-2] if len(parts) > 1 else "") if self.line else (parts[-4] if len(parts) > 3 else "")

    @property
    def stack(self) -> str:
        """The label of its stack, likewise."""
        path = PurePath(self.file)
        return path.name.removesuffix(LINES) if self.line else path.parent.parent.name

    @property
    def case(self) -> str:
        """The case, likewise; of a line its key says it."""
        return "" if self.line else PurePath(self.file).parent.name


def read(path: str) -> Place:
    """A document's place. A path that is no line's is that of a file."""
    found = _AT.fullmatch(path)
    return Place(found["file"], int(found["line"])) if found else Place(path)
