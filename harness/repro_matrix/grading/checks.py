"""One check of a rank's record, judged: the rank's own ``passed`` is never taken on trust. Pure.

A check of record schema 2 holds ``got``, ``want``, ``tolerance``, ``looked_at``, ``at`` and ``passed``. Two kinds:

- numbers (one, or a flat list of them) with a ``tolerance``: it holds when every |got - want| <= tolerance;
- anything else, without a tolerance: it holds when got and want are the same JSON; ``looked_at`` says of what.

``failed`` is a statement about what was tested: numbers that are apart, or that are not finite (NaN, an overflow).
``void`` is a defect of the check, which says nothing: a text where a number belongs, lists of different lengths, no
tolerance or one that even a zero would pass, no ``looked_at``, a ``passed`` that says other than the numbers, made
after the script was done, made twice. A void check is no proof, and no oracle either.

Records of schema 1 hold ``passed`` and texts only: they are judged as they were when they were published.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

SHOWN = 80  # characters of a value that is shown
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # JSON has no such numbers: the kit writes them so


@dataclass(frozen=True)
class Judged:
    name: str
    state: Literal["passed", "failed", "void"]
    says: str
    severity: float = 0.0  # got/tolerance: which of several failed checks is the worst

    @property
    def failed(self) -> bool:
        return self.state == "failed"


def judged(check: Mapping[str, Any], schema: int = 2, done_at: float | None = None) -> Judged:
    """``done_at``: when the script was done, on the clock of the check's ``at``; schema 1 knows neither."""
    name = check.get("name")
    name = name if isinstance(name, str) and name else "?"
    if schema == 1:
        seen = f"got {check.get('got')}, want {check.get('want')}"
        if check.get("passed") is True:
            return Judged(name, "passed", seen)
        return Judged(name, "failed" if check.get("passed") is False else "void", seen, math.inf)
    found = _by_numbers(check) if "tolerance" in check and check["tolerance"] is not None else _by_equality(check)
    state, says, severity = found
    if state != "void" and check.get("passed") is not (state == "passed"):
        return Judged(name, "void", f"contradictory: the rank says passed {check.get('passed')!r}, but {says}")
    if state != "void" and not _made_in_time(check.get("at"), done_at):
        return Judged(name, "void", f"not made before the script was done; {says}")
    return Judged(name, state, says, severity)


Found = tuple[Literal["passed", "failed", "void"], str, float]


def _by_numbers(check: Mapping[str, Any]) -> Found:
    seen = _seen(check)
    tolerance = _number(check["tolerance"])
    got, want = _numbers(check.get("got")), _numbers(check.get("want"))
    if tolerance is None or not 0 <= tolerance < math.inf:
        return "void", f"the tolerance is no number from 0 on: {seen}", 0.0
    if got is None or want is None:
        return "void", f"no number: {seen}", 0.0
    if len(got) != len(want) or isinstance(check.get("got"), list) != isinstance(check.get("want"), list):
        return "void", f"{len(got)} numbers against {len(want)}: {seen}", 0.0
    if not all(map(math.isfinite, want)):
        return "failed", f"what is wanted is not finite: {seen}", math.inf
    # Where nothing but zero is wanted, got is a part of something: half of it is no rounding.
    if tolerance >= (max(map(abs, want)) or 0.5):
        return "void", f"so wide a tolerance lets a zero, or anything, pass: {seen}", 0.0
    apart = [abs(a - b) for a, b in zip(got, want)]
    if not all(map(math.isfinite, apart)):
        return "failed", f"not finite: {seen}", math.inf
    off = max(apart)
    if off <= tolerance:
        return "passed", seen, 0.0
    return "failed", seen, off / tolerance if tolerance else math.inf


def _by_equality(check: Mapping[str, Any]) -> Found:
    seen = _seen(check)
    got, want = check.get("got"), check.get("want")
    if _numbers(want) is not None or _numbers(got) is not None:
        return "void", f"numbers without a tolerance: {seen}", 0.0
    looked_at = check.get("looked_at")
    if not isinstance(looked_at, str) or not looked_at.strip():
        return "void", f"does not say what it looked at: {seen}", 0.0
    return ("passed", seen, 0.0) if same(got, want) else ("failed", seen, math.inf)


def same(a: Any, b: Any) -> bool:
    """The same JSON: True is not 1, 1 is not 1.0, and NaN is nothing's equal."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    return bool(a == b)


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return _NOT_FINITE.get(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer beyond 1e308
        return math.inf  # of either sign: not finite


def _numbers(value: Any) -> list[float] | None:
    """A number, or a flat list of at least one, as a list; None for everything else."""
    if not isinstance(value, list):
        one = _number(value)
        return None if one is None else [one]
    found = [_number(item) for item in value]
    numbers = [item for item in found if item is not None]
    return numbers if numbers and len(numbers) == len(found) else None


def _made_in_time(at: Any, done_at: float | None) -> bool:
    when = None if isinstance(at, str) else _number(at)
    return when is not None and done_at is not None and when <= done_at


def _seen(check: Mapping[str, Any]) -> str:
    parts = [f"got {_short(check.get('got'))}", f"want {_short(check.get('want'))}"]
    if check.get("tolerance") is not None:
        parts.append(f"tolerance {_short(check['tolerance'])}")
    looked_at = check.get("looked_at")
    return ", ".join(parts) + (f": {_short(looked_at)}" if isinstance(looked_at, str) and looked_at else "")


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
