"""Probe stacks on the GPUs that no other run has locked."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro_matrix.environment import probe
from repro_matrix.environment.gpus import states
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile
from repro_matrix.environment.stacks import Stack
from repro_matrix.launch.attempt import Attempt, stack_environment
from repro_matrix.runner.gpu_pool import GpuLocks

ROOM_MB = 1024  # free memory that a context, a library's workspace and a small matrix need
Json = dict[str, Any]


@dataclass
class Prober:
    """Probe stacks for one run. A stack is asked once; only a good answer is remembered."""

    profile: Profile
    machine: Machine
    state: Path  # the folder of the GPU locks
    _passed: dict[str, Json] = field(default_factory=dict)

    def __call__(self, stack: Stack) -> tuple[Json, str | None]:
        """Return (what is recorded, why the stack cannot be used on these GPUs or None)."""
        if stack.key in self._passed:
            return self._passed[stack.key], None
        answer = self.look(stack)
        problem, recorded = probe.problem(answer, stack, self.profile, self.machine), probe.record(answer)
        if problem is None:
            self._passed[stack.key] = recorded
        return recorded, problem

    def look(self, stack: Stack) -> Json:
        """Ask torch; only GPUs compute that no other run has locked and that have room for it."""
        run_id = f"probe-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        uuids = tuple(gpu.uuid for gpu in self.profile.gpus)
        settings = {
            "device": self.profile.accelerator,
            "backend": self.profile.backend,
            "case": "probe",
            "variant": "probe",
        }
        attempt = Attempt(
            run_id, run_id, Path("."), probe.SCRIPT, settings, stack.python, len(uuids), probe.LIMIT_S,
            stack.environment({}), uuids,
        )  # fmt: skip
        env = stack_environment(attempt)
        if not uuids:
            return probe.ask(stack, None, env)
        with GpuLocks(self.state, run_id) as locks:
            free = [name for name in uuids if locks.acquire([name])]
            try:
                return probe.ask(stack, [uuids.index(name) for name in free if _has_room(name)], env)
            finally:
                locks.release(free)


def _has_room(name: str) -> bool:
    free = states([name])[name].free_mb
    return free is None or free >= ROOM_MB
