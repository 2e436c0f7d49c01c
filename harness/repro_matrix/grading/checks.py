"""Evaluate one check of a rank's record; the rank's own ``passed`` is never trusted. Pure.

A check holds ``actual``, ``expected``, ``tolerance``, ``subject``, ``at`` and ``passed``. There are
two kinds:

- numbers (one, or a flat list) with a ``tolerance``: it passes when every |actual - expected| <=
  tolerance;
- anything else, without a tolerance: it passes when both are the same JSON; ``subject`` names what
  was compared.

``failed`` is a statement about what was tested: numbers that are too far apart, or not finite (NaN,
an overflow).
``void`` is a defect of the check itself, which is no evidence: text where a number belongs, lists
of different lengths,
no tolerance or one that even a zero would pass, no ``subject``, a ``passed`` that contradicts the
numbers, a check made after the script was done, or made twice, or one that compared nothing: its
``subject`` begins with ``0 tensors``, or both sides are empty and it does not begin with a number
(``21 tensors``: of all of them none differs).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from repro_matrix.text import first_line

MAX_VALUE = 80  # characters of a value that is shown
# JSON has no such numbers: the kit writes names
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

NOT_CHECKED = "not checked: "  # the kit gave a reason, which its values do not explain

State = Literal["passed", "failed", "void"]


@dataclass(frozen=True)
class CheckResult:
    """A check and its state; ``why``: what is wrong with it besides its values."""

    check: Mapping[str, Any]
    state: State
    why: str = ""
    severity: float = 0.0  # |actual - expected| / tolerance: orders failed checks

    @property
    def name(self) -> str:
        name: str = self.check["name"]
        return name

    @property
    def failed(self) -> bool:
        return self.state == "failed"

    @property
    def details(self) -> str:
        return self.why if self.why.startswith(NOT_CHECKED) else self.why + _format(self.check)

    def as_void(self, why: str) -> CheckResult:
        return CheckResult(self.check, "void", why + self.why)


def evaluate(check: Mapping[str, Any], done_at: float | None = None) -> CheckResult:
    """Evaluate a check.

    ``done_at``: when the script was done, on the clock of the check's ``at``.
    """
    compare = _compare_numbers if check.get("tolerance") is not None else _compare_values
    result = CheckResult(check, *compare(check))
    if result.state == "void":
        return result
    if check.get("passed") is not (result.state == "passed"):
        return result.as_void(f"contradictory: the rank says passed {check.get('passed')!r}, but ")
    if result.state == "passed" and _compared_nothing(check):
        why = str(check.get("subject")).partition("0 tensors: ")[2]
        return result.as_void(f"{NOT_CHECKED}{why}" if why else "it compared nothing; ")
    made_at = number(check.get("at"))
    if made_at is None or done_at is None or made_at > done_at:
        return result.as_void("not made before the script was done; ")
    return result


def _compare_numbers(check: Mapping[str, Any]) -> tuple[State, str, float]:
    tolerance = _number(check["tolerance"])
    actual, expected = numbers_of(check.get("actual")), numbers_of(check.get("expected"))
    if tolerance is None or not 0 <= tolerance < math.inf:
        return "void", "the tolerance is not a number from 0 on: ", 0.0
    if actual is None or expected is None:
        return "void", "not a number: ", 0.0
    if len(actual) != len(expected) or isinstance(check.get("actual"), list) != isinstance(
        check.get("expected"), list
    ):
        return "void", f"{len(actual)} numbers against {len(expected)}: ", 0.0
    if not all(map(math.isfinite, expected)):
        return "failed", "the expected value is not finite: ", math.inf
    # If only zeros are expected, the values are shares: half of the whole is not rounding.
    if tolerance >= (max(map(abs, expected)) or 0.5):
        return "void", "the tolerance is so wide that a zero would pass: ", 0.0
    differences = [abs(a - b) for a, b in zip(actual, expected)]
    if not all(map(math.isfinite, differences)):
        return "failed", "not finite: ", math.inf
    worst = max(differences)
    if worst <= tolerance:
        return "passed", "", 0.0
    return "failed", "", worst / tolerance if tolerance else math.inf


def _compare_values(check: Mapping[str, Any]) -> tuple[State, str, float]:
    actual, expected, subject = check.get("actual"), check.get("expected"), check.get("subject")
    if numbers_of(expected) is not None or numbers_of(actual) is not None:
        return "void", "numbers without a tolerance: ", 0.0
    if not isinstance(subject, str) or not subject.strip():
        return "void", "does not say what it looked at: ", 0.0
    return ("passed", "", 0.0) if same_json(actual, expected) else ("failed", "", math.inf)


def _compared_nothing(check: Mapping[str, Any]) -> bool:
    count = re.match(r"(0 tensors\b)|[1-9]\d* ", str(check.get("subject")))
    return bool(count[1]) if count else _is_empty(check.get("actual"))


def _is_empty(value: Any) -> bool:
    """Return whether a value is a list or mapping of nothing, at any depth."""
    items = value.values() if isinstance(value, dict) else value
    return isinstance(value, (dict, list)) and all(map(_is_empty, items))


def same_json(a: Any, b: Any) -> bool:
    """Compare two JSON values: True is not 1, 1 is not 1.0, and NaN equals nothing."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same_json, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_json(value, b[key]) for key, value in a.items())
    return bool(a == b)


def number(value: Any) -> float | None:
    """Return a finite number, or None; a bool is not a number."""
    parsed = None if isinstance(value, str) else _number(value)
    return parsed if parsed is not None and math.isfinite(parsed) else None


def _number(value: Any) -> float | None:
    """Return a number, also one that is not finite; None for everything else."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer beyond 1e308
        return math.inf  # of either sign: not finite


def numbers_of(value: Any) -> list[float] | None:
    """Return a number, or a flat list of at least one, as a list; None for everything else."""
    values = [_number(item) for item in (value if isinstance(value, list) else [value])]
    numbers = [item for item in values if item is not None]
    return numbers if numbers and len(numbers) == len(values) else None


def _format(check: Mapping[str, Any]) -> str:
    parts = [f"got {_short(check.get('actual'))}", f"want {_short(check.get('expected'))}"]
    if check.get("tolerance") is not None:
        parts.append(f"tolerance {_short(check['tolerance'])}")
    subject = check.get("subject")
    return ", ".join(parts) + (
        f": {_short(subject)}" if isinstance(subject, str) and subject else ""
    )


def _short(value: Any) -> str:
    return first_line(f"{value:.4g}" if isinstance(value, float) else str(value), MAX_VALUE)
