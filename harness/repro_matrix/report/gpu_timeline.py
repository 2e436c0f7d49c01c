"""Where the time of a run went: its attempts over time, a lane for each device (on a CPU for each place). Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from repro_matrix.report.icons import Mark, mark
from repro_matrix.report.view import Cell, day

WIDTH, HEIGHT = 1000, 14  # of the drawing, and of a lane
MOST_LANES = 32
LONGEST = 8


class Attempted(NamedTuple):
    """An attempt's place in time, and the cell that it is of."""

    started: float
    ended: float
    devices: Sequence[str]  # empty: the CPU
    outcome: str
    arm: str
    id: str  # of the cell
    case: str
    where: str

    @property
    def seconds(self) -> float:
        return self.ended - self.started


@dataclass(frozen=True)
class Run:
    """What a case had of one run: packed, because only the latest runs are drawn."""

    latest: float  # when its last attempt began
    packed: str


def runs(cells: Iterable[Cell]) -> dict[str, Run]:
    found: dict[str, list[Attempted]] = {}
    for cell in cells:
        where = f"{cell.model}/{cell.strategy}"
        for span in cell.spans:
            if span.run:
                at = Attempted(
                    span.started, span.ended, span.devices, span.outcome, span.arm, cell.id, cell.case, where
                )
                found.setdefault(span.run, []).append(at)
    return {name: Run(max(at.started for at in made), json.dumps(made)) for name, made in found.items()}


class _HasRuns(Protocol):
    @property
    def runs(self) -> Mapping[str, Run]: ...


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
    longest: tuple[Attempted, ...]
    cases: tuple[tuple[str, float], ...]  # seconds by case, the most first


def timelines(views: Iterable[_HasRuns], most: int = 3) -> tuple[list[Timeline], int]:
    """Of the latest runs, and how many others there are."""
    parts: dict[str, list[Run]] = {}
    for view in views:
        for name, run in view.runs.items():
            parts.setdefault(name, []).append(run)
    latest = sorted(parts, key=lambda name: -max(run.latest for run in parts[name]))
    drawn = [
        _timeline(name, [Attempted(*values) for run in parts[name] for values in json.loads(run.packed)])
        for name in latest[:most]
    ]
    return drawn, max(0, len(latest) - most)


def _timeline(run: str, found: Iterable[Attempted]) -> Timeline:
    made = sorted(found, key=lambda at: at.started)
    began = made[0].started
    total = max(at.ended for at in made) - began or 1.0
    lanes: dict[str, list[Attempted]] = {}
    free: list[float] = []  # when each place on the CPU is free again
    for one in made:
        names = one.devices
        if not names:
            place = next((index for index, at in enumerate(free) if at <= one.started), len(free))
            free[place : place + 1] = [one.ended]
            names = (f"CPU place {place + 1}",)
        for name in names:
            lanes.setdefault(name, []).append(one)
    cases: dict[str, float] = {}
    for one in made:
        cases[one.case] = cases.get(one.case, 0.0) + one.seconds
    drawn = tuple(_lane(name, lanes[name], began, total) for name in sorted(lanes)[:MOST_LANES])
    longest = sorted(made, key=lambda at: -at.seconds)
    by_case = sorted(cases.items(), key=lambda item: -item[1])
    return Timeline(
        run, day(began), total, len(made), drawn, max(0, len(lanes) - MOST_LANES), tuple(longest[:LONGEST]),
        tuple(by_case[:LONGEST]),
    )  # fmt: skip


def _lane(name: str, made: Sequence[Attempted], began: float, total: float) -> Lane:
    paths: dict[str, list[str]] = {}
    for one in made:
        left = WIDTH * (one.started - began) / total
        wide = max(WIDTH * (one.ended - one.started) / total - 0.3, 0.4)
        paths.setdefault(one.outcome, []).append(f"M{left:.1f} 1h{wide:.1f}v{HEIGHT - 2}h-{wide:.1f}z")
    busy = sum(one.seconds for one in made) / total
    return Lane(name, min(1.0, busy), tuple((mark(outcome), "".join(found)) for outcome, found in paths.items()))
