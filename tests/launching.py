"""What the tests of the launchers share: attempts of scripts that misbehave, and a look for what they left."""

from __future__ import annotations

import os
import socket
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.launch.attempt import ATTEMPT_TOKEN, Attempt
from harness.launch.processes import with_token

FAULTS = Path(__file__).parent / "faults"
Json = dict[str, Any]


def attempt_of(
    directory: Path,
    fault: str,
    script: str = "misbehave.py",
    deadline: float = 60,
    run_id: str = "test-run",
    keep: bool = False,
    world_size: int = 2,
    **flags: Any,
) -> Attempt:
    settings = {
        "case": "fault",
        "arm": "broken",
        "model": {"slug": "none", "scale": "tiny", "weights": "random"},
        "strategy": {"slug": "none", "options": {}},
        "flags": {"fault": fault, **flags},
        "steps": 1,
        "seed": 0,
        "tp_size": 1,
        "process_group": script == "collective.py",
        "teardown": False,
        "device": "cpu",
        "backend": "gloo",
    }
    return Attempt(
        id=f"{fault}-{uuid.uuid4().hex[:8]}",
        run_id=run_id,
        directory=directory,
        script=FAULTS / script,
        settings=settings,
        python=sys.executable,
        world_size=world_size,
        deadline_s=deadline,
        keep=keep,
    )


def wait_for(what: Callable[[], Any], seconds: float = 30) -> Any:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if value := what():
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {seconds} s in vain")


def free(port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def assert_nothing_left(attempt: Attempt, observation: Json) -> None:
    assert not with_token(ATTEMPT_TOKEN, attempt.id)
    pids = [rank["record"]["pid"] for rank in observation["ranks"] if rank["record"]]
    assert all(gone(pid) for pid in pids)
    assert not attempt.tmp.exists() and not attempt.work.exists() and not attempt.cache.exists()
    assert attempt.directory.exists() == attempt.keep
    shared = os.listdir("/dev/shm")
    assert not [name for name in shared for pid in pids if str(pid) in name]
