"""Measure what a probe of a search costs: ``python -m bench.probe``.

``repro versions`` probes every release of a range, with an empty cache of stacks (the wheels are in
uv's): two ranks,
two variants, an overlay to build. Then it runs once more, when everything is stored and nothing is
launched; the difference is the cost of the probes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from bench.catalogue import Json, command
from bench.machine import HERE, write

CASE = ["qwen15-fsdp-kv-cache", "variants=[broken,no-cache]", "repeat=1"]


def measure(words: list[str], folder: Path) -> Json:
    env = {**os.environ, "REPRO_CACHE": str(folder / "cache")}
    words = ["versions", *words, f"results={folder / 'results'}"]
    first, cost = command(*words, env=env)
    again, rest = command(*words, env=env)
    launched = [probe for probe in first["probes"] if probe["launched"]]
    if not launched or any(probe["launched"] for probe in again["probes"]):
        raise SystemExit(
            "nothing was launched, or a probe was not stored. Use an empty results folder."
        )
    each = {key: (cost[key] - rest[key]) / len(launched) for key in ("wall_s", "cpu_s")}
    return {"probes": len(launched), "search": cost, "stored": rest, "each": each}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--range", default="5.4.0..5.5.4", help="releases of transformers, every one of them probed"
    )
    parser.add_argument("--stack", default="current", help="the base, which must exist")
    parser.add_argument("--out", type=Path, default=HERE / "probe.json")
    arguments = parser.parse_args(words)
    asked = [*CASE, f"stack={arguments.stack}", "--range", arguments.range, "--exhaustive"]
    with tempfile.TemporaryDirectory(prefix="repro-bench-") as name:
        row = measure(asked, Path(name))
    write(arguments.out, words=asked, **row)
    print(
        f"{row['probes']} probes, each {row['each']['wall_s']:.1f} s and {row['each']['cpu_s']:.1f}"
        " CPU s"
    )


if __name__ == "__main__":
    main()
