"""Compare each silent case's unfixed variant with its best fix, and record the first place that
differs.

    python -m bench.places TRACES             # all silent cases; their traces go to the folder
    python -m bench.places TRACES CASE ...    # only these
    python -m bench.places TRACES --stored    # compare the traces that are there

It writes results/places.json, which `make docs` shows. The fix is the first one that the baseline
shows to work on a stack where the case reproduces, with the least changes; or that of FIXES.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from repro_matrix.config import catalog
from repro_matrix.paths import BASELINE, RESULTS, ROOT
from repro_matrix.results.rows import Row
from repro_matrix.results.summary import load_rows
from repro_matrix.traces.comparison import locate
from repro_matrix.traces.reader import read_trace

from bench.silent_errors import PACKAGES, run

PLACES = RESULTS / "places.json"
NOISE = 2
# Where the first fix makes other steps than the unfixed variant, or shows nothing of the failure.
FIXES = {
    "accelerate-resume-mid-epoch": "replay",
    "accelerate-sharded-optim-lost": "fsdp2",
    "accelerate-split-duplicates": "by-hand",
    "compiled-optimizer-stops": "reset",
}
STEPS = 20  # of each side: a script may train a reference of its own first
COMPARED = ("world_size", "model", "strategy")
Json = dict[str, Any]


def pairs(rows: Iterable[Row]) -> dict[str, tuple[Row, Row]]:
    """Return case -> rows of the fix and of the unfixed variant, measured on one stack."""
    unfixed: dict[tuple[str, str], Row] = {}
    fixes: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        measured = row.hardware.kind == "cpu" and row.torchrun
        place = (row.cell_id, row.stack.label)
        if measured and row.first and row.counts["reproduced"]:
            unfixed[place] = row
        elif measured and row.role == "fix" and row.verdict == "FIXED" and not row.own_stack:
            fixes[place].append(row)
    found: dict[str, tuple[Row, Row]] = {}
    for place, bad in unfixed.items():
        if place in fixes:
            good = min(fixes[place], key=lambda row: _changes(row, bad))
            if bad.case not in found or _preference(bad) > _preference(found[bad.case][1]):
                found[bad.case] = (good, bad)
    return found


def _changes(fix: Row, bad: Row) -> tuple[bool, int]:
    other = (fix.settings.get(key) != bad.settings.get(key) for key in COMPARED)
    return FIXES.get(fix.case, fix.variant) != fix.variant, sum(other)


def _preference(row: Row) -> tuple[bool, bool, float]:
    return row.stack.name == "current", not row.overrides, row.started


def job(row: Row, name: str, folder: Path, noise: int = 0) -> Json:
    """Return what runs a row's command (traced_runs.py) with a trace."""
    words = shlex.split(row.torchrun or "")
    at = next(
        i for i, word in enumerate(words) if word.startswith("repros/") and word.endswith(".py")
    )
    env = dict(
        word.split("=", 1)
        for word in words[1:at]
        if "=" in word and word.split("=", 1)[0].isupper()
    )
    for own in ("PATH", "TORCH_EXTENSIONS_DIR"):
        env.pop(own, None)
    if noise:
        env["REPRO_TRACE_NOISE"] = str(noise)
    return {
        "name": name,
        "script": str(ROOT / words[at]),
        "args": words[at + 1 :],
        "ranks": row.ranks,
        "env": {"DS_ACCELERATOR": "cpu", "REPRO_TRACE_STEPS": str(STEPS), **env},
        "trace": str(folder / name),
    }


def measure(chosen: dict[str, tuple[Row, Row]], folder: Path) -> None:
    jobs: dict[str, list[Json]] = defaultdict(list)
    for case, (good, bad) in chosen.items():
        made = [job(good, f"{case}.good", folder), job(bad, f"{case}.bad", folder)]
        made += [job(good, f"{case}.n{seed}", folder, seed) for seed in range(1, NOISE + 1)]
        jobs[bad.stack.name] += made
    run(jobs, folder)


def place(case: str, good: Row, bad: Row, folder: Path) -> Json:
    """Return where the unfixed variant first differs from the fix, as it is stored."""
    noise = [read_trace(folder / f"{case}.n{seed}") for seed in range(1, NOISE + 1)]
    found = locate(read_trace(folder / f"{case}.good"), read_trace(folder / f"{case}.bad"), noise)
    versions = {name: bad.stack.versions[name] for name in PACKAGES if name in bad.stack.versions}
    sides = {"fix": good.variant, "stack": bad.stack.name, "versions": versions}
    return {**sides, "sentence": found.sentence(), "location": found.to_json()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path, help="the folder of the traces")
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--stored", action="store_true", help="trace nothing")
    args = parser.parse_args()
    silent = {slug for slug, case in catalog.load().cases.items() if case.silent}
    known = pairs(row for row in load_rows(BASELINE) if row.case in silent)
    chosen = {case: known[case] for case in args.cases or known}
    folder = args.traces.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not args.stored:
        measure(chosen, folder)
    results = json.loads(PLACES.read_text(encoding="utf-8")) if PLACES.exists() else {}
    for case, (good, bad) in chosen.items():
        results[case] = place(case, good, bad, folder)
        print(f"{case}: {good.variant}: {results[case]['sentence']}", flush=True)
    ordered = {case: results[case] for case in sorted(results.keys() & known.keys())}
    text = json.dumps(ordered, indent=1)
    PLACES.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
