"""Run the whole catalogue with both launchers: do both give the same outcomes, and what does each
cost?

``python -m bench.catalogue --rounds 3``. A round is one run of `repro matrix launcher=torchrun` and
one of
`launcher=forkserver`, each with its own results folder; an interrupted round is resumed. With
torchrun the catalogue takes half an hour and more on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from repro_matrix.paths import cache_dir
from repro_matrix.results.store import Store

from bench.machine import HERE, write

Json = dict[str, Any]


def command(*words: str, env: dict[str, str] | None = None) -> tuple[Json, Json]:
    """Run ``repro WORDS --json``. Return its answer, and its wall and CPU seconds with all that it
    started."""
    began = time.monotonic()
    line = [sys.executable, "-m", "repro_matrix", *words, "--json"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=sys.stderr, env=env) as process:
        assert process.stdout is not None
        out = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    cost = {"wall_s": time.monotonic() - began, "cpu_s": usage.ru_utime + usage.ru_stime}
    return json.loads(out), {**cost, "exit_code": process.returncode}


def run(launcher: str, folder: Path, overrides: list[str]) -> Json:
    answer, cost = command(
        "matrix", f"launcher={launcher}", f"results={folder}", *overrides, "--resume"
    )
    summary = answer["summary"]
    counts = {key: summary[key] for key in ("attempts", "reused")}
    return {"launcher": launcher, **counts, **cost, "attempts_cpu_s": summary["cpu_s"]}


def outcomes(folder: Path) -> dict[tuple[str, str], list[str]]:
    """Return what each attempt showed, by cell and variant: the outcome and the recognised
    signatures."""
    store = Store(folder)
    result = {
        (document["cell_id"], name): sorted(map(label, variant["attempts"]))
        for document in store.documents()
        for name, variant in document["variants"].items()
    }
    if store.damaged:
        raise SystemExit("\n".join(store.damaged))
    return result


def label(attempt: Json) -> str:
    """Return the outcome and what was recognised. Messages are left out: they may contain addresses
    and times."""
    outcome = attempt["outcome"]
    known = sorted(f"{each['case']}:{each['signature']}" for each in outcome["recognized"])
    error = outcome["primary"] if outcome["outcome"] == "other_failure" else None
    return " ".join([outcome["outcome"], *known, *([str(error["type"])] if error else [])])


def differences(cold: Path, forked: Path) -> Iterator[str]:
    one, other = outcomes(cold), outcomes(forked)
    for key in sorted({*one, *other}):
        if one.get(key) != other.get(key):
            yield f"{key[0]} {key[1]}: torchrun {one.get(key)}, forked {other.get(key)}"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=cache_dir() / "bench" / "catalogue")
    parser.add_argument("--out", type=Path, default=HERE / "catalogue.json")
    parser.add_argument("overrides", nargs="*", help="of the matrix: case=..., jobs=...")
    arguments = parser.parse_args(words)
    rounds: list[Json] = []
    for number in range(1, arguments.rounds + 1):
        folders = {
            name: arguments.folder / f"{name}-{number}" for name in ("torchrun", "forkserver")
        }
        runs = [run(name, folder, arguments.overrides) for name, folder in folders.items()]
        differ = list(differences(*folders.values()))
        rounds.append(
            {"runs": runs, "variants": len(outcomes(folders["forkserver"])), "differ": differ}
        )
        write(arguments.out, overrides=arguments.overrides, rounds=rounds)
        print(json.dumps(rounds[-1], indent=1), flush=True)
    if any(each["differ"] for each in rounds):
        raise SystemExit("the launchers give different outcomes (see above)")


if __name__ == "__main__":
    main()
