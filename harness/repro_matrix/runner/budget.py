"""``budget=30m``: of a selection the cells from which most is learnt, as many as fit. Pure but for ``known``'s reading.

First what was never measured here, then what changed the last time it was asked, then what was not steady, then the
failures and at last the controls; among alike cells the one that was not asked for longest, so that over some nights
every cell has its turn. A cell that does not fit is passed over for shorter ones that do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from repro_matrix.errors import ConfigError
from repro_matrix.planning.cells import Cell
from repro_matrix.records.document import Document

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
At = tuple[str, str, str]  # hardware, stack, key: a cell as documents name it


@dataclass(frozen=True)
class Known:
    """What is stored of a cell. ``last``: seconds since the epoch."""

    last: float
    changed: bool = False  # its last answer differs from the one before, or from what is expected
    flaky: bool = False


def of(text: str | None) -> float | None:
    """``30m`` -> 1800.0 seconds. Raises ConfigError."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smh])", str(text))
    seconds = float(found[1]) * UNITS[found[2]] if found else 0.0
    if seconds <= 0:
        raise ConfigError(f"budget={text}: a time, as budget=90s, budget=30m, budget=2h")
    return seconds


def rank(cell: Cell, known: Mapping[At, Known], controls: Iterable[str]) -> tuple[Any, ...]:
    """Where a cell stands: the smaller, the more is learnt from it."""
    found = known.get((cell.hardware, cell.stack, cell.key))
    control = cell.case in controls
    if found is None:
        return 0, control, 0.0, cell.key, cell.stack, cell.hardware
    group = 1 if found.changed else 2 if found.flaky else 3
    return group, control, found.last, cell.key, cell.stack, cell.hardware


def choose(
    cells: Sequence[Cell], seconds: Mapping[Cell, float], budget: float, known: Mapping[At, Known],
    controls: Iterable[str] = (),
) -> tuple[list[Cell], list[Cell]]:  # fmt: skip
    """(the cells that fit, in their order; the others). ``seconds``: of the machine, by recorded durations.

    Raises ConfigError where not a single cell fits: a run that measures nothing is not green.
    """
    own = set(controls)
    left = budget
    chosen = set()
    for cell in sorted(cells, key=lambda cell: rank(cell, known, own)):
        if seconds[cell] <= left:
            left -= seconds[cell]
            chosen.add(cell)
    if not chosen:
        least = min((seconds[cell] for cell in cells), default=0.0)
        raise ConfigError(f"budget={budget:g}s: the shortest cell of the selection takes {least:.0f} s")
    return [cell for cell in cells if cell in chosen], [cell for cell in cells if cell not in chosen]


def known(documents: Iterable[Document]) -> dict[At, Known]:
    """What stored documents (older ones too) say of each cell, by its two newest."""
    by_cell: dict[At, list[Document]] = {}
    for document in documents:
        if any(arm["attempts"] for arm in document["arms"].values()):
            at = (document["hardware"]["profile"], document["stack"]["name"], document.get("key", ""))
            by_cell.setdefault(at, []).append(document)
    found = {}
    for at, own in by_cell.items():
        *_, before, last = [None, *sorted(own, key=lambda document: document["provenance"]["started"])]
        assert last is not None
        odd = any(said.get("expected") in ("unexpected", "differs from cpu") for said in last["verdicts"].values())
        flaky = any(len(kinds) > 1 for kinds in _kinds(last).values())
        changed = odd or (before is not None and _kinds(before) != _kinds(last))
        found[at] = Known(last["provenance"]["started"], changed, flaky)
    return found


def _kinds(document: Document) -> dict[str, set[str]]:
    """Arm -> what its attempts came out as."""
    return {
        name: {attempt["outcome"]["outcome"] for attempt in arm["attempts"]}
        for name, arm in document["arms"].items()
        if arm["attempts"]
    }


def side_by_side(jobs: int | None, gpus: int, cores: int) -> int:
    """About how many devices work at once: seconds of attempts are divided by it."""
    most = gpus or cores
    return max(1, min(jobs, most) if jobs else most)
