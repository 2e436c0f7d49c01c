"""What reading 10,000 stored cells costs: ``python -m bench.page``. Report, diff, summary, and the page in a browser;
``python -m bench.page opened`` measures the page alone again, and leaves the other figures of page.json as they are.

The documents are those of the published baseline over and over, each time under other names of their stacks; nothing
is launched. Every verb runs as a user runs it, with a cache of its own: seconds of wall and of CPU (all processes).
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from repro_matrix.config import catalog as catalogue
from repro_matrix.grading import consistency as genuine
from repro_matrix.grading.regrade import contradiction
from repro_matrix.paths import BASELINE, ROOT
from repro_matrix.report import summary
from repro_matrix.results import rows
from repro_matrix.results.accept import place
from repro_matrix.results.store import Store

from bench.browser import Browser, program
from bench.machine import machine

HERE = Path(__file__).resolve().parent
STORED = 10_000
PROMISED = {"report_s": 5, "report_mb": 1000, "diff_s": 2, "summary_s": 2, "open_ms": 100, "filter_ms": 100}


def stored(folder: Path, count: int) -> list[Path]:
    """So many cells in a folder, as a run writes them."""
    published = [{k: v for k, v in d.items() if k != "path"} for d in Store(BASELINE).documents()]
    made = []
    cases = catalogue.load().cases
    for number, source in enumerate(itertools.islice(itertools.cycle(published), count)):
        document: Any = source
        again = number // len(published)
        if again:
            stack, told = document["stack"], document["provenance"]
            stack = {**stack, "label": f"{stack['label']}x{again}", "name": f"{stack['name']}-{again}"}
            told = {**told, "started": told["started"] - 0.001 * again}  # else it would be begun after its attempts
            before = document["stack"]["name"]
            arms = {
                name: {**arm, "stack": stack["name"]} if arm.get("stack") == before else arm
                for name, arm in document["arms"].items()
            }
            document = {**document, "stack": stack, "provenance": told, "arms": arms}
        wrong = contradiction(document) or genuine.contradiction(document, cases[document["case"]])
        if wrong:  # it would be left out, and what is measured would be the reading of nothing
            raise SystemExit(f"{place(document)}: {wrong}")
        at = folder / f"{place(document)}.json"
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
        made.append(at)
    return made


def verb(*words: str, cache: Path, codes: tuple[int, ...] = (0,)) -> dict[str, float]:
    """What a verb took, and the most memory that one of its processes had."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    command = [sys.executable, "-m", "repro_matrix", *words]
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
# Put into the page before anything of it runs: when something of it is on the screen (first contentful paint, as the
# browser tells it), when its filters are there and when they answer (the frame that shows it handed on), how long its
# thread was not free (pieces of more than 50 ms), and from a key to what was painted for it.
WATCH = """(() => {
  const seen = window.__seen = {blocked: 0, longest: 0, keys: []};
  new PerformanceObserver(list => { for (const one of list.getEntries()) {
    seen.blocked += one.duration - 50; seen.longest = Math.max(seen.longest, one.duration);
  } }).observe({type: "longtask", buffered: true});
  const after = then => { const {port1, port2} = new MessageChannel();
    port1.onmessage = () => then(performance.now()); port2.postMessage(0); };
  const once = (is, then) => { const look = () => is() ? after(then) : requestAnimationFrame(look);
    requestAnimationFrame(look); };
  once(() => document.getElementById("filters")?.hidden === false, t => seen.filters = t);
  once(() => document.getElementById("shown")?.value, t => seen.answers = t);
  new PerformanceObserver(list => { for (const one of list.getEntriesByName("first-contentful-paint"))
    seen.paint = one.startTime; }).observe({type: "paint", buffered: true});
  document.addEventListener("keydown", event => requestAnimationFrame(() =>
    after(t => seen.keys.push(t - event.timeStamp))), true);
})()"""
TYPED = "fsdp summon"
TIMES = 5  # that a page is opened, each time in a browser of its own; the median is told
# What a browser needs by the same measure before a page of ours has done anything.
PAGE = """<!doctype html><html lang="en"><title>t</title><p>text<form id="filters" hidden><input name="q"></form>
<output id="shown">0</output><script>document.getElementById("filters").hidden = false</script></html>"""


READY = "window.__seen.paint > 0 && window.__seen.filters > 0 && window.__seen.answers > 0"
MEANS = {
    "paint_ms": "from asking for the file to its first contentful paint, as the browser tells it",
    "usable_ms": "until it is painted and its filters take what is typed (opens)",
    "answers_ms": "until its filters have counted the cells",
    "thread_ms": "CPU of the page's thread until all of it has loaded",
}


def usable(seen: dict[str, float]) -> float:
    return max(seen["paint"], seen["filters"])


def opened(page: Path) -> dict[str, float]:
    """Milliseconds, the median, as MEANS says."""
    found: dict[str, list[float]] = {"paint": [], "usable": [], "answers": [], "thread": []}
    for _ in range(TIMES):
        with Browser() as browser:
            browser.call("Performance.enable", timeDomain="threadTicks")
            browser.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
            browser.open(page)
            browser.until(READY)
            seen = browser.js("window.__seen")
            listed = browser.call("Performance.getMetrics")["metrics"]
            thread = 1000 * next(one["value"] for one in listed if one["name"] == "TaskDuration")
            told = {"paint": seen["paint"], "usable": usable(seen), "answers": seen["answers"], "thread": thread}
            for name, value in told.items():
                found[name].append(value)
    return {f"{name}_ms": round(statistics.median(values)) for name, values in found.items()}


def in_browser(page: Path) -> dict[str, Any]:
    """Milliseconds. ``usable``, ``answers``: as MEANS says; ``blocked``: of all that was done until every cell can be
    filtered, what pieces took beyond 50 ms; ``thread``: CPU of the page's own thread (a busy machine adds nothing);
    ``key``: from a key to what was painted for it, the slowest."""
    with Browser() as browser:
        browser.call("Performance.enable", timeDomain="threadTicks")
        browser.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)

        def spent() -> float:
            listed = browser.call("Performance.getMetrics")["metrics"]
            return 1000 * float(next(one["value"] for one in listed if one["name"] == "TaskDuration"))

        def took(step: Callable[[], Any]) -> int:
            before = spent()
            step()
            return round(spent() - before)

        opened = took(lambda: browser.open(page))
        browser.until(READY)
        total = browser.js("[...document.querySelectorAll('.case')].reduce((sum, one) => sum + +one.dataset.count, 0)")
        every = f"document.getElementById('shown').value === '{total} of {total} cells'"
        ready = took(lambda: browser.until(every))
        began = browser.js("window.__seen")
        script = """(() => { const f = document.getElementById('filters'); f[%r].value = %r;
            f.dispatchEvent(new Event('input')); document.body.getBoundingClientRect(); })()"""
        steps = {f"{name}={value}": took(partial(browser.js, script % (name, value))) for name, value in STEPS}
        browser.js("window.__seen.keys.length = 0; document.getElementById('filters').q.focus()")
        for number, character in enumerate(TYPED, 1):
            browser.key(character)
            browser.until(f"window.__seen.keys.length === {number}")
        keys = [round(ms) for ms in browser.js("window.__seen.keys")]
        assert browser.js("document.getElementById('filters').q.value") == TYPED
        return {
            "cells": total, "bytes": page.stat().st_size, "usable_ms": round(usable(began)),
            "answers_ms": round(began["answers"]),
            "blocked_ms": round(began["blocked"]), "longest_piece_ms": round(began["longest"]),
            "thread_until_loaded_ms": opened, "thread_then_all_cells_ms": ready, "slowest_key_ms": max(keys),
            "keys_ms": keys, "slowest_filter_thread_ms": max(steps.values()), "filters_thread_ms": steps,
        }  # fmt: skip


# The outcomes are those of this very judge: the documents are the published ones.
END = """import gc, os, sys, time
from pathlib import Path
from repro_matrix.config import catalogue
from repro_matrix.grading.regrade import judged_again, with_expectations
from repro_matrix.results.store import Store
from repro_matrix.cli.report import of_run
known, folder = catalogue.load(), Path(sys.argv[1])
gc.disable()
documents = judged_again(Store(folder).documents(), known.cases, graded=True).documents
documents = [with_expectations(one, known.cases[one["case"]]) for one in documents]
began, before = time.monotonic(), os.times()
of_run(documents, folder)
print(time.monotonic() - began, sum(os.times()[:4]) - sum(before[:4]))
"""


def ended(folder: Path, cache: Path) -> dict[str, float]:
    """As a run ends: it writes its page, and what it has judged and shown is kept for who reads its folder."""
    environ = os.environ | {"REPRO_CACHE": str(cache)}
    command = [sys.executable, "-c", END, str(folder)]
    said = subprocess.run(command, cwd=ROOT, env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout
    wall, cpu = map(float, said.split())
    return {"wall_s": round(wall, 1), "cpu_s": round(cpu, 1)}


def summarised(count: int) -> dict[str, Any]:
    """What stands at the end of a run of so many cells, from documents in memory."""
    documents = list(itertools.islice(itertools.cycle(Store(BASELINE).documents()), count))
    began = time.process_time()
    listed = rows.by_attention(row for document in documents for row in rows.arm_rows(document))
    told = len(list(summary.lines(documents, listed)))
    return {"cpu_s": round(time.process_time() - began, 2), "arms": len(listed), "lines": told}


def browsed(page: Path) -> dict[str, Any]:
    """The page in the browser, if there is one, beside a page that holds nothing."""
    if not program():
        return {}
    bare = page.with_name("bare.html")
    bare.write_text(PAGE, encoding="utf-8")
    return {
        "in the browser": {"commit": commit(), "load_average": os.getloadavg(), **in_browser(page)},
        "opened means": MEANS,
        "opened, a page that holds nothing": opened(bare),
        "opened, this page": opened(page),
    }


def commit() -> str:
    said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return said.stdout.strip()


def only_opened() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, page = Path(name) / "one", Path(name) / "page.html"
        stored(folder, STORED)
        verb("report", str(folder), "--output", str(page), cache=Path(name) / "cache")
        found = browsed(page)
    print(json.dumps(found, indent=1))
    before = json.loads((HERE / "page.json").read_text(encoding="utf-8"))
    (HERE / "page.json").write_text(json.dumps(before | found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    if sys.argv[1:] == ["opened"]:
        return only_opened()
    count = int(sys.argv[1]) if len(sys.argv) > 1 else STORED
    result: dict[str, Any] = {"machine": machine(), "commit": commit(), "cells": count, "promised": PROMISED}
    with tempfile.TemporaryDirectory() as name:
        cache, own, one, other, page = (Path(name) / part for part in ("cache", "own", "one", "other", "page.html"))
        made = stored(one, count)
        shutil.copytree(one, other, copy_function=os.link)  # two gigabytes
        report, compare = ["report", str(one), "--output", str(page)], ["diff", str(one), str(other)]
        result["report, first of foreign results"] = verb(*report, cache=cache)
        result["report, again"] = verb(*report, cache=cache)
        result["diff, first of foreign results"] = verb(*compare, cache=cache)
        result["cache_mb"] = round(sum(f.stat().st_size for f in cache.rglob("*") if f.is_file()) / 1e6)
        for folder in (one, other):
            result["a run's end: its page, and what is kept"] = ended(folder, own)
        result["report, first of a run's own"] = verb(*report, cache=own)
        result["diff, first of runs' own"] = verb(*compare, cache=own)
        made[0].touch()
        result["report, one document written again"] = verb(*report, cache=own)
        result |= browsed(page)
    result["summary"] = summarised(count)  # last: a verb's memory is at least that of who started it
    print(json.dumps(result, indent=1))
    (HERE / "page.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
