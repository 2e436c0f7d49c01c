"""Which attempts are made once more, and what is changed for it. Pure: the one place that says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from repro_matrix.launch.device_errors import EITHER
from repro_matrix.records.observation import Again, Attempt, Infra, Observation

LOST_CARD: Final = "card"  # the kind of infra that a failed card is
CARDS = (LOST_CARD, "device", EITHER)  # other cards may give an answer
TOO_SLOW = "too slow"  # ranks were still at work when time was over
LONGER = 3.0  # what its deadline is multiplied with


def again(observation: Observation, cards: Sequence[str] = ()) -> dict[str, Any] | None:
    """Changes to the task (schedule.Task), or None: its answer stands. Nothing is made more often than once again.

    ``cards``: those that it was made on.
    """
    infra, made = observation["infra"], observation["attempt"]
    if infra is None or made.get("again"):
        return None
    if infra["kind"] == TOO_SLOW and not made["interrupted"]:
        return {"again": _why(infra), "deadline": LONGER * made["deadline_s"]}
    return elsewhere(infra, cards)


def elsewhere(infra: Infra, cards: Sequence[str] = ()) -> dict[str, Any] | None:
    """The same of what cards may be to blame for, and of nothing else."""
    return {"again": _why(infra), "avoid": tuple(cards)} if infra["kind"] in CARDS else None


def _why(infra: Infra) -> Again:
    return {"kind": infra["kind"], "message": infra["message"]}


def told(changes: Mapping[str, Any]) -> str:
    """Why an attempt is made once more, in words."""
    why, deadline = changes["again"], changes.get("deadline")
    return f"{why['kind']}: {why['message']}" + (f"; deadline {deadline:g} s" if deadline else "")


def settled(observation: Observation) -> Observation:
    """What may have been a card's failure or the program's, and came again, is the program's: it is judged."""
    infra, before = observation["infra"], observation["attempt"].get("again")
    own = infra and isinstance(before, dict) and infra["kind"] == before["kind"] == EITHER
    return {**observation, "infra": None} if own else observation


def of_other_code(observation: Observation, why: str) -> Observation:
    """The observation of an attempt that may have run other code than its plan and its fingerprint say."""
    return {**observation, "infra": {"kind": "script", "message": why}}


def lost(observation: Observation, why: str) -> Observation:
    """The observation of an attempt whose card failed: whatever its ranks said, it is no answer."""
    about: Attempt = {**observation["attempt"], "interrupted": False}
    return {**observation, "attempt": about, "infra": {"kind": LOST_CARD, "message": why}}
