"""Submit shards to SLURM through submitit, and read the queue.

The queue is read with squeue: sacct needs an accounting database, which many clusters do not have.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from repro_matrix.config.executors import SlurmExecutor
from repro_matrix.errors import ConfigError, MeasureError
from repro_matrix.results.store import JOB_LOG, JOBS

NAME = "repro-matrix"  # of the jobs
ANSWER_S = 60.0  # for SLURM to answer
_ENDED = re.compile(
    "COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY|BOOT_FAIL|DEADLINE|PREEMPTED"
    "|REVOKED"
)
# Part of a reason to wait -> its meaning, where the job does not start by itself.
_HINTS = {
    "Minutes": "the account or QOS has no hours left",
    "TimeLimit": "timeout_min is above the limit",
    "held": "it failed to start too often: `scontrol release JOB`",
    "Held": "it is held: `scontrol release JOB`",
    "Partition": "the partition has too few nodes for a job, is down, or has a lower limit",
    "ReqNodeNotAvail": "its nodes are down, drained or reserved",
}


@dataclass(frozen=True)
class Job:
    """A job that SLURM knows. ``state``: SLURM's word, such as PENDING. ``why``: SLURM's reason."""

    state: str
    node: str
    why: str

    @property
    def ended(self) -> bool:
        """SLURM knows a job for some minutes after its end (MinJobAge)."""
        return _ENDED.fullmatch(self.state) is not None

    @property
    def reason(self) -> str:
        """Return why it waits, with the meaning; nothing for an ordinary reason of no help."""
        hint = next((hint for part, hint in _HINTS.items() if part in self.why), "")
        return f"{self.why}: {hint}" if hint else self.why.replace("None", "")

    @property
    def waits(self) -> bool:
        return self.state in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED")


class TooMany(MeasureError):
    """SLURM accepts fewer jobs: in one array, or now. The message is that of sbatch."""


# sbatch's words for it: above MaxArraySize; above a limit of jobs that are queued; a full queue.
_TOO_MANY = re.compile("array specification|SubmitJob|MaxJobs|temporarily|try again", re.IGNORECASE)


class Shard:
    """Run one shard of a run in an allocation; submitit pickles it.

    A job that is preempted, requeued or reaches its time limit starts again and continues: its
    results folder has what was measured.
    """

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self.command, self.folder = list(command), folder
        self.process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        import submitit

        log = submitit.JobEnvironment().paths.stdout.name
        env = {**os.environ, JOB_LOG: f"{JOBS}/{log}"}
        self.process = subprocess.Popen(self.command, cwd=self.folder, env=env)
        return self.process.wait()

    def checkpoint(self) -> Any:
        """Return what runs when the job starts again. submitit calls it before the job ends."""
        from submitit.helpers import DelayedSubmission

        if self.process is not None:
            self.process.terminate()  # the run ends its ranks and keeps its results
            # This is a signal handler within self.process.wait(), whose lock is not reentrant.
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(self.process.pid).wait()
        return DelayedSubmission(Shard(self.command, self.folder))


def check_slurm() -> None:
    """Raise ConfigError if SLURM's commands or submitit are missing."""
    missing = [name for name in ("sbatch", "squeue", "scancel") if shutil.which(name) is None]
    if missing:
        raise ConfigError(
            f"executor=slurm: no {', '.join(missing)} on this machine. Run it on a login node of"
            " the cluster, or leave out executor=slurm."
        )
    try:
        import submitit  # noqa: F401
    except ImportError:
        raise ConfigError(
            "executor=slurm needs the package submitit: pip install 'repro-matrix[slurm]'"
        ) from None


def submit(
    executor: SlurmExecutor, shards: Sequence[Shard], folder: Path, exclude: Sequence[str] = ()
) -> list[str]:
    """Submit shards as one array and return their job ids.

    Raises MeasureError with sbatch's message, TooMany if fewer jobs may be accepted.
    """
    import submitit

    values = {
        "job_name": NAME,
        "time": executor.timeout_min,
        "nodes": executor.nodes,
        "srun_args": ["--nodes=1", "--ntasks=1"] if executor.nodes > 1 else None,
        "partition": executor.partition,
        "account": executor.account,
        "qos": executor.qos,
        "gpus_per_node": executor.gpus_per_node,
        "cpus_per_task": executor.cpus_per_task,
        "mem": None if executor.mem_gb is None else f"{executor.mem_gb * 1024:.0f}M",
        "exclude": ",".join(exclude) or None,
        "array_parallelism": executor.array_parallelism,
        "additional_parameters": {"requeue": True, **executor.additional_parameters},
        "stderr_to_stdout": True,  # one log
    }
    slurm = submitit.SlurmExecutor(folder=folder, max_num_timeout=100)
    slurm.update_parameters(**{name: value for name, value in values.items() if value is not None})
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints the error as well
            return [str(job.job_id) for job in slurm.submit_array(list(shards))]
    except submitit.core.utils.FailedSubmissionError as error:
        raise MeasureError(
            f"executor=slurm: no job number in the answer of sbatch: {error}"
        ) from None
    except submitit.core.utils.FailedJobError as error:
        text = "; ".join(str(error).replace("sbatch: error: ", "").splitlines())
        refused = TooMany if _TOO_MANY.search(text) else MeasureError
        raise refused(f"executor=slurm: sbatch refused the jobs: {text}") from None


def look(jobs: Sequence[str]) -> Mapping[str, Job] | None:
    """Return those of the jobs that SLURM knows; None if it does not answer."""
    if not jobs:
        return {}
    command = ["squeue", "--noheader", "--array", "--me", "--states=all", "--format=%i|%T|%N|%r"]
    try:
        # Ctrl-C goes to the whole process group, and must not end these commands.
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            start_new_session=True,
            timeout=ANSWER_S,
        )
    except subprocess.TimeoutExpired:
        return None
    if answer.returncode:
        return None
    lines = (line.split("|", 3) for line in answer.stdout.splitlines())
    return {line[0]: Job(*line[1:]) for line in lines if len(line) == 4 and line[0] in jobs}


def cancel(jobs: Sequence[str]) -> None:
    if jobs:
        with contextlib.suppress(OSError):
            command = ["scancel", f"--name={NAME}", *jobs]
            subprocess.run(command, check=False, start_new_session=True)
