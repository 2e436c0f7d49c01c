"""What `python -m bench.plants` found, as lines and as a page of the documentation."""

from __future__ import annotations

from typing import Any


def line(row: dict[str, Any]) -> str:
    if "cannot" in row:
        return f"{row['kind']} {row['strategy']}: cannot occur: {row['cannot']}"
    if "answer" not in row:
        return f"{row['kind']} {row['strategy']}: no effect on the training"
    word = "right" if row["right"] else "WRONG"
    effect = f" (effect {row['effect']:.0e})" if "effect" in row else " (raises)"
    return f"{row['kind']} {row['strategy']}: {word}{effect}: {row['answer']['sentence']}"


def totals(rows: list[dict[str, Any]], healthy: list[dict[str, Any]]) -> str:
    counted = [row for row in rows if "answer" in row]
    right = sum(row["right"] for row in counted)
    alarms = sum(row["verdict"] == "differs" for row in healthy)
    unclear = sum(row["verdict"] == "inconclusive" for row in healthy)
    return (f"{right} of {len(counted)} planted errors named right; {len(healthy)} trainings without one: "
            f"{alarms} false alarms, {unclear} inconclusive")  # fmt: skip
