"""What the page costs: ``python -m bench.page``. 1,000 cells in a browser, and a report of 10,000 stored ones.

The cells are those of the published baseline over and over, under other names of models; nothing is launched.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.browser import Browser, program
from bench.machine import machine
from repro_matrix.conf import catalogue
from repro_matrix.page import render
from repro_matrix.page.page import page
from repro_matrix.page.read import read
from repro_matrix.page.view import Cell
from repro_matrix.paths import BASELINE, ROOT
from repro_matrix.results import rows
from repro_matrix.results.store import Store
from repro_matrix.terminal import summary

HERE = Path(__file__).resolve().parent
CELLS, STORED = 1000, 10_000


def many(cells: list[Cell], count: int) -> list[Cell]:
    return [
        replace(one, id=f"{one.id}-{number}", model=f"{one.model}-{number // len(cells)}")
        for number, one in enumerate(itertools.islice(itertools.cycle(cells), count))
    ]


def in_browser(text: str) -> dict[str, Any]:
    """Milliseconds until the page is there, and of the slowest of filters and searches (style and layout included)."""
    with tempfile.TemporaryDirectory() as name, Browser() as browser:
        path = Path(name) / "page.html"
        path.write_text(text, encoding="utf-8")
        browser.open(path)
        opened = browser.js("performance.getEntriesByType('navigation')[0].domComplete")
        slowest = browser.js("""(() => { const f = document.getElementById('filters'); const took = [];
            const steps = [['verdict', 'FIX_BROKEN'], ['q', 'fsdp'], ['q', 'fsdp summon'], ['verdict', ''], ['q', ''],
                           ['strategy', 'ddp'], ['strategy', '']];
            for (const [name, value] of steps) { const began = performance.now(); f[name].value = value;
                f.dispatchEvent(new Event('input')); document.body.getBoundingClientRect();
                took.push(performance.now() - began); }
            return Math.max(...took); })()""")
        return {"opened_ms": round(opened), "slowest_filter_ms": round(slowest, 1)}


def stored(folder: Path, count: int) -> None:
    """So many documents in a folder, as a run writes them."""
    published = sorted(BASELINE.rglob("*.json"))
    for number, source in enumerate(itertools.islice(itertools.cycle(published), count)):
        target = folder / f"night-{number // len(published)}" / source.relative_to(BASELINE)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(source, target) if source.stat().st_dev == folder.stat().st_dev else target.write_bytes(
            source.read_bytes()
        )


def report(folder: Path, most_s: float) -> dict[str, Any]:
    """`repro report` of a folder: seconds of its own, of one core, and its memory."""
    command = [
        sys.executable,
        "-m",
        "repro_matrix.cli",
        "report",
        str(folder),
        "--output",
        str(folder.parent / "page.html"),
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=most_s)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "memory_mb": round(after.ru_maxrss / 1024),
        "page_mb": round((folder.parent / "page.html").stat().st_size / 1e6, 1),
    }


def main() -> None:
    known = catalogue.load()
    found = read([BASELINE], known)
    thousand = many(found.cells, CELLS)
    began = time.process_time()
    text = render.one_file(page(thousand, "bench", "", known.cases, found.ledger))
    made = time.process_time() - began
    documents = list(itertools.islice(itertools.cycle(Store(BASELINE).documents()), STORED))
    listed = [row for document in documents for row in rows.arm_rows(document)]
    began = time.process_time()
    told = len(list(summary.lines(documents, listed)))
    result: dict[str, Any] = {
        "machine": machine(),
        "page of 1000 cells": {"cpu_s": round(made, 2), "bytes": len(text.encode())},
        "summary of 10000 cells": {"cpu_s": round(time.process_time() - began, 2), "lines": told},
    }
    if program():
        result["in the browser, 1000 cells"] = in_browser(text)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else STORED
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "results"
        folder.mkdir()
        stored(folder, count)
        result[f"report of {count} stored documents"] = {"first": report(folder, 1800), "again": report(folder, 1800)}
    print(json.dumps(result, indent=1))
    (HERE / "page.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
