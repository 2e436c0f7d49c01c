"""Documents -> the rows that tables and ``--json`` show. Pure; the keys are stable."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the tables of cells need no document
    from repro_matrix.records.document import Cell, Made, Variant
    from repro_matrix.records.outcome import StoredOutcome, StoredVerdict

Row = dict[str, Any]


def variant_rows(document: Cell) -> list[Row]:
    """One row per variant of a cell's document, the first variant first."""
    axes = axes_of(document)
    cell = {
        "case": document["case"],
        "title": document["title"],
        "references": document["references"],
        "simulated": document["simulated"],
        "model": document["model"],
        "strategy": document["strategy"],
        "flags": document["flags"],
        "ranks": document["ranks"],
        "overrides": document["overrides"],
        "params": f"case={document['case']} {axes}",
        "axes": axes,
        "stack": document["stack"]["name"],
        "hardware": document["hardware"]["profile"],
    }
    said = document["verdicts"]
    return [
        {
            **cell,
            **_variant_row(said.get(name), name, variant),
            "document": document.get("path"),
            "torchrun": _by_hand(variant),
        }
        for name, variant in document["variants"].items()
    ]


def _variant_row(verdict: StoredVerdict | None, name: str, variant: Variant) -> Row:
    told: Mapping[str, Any] = (
        verdict or {}
    )  # a unfixed variant has none; ``quarantined`` is only ever shown (results/quarantine.py)
    attempts = variant["attempts"]
    outcomes = [attempt["outcome"] for attempt in attempts]
    kinds = kinds_of(outcomes)
    walls = [attempt["observation"]["attempt"]["wall_s"] for attempt in attempts]
    return {
        "variant": name,
        "outcome": summary_of(outcomes) if outcomes else "skipped",
        "kinds": kinds,
        "reproduced": sum(outcome["outcome"] == "reproduced" for outcome in outcomes),
        "passed": sum(outcome["outcome"] == "passed" for outcome in outcomes),
        "attempts": len(outcomes),
        "verdict": told.get("name"),
        "expected": verdict.get("expected", "no_expectation") if verdict else None,
        "expectation": told.get("expectation"),
        "infra_error": bool(told.get("infra_error")) or kinds[:1] == ["infra_error"],
        "skip": variant.get("skip"),
        "reason": variant["skipped"] or (verdict and _with_note(verdict)) or _reason(outcomes),
        "error_at": error_at(variant["attempts"]),
        "quarantined": told.get("quarantined"),
        "wall_s": round(walls[0] if len(walls) == 1 else statistics.median(walls), 2) if walls else None,
    }


def error_at(attempts: Iterable[Made]) -> str | None:
    """``file:line`` of the innermost frame of the failure that came first, in the first attempt that has one."""
    for attempt in attempts:
        primary = attempt["outcome"]["primary"]
        if primary is None:
            continue
        record = next((r["record"] for r in attempt["observation"]["ranks"] if r["rank"] == primary["rank"]), None)
        raised = record["exception"] if record else None
        if raised and raised["frames"]:
            frame = raised["frames"][-1]
            return f"{frame['file']}:{frame['line']}" if frame["line"] is not None else frame["file"]
    return None


def _by_hand(variant: Variant) -> str | None:
    return next((attempt["observation"]["attempt"].get("torchrun") for attempt in variant["attempts"]), None)


def where_of(document: Cell) -> str:
    """The cell as a command line takes it."""
    return f"case={document['case']} {axes_of(document)}"


def axes_of(document: Cell) -> str:
    """The same without its case, which verbs of one case take by itself."""
    return " ".join(words_of(document))


def words_of(document: Cell) -> tuple[str, ...]:
    """Each axis a word, as ``argv`` takes it: a flag's value may have spaces."""
    words = [f"model={document['model']}", f"strategy={document['strategy']}"]
    words += [f"flags.{name}={json.dumps(value)}" for name, value in document["flags"].items()]
    return (*words, *document["overrides"])


def summary_of(outcomes: Iterable[StoredOutcome]) -> str:
    """``reproduces`` when all attempts agree, else ``reproduces 2/3, clean 1/3``."""
    outcomes = list(outcomes)
    names: list[str] = [outcome["outcome"] for outcome in outcomes]
    kinds = kinds_of(outcomes)
    if len(kinds) == 1:
        return kinds[0]
    return ", ".join(f"{kind} {names.count(kind)}/{len(names)}" for kind in kinds)


def kinds_of(outcomes: Iterable[StoredOutcome]) -> list[str]:
    """What attempts came out as, the most frequent first."""
    names: list[str] = [outcome["outcome"] for outcome in outcomes]
    if len(names) == 1:
        return names
    return sorted(set(names), key=lambda kind: (-names.count(kind), kind))


def _with_note(verdict: StoredVerdict) -> str:
    """A verdict's reason, and what its name does not say of its expectation."""
    note = verdict.get("failure_note")
    return f"{verdict['reason']} [{note}]" if note else verdict["reason"]


def _reason(outcomes: list[StoredOutcome]) -> str:
    return outcomes[0]["reason"] if outcomes else ""
