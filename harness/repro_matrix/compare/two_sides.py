"""Compare the numbers of two trainings: stacks, ranks, arguments or scripts.

Each side is launched once with a trace (launch/worker/tracer), and the good one again with noise of
one unit of rounding, which measures the tolerance of every tensor (repro_matrix.traces). Runs are
stored like those of `repro run ./train.py`, together with their traces, and none is repeated.
``NumbersProber`` asks the same question at each probe of a bisection.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from repro_matrix.config.schema import VARIANT
from repro_matrix.config.vocabulary import RELEVANT
from repro_matrix.environment.stacks import Stack, version_differences
from repro_matrix.errors import MeasureError
from repro_matrix.launch.torchrun import COMMAND
from repro_matrix.records.document import Document, GradedAttempt
from repro_matrix.results import runs
from repro_matrix.runner.adhoc_case import Script
from repro_matrix.runner.tracing import NOISE, stored_trace
from repro_matrix.search.prober import (
    OTHER_SIZE,
    PASSED,
    REPRODUCED,
    CellRunner,
    ProbeAnswer,
    SameResult,
    Target,
)
from repro_matrix.search.script_prober import ScriptProber
from repro_matrix.text import counted, first_line, log
from repro_matrix.traces.comparison import grid, locate
from repro_matrix.traces.location import Location
from repro_matrix.traces.reader import Trace


@dataclass(frozen=True)
class Window:
    """Choose the steps that are traced."""

    steps: int = 3
    first: int = 0

    def variables(self, noise: int | None = None) -> dict[str, str]:
        """Return the tracer's variables; after the window the tracer ends the script.

        ``noise``: the seed of its signs.
        """
        found = {
            "REPRO_TRACE_STEPS": str(self.steps),
            "REPRO_TRACE_FROM": str(self.first),
            "REPRO_TRACE_STOP": "1",
        }
        if noise is not None:
            found["REPRO_TRACE_NOISE"] = str(noise)
        return found

    def words(self) -> list[str]:
        """Return the options that differ from the usual ones."""
        steps = ["--steps", str(self.steps)] if self.steps != 3 else []
        first = ["--from-step", str(self.first)] if self.first else []
        return steps + first


@dataclass(frozen=True)
class Traced:
    """Hold one traced run; ``launched``: by this command, not read from the store."""

    script: Script
    stack: Stack
    made: GradedAttempt
    trace: Trace
    document: Path
    launched: bool

    @property
    def problem(self) -> str:
        """Return how the script failed, why it has no trace, or nothing."""
        outcome = self.made["outcome"]
        if outcome["outcome"] != "passed":
            return first_line(outcome["reason"])
        logs = "\n".join(rank["log_tail"] for rank in self.made["observation"]["ranks"])
        found = re.search(r"no trace of this process: .*", logs)
        return found[0] if found else ""

    def to_json(self) -> dict[str, Any]:
        return {
            "command": self.script.command.shown,
            "ranks": self.script.command.nproc,
            "stack": self.stack.name,
            "versions": dict(self.stack.versions),
            "outcome": self.made["outcome"]["outcome"],
            "problem": self.problem,
            "document": str(self.document),
            "trace": str(self.trace.folder),
            "launched": self.launched,
        }


def traced(
    runner: CellRunner, script: Script, stack: Stack, window: Window, noise: int | None = None
) -> Traced:
    """Launch a script with a trace, or read its stored run.

    Raises Stopped, and MeasureError if nothing ran.
    """
    script = replace(script, trace=window.variables(noise))
    request = script.request()
    kind = "" if noise is None else f", rounding noise {noise}"
    starting = f"running {script.command.shown} on stack {stack.name}{kind}"
    document, path, launched = runner.measure(request, stack, [VARIANT], 1, starting)
    trace = stored_trace(document, runs.results_folder(request.settings))
    variant = document["variants"][VARIANT]
    if trace is None:
        reason = variant["skipped"] or variant["attempts"][0]["outcome"]["reason"]
        raise MeasureError(f"{script.command.shown} on stack {stack.name}: {reason}")
    made = variant["attempts"][0]
    return Traced(script, stack, made, trace, path, launched > 0)


class GoodSide:
    """Hold the run of the good side, and its runs with noise.

    Raises Stopped, and MeasureError if it did not train.
    """

    def __init__(self, runner: CellRunner, script: Script, stack: Stack, window: Window) -> None:
        self.run = traced(runner, script, stack, window)
        if not self.run.trace.steps:
            problem = (
                self.run.problem
                or "it ended by itself. Does it train? Is --from-step beyond its last step?"
            )
            raise MeasureError(
                f"{script.command.shown} on stack {stack.name} made no traced step: {problem}"
            )
        self.noise = [
            self._noise(runner, script, stack, window, seed) for seed in range(1, NOISE + 1)
        ]

    def _noise(
        self, runner: CellRunner, script: Script, stack: Stack, window: Window, seed: int
    ) -> Traced:
        """Return a run with noise.

        It starts with torchrun if a forked run does not end as the run without noise.
        """
        run = traced(runner, script, stack, window, seed)
        cold = run.made["observation"]["attempt"]["launcher"] == COMMAND
        if not cold and (run.problem, len(run.trace.steps)) != (
            self.run.problem,
            len(self.run.trace.steps),
        ):
            run.document.unlink()
            return traced(runner, replace(script, forks=False), stack, window, seed)
        return run

    @property
    def noise_traces(self) -> list[Trace]:
        return [each.trace for each in self.noise]

    def locate(self, bad: Trace) -> Location:
        return locate(self.run.trace, bad, self.noise_traces)

    def grid(self, bad: Trace) -> dict[str, Any]:
        """Return steps across, modules down (traces.comparison.grid)."""
        return grid(self.run.trace, bad, self.noise_traces)


@dataclass(frozen=True)
class Comparison:
    location: Location
    good: GoodSide
    bad: Traced

    @property
    def exit_code(self) -> int:
        return {"agrees": 0, "differs": 1}.get(self.location.verdict, 3)

    @property
    def versions(self) -> dict[str, tuple[str, str]]:
        """Return the packages that differ."""
        return version_differences(self.good.run.stack.versions, self.bad.stack.versions)

    def to_json(self) -> dict[str, Any]:
        location = self.location
        good = self.good
        return {
            "schema": 1,
            "verdict": location.verdict,
            "sentence": location.sentence(),
            "location": location.to_json(),
            "good": good.run.to_json(),
            "bad": self.bad.to_json(),
            "noise": [each.to_json() for each in good.noise],
            "versions": {name: list(pair) for name, pair in self.versions.items()},
        }


def compare_trainings(
    runner: CellRunner, good: tuple[Script, Stack], bad: tuple[Script, Stack], window: Window
) -> Comparison:
    """Launch both sides and the noise runs of the good one."""
    trusted = GoodSide(runner, *good, window)
    other = traced(runner, *bad, window)
    return Comparison(trusted.locate(other.trace), trusted, other)


# -- as lines for a terminal


def describe_comparison(found: Comparison) -> Iterator[str]:
    """Yield the answer first, then what supports it."""
    location = found.location
    coverage = location.coverage
    why = ""
    if location.verdict == "inconclusive" and found.bad.problem:
        why = f" ({found.bad.problem})"
    yield f"{location.sentence()}{why}"
    if coverage.seldom[0] and location.verdict == "agrees":
        yield (
            "  some parameters are updated less often than others, as of a second optimizer:"
            " --steps N compares more"
        )
    if location.last_agreeing:
        yield f"  the last that agrees: {location.last_agreeing}"
    yield from (f"  also: {text}" for text in location.also)
    stages = ", ".join(f"{name} {count}" for name, count in coverage.stages.items())
    yield f"  compared: {counted(coverage.aligned, 'tensor')}" + (f" ({stages})" if stages else "")
    if coverage.not_compared:
        yield f"  not compared: {coverage.not_compared} without a counterpart or of other shapes"
    alone = {"good": coverage.only_good, "bad": coverage.only_bad}
    yield f"  samples: {coverage.shared} on both sides" + "".join(
        f", {count} only on the {name} side" for name, count in alone.items() if count
    )
    for name, side, strategy in (
        ("good", found.good.run, coverage.good),
        ("bad", found.bad, coverage.bad),
    ):
        yield (
            f"  {name}: {side.script.command.shown} on stack {side.stack.name}; what ran:"
            f" {strategy or 'unknown'}"
        )
        if side.problem:
            yield f"    it did not end well: {side.problem}"
    pairs = [
        f"{name} {one or 'absent'} -> {other or 'absent'}"
        for name, (one, other) in found.versions.items()
        if name in RELEVANT or (one and other)
    ]
    versions = ", ".join(pairs) or "the same on both sides"
    if others := len(found.versions) - len(pairs):
        versions += f"; {counted(others, 'other package')} on one side only"
    yield f"  versions: {versions}"
    yield from (f"  note: {text}" for text in coverage.notes)


# -- bisections


class NumbersProber(ScriptProber):
    """Probe for a difference from the good end that rounding does not explain.

    With a bad end, only a difference at the same place and of the same size is the failure. Another
    place or size is another failure.
    """

    def __init__(self, script: Script, window: Window) -> None:
        self.window = window
        self.wanted: Location | None = None  # of the bad end
        self._found: list[Location] = []  # one of each size at each place
        super().__init__(replace(script, trace=window.variables()))

    def measure_good(self, good: Target) -> None:
        """Trace the good end, also with noise."""
        self.good = GoodSide(self, self.script, self.resolve(good), self.window)

    def learn(self, good: Target, bad: Target) -> None:
        """Trace the good end, and define the failure by the bad end."""
        self.measure_good(good)
        other = traced(self, self.script, self.resolve(bad), self.window)
        self.ends = {good.name: self.good.run.stack, bad.name: other.stack}
        found = self.good.locate(other.trace)
        if found.verdict == "inconclusive":
            why = f" ({other.problem})" if other.problem else ""
            raise MeasureError(
                f"{bad.name} cannot be compared with {good.name}: {found.reason}{why}"
            )
        if found.verdict == "agrees":
            raise SameResult(
                f"Cannot bisect: the numbers of {bad.name} do not differ from those of {good.name}:"
                f" {found.sentence()}. --steps N compares more. They may also depend on:"
            )
        self.wanted = found
        self._found = [found]
        self.place = {**found.to_json(), "sentence": found.sentence()}
        self.use(
            replace(self.script.failure, text=f"the numbers differ: {found.stage}, {found.place}")
        )
        log(f"{bad.name} differs from {good.name}: {found.sentence()}")

    def command(self, spec: str, variant: str) -> list[str]:
        """Return the `repro compare` command of the good end and a stack."""
        good = self.good.run.stack.name
        if spec == good:
            return super().command(spec, variant)
        return self.words(
            ["repro", "compare"], ["--good", good, "--bad", spec, *self.window.words()]
        )

    def answer(self, document: Document, variant: str, stack: Stack) -> ProbeAnswer:
        answer = super().answer(document, variant, stack)
        trace = stored_trace(document, runs.results_folder(self.settings))
        if trace is None:
            return answer
        found = self.good.locate(trace)
        detail = found.sentence()
        wanted = self.wanted
        if answer.label == PASSED:
            answer = replace(
                answer, label=PASSED if found.verdict == "agrees" else None, detail=detail
            )
        elif wanted is None:
            return answer
        if found.verdict != "differs":
            return answer
        first = next((each for each in self._found if found.repeats(each)), found)
        if first is found:
            self._found.append(found)
        if wanted in (None, first):
            return replace(
                answer,
                label=REPRODUCED,
                detail=detail,
                reproductions=1,
                counted=1,
                failure=first.failure,
            )
        if wanted and (found.stage, found.place) == (wanted.stage, wanted.place):
            return replace(answer, label=f"{OTHER_SIZE}: {first.failure}", detail=detail)
        return answer
