"""A rank that misbehaves as its flags say, without torch: ``--settings`` with flags {fault, rank, ...}."""

from __future__ import annotations

import ctypes
import os
import resource
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


def leaves(run: Run) -> None:
    os._exit(int(run.flags.get("code", 0)))


def segfault(run: Run) -> None:
    ctypes.string_at(0)


def aborts_in_cpp(run: Run) -> None:
    ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()


def killed(run: Run) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def out_of_memory(run: Run) -> None:
    """Killed by the kernel's OOM killer in a memory cgroup; where a cgroup cannot be made, SIGKILL as it would come."""
    for folder, limit in (("memory/", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path(f"/sys/fs/cgroup/{folder}repro-fault-{os.getpid()}")
        try:
            group.mkdir()
            (group / limit).write_text(str(32 << 20))
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            if group.exists():
                group.rmdir()
            continue
        b"x" * (256 << 20)
    killed(run)


def no_memory(run: Run) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
    b"x" * (256 << 20)


def stuck_in_here(run: Run) -> None:
    (run.work_dir / f"stuck-{run.rank}").touch()
    time.sleep(FOREVER)


def ignores_term(run: Run) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stuck_in_here(run)


def grandchildren(run: Run) -> None:
    """Leaves a process in a session of its own, whose environment says nothing of where it comes from, and a daemon."""
    code = "import time; time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], env={"PATH": "/usr/bin"}, start_new_session=True)
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


def binary(run: Run) -> None:
    os.write(1, bytes(range(256)) * 20 + b"\nand \xff\xfe after it\n")


def prints(run: Run) -> None:
    """Its last line comes when the log was cut for the last time: what is printed during a cut may be lost (and what
    is printed right after it stands before the mark)."""
    line = b"the same line again and again, and again, and again\n" * 20000
    for _ in range(int(run.flags["megabytes"])):
        os.write(1, line[: 1 << 20])
        time.sleep(0.001)
    log = Path(os.readlink("/proc/self/fd/1"))
    while log.stat().st_size > 64 << 20 or b"[log cut here" not in log.read_bytes():
        time.sleep(0.02)
    os.write(1, b"\nthe last line\n")


def leaves_memory(run: Run) -> None:
    Path(f"/dev/shm/repro_fault_{os.getpid()}").write_bytes(b"x" * 4096)


def nothing(run: Run) -> None:
    run.fact("tmp", os.environ["TMPDIR"])
    run.fact("port", os.environ.get("MASTER_PORT"))
    run.fact("cwd", os.getcwd())
    run.fact("store", os.environ.get("TORCHELASTIC_USE_AGENT_STORE"))


def disk_full(run: Run) -> None:
    Path("/dev/full").write_bytes(b"x")


def disk_full_for_the_record(run: Run) -> None:
    """The rank's own record has no room: a small disk of this process alone where mounting is allowed."""
    folder = run.record.path.parent
    libc = ctypes.CDLL(None, use_errno=True)
    alone = libc.unshare(0x00020000) == 0 and libc.mount(b"none", b"/", None, 0x44000, None) == 0
    if alone and libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"size=16k") == 0:
        with open(folder / "filler", "wb", buffering=0) as filler:
            while filler.write(b"x" * 4096):
                pass
    disk_full(run)


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
