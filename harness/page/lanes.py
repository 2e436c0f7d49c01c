"""Where the time of a run went: its attempts over time, a lane for each device (on a CPU for each place). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from repro_matrix.page.marks import Mark, mark
from repro_matrix.page.view import Cell, Span, day

WIDTH, HEIGHT = 1000, 14  # of the drawing, and of a lane
MOST_LANES = 32
LONGEST = 8


@dataclass(frozen=True)
class Lane:
    name: str
    busy: float  # share of the run
    paths: tuple[tuple[Mark, str], ...]  # an SVG path for each outcome


@dataclass(frozen=True)
class Timeline:
    run: str
    when: str
    seconds: float
    attempts: int
    lanes: tuple[Lane, ...]
    hidden: int  # lanes that are not drawn
    longest: tuple[tuple[float, Cell, str], ...]  # seconds, cell, arm
    cases: tuple[tuple[str, float], ...]  # seconds by case, the most first


def timelines(cells: Iterable[Cell], most: int = 3) -> tuple[list[Timeline], int]:
    """Of the latest runs, and how many others there are."""
    runs: dict[str, list[tuple[Span, Cell]]] = {}
    for cell in cells:
        for span in cell.spans:
            if span.run:
                runs.setdefault(span.run, []).append((span, cell))
    latest = sorted(runs, key=lambda run: -max(span.started for span, _ in runs[run]))
    return [_timeline(run, runs[run]) for run in latest[:most]], max(0, len(latest) - most)


def _timeline(run: str, found: Sequence[tuple[Span, Cell]]) -> Timeline:
    spans = sorted(found, key=lambda item: item[0].started)
    began = spans[0][0].started
    total = max(span.ended for span, _ in spans) - began or 1.0
    lanes: dict[str, list[Span]] = {}
    free: list[float] = []  # when each place on the CPU is free again
    for span, _ in spans:
        names = span.devices
        if not names:
            place = next((index for index, at in enumerate(free) if at <= span.started), len(free))
            free[place : place + 1] = [span.ended]
            names = (f"CPU place {place + 1}",)
        for name in names:
            lanes.setdefault(name, []).append(span)
    cases: dict[str, float] = {}
    for span, cell in spans:
        cases[cell.case] = cases.get(cell.case, 0.0) + span.ended - span.started
    drawn = tuple(_lane(name, lanes[name], began, total) for name in sorted(lanes)[:MOST_LANES])
    longest = sorted(((span.ended - span.started, cell, span.arm) for span, cell in spans), key=lambda item: -item[0])
    by_case = sorted(cases.items(), key=lambda item: -item[1])
    return Timeline(
        run, day(began), total, len(spans), drawn, max(0, len(lanes) - MOST_LANES), tuple(longest[:LONGEST]),
        tuple(by_case[:LONGEST]),
    )  # fmt: skip


def _lane(name: str, spans: Sequence[Span], began: float, total: float) -> Lane:
    paths: dict[str, list[str]] = {}
    for span in spans:
        left = WIDTH * (span.started - began) / total
        wide = max(WIDTH * (span.ended - span.started) / total - 0.3, 0.4)
        paths.setdefault(span.outcome, []).append(f"M{left:.1f} 1h{wide:.1f}v{HEIGHT - 2}h-{wide:.1f}z")
    busy = sum(span.ended - span.started for span in spans) / total
    return Lane(name, min(1.0, busy), tuple((mark(outcome), "".join(found)) for outcome, found in paths.items()))
