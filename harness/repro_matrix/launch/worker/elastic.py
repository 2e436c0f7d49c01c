"""Start the ranks of an attempt inside the stack, with torchrun's code or a user's command.

Run by path: ``python elastic.py SPEC``. It uses the standard library and torch (>= 2.2) only, and
writes launch.json beside the spec: once when all ranks have started (their pids) and again when
they have ended.

A spec with ``command`` is a user's own (torchrun, accelerate, deepspeed, python).
worker/hooks/sitecustomize.py, inside its processes, records which of them are ranks and how they
ended.

Elastic starts ``python elastic.py --rank SCRIPT SETTINGS LOGS`` for each rank. That prepares the
process and replaces itself with ``python -u SCRIPT --settings SETTINGS``, so that the rank is a
direct child with a plain command line.

The fork server (worker/fork_server.py) imports its process helpers from here.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_PTRACER = 1, 36, 0x59616D61
# for the ranks that the fork server ends because another one failed (elastic's limit: 30 s)
TERM_GRACE_S = 3.0
# helpers of a rank (resource tracker, fork server) end by themselves shortly after it
ORPHAN_GRACE_S = 1.0
KILL_S = 5.0  # for killed processes to vanish
POLL_S = 0.05  # for the ranks of a user's command
QUOTED_LINES = 12  # of a user's launcher, in an error
PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)

ranks: dict[int, subprocess.Popen[Any]] = {}
signalled: set[int] = set()  # processes to which this one, elastic included, sent a signal


def prctl(option: int, value: int) -> bool:
    try:
        return bool(
            ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) == 0
        )
    except (OSError, AttributeError):
        return False  # not Linux: the controller finds leaked processes by their token


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies.

    End now if the parent has died already.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.get("REPRO_PARENT") or os.getppid()):
        os._exit(1)


def allow_debugging_and_no_core() -> None:
    prctl(PR_SET_PTRACER, 2**64 - 1)  # lets py-spy read a hung rank where only ancestors may ptrace
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file of a large model fills a disk


def append_output(path: str) -> None:
    """Send standard output and error to a file.

    The controller may cut a log that grows without limit: append.

    The Python streams stay the same objects: libraries that took hold of one at import write to the
    right place.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def become_rank(script: str, settings: str, logs: str) -> None:
    die_with_parent()
    allow_debugging_and_no_core()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)  # an ignored signal would stay ignored
    append_output(f"{logs}/rank-{os.environ['RANK']}.log")
    os.execv(sys.executable, [sys.executable, "-u", script, "--settings", settings])


class TrackedPopen(subprocess.Popen):
    """Remember the processes that elastic starts: its own report omits how some of them ended."""

    on_complete: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        env = kwargs.get("env") or {}
        if "RANK" in env:
            ranks[int(env["RANK"])] = self
            if len(ranks) == int(env["LOCAL_WORLD_SIZE"]):
                TrackedPopen.on_complete()


def record_signals(send: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Wrap os.kill or os.killpg to remember the target.

    The rank did not cause such an end itself.
    """

    def wrapper(pid: int, number: int) -> None:
        if number:
            signalled.add(pid)
        send(pid, number)

    return wrapper


def rank_entry(rank: int, pid: Any, code: Any, by_launcher: bool) -> dict[str, Any]:
    """Return a rank's entry in launch.json.

    ``code``: a negative one is a signal; None: it still runs, or unknown.
    """
    killed_by = None
    if code is not None and code < 0:
        names = {-each: each.name for each in signal.Signals}
        killed_by = names.get(code, f"SIG{-code}")
        code = None
    return {
        "rank": rank,
        "pid": pid,
        "exit_code": code,
        "signal": killed_by,
        "terminated_by": "launcher" if by_launcher else "self",
    }


def rank_entries() -> list[dict[str, Any]]:
    """Return how each rank ended.

    Elastic ends the others with TERM, then KILL, after a failure.
    """
    entries = []
    for rank, process in sorted(ranks.items()):
        code = process.poll()
        ours = code in (-signal.SIGTERM, -signal.SIGKILL) and process.pid in signalled
        entries.append(rank_entry(rank, process.pid, code, ours))
    return entries


def children() -> dict[int, str]:
    """Return this process's children (pid -> name)."""
    names = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            text = Path("/proc", entry, "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # it has ended meanwhile
        name, _, rest = text.partition("(")[2].rpartition(") ")
        if rest.split()[1] == str(os.getpid()):
            names[int(entry)] = name
    return names


def reap() -> bool:
    """Collect the children that have ended; return whether one is left.

    A subreaper adopts orphans.
    """
    for process in ranks.values():
        process.poll()  # before the next lines take its status away
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def kill_orphans() -> list[str]:
    """Kill the processes that the ranks left behind; return their names."""
    began, killed = time.monotonic(), {}
    while reap() and time.monotonic() - began < ORPHAN_GRACE_S + KILL_S:
        if time.monotonic() - began > ORPHAN_GRACE_S:
            for pid, name in children().items():  # what these leave behind becomes a child in turn
                killed[pid] = f"{name}({pid}) killed"
                with contextlib.suppress(OSError):  # it runs as another user
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [killed[pid] for pid in sorted(killed)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def blank_answer() -> dict[str, Any]:
    return {"ranks": [], "error": None, "finished": False, "port": None, "leaked_processes": []}


def write(path: Path, answer: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(answer), encoding="utf-8")
        os.replace(temporary, path)
    except (
        OSError
    ) as error:  # the disk is full, or the folder was removed: end the ranks in order all the same
        print(f"the launch cannot be recorded: {error}", file=sys.stderr)


def finish(path: Path, answer: dict[str, Any]) -> None:
    """Write ``answer``, end what the ranks left behind, and write the final answer."""
    write(path, answer)
    answer["leaked_processes"] = kill_orphans()
    if ranks:
        answer["ranks"] = rank_entries()  # a rank that elastic did not end was killed as an orphan
    usage = [
        resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    answer["cpu_s"] = round(sum(each.ru_utime + each.ru_stime for each in usage), 3)
    answer["finished"] = True
    write(path, answer)


def one_node(spec: dict[str, Any], port: int) -> dict[str, Any]:
    """Return torchrun's options for an attempt on this machine."""
    return {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": spec["world_size"],
        "run_id": f"attempt-{os.getpid()}",
        # The agent hosts the store at a fixed address: no look-up of the host's own name, no second
        # rendezvous.
        "rdzv_backend": "static",
        "rdzv_endpoint": f"127.0.0.1:{port}",
        "rdzv_configs": {"rank": 0, "timeout": 60},
        "local_addr": "127.0.0.1",
    }


def launch(
    spec: dict[str, Any],
    answer_file: Path,
    answer: dict[str, Any],
    options: Callable[[int], dict[str, Any]],
) -> None:
    """Start ranks by torchrun's code and wait for their end.

    ``answer``: what is reported beside the ranks; ``options``: of torchrun, for a port.
    """
    subprocess.Popen = TrackedPopen  # type: ignore[misc]
    os.kill, os.killpg = record_signals(os.kill), record_signals(os.killpg)
    os.environ.update(spec["env"], REPRO_PARENT=str(os.getpid()))
    TrackedPopen.on_complete = lambda: write(answer_file, {**answer, "ranks": rank_entries()})
    try:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        # Choose it now: during the imports, which take seconds, another process might take it.
        port = answer["port"] = answer["port"] or spec.get("port") or free_port()
        config = LaunchConfig(
            **options(port),
            role="default",  # as torchrun names it
            max_restarts=0,
            monitor_interval=0.1,
            start_method="spawn",
        )
        itself = ("-I", "-S", str(Path(__file__).resolve()), "--rank")
        try:
            elastic_launch(config, sys.executable)(
                *itself, spec["script"], spec["settings"], spec["log_dir"]
            )
        except ChildFailedError:
            pass  # the entries of the ranks report how they ended
    except (
        Exception
    ) as error:  # whatever torchrun's code raises is an error of the launch, not of a rank
        kind = "import" if isinstance(error, ImportError) else "launch"
        if PORT_TAKEN.search(f"{error} {error.__cause__}"):
            kind = "port"
        answer["error"] = {"kind": kind, "message": f"{type(error).__name__}: {error}"}
    answer["ranks"] = rank_entries()


def recorded_ranks(records: Path, command_exit: int | None) -> list[dict[str, Any]]:
    """Return the ranks that have started, and how they ended.

    ``command_exit``: the exit code of a command that is itself the only rank.
    """
    entries = []
    claims = {int(path.name.partition("-")[2]): path for path in records.glob("claim-*")}
    for rank, claim in sorted(claims.items()):
        pid = claim.read_text()
        end: dict[str, Any] = {"code": command_exit, "signalled": False}
        try:
            end = json.loads((records / f"exit-{pid}.json").read_text())
        except (OSError, ValueError):
            pass  # no launcher reports it
        code = end["code"]
        unknown = code is None  # only the exception in its record counts
        ended = code in (-signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT) and end["signalled"]
        entries.append(
            rank_entry(rank, int(pid) if pid.isdigit() else None, code, unknown or ended)
        )
    return entries


def run_command(spec: dict[str, Any], answer_file: Path) -> None:
    """Run a user's own command and report the ranks that its processes recorded."""
    records, answer = Path(spec["record_dir"]), blank_answer()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.pop("REPRO_PARENT", None)
    process = subprocess.Popen(spec["command"], cwd=spec["cwd"], stdin=subprocess.DEVNULL)
    announced = False
    while process.poll() is None:
        time.sleep(POLL_S)
        claims = [each for each in records.glob("claim-*") if each.stat().st_size]
        if not announced and len(claims) >= spec["world_size"]:
            announced = True
            write(answer_file, {**answer, "ranks": recorded_ranks(records, None)})
    answer["ranks"] = recorded_ranks(records, process.returncode if spec["plain"] else None)
    answer["command_exit"] = process.returncode
    if not answer["ranks"]:
        log = (answer_file.parent / "logs" / "launcher.log").read_text(errors="replace")
        quoted = "\n".join(log.splitlines()[-QUOTED_LINES:])
        message = (
            f"the command ended with exit code {process.returncode} before any rank"
            f" started\n{quoted}"
        )
        answer["error"] = {"kind": "launch", "message": message}
    finish(answer_file, answer)


def main() -> None:
    if sys.argv[1] == "--rank":
        become_rank(*sys.argv[2:5])
    die_with_parent()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    spec_file = Path(sys.argv[1])
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    answer_file, answer = spec_file.parent / "launch.json", blank_answer()
    if "command" in spec:
        run_command(spec, answer_file)
    else:
        launch(spec, answer_file, answer, lambda port: one_node(spec, port))
        finish(answer_file, answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # some releases of torch abort while the interpreter is torn down


if __name__ == "__main__":
    main()
