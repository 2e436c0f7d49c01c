"""A rank that misbehaves as its flags say, without torch: ``--settings`` with flags {fault, rank,
...}."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "repros"))

from repro_kit import Run, main

FOREVER = 600


def raises(run: Run) -> None:
    raise RuntimeError(f"rank {run.rank} of {run.world_size} does not want to")


def raises_beside_stuck(run: Run) -> None:
    while not (run.work_dir / "stuck-1").exists():
        time.sleep(0.02)
    raises(run)


def leaves(run: Run) -> None:
    os._exit(int(run.flags.get("code", 0)))


def segfault(run: Run) -> None:
    ctypes.string_at(0)


def killed(run: Run) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stuck_in_here(run: Run) -> None:
    (run.work_dir / f"stuck-{run.rank}").touch()
    time.sleep(FOREVER)


def ignores_term(run: Run) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stuck_in_here(run)


def grandchildren(run: Run) -> None:
    """Leave a process in a session of its own without the attempt's environment, and a daemon."""
    code = "import time; time.sleep(600)"
    child = subprocess.Popen(
        [sys.executable, "-c", code], env={"PATH": "/usr/bin"}, start_new_session=True
    )
    receive, send = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(send, str(os.getpid()).encode())
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(FOREVER)
        os._exit(0)
    os.wait()
    run.fact("left", [child.pid, int(os.read(receive, 16))])


def grandchild_and_stuck(run: Run) -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    stuck_in_here(run)


def leaves_memory(run: Run) -> None:
    Path(f"/dev/shm/repro_fault_{os.getpid()}").write_bytes(b"x" * 4096)


def nothing(run: Run) -> None:
    run.fact("tmp", os.environ["TMPDIR"])
    run.fact("port", os.environ.get("MASTER_PORT"))
    run.fact("cwd", os.getcwd())
    run.fact("store", os.environ.get("TORCHELASTIC_USE_AGENT_STORE"))


def disk_full(run: Run) -> None:
    Path("/dev/full").write_bytes(b"x")


def each(run: Run) -> None:
    globals()[run.flags["each"][run.rank]](run)


def body(run: Run) -> None:
    at = run.flags.get("rank", "all")
    if at in ("all", run.rank):
        globals()[run.flags["fault"]](run)
    elif run.flags.get("others") == "wait":
        time.sleep(FOREVER)


if __name__ == "__main__":
    main(body)
