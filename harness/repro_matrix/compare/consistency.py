"""Compare a script with itself: configurations that must compute the same, on one stack.

No side is trusted. A configuration is compared with the first one of each group that agrees; a
difference by design is not checked (traces.invariance). ``ConsistencyProber`` asks
the same question at each probe of a search.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from repro_matrix.compare.two_sides import GoodSide, Traced, Window, traced
from repro_matrix.environment.stacks import Stack
from repro_matrix.errors import ConfigError, MeasureError
from repro_matrix.records.document import Document
from repro_matrix.runner.adhoc_case import Script
from repro_matrix.search.prober import PASSED, REPRODUCED, CellRunner, ProbeAnswer, Target
from repro_matrix.search.script_prober import ScriptProber
from repro_matrix.text import counted
from repro_matrix.traces.invariance import by_design
from repro_matrix.traces.location import Location, short

# Arguments of transformers' Trainer.
BATCH = "per_device_train_batch_size"
STEPS = "gradient_accumulation_steps"
CHECKPOINTING = "gradient_checkpointing"


@dataclass(frozen=True)
class VariedSetting:
    """Hold one choice of the thing that varies.

    ``labels``: its value in the first list that tells all choices apart, else in each.
    """

    labels: tuple[str, ...]
    words: str
    ranks: int | None


def option_choices(option: str, text: str) -> list[VariedSetting]:
    """Return the choices of ``--acc {1,4}``; the values of several braces belong together.

    Without braces: without these arguments and with them. The first word of --ranks is a list of
    ranks. Raises ConfigError.
    """
    ranks, first, space, rest = option == "--ranks", *text.strip().partition(" ")
    template = f"{{{first.strip('{}')}}}{space}{rest}" if ranks else text.strip()
    parts = re.split(r"\{([^{}]*)\}", template)
    fixed = parts[::2]
    lists = [part.split(",") for part in parts[1::2]]
    if not lists:
        fixed = ["", ""]
        lists = [["", template]]
    choices = list(zip(*lists))
    problem = _problem(template, lists, choices, ranks)
    if problem:
        example = "'--acc {1,4}' or '--batch {8,2} --acc {1,4}'"
        if ranks:
            example = "1,2 or '1,2 --batch {8,4}'"
        raise ConfigError(f"{option} {text!r}: {problem}. Write it as {option} {example}.")
    telling = [at for at, values in enumerate(lists) if len(set(values)) == len(values)][:1]
    found = []
    for values in choices:
        words = "".join(chain(*zip(fixed, values), fixed[-1:]))
        labels = [_label(*each) for each in zip(fixed, values, fixed[1:])]
        count = None
        if not parts[1:]:
            labels = [f"{'with' if words else 'without'} {template}"]
        if ranks:
            count = int(values[0])
            words = words[len(values[0]) :]
            labels[0] = counted(count, "rank")
        chosen = [labels[at] for at in telling] or labels
        found.append(VariedSetting(tuple(chosen), words.strip(), count))
    return found


def _problem(
    template: str, lists: list[list[str]], choices: list[tuple[str, ...]], ranks: bool
) -> str:
    """Return why the choices cannot be compared; empty if they can."""
    if ranks:
        for number in lists[0]:
            if not number.isdecimal() or not int(number):
                return f"{number!r} is not a number of ranks"
    if template.count("{") != template.count("}"):
        return "a brace is not closed"
    if len({len(values) for values in lists}) > 1:
        return "its lists have different lengths"
    if len(choices) < 2:
        return "one value leaves nothing to compare"
    return "a value is given twice" if len(set(choices)) < len(choices) else ""


def _label(before: str, value: str, after: str) -> str:
    """Return ``--acc 4``: a value with its option, or the word that contains it."""
    option = "".join(before.split()[-1:])
    space = " " if before[-1:].isspace() else ""
    return f"{option}{space}{value}{after.partition(' ')[0]}".strip()


def combinations(axes: Sequence[Sequence[VariedSetting]]) -> list[tuple[VariedSetting, ...]]:
    """Return the first choices, and each other one alone.

    The last ones together are added, unless they set the same option.
    """
    first = tuple(axis[0] for axis in axes)
    found = [first]
    for at, axis in enumerate(axes):
        found += [(*first[:at], other, *first[at + 1 :]) for other in axis[1:]]
    options = [
        word
        for axis in axes
        for word in {word.partition("=")[0] for word in axis[-1].words.split()}
        if word.startswith("-")
    ]
    if len(axes) > 1 and len(set(options)) == len(options):
        found.append(tuple(axis[-1] for axis in axes))
    return found


def of_trainer(script: Script) -> str:
    """Return --ranks for a script that takes the arguments of transformers' Trainer.

    It has another number of ranks, twice the micro-batches of half the size, and checkpointing.
    Raises ConfigError if the script's arguments are not known.
    """
    words = shlex.split(script.command.shown)
    pairs = (
        word.partition("=")[::2] if "=" in word else (word, value)
        for word, value in zip(words, [*words[1:], ""])
    )
    given = {
        name.lstrip("-").replace("-", "_"): value for name, value in pairs if name.startswith("--")
    }
    code = script.command.script.read_text(errors="replace") if script.command.script else ""
    batch = given.get(BATCH, "8")
    steps = given.get(STEPS, "1")
    ranks = script.command.nproc
    if not (batch.isdecimal() and steps.isdecimal()) or (
        BATCH not in given and "HfArgumentParser" not in code
    ):
        raise ConfigError(
            "Nothing to vary: the script does not take the arguments of transformers' Trainer. Say"
            " what must not change its numbers: --ranks 1,2 or '1,2 --batch {8,4}', --vary '--acc"
            " {1,2} --batch {8,4}', --vary --gc."
        )
    fixed = Path(given.get("deepspeed", ""))
    numbers = re.compile(rf'"(train_\w*batch_size\w*|{STEPS})"\s*:\s*\d')
    if fixed.is_file() and numbers.search(fixed.read_text(errors="replace")):
        raise ConfigError(
            f'{fixed}: its batch sizes are numbers, which the arguments cannot vary. Write "auto"'
            " there."
        )
    size = int(batch)
    count = int(steps)
    rows = [(ranks, size, count, False), (ranks, size, count, True)]
    if size % 2 == 0:
        rows.append((ranks, size // 2, 2 * count, False))
    if ranks > 1:
        rows.append((1, size * ranks, count, False))
    elif size % 2 == 0:
        rows.append((2, size // 2, count, False))
    counts, *values = (",".join(map(str, column)) for column in zip(*rows))
    lists = zip((BATCH, STEPS, CHECKPOINTING), values)
    return " ".join([counts, *(f"--{name} {{{each}}}" for name, each in lists)])


@dataclass(frozen=True)
class Configuration:
    labels: tuple[str, ...]
    script: Script


@dataclass
class Consistency:
    """Hold which configurations agree, by their index.

    ``groups``: configurations that agree; ``differences``: between the first ones of two groups;
    ``unchecked``: why others could not be checked.
    """

    labels: Sequence[Sequence[str]]
    groups: list[list[int]] = field(default_factory=list)
    agreements: dict[tuple[int, int], Location] = field(default_factory=dict)
    differences: dict[tuple[int, int], Location] = field(default_factory=dict)
    unchecked: dict[int, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        return 1 if self.differences else 3 if self.unchecked or not self.agreements else 0

    @property
    def verdict(self) -> str:
        return {0: "agrees", 1: "contradicts itself"}.get(self.exit_code, "inconclusive")

    def judgement(self) -> str:
        """Return the answer about one side of a comparison, without its name."""
        verdict = {0: "is consistent with itself", 1: "contradicts itself"}.get(
            self.exit_code, "could not be judged"
        )
        return f"{verdict}: {self.sentence()}"

    def name(self, members: Sequence[int]) -> str:
        """Name a group by what it alone has, else by all that its members have in common."""
        own = []
        varied = []
        for labels in zip(*self.labels):
            label = labels[members[0]]
            if {labels[at] for at in members} != {label}:
                continue
            if labels.count(label) == len(members):
                own.append(label)
            if set(labels) != {label}:
                varied.append(label)
        return " ".join(dict.fromkeys(own or varied)) or f"the {len(members)} others"

    def sentence(self) -> str:
        agreeing = (self._varied(group) for group in self.groups if len(group) > 1)
        texts = list(dict.fromkeys(f"{text} agree" for text in agreeing))
        pairs = [
            " and ".join(self.name(self._group(each)) for each in pair) for pair in self.differences
        ]
        if pairs:
            texts.append(f"{pairs[0]} differ: {self.words(*next(iter(self.differences)))}")
        if pairs[1:]:
            texts.append(f"so do {', '.join(pairs[1:])}")
        sizes = sorted(map(len, self.groups))
        if self.differences and len(sizes) > 1 and sizes[-1] > max(1, sizes[-2]):
            odd = [self.name(group) for group in self.groups if len(group) < sizes[-1]]
            texts.append(
                f"{' and '.join(odd)} {'are the odd ones' if odd[1:] else 'is the odd one'} out"
            )
        texts += [
            f"{self.name([at])} could not be checked: {why}" for at, why in self.unchecked.items()
        ]
        return "; ".join(texts)

    def _group(self, member: int) -> list[int]:
        return next(group for group in self.groups if member in group)

    def _varied(self, group: Sequence[int]) -> str:
        lists = [dict.fromkeys(labels[at] for at in group) for labels in zip(*self.labels)]
        return "; ".join(dict.fromkeys(" and ".join(each) for each in lists if len(each) > 1))

    def words(self, one: int, other: int) -> str:
        """Return where two differ; neither is called good."""
        name, theirs = (self.name(self._group(each)) for each in (one, other))
        text = re.sub(
            r"what they should( be)?\b",
            lambda _: f"those with {name}",
            self.differences[one, other].sentence(),
        )
        text = re.sub(
            r"what it should( be)?\b|the good side's(?! \w)", lambda _: f"that with {name}", text
        )
        for side, called in (("good side", name), ("bad side", theirs)):
            text = text.replace(f"the {side}", called).replace(side, called)
        return text


def group(
    labels: Sequence[Sequence[str]],
    compare: Callable[[int, int], tuple[Location, str]],
    problem: Callable[[int], str],
) -> Consistency:
    """Sort configurations into groups that agree.

    ``compare``: returns the difference, and why it is there by design; ``problem``: returns why a
    configuration made no step.
    """
    found = Consistency(labels)
    for at in range(len(labels)):
        if why := problem(at):
            found.unchecked[at] = why
            continue
        differences: dict[tuple[int, int], Location] = {}
        for members in found.groups:
            location, why = compare(members[0], at)
            why = location.reason if location.verdict == "inconclusive" else why
            if why and not differences:
                found.unchecked[at] = why
                break
            if location.verdict == "agrees":
                found.agreements[members[0], at] = location
                members.append(at)
                break
            if not why:
                differences[members[0], at] = location
        else:
            found.groups.append([at])
            found.differences |= differences
    return found


def check_consistency(
    runner: CellRunner, chosen: Sequence[Configuration], stack: Stack, window: Window
) -> tuple[Consistency, list[Traced | None]]:
    """Launch the configurations on one stack, and compare them; may raise Stopped."""
    runs: list[Traced | None] = []
    leaders: dict[int, GoodSide] = {}

    def problem(at: int) -> str:
        try:
            run = traced(runner, chosen[at].script, stack, window)
        except MeasureError as error:
            runs.append(None)
            return str(error)
        runs.append(run)
        if run.trace.steps:
            return run.problem
        return run.problem or "it ended without a step. Does it train?"

    def compare(one: int, other: int) -> tuple[Location, str]:
        if one not in leaders:
            leaders[one] = GoodSide(runner, chosen[one].script, stack, window)
        good = leaders[one]
        run = runs[other]
        assert run is not None
        location = good.locate(run.trace)
        if location.verdict != "differs":
            return location, ""
        return location, by_design(location, good.run.trace, run.trace, good.noise_traces)

    return group([each.labels for each in chosen], compare, problem), runs


def consistency_to_json(found: Consistency, runs: Sequence[Traced | None]) -> dict[str, Any]:
    pairs = {**found.agreements, **found.differences}
    compared = [
        {"configurations": list(pair), "location": each.to_json()} for pair, each in pairs.items()
    ]
    return {
        "schema": 1,
        "verdict": found.verdict,
        "sentence": found.sentence(),
        "groups": found.groups,
        "compared": compared,
        "not_checked": {str(at): why for at, why in found.unchecked.items()},
        "configurations": [
            {"labels": list(labels), **(run.to_json() if run else {})}
            for labels, run in zip_longest(found.labels, runs)
        ],
    }


def describe_consistency(found: Consistency, runs: Sequence[Traced | None]) -> Iterator[str]:
    """Yield the answer first, then what supports it, as lines for a terminal."""
    yield f"{found.verdict}: {found.sentence()}"
    if found.differences:
        yield "  no side is trusted: one of them is wrong, or both are"
    for (one, other), location in {**found.agreements, **found.differences}.items():
        coverage = location.coverage
        result = "agree" if location.verdict == "agrees" else "differ"
        text = (
            f"{counted(coverage.aligned, 'tensor')}, {counted(coverage.steps, 'step')},"
            f" {counted(coverage.shared, 'shared sample')}"
        )
        if location.largest:
            text += f"; off by at most {short(location.largest)} of the tolerance"
        yield f"  {one + 1} and {other + 1} {result}: {text}"
        yield from (f"    also: {text}" for text in location.also)
    for at, run in enumerate(runs):
        where = "did not run"
        if run:
            shown = run.script.command.shown
            where = f"{shown} on stack {run.stack.name}; what ran: {run.trace.strategy}"
        yield f"  {at + 1}: {where}"


# -- searches


class ConsistencyProber(ScriptProber):
    """Probe if the script contradicts itself.

    ``given``: the options that say what varies.
    """

    def __init__(self, chosen: Sequence[Configuration], given: list[str], window: Window) -> None:
        self.chosen = chosen
        self.given = given
        self.window = window
        script = chosen[0].script
        failure = replace(script.failure, text="the script contradicts itself")
        super().__init__(replace(script, trace=window.variables(), failure=failure))

    def learn(self, good: Target, bad: Target) -> None:
        """Learn nothing: the failure needs no end of a search."""

    def command(self, spec: str, variant: str) -> list[str]:
        return self.words(
            ["repro", "consistency"], [f"stack={spec}", *self.given, *self.window.words()]
        )

    def answer(self, document: Document, variant: str, stack: Stack) -> ProbeAnswer:
        answer = super().answer(document, variant, stack)
        if answer.label != PASSED:
            return answer
        found, _ = check_consistency(self, self.chosen, stack, self.window)
        answer = replace(answer, detail=found.sentence(), counted=1)
        if found.differences:
            return replace(answer, label=REPRODUCED, reproductions=1, failure=answer.detail)
        return answer if found.exit_code == 0 else replace(answer, label=None)
