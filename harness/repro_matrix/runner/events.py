"""What a run tells of itself while it works, and at its end; and what it still waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from repro_matrix.planning.plan import CellPlan
from repro_matrix.records.document import Document
from repro_matrix.records.outcome import Outcome


@dataclass(frozen=True)
class Event:
    """What the progress shows.

    ``cells``: a cell has so many attempts to be made, expected to take ``seconds``. ``building``: ``text`` is made
    before more cells can follow. ``start`` and ``attempt`` (with its outcome) of one attempt. ``cell``: judged.
    ``time``: nothing happened, for a while (``text``: why not, where there is a reason). ``note``: ``text`` is news.
    ``more``: an attempt that had ended is to be made once more.
    """

    kind: str
    plan: CellPlan | None = None
    arm: str = ""
    index: int = 0
    outcome: Outcome | None = None
    document: Document | None = None
    wall_s: float = 0.0
    seconds: float = 0.0  # expected
    attempts: int = 0
    device: str = ""
    text: str = ""


@dataclass
class Summary:
    documents: list[Document] = field(default_factory=list)
    attempts: int = 0
    reused: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    cold: Counter[str] = field(default_factory=Counter)  # why attempts of the warm launcher started from cold
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)  # stored documents that say something else than they show
    cards: list[str] = field(default_factory=list)  # which were not used, and why
    problem: str | None = None  # what stopped the run early (a full disk), or None


@dataclass(frozen=True)
class Later:
    """Cells that cannot be planned before something is there: a stack that is still to be built, a compiled op."""

    what: str
    cells: int
    make: Callable[[], list[CellPlan]]  # takes its time; never raises for what can be said as a skip's reason
