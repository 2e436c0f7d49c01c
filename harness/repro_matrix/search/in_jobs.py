"""Measure the probes of a search in jobs of a cluster.

A job measures one probe with the runner of one machine, into a folder whose name is computed from
the probe: the same command finds the jobs and the results of an earlier one.

Within a job: ``python -m repro_matrix.search.in_jobs FOLDER``.
"""

from __future__ import annotations

import contextlib
import pickle
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from repro_matrix.cluster.jobs import Jobs, Part
from repro_matrix.config.executors import SlurmExecutor
from repro_matrix.environment.stacks import Stack
from repro_matrix.environment.stacks.spec import short_hash
from repro_matrix.errors import ExitCode, ReproError
from repro_matrix.grading.regrade import with_outcomes
from repro_matrix.records.document import Document
from repro_matrix.results import runs
from repro_matrix.results.store import JOBS, MANIFEST, Store, code_hashes, stack_label
from repro_matrix.runner import run as workspace
from repro_matrix.runner.session import Request
from repro_matrix.search.algorithms import Stopped
from repro_matrix.text import log

PROBE = "probe.pkl"  # in a job's folder


@dataclass(frozen=True)
class Probe:
    """One cell on one stack, with the number of attempts of each variant."""

    request: Request
    stack: Stack
    variants: tuple[str, ...]
    repeat: int

    @property
    def key(self) -> str:
        """Return a hash of the cell, its code and the stack. Variants and attempts can be added."""
        cell = self.request.cells[0]
        catalogue = self.request.catalogue
        raw = catalogue.raw
        files = [
            raw["case"][cell.case],
            raw["model"][cell.model],
            raw["strategy"][cell.strategy],
        ]
        code = code_hashes(catalogue, [cell.case])
        texts = self.request.texts(without=("results", "repeat", "jobs", "variants"))
        return short_hash(*map(str, (cell, self.stack.key, files, code, texts)))

    @property
    def place(self) -> tuple[str, str]:
        """Return the stack's label and the cell's name in a folder of results."""
        label = stack_label(self.stack.versions, self.stack.label_key)
        return label, self.request.cells[0].key


class ProbeJobs:
    """Submit probes side by side, and return their results.

    ``results``: the folder that gets them.
    """

    def __init__(
        self,
        executor: SlurmExecutor,
        results: Path,
        say: Callable[[str], None],
        stop: threading.Event,
    ) -> None:
        self.results = results
        self.stop = stop
        self.logs = results / JOBS
        self.jobs = Jobs(executor, self.logs, say)
        self.parts: dict[str, Part] = {}  # by the probe's key, of this command
        self.fresh: set[str] = set()  # the probes that this command measures

    def submit(self, probes: Sequence[Probe]) -> None:
        """Measure probes side by side; return when their jobs have ended.

        A job without a result is the business of ``result``. Raises Stopped.
        """
        parts = [self._part(probe) for probe in probes]
        if not self.stop.is_set():
            self.jobs.run(parts, self.stop)
        if self.stop.is_set():
            raise Stopped("interrupted", ExitCode.INTERRUPTED)

    def result(self, probe: Probe) -> tuple[Document, Path, bool]:
        """Return a probe's document, its file, and whether this command measured it.

        The document is graded by today's definition of the failure. Raises Stopped.
        """
        self.submit([probe])
        part = self.parts[probe.key]
        if problem := self.jobs.problem(part):
            raise Stopped(problem, ExitCode.INCOMPLETE)
        found = [
            document
            for document in Store(part.folder).documents()
            if (document["stack"]["label"], document["cell_id"]) == probe.place
        ]
        if not found:
            text = f"{part.name}: no result of it in {part.folder}. Remove this folder."
            raise Stopped(text, ExitCode.INCOMPLETE)
        document = max(found, key=lambda each: each["provenance"]["started"])
        made: Any = document.pop("path")
        path = self.results / Path(made).relative_to(part.folder)
        cases = probe.request.catalogue.cases
        document = with_outcomes(document, cases[document["case"]], cases)
        Store(self.results).save(path, document)
        return document, path, probe.key in self.fresh

    def _part(self, probe: Probe) -> Part:
        """Return the job of a probe. It also measures what earlier probes of its key requested."""
        folder = self.logs / probe.key
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / PROBE
        earlier: Probe | None = None
        with contextlib.suppress(Exception):  # none, or damaged
            earlier = pickle.loads(path.read_bytes())
        variants = probe.variants
        repeat = probe.repeat
        if earlier is None:
            self._copy_results(probe, folder)
        else:
            variants = tuple(dict.fromkeys([*earlier.variants, *variants]))
            repeat = max(earlier.repeat, repeat)
        if earlier is None or (variants, repeat) != (earlier.variants, earlier.repeat):
            settings = probe.request.settings.model_copy(update={"results": str(folder)})
            request = replace(probe.request, settings=settings)
            own = replace(probe, request=request, variants=variants, repeat=repeat)
            path.write_bytes(pickle.dumps(own))
            (folder / MANIFEST).unlink(missing_ok=True)
            self.parts.pop(probe.key, None)
        if probe.key not in self.parts:
            command = [sys.executable, "-m", __name__, str(folder)]
            part = Part(f"the probe on {probe.stack.name}", folder, command)
            self.parts[probe.key] = part
            self.fresh |= {probe.key} if part.open else set()
        return self.parts[probe.key]

    def _copy_results(self, probe: Probe, folder: Path) -> None:
        """Give a job the stored results of its cell: it measures only what they lack."""
        label, cell = probe.place
        for path in self.results.glob(f"*/{label}/{cell}.json"):
            copied = folder / path.relative_to(self.results)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied)


def main(folder: Path) -> int:
    """Measure the probe of a folder, in a job."""
    from repro_matrix.search.prober import CellRunner

    probe = pickle.loads((folder / PROBE).read_bytes())
    runner = CellRunner()
    runs.note(folder, [], runs.UNFINISHED)
    try:
        with workspace.interruptible(runner.stop, log), runner:
            runner.measure(probe.request, probe.stack, probe.variants, probe.repeat)
    except Stopped as stopped:
        log(f"repro: {stopped}")
        return stopped.exit_code
    except ReproError as error:
        log(f"repro: {error}")
        return int(error.exit_code)
    runs.note(folder, [], runs.ENDED)
    runs.store_exit_code(folder, ExitCode.OK)
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
