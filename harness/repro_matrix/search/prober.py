"""One probe: one stack measured for one cell of one case, stored like every run, and never made twice.

What a probe finds out is stored in the ordinary results folder as soon as it is there, so that a search that was
interrupted goes on by being started again: its first probes are then read, not run.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from repro_matrix.config import catalog as catalogues
from repro_matrix.config import selection as overrides
from repro_matrix.config.schema import Case
from repro_matrix.config.selection import Selection, quoted
from repro_matrix.config.settings import RunSettings
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import Stack, StackError
from repro_matrix.errors import ConfigError, unknown
from repro_matrix.planning import cells as matrix
from repro_matrix.records.document import Arm
from repro_matrix.results import local as own_results
from repro_matrix.results.store import Document, Store
from repro_matrix.runner import session
from repro_matrix.runner import workspace as workplace
from repro_matrix.runner.engine import Summary
from repro_matrix.runner.request import Request
from repro_matrix.search import labels
from repro_matrix.search.labels import Answer

Say = Callable[[str], None]


class Stopped(Exception):
    """No probe can be made any more (interrupted, disk full, index out of reach); what is stored stays."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


def one_cell(
    prepared: session.Session, stop: threading.Event, say: Say, at: workplace.Workplace | None = None
) -> tuple[Document, Path, Summary]:
    """Measure the one cell of a session, or take what is stored: its document and where that lies. Raises Stopped."""
    summary = workplace.execute(prepared, lambda event: None, stop, resume=True, on_warning=say, at=at)
    if summary.problem:
        raise Stopped(summary.problem, 2)
    if summary.interrupted:
        raise Stopped("interrupted", 130)
    document = summary.documents[0]
    store = Store(own_results.results_folder(prepared.settings))
    return (
        document,
        store.path_of(document["hardware"]["profile"], document["stack"]["label"], document["key"]),
        summary,
    )


@dataclass(frozen=True)
class Target:
    """A point that can be probed. ``make`` gives the stack where its specification alone cannot (a commit)."""

    name: str  # as a report says it: a release, a commit, a stack
    spec: str
    make: Callable[[], Stack] | None = None
    # The packages that the question is about: other replaced ones move with them where they have to. None: exact.
    held: frozenset[str] = frozenset()
    base: str = ""  # of a commit: the stack that it is laid over

    def settle(self, say: Say) -> tuple[Stack, Target]:
        """Its stack, and itself with the specification that could be had."""
        if self.make:
            return replace(self.make(), name=self.spec), self
        if not self.held:
            return replace(stacks.resolve(self.spec, say=say), name=self.spec), self
        stack = stacks.resolve_compatible(self.spec, self.held, say=say)
        return stack, replace(self, spec=stack.name)


@dataclass(frozen=True)
class Point:
    """A probed target."""

    target: Target
    arms: Mapping[str, Answer]
    versions: Mapping[str, str] = field(default_factory=dict)
    moved: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # what the replaced packages took along
    document: str | None = None  # the stored measurement
    torchrun: Mapping[str, str] = field(default_factory=dict)  # arm -> the command by hand
    wall_s: float = 0.0  # of the probe: stack, launch, ranks
    stack_s: float = 0.0  # of which the stack took
    attempts: int = 0  # launched now; 0: read from what was stored

    def under(self, target: Target) -> Point:
        """The same stack asked for under another name."""
        return replace(self, target=replace(target, spec=self.target.spec))


class Probing(Protocol):
    """What a search asks of whoever probes: a case (Prober), or a script (external/scripts/prober.py)."""

    repeat: int
    points: dict[str, Point]

    @property
    def case(self) -> Any: ...  # slug, title, references

    @property
    def cell(self) -> Any: ...  # model, strategy, hardware

    @property
    def arms(self) -> Sequence[str]: ...

    @property
    def own_stack(self) -> Mapping[str, str]: ...  # arms that follow no release

    @property
    def notes(self) -> Sequence[str]: ...  # what a report says of how it was judged

    def __enter__(self) -> Probing: ...  # from here on, what its probes have in common is kept

    def __exit__(self, *error: object) -> None: ...

    def learn(self, good: Target, bad: Target) -> None: ...  # what counts as the failure, where nobody said it

    def base(self, spec: str) -> Stack: ...

    def probe(self, target: Target, repeat: int | None = None) -> Point: ...

    def confirmed(self, *targets: Target) -> bool: ...  # what the answer rests on; False: search again, it is not so

    def words(self, spec: str, arm: str) -> list[str]: ...  # the command that shows it on one stack


def one_case(name: str) -> Case:
    cases = catalogues.load().cases
    if name not in cases:
        raise unknown("case", name, cases, "the first argument is a case")
    return cases[name]


class Prober:
    """Probes of one cell. ``arms``: only these (the broken arm always among them); None: all that follow the stack.
    Between ``with`` and its end the probes share a workplace: a launcher, and what its servers have imported."""

    def __init__(
        self,
        asked: Request,
        say: Say,
        stop: threading.Event,
        arms: Sequence[str] | None = None,
    ) -> None:
        self.request = asked
        self.settings: RunSettings = asked.settings
        case = asked.selections[0].case[0]
        if case not in self.request.catalogue.cases:
            raise unknown("case", case, self.request.catalogue.cases)
        self.case = self.request.catalogue.cases[case]
        self.cell = _one_cell(self.request.cells, self.request.selections[0])
        named = overrides.expand("arm", arms or self.settings.arms or self.case.arms, self.case.arms)
        wanted = matrix.arms_of(self.case, named)
        self.own_stack = {arm: spec.stack for arm, spec in self.case.arms.items() if spec.stack and arm in wanted}
        self.arms = [arm for arm in wanted if arm not in self.own_stack]
        self.repeat = self.settings.repeat or self.case.repeat
        self.points: dict[str, Point] = {}
        self.notes: list[str] = []
        self.say = say
        self.stop = stop
        self.at: workplace.Workplace | None = None
        self._open: contextlib.ExitStack | None = None

    def __enter__(self) -> Prober:
        self._open = contextlib.ExitStack()
        return self

    def __exit__(self, *error: object) -> None:
        if self._open is not None:
            self._open.close()
        self.at = self._open = None

    def learn(self, good: Target, bad: Target) -> None:
        """A case's file says what its failure is."""

    def words(self, spec: str, arm: str) -> list[str]:
        """`repro run` of the arm on a stack, without settings of this machine's that have no bearing on the answer."""
        plain = spec.replace("==", "@")  # says the same, and needs no quotes
        stack = plain if re.fullmatch(r"[\w./@+:-]+", plain) else quoted(spec)
        texts = self.request.said(without=("case", "arms", "repeat", "results", "jobs", "keep"))
        return ["repro", "run", self.case.slug, *texts, f"stack={stack}", f"arms=[{arm}]"]

    def base(self, spec: str) -> Stack:
        """A stack that has to be there; raises what is wrong with it."""
        return stacks.resolve(spec, say=self.say)

    def probe(self, target: Target, repeat: int | None = None) -> Point:
        """Measure it, or read what is stored. Raises Stopped when no probe can be made any more."""
        wanted = max(repeat or 1, self.repeat)
        before = self.points.get(target.spec)
        if before is not None and (before.document is None or _attempts(before) >= wanted):
            return before.under(target)
        if self.stop.is_set():
            raise Stopped("interrupted", 130)
        began = time.monotonic()
        try:
            stack, settled = target.settle(self.say)
        except StackError as error:
            if self.stop.is_set():
                raise Stopped("interrupted", 130) from None
            if error.infra:
                raise Stopped(str(error), error.exit_code) from None
            # No such release, nothing for this Python, requirements that contradict each other: it cannot be known.
            why = Answer(
                None, f"cannot be installed: {labels.plain(str(error).removeprefix(f'stack {target.spec}: '))}"
            )
            point = Point(target, dict.fromkeys(self.arms, why), wall_s=time.monotonic() - began)
        else:
            point = self._measure(settled, stack, wanted, began)
        self.points[target.spec] = point
        self._tell(point)
        return point

    def confirmed(self, *targets: Target) -> bool:
        """A case's attempts are forked from warm servers in every run, and compared with cold ones there."""
        return True

    def _measure(self, target: Target, stack: Stack, repeat: int, began: float) -> Point:
        built = time.monotonic() - began
        asked = self.request.but(stack=target.spec, arms=self.arms, repeat=repeat)
        prepared = session.prepare(asked, given={target.spec: stack})
        if self._open is not None and self.at is None:
            gpus = [gpu for profile in prepared.profiles for gpu in profile.gpus]
            self.at = self._open.enter_context(workplace.workplace(self.settings.launcher.value, gpus, self.say))
        document, path, summary = one_cell(prepared, self.stop, self.say, self.at)
        arms = document["arms"]
        return Point(
            target,
            {arm: labels.of_cell(self.case.slug, arms.get(arm)) for arm in self.arms},
            dict(stack.versions),
            dict(stack.moved),
            str(path),
            {arm: line for arm in self.arms if (line := _torchrun(arms.get(arm)))},
            time.monotonic() - began,
            built,
            summary.attempts,
        )

    def _tell(self, point: Point) -> None:
        first = self.arms[0]
        answers = point.arms
        shown = answers[first].label or f"unknown ({answers[first].detail})"
        others = [arm for arm in self.arms[1:] if answers[arm].label != answers[first].label]
        more = f"; {len(others)} of {len(self.arms) - 1} other arms answer otherwise" if others else ""
        stored = not point.attempts and any(answer.counted for answer in answers.values())
        how = "stored before" if stored else f"{point.wall_s:.1f} s"
        self.say(f"{point.target.name}: {first} {shown}{more} ({how})")


def _attempts(point: Point) -> int:
    """How often its arms were launched: the fewest of those that were."""
    return min((answer.counted for answer in point.arms.values() if answer.counted), default=10**9)


def _torchrun(arm: Arm | None) -> str | None:
    return arm["attempts"][0]["observation"]["attempt"].get("torchrun") if arm and arm["attempts"] else None


def _one_cell(cells: list[matrix.Cell], selection: Selection) -> matrix.Cell:
    if len(cells) == 1:
        return cells[0]
    axes = [
        f"{name}={'|'.join(sorted(found))}"
        for name in ("model", "strategy")
        if len(found := {str(getattr(cell, name)) for cell in cells}) > 1
    ]
    axes += [f"flags.{name}=..." for name, values in selection.flags.items() if len(values) > 1]
    raise ConfigError(f"{selection.case[0]} has {len(cells)} cells here: choose one by {' '.join(axes) or 'one stack'}")
