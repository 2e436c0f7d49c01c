"""Trace both sides of each public report in docs/examples/numbers, compare them, and write the
table of what was named.

    python -m bench.silent_errors TRACES             # all reports; their traces go to the folder
    TRACES
    python -m bench.silent_errors TRACES opt gemma   # only these
    python -m bench.silent_errors TRACES --stored    # compare the traces that are there

It does what `repro compare` does for one report, but starts each stack once and forks: a start
costs more than a run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from repro_matrix.environment import stacks
from repro_matrix.traces.comparison import locate
from repro_matrix.traces.reader import read_trace

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
FOLDER = EXAMPLES / "numbers"
PAGE = EXAMPLES / "silent-errors.md"
RESULTS = FOLDER / "results.json"
MARK = re.compile(r"(<!-- table -->\n).*?(<!-- end of table -->)", re.S)
SIDES = ("good", "bad")
PACKAGES = ("torch", "transformers", "accelerate", "peft", "deepspeed")
Json = dict[str, Any]


def cases() -> dict[str, Json]:
    return dict(yaml.safe_load((FOLDER / "cases.yaml").read_text(encoding="utf-8")))


def stored() -> dict[str, Json]:
    return dict(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else {}


def trace(chosen: dict[str, Json], folder: Path, noise: int) -> None:
    """Trace the good sides, also with noise, and the bad ones: all runs of a stack in one go."""
    jobs: dict[str, list[Json]] = defaultdict(list)
    for name, case in chosen.items():
        for side in SIDES:
            values = case.get(side) or {}
            args = [*shlex.split(case.get("args", "")), *shlex.split(values.get("args", ""))]
            for seed in range(noise + 1 if side == "good" else 1):
                run = f"{name}.{side}" + (f".n{seed}" if seed else "")
                env = {
                    "DS_ACCELERATOR": "cpu",
                    **({"REPRO_TRACE_NOISE": str(seed)} if seed else {}),
                }
                job = {
                    "name": run,
                    "script": str(FOLDER / case["script"]),
                    "args": args,
                    "env": env,
                }
                job.update(ranks=values.get("nproc", 1), trace=str(folder / run))
                jobs[values.get("stack", "current")].append(job)
    run(jobs, folder)


def run(jobs: Mapping[str, list[Json]], folder: Path) -> None:
    """Run the jobs of each stack, forked from one process (traced_runs.py)."""
    for stack, its_jobs in jobs.items():
        found = stacks.resolve(stack)
        text = "".join(json.dumps(job) + "\n" for job in its_jobs)
        env = {**os.environ, **found.environment(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [found.python, str(Path(__file__).with_name("traced_runs.py"))]
        subprocess.run(command, input=text, text=True, env=env, cwd=folder, check=True)


def judge(name: str, case: Json, folder: Path) -> Json:
    """Compare the traces of a case; ``right`` says whether the answer is the place that its
    upstream fix shows."""
    noise = [read_trace(path) for path in sorted(folder.glob(f"{name}.good.n*"))]
    traces = {side: read_trace(folder / f"{name}.{side}") for side in SIDES}
    location = locate(traces["good"], traces["bad"], noise)
    place = case["place"]
    right = (
        location.verdict == "differs"
        and location.stage in place["stage"]
        and re.search(place.get("name", ""), location.place or "") is not None
    )
    versions = {}
    for side in SIDES:
        installed = stacks.resolve((case.get(side) or {}).get("stack", "current")).versions
        versions[side] = {name: installed[name] for name in PACKAGES if name in installed}
    return {
        "sentence": location.sentence(),
        "right": right,
        "versions": versions,
        "location": location.to_json(),
    }


def command(case: Json) -> str:
    """Return the line that compares a case by itself, in docs/examples/numbers."""
    words = ["repro", "compare", f"./{case['script']}"]
    good, bad = (case.get(side) or {} for side in SIDES)
    for side, values in zip(SIDES, (good, bad), strict=True):
        words += [f"--{side}", values["stack"]] if "stack" in values else []
    if good.get("nproc", 1) == bad.get("nproc", 1):
        words += ["--nproc", str(good.get("nproc", 1))]
    else:
        words += [
            "--good-nproc",
            str(good.get("nproc", 1)),
            "--bad-nproc",
            str(bad.get("nproc", 1)),
        ]
    words += ["--args", case["args"].strip()] if "args" in case else []
    for side, values in zip(SIDES, (good, bad), strict=True):
        words += [f"--{side}-args={values['args']}"] if "args" in values else []
    return shlex.join(words)


def table(known: dict[str, Json], results: dict[str, Json]) -> str:
    measured = [name for name in known if name in results]
    right = sum(results[name]["right"] for name in measured)
    lines = [f"{right} of {len(measured)} are right.", ""]
    lines += ["| report | what happens | good, bad | named | right? |", "|---|---|---|---|---|"]
    for name in measured:
        case, found = known[name], results[name]
        repository, number = case["issue"].split("#")
        link = f"[{case['issue']}](https://github.com/{repository}/issues/{number})"
        right_here = "yes" if found["right"] else "no"
        lines.append(
            f"| {link} | {case['what']} | {_pair(case)} | {found['sentence']} | {right_here} |"
        )
    lines += ["", "The same comparisons one by one, in `docs/examples/numbers`:", ""]
    return "\n".join([*lines, *(f"    {command(known[name])}" for name in measured), ""])


def _pair(case: Json) -> str:
    def side(values: Json, other: Json) -> str:
        parts = [values["stack"].removeprefix("current+")] if "stack" in values else []
        if values.get("nproc", 1) != other.get("nproc", 1):
            parts.append(
                "one process" if values.get("nproc", 1) == 1 else f"{values['nproc']} ranks"
            )
        return (
            " ".join([*parts, *([f"`{values['args']}`"] if "args" in values else [])]) or "as it is"
        )

    good, bad = (case.get(name) or {} for name in SIDES)
    return f"{side(good, bad)}; {side(bad, good)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path, help="the folder of the traces")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--stored", action="store_true", help="trace nothing")
    parser.add_argument(
        "--noise", type=int, default=2, help="runs of the good side with noise (default: 2)"
    )
    args = parser.parse_args()
    known = cases()
    chosen = {name: known[name] for name in args.names or known}
    folder = args.traces.absolute()
    if not args.stored:
        folder.mkdir(parents=True, exist_ok=True)
        trace(chosen, folder, args.noise)
    results = stored()
    for name, case in chosen.items():
        if (folder / f"{name}.bad").exists():
            results[name] = judge(name, case, folder)
            print(
                name,
                "right" if results[name]["right"] else "WRONG",
                results[name]["sentence"],
                flush=True,
            )
    ordered = {name: results[name] for name in known if name in results}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        MARK.sub(lambda found: f"{found[1]}{table(known, ordered)}{found[2]}", text),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
