"""Run a selection as jobs of a cluster: each measures a shard with the runner of one machine.

A shard writes its own folder below the run's. At the end their documents are copied into it.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from repro_matrix.cluster import queue
from repro_matrix.cluster.jobs import NOTE, Jobs, Part
from repro_matrix.config.executors import SlurmExecutor
from repro_matrix.errors import ConfigError
from repro_matrix.paths import read_json, write_text
from repro_matrix.results.store import JOBS, Store, StoredDocuments
from repro_matrix.runner.engine import RunTotals


class Controller:
    """Run the shards of one run as jobs, and collect their documents."""

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
        self.texts, self.root = list(texts), root
        self.logs = root / JOBS
        self.jobs = Jobs(executor, self.logs, say)
        stored = read_json(self.logs / NOTE)
        if stored and not resume:
            earlier = [read_json(path) for path in self.logs.glob(f"*/{NOTE}")]
            queue.cancel([jobs[-1] for jobs in earlier if jobs])
            shutil.rmtree(self.logs)
            stored = None
        if stored and stored["texts"] != self.texts:
            raise ConfigError(
                f"--resume: the jobs in {self.logs} are of another selection:"
                f" {' '.join(stored['texts']) or 'everything'}. Choose another folder: results=DIR"
            )
        count = min(executor.shards or executor.array_parallelism, cells)
        self.shards = stored["shards"] if stored else count
        self.parts = [
            Part(
                f"shard {number}",
                self.logs / f"shard-{number}",
                self._command(number, self.logs / f"shard-{number}"),
            )
            for number in range(1, self.shards + 1)
        ]

    def run(self, stop: threading.Event) -> RunTotals:
        """Measure all shards. Raises ConfigError if SLURM refuses the jobs."""
        began = time.monotonic()
        self.logs.mkdir(parents=True, exist_ok=True)
        stored = {"texts": self.texts, "shards": self.shards}
        write_text(self.logs / NOTE, json.dumps(stored) + "\n")
        self.jobs.run(self.parts, stop)
        totals = self._collect()
        totals.interrupted = any(part.open for part in self.parts)
        totals.wall_s = time.monotonic() - began
        return totals

    def problems(self) -> list[str]:
        """Return why less was measured than requested, a line for each shard."""
        return [text for part in self.parts if (text := self.jobs.problem(part))]

    def _command(self, number: int, folder: Path) -> list[str]:
        own = [f"shard={number}/{self.shards}", f"results={folder}", "--resume"]
        return [sys.executable, "-m", "repro_matrix", "matrix", *self.texts, *own]

    def _collect(self) -> RunTotals:
        """Link the documents of all shards into the run's folder."""
        store, totals, paths = Store(self.root), RunTotals(), []
        store.open()
        try:
            for part in self.parts:
                for document in Store(part.folder).documents():
                    made: Any = document.pop("path")
                    target = self.root / Path(made).relative_to(part.folder)
                    if not (target.exists() and target.samefile(made)):
                        store.adopt(Path(made), target, document)
                    paths.append(str(target))
                    variants = document["variants"].values()
                    totals.attempts += sum(len(each["attempts"]) for each in variants)
        finally:
            store.close()
        totals.documents = StoredDocuments(paths)
        return totals
