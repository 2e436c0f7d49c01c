"""Measure a case in the making: each variant several times, with both launchers, in a folder that is removed."""

from __future__ import annotations

import sys
import tempfile
import threading

from repro_matrix.config.settings import LauncherName
from repro_matrix.errors import MeasureError
from repro_matrix.records.document import Document
from repro_matrix.runner import session
from repro_matrix.runner import workspace as workplace
from repro_matrix.runner.request import ask
from repro_matrix.text import counted, log


def measure_case(slug: str, times: int, overrides: list[str]) -> dict[str, list[Document]] | None:
    """Launcher -> its documents; None: interrupted. Raises MeasureError: it could not be measured."""
    asked = ask([f"case={slug}", *overrides])
    given = {key for key, _ in asked.selections[0].words}
    if "stack" not in given and (known := asked.catalogue.cases[slug].requires.stack):
        asked = asked.having({"stack": known})  # where it is known to reproduce
        print(f"{slug}: on {known}, where it is known to reproduce", file=sys.stderr, flush=True)
    stop = threading.Event()
    found: dict[str, list[Document]] = {}
    with (
        workplace.interruptible(stop, log, "nothing is stored"),
        tempfile.TemporaryDirectory(prefix="repro-check-") as folder,
    ):
        for way, launcher in (("forkserver", LauncherName.forkserver), ("torchrun", LauncherName.torchrun)):
            print(f"{slug}: {counted(times, 'attempt')} a variant, {way}", file=sys.stderr, flush=True)
            usual = {"repeat": times, "launcher": launcher, "results": f"{folder}/{way}"}
            prepared = session.prepare(asked.having({key: usual[key] for key in usual.keys() - given}))
            summary = workplace.execute(prepared, lambda event: None, stop, on_warning=log)
            if summary.problem:
                raise MeasureError(summary.problem)
            if stop.is_set():
                return None
            found[way] = summary.documents
    return found
