"""What a running matrix shows: a bar with the running attempts on a terminal, a line per cell elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from repro_matrix.planning.plan import CellPlan
from repro_matrix.records.document import Document
from repro_matrix.results.summary import rows_of
from repro_matrix.runner.engine import Event
from repro_matrix.text import one_line, printable

QUIET_S = 30.0  # without a terminal: after so long without a line, print what runs


class Progress:
    """Use as a context manager; pass ``event`` to the engine. ``bar``: the whole run, then what runs."""

    def __init__(self, verbose: bool = False) -> None:
        import rich.progress
        from rich.console import Console

        self.out = Console(stderr=True, highlight=False)
        self.verbose = verbose
        self.attempts = self.done = self.cells = self.all_cells = 0
        self.verdicts: Counter[str] = Counter()
        self._printed = time.monotonic()
        # The bar counts expected seconds, so that the time left is that of long attempts, not of their number.
        self.bar = rich.progress.Progress(
            rich.progress.BarColumn(24), rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.TimeElapsedColumn(), rich.progress.TimeRemainingColumn(), console=self.out, transient=True,
            refresh_per_second=2, speed_estimate_period=1e6, get_time=lambda: time.monotonic(),
            disable=not self.out.is_terminal,
        )  # fmt: skip
        self.run = self.bar.add_task("", total=0)
        self.running: dict[Any, rich.progress.TaskID] = {}

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def warn(self, text: str) -> None:
        self._print(f"note: {text}", "magenta")

    def event(self, event: Event) -> None:
        """Show an event of the engine."""
        key = (event.plan.cell.key, event.variant, event.index) if event.plan else event.text
        waiting = ""
        if event.kind in ("cells", "more"):
            self.attempts += event.attempts
            self.all_cells += event.kind == "cells"
            self.bar.update(self.run, total=(self.bar.tasks[0].total or 0) + event.seconds)
        if event.kind in ("more", "note"):
            self.warn(event.text)
        elif event.kind == "start":
            self._start(key, f"{event.device:>8}  {event.plan.cell.key if event.plan else ''} {event.variant}")
        elif event.kind == "attempt" and key in self.running:
            self.bar.remove_task(self.running.pop(key))
        if event.kind == "attempt":
            self.done += 1
            self.bar.advance(self.run, event.seconds)
            if self.verbose and event.outcome is not None:
                name, reason = event.outcome["outcome"], event.outcome.get("reason") or ""
                self._print(f"{event.variant}: {name} in {event.wall_s:.1f}s  {reason}")
        elif event.kind == "cell":
            self.cells += 1
            if event.plan and event.document:
                self._cell(event.plan, event.document)
        elif event.kind == "time":
            waiting = event.text
        counts = "  ".join(f"{name} {count}" for name, count in self.verdicts.items())
        status = f"{self.done}/{self.attempts} attempts  {counts}  {waiting}".rstrip()
        self.bar.update(self.run, description=status)
        if not self.out.is_terminal and time.monotonic() - self._printed > QUIET_S:
            tasks = [f"{' '.join(task.description.split())} {task.elapsed or 0:.0f}s" for task in self.bar.tasks]
            self._print("; ".join(tasks))

    def _start(self, key: Any, text: str) -> None:
        self.running[key] = self.bar.add_task(text, total=None)

    def _cell(self, plan: CellPlan, document: Document) -> None:
        rows = rows_of(document, {})
        self.verdicts.update(row.verdict for row in rows if row.verdict)
        if self.out.is_terminal or self.verbose:
            return
        results = [f"{row.variant} {row.verdict or row.outcome}" for row in rows if row.attempts]
        text = ", ".join(results) or f"skipped: {rows[0].reason}"
        self._print(one_line(f"[{self.cells}/{self.all_cells}] {plan.cell.key}: {text}"))

    def _print(self, text: str, style: str = "") -> None:
        self._printed = time.monotonic()
        self.out.print(printable(text), style=style, markup=False, soft_wrap=True)
