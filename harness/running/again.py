"""Which attempts are made once more, and what is changed for it. Pure: the one place that says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LOST_CARD = "card"  # the kind of infra that a failed card is
TOO_SLOW = "too slow"  # ranks were still at work when time was over
LONGER = 3.0  # what its deadline is multiplied with


def again(observation: Mapping[str, Any]) -> dict[str, Any] | None:
    """Changes to the task (schedule.Task), or None: its answer stands. Nothing is made more often than once again."""
    infra = observation.get("infra") or {}
    if observation["attempt"].get("again") or not isinstance(infra, Mapping):
        return None
    if infra.get("kind") == LOST_CARD:
        return {"again": str(infra.get("message"))}
    if infra.get("kind") == TOO_SLOW and not observation["attempt"].get("interrupted"):
        deadline = LONGER * float(observation["attempt"]["deadline_s"])
        return {"again": f"too slow: {infra.get('message')}; deadline {deadline:g} s", "deadline": deadline}
    return None


def lost(observation: Mapping[str, Any], why: str) -> dict[str, Any]:
    """The observation of an attempt whose card failed: whatever its ranks said, it is no answer."""
    about = {**observation["attempt"], "interrupted": False}
    return {**observation, "attempt": about, "infra": {"kind": LOST_CARD, "message": why}}
