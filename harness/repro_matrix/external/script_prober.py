"""Probe a user's script. The two ends of a search may define its failure."""

from __future__ import annotations

import os
import shlex
import threading
from dataclasses import replace

from repro_matrix.config.adhoc import VARIANT
from repro_matrix.config.selection import override_text as written
from repro_matrix.environment.stacks import Stack
from repro_matrix.errors import ConfigError, MeasureError
from repro_matrix.external.adhoc_case import DEADLINE_S, Failure, Script, in_shell, learned
from repro_matrix.records.outcome import Outcome
from repro_matrix.search.prober import Prober, Say, Target

NOISE = 3.0  # minimum distance of the two ends' means, in spreads of one end
REPEAT = 3  # attempts of an end, for the noise of its metric


class ScriptProber(Prober):
    def __init__(self, script: Script, say: Say, stop: threading.Event, repeat: int | None = None) -> None:
        self.script = script
        super().__init__(script.request(repeat=repeat), say, stop)

    def resolve(self, target: Target) -> Stack:
        return in_shell(super().resolve(target))

    def use(self, failure: Failure) -> None:
        """Use another definition of the failure. Stored attempts are graded again, not launched again."""
        self.script = replace(self.script, failure=failure)
        self.request = self.script.request(repeat=self.settings.repeat)
        self.case = self.request.catalogue.cases[self.script.slug]
        self.points.clear()

    def command(self, spec: str, variant: str) -> list[str]:
        """Return the `repro run` command of the script on a stack."""
        script = self.script
        texts = [] if script.deadline_s == DEADLINE_S else [written("deadline", script.deadline_s)]
        texts += [written(f"env.{name}", value) for name, value in script.env]
        words = shlex.split(script.command.shown)
        here = [os.path.relpath(word) if word.startswith(os.getcwd() + os.sep) else word for word in words]
        return ["repro", "run", *texts, f"stack={spec}", "--", *here]

    def learn(self, good: Target, bad: Target) -> None:
        """Complete the definition of the failure from the ends. Raises ConfigError or MeasureError."""
        if not self.script.failure.text:
            for end in (bad, good):
                failure = self._failure_of(end)
                if failure is not None:
                    self.use(failure)
                    self.say(f"the failure is that of {end.name}: {failure.text}")
                    text = failure.text.replace("`", "'")
                    self.notes.append(f"No failure was given; it is that of {end.name}: `{text}`.")
                    return
        elif self.script.failure.needs_limit:
            self._find_limit(good, bad)

    def _failure_of(self, end: Target) -> Failure | None:
        for made in self.document(end, self.repeat)["variants"][VARIANT]["attempts"]:
            outcome = Outcome.from_json(made["outcome"])
            if outcome.outcome == "other_failure":
                return learned(outcome, made)
        return None

    def _find_limit(self, good: Target, bad: Target) -> None:
        """Use the value halfway between the ends as the limit. They have to differ by more than their noise."""
        metric = self.script.failure.metric
        assert metric is not None
        values = {end.name: self._values(end) for end in (good, bad)}
        low, high = (sum(values[end.name]) / len(values[end.name]) for end in (good, bad))
        noise = max(max(each) - min(each) for each in values.values())
        ends = "; ".join(f"{name}: {', '.join(f'{value:g}' for value in each)}" for name, each in values.items())
        if abs(high - low) <= NOISE * noise or high == low:
            raise ConfigError(f"{metric.name} differs by no more than its noise ({noise:g}) at the two ends ({ends}).")
        limit = metric.model_copy(update={"op": ">" if high > low else "<", "limit": (low + high) / 2})
        self.use(replace(self.script.failure, metric=limit))
        self.repeat = max(self.repeat, REPEAT if noise else 1)
        self.say(f"bad is {metric.name} {limit.op} {limit.limit:g} ({ends})")
        text = f"Bad is {metric.name} {limit.op} {limit.limit:g}, halfway between the ends ({ends}; noise {noise:g})."
        self.notes.append(text)

    def _values(self, end: Target) -> list[float]:
        attempts = self.document(end, max(self.repeat, REPEAT))["variants"][VARIANT]["attempts"]
        printed = [made["observation"].get("printed") for made in attempts]
        for made, each in zip(attempts, printed):
            if not each or not each["metric"]:
                raise MeasureError(f"{end.name}: {made['outcome']['reason']}")
        return [each["metric"][-1]["value"] for each in printed if each]
