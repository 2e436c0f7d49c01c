"""One rank of an attempt, forked from a warm server: what it finds is what torchrun gives it.

Standard library only, Python 3.9. ``main`` is called right after the fork and ends the process; environment, working
folder, signals, standard streams and random seeds are set before any line of the script runs.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import random
import resource
import signal
import sys
import tempfile
import traceback
import types
from typing import Any, NoReturn

import fork_script

Json = dict[str, Any]

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_PTRACER = 1, 36, 0x59616D61
TOKEN = "REPRO_ATTEMPT"


def prctl(option: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False  # not Linux: what is left behind is found by its token


def close(fds: list[int]) -> None:
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            pass


def redirect(log: str) -> None:
    """Standard output and error to a file, input from nothing. The Python streams stay the same objects: libraries
    that took hold of one at import write to the right place."""
    sys.stdout.flush()
    sys.stderr.flush()
    for path, flags, targets in (
        (os.devnull, os.O_RDONLY, (0,)),
        (log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, (1, 2)),
    ):
        fd = os.open(path, flags, 0o600)
        for target in targets:
            os.dup2(fd, target)
        os.close(fd)


def main(spec: Json, rank: int, supervisor: int, receive: int, others: list[int]) -> NoReturn:
    """A rank, from the fork to its end."""
    code = 1
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)
        prctl(PR_SET_PTRACER, 2**64 - 1)  # lets py-spy look at a hung rank where ptrace is for ancestors only
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file of a large model fills a disk
        os.setsid()
        close(others)
        redirect(os.path.join(spec["log_dir"], f"rank-{rank}.log"))
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        signal.signal(signal.SIGINT, signal.default_int_handler)
        environment({**spec["env"], **contract(rank, spec["world_size"], spec["env"][TOKEN])})
        os.chdir(spec["cwd"])
        fresh_state()
        port = os.read(receive, 16).decode()
        os.close(receive)
        if not port:
            os._exit(1)  # no store: the supervisor has said why
        os.environ["MASTER_PORT"] = port
        if "own" in spec:
            fork_script.run(spec, rank)
        code = run_script(spec["script"], ["--settings", spec["settings"]])
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def environment(changes: dict[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def contract(rank: int, world_size: int, run_id: str) -> dict[str, str]:
    """What torchrun puts into a rank's environment (MASTER_PORT follows when the store is up)."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def fresh_state() -> None:
    """What a fork inherits and a fresh process would not share with its neighbours."""
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    torch: Any = sys.modules["torch"]
    # Some releases seed the default generator from the system, others with a constant; only the former reseed here.
    if torch.default_generator.initial_seed() != 67280421310721:
        torch.default_generator.seed()
    tempfile.tempdir = None
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def run_script(script: str, arguments: list[str]) -> int:
    """The script as ``python script arguments`` would run it; read from its file now, so that an edit is seen."""
    sys.argv = [script, *arguments]
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[:0] = [os.path.dirname(os.path.abspath(script)), *own]  # what the server was not started with
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=builtins)
    sys.modules["__main__"] = main
    with open(script, "rb") as source:
        code = compile(source.read(), script, "exec")
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
