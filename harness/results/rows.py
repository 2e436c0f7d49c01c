"""Documents -> the rows that tables and ``--json`` show. Pure; the keys are stable."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

Row = dict[str, Any]

# The order of attention: what differs from its expectation first, then what has none, then what is as expected.
ATTENTION = {"unexpected": 0, "differs from cpu": 1, "unset": 2, "muted": 3, "as predicted": 4, "expected": 5}


def arm_rows(document: Mapping[str, Any]) -> list[Row]:
    """One row per arm of a cell's document, the first arm first."""
    cell = {
        "case": document["case"],
        "title": document["title"],
        "references": document["references"],
        "simulated": document.get("simulated"),
        "model": document["model"],
        "strategy": document["strategy"],
        "flags": document["flags"],
        "ranks": document["ranks"],
        "variant": document["variant"],
        "where": where_of(document),
        "stack": document["stack"]["name"],
        "hardware": document["hardware"]["profile"],
    }
    said = document["verdicts"]
    return [
        {
            **cell,
            **_arm_row(said.get(name) or {}, name, arm),
            "document": document.get("path"),
            "torchrun": _by_hand(arm),
        }
        for name, arm in document["arms"].items()
    ]


def _arm_row(verdict: Mapping[str, Any], name: str, arm: Mapping[str, Any]) -> Row:
    attempts = arm.get("attempts") or []
    outcomes = [attempt["outcome"] for attempt in attempts]
    kinds = kinds_of(outcomes)
    walls = [float(attempt["observation"]["attempt"].get("wall_s") or 0) for attempt in attempts]
    return {
        "arm": name,
        "outcome": summary_of(outcomes) if outcomes else "skipped",
        "kinds": kinds,
        "fires": sum(outcome["outcome"] == "fires" for outcome in outcomes),
        "clean": sum(outcome["outcome"] == "clean" for outcome in outcomes),
        "attempts": len(outcomes),
        "verdict": verdict.get("name"),
        "expected": verdict.get("expected", "unset") if verdict else None,
        "expectation": verdict.get("expectation"),
        "infra": bool(verdict.get("infra")) or kinds[:1] == ["infra"],
        "skip": arm.get("skip"),
        "reason": arm.get("skipped") or _with_note(verdict) or _reason(outcomes),
        "muted": verdict.get("muted"),
        "wall_s": round(walls[0] if len(walls) == 1 else statistics.median(walls), 2) if walls else None,
    }


def _by_hand(arm: Mapping[str, Any]) -> Any:
    attempts = arm.get("attempts") or []
    return next((attempt["observation"]["attempt"].get("torchrun") for attempt in attempts), None)


def where_of(document: Mapping[str, Any]) -> str:
    """The cell as a command line takes it."""
    words = [f"case={document['case']}", f"model={document['model']}", f"strategy={document['strategy']}"]
    words += [f"flags.{name}={json.dumps(value)}" for name, value in (document.get("flags") or {}).items()]
    return " ".join([*words, *map(str, document.get("variant") or ())])


def summary_of(outcomes: Iterable[Mapping[str, Any]]) -> str:
    """``fires`` when all attempts agree, else ``fires 2/3, clean 1/3``."""
    outcomes = list(outcomes)
    names, kinds = [outcome["outcome"] for outcome in outcomes], kinds_of(outcomes)
    if len(kinds) == 1:
        return kinds[0]
    return ", ".join(f"{kind} {names.count(kind)}/{len(names)}" for kind in kinds)


def kinds_of(outcomes: Iterable[Mapping[str, Any]]) -> list[str]:
    """What attempts came out as, the most frequent first."""
    names = [outcome["outcome"] for outcome in outcomes]
    if len(names) == 1:
        return names
    return sorted(set(names), key=lambda kind: (-names.count(kind), kind))


def _with_note(verdict: Mapping[str, Any]) -> str:
    """A verdict's reason, and what its name does not say of its expectation."""
    reason, note = verdict.get("reason") or "", verdict.get("met_note")
    return f"{reason} [{note}]" if note else str(reason)


def by_attention(rows: Iterable[Row]) -> list[Row]:
    """The rows of cells in which something differs first: from the expectation, then from what a CPU showed."""
    rows = list(rows)
    worst: dict[str, int] = {}
    for row in rows:
        differs, cell = min(ATTENTION.get(row["expected"], 9), ATTENTION["unset"]), _cell(row)
        worst[cell] = min(worst.get(cell, 9), differs)
    return sorted(rows, key=lambda row: worst[_cell(row)])


def _cell(row: Row) -> str:
    return f"{row['where']} {row['stack']} {row['hardware']}"


def without_expectation(rows: Iterable[Row]) -> list[Row]:
    """Measured arms with a verdict that nothing says anything about, neither an expectation nor a prediction."""
    return [row for row in rows if row["attempts"] and row["verdict"] and row["expected"] == "unset"]


def _reason(outcomes: list[Any]) -> str:
    return str(outcomes[0].get("reason") or "") if outcomes else ""


def counts(rows: Iterable[Row]) -> dict[str, int]:
    """How many arms have which verdict (skipped ones as ``skipped``)."""
    found: dict[str, int] = {}
    for row in rows:
        name = row["verdict"] or (None if row["attempts"] else "skipped")
        if name:
            found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items(), key=lambda item: -item[1]))
