"""The answer of one variant on one stack: a label that searches can compare. Pure.

``reproduced``, ``passed``, or ``other_failure: FAILURE ID``. No label (None) where it is unknown: skipped, a hang that
is not the signature, an infrastructure error. One failure is proof; ``passed`` needs every attempt to pass.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from repro_matrix.grading.outcome import InfraErrorKind, Outcome
from repro_matrix.grading.root_cause import failure_ids
from repro_matrix.records.document import Made, Variant
from repro_matrix.results.rows import error_at

REPRODUCED, PASSED, OTHER = "reproduced", "passed", "other_failure"
TEXT = 160  # characters of a message

# Parts of a message that differ from run to run: addresses in memory and on the network, folders, temporary names.
_VARYING = (
    (re.compile(r"0x[0-9a-fA-F]+"), "0x…"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}:\d+"), "host:port"),
    (re.compile(r"(?<![\w.])(?:/[\w.@+~-]+)+/(?=[\w.@+~-])"), "…/"),
    (re.compile(r"(?<=\w[-_])\d{3,}\b|(?<=\btmp)[a-z0-9_]{6,}"), "…"),
)
# A set of names as Python prints it: its order differs from process to process.
_SET = re.compile(r"\{('[^'{}]*'(?:, '[^'{}]*')+)\}")


@dataclass(frozen=True)
class Answer:
    """``detail``: the message behind the label, or the reason why there is none."""

    label: str | None
    detail: str
    fired: int = 0
    counted: int = 0  # attempts that ran, of which ``reproduced`` showed the failure
    error_at: str | None = field(default=None, compare=False)  # file:line of the first failure
    infra_error: InfraErrorKind | None = field(default=None, compare=False)

    @property
    def whole(self) -> str | None:
        """Return label and message, to compare where a change of the message counts too."""
        return self.label if self.label in (None, PASSED) else f"{self.label}: {self.detail}"

    @property
    def flaky(self) -> bool:
        return 0 < self.fired < self.counted

    def __str__(self) -> str:
        """Return the answer as a report shows it."""
        if self.label != REPRODUCED:
            return self.label or f"unknown: {self.detail}"
        times = f" {self.fired}/{self.counted}" if self.counted > 1 else ""
        return f"{REPRODUCED}{times}: {self.detail}"


def of_cell(case: str, variant: Variant | None) -> Answer:
    """Return the answer of a stored variant."""
    if variant is None:
        return Answer(None, "not run")
    if variant["skipped"]:
        skip = variant.get("skip")
        needs = skip and skip["kind"] in ("packages", "build")  # the same text on every stack
        reason = f"needs {', '.join(skip['requires'])}" if needs and skip else variant["skipped"]
        return Answer(None, f"skipped: {reason}")
    return answer(case, variant["attempts"])


def answer(case: str, attempts: Sequence[Made]) -> Answer:
    """Return the answer of the attempts of one variant."""
    outcomes = [Outcome.from_json(attempt["outcome"]) for attempt in attempts]
    found = _answer(case, outcomes)
    return found if found.label in (None, PASSED) else replace(found, error_at=error_at(attempts))


def _answer(case: str, outcomes: Sequence[Outcome]) -> Answer:
    fired = [outcome for outcome in outcomes if outcome.outcome == "reproduced"]
    counted = sum(outcome.outcome in ("reproduced", "passed", "other_failure") for outcome in outcomes)
    if fired:
        return Answer(REPRODUCED, _message(case, fired[0]), len(fired), counted)
    for outcome in outcomes:
        if outcome.outcome not in ("passed", "other_failure"):
            detail = f"{outcome.outcome}: {outcome.reason}"
            return Answer(None, detail, 0, counted, infra_error=outcome.infra_error)
    errors = [outcome for outcome in outcomes if outcome.outcome == "other_failure"]
    if errors:
        ids = Counter(", ".join(map(str, failure_ids(case, outcome))) for outcome in errors)
        usual = ids.most_common(1)[0][0]
        return Answer(f"{OTHER}: {usual}", _message(case, errors[0]), 0, counted)
    return Answer(PASSED, outcomes[0].reason, 0, counted) if outcomes else Answer(None, "not run")


def _message(case: str, outcome: Outcome) -> str:
    """Return the failure's message, with its type where it was an exception of the rank that the outcome names."""
    own = next((item for item in outcome.recognized if item.case == case), None)
    primary = outcome.primary
    message = (own.message if own else "") or (primary.message if primary else "") or outcome.reason
    if primary is None or primary.kind != "exception" or message.startswith(f"{primary.type}: "):
        return plain(message)
    # The message's size may depend on the rank, and which rank was first is chance.
    same = primary.message[:TEXT] == message[:TEXT] or (own is not None and primary.rank in own.ranks)
    return plain(f"{primary.type}: {message}" if same else message)


def plain(message: str) -> str:
    """Return a message's first line without the parts that differ from run to run."""
    line = next((line.strip() for line in message.splitlines() if line.strip()), "")
    for pattern, instead in _VARYING:
        line = pattern.sub(instead, line)
    line = _SET.sub(lambda found: "{" + ", ".join(sorted(found[1].split(", "))) + "}", line)
    return line if len(line) <= TEXT else line[: TEXT - 1] + "…"
