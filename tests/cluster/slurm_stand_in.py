"""Stand in for sbatch, srun, squeue and scancel: a job is a process of this machine.

Installed under these names; the folder in STAND_IN holds a file per job. `sbatch` refuses
partitions other than `main`, and more jobs than the files of REFUSALS allow. Each job's node is n1, or n2 if n1 is excluded.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

FOLDER = Path(os.environ["STAND_IN"])
# file that holds the limit -> what sbatch prints above it
REFUSALS = {
    "max-array-size": "Batch job submission failed: Invalid job array specification",
    "max-submit-jobs": (
        "QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates"
        " accounting/QOS policy (job submit limit, user's size and/or time limits)"
    ),
    "hours": "Batch job submission failed: Invalid account or account/partition combination specified",
}


def sbatch(file: str) -> None:
    text = Path(file).read_text(encoding="utf-8")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.MULTILINE))
    if options.get("partition", "main") != "main":
        sys.exit("sbatch: error: invalid partition specified: " + options["partition"])
    wanted = options.get("array", "0-0").split("%")[0].split("-")[1]
    for name, message in REFUSALS.items():
        limit = FOLDER / name
        if limit.exists() and int(wanted) + 1 > int(limit.read_text(encoding="utf-8")):
            sys.exit("sbatch: error: " + message)
    if "n1,n2" in options.get("exclude", ""):
        sys.exit("sbatch: error: Requested node configuration is not available")
    number = len(list(FOLDER.glob("*_0"))) + len(list(FOLDER.glob("[0-9]*"))) + 100
    array = options.get("array")
    tasks = range(int(array.split("-")[1].split("%")[0]) + 1) if array else [None]
    node = "n2" if "n1" in options.get("exclude", "") else "n1"
    for task in tasks:
        name = str(number) if task is None else f"{number}_{task}"
        env = {
            **os.environ,
            "SLURM_JOB_ID": str(number),
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_NTASKS": "1",
            "SLURM_JOB_NODELIST": node,
            "SLURMD_NODENAME": node,
            **{f"SLURM_{each}": "0" for each in ("NODEID", "PROCID", "LOCALID")},
        }
        if task is not None:
            env |= {"SLURM_ARRAY_JOB_ID": str(number), "SLURM_ARRAY_TASK_ID": str(task)}
        output = options["output"].replace("%A_%a", name).replace("%j", name).replace("%t", "0")
        with open(output, "ab") as log:
            job = subprocess.Popen(
                ["bash", file], env=env, stdout=log, stderr=log, start_new_session=True
            )
        (FOLDER / name).write_text(f"{job.pid} {node}", encoding="utf-8")
    print(f"Submitted batch job {number}")


def srun(*words: str) -> None:
    command = next(i for i, word in enumerate(words) if "python" in word)
    os.execvp(words[command], words[command:])


def squeue() -> None:
    if (FOLDER / "silent").exists():
        sys.exit("slurm_load_jobs error: Unable to contact slurm controller")
    for file in sorted(FOLDER.glob("[0-9]*")):
        pid, node = file.read_text(encoding="utf-8").split()
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists() and stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z":
            why = FOLDER / "pending"
            state = ("PENDING", "", why.read_text()) if why.exists() else ("RUNNING", node, "None")
            print("|".join([file.name, *state]))


def scancel(option: str, *names: str) -> None:
    assert option == "--name=repro-matrix"
    for name in names:
        pid = int((FOLDER / name).read_text(encoding="utf-8").split()[0])
        try:
            os.killpg(pid, signal.SIGTERM)
        except ProcessLookupError:
            pass


if __name__ == "__main__":
    commands = {"sbatch": sbatch, "srun": srun, "squeue": lambda *_: squeue(), "scancel": scancel}
    commands[Path(sys.argv[0]).name](*sys.argv[1:])
