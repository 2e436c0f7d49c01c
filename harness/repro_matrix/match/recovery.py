"""Find the errors of a log that training overcame: it went on after them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from repro_matrix.config.failure_rules import rules
from repro_matrix.grading.log_labels import without_time
from repro_matrix.grading.tracebacks import Error
from repro_matrix.match.log_failure import LogAnswer, LogFailure, is_launcher
from repro_matrix.match.scan import Finding, Scanned, StepProgress

FEW_STEPS = 2  # that the other ranks still make, where no label tells them apart


def recover(answer: LogAnswer, seen: Scanned, serious: Iterable[Finding]) -> None:
    """Move what training overcame to ``recovered``: it went on, and none of it ended the run."""
    progress = seen.progress
    hang = answer.hang
    later = max(_fatal_lines(answer), default=0)
    if hang and (progress.recovered(hang.last) or progress.goes_on(hang.last, later)):
        answer.hang = None
        answer.recovered = [Finding(hang.line, None, hang.kind, str(hang))]
    ends = [each.last for each in serious if rules()[each.kind].ends_process]
    ends += [error.last for error in seen.errors if is_launcher(error)]
    crashed = answer.hang or any(last > progress.overcome for last in ends)

    def recovered(last: int, buffered: bool = False) -> bool:
        ends_well = not (crashed or buffered) and progress.recovered(last)
        return last < progress.overcome or progress.goes_on(last, later) or ends_well

    def caught(each: LogFailure) -> bool:
        error = each.error
        return _was_caught(each, answer.causes, progress) or (
            recovered(error.last, _may_be_buffered(error, progress))
            and (_may_be_caught(error, progress) or error.last < progress.overcome)
        )

    failures = list(filter(caught, answer.failures))
    findings = [each for each in answer.findings if recovered(each.last)]
    answer.recovered += [*failures, *findings]
    answer.failures = [each for each in answer.failures if each not in failures]
    answer.findings = [each for each in answer.findings if each not in findings]


def _fatal_lines(answer: LogAnswer) -> list[int]:
    """Return the last lines of the errors and of what else shows a cause by itself."""
    shown = [(each, rules()[each.kind]) for each in answer.findings]
    causes = [
        each
        for each, rule in shown
        if rule.shows == "cause" and rule.place == "any_line" and not rule.general
    ]
    return [
        *(each.error.last for each in answer.causes if each.error.type),
        *(each.last for each in causes),
    ]


def _may_be_caught(error: Error, progress: StepProgress) -> bool:
    """Return whether lines after an error can be of its process.

    Steps of another process, by their labels, do not show that this one went on. torch writes
    ``[rank1]:`` before each line of an error that a rank does not catch.
    """
    if not error.label or error.signal:
        return not error.signal
    label = re.sub(r"\d+", r"\\d+", re.escape(error.label))
    labelled = [text for _, text in progress.steps if re.match(label, without_time(text))]
    uncaught = labelled or re.fullmatch(r"\[rank\d+\]:?", error.label)
    return not uncaught or any(without_time(text).startswith(error.label) for text in labelled)


def _was_caught(failure: LogFailure, causes: list[LogFailure], progress: StepProgress) -> bool:
    """Return whether steps of the same process follow a refusal or an unexplained error.

    A later error must follow these steps. It must be of the same process if the steps may come from
    a buffer.
    """
    error = failure.error
    explained = failure.known or failure.perhaps or (failure.rule and not failure.rule.library)
    if explained or failure.echo or not error.type:
        return False
    later = [each.error for each in causes if each.error.type]
    if progress.buffered(error.last):
        later = [each for each in later if each.label == error.label != ""]
    end = max((each.line for each in later), default=0)
    steps = [at for at, text in progress.steps if without_time(text).startswith(error.label)]
    return sum(error.last < at < end for at in steps) > (0 if error.label else FEW_STEPS)


def _may_be_buffered(error: Error, progress: StepProgress) -> bool:
    """Return whether an error may have ended the steps below it.

    Steps below an import that failed were made after it.
    """
    return (
        "ImportError" not in error.type
        and "ModuleNotFound" not in error.type
        and progress.buffered(error.last)
    )
