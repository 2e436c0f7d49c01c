"""`make gpu-agreement`: docs/contributing/gpu-agreement.md, how far the CPU predicted the first
real GPU.

Everything is computed from the runs in results/gpu; only the reasons of explained.yaml were written
by a person.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import yaml
from repro_matrix.changes.agreement import Agreement, measure_agreement
from repro_matrix.changes.diff import describe_row
from repro_matrix.changes.sides import load_folder
from repro_matrix.grading.verdict import wilson
from repro_matrix.paths import RESULTS, ROOT
from repro_matrix.results.rows import Row

FOLDER = RESULTS / "gpu" / "h100-2026-11-28"
PAGE = ROOT / "docs" / "contributing" / "gpu-agreement.md"
# gpu1-shared-forkserver repeats some cells of gpu1-shared-torchrun with the other launcher.
BACKENDS = {"gloo": ("gpu1-shared-torchrun",), "NCCL": ("gpu1-nccl-a", "gpu1-nccl-b")}
HEAD = """\
# How far the CPU predicts the GPU

<!-- `make gpu-agreement` writes this page from results/gpu; a test compares the two. -->

The cells of the first real GPU (one {gpu}, driver {driver}) were also measured on the CPU of
the same machine, with the same stack: torch {torch}, transformers {transformers}. Two or four ranks share the
card, over gloo (`gpu1-shared`) and over NCCL, each rank as a host of its own (`gpu1-nccl`). Models are tiny and have
random weights. The evidence is in `results/gpu`; its README names the three patches that these runs needed. No run is
compared with it, and no expectation rests on it.

**{total} of the variants that both sides measured have the same verdict, failure and outcome.**
Each variant ran once on each side.

{alone} more variants were measured on the GPU alone, because the CPU's run ended at its time limit:
{verdicts}.
What failed is ZeRO-2: DeepSpeed 0.19 cannot read a CUDA_VISIBLE_DEVICES that holds UUIDs.
"""


@cache
def results(run: str) -> list[Row]:
    """Return the rows of a run of results/gpu."""
    return load_folder(FOLDER / run).rows


def compared() -> dict[str, list[Agreement]]:
    """Return run -> the agreement of each case with the CPU."""
    cpu = results("cpu")
    runs = (run for listed in BACKENDS.values() for run in listed)
    return {run: measure_agreement(cpu, results(run)) for run in runs}


def share(cases: Iterable[Agreement]) -> str:
    agree, both = (sum(counts) for counts in zip(*(each.counts for each in cases)))
    low, high = wilson(agree, both)
    return f"{agree} of {both} ({100 * low:.0f} to {100 * high:.0f} %)"


def explanations() -> dict[tuple[str, str, str], str]:
    """Return (run, cell, variant) -> why it differs."""
    listed = yaml.safe_load((FOLDER / "explained.yaml").read_text(encoding="utf-8"))
    return {(each["run"], each["cell"], each["variant"]): each["why"] for each in listed}


def disagreements(
    runs: dict[str, list[Agreement]],
) -> Iterator[tuple[str, Row, Row]]:
    yield from (
        (run, *pair) for run, cases in runs.items() for each in cases for pair in each.disagreements
    )


def table(head: list[str], rows: Iterable[list[Any]]) -> Iterator[str]:
    yield from ("", f"| {' | '.join(head)} |", "|---" * len(head) + "|")
    yield from (f"| {' | '.join(map(str, row))} |" for row in rows)


def page() -> str:
    """Return the page."""
    runs, why = compared(), explanations()
    every = [each for cases in runs.values() for each in cases]
    row = every[0].pairs[0][1]
    paired = {
        (run, other.cell_id, other.variant)
        for run, cases in runs.items()
        for c in cases
        for _, other in c.pairs
    }
    alone = [
        each
        for run in runs
        for each in results(run)
        if each.kinds
        and each.hardware.profile != "cpu"
        and (run, each.cell_id, each.variant) not in paired
    ]
    counts = Counter(
        each.stored_verdict or ("REPRODUCED" if "reproduced" in each.kinds else "-")
        for each in alone
    )
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items()))
    about = {
        **row.stack.versions,
        "gpu": ", ".join(row.hardware.gpus),
        "driver": row.hardware.driver,
        "total": share(every),
    }
    head = HEAD.format(**about, alone=len(alone), verdicts=verdicts)
    lines = [head.rstrip()]
    lines += table(
        ["backend", "runs", "variants that agree, with a 95 % interval"],
        (
            [
                name,
                ", ".join(f"`{run}`" for run in listed),
                share(c for run in listed for c in runs[run]),
            ]
            for name, listed in BACKENDS.items()
        ),
    )
    lines += ["", "## Cells", "", "Variants that agree, of those that both sides measured:"]
    rows = []
    for case in sorted({each.case for each in every}):
        of = {
            name: [c for run in listed for c in runs[run] if c.case == case]
            for name, listed in BACKENDS.items()
        }
        cells = {
            gpu.cell_id.partition("/")[2]
            for each in every
            if each.case == case
            for _, gpu in each.pairs
        }
        counts_of = (
            "{} of {}".format(*of[name][0].counts) if of[name] else "" for name in BACKENDS
        )
        rows.append([case, ", ".join(sorted(cells)), *counts_of])
    lines += table(["case", "cells", *BACKENDS], rows)
    lines += ["", "## What differs"]
    for run, cpu, gpu in disagreements(runs):
        lines += ["", f"`{gpu.cell_id}`, variant `{gpu.variant}` (`{run}`):", ""]
        lines += [f"- CPU: {describe_row(cpu)}", f"- GPU: {describe_row(gpu)}", ""]
        lines.append(why[run, gpu.cell_id, gpu.variant])
    lines += [
        "",
        "## Tolerances",
        "",
        "The largest part of its tolerance that a numeric check used in a variant that passed:",
    ]
    used: dict[str, list[list[float]]] = {}
    for each in every:
        for check, sides in each.tolerance_used.items():
            used.setdefault(check, []).append(sides)
    lines += table(
        ["check", "CPU", "GPU"],
        ([check, *map(max, zip(*both))] for check, both in sorted(used.items())),
    )
    return "\n".join([*lines, ""])


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
