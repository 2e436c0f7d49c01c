"""Measure `repro report`, and how fast Chromium opens its page: of the baseline, and of synthetic
rows:
``python -m bench.report``.

The rows are those of the baseline again and again, under other model names, in a folder of their
own. Seconds are of a new process: wall time, and CPU time with that of its children. A page is
opened several times: the fastest counts.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from repro_matrix.paths import BASELINE
from repro_matrix.results.rows import Row
from repro_matrix.results.summary import evidence_state, load_rows, write_rows

from bench import chromium
from bench.chromium import Chromium
from bench.machine import HERE, write

OPENINGS = 10


def synthetic(folder: Path, count: int, source: Sequence[Row]) -> int:
    """Write a folder of at least ``count`` rows in whole cells; return their number."""
    rows: list[Row] = []
    for number in itertools.count():
        for _, cell in itertools.groupby(source, key=lambda row: row.evidence):
            if len(rows) >= count:
                write_rows(folder, rows)
                return len(rows)
            members = list(cell)
            model = f"{members[0].model}-{number}"
            evidence = f"cpu/stack/{members[0].case}/{len(rows)}.json"
            path = folder / evidence
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}", encoding="utf-8")
            state = evidence_state(path)
            rows += [
                replace(row, model=model, evidence=evidence, evidence_state=state)
                for row in members
            ]
    raise AssertionError("unreachable")


OPENED = """new Promise((done) => {
  const look = () => {
    const [page] = performance.getEntriesByType("navigation");
    const [paint] = performance.getEntriesByName("first-contentful-paint");
    if (paint) done([page.domContentLoadedEventEnd, paint.startTime]); else setTimeout(look, 10);
  };
  look();
})"""


def opened(page: Path) -> dict[str, Any]:
    """Return the milliseconds until the page's elements are ready and until its first paint."""
    with tempfile.TemporaryDirectory() as folder, Chromium(Path(folder)) as browser:
        times = []
        for _ in range(OPENINGS):
            browser.open(page.as_uri())
            times.append(browser.evaluate(OPENED))
    ready, paint = map(min, zip(*times))
    return {"ready_ms": ready, "paint_ms": paint}


def timed(*arguments: str) -> dict[str, Any]:
    """Run `repro report` once; return its seconds and the size of the page."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        command = [
            sys.executable,
            "-m",
            "repro_matrix",
            "report",
            *arguments,
            "--output",
            str(page),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ})
        wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        shown = opened(page) if chromium.PATH else {}
        return {"wall_s": wall, "cpu_s": cpu, "page_mb": page.stat().st_size / 1e6, **shown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--output", type=Path, default=HERE / "report.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "results"  # a report compares a run with the runs beside it
        count = synthetic(folder, args.rows, load_rows(BASELINE))
        write(
            args.output,
            baseline=timed("--baseline"),
            synthetic={"rows": count, **timed(str(folder))},
        )


if __name__ == "__main__":
    main()
