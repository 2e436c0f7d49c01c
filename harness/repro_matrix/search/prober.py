"""Probe one cell of one case on one stack. A probe is stored like every run and never repeated.

Its outcome is stored at once in the ordinary results folder: to continue an interrupted search, run the same command
again.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from repro_matrix.config import catalog
from repro_matrix.config import selection as overrides
from repro_matrix.config.schema import Case
from repro_matrix.config.selection import Selection, quoted
from repro_matrix.config.settings import RunSettings
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import Stack, StackError
from repro_matrix.errors import ConfigError, unknown
from repro_matrix.planning.cells import Cell, variants_of
from repro_matrix.records.document import Variant
from repro_matrix.results import local
from repro_matrix.results.store import Document, Store
from repro_matrix.runner import session, workspace
from repro_matrix.runner.engine import Summary
from repro_matrix.runner.request import Request
from repro_matrix.search import labels
from repro_matrix.search.labels import Answer

Say = Callable[[str], None]


class Stopped(Exception):
    """No more probes are possible (interrupted, disk full, package index unreachable); the stored ones stay."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Target:
    """A point that can be probed. ``make`` returns the stack of a commit, which has no specification."""

    name: str  # in a report, such as transformers 4.40.0
    spec: str
    make: Callable[[], Stack] | None = None
    # Packages that keep their versions; other replaced ones may move where they have to. Empty: all keep theirs.
    fixed: frozenset[str] = frozenset()
    base: str = ""  # of a commit: the stack below it

    def settle(self, say: Say) -> tuple[Stack, Target]:
        """Return its stack, and the target with the specification that could be installed."""
        if self.make:
            return replace(self.make(), name=self.spec), self
        if not self.fixed:
            return replace(stacks.resolve(self.spec, say=say), name=self.spec), self
        stack = stacks.resolve_compatible(self.spec, self.fixed, say=say)
        return stack, replace(self, spec=stack.name)


@dataclass(frozen=True)
class Point:
    """A probed target."""

    target: Target
    variants: Mapping[str, Answer]
    versions: Mapping[str, str] = field(default_factory=dict)
    moved: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # other packages that had to change
    document: str | None = None  # the stored measurement
    torchrun: Mapping[str, str] = field(default_factory=dict)  # variant -> the command to run it manually
    wall_s: float = 0.0  # of the probe: stack, launch, ranks
    stack_s: float = 0.0  # of which the stack took
    attempts: int = 0  # launched now; 0: read from the store

    @property
    def counted(self) -> int:
        """Return the smallest number of counted attempts among the variants that have any."""
        return min((answer.counted for answer in self.variants.values() if answer.counted), default=10**9)


def one_cell(
    prepared: session.Session, stop: threading.Event, say: Say, place: workspace.Workplace | None = None
) -> tuple[Document, Path, Summary]:
    """Measure the one cell of a session, or read its stored result. Raises Stopped."""
    summary = workspace.execute(prepared, lambda event: None, stop, resume=True, on_warning=say, at=place)
    if summary.problem:
        raise Stopped(summary.problem, 2)
    if summary.interrupted:
        raise Stopped("interrupted", 130)
    document = summary.documents[0]
    store = Store(local.results_folder(prepared.settings))
    path = store.path_of(document["hardware"]["profile"], document["stack"]["label"], document["cell_id"])
    return document, path, summary


def one_case(name: str) -> Case:
    cases = catalog.load().cases
    if name not in cases:
        raise unknown("case", name, cases, "the first argument is a case")
    return cases[name]


class Prober:
    """Probes of one cell. ``variants``: only these (the first variant always among them); None: all that follow the
    stack. Inside ``with`` the probes share a launcher."""

    def __init__(
        self, request: Request, say: Say, stop: threading.Event, variants: Sequence[str] | None = None
    ) -> None:
        self.request = request
        self.settings: RunSettings = request.settings
        name = request.selections[0].case[0]
        if name not in request.catalogue.cases:
            raise unknown("case", name, request.catalogue.cases)
        self.case = request.catalogue.cases[name]
        self.cell = _one_cell(request.cells, request.selections[0])
        named = overrides.expand(
            "variant", variants or self.settings.variants or self.case.variants, self.case.variants
        )
        wanted = variants_of(self.case, named)
        self.own_stack = {
            variant: spec.stack for variant, spec in self.case.variants.items() if spec.stack and variant in wanted
        }
        self.variants = [variant for variant in wanted if variant not in self.own_stack]
        self.repeat = self.settings.repeat or self.case.repeat
        self.points: dict[str, Point] = {}
        self.notes: list[str] = []  # how the failure was defined, for the report
        self.say, self.stop = say, stop
        self.place: workspace.Workplace | None = None
        self._open: contextlib.ExitStack | None = None

    def __enter__(self) -> Prober:
        self._open = contextlib.ExitStack()
        return self

    def __exit__(self, *error: object) -> None:
        if self._open is not None:
            self._open.close()
        self.place = self._open = None

    def learn(self, good: Target, bad: Target) -> None:
        """Define the failure by the two ends if the user did not. A case's file defines its failure."""

    def command(self, spec: str, variant: str) -> list[str]:
        """Return the `repro run` command of the variant on a stack, without settings that cannot change the result."""
        plain = spec.replace("==", "@")  # equivalent, and needs no quotes
        stack = plain if re.fullmatch(r"[\w./@+:-]+", plain) else quoted(spec)
        texts = self.request.said(without=("case", "variants", "repeat", "results", "jobs", "keep"))
        return ["repro", "run", self.case.slug, *texts, f"stack={stack}", f"variants=[{variant}]"]

    def base(self, spec: str) -> Stack:
        """Return a stack. Raises StackError."""
        return stacks.resolve(spec, say=self.say)

    def settle(self, target: Target) -> tuple[Stack, Target]:
        return target.settle(self.say)

    def probe(self, target: Target, repeat: int | None = None) -> Point:
        """Measure the target, or read its stored result. Raises Stopped."""
        wanted = max(repeat or 1, self.repeat)
        before = self.points.get(target.spec)
        if before is not None and (before.document is None or before.counted >= wanted):
            return replace(before, target=replace(target, spec=before.target.spec))
        if self.stop.is_set():
            raise Stopped("interrupted", 130)
        began = time.monotonic()
        try:
            stack, settled = self.settle(target)
        except StackError as error:
            if self.stop.is_set():
                raise Stopped("interrupted", 130) from None
            if error.infra_error:
                raise Stopped(str(error), error.exit_code) from None
            # No such release, none for this Python, contradictory requirements: the answer is unknown.
            reason = labels.plain(str(error).removeprefix(f"stack {target.spec}: "))
            unknown_answer = Answer(None, f"cannot be installed: {reason}")
            point = Point(target, dict.fromkeys(self.variants, unknown_answer), wall_s=time.monotonic() - began)
        else:
            point = self._measure(settled, stack, wanted, began)
        self.points[target.spec] = point
        self._report(point)
        return point

    def documents(self, target: Target, repeat: int) -> Document:
        """Return the result of a target, measured now unless it is stored."""
        stack, settled = self.settle(target)
        return self._cell(settled, stack, repeat)[0]

    def _cell(self, target: Target, stack: Stack, repeat: int) -> tuple[Document, Path, Summary]:
        request = self.request.but(stack=target.spec, variants=self.variants, repeat=repeat)
        prepared = session.prepare(request, given={target.spec: stack})
        if self._open is not None and self.place is None:
            gpus = [gpu for profile in prepared.profiles for gpu in profile.gpus]
            self.place = self._open.enter_context(workspace.workplace(self.settings.launcher.value, gpus, self.say))
        return one_cell(prepared, self.stop, self.say, self.place)

    def _measure(self, target: Target, stack: Stack, repeat: int, began: float) -> Point:
        built = time.monotonic() - began
        document, path, summary = self._cell(target, stack, repeat)
        variants = document["variants"]
        return Point(
            target,
            {variant: labels.of_cell(self.case.slug, variants.get(variant)) for variant in self.variants},
            dict(stack.versions),
            dict(stack.moved),
            str(path),
            {variant: line for variant in self.variants if (line := _torchrun(variants.get(variant)))},
            time.monotonic() - began,
            built,
            summary.attempts,
        )

    def _report(self, point: Point) -> None:
        answers = [point.variants[variant] for variant in self.variants]
        others = sum(answer.label != answers[0].label for answer in answers)
        more = f"; {others} of {len(answers) - 1} other variants have another result" if others else ""
        stored = not point.attempts and any(answer.counted for answer in answers)
        how = "stored" if stored else f"{point.wall_s:.1f} s"
        self.say(f"{point.target.name}: {self.variants[0]} {answers[0]}{more} ({how})")


def _torchrun(variant: Variant | None) -> str | None:
    return variant["attempts"][0]["observation"]["attempt"].get("torchrun") if variant and variant["attempts"] else None


def _one_cell(cells: list[Cell], selection: Selection) -> Cell:
    if len(cells) == 1:
        return cells[0]
    axes = [
        f"{name}={'|'.join(sorted(values))}"
        for name in ("model", "strategy")
        if len(values := {str(getattr(cell, name)) for cell in cells}) > 1
    ]
    axes += [f"flags.{name}=..." for name, values in selection.flags.items() if len(values) > 1]
    raise ConfigError(
        f"{selection.case[0]} has {len(cells)} cells here. Choose one by {' '.join(axes) or 'one stack'}."
    )
