"""Run traced trainings in processes forked from one that has imported the packages: jobs as JSON
lines on stdin.

Runs inside a stack. A job: {"name", "script", "args", "ranks", "env", "trace"}. A script of repros/
starts its trace by itself, because it trains a reference first.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shutil
import socket
import sys
import traceback
from pathlib import Path

WORKERS = Path(__file__).parents[1] / "harness" / "repro_matrix" / "launch" / "worker"


def run(job: dict, rank: int, port: int) -> None:
    """Be one rank: never returns."""
    os.environ.update(
        {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
        },
        WORLD_SIZE=str(job["ranks"]),
        LOCAL_WORLD_SIZE=str(job["ranks"]),
        REPRO_TRACE=job["trace"],
        REPRO_WORKER=str(WORKERS),
        **job["env"],
    )
    sys.path.insert(0, str(WORKERS))
    import tracer

    reason = "exit"
    try:
        sys.path.insert(0, str(Path(job["script"]).parent))
        if Path(job["script"]).parent.name != "repros":
            tracer.install(job["trace"], rank, job["ranks"])
        sys.argv = [job["script"], *job["args"]]
        runpy.run_path(job["script"], run_name="__main__")
    except BaseException:  # noqa: BLE001  also SystemExit: this process ends here
        traceback.print_exc()
        reason = "exception"
    tracer.close(reason)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(reason != "exit")


def main() -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    for name in ("Trainer", "LlamaForCausalLM"):  # imported on use
        with contextlib.suppress(
            RuntimeError
        ):  # a release whose Trainer needs another release of peft
            getattr(transformers, name)
    for line in sys.stdin:
        job = json.loads(line)
        shutil.rmtree(job["trace"], ignore_errors=True)
        Path(job["trace"]).mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = []
        for rank in range(job["ranks"]):
            pid = os.fork()
            if not pid:
                run(job, rank, port)
            ranks.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        print(transformers.__version__, job["name"], codes, flush=True)


if __name__ == "__main__":
    main()
