"""Decide which attempts are repeated, and what is changed for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from repro_matrix.launch.observe import EITHER
from repro_matrix.records.attempt import Attempt, InfraError, Observation

GPU_FAILURE: Final = "gpu_failure"  # the kind of infrastructure error of a failed GPU
OTHER_GPUS = (GPU_FAILURE, "device", EITHER)  # other GPUs may give a result
TOO_SLOW = "timeout_while_progressing"
LONGER = 3.0  # factor for the deadline of an attempt that was too slow


def plan_retry(observation: Observation, gpus: Sequence[str] = ()) -> dict[str, Any] | None:
    """Return the changes to the task (schedule.Task) for a retry, or None where the result stands.

    No attempt is repeated more than once. ``gpus``: those that it ran on.
    """
    error, attempt = observation["infra_error"], observation["attempt"]
    if error is None or attempt.get("retry_of"):
        return None
    if error["kind"] == TOO_SLOW and not attempt["interrupted"]:
        return {"retry_of": _reason(error), "deadline": LONGER * attempt["deadline_s"]}
    return {"retry_of": _reason(error), "avoid": tuple(gpus)} if error["kind"] in OTHER_GPUS else None


def _reason(error: InfraError) -> InfraError:
    return {"kind": error["kind"], "message": error["message"]}


def describe_retry(changes: Mapping[str, Any]) -> str:
    """Return why an attempt is repeated."""
    reason, deadline = changes["retry_of"], changes.get("deadline")
    return f"{reason['kind']}: {reason['message']}" + (f"; deadline {deadline:g} s" if deadline else "")


def resolve_repeated_error(observation: Observation) -> Observation:
    """Grade an error that a GPU or the program caused as the program's, once it occurred on other GPUs too."""
    error, before = observation["infra_error"], observation["attempt"].get("retry_of")
    repeated = error and isinstance(before, dict) and error["kind"] == before["kind"] == EITHER
    return {**observation, "infra_error": None} if repeated else observation


def with_script_error(observation: Observation, message: str) -> Observation:
    """Return the observation of an attempt that may have run other code than its plan and its fingerprint name."""
    return {**observation, "infra_error": {"kind": "script_error", "message": message}}


def with_gpu_failure(observation: Observation, message: str) -> Observation:
    """Return the observation of an attempt whose GPU failed: it is no evidence, whatever its ranks reported."""
    attempt: Attempt = {**observation["attempt"], "interrupted": False}
    return {**observation, "attempt": attempt, "infra_error": {"kind": GPU_FAILURE, "message": message}}
