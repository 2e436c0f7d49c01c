"""What one arm answered on one stack, as a label that searches over releases can compare. Pure.

``fires``, ``clean`` or ``other error: Type: text``. No label (None) where it cannot be known: skipped, a hang that is
not the signature, infrastructure. One firing is proof; ``clean`` needs every attempt that was made to be clean.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from repro_matrix.records.document import Arm, Made
from repro_matrix.records.outcome import Outcome
from repro_matrix.results.rows import error_at

FIRES, CLEAN, OTHER = "fires", "clean", "other error"
TEXT = 160  # characters of a message that a label keeps

# What differs from run to run in the same message: addresses in memory and on the network, folders, temporary names.
_VARYING = (
    (re.compile(r"0x[0-9a-fA-F]+"), "0x…"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}:\d+"), "host:port"),
    (re.compile(r"(?<![\w.])(?:/[\w.@+~-]+)+/(?=[\w.@+~-])"), "…/"),
    (re.compile(r"(?<=\w[-_])\d{3,}\b|(?<=\btmp)[a-z0-9_]{6,}"), "…"),
)


@dataclass(frozen=True)
class Answer:
    """``detail`` is the message that stands for the label, or the reason why there is none."""

    label: str | None
    detail: str
    fired: int = 0
    counted: int = 0  # attempts that ran, of which ``fired`` fired
    brief: str = ""  # the label without its text, where that stands elsewhere: ``other error: Type [known case]``
    skipped: bool = False  # a declared need is not met
    error_at: str | None = field(default=None, compare=False)  # file:line of the failure that came first

    @property
    def whole(self) -> str | None:
        """Label and text: what is compared where a change of the text counts, too."""
        return f"{FIRES}: {self.detail}" if self.label == FIRES else self.label

    @property
    def short(self) -> str | None:
        return self.brief or self.label

    @property
    def flaky(self) -> bool:
        return 0 < self.fired < self.counted


def answer(case: str, attempts: Sequence[Made]) -> Answer:
    """Judge the attempts that were made of one thing."""
    found = _answer(case, [attempt["outcome"] for attempt in attempts])
    return found if found.label in (None, CLEAN) else replace(found, error_at=error_at(attempts))


def of_cell(case: str, arm: Arm | None) -> Answer:
    """Judge an arm of a cell's document."""
    if arm is None:
        return Answer(None, "not run")
    if arm["skipped"]:
        return Answer(None, f"skipped: {_need(arm, arm['skipped'])}", skipped=True)
    return answer(case, arm["attempts"])


def _answer(case: str, outcomes: Sequence[Outcome]) -> Answer:
    fired = [outcome for outcome in outcomes if outcome["outcome"] == "fires"]
    counted = sum(outcome["outcome"] in ("fires", "clean", "other_error") for outcome in outcomes)
    if fired:
        return Answer(FIRES, _fired(case, fired[0]), len(fired), counted)
    for outcome in outcomes:
        if outcome["outcome"] not in ("clean", "other_error"):
            return Answer(None, f"{outcome['outcome']}: {outcome['reason']}", 0, counted)
    errors = [_error(case, outcome) for outcome in outcomes if outcome["outcome"] == "other_error"]
    if errors:
        brief, usual = Counter(errors).most_common(1)[0][0]
        return Answer(f"{OTHER}: {usual}", usual, 0, counted, f"{OTHER}: {brief}")
    if not outcomes:
        return Answer(None, "not run")
    return Answer(CLEAN, outcomes[0]["reason"], 0, counted)


# A set of names as Python prints it: in an order that differs from process to process.
_SET = re.compile(r"\{('[^'{}]*'(?:, '[^'{}]*')+)\}")


def plain(message: str) -> str:
    """A message's first line without what differs from run to run."""
    line = next((line.strip() for line in message.splitlines() if line.strip()), "")
    for pattern, instead in _VARYING:
        line = pattern.sub(instead, line)
    line = _SET.sub(lambda found: "{" + ", ".join(sorted(found[1].split(", "))) + "}", line)
    return line if len(line) <= TEXT else line[: TEXT - 1] + "…"


def _need(arm: Arm, reason: str) -> str:
    """Declared needs in the same words on every stack: without the stack's name, and what it has instead."""
    skip = arm.get("skip")
    return f"needs {', '.join(skip['needs'])}" if skip and skip["kind"] in ("packages", "build") else reason


def _fired(case: str, outcome: Outcome) -> str:
    """The known failure's own words, with the type where it was an exception."""
    own = next((seen for seen in outcome["recognised"] if seen["case"] == case), None)
    primary = outcome["primary"]
    message = (own["message"] if own else "") or (primary["message"] if primary else "") or outcome["reason"]
    # Ranks say it with sizes of their own, and which of them was first is chance.
    same = primary and (primary["message"][:TEXT] == message[:TEXT] or (own and primary["rank"] in own["ranks"]))
    named = primary is not None and message.startswith(f"{primary['type']}: ")  # a script's has its type in its text
    return plain(f"{primary['type']}: {message}" if primary and same and not named else message)


def _error(case: str, outcome: Outcome) -> tuple[str, str]:
    """Another error in a word and in a line; named where it is another known failure."""
    others = [seen for seen in outcome["recognised"] if seen["case"] != case and seen["kind"] != "log"]
    known = f" [{others[0]['case']}]" if others else ""
    primary = outcome["primary"]
    if primary:
        name = primary["type"]
        # A signal or an exit code has no message: what stands there is the last line of the log.
        said = plain(primary["message"]) if primary.get("kind", "exception") == "exception" else ""
        return name + known, (f"{name}: {said}" if said else name) + known
    # No failure of a rank: the proof. What was got instead differs from run to run, and which ranks say so may.
    check = outcome.get("check")
    said = (f"silent: check {check} failed" if check else plain(outcome["reason"])) + known
    return said, said
