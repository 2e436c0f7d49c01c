"""What a running matrix shows: a bar with ETA on a terminal, a line per cell elsewhere."""

from __future__ import annotations

import time
from typing import Any

from harness.engine import Event
from harness.plan import CellPlan
from harness.report import console, style
from harness.rows import arm_rows


class Progress:
    """Use as a context manager; pass ``event`` to the engine."""

    def __init__(self, plans: list[CellPlan], verbose: bool = False) -> None:
        self.out = console(stderr=True)
        self.total = sum(arm.repeat for plan in plans for arm in plan.arms if not arm.skipped)
        self.done = 0
        self.cells = 0
        self.all_cells = len(plans)
        self.verbose = verbose
        self.verdicts: dict[str, int] = {}
        self.running: dict[str, float] = {}
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self.out.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("eta"),
                TimeRemainingColumn(),
                console=self.out,
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=self.total)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def warn(self, text: str) -> None:
        self.out.print(f"note: {text}", style="yellow", markup=False, soft_wrap=True)

    def event(self, event: Event) -> None:
        name = f"{event.plan.cell.key} {event.arm}"
        if event.kind == "start":
            self.running[name] = time.monotonic()
        elif event.kind == "attempt":
            self.running.pop(name, None)
            self.done += 1
            if self.verbose and event.outcome is not None:
                outcome = event.outcome
                text = f"{event.arm}: {outcome['outcome']} in {event.wall_s:.1f}s  {outcome.get('reason') or ''}"
                self.out.print(text, style=style(outcome["outcome"]), markup=False, soft_wrap=True)
        elif event.kind == "cell":
            self.cells += 1
            self._cell(event)
        if self._bar is not None:
            now = ", ".join(f"{key} {time.monotonic() - began:.0f}s" for key, began in list(self.running.items())[:2])
            counts = " ".join(f"{key}:{value}" for key, value in self.verdicts.items())
            room = max(20, self.out.width - 70)
            self._bar.update(self._task, completed=self.done, description=f"{counts}  {now}"[:room])

    def _cell(self, event: Event) -> None:
        assert event.document is not None
        rows = arm_rows(event.document)
        for row in rows:
            if row["verdict"]:
                self.verdicts[row["verdict"]] = self.verdicts.get(row["verdict"], 0) + 1
        if self._bar is not None or self.verbose:
            return
        first = rows[0]
        if not any(row["attempts"] for row in rows):
            text = f"skipped: {first['reason']}"
        else:
            text = f"{first['arm']} {first['outcome']}; " if first["arm"] == "broken" else ""
            text += ", ".join(f"{row['arm']} {row['verdict']}" for row in rows if row["verdict"])
        self.out.print(f"[{self.cells}/{self.all_cells}] {event.plan.cell.key}: {text}", markup=False, soft_wrap=True)
