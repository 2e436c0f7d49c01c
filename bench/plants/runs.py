"""Run train.py in ranks that are forked from this process, which has imported torch and the rest
once."""

from __future__ import annotations

import importlib
import json
import os
import random
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

WORKER = Path(__file__).resolve().parents[2] / "harness" / "repro_matrix" / "launch" / "worker"
SCRIPT = Path(__file__).with_name("train.py")
PACKAGES = ["torch", "transformers", "accelerate", "peft", "deepspeed"]
LIMIT_S = 240.0

# One thread, from the first import on: a process with more cannot be forked.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


@dataclass(frozen=True)
class Ran:
    """One launch of train.py. ``results``: what each rank printed, None where it failed."""

    codes: list[int]
    results: list[Any]
    cpu_s: float
    log: str

    @property
    def passed(self) -> bool:
        return not any(self.codes)


def preload() -> None:
    """Import what the ranks need; afterwards this process has one thread, so that it can be
    forked."""
    sys.path.insert(0, str(WORKER))
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # it notes there which import began last
        try:
            importlib.import_module("preload").preload(PACKAGES)
        finally:
            os.chdir(here)
    # Else DeepSpeed compiles its own collectives for CPUs (minutes), and leaves a lock behind where
    # it is stopped.
    sys.modules["deepspeed"].ops.__compatible_ops__["deepspeed_shm_comm"] = False


def launch(words: list[str], world: int, folder: Path, trace: dict[str, str] | None = None) -> Ran:
    """Run the script in ``world`` ranks; return when all have ended. ``trace``: variables of a
    traced run.

    A run that the folder has already is not repeated.
    """
    saved, launched = folder / "ran.json", [words, world]
    if saved.exists() and (stored := json.loads(saved.read_text()))["launched"] == launched:
        return Ran(**stored["ran"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **(trace or {}),
    }
    if world == 1:
        environment = dict(trace or {})
    before = os.times()
    ranks = []
    for rank in range(world):
        pid = os.fork()
        if not pid:
            numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}
            run_rank(words, rank, world, folder, {**environment, **numbers})
        ranks.append(pid)
    codes = wait(ranks)
    after = os.times()
    results = [folder / f"result-{rank}.json" for rank in range(world)]
    ran = Ran(
        codes,
        [json.loads(each.read_text()) if each.exists() else None for each in results],
        after.children_user + after.children_system - before.children_user - before.children_system,
        "\n".join(
            (folder / f"rank-{rank}.log").read_text(errors="replace")[-3000:]
            for rank in range(world)
        ),
    )
    saved.write_text(json.dumps({"launched": launched, "ran": asdict(ran)}))
    return ran


def wait(ranks: list[int]) -> list[int]:
    """Return the ranks' exit codes. When one fails the others have 5 seconds, or until the
    limit."""
    limit, codes = time.monotonic() + LIMIT_S, dict.fromkeys(ranks, None)
    while None in codes.values():
        for pid in [pid for pid, code in codes.items() if code is None]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid]:
                    limit = min(limit, time.monotonic() + 5)
        if time.monotonic() > limit:
            for pid in [pid for pid, code in codes.items() if code is None]:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [code for code in codes.values() if code is not None]


def run_rank(
    words: list[str], rank: int, world: int, folder: Path, environment: dict[str, str]
) -> NoReturn:
    code, tracer = 1, None
    try:
        log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(environment)
        os.chdir(folder)
        random.seed(0)
        sys.modules["numpy"].random.seed(0)
        sys.argv = [str(SCRIPT), *words, "--out", str(folder / "result")]
        sys.path.insert(0, str(SCRIPT.parent))
        if (
            "REPRO_TRACE" in environment
        ):  # as hooks/sitecustomize.py does it, where the import of torch is the script's
            sys.path.insert(0, str(WORKER))
            tracer = importlib.import_module("tracer")
            sys.path.remove(str(WORKER))
            tracer.install(environment["REPRO_TRACE"], rank, world)
        runpy.run_path(str(SCRIPT), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001 (a rank's every error is its result)
        traceback.print_exc()
    finally:
        if tracer:
            tracer.close("exception" if code else "exit")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
