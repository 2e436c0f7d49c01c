"""Probes of a script, for the searches of harness/bisection: one stack, launched, stored, never launched twice.

It stands where a case's prober does. What nobody said is learned at the ends of a search: which error is the failure,
and which value of a metric divides them.
"""

from __future__ import annotations

import os
import shlex
import threading
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from repro_matrix.config.selection import said as written
from repro_matrix.environment import machine as machine_module
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import Stack, StackError
from repro_matrix.errors import ConfigError, MeasureError
from repro_matrix.external.scripts import failure as failures
from repro_matrix.external.scripts.document import Document
from repro_matrix.external.scripts.failure import judge
from repro_matrix.external.scripts.forked import Forked, lines
from repro_matrix.external.scripts.measure import DEADLINE_S, Script, measure, once
from repro_matrix.grading.outcome import Outcome
from repro_matrix.records.document import Made
from repro_matrix.records.outcome import Outcome as Judged
from repro_matrix.search import labels
from repro_matrix.search.labels import Answer
from repro_matrix.search.prober import Point, Say, Stopped, Target

ARM = "script"  # the one arm that a script has
NOISE = 3.0  # the ends' means lie at least so many times their own spread apart
REPEAT = 3  # of an end whose metric may drift
TRIED = 2  # probes that are launched both ways


class Measured(NamedTuple):
    """``target``: with the releases that were taken. ``stack_s``: seconds until the stack was there."""

    document: Document
    target: Target
    stack: Stack
    stack_s: float
    launched: int


@dataclass
class ScriptProber:
    script: Script
    say: Say
    stop: threading.Event
    repeat: int = 1
    points: dict[str, Point] = field(default_factory=dict)
    arms: tuple[str, ...] = (ARM,)
    own_stack: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    launcher: str = "auto"  # torchrun: every probe from cold; warm: servers share no trunk
    forked: Forked | None = None  # from ``with`` on, unless its answers were not those of a start from cold
    tried: list[str] = field(default_factory=list)  # targets that were measured both ways, with the same answer

    def __enter__(self) -> ScriptProber:
        device = "cuda" if machine_module.detect().gpus else "cpu"
        if self.launcher != "torchrun" and lines(self.script.command, self.script.failure, device)[0]:
            self.forked = Forked(share=self.launcher == "auto")
        return self

    def __exit__(self, *error: object) -> None:
        if self.forked is not None:
            self.forked.close()
        self.forked = None

    @property
    def case(self) -> Any:
        """What reports say of a case, of a script: it has no references, and its own command is its title."""
        asked = self.script.failure.text or "any failure"
        title = f"{self.script.command.shown} (the failure: {asked})"
        return SimpleNamespace(slug=self.script.command.name, title=title, references=[])

    @property
    def cell(self) -> Any:
        return SimpleNamespace(model="", strategy="", hardware="auto")

    def base(self, spec: str) -> Stack:
        return stacks.resolve(spec, say=self.say)

    def words(self, spec: str, arm: str) -> list[str]:
        """`repro run` of the same on a stack."""
        script = self.script
        texts = [] if script.deadline_s == DEADLINE_S else [written("deadline", script.deadline_s)]
        texts += [written(f"env.{name}", value) for name, value in script.env.items()]
        return ["repro", "run", *texts, f"stack={spec}", "--", *_command(self.script)]

    # -- what is learned at the ends

    def learn(self, good: Target, bad: Target) -> None:
        """Make the definition one that can be compared. Raises what is wrong with the ends."""
        if self.script.failure.kind == "any":
            for end in (bad, good):
                known = self._learned(end)
                if known is not None:
                    self.script = replace(self.script, failure=known)
                    self.points.clear()
                    self.say(f"the failure is that of {end.name}: {known.text}")
                    told = known.text.replace("`", "'")
                    self.notes.append(f"No failure was named; it is that of {end.name}: `{told}`.")
                    return
        elif self.script.failure.kind == "metric" and not self.script.failure.op:
            self._divide(good, bad)

    def _learned(self, end: Target) -> failures.Failure | None:
        for attempt in self._document(end, self.repeat).document["attempts"]:
            known = failures.learned(Outcome.from_json(attempt["outcome"]))
            if attempt["outcome"]["outcome"] == "fires" and known is not None:
                return known
        return None

    def _divide(self, good: Target, bad: Target) -> None:
        """The value halfway between the ends, where they lie farther apart than their own noise."""
        name = self.script.failure.names_metric
        values = {end.name: self._values(end) for end in (good, bad)}
        means = {end: sum(found) / len(found) for end, found in values.items()}
        noise = max(max(found) - min(found) for found in values.values())
        low, high = means[good.name], means[bad.name]
        told = "; ".join(f"{end}: {', '.join(f'{value:g}' for value in found)}" for end, found in values.items())
        if abs(high - low) <= NOISE * noise or high == low:
            raise ConfigError(f"{name} does not differ by more than its noise ({noise:g}) at the two ends ({told})")
        op, limit = (">" if high > low else "<"), (low + high) / 2
        self.script = replace(self.script, failure=replace(self.script.failure, op=op, limit=limit))
        self.repeat = max(self.repeat, REPEAT if noise else 1)
        self.points.clear()
        self.say(f"bad is {name} {op} {limit:g} ({told})")
        self.notes.append(f"Bad is {name} {op} {limit:g}, halfway between the ends ({told}; noise {noise:g}).")

    def _values(self, end: Target) -> list[float]:
        made = self._document(end, max(self.repeat, REPEAT)).document["attempts"]
        found = [failures.printed_values(each["observation"]) for each in made]
        if not all(found):
            reason = next(each["outcome"]["reason"] for each, had in zip(made, found) if not had)
            raise MeasureError(f"{end.name}: {reason}")
        return [values[-1][1] for values in found]

    # -- probes

    def probe(self, target: Target, repeat: int | None = None) -> Point:
        """Measure it, or read what is stored. Raises Stopped when no probe can be made any more."""
        wanted = max(repeat or 1, self.repeat)
        before = self.points.get(target.spec)
        if before is not None and (before.document is None or before.arms[ARM].counted >= wanted):
            return before.under(target)
        began = time.monotonic()
        try:
            made = self._document(target, wanted)
        except StackError as error:
            if self.stop.is_set():
                raise Stopped("interrupted", 130) from None
            if error.infra:
                raise Stopped(str(error), error.exit_code) from None
            why = labels.plain(str(error).removeprefix(f"stack {target.spec}: "))
            point = Point(target, {ARM: Answer(None, f"cannot be installed: {why}")})
        else:
            point = Point(
                made.target,
                {ARM: self._answer(made.document)},
                dict(made.stack.versions),
                dict(made.stack.moved),
                str(self.script.path(made.stack)),
                {ARM: self.script.command.shown},
                time.monotonic() - began,
                made.stack_s,
                made.launched,
            )
        self.points[target.spec] = point
        answer = point.arms[ARM]
        how = f"{point.wall_s:.1f} s" if point.attempts else "stored before"
        said = f"{answer.label}: {answer.detail}" if answer.label == labels.FIRES else answer.label
        self.say(f"{target.name}: {said or f'unknown ({answer.detail})'} ({how})")
        return point

    def confirmed(self, *targets: Target) -> bool:
        """The releases that an answer rests on, launched from cold where they were only forked: forked ranks share what
        their server was started with, a hash seed among others. False: one answers otherwise, and from now on every
        probe starts from cold."""
        for target in targets:
            if self.forked is None or target.spec in self.tried:
                continue
            asked, point = self._asked(target)
            stack, _ = target.settle(self.say)
            document, launched = measure(self.script, stack, max(1, point.arms[ARM].counted), self.stop)
            if self.stop.is_set():
                raise Stopped("interrupted", 130)
            cold, warm = self._answer(document), point.arms[ARM]
            # A metric has another value each time, a message another address.
            if cold.label == warm.label and failures.normal(cold.whole or "") == failures.normal(warm.whole or ""):
                self.points[asked] = replace(point, attempts=point.attempts + launched)
                self.tried.append(target.spec)
                continue
            told = f"from cold {target.name} is {cold.label or cold.detail}, and forked from a server {warm.label}"
            self.say(f"{told}: every probe starts from cold")
            self.notes.append(f"{told[0].upper()}{told[1:]}: the search was made again, every probe from cold.")
            self.forked.close()
            self.forked = None
            self.points = {spec: each for spec, each in self.points.items() if each.target.spec in self.tried}
            return False
        return True

    def _asked(self, target: Target) -> tuple[str, Point]:
        """The probe of a target, and what it was asked as: what could be had may be less (``Target.settle``)."""
        return next((spec, each) for spec, each in self.points.items() if target.spec in (spec, each.target.spec))

    def _answer(self, document: Document) -> Answer:
        made = document["attempts"]
        if self.script.failure.kind == "any":  # each error is an answer of its own, and not one failure
            made = [Made(observation=each["observation"], outcome=_as_other(each["outcome"])) for each in made]
        return labels.answer(self.script.command.name, made)

    def _document(self, target: Target, repeat: int) -> Measured:
        if self.stop.is_set():
            raise Stopped("interrupted", 130)
        began = time.monotonic()
        stack, settled = target.settle(self.say)
        built = time.monotonic() - began
        document, launched = self._measured(settled, stack, repeat)
        if self.stop.is_set():
            raise Stopped("interrupted", 130)
        return Measured(document, settled, stack, built, launched)

    def _measured(self, target: Target, stack: Stack, repeat: int) -> tuple[Document, int]:
        """The first probes (the ends, of most searches) start from cold and are forked, too; where that is not the same
        answer, all others start from cold."""
        if self.forked is None or (len(self.tried) >= TRIED and target.spec not in self.tried):
            return measure(self.script, stack, repeat, self.stop, forked=self.forked)
        document, launched = measure(self.script, stack, 1, self.stop)
        outcome = document["attempts"][-1]["outcome"] if document["attempts"] else None
        if launched and outcome and outcome["outcome"] != "infra" and not self.stop.is_set():
            self._both_ways(target, stack, outcome)
            launched += 1
        document, more = measure(self.script, stack, repeat, self.stop, forked=self.forked)
        return document, launched + more

    def _both_ways(self, target: Target, stack: Stack, outcome: Judged) -> None:
        assert self.forked is not None
        found = once(self.script, stack, "cpu", self.stop, self.forked)
        if self.stop.is_set():
            return  # it was interrupted, which says nothing of how it was started
        attempt = found["attempt"]
        again: Judged = judge(self.script.failure, found, self.script.command.name).to_json()
        if attempt["launcher"] != Forked.name:
            self.say(f"every probe starts from cold: {attempt.get('cold')}")
        elif not _alike(outcome, again):
            self.say(f"every probe starts from cold: forked from a server it is {_said(again)}, not {_said(outcome)}")
            self.notes.append(
                f"Forked from a server it was {_said(again)} at {target.name}: every probe started from cold."
            )
        else:
            self.tried.append(target.spec)
            return
        self.forked.close()
        self.forked = None


def _alike(one: Judged, other: Judged) -> bool:
    """Whether two ways to launch agree: in what failed and where, not in which of several ranks was first."""
    return one["outcome"] == other["outcome"] and _failed(one) == _failed(other)


def _failed(outcome: Judged) -> tuple[str | None, str, str] | None:
    primary = outcome["primary"]
    return (primary.get("kind"), primary["type"], primary["where"]) if primary else None


def _said(outcome: Judged) -> str:
    return outcome["reason"] or outcome["outcome"]


def _as_other(outcome: Judged) -> Judged:
    return {**outcome, "outcome": "other_error", "recognised": []} if outcome["outcome"] == "fires" else outcome


def _command(script: Script) -> list[str]:
    """The command with the script as a person names it from here."""
    words = shlex.split(script.command.shown)
    return [os.path.relpath(word) if word.startswith(os.getcwd() + os.sep) else word for word in words]
