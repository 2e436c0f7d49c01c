"""Probe a user's script, and describe its result as lines for a terminal.

The two ends of a search may define the failure.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from repro_matrix.config.schema import VARIANT, AdhocCase
from repro_matrix.config.selection import override_text as written
from repro_matrix.environment.stacks import Stack
from repro_matrix.errors import ConfigError, MeasureError
from repro_matrix.grading.observation import Evidence, parse_threads
from repro_matrix.grading.root_cause import find_failures
from repro_matrix.records.attempt import Observation
from repro_matrix.records.document import Document, GradedAttempt
from repro_matrix.records.outcome import Outcome
from repro_matrix.runner.adhoc_case import DEADLINE_S, Script, in_shell
from repro_matrix.runner.script_failure import CHECKS, ScriptFailure, learned, normal
from repro_matrix.search.prober import Prober, Target
from repro_matrix.text import first_line, list_ranks, log, one_line

NOISE = 3.0  # minimum distance of the two ends' means, in spreads of one end
REPEAT = 3  # attempts of an end, for the noise of its metric
FRAMES = 4  # of a hung rank, the innermost first
TAIL = 6  # lines of a rank's log


class ScriptProber(Prober):
    def __init__(self, script: Script, repeat: int | None = None) -> None:
        self.script = script
        super().__init__(script.request(repeat=repeat))

    def resolve(self, target: Target) -> Stack:
        return in_shell(super().resolve(target))

    def use(self, failure: ScriptFailure) -> None:
        """Use another definition of the failure; stored attempts are only graded again."""
        self.script = replace(self.script, failure=failure)
        self.request = self.script.request(repeat=self.settings.repeat)
        self.case = self.request.catalogue.cases[self.script.slug]
        self.points.clear()

    def command(self, spec: str, variant: str) -> list[str]:
        """Return the `repro run` command of the script on a stack."""
        return self.words(["repro", "run"], [f"stack={spec}"])

    def words(self, command: list[str], options: list[str]) -> list[str]:
        """Return a command of this project with the script's settings and its own command line.

        Paths are relative to the working directory.
        """
        script = self.script
        words = shlex.split(self.script.command.shown)
        texts = [] if script.deadline_s == DEADLINE_S else [written("deadline", script.deadline_s)]
        texts += [written(f"env.{name}", value) for name, value in script.env]
        own = [
            os.path.relpath(word) if word.startswith(os.getcwd() + os.sep) else word
            for word in words
        ]
        return [*command, *texts, *options, "--", *own]

    def learn(self, good: Target, bad: Target) -> None:
        """Complete the definition of the failure from the ends.

        Raises ConfigError or MeasureError.
        """
        if not self.script.failure.text:
            for end in (bad, good):
                failure = self._failure_of(end)
                if failure is not None:
                    self.use(failure)
                    text = failure.text.replace("`", "'")
                    self.notes.append(f"No failure was given; it is that of {end.name}: `{text}`.")
                    log(self.notes[-1])
                    return
        elif self.script.failure.needs_limit:
            self._find_limit(good, bad)

    def _failure_of(self, end: Target) -> ScriptFailure | None:
        for made in self.document(end, self.repeat)["variants"][VARIANT]["attempts"]:
            outcome = Outcome.from_json(made["outcome"])
            if outcome.outcome == "other_failure":
                return learned(outcome, made)
        return None

    def _find_limit(self, good: Target, bad: Target) -> None:
        """Use the value halfway between the ends as the limit.

        The ends have to differ by more than their noise.
        """
        metric = self.script.failure.metric
        assert metric is not None
        values = {end.name: self._values(end) for end in (good, bad)}
        low, high = (sum(values[end.name]) / len(values[end.name]) for end in (good, bad))
        noise = max(max(each) - min(each) for each in values.values())
        ends = "; ".join(
            f"{name}: {', '.join(f'{value:g}' for value in each)}" for name, each in values.items()
        )
        if abs(high - low) <= NOISE * noise or high == low:
            raise ConfigError(
                f"{metric.name} differs by no more than its noise ({noise:g}) at the two ends"
                f" ({ends})."
            )
        limit = metric.model_copy(
            update={"op": ">" if high > low else "<", "limit": (low + high) / 2}
        )
        self.use(replace(self.script.failure, metric=limit))
        self.repeat = max(self.repeat, REPEAT if noise else 1)
        self.notes.append(
            f"Bad is {metric.name} {limit.op} {limit.limit:g}, halfway between the ends ({ends};"
            f" noise {noise:g})."
        )
        log(self.notes[-1])

    def _values(self, end: Target) -> list[float]:
        attempts = self.document(end, max(self.repeat, REPEAT))["variants"][VARIANT]["attempts"]
        printed = [made["observation"].get("printed") for made in attempts]
        for made, each in zip(attempts, printed):
            if not each or not each["metric"]:
                raise MeasureError(f"{end.name}: {made['outcome']['reason']}")
        return [each["metric"][-1]["value"] for each in printed if each]


# -- the result as lines


def describe_probe_result(case: AdhocCase, document: Document) -> Iterator[str]:
    return map(one_line, _lines(case, document))


def _lines(case: AdhocCase, document: Document) -> Iterator[str]:
    attempts = document["variants"][VARIANT]["attempts"]
    yield case.title + (f"   (the failure: {case.failure})" if case.failure else "")
    outcomes = Counter(_label(made) for made in attempts)
    yield ", ".join(
        f"{name.replace('_', ' ')} {n} of {len(attempts)}" for name, n in outcomes.most_common()
    )
    yield from (f"  note: {text}" for text in document["stack"].get("changed", [])[:FRAMES])
    if not attempts:
        return
    made = next((a for a in attempts if a["outcome"]["outcome"] != "passed"), attempts[0])
    outcome = made["outcome"]
    observation = made["observation"]
    yield from _checked(case, made)
    if _label(made) == "check failed":
        texts = [each["message"] for each in outcome["recognized"]]
        for name, _, advice in CHECKS.values():
            if advice and any(f"check {name} failed" in text for text in texts):
                yield f"  what helps: {advice}"
    elif _label(made) != "not checked":
        yield f"  {outcome['reason'].splitlines()[0]}"
    if infra_error := observation["infra_error"]:
        yield from (f"    {line}" for line in infra_error["message"].splitlines()[1:][-TAIL:])
    yield from _first_failure(made)
    if observation["attempt"]["timed_out"]:
        yield from _stacks(observation)
    notes = _unraised(case, observation) if outcome["outcome"] == "passed" else ()
    for note in dict.fromkeys([*notes, *_notes(observation)]):
        yield f"  note: {note}"


def _label(made: GradedAttempt) -> str:
    outcome = made["outcome"]
    if outcome["infra_error"] == "missing_check" and outcome["check"] is not None:
        return "not checked"  # the script ended well, and a check of it was not possible
    kinds = {each["kind"] for each in outcome["recognized"]}
    failed = outcome["outcome"] == "reproduced" and kinds == {"check"}
    return "check failed" if failed else outcome["outcome"]


def _checked(case: AdhocCase, made: GradedAttempt) -> Iterator[str]:
    """Yield what was checked of the numbers; of a script that passed: that nothing was."""
    ranks = made["observation"]["ranks"]
    record = ranks[0]["record"] if ranks else None
    for check in record["checks"] if record else ():
        yield f"  {check['name']}: {check['subject'].replace('0 tensors:', 'not checked:')}"
    if made["outcome"]["outcome"] == "passed" and not case.checks and not case.metric:
        yield (
            "  no number was checked: add --check replicas, --check finite, --check data or"
            " --metric 'loss > X'"
        )


def _first_failure(made: GradedAttempt) -> Iterator[str]:
    """Yield the innermost frames and the failure as --error takes it, else the last log lines."""
    primary = made["outcome"]["primary"]
    if not primary:
        return
    rank = next(each for each in made["observation"]["ranks"] if each["rank"] == primary["rank"])
    raised = rank["record"]["exception"] if rank["record"] else None
    if not raised:
        yield from (f"    {line}" for line in rank["log_tail"].splitlines()[-TAIL:])
        return
    for frame in raised["frames"][-3:]:
        yield f"    {frame['file']}:{frame['line']} {frame['function']}: {frame.get('code', '')}"
    where = f" ({primary['location']})" if primary["location"] else ""
    yield f"  first: rank {primary['rank']}: {primary['type']}: {normal(primary['message'])}{where}"


def _stacks(observation: Observation) -> Iterator[str]:
    """Yield the innermost frames of each rank's main thread in a hang, grouped by place."""
    places: dict[tuple[str, ...], list[int]] = {}
    for rank in Evidence(observation).ranks:
        threads = parse_threads(rank.stack) if rank.stack else []
        lines = threads[0].lines[:FRAMES] if threads else ()
        frames = tuple(" ".join(line.split()) for line in lines)
        places.setdefault(frames, []).append(rank.rank)
    for frames, ranks in places.items():
        yield f"  {list_ranks(ranks)} stopped at" + (":" if frames else ": unknown")
        yield from (f"    {frame}" for frame in frames)


def _unraised(case: AdhocCase, observation: Observation) -> Iterator[str]:
    """Yield the ranks that have the given error in their logs but did not raise it.

    It may be that of a child process.
    """
    for signature in case.signatures:
        if signature.kind != "exception" or not signature.type:
            continue
        name = re.escape(signature.type.rpartition(".")[2])
        lines = re.compile(
            rf"^(?:\[\w+\]: ?)?(?:[\w.]+\.)?{name}(?:: (?P<message>.*))?$", re.MULTILINE
        )
        for rank in observation["ranks"]:
            texts = (found["message"] or "" for found in lines.finditer(rank["log_tail"]))
            if any(re.search(signature.message or "", text) for text in texts):
                yield (
                    f"the text of the named error is in the log of rank {rank['rank']}, but no rank"
                    " raised it"
                )


def _notes(observation: Observation) -> Iterator[str]:
    attempt = Evidence(observation)
    failures = find_failures(attempt)
    silent = {
        rank.rank
        for rank in attempt.ranks
        if not rank.wrote and rank.exit_code is None and not rank.signal
    }
    follow = failures.excused - silent
    if failures.primary and follow:
        yield f"the errors of {list_ranks(follow)} follow from it"
    if leaked := observation["attempt"]["leaked_processes"]:
        yield f"processes that it left behind were ended: {', '.join(leaked)}"
    if attempt.printed.get("cut"):
        yield "a log was cut (64 MiB; a line: 1 MiB); the missing part was not searched"
    for rank in attempt.ranks:
        for raised, *_ in rank.threads:
            message = first_line(raised.message)
            yield f"rank {rank.rank}: a thread ended with {raised.type}: {message}"
        if rank.wrote and rank.exit_code == 0 and rank.ended_at is None:
            yield f"rank {rank.rank} ended without Python's exit: an error may have been swallowed"
        if not rank.wrote:
            yield (
                f"rank {rank.rank} left no record (python -I or -S, or it ended before its first"
                " line)"
            )
