"""What reading 10,000 stored cells costs: ``python -m bench.page``. Report, diff, summary, and the page in a browser.

The documents are those of the published baseline over and over, each time under other names of their stacks; nothing
is launched. Every verb runs as a user runs it, with a cache of its own: seconds of wall and of CPU (all processes).
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.browser import Browser, program
from bench.machine import machine
from repro_matrix.paths import BASELINE, ROOT
from repro_matrix.results import rows
from repro_matrix.results.publishing import place
from repro_matrix.results.store import Store
from repro_matrix.terminal import summary

HERE = Path(__file__).resolve().parent
STORED = 10_000
PROMISED = {"report_s": 5, "report_mb": 1000, "diff_s": 2, "summary_s": 2, "browser_ms": 100}


def stored(folder: Path, count: int) -> list[Path]:
    """So many cells in a folder, as a run writes them."""
    published = [json.dumps({k: v for k, v in d.items() if k != "path"}) for d in Store(BASELINE).documents()]
    made = []
    for number, source in enumerate(itertools.islice(itertools.cycle(published), count)):
        document = json.loads(source)
        again = number // len(published)
        if again:
            stack = document["stack"]
            stack |= {"label": f"{stack['label']}x{again}", "name": f"{stack['name']}-{again}"}
            document["provenance"]["started"] -= 0.001 * again  # else it would be begun after its attempts
        at = folder / f"{place(document)}.json"
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
        made.append(at)
    return made


def verb(*words: str, cache: Path, codes: tuple[int, ...] = (0,)) -> dict[str, float]:
    """What a verb took, and the most memory that one of its processes had."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    command = [sys.executable, "-m", "repro_matrix.cli", *words]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, env=os.environ | {"REPRO_CACHE": str(cache)}
    )
    _, status, used = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) not in codes:
        raise SystemExit(f"{' '.join(words)}: exit code {os.waitstatus_to_exitcode(status)}")
    wall = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(wall, 1), "cpu_s": round(cpu, 1), "memory_mb": round(used.ru_maxrss / 1024)}


STEPS = (
    ("verdict", "FIX_BROKEN"), ("q", "fsdp"), ("q", "fsdp summon"), ("verdict", ""), ("q", ""), ("strategy", "ddp"),
    ("strategy", ""), ("q", "zero3 newest"), ("q", ""),
)  # fmt: skip


def in_browser(page: Path) -> dict[str, Any]:
    """Milliseconds of the page's own thread (its CPU time: a busy machine adds nothing) until the page is there, until
    all of its cells can be filtered, and of the slowest of filters and searches, style and layout included."""
    with Browser() as browser:
        browser.call("Performance.enable", timeDomain="threadTicks")

        def spent() -> float:
            listed = browser.call("Performance.getMetrics")["metrics"]
            return 1000 * float(next(one["value"] for one in listed if one["name"] == "TaskDuration"))

        def took(step: Callable[[], Any]) -> int:
            before = spent()
            step()
            return round(spent() - before)

        opened = took(lambda: browser.open(page))
        total = browser.js("+document.getElementById('shown').value.split(' of ')[1].split(' ')[0]")
        ready = took(lambda: browser.until(f"document.getElementById('shown').value.startsWith('{total} of')"))
        script = """(() => { const f = document.getElementById('filters'); f[%r].value = %r;
            f.dispatchEvent(new Event('input')); document.body.getBoundingClientRect(); })()"""
        steps = {f"{name}={value}": took(partial(browser.js, script % (name, value))) for name, value in STEPS}
        return {
            "cells": total, "bytes": page.stat().st_size, "opened_ms": opened, "then_all_cells_ms": ready,
            "slowest_filter_ms": max(steps.values()), "filters_ms": steps,
        }  # fmt: skip


def summarised(count: int) -> dict[str, Any]:
    """What stands at the end of a run of so many cells, from documents in memory."""
    documents = list(itertools.islice(itertools.cycle(Store(BASELINE).documents()), count))
    began = time.process_time()
    listed = rows.by_attention(row for document in documents for row in rows.arm_rows(document))
    told = len(list(summary.lines(documents, listed)))
    return {"cpu_s": round(time.process_time() - began, 2), "arms": len(listed), "lines": told}


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else STORED
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    result: dict[str, Any] = {
        "machine": machine(), "commit": commit.strip(), "cells": count, "promised": PROMISED
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        cache, one, other, page = (Path(name) / part for part in ("cache", "one", "other", "page.html"))
        made = stored(one, count)
        report = ["report", str(one), "--output", str(page)]
        result["report, first"] = verb(*report, cache=cache)
        result["report, again"] = verb(*report, cache=cache)
        made[0].touch()
        result["report, one document written again"] = verb(*report, cache=cache)
        stored(other, count)
        compare = ["diff", str(one), str(other)]
        result["diff, first"] = verb(*compare, cache=cache)
        result["diff, again"] = verb(*compare, cache=cache)
        result["cache_mb"] = round(sum(f.stat().st_size for f in cache.rglob("*") if f.is_file()) / 1e6)
        if program():
            result["in the browser"] = in_browser(page)
    result["summary"] = summarised(count)  # last: a verb's memory is at least that of who started it
    print(json.dumps(result, indent=1))
    (HERE / "page.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
