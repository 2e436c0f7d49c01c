"""Shared by the launcher tests: attempts of faulty scripts, and checks that nothing is left
behind."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from repro_matrix.environment.stacks import resolve
from repro_matrix.environment.stacks.extensions import compile_op
from repro_matrix.launch import processes
from repro_matrix.launch.attempt import ATTEMPT_TOKEN, Attempt, Launcher, read_launch
from repro_matrix.launch.forkserver import ForkserverLauncher
from repro_matrix.paths import REPROS
from repro_matrix.runner import session
from repro_matrix.runner.attempts import recipe

FAULTS = Path(__file__).parent / "faults"
STACK_CACHE = (
    Path(tempfile.gettempdir()) / f"repro-test-stack-{os.getuid()}"
)  # one, so that attempts share a server
Json = dict[str, Any]


def attempt_of(
    directory: Path,
    fault: str,
    script: str = "misbehave.py",
    deadline: float = 60,
    run_id: str = "test-run",
    world_size: int = 2,
    **flags: Any,
) -> Attempt:
    settings = {
        **{
            "case": "fault",
            "variant": "unfixed",
            "steps": 1,
            "seed": 0,
            "tp_size": 1,
            "devices": world_size,
        },
        "model": {"slug": "none", "scale": "tiny", "weights": "random"},
        "strategy": {"slug": "none", "options": {}},
        "flags": {"fault": fault, **flags},
        "process_group": script == "waits.py",
        "normal_exit": False,
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
        stack_cache=STACK_CACHE,
    )


HEADER = f"import sys\nsys.path.insert(0, {str(REPROS)!r})\nfrom repro_kit import Run, main\n"
FOOTER = "\nif __name__ == '__main__':\n    main(body)\n"


def scripted(directory: Path, body: str, **kwargs: Any) -> Attempt:
    """Return an attempt whose script does ``body``."""
    directory.mkdir(parents=True, exist_ok=True)
    script = directory.parent / f"{directory.name}.py"
    script.write_text(
        HEADER
        + "def body(run):\n"
        + "".join(f"    {line}\n" for line in body.splitlines())
        + FOOTER
    )
    return dataclasses.replace(attempt_of(directory, "nothing"), script=script, **kwargs)


def facts(observation: Json) -> list[Json]:
    """Return the facts that each rank recorded, of an attempt that ended well."""
    assert observation["infra_error"] is None, observation
    assert all(rank["record"]["done"] for rank in observation["ranks"]), observation["ranks"][0][
        "log_tail"
    ]
    records = [rank["record"]["facts"] for rank in observation["ranks"]]
    return [
        {name: value for name, value in each.items() if name not in ("float32", "machine")}
        for each in records
    ]


def wait_for(what: Callable[[], Any], seconds: float = 200) -> Any:
    """Return the first true result of ``what``. The limit is long because a loaded machine is
    slow."""
    limit, pause = time.monotonic() + seconds, 0.02
    while time.monotonic() < limit:
        if value := what():
            return value
        time.sleep(pause)
        pause = min(pause * 1.2, 0.25)
    raise AssertionError(f"not true after {seconds} s")


def free(port: int) -> bool:
    """Whether no process listens on the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def assert_nothing_left(attempt: Attempt, observation: Json) -> None:
    """No process, shared memory or file of the attempt."""
    assert not processes.with_token(ATTEMPT_TOKEN, attempt.id)
    pids = [rank["record"]["pid"] for rank in observation["ranks"] if rank["record"]]
    pids += [rank["pid"] for rank in observation["ranks"] if rank["pid"]]
    for rank in observation["ranks"]:
        pids += ((rank["record"] or {}).get("facts") or {}).get("left", [])
    assert all(gone(pid) for pid in pids)
    assert not attempt.tmp.exists() and not attempt.directory.exists()
    numbers = set(map(str, pids))  # as a file's name may hold them
    assert not [name for name in os.listdir("/dev/shm") if numbers & set(re.findall(r"\d+", name))]


def launched(launcher: Launcher, attempt: Attempt, stop: threading.Event | None = None) -> Json:
    observation = launcher.launch(attempt, stop or threading.Event())
    assert_nothing_left(attempt, observation)
    return observation


def stuck(attempt: Attempt, ranks: int) -> bool:
    """Whether so many ranks are stuck, and every other one has ended."""
    up = read_launch(attempt.launch_file)["ranks"]
    at = {int(path.name.rpartition("-")[2]) for path in attempt.work.glob("stuck-*")}
    others = [entry["pid"] for entry in up if entry["rank"] not in at]
    return len(at) == ranks and len(up) == attempt.world_size and all(map(gone, others))


def launched_until(launcher: Launcher, attempt: Attempt, ranks: int) -> Json:
    """The deadline comes when so many ranks are stuck and the others have ended: tests need not
    guess how slow the machine is."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(launched, launcher, attempt)
        wait_for(lambda: stuck(attempt, ranks))
        time.sleep(
            0.3
        )  # from the file that says so into the wait itself; a rank is looked at twice, seconds apart
        object.__setattr__(attempt, "deadline_s", 0.0)
        return future.result(timeout=200)


def recipe_of(folder: Path, case: str, variant: str) -> Attempt:
    """The attempt that a run makes of a variant on the CPU, in the default cell."""
    prepared = session.prepare([f"case={case}", f"variants=[{variant}]", "hardware=cpu"])
    plan = next(each for each in prepared.plans[0].variants if each.variant == variant)
    attempt = recipe(prepared.catalogue, plan, prepared.stacks[plan.stack], folder)
    return dataclasses.replace(attempt, run_id="test-run")


FAILED = (1, None, "self")  # exit code, signal, who ended it


def ends(observation: Json) -> list[tuple[int | None, str | None, str]]:
    return [
        (rank["exit_code"], rank["signal"], rank["terminated_by"]) for rank in observation["ranks"]
    ]


def failed_together(observation: Json) -> bool:
    """Whether at least one rank failed by itself, and each other one too or was ended by the
    launcher for it."""
    ended = [(None, number, "launcher") for number in ("SIGTERM", "SIGKILL")]
    return FAILED in ends(observation) and all(
        end == FAILED or end in ended for end in ends(observation)
    )


def two_ranks(
    launcher: ForkserverLauncher,
    folder: Path,
    script: str,
    settings: Json,
    asked: Json,
    *imports: str,
) -> list[Json]:
    """Return the facts that two ranks of a script of tests/ recorded; it finds ``asked`` in its
    settings. The same
    ``imports`` share a server. DeepSpeed's CPU op is compiled ahead, as a run does: all ranks would
    compile it."""
    stack = resolve("current")
    if "deepspeed" in imports:
        compile_op(stack)
    attempt = Attempt(
        id=f"{folder.name[:40]}-{uuid.uuid4().hex[:8]}",
        run_id="test-run",
        directory=folder / "ranks",
        script=FAULTS.parent / script,
        settings={**settings, "asked": asked},
        python=sys.executable,
        world_size=2,
        deadline_s=900,
        env=stack.environment({}),
        stack_cache=STACK_CACHE,
        imports=("transformers", *(name for name in imports if importlib.util.find_spec(name))),
    )
    seen = launched(launcher, attempt)
    logs = [rank["log_tail"] for rank in seen["ranks"]]
    assert seen["infra_error"] is None and all(end == (0, None, "self") for end in ends(seen)), logs
    return [rank["record"]["facts"] for rank in seen["ranks"]]
