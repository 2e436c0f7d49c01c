"""What `python -m bench.plants` measured, as lines and as a page of the documentation."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

Json = dict[str, Any]
STRATEGIES = {
    "ddp": "DDP",
    "fsdp": "FSDP",
    "fsdp2": "FSDP2",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "tp": "TP",
}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "planted-errors.md"
INTRODUCTION = """\
# Planted errors

How well does a comparison of two trainings find where an error begins? `make plants` plants
errors in a training script (`bench/plants/train.py`: torch and transformers, AdamW, clipping, three steps), runs it in
two ranks with each strategy, and compares it with the same training in one process. It generates this page.

- An error is a bug as training code has it: a wrong eps, a missing reduction, a skipped backward pass. Where it begins
  was written down before the first comparison ran (`bench/plants/planted.py`); only that of `late-rank-weight` was
  written anew, when traces began to record weights before each step.
- An error counts only where a run without a trace shows that it changes the training.
- *right*: the comparison names the stage, the step, the module or parameter, and the rank where one alone is wrong.
- The models are tiny and run on a CPU. The errors were written by people of this project: expect less of yours.
"""


def line(row: Json) -> str:
    if "cannot" in row:
        return f"{row['kind']} {row['strategy']}: cannot occur: {row['cannot']}"
    if "answer" not in row:
        return f"{row['kind']} {row['strategy']}: no effect on the training"
    word = "right" if row["right"] else "WRONG"
    effect = f"effect {row['effect']:.0e}" if "effect" in row else f"raises {row['raised'][:80]}"
    return f"{row['kind']} {row['strategy']}: {word} ({effect}): {row['answer']['sentence']}"


def totals(rows: list[Json], healthy: list[Json]) -> str:
    counted = [row for row in rows if "answer" in row]
    right = sum(row["right"] for row in counted)
    verdicts = Counter(row["verdict"] for row in healthy)
    return (
        f"{right} of {len(counted)} planted errors are named right, of"
        f" {len({row['kind'] for row in counted})} kinds. In {len(healthy)} trainings without an"
        f" error there are {verdicts['differs']} false alarms and {verdicts['inconclusive']}"
        " inconclusive answers."
    )


def page(measured: Json) -> str:
    """Return the documentation's page. ``measured``: bench/plants.json."""
    rows, healthy = measured["planted"], measured["healthy"]
    parts = [
        INTRODUCTION,
        f"**{totals(rows, healthy)}**\n",
        "## By kind and strategy\n",
        _table(rows),
    ]
    wrong = [row for row in rows if "answer" in row and not row["right"]]
    if wrong:
        parts += ["## Wrong answers\n", "".join(_wrong(row) for row in wrong)]
    cannot: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "cannot" in row or "answer" not in row:
            reason = row.get("cannot", "it has no effect on the training")
            cannot.setdefault((row["kind"], reason), []).append(STRATEGIES[row["strategy"]])
    lines = [
        f"- `{kind}`, {', '.join(names)}: {reason}\n" for (kind, reason), names in cannot.items()
    ]
    parts += [
        "## What cannot be planted\n",
        "".join(lines),
        "## Trainings without an error\n",
        _healthy(healthy),
    ]
    return "\n".join(parts)


def _table(rows: list[Json]) -> str:
    cells: dict[str, dict[str, Json]] = {}
    for row in rows:
        cells.setdefault(row["kind"], {})[row["strategy"]] = row
    lines = [
        ["kind", "what is wrong", "where it begins", *STRATEGIES.values()],
        ["---"] * (3 + len(STRATEGIES)),
    ]
    for kind, by_strategy in cells.items():
        first = next(row for row in by_strategy.values() if "expected" in row)
        verdicts = [_cell(by_strategy.get(strategy, {})) for strategy in STRATEGIES]
        lines.append([f"`{kind}`", first["what"], _expected(first["expected"]), *verdicts])
    return "".join(f"| {' | '.join(each)} |\n" for each in lines)


def _cell(row: Json) -> str:
    return ("right" if row["right"] else "**wrong**") if "answer" in row else "–"


def _expected(expected: Json) -> str:
    where = f"{' or '.join(expected['stages'])}, step {expected['step']}"
    where += f", rank {expected['ranks'][0]}" if expected["ranks"] else ""
    return where + "".join(f"<br>`{place or 'the model'}`" for place in expected["places"][:2])


def _wrong(row: Json) -> str:
    expected = _expected(row["expected"]).replace("<br>", " ")
    return (
        f"- `{row['kind']}`, {STRATEGIES[row['strategy']]}. Expected: {expected}. Answer:"
        f" {row['answer']['sentence']}\n"
    )


LOOPS = {"trainer": "transformers' Trainer", "--lora": "LoRA", "bfloat16": "weights in bfloat16"}
HEALTHY = (
    "strategy",
    "training",
    "runs",
    "4 ranks",
    "accumulation",
    "checkpointing",
    "false alarms",
    "inconclusive",
    "largest difference / tolerance",
)


def _healthy(rows: list[Json]) -> str:
    """Return a row per strategy and kind of training: how many, and how close to a false alarm."""
    kinds: dict[tuple[str, str], list[Json]] = {}
    for row in rows:
        words = row["words"].split()
        loop = next((name for word, name in LOOPS.items() if word in words), "own loop")
        kinds.setdefault((STRATEGIES[words[words.index("--strategy") + 1]], loop), []).append(row)
    lines = [HEALTHY, ["---"] * len(HEALTHY)]
    for kind, group in sorted(kinds.items()):
        flags = [
            (
                row["world"] == 4,
                "--accumulate" in row["words"],
                "--checkpointing" in row["words"],
                row["verdict"] == "differs",
                row["verdict"] == "inconclusive",
            )
            for row in group
        ]
        largest = max(row["largest"] or 0 for row in group)
        lines.append(
            [*kind, str(len(group)), *(str(sum(each)) for each in zip(*flags)), f"{largest:.2f}"]
        )
    return "".join(f"| {' | '.join(each)} |\n" for each in lines)


def write(measured: Path) -> None:
    PAGE.write_text(page(json.loads(measured.read_text(encoding="utf-8"))), encoding="utf-8")
