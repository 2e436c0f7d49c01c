"""What a probe of a release costs with servers of its own and with servers that share: ``python -m bench.probes``.

The same releases are probed both ways, by ``repro versions`` in a process of its own with an empty cache of stacks (the
wheels are in uv's): two ranks, two arms, an overlay to build. CPU seconds are those of everything that the command
starts, and its own. The command alone (everything is stored, nothing launched) is measured too and taken off; the
trunk's start is in the figure. ``--script FILE`` probes a script instead: its ranks start from cold either way.
``--parts`` (root) says where they go: ``command`` is what the probes add to the command itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import parts
from bench.machine import machine

Json = dict[str, Any]
HERE = Path(__file__).resolve().parent
WAYS = {"own": "warm", "shared": "auto"}  # way -> launcher=
CASE = ["qwen15-fsdp-kv-cache", "arms=[broken,no-cache]", "repeat=1"]


def measured(words: list[str], env: dict[str, str]) -> Json:
    """The command's answer, and what it cost with all that it started."""
    began = time.perf_counter()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "repro_matrix", *words, "--json"], stdout=out, stderr=said, env=env
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - began
        out.seek(0)
        said.seek(0)
        text = said.read().decode()
        if process.returncode:
            raise SystemExit(f"{' '.join(words)}: exit code {process.returncode}\n{text[-3000:]}")
        return {
            "wall_s": wall,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "answer": json.loads(out.read()),
            "said": text,
            "pid": process.pid,
        }


def shown(path: str) -> Json:
    """How the attempts of a stored probe were launched."""
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    arms = document.get("arms", {"script": document}).values()
    attempts = [attempt["observation"]["attempt"] for arm in arms for attempt in arm["attempts"]]
    return {
        "attempts": len(attempts),
        "shared": sum(bool(each.get("shared")) for each in attempts),
        "apart": sorted({each["apart"] for each in attempts if each.get("apart")}),
        "cpu_s": sum(each["cpu_s"] for each in attempts),
    }


def one_way(way: str, words: list[str], folder: Path, by_part: bool = False) -> Json:
    env = {**os.environ, "REPRO_CACHE": str(folder / "cache")}
    (folder / "cache").mkdir(parents=True)
    listed = Path.home() / ".cache" / "repro-matrix" / "releases"
    if listed.is_dir():  # what the index said last
        (folder / "cache" / "releases").symlink_to(listed)
    what = ["versions", *words, f"launcher={WAYS[way]}", f"results={folder / 'results'}"]
    with parts.accounted(folder / "acct") if by_part else contextlib.nullcontext():
        first = measured(what, env)
    again = measured(what, env)
    probes = [probe for probe in first["answer"]["probes"] if probe["launched"]]
    assert not any(probe["launched"] for probe in again["answer"]["probes"]), "something was not stored"
    ranks = [shown(probe["document"]) for probe in probes]
    row: Json = {
        "way": way,
        "probes": len(probes),
        "cpu_s": first["cpu_s"],
        "wall_s": first["wall_s"],
        "command": {"cpu_s": again["cpu_s"], "wall_s": again["wall_s"]},
        "per_probe": {key: (first[key] - again[key]) / len(probes) for key in ("cpu_s", "wall_s")},
        "ranks_cpu_s": sum(each["cpu_s"] for each in ranks) / len(probes),
        "stack_wall_s": sum(probe["stack_s"] for probe in probes) / len(probes),
        "attempts": sum(each["attempts"] for each in ranks),
        "shared": sum(each["shared"] for each in ranks),
        "apart": sorted({why for each in ranks for why in each["apart"]}),
        "answers": {probe["release"]: probe["answers"] for probe in probes},
    }
    if by_part:
        seen = parts.of_search(parts.processes(folder / "acct"), first["pid"])
        seen["command"] -= again["cpu_s"]
        row["parts"] = {name: cpu_s / len(probes) for name, cpu_s in seen.items()}
    return row


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--between", default="5.2.0..5.9.0", help="releases of transformers, every one of them probed")
    parser.add_argument("--stack", default="current", help="the base, which must be there")
    parser.add_argument("--script", help="a script instead of a case")
    parser.add_argument("--ways", default="own,shared")
    parser.add_argument("--parts", action="store_true", help="CPU seconds by part, of the kernel's accounting (root)")
    parser.add_argument("--out", type=Path, default=HERE / "probes.json")
    arguments = parser.parse_args()
    words = [arguments.script, "--nproc", "2"] if arguments.script else CASE
    words = [*words, f"stack={arguments.stack}", "--between", arguments.between, "--exhaustive"]
    result: Json = {"machine": machine(), "stack": arguments.stack, "words": words, "rows": []}
    with tempfile.TemporaryDirectory(prefix="repro-bench-", dir=Path.home() / ".cache") as name:
        for way in arguments.ways.split(","):
            row = rounded(one_way(way, words, Path(name) / way, arguments.parts))
            result["rows"].append(row)
            print(f"{way}: {row['probes']} probes, {row['per_probe']} each", row.get("parts", ""), flush=True)
    answers = [row["answers"] for row in result["rows"]]
    result["same"] = all(each == answers[0] for each in answers)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("the same answers" if result["same"] else f"NOT the same answers: {answers}")


if __name__ == "__main__":
    main()
