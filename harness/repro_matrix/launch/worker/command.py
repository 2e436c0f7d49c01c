"""Run a user's own command (torchrun, accelerate, deepspeed, python) and report in launch.json how its ranks ended.

Run by path: ``python command.py SPEC``. Standard library only. worker/hooks/sitecustomize.py, inside the command's
processes, records which processes are ranks and how they ended; the rest is as in elastic.py.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import elastic

POLL_S = 0.05
QUOTED_LINES = 12  # of the launcher's own output, in an error


def recorded_ranks(records: Path, command_exit: int | None) -> list[dict[str, Any]]:
    """Return the ranks that have started, and how they ended.

    ``command_exit``: the exit code of a command that is itself the only rank.
    """
    entries = []
    for claim in sorted(records.glob("claim-*"), key=lambda path: int(path.name.partition("-")[2])):
        rank, pid = int(claim.name.partition("-")[2]), claim.read_text()
        end: dict[str, Any] = {"code": command_exit, "signalled": False}
        try:
            end = json.loads((records / f"exit-{pid}.json").read_text())
        except (OSError, ValueError):
            pass  # no launcher reports it
        code = end["code"]
        # A rank whose end nothing reports tells nothing by it; its exception is in its record.
        unknown = code is None and command_exit is None
        ended = code in (-signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT) and end["signalled"]
        entries.append(elastic.rank_entry(rank, int(pid) if pid.isdigit() else None, code, unknown or ended))
    return entries


def main() -> None:
    elastic.die_with_parent()
    reaper = elastic.prctl(elastic.PR_SET_CHILD_SUBREAPER, 1)
    spec_file = Path(sys.argv[1])
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    answer_file, records = spec_file.parent / "launch.json", Path(spec["record_dir"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer = elastic.blank_answer()
    env = {**os.environ, **spec["env"]}
    env.pop("REPRO_PARENT", None)
    try:
        process = subprocess.Popen(spec["command"], env=env, cwd=spec["cwd"], stdin=subprocess.DEVNULL)
    except OSError as error:
        message = f"{spec['command'][0]}: {error.strerror}"
        elastic.write(answer_file, {**answer, "error": {"kind": "launch", "message": message}, "finished": True})
        return
    announced = False
    while process.poll() is None:
        time.sleep(POLL_S)
        if not announced and len(list(records.glob("claim-*"))) >= spec["world_size"]:
            announced = True
            elastic.write(answer_file, {**answer, "ranks": recorded_ranks(records, None)})
    answer["ranks"] = recorded_ranks(records, process.returncode if spec["plain"] else None)
    answer["command_exit"] = process.returncode
    if not answer["ranks"]:
        log = (spec_file.parent / "logs" / "launcher.log").read_text(errors="replace")
        quoted = "\n".join(log.splitlines()[-QUOTED_LINES:])
        message = f"the command ended with exit code {process.returncode} before any rank started\n{quoted}"
        answer["error"] = {"kind": "launch", "message": message}
    elastic.finish(answer_file, answer, reaper)
    elastic.write(answer_file, answer)


if __name__ == "__main__":
    main()
