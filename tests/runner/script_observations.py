"""Observations of a user's script, made by hand."""

from __future__ import annotations

import copy
import time
from typing import Any

from repro_matrix.launch.attempt import Attempt

WHERE = {
    "file": "/home/a/train.py",
    "line": 3,
    "function": "step",
    "module": "__main__",
    "code_location": "",
    "code": "x",
}
UPSTREAM = {
    **WHERE,
    "file": "/v/site-packages/transformers/cache.py",
    "module": "transformers.cache",
    "code_location": "transformers.cache",
    "function": "get",
}
PEER = "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:22437"


def raised(kind: str, message: str, *frames: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": kind,
        "module": "builtins",
        "bases": ["Exception"],
        "message": message,
        "frames": list(frames or (WHERE,)),
        "cause": None,
    }


def rank(
    number: int, code: int | None = 0, error: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    record = {
        "schema": 2,
        "rank": number,
        "pid": 100 + number,
        "done": code == 0,
        "exception": error,
        "ended": 5.0,
        "phase": "script",
        "checks": [],
        "metrics": {},
        "facts": {},
        "warnings": [],
        "logs": [],
        "versions": {},
    }
    return {
        "rank": number,
        "pid": 100 + number,
        "exit_code": code,
        "signal": None,
        "terminated_by": "self",
        "record": record,
        "log_tail": "",
        "stack": None,
        **more,
    }


def seen(*ranks: dict[str, Any], command_exit: int = 0, **more: Any) -> dict[str, Any]:
    about = {
        "id": "a",
        "launcher": "command",
        "command": [],
        "started": 0.0,
        "ended": 9.0,
        "wall_s": 9.0,
        "cpu_s": 1.0,
        "leaked_processes": [],
        "seed": 0,
        "backend": "gloo",
        "world_size": len(ranks),
        "deadline_s": 60.0,
        "timed_out": False,
        "interrupted": False,
        "startup_s": 2.0,
        "settings": {},
        "hang": None,
    }
    found = {
        "schema": 1,
        "attempt": about,
        "infra_error": None,
        "ranks": list(ranks),
        "command_exit": command_exit,
        "printed": {"log": [], "metric": [], "cut": False},
    }
    found["attempt"].update({key: more.pop(key) for key in list(more) if key in about})
    return {**found, **more}


def of_attempt(observation: dict[str, Any], attempt: Attempt) -> dict[str, Any]:
    """Return a copy that belongs to the attempt."""
    found = copy.deepcopy(observation)
    found["attempt"] |= {
        "id": attempt.id,
        "settings": attempt.settings,
        "world_size": attempt.world_size,
        "started": time.time(),
        "ended": time.time(),
        "deadline_s": attempt.deadline_s,
        "torchrun": attempt.command and attempt.command.title,
    }
    return found


FAILED = seen(
    rank(0, 1, raised("RuntimeError", PEER)),
    rank(1, 1, raised("IndexError", "list index 3")),
    command_exit=1,
)
FINE = seen(rank(0), rank(1))
