"""Run parts of a measurement as jobs: submit them, watch the queue, submit lost ones again.

Each part writes its own folder: no lock of the shared file system is needed. A part's jobs are
noted in its folder, so the process that watches them may end and come back.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import PickleError

from repro_matrix.cluster import queue
from repro_matrix.config.executors import SlurmExecutor
from repro_matrix.errors import ConfigError, ExitCode, MeasureError
from repro_matrix.paths import read_json, write_text
from repro_matrix.results import runs
from repro_matrix.text import counted

GONE_S = 30.0  # after so long out of the queue without a result, a job is lost: NFS is slow
CANCEL_S = 60.0  # how long cancelled jobs have to store their results
PREFIX = "repro: "  # begins a line of `repro` in a log
MAX_MESSAGE = 300  # characters of a message that are shown
NOTE = "jobs.manifest"  # in a part's folder: its jobs
# The part ran to its end: its results count.
MEASURED = (ExitCode.OK, ExitCode.DIFFERS, ExitCode.INCOMPLETE)


@dataclass
class Part:
    """A job's share of the work, measured into ``folder``.

    ``jobs``: submitted for it, the last one counts. ``nodes``: where jobs ended without a result.
    """

    name: str
    folder: Path
    command: Sequence[str]
    jobs: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    node: str = ""  # where its job was seen last
    state: str = ""  # SLURM's word for it, then
    missing_since: float | None = None  # by the monotonic clock: its job is not in the queue
    waits: bool = False  # to be submitted
    lost: int = 0  # jobs that ended without a result
    code: int | None = None  # its exit code
    problem: str = ""

    def __post_init__(self) -> None:
        self.jobs = jobs_of(self.folder)
        self.read()

    @property
    def open(self) -> bool:
        return self.code is None and not self.problem

    def read(self) -> None:
        """Read its exit code from its folder."""
        run = runs.read_run(self.folder)
        if run is not None and not run.interrupted and run.exit_code in MEASURED:
            self.code = run.exit_code

    def note(self, job: str) -> None:
        self.jobs.append(job)
        self.waits, self.missing_since = False, None
        write_text(self.folder / NOTE, json.dumps(self.jobs) + "\n")


def jobs_of(folder: Path) -> list[str]:
    """Return the jobs that are noted in a part's folder."""
    found = read_json(folder / NOTE)
    return list(map(str, found)) if isinstance(found, list) else []


@dataclass
class Jobs:
    """Jobs of one command. ``logs``: the folder of their logs."""

    executor: SlurmExecutor
    logs: Path
    say: Callable[[str], None]
    _status: str = ""
    _accepted: bool = False  # SLURM has accepted a job
    _held: bool = False  # SLURM accepted fewer jobs than there are: the rest follows them

    def run(self, parts: Sequence[Part], stop: threading.Event) -> None:
        """Submit what has no result and is not in the queue, and wait for the jobs to end.

        If ``stop`` is set, the jobs are cancelled. Raises ConfigError if SLURM refuses them.
        """
        while (queued := queue.look(_jobs(parts))) is None:
            self._report_status("SLURM does not answer")
            if stop.wait(self.executor.poll_s):
                return
        alive = _alive(queued)
        self._accepted = bool(alive)
        if alive:
            listed = ", ".join(sorted(alive))
            self.say(f"watching jobs of an earlier call, with the options of then: {listed}")
        for part in _open(parts):
            part.waits = not part.jobs or part.jobs[-1] not in alive
        while _open(parts) and not stop.is_set():
            self._look(parts)
            if _open(parts):
                stop.wait(self.executor.poll_s)
        if stop.is_set():
            self._cancel(_jobs(parts))

    def log(self, part: Part) -> str:
        """Return the log of a part's last job."""
        return str(self.logs / f"{part.jobs[-1]}_0_log.out") if part.jobs else "none"

    def problem(self, part: Part) -> str:
        """Return why less was measured than requested, or nothing."""
        short = "incomplete" if part.code == ExitCode.INCOMPLETE else ""
        why = part.problem or short
        return f"{part.name}: {why}. Log: {self.log(part)}" if why else ""

    def _submit(self, parts: Sequence[Part]) -> None:
        """Submit parts as one array; as many of them as SLURM accepts now."""
        self.logs.mkdir(parents=True, exist_ok=True)
        exclude = sorted({node for part in parts for node in part.nodes})
        self._held = False
        while parts:
            shards = [queue.Shard(part.command, Path.cwd()) for part in parts]
            try:
                jobs = queue.submit(self.executor, shards, self.logs, exclude)
            except queue.TooMany as error:
                self._held = True
                if len(parts) == 1:
                    return self._report_status(f"waiting to submit jobs: {error}")
                parts = parts[: len(parts) // 2]
                continue
            except MeasureError as error:
                if exclude:  # no other node has what the jobs need
                    exclude = []
                    continue
                if not self._accepted:
                    hint = "Check executor.partition and the other options of the executor."
                    raise ConfigError(f"{error}. {hint}") from None
                for part in parts:
                    part.problem = str(error)
                return
            self._accepted = True
            for part, job in zip(parts, jobs, strict=True):
                part.note(job)
            array = jobs[0].partition("_")[0]
            return self.say(f"submitted {counted(len(jobs), 'job')} as array {array}")

    def _look(self, parts: Sequence[Part]) -> None:
        """Read the queue once: which jobs wait, run, ended or got lost. Submit what is missing."""
        queued = queue.look(_jobs(parts))
        if queued is None:
            return self._report_status("SLURM does not answer; the jobs go on")
        counts: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        for part in _open(parts):
            job = queued.get(part.jobs[-1]) if part.jobs and not part.waits else None
            if job is not None:
                part.node, part.state = job.node or part.node, job.state
            if job is not None and not job.ended:
                part.missing_since = None
                counts["pending" if job.waits else "running"] += 1
                reasons.update([job.reason] if job.waits and job.reason else [])
                continue
            part.read()
            if part.open and not part.waits:
                self._check_lost(part)
        waiting = [part for part in _open(parts) if part.waits]
        if waiting and not (self._held and counts):
            self._submit(waiting)
            if not counts:
                return  # the submission is on the screen already
            waiting = [part for part in waiting if part.waits]
        finished = sum(part.code is not None for part in parts)
        why = f" ({reasons.most_common(1)[0][0]})" if reasons else ""
        failed = sum(bool(part.problem) for part in parts)
        self._report_status(
            f"jobs: {counts['pending'] + len(waiting)} pending{why}, {counts['running']} running,"
            f" {finished} finished" + (f", {failed} failed" if failed else "")
        )

    def _report_status(self, status: str) -> None:
        if status != self._status:
            self._status = status
            self.say(status)

    def _check_lost(self, part: Part) -> None:
        """Let a part wait for another job, or note its problem, if its job ended without result."""
        now = time.monotonic()
        part.missing_since = part.missing_since or now
        if self._failed(part) or now - part.missing_since <= GONE_S:
            return
        where = f" on {part.node}" if part.node else ""
        state = f" ({part.state})" if part.state not in ("", "COMPLETED", "RUNNING") else ""
        text = f"job {part.jobs[-1]}{where} ended{state} without a result{self._last_message(part)}"
        part.lost += 1
        if part.lost > self.executor.retries:
            part.problem = f"{text}, attempt {part.lost}"
        else:
            part.nodes += [part.node] if part.node else []
            part.waits = True
            self.say(f"{part.name}: {text}; submitting it again")

    def _failed(self, part: Part) -> bool:
        """Return whether its command failed in a way that is the same on every node.

        Not: a signal, and what could not be measured on this node.
        """
        path = self.logs / f"{part.jobs[-1]}_0_result.pkl"
        if not path.exists():
            return False
        from submitit.core.utils import pickle_load

        try:
            kind, value = pickle_load(path)
        except (OSError, ValueError, EOFError, PickleError):  # half written
            return False
        if kind == "success" and (value < 0 or value in (*MEASURED, ExitCode.INTERRUPTED)):
            return False
        message = self._last_message(part)
        part.problem = (
            f"its command ended with {value}{message}" if kind == "success" else value[-300:]
        )
        return True

    def _last_message(self, part: Part) -> str:
        """Return the last message of `repro` in the log of a part's job."""
        path = Path(self.log(part))
        if not path.exists():
            hint = f" and without a log: do the nodes see {self.logs} under this path?"
            return hint if part.node else ""  # else it never started
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line for line in reversed(lines) if line.startswith(PREFIX)), "")
        return f" ({last.removeprefix(PREFIX)[:MAX_MESSAGE]})" if last else ""

    def _cancel(self, jobs: Sequence[str]) -> None:
        queue.cancel(jobs)
        until = time.monotonic() + CANCEL_S
        while _alive(queue.look(jobs) or {}) and time.monotonic() < until:
            time.sleep(min(1.0, self.executor.poll_s))


def _open(parts: Sequence[Part]) -> list[Part]:
    return [part for part in parts if part.open]


def _jobs(parts: Sequence[Part]) -> list[str]:
    return [part.jobs[-1] for part in _open(parts) if part.jobs]


def _alive(known: Mapping[str, queue.Job]) -> set[str]:
    return {name for name, job in known.items() if not job.ended}
