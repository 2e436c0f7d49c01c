"""Runs somebody's own command (torchrun, accelerate, deepspeed, python) and says in launch.json how its ranks ended.

Run by path: ``python command.py SPEC``. Standard library only. Who the ranks are and how they ended is written down by
worker/hooks/sitecustomize.py inside the command's processes; the rest is as in elastic.py.
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
SHOWN = 12  # lines of a launcher's own output that an error quotes


def ranks_of(records: Path, plain: int | None) -> list[dict[str, Any]]:
    """The ranks that have begun, and how they ended. ``plain``: the exit code of a command that is itself the rank."""
    found = []
    for claim in sorted(records.glob("claim-*"), key=lambda path: int(path.name.partition("-")[2])):
        rank, text = int(claim.name.partition("-")[2]), claim.read_text()
        ended: dict[str, Any] = {"code": plain, "signalled": False}  # where no launcher says it
        try:
            ended = json.loads((records / f"exit-{text}.json").read_text())
        except (OSError, ValueError):
            pass
        code = ended["code"]
        name = None
        if code is not None and code < 0:
            known = {int(each): each.name for each in signal.Signals}
            name = known.get(-code, f"SIG{-code}")
        # A rank whose end nobody saw says nothing by it; what it raised stands in its record.
        by_launcher = (code is None and plain is None) or (
            name in ("SIGTERM", "SIGKILL", "SIGINT") and ended["signalled"]
        )
        found.append(
            {
                "rank": rank,
                "pid": int(text) if text.isdigit() else None,
                "exit_code": code if code is None or code >= 0 else None,
                "signal": name,
                "ended_by": "launcher" if by_launcher else "self",
            }
        )
    return found


def main() -> None:
    elastic.die_with_parent()
    reaper = elastic.prctl(elastic.PR_SET_CHILD_SUBREAPER, 1)
    spec_file = Path(sys.argv[1])
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    answer_file, records = spec_file.parent / "launch.json", Path(spec["record_dir"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer: dict[str, Any] = {"ranks": [], "error": None, "finished": False, "port": None, "leftover": []}
    env = {**os.environ, **spec["env"]}
    env.pop("REPRO_PARENT", None)
    try:
        process = subprocess.Popen(spec["command"], env=env, cwd=spec["cwd"], stdin=subprocess.DEVNULL)
    except OSError as error:
        message = f"{spec['command'][0]}: {error.strerror}"
        elastic.write(answer_file, {**answer, "error": {"kind": "launch", "message": message}, "finished": True})
        return
    told = False
    while process.poll() is None:
        time.sleep(POLL_S)
        if not told and len(list(records.glob("claim-*"))) >= spec["world_size"]:
            told = True
            elastic.write(answer_file, {**answer, "ranks": ranks_of(records, None)})
    plain = process.returncode if spec["plain"] else None
    answer["ranks"], answer["command_exit"] = ranks_of(records, plain), process.returncode
    if not answer["ranks"]:
        said = "\n".join((spec_file.parent / "logs" / "launcher.log").read_text(errors="replace").splitlines()[-SHOWN:])
        message = f"the command ended with exit code {process.returncode} before any rank began\n{said}"
        answer["error"] = {"kind": "launch", "message": message}
    elastic.write(answer_file, answer)
    answer["leftover"] = elastic.end_orphans()
    answer["alone"] = reaper and elastic.alone()
    answer["finished"] = True
    elastic.write(answer_file, answer)


if __name__ == "__main__":
    main()
