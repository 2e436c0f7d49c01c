"""Starts the ranks of one attempt with torchrun's own machinery, inside the stack's environment.

Run by path: ``python elastic.py SPEC``. Standard library and torch (>= 2.2) only; nothing of the controller's. It
answers in launch.json beside the spec, once when the ranks are up (their pids) and again when they have ended.

``python elastic.py --rank SCRIPT SETTINGS LOGS`` is what elastic starts for each rank: it prepares the process and
turns itself into ``python -u SCRIPT --settings SETTINGS``: the rank is a direct child with a plain command line.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_PTRACER = 1, 36, 0x59616D61
TERM_GRACE_S = 3.0  # for the ranks that elastic ends because another one failed; its own limit is 30 s
ORPHAN_GRACE_S = 1.0  # helpers of a rank (resource tracker, fork server) end by themselves shortly after it
PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)

ranks: dict[int, subprocess.Popen[Any]] = {}
signalled: set[int] = set()  # processes that this one, elastic included, sent a signal to


def prctl(option: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False  # not Linux: the controller finds what is left by its token


def die_with_parent() -> None:
    """Be killed when the parent dies. It may have died before this call: then end now."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.get("REPRO_PARENT") or os.getppid()):
        os._exit(1)


def become_rank(script: str, settings: str, logs: str) -> None:
    die_with_parent()
    prctl(PR_SET_PTRACER, 2**64 - 1)  # lets py-spy look at a hung rank where ptrace is for ancestors only
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)  # an ignored signal would stay ignored
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file of a large model fills a disk
    # Appending matters: the controller may cut a log that grows without end.
    log = os.open(f"{logs}/rank-{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.execv(sys.executable, [sys.executable, "-u", script, "--settings", settings])


class Recorded(subprocess.Popen):
    """Remembers the processes that elastic starts: its own report leaves out how some of them ended."""

    on_complete: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        env = kwargs.get("env") or {}
        if "RANK" in env:
            ranks[int(env["RANK"])] = self
            if len(ranks) == int(env["WORLD_SIZE"]):
                Recorded.on_complete()


def noted(send: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """os.kill or os.killpg that remembers whom it was sent to: such an end is not the rank's own doing."""

    def wrapper(pid: int, number: int) -> None:
        if number:
            signalled.add(pid)
        send(pid, number)

    return wrapper


def described() -> list[dict[str, Any]]:
    """How each rank ended. Elastic ends the others with TERM, then KILL, once it has seen a failure."""
    out = []
    for rank, process in sorted(ranks.items()):
        code = process.poll()
        name = None
        if code is not None and code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = f"SIG{-code}"
        by_us = name in ("SIGTERM", "SIGKILL") and process.pid in signalled
        out.append(
            {
                "rank": rank,
                "pid": process.pid,
                "exit_code": code if code is None or code >= 0 else None,
                "signal": name,
                "ended_by": "launcher" if by_us else "self",
            }
        )
    return out


def end_stragglers() -> None:
    """KILL the ranks that ignore elastic's TERM: it would wait for 30 s, at a release's fixed setting."""
    while not any(process.poll() for process in ranks.values()):
        time.sleep(0.05)
    time.sleep(TERM_GRACE_S)
    for process in ranks.values():
        if process.poll() is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except OSError:
                pass


def descendants() -> dict[int, str]:
    """Living descendants of this process (pid -> name); as a subreaper it inherits the orphans of its ranks."""
    parents, names = {}, {}
    for entry in os.listdir("/proc"):
        try:
            text = Path("/proc", entry, "stat").read_text(encoding="utf-8", errors="replace") if entry.isdigit() else ""
        except OSError:
            continue
        if text:
            name, _, rest = text[text.index("(") + 1 :].rpartition(") ")
            state, parent = rest.split()[:2]
            parents[int(entry)] = int(parent)
            if state not in "ZX":
                names[int(entry)] = name
    found = {os.getpid()}
    while True:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        if not more:
            return {pid: names[pid] for pid in found if pid in names and pid != os.getpid()}
        found |= more


def end_orphans() -> list[str]:
    """KILL what the ranks left behind; says what it was."""
    limit = time.monotonic() + ORPHAN_GRACE_S
    left = descendants()
    while left and time.monotonic() < limit:
        time.sleep(0.02)
        left = descendants()
    killed = [f"{name}({pid}) killed" for pid, name in sorted(left.items())]
    limit = time.monotonic() + 5
    while left and time.monotonic() < limit:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        time.sleep(0.02)
        left = descendants()
    for process in ranks.values():
        process.poll()  # before the next lines take its status away
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:  # so that their CPU time is counted
            pass
    except OSError:
        pass
    return killed


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def write(path: Path, answer: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(answer), encoding="utf-8")
    os.replace(temporary, path)


def alone() -> bool:
    """Whether no process below this one is left: the kernel knows (a subreaper's orphans are its children)."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def launch(spec: dict[str, Any], answer_file: Path, reaper: bool) -> None:
    subprocess.Popen = Recorded  # type: ignore[misc]
    os.kill, os.killpg = noted(os.kill), noted(os.killpg)
    os.environ.update(spec["env"], REPRO_PARENT=str(os.getpid()))
    answer: dict[str, Any] = {"ranks": [], "error": None, "finished": False, "port": None, "leftover": []}

    def up() -> None:
        write(answer_file, {**answer, "ranks": described()})
        threading.Thread(target=end_stragglers, daemon=True).start()

    Recorded.on_complete = staticmethod(up)
    try:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        # Chosen now: in the seconds that the imports take somebody else might have taken it.
        port = answer["port"] = spec["port"] or free_port()
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=spec["world_size"],
            run_id=f"attempt-{os.getpid()}",
            role="default",  # as torchrun names it
            # The agent hosts the store at a fixed address: no look-up of the host's own name, no second rendezvous.
            rdzv_backend="static",
            rdzv_endpoint=f"127.0.0.1:{port}",
            rdzv_configs={"rank": 0, "timeout": 60},
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            start_method="spawn",
        )
        itself = ("-I", "-S", os.path.abspath(__file__), "--rank")
        try:
            elastic_launch(config, sys.executable)(*itself, spec["script"], spec["settings"], spec["log_dir"])
        except ChildFailedError:
            pass  # the ranks say how they ended
    except Exception as error:  # whatever the machinery raised is the launch's error, not a rank's
        kind = "port" if PORT_TAKEN.search(str(error)) else "import" if isinstance(error, ImportError) else "launch"
        answer["error"] = {"kind": kind, "message": f"{type(error).__name__}: {error}"}
    # Left over is what outlived the ranks; a rank that elastic did not end is an error of its own.
    answer["ranks"] = described()
    write(answer_file, answer)
    answer["leftover"] = end_orphans()
    answer["alone"] = reaper and alone()
    answer["ranks"] = described()
    answer["finished"] = True
    write(answer_file, answer)


def main() -> None:
    if sys.argv[1] == "--rank":
        become_rank(*sys.argv[2:5])
    die_with_parent()
    reaper = prctl(PR_SET_CHILD_SUBREAPER, 1)
    spec_file = Path(sys.argv[1])
    launch(json.loads(spec_file.read_text(encoding="utf-8")), spec_file.parent / "launch.json", reaper)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # some releases of torch abort while the interpreter is torn down


if __name__ == "__main__":
    main()
