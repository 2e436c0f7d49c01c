"""Find the nodes of an attempt: those of SLURM's allocation, or of a command that reaches them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from repro_matrix.errors import MeasureError


@dataclass(frozen=True)
class Nodes:
    """The nodes over which the ranks of an attempt are spread.

    ``host``: of node 0. ``commands``: what precedes a command to start it on a node: one for each
    node, or one that starts it on all of them.
    """

    count: int
    host: str
    commands: tuple[tuple[str, ...], ...]
    job: str | None = None  # SLURM's


def count(env: Mapping[str, str]) -> int:
    """Return how many nodes the allocation has in which this process runs."""
    text, job = env.get("SLURM_JOB_NUM_NODES", ""), {"SLURM_JOB_ID", "SLURM_JOB_NODELIST"}
    return int(text) if text.isdigit() and job <= env.keys() and shutil.which("srun") else 1


def started_by(command: str, number: int, host: str | None) -> Nodes:
    """Return nodes that a command with {node} reaches."""
    commands = (shlex.split(command.replace("{node}", str(each))) for each in range(number))
    return Nodes(number, host or "127.0.0.1", tuple(map(tuple, commands)))


def of_slurm(number: int, host: str | None) -> Nodes:
    """Return the first nodes of this job's allocation. Raises MeasureError."""
    job = os.environ["SLURM_JOB_ID"]
    listed = _answer("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"])
    names = listed.split()[:number]
    if host is None:
        # NodeAddr: at which SLURM itself reaches the node; its name need not resolve.
        found = re.search(r"NodeAddr=(\S+)", _answer("scontrol", "show", "node", names[0]))
        host = found[1] if found else names[0]
    # The ranks' environment has none of SLURM's variables: those of the step that runs `repro`
    # would be srun's defaults.
    conf = [f"SLURM_CONF={os.environ['SLURM_CONF']}"] if "SLURM_CONF" in os.environ else []
    srun = ("srun", f"--jobid={job}", "--overlap", f"--nodes={number}", "--ntasks-per-node=1")
    more = (f"--nodelist={','.join(names)}", "--kill-on-bad-exit=1", "--input=none", "--quiet")
    return Nodes(number, host, (("env", *conf, *srun, *more),), job)


def _answer(*command: str) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise MeasureError(f"{shlex.join(command)}: {ran.stderr.strip()}. Is SLURM working?")
    return ran.stdout
