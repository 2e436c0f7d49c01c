"""Which attempts are made once more, and what is changed for it. Pure: the one place that says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from repro_matrix.cell.types import Again
from repro_matrix.launch.device_errors import EITHER

LOST_CARD = "card"  # the kind of infra that a failed card is
CARDS = (LOST_CARD, "device", EITHER)  # other cards may give an answer
TOO_SLOW = "too slow"  # ranks were still at work when time was over
LONGER = 3.0  # what its deadline is multiplied with


def again(observation: Mapping[str, Any], cards: Sequence[str] = ()) -> dict[str, Any] | None:
    """Changes to the task (schedule.Task), or None: its answer stands. Nothing is made more often than once again.

    ``cards``: those that it was made on.
    """
    infra = observation.get("infra") or {}
    if observation["attempt"].get("again") or not isinstance(infra, Mapping):
        return None
    if infra.get("kind") in CARDS:
        return {"again": _why(infra), "avoid": tuple(cards)}
    if infra.get("kind") == TOO_SLOW and not observation["attempt"].get("interrupted"):
        deadline = LONGER * float(observation["attempt"]["deadline_s"])
        return {"again": _why(infra), "deadline": deadline}
    return None


def _why(infra: Mapping[str, Any]) -> Again:
    return {"kind": infra["kind"], "message": str(infra.get("message"))}


def told(changes: Mapping[str, Any]) -> str:
    """Why an attempt is made once more, in words."""
    why, deadline = changes["again"], changes.get("deadline")
    return f"{why['kind']}: {why['message']}" + (f"; deadline {deadline:g} s" if deadline else "")


def settled(observation: dict[str, Any]) -> dict[str, Any]:
    """What may have been a card's failure or the program's, and came again, is the program's: it is judged."""
    infra, before = observation.get("infra") or {}, observation["attempt"].get("again") or {}
    own = infra.get("kind") == before.get("kind") == EITHER
    return {**observation, "infra": None} if own else observation


def lost(observation: Mapping[str, Any], why: str) -> dict[str, Any]:
    """The observation of an attempt whose card failed: whatever its ranks said, it is no answer."""
    about = {**observation["attempt"], "interrupted": False}
    return {**observation, "attempt": about, "infra": {"kind": LOST_CARD, "message": why}}
