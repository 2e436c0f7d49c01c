"""What a running matrix shows: a bar with ETA and the running cells on a terminal, a line per cell elsewhere."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from repro_matrix.planning.plan import CellPlan
from repro_matrix.records.document import Document
from repro_matrix.results.rows import variant_rows
from repro_matrix.runner.engine import Event
from repro_matrix.text import printable

SHOWN = 8  # running attempts
QUIET_S = 30.0  # without a terminal: after so long without a line, say what runs


def line(text: str) -> Any:
    from rich.text import Text

    return Text(text, no_wrap=True, overflow="ellipsis")


class Progress:
    """Use as a context manager; pass ``event`` to the engine."""

    def __init__(self, verbose: bool = False) -> None:
        from rich.console import Console

        self.out = Console(stderr=True, highlight=False)
        self.verbose = verbose
        self.total = self.done = self.cells = self.all_cells = 0
        self.expected_s = self.done_s = 0.0
        self.verdicts: dict[str, int] = {}
        self.running: dict[tuple[str, int], tuple[str, float]] = {}  # what -> (device, since)
        self.building: list[str] = []
        self.held = ""  # why nothing runs
        self._began = self._said = time.monotonic()
        self._live: Any = None

    def __enter__(self) -> Progress:
        if self.out.is_terminal:
            from rich.live import Live

            self._live = Live(self, console=self.out, transient=True, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        head = Table.grid(padding=(0, 1))
        head.add_row(ProgressBar(max(1, self.total), self.done, width=24), line(self.status()))
        return Group(head, *(line(text) for text in self.at_work()))

    def status(self) -> str:
        """Attempts done and to do, time, verdicts so far."""
        elapsed = time.monotonic() - self._began
        left = self.eta()
        eta = "" if left is None else f", about {timedelta(seconds=round(left))} left"
        counts = "  ".join(f"{name} {count}" for name, count in self.verdicts.items())
        return f"{self.done}/{self.total} attempts, {timedelta(seconds=round(elapsed))}{eta}   {counts}"

    def eta(self) -> float | None:
        """Seconds left, by what the attempts were expected to take; None before one of them has ended."""
        if not self.done_s:
            return None
        pace = (time.monotonic() - self._began) / self.done_s
        return max(0.0, self.expected_s - self.done_s) * pace

    def at_work(self) -> list[str]:
        """A line per running attempt: device, age, cell and variant; the oldest first."""
        now = time.monotonic()
        items = sorted(self.running.items(), key=lambda item: item[1][1])
        lines = [f"{device:>8} {now - since:4.0f}s  {what}" for (what, _), (device, since) in items[:SHOWN]]
        if len(items) > SHOWN:
            lines.append(f"{'':>14} and {len(items) - SHOWN} more")
        return [*lines, *(f"building: {what}" for what in self.building), *filter(None, [self.held])]

    def warn(self, text: str) -> None:
        self.out.print(f"note: {text}", style="magenta", markup=False, soft_wrap=True)

    def event(self, event: Event) -> None:
        what = (f"{event.plan.cell.key} {event.variant}" if event.plan else "", event.index)
        if event.kind == "cells":
            self.all_cells += 1
            self.total += event.attempts
            self.expected_s += event.seconds
        elif event.kind == "building":
            self.building.append(event.text)
            self._say(f"building {event.text}; its cells follow")
        elif event.kind == "built":
            self.building.remove(event.text)
        elif event.kind == "more":
            self.total += event.attempts
            self.expected_s += event.seconds
            self.warn(event.text)
        elif event.kind == "note":
            self.warn(event.text)
        elif event.kind == "start":
            self.running[what] = (event.device, time.monotonic())
        elif event.kind == "attempt":
            self.running.pop(what, None)
            self.done += 1
            self.done_s += event.seconds
            if self.verbose and event.outcome is not None:
                outcome = event.outcome
                text = f"{event.variant}: {outcome['outcome']} in {event.wall_s:.1f}s  {outcome.get('reason') or ''}"
                style = "bold" if outcome["outcome"] == "reproduced" else ""
                self.out.print(printable(text), style=style, markup=False, soft_wrap=True)
                self._said = time.monotonic()
        elif event.kind == "cell":
            self.cells += 1
            if event.document:
                self._cell(event.plan, event.document)
        else:
            self.held = event.text
            if self._live is None and time.monotonic() - self._said > QUIET_S:
                self._say("; ".join([self.status(), *(" ".join(line.split()) for line in self.at_work())]))

    def _cell(self, plan: CellPlan | None, document: Document) -> None:
        rows = variant_rows(document)
        for row in rows:
            if row["verdict"]:
                self.verdicts[row["verdict"]] = self.verdicts.get(row["verdict"], 0) + 1
        if self._live is not None or self.verbose or plan is None:
            return
        first = rows[0]
        if not any(row["attempts"] for row in rows):
            text = f"skipped: {first['reason']}"
        else:
            unfixed = f"{first['variant']} {first['outcome']}" if first["variant"] == "unfixed" else ""
            judged = ", ".join(f"{row['variant']} {row['verdict']}" for row in rows if row["verdict"])
            text = "; ".join(filter(None, [unfixed, judged]))
        self._say(f"[{self.cells}/{self.all_cells}] {plan.cell.key}: {text}")

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        self.out.print(printable(text), markup=False, soft_wrap=True)
