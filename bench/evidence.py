"""What proofs cost: attempts with and without them, in turn: ``python -m bench.evidence``.

"Without" runs a *copy* of repros/ from which the evidence is cut: no reference, no checks and nothing gathered for
them, nothing measured of what was in force, no witness. There is no such switch in the kit itself: what it would leave
out is what makes an arm clean. Attempts are made by the engine's own code, warm, pair by pair and alternating which
comes first, so that both see the same neighbours; only CPU seconds count.

An attempt makes its reference or takes it from one before it in its run (reference.py): ``made`` and ``taken`` are
measured apart. ``share``: of an attempt's CPU time, what evidence is. How many of a real run's attempts made theirs is
counted from its documents: ``--run results/scratch``. ``--whole`` runs the whole catalogue once each way instead.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from repro_matrix.launch.forkserver import WarmLauncher
from repro_matrix.paths import REPROS
from repro_matrix.planning.plan import ArmPlan
from repro_matrix.results.store import Store
from repro_matrix.runner import session
from repro_matrix.runner.attempts import Attempts
from repro_matrix.runner.gpu_locks import Leases

from bench.machine import machine

Json = dict[str, Any]
HERE = Path(__file__).resolve().parent
MADE, TAKEN, WITHOUT = "made", "taken", "without"
# One model of each size; every strategy, and what most of the catalogue's attempts are.
CELLS = (
    "case=train-step model=llama-3.2-1b",
    "case=qwen15-fsdp-kv-cache model=qwen1.5-0.5b",
    "case=ddp-ready-once,fsdp-tied-embeddings,lora-reentrant-checkpointing model=qwen2.5-0.5b",
    "case=fsdp-optim-state-dtype,fsdp-optim-state-padding,optim-state-reload-dtype",
    "case=device-map-distributed model=qwen1.5-0.5b",
    "case=zero3-load-state-dict,zero-load-undone model=qwen1.5-0.5b",
)
# What is cut, by file. Texts must be there once; what is appended takes the place of what has the same name.
CUTS: dict[str, list[tuple[str, str]]] = {
    "repro_kit/run.py": [
        ("got, want, tolerance = plain(got), plain(want), plain(tolerance)\n", "return\n"),
        ("            finish(run)\n", "            pass\n"),
        ("        witness.start()\n", "        pass\n"),
    ],
    "repro_kit/record.py": [('"packages": place.packages(),', '"packages": {},')],
    "ddp_ready_once.py": [("last=full_parameters(run, wrapped)", "last={}")],
    "fsdp_tied_embeddings.py": [("last=full_parameters(run, fsdp)", "last={}")],
}
APPENDED = {
    "repro_kit/reference_checks.py": """

class Reference:  # type: ignore[no-redef]
    def __init__(self, run, model, *_, **__):
        self.lr = RATES[next(model.parameters()).dtype]

    def __getattr__(self, name):
        return lambda *_, **__: None


def check_checkpoint(run, trained, fresh):  # type: ignore[no-redef]
    folder = run.work_dir / "checkpoint"
    if run.rank == 0:
        Path(folder).mkdir(parents=True)
    dist.barrier()
    trained.save(folder)
    fresh().load(folder)
""",
    "repro_kit/instrumentation.py": """

def watch(run, module, whole=None):  # type: ignore[no-redef]
    return module


def _nothing(*_, **__):
    return None


note = checkpointing = watch_flag = adapters = precision = tokens = files = _nothing  # type: ignore[assignment]
""",
}


def cut(folder: Path) -> Path:
    """A copy of repros/ without evidence."""
    copy = Path(shutil.copytree(REPROS, folder / "repros", ignore=shutil.ignore_patterns("__pycache__")))
    for name, changes in CUTS.items():
        text = (copy / name).read_text(encoding="utf-8")
        for old, new in changes:
            if text.count(old) != 1:
                raise SystemExit(
                    f"{name}: {old!r} is there {text.count(old)} times, not once: bench/evidence.py is old"
                )
            text = text.replace(old, new)
        (copy / name).write_text(text, encoding="utf-8")
    for name, text in APPENDED.items():
        with open(copy / name, "a", encoding="utf-8") as out:
            out.write(text)
    return copy


def planned(cells: tuple[str, ...]) -> Iterator[tuple[session.Session, ArmPlan]]:
    for words in cells:
        prepared = session.prepare([*words.split(), "hardware=cpu"])
        for plan in prepared.plans:
            yield from ((prepared, arm) for arm in plan.arms if arm.skipped is None)


def compare(cells: tuple[str, ...], variants: dict[str, Path], rounds: int, folder: Path) -> list[Json]:
    """One row per arm: the CPU seconds of each variant's attempts. The first attempt of each is not counted: those
    after it find its reference, but for ``made``, whose attempts have a run of their own."""
    rows: list[Json] = []
    launcher = WarmLauncher()
    try:
        with Leases(folder / "state", "bench", lambda: {}) as leases:  # type: ignore[arg-type, return-value]
            for prepared, arm in planned(cells):
                took: dict[str, list[float]] = defaultdict(list)
                for number in range(rounds + 1):
                    order = list(variants) if number % 2 else list(variants)[::-1]
                    for name in order:
                        catalogue = replace(prepared.catalogue, repros=variants[name])
                        run = folder / (f"run-{len(rows)}-{number}" if name == MADE else "run")
                        attempts = Attempts(catalogue, prepared.stacks, launcher, leases, run, False)
                        seen = attempts.make(arm, (), threading.Event()).observation
                        if seen["infra"]:
                            raise SystemExit(f"{arm.cell.key} {arm.arm} ({name}): {seen['infra']}")
                        if number:
                            took[name].append(seen["attempt"]["cpu_s"])
                row = {"case": arm.cell.case, "strategy": arm.settings["strategy"]["slug"], "arm": arm.arm}
                rows.append({**row, **{name: round(statistics.median(took[name]), 4) for name in variants}})
                print("  ".join(f"{value}" for value in rows[-1].values()), flush=True)
    finally:
        launcher.close()
    return rows


def shares(rows: list[Json]) -> Json:
    """By strategy and of everything: CPU seconds of an attempt, and which part of them evidence is."""
    groups: dict[str, list[Json]] = defaultdict(list)
    for row in rows:
        groups[row["strategy"]].append(row)
        groups["all"].append(row)
    found: Json = {}
    for name, group in groups.items():
        mean = {key: sum(row[key] for row in group) / len(group) for key in (MADE, TAKEN, WITHOUT)}
        found[name] = {"arms": len(group), **{key: round(value, 3) for key, value in mean.items()}}
        found[name]["share"] = {key: round(1 - mean[WITHOUT] / mean[key], 3) for key in (MADE, TAKEN)}
    return found


def whole(folder: Path, words: list[str]) -> Json:
    """Every attempt of a selection (``[]``: the whole catalogue) once as it is and once without evidence, in turn, each
    variant as one run, so that references are made and taken as in a run. CPU seconds, and by strategy."""
    variants = {"with": REPROS, WITHOUT: cut(folder)}
    groups: dict[str, dict[str, float]] = defaultdict(lambda: {"attempts": 0, "with": 0.0, WITHOUT: 0.0})
    left_out: list[str] = []
    launcher = WarmLauncher()
    try:
        with Leases(folder / "state", "bench", lambda: {}) as leases:  # type: ignore[arg-type, return-value]
            for number, (prepared, arm) in enumerate(planned((" ".join(words),))):
                took: dict[str, float] = {}
                for name in list(variants)[:: 1 if number % 2 else -1]:
                    catalogue = replace(prepared.catalogue, repros=variants[name])
                    attempts = Attempts(catalogue, prepared.stacks, launcher, leases, folder / f"run-{name}", False)
                    seen = attempts.make(arm, (), threading.Event()).observation
                    if seen["infra"] is None:
                        took[name] = seen["attempt"]["cpu_s"]
                if len(took) < len(variants):
                    left_out.append(f"{arm.cell.key} {arm.arm}")
                    continue
                for group in (groups["all"], groups[arm.settings["strategy"]["slug"]]):
                    group["attempts"] += 1
                    for name, seconds in took.items():
                        group[name] += seconds
                print(number, arm.cell.key, arm.arm, took, flush=True)
    finally:
        launcher.close()
    rows = {
        name: {
            **{key: round(value, 1) for key, value in group.items()},
            "share": round(1 - group[WITHOUT] / group["with"], 3),
        }
        for name, group in groups.items()
    }
    return {"left_out": left_out, "groups": rows}


def counted(results: Path) -> Json:
    """Of a run's attempts, by case: how many made their reference and how many took it."""
    found: dict[str, Json] = defaultdict(lambda: {MADE: 0, TAKEN: 0})
    for document in Store(results).documents():
        for arm in document["arms"].values():
            for attempt in arm["attempts"]:
                records = [rank["record"] for rank in attempt["observation"]["ranks"] if rank["record"]]
                said = [record["facts"]["reference"] for record in records if "reference" in record["facts"]]
                if said:
                    own = said[0]["made_by"] == attempt["observation"]["attempt"]["id"]
                    found[document["case"]][MADE if own else TAKEN] += 1
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cells", action="append", help="overrides of repro matrix; several times")
    parser.add_argument("--run", type=Path, help="a run's results: who made a reference there is counted")
    parser.add_argument("--against", type=Path, action="append", default=[], help="another repros/ to run beside")
    parser.add_argument(
        "--whole", nargs="*", metavar="OVERRIDE", help="a selection (none: the whole catalogue) once each way"
    )
    parser.add_argument("--out", type=Path, default=HERE / "evidence.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="repro-bench-") as name:
        folder = Path(name)
        if arguments.whole is not None:
            found = {"machine": machine(), "whole": whole(folder, arguments.whole)}
            kept = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
            arguments.out.write_text(json.dumps({**kept, **found}, indent=1) + "\n", encoding="utf-8")
            print(json.dumps(found["whole"], indent=1))
            return
        variants = {MADE: REPROS, TAKEN: REPROS, WITHOUT: cut(folder)} | {str(path): path for path in arguments.against}
        rows = compare(tuple(arguments.cells or CELLS), variants, arguments.rounds, folder)
    result = {"machine": machine(), "rounds": arguments.rounds, "shares": shares(rows), "rows": rows}
    if arguments.run:
        result["run"] = counted(arguments.run)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for what, figures in result["shares"].items():
        print(f"{what:8} {figures}")


if __name__ == "__main__":
    main()
