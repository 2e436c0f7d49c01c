"""Run a selection as jobs of a cluster: each measures a shard with the runner of one machine.

A shard writes its own folder below the run's. At the end their documents are copied into it.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from repro_matrix.cluster import queue
from repro_matrix.cluster.jobs import NOTE, Jobs, Part, jobs_of
from repro_matrix.config.executors import SlurmExecutor
from repro_matrix.errors import ConfigError
from repro_matrix.paths import read_json, write_text
from repro_matrix.planning.cells import Cell
from repro_matrix.results import runs
from repro_matrix.results.store import JOBS, MANIFEST, Store, StoredDocuments
from repro_matrix.runner.engine import RunTotals
from repro_matrix.text import counted, list_some


class Controller:
    """Run the shards of one run as jobs, and collect their documents."""

    def __init__(
        self,
        executor: SlurmExecutor,
        texts: Sequence[str],
        cells: Sequence[Cell],
        root: Path,
        say: Callable[[str], None],
        resume: bool,
        code: Mapping[str, str],
    ) -> None:
        """``texts``: the run's overrides without the executor. ``root``: the run's folder.

        ``cells``: of the run. ``code``: hashes of what their ranks execute. Without ``resume``,
        jobs of an earlier run in this folder are cancelled and removed. Raises ConfigError: the run
        to resume had another selection; ResultsError: another run writes to this folder.
        """
        self.texts, self.cells, self.root, self.code = list(texts), cells, root, dict(code)
        self.logs = root / JOBS
        self.jobs = Jobs(executor, self.logs, say)
        self.store = Store(root)
        self.store.open()
        stored = read_json(self.logs / NOTE)
        if not (resume and isinstance(stored, dict) and stored.keys() >= {"texts", "shards"}):
            earlier = map(jobs_of, self.logs.glob("shard-*"))
            queue.cancel([jobs[-1] for jobs in earlier if jobs])
            shutil.rmtree(self.logs, ignore_errors=True)
            stored = None
        if stored and stored.get("code") != self.code:  # the shards keep what is still the same
            for manifest in self.logs.glob(f"*/{MANIFEST}"):
                manifest.unlink()
        if stored and stored["texts"] != self.texts:
            raise ConfigError(
                f"--resume: the jobs in {self.logs} are of another selection:"
                f" {' '.join(stored['texts']) or 'everything'}. Choose another folder: results=DIR"
            )
        count = min(executor.shards or executor.array_parallelism, len(cells))
        self.shards = stored["shards"] if stored else count
        noted = {"texts": self.texts, "shards": self.shards, "code": self.code}
        write_text(self.logs / NOTE, json.dumps(noted) + "\n")
        self.parts = []
        for number in range(1, self.shards + 1):
            folder = self.logs / f"shard-{number}"
            self.parts.append(Part(f"shard {number}", folder, self._command(number, folder)))
        self.missing: list[Cell] = []  # cells that no shard measured
        self.damaged: list[str] = []  # results that cannot be read

    def run(self, stop: threading.Event) -> RunTotals:
        """Measure all shards. Raises ConfigError if SLURM refuses the jobs."""
        began = time.monotonic()
        try:
            self.jobs.run(self.parts, stop)
            totals = self._collect()
        finally:
            self.store.close()
        totals.interrupted = any(part.open for part in self.parts)
        totals.wall_s = time.monotonic() - began
        return totals

    def problems(self) -> list[str]:
        """Return why less was measured than requested."""
        texts = [text for part in self.parts if (text := self.jobs.problem(part))]
        if self.missing and not texts:
            names = list_some([cell.key for cell in self.missing])
            texts.append(f"no result of {counted(len(self.missing), 'cell')}: {names}")
        return texts + self.damaged

    def _command(self, number: int, folder: Path) -> list[str]:
        own = [f"shard={number}/{self.shards}", f"results={folder}", "--resume"]
        return [sys.executable, "-m", "repro_matrix", "matrix", *self.texts, *own]

    def _collect(self) -> RunTotals:
        """Link the documents of all shards into the run's folder, those of its cells."""
        totals, paths, reasons = RunTotals(), list[str](), Counter[str]()
        wanted: dict[Any, list[Cell]] = defaultdict(list)
        for cell in self.cells:
            wanted[_place(cell.case, cell.model, cell.strategy, dict(cell.flags))].append(cell)
        for part in self.parts:
            results = Store(part.folder)
            for document in results.documents():
                made: Any = document.pop("path")
                target = self.root / Path(made).relative_to(part.folder)
                place = _place(
                    document["case"], document["model"], document["strategy"], document["flags"]
                )
                if not wanted[place] or str(target) in paths:
                    continue  # an earlier job's
                wanted[place].pop()
                if not (target.exists() and target.samefile(made)):
                    self.store.adopt(Path(made), target, document)
                paths.append(str(target))
                variants = list(document["variants"].values())
                if skipped := variants[0]["skipped"]:
                    reasons[skipped] += 1
                totals.attempts += sum(len(each["attempts"]) for each in variants)
            self.damaged += results.damaged
            run = runs.read_run(part.folder)
            left = {name.split()[-1] for name in run.left or ()} if run else set()
            totals.not_started += [cell for cell in self.cells if cell.key in left]
        for reason, count in reasons.most_common():
            self.jobs.say(f"{counted(count, 'cell')} skipped: {reason}")
        missing = [cell for cells in wanted.values() for cell in cells]
        self.missing = [cell for cell in missing if cell not in totals.not_started]
        totals.documents = StoredDocuments(paths)
        return totals


def _place(case: str, model: str, strategy: str, flags: Mapping[str, Any]) -> Any:
    """Return what a cell and its result have in common; its ranks depend on the node's GPUs."""
    return case, model, strategy, json.dumps(flags, sort_keys=True)
