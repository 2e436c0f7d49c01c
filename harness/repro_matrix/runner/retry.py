"""Which attempts are made once more, and what is changed for it. Pure: the one place that says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from repro_matrix.launch.device_errors import EITHER
from repro_matrix.records.observation import Again, Attempt, InfraError, Observation

GPU_FAILURE: Final = "gpu_failure"  # the kind of infra that a failed GPU is
OTHER_GPUS = (GPU_FAILURE, "device", EITHER)  # other GPUs may give an answer
TOO_SLOW = "timeout_while_progressing"  # ranks were still at work when time was over
LONGER = 3.0  # what its deadline is multiplied with


def again(observation: Observation, gpus: Sequence[str] = ()) -> dict[str, Any] | None:
    """Changes to the task (schedule.Task), or None: its answer stands. Nothing is made more often than once again.

    ``gpus``: those that it was made on.
    """
    infra_error, made = observation["infra_error"], observation["attempt"]
    if infra_error is None or made.get("retry_of"):
        return None
    if infra_error["kind"] == TOO_SLOW and not made["interrupted"]:
        return {"retry_of": _why(infra_error), "deadline": LONGER * made["deadline_s"]}
    return ambiguous_with(infra_error, gpus)


def ambiguous_with(infra_error: InfraError, gpus: Sequence[str] = ()) -> dict[str, Any] | None:
    """The same of what GPUs may be to blame for, and of nothing else."""
    return {"retry_of": _why(infra_error), "avoid": tuple(gpus)} if infra_error["kind"] in OTHER_GPUS else None


def _why(infra_error: InfraError) -> Again:
    return {"kind": infra_error["kind"], "message": infra_error["message"]}


def told(changes: Mapping[str, Any]) -> str:
    """Why an attempt is made once more, in words."""
    why, deadline = changes["retry_of"], changes.get("deadline")
    return f"{why['kind']}: {why['message']}" + (f"; deadline {deadline:g} s" if deadline else "")


def settled(observation: Observation) -> Observation:
    """What may have been a GPU's failure or the program's, and came again, is the program's: it is judged."""
    infra_error, before = observation["infra_error"], observation["attempt"].get("retry_of")
    own = infra_error and isinstance(before, dict) and infra_error["kind"] == before["kind"] == EITHER
    return {**observation, "infra_error": None} if own else observation


def of_other_code(observation: Observation, why: str) -> Observation:
    """The observation of an attempt that may have run other code than its plan and its fingerprint say."""
    return {**observation, "infra_error": {"kind": "script_error", "message": why}}


def lost(observation: Observation, why: str) -> Observation:
    """The observation of an attempt whose GPU failed: whatever its ranks said, it is no answer."""
    about: Attempt = {**observation["attempt"], "interrupted": False}
    return {**observation, "attempt": about, "infra_error": {"kind": GPU_FAILURE, "message": why}}
