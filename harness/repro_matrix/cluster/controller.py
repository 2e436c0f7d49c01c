"""Run a selection as jobs of a cluster: each measures a shard with the runner of one machine.

A shard writes its own folder below the run's: no lock of the shared file system is needed. The
controller reads the queue and these folders. It may end and come back: jobs.json has the jobs.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro_matrix.cluster import queue
from repro_matrix.config.executors import SlurmExecutor
from repro_matrix.errors import ConfigError, ExitCode
from repro_matrix.paths import read_json, write_text
from repro_matrix.results import runs
from repro_matrix.results.store import JOBS, Store
from repro_matrix.runner.engine import RunTotals
from repro_matrix.text import counted

GONE_S = 30.0  # after so long out of the queue without a result, a job is lost: NFS is slow
CANCEL_S = 60.0  # how long cancelled jobs have to store their results
# The shard ran to its end: its results count.
MEASURED = (ExitCode.OK, ExitCode.DIFFERS, ExitCode.INCOMPLETE)


@dataclass
class Part:
    """One shard.

    ``jobs``: submitted for it, the last one counts. ``nodes``: where jobs ended without a result.
    """

    number: int
    folder: Path
    jobs: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    node: str = ""  # where its job was seen last
    missing_since: float | None = None  # by the monotonic clock: its job is not in the queue
    code: int | None = None  # its exit code
    problem: str = ""

    @property
    def open(self) -> bool:
        return self.code is None and not self.problem


class Controller:
    """Submit the shards of one run, watch them, and collect their documents."""

    def __init__(
        self,
        executor: SlurmExecutor,
        texts: Sequence[str],
        cells: int,
        root: Path,
        say: Callable[[str], None],
        resume: bool = False,
    ) -> None:
        """``texts``: the run's overrides without the executor. ``root``: the run's folder.

        Without ``resume``, jobs of an earlier run in this folder are cancelled and removed. Raises
        ConfigError: the run to resume had another selection.
        """
        self.executor, self.texts, self.root, self.say = executor, list(texts), root, say
        self.logs = root / JOBS
        self._status = ""
        stored = read_json(self.logs / "jobs.json")
        if stored and not resume:
            queue.cancel([jobs[-1] for jobs in stored["jobs"].values() if jobs])
            shutil.rmtree(self.logs)
            stored = None
        if stored and stored["texts"] != self.texts:
            raise ConfigError(
                f"--resume: the jobs in {self.logs} are of another selection:"
                f" {' '.join(stored['texts']) or 'everything'}. Choose another folder: results=DIR"
            )
        count = min(executor.shards or executor.array_parallelism, cells)
        stored = stored or {"shards": count, "jobs": {}}
        self.parts = [
            Part(number, self.logs / f"shard-{number}", list(stored["jobs"].get(str(number), ())))
            for number in range(1, stored["shards"] + 1)
        ]

    def run(self, stop: threading.Event) -> RunTotals:
        """Submit what has no result and is not in the queue, and wait for the jobs to end.

        Raises MeasureError if SLURM refuses the jobs.
        """
        began = time.monotonic()
        queued = queue.look(self._jobs()) or {}
        for part in self.parts:
            self._read(part)
        missing = [part for part in self._open() if not part.jobs or part.jobs[-1] not in queued]
        self._submit(missing)
        while self._open() and not stop.is_set():
            self._look()
            stop.wait(self.executor.poll_s)
        if stop.is_set():
            self._cancel()
        totals = self._collect()
        totals.interrupted = bool(self._open())
        totals.wall_s = time.monotonic() - began
        return totals

    def problems(self) -> list[str]:
        """Return why less was measured than requested, a line for each shard."""
        found = []
        for part in self.parts:
            if part.problem:
                found.append(f"shard {part.number}: {part.problem}. Log: {self._log(part)}")
            elif part.code == ExitCode.INCOMPLETE:
                found.append(f"shard {part.number}: incomplete. Log: {self._log(part)}")
        return found

    # The jobs

    def _open(self) -> list[Part]:
        return [part for part in self.parts if part.open]

    def _jobs(self) -> list[str]:
        return [part.jobs[-1] for part in self._open() if part.jobs]

    def _submit(self, parts: Sequence[Part]) -> None:
        if not parts:
            return
        self.logs.mkdir(parents=True, exist_ok=True)
        shards = [queue.Shard(self._command(part), Path.cwd()) for part in parts]
        exclude = {node for part in parts for node in part.nodes}
        jobs = queue.submit(self.executor, shards, self.logs, sorted(exclude))
        for part, job in zip(parts, jobs, strict=True):
            part.jobs.append(job)
            part.missing_since = None
        state = {str(part.number): part.jobs for part in self.parts}
        stored = {"texts": self.texts, "shards": len(self.parts), "jobs": state}
        text = json.dumps(stored)
        write_text(self.logs / "jobs.json", text + "\n")
        self.say(f"submitted {counted(len(jobs), 'job')}: {jobs[0].partition('_')[0]}")

    def _command(self, part: Part) -> list[str]:
        own = [f"shard={part.number}/{len(self.parts)}", f"results={part.folder}", "--resume"]
        return [sys.executable, "-m", "repro_matrix", "matrix", *self.texts, *own]

    def _look(self) -> None:
        """Read the queue once: which jobs wait, run, ended or got lost."""
        queued = queue.look(self._jobs())
        if queued is None:
            return self._say("SLURM does not answer; the jobs go on")
        counts: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        lost = []
        for part in self._open():
            job = queued.get(part.jobs[-1])
            if job is not None:
                part.node, part.missing_since = job.node or part.node, None
                counts["pending" if job.waits else "running"] += 1
                reasons.update([job.why] if job.waits else [])
                continue
            self._read(part)
            if not part.open:
                continue
            now = time.monotonic()
            part.missing_since = part.missing_since or now
            if now - part.missing_since > GONE_S and not self._ended(part):
                lost.append(part)
        self._retry(lost)
        finished = sum(part.code is not None for part in self.parts)
        why = f" ({reasons.most_common(1)[0][0]})" if reasons else ""
        failed = sum(bool(part.problem) for part in self.parts)
        self._say(
            f"jobs: {counts['pending']} pending{why}, {counts['running']} running,"
            f" {finished} finished" + (f", {failed} failed" if failed else "")
        )

    def _say(self, status: str) -> None:
        if status != self._status:
            self._status = status
            self.say(status)

    def _read(self, part: Part) -> None:
        """Read the shard's exit code from its folder."""
        run = runs.read_run(part.folder)
        if run is not None and not run.interrupted and run.exit_code in MEASURED:
            part.code = run.exit_code

    def _ended(self, part: Part) -> bool:
        """Return whether its command failed: it would again. A signal is another reason to end."""
        job = part.jobs[-1]
        path = self.logs / f"{job}_0_result.pkl"
        if not path.exists():
            return False
        from submitit.core.utils import pickle_load

        kind, value = pickle_load(path)
        if kind == "success" and (value < 0 or value == ExitCode.INTERRUPTED):
            return False
        part.problem = f"its command ended with {value}" if kind == "success" else f"{value}"[-300:]
        return True

    def _retry(self, lost: Sequence[Part]) -> None:
        again = []
        for part in lost:
            where = f" on {part.node}" if part.node else ""
            text = f"job {part.jobs[-1]}{where} ended without a result"
            if not Path(self._log(part)).exists():
                text += f" and without a log: do the nodes see {self.logs} under this path?"
            if len(part.jobs) > self.executor.retries:
                part.problem = f"{text}, attempt {len(part.jobs)}"
            else:
                part.nodes += [part.node] if part.node else []
                again.append(part)
                self.say(f"shard {part.number}: {text}; submitting it again")
        self._submit(again)

    def _cancel(self) -> None:
        jobs = self._jobs()
        queue.cancel(jobs)
        until = time.monotonic() + CANCEL_S
        while queue.look(jobs) and time.monotonic() < until:
            time.sleep(min(1.0, self.executor.poll_s))

    def _log(self, part: Part) -> str:
        return str(self.logs / f"{part.jobs[-1]}_0_log.out") if part.jobs else "none"

    # The results

    def _collect(self) -> RunTotals:
        """Copy the documents of all shards into the run's folder."""
        store, totals = Store(self.root), RunTotals()
        store.open()
        try:
            for part in self.parts:
                for document in Store(part.folder).documents():
                    made: Any = document.pop("path")
                    target = self.root / Path(made).relative_to(part.folder)
                    store.save(target, document)
                    document["path"] = str(target)
                    totals.documents.append(document)
                    variants = document["variants"].values()
                    totals.attempts += sum(len(each["attempts"]) for each in variants)
        finally:
            store.close()
        return totals
