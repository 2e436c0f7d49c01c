"""One search over settings: does it fire as given, how often, and then ever smaller; what was asked, in order."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from repro_matrix.errors import ConfigError, MeasureError
from repro_matrix.search.prober import Stopped
from repro_matrix.search.reduce import parameters as knobbing
from repro_matrix.search.reduce.parameters import Config, Knob, Shrunk
from repro_matrix.search.reduce.probe import FIRST, Asked, repeats
from repro_matrix.search.reduce.search import Answer, Trail

Say = Callable[[str], None]


class Asker(Protocol):
    def ask(self, config: Config, repeat: int) -> Asked: ...


@dataclass
class Search:
    """``budget``: attempts that may be launched, None for any number. ``repeat``: of what does not fire."""

    asker: Asker
    knobs: tuple[Knob, ...]
    say: Say
    budget: int | None = None
    repeat: int = 1
    asked: dict[Config, Asked] = field(default_factory=dict)  # in the order of asking
    notes: list[str] = field(default_factory=list)
    attempts: int = 0
    wall_s: float = 0.0
    stopped: Stopped | None = None
    spent: bool = False

    @property
    def given(self) -> Config:
        return tuple(knob.given for knob in self.knobs)

    def first(self) -> Asked:
        """What is given fires. Raises what is wrong with it."""
        found = self.ask(self.given, self.repeat)
        if found.answer is None:
            raise MeasureError(f"as it is given it gives no answer: {found.said.detail}")
        if not found.answer:
            raise ConfigError(f"as it is given it does not fire: {found.words}")
        return found

    def run(self) -> Shrunk:
        """``first`` was asked. What is left when the budget or the user ends it is still a configuration that fires."""
        shrunk = Shrunk(self.given)
        try:
            while True:
                shrunk = Shrunk(self.given)
                trail = Trail(self._probe, None, self.repeat, {self.given: True})
                if self.budget is not None:
                    trail.budget = max(0, self.budget - self.attempts)
                knobbing.shrink(self.knobs, trail, shrunk)
                if not shrunk.done or self._spent(FIRST - 1) or not self._flaky(shrunk):
                    break
        except Stopped as stopped:
            self.stopped = stopped
        return shrunk

    def unsure(self, shrunk: Shrunk) -> list[str]:
        """What is left although nobody could say whether it has to be: the machine got in the way, twice."""
        found = []
        for index, (knob, value) in enumerate(zip(self.knobs, shrunk.config)):
            out = self.asked.get((*shrunk.config[:index], knob.simplest, *shrunk.config[index + 1 :]))
            if value != knob.simplest and out is not None and out.by_chance:
                found.append(f"{knob.name} ({out.said.detail})")
        return found

    def _flaky(self, shrunk: Shrunk) -> bool:
        """What is left is launched some times more. Where it does not fire every time, the whole is asked again, and
        what does not fire so often that it would have: one clean attempt is no proof then."""
        found = self.ask(shrunk.config, max(FIRST, self.repeat))
        if not found.said.flaky or self.repeat >= repeats(found.said):
            return False
        self.repeat = repeats(found.said)
        rate = f"{found.said.fired} of {found.said.counted} times"
        self.notes.append(f"It is flaky: {rate} it fired. What does not fire was launched {self.repeat} times.")
        self.say(self.notes[-1])
        return True

    def _spent(self, more: int) -> bool:
        return self.budget is not None and self.attempts + more > self.budget

    def _probe(self, config: Config) -> tuple[Answer, int]:
        before = self.asked.get(config)
        if before is not None and (before.answer is True or before.said.counted >= self.repeat or not before.document):
            return before.answer, 0
        found = self.ask(config, self.repeat)
        return found.answer, found.attempts

    def ask(self, config: Config, repeat: int) -> Asked:
        began = time.monotonic()
        found = self.asker.ask(config, repeat)
        if found.by_chance and not self._spent(1):
            again = self.asker.ask(config, repeat)
            found = replace(again, attempts=again.attempts + found.attempts)
        self.asked[config] = found
        self.attempts += found.attempts
        took = time.monotonic() - began
        self.wall_s += took
        changed = [
            f"{knob.name}={value}" for knob, value in zip(self.knobs, config) if value != knob.given
        ]  # fmt: skip
        how = f"{took:.1f} s" if found.attempts else "stored before" if found.document else "not launched"
        self.say(f"{len(self.asked)}: {' '.join(changed) or 'as given'}: {found.words} ({how})")
        return found
