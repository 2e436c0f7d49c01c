"""The checks of `repro run --check`: compare what the ranks of a user's script described of their parameters. Pure.

A check that could compare nothing says why, and is no evidence (grading/checks.py). Replicas must be equal to the last
bit: every rank computes the same update from the same gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Json = dict[str, Any]


def add_checks(records: Sequence[Json], wanted: Sequence[str]) -> None:
    """Add the wanted checks (``replicas``, ``finite``) to each rank's record."""
    told = [
        record["facts"].get("parameters") or {"missing": "the process ended without Python's exit"}
        for record in records
    ]
    missing = next((each["missing"] for each in told if "missing" in each), "")
    for record, facts in zip(records, told):
        if "replicas" in wanted:
            why = missing or _no_replicas(told)
            wrong = [] if why else _different(told)
            _add(record, "replicas_equal", facts, wrong, why)
        if "finite" in wanted:
            wrong = [each["name"] for each in facts.get("parameters", ()) if not each["finite"]]
            _add(record, "parameters_finite", facts, wrong, missing)


def _no_replicas(told: Sequence[Mapping[str, Any]]) -> str:
    split = sorted({name for each in told for name in each["sharded"]})
    if split:
        return f"sharded by {', '.join(split)}"
    if len(told) < 2:
        return "there is one rank"
    shapes = [[(each["name"], each["shape"]) for each in facts["parameters"]] for facts in told]
    return "" if all(each == shapes[0] for each in shapes) else "the ranks train different parameters"


def _different(told: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = zip(*(facts["parameters"] for facts in told))
    return [ranks[0]["name"] for ranks in columns if any(each["hash"] != ranks[0]["hash"] for each in ranks)]


def _add(record: Json, name: str, facts: Mapping[str, Any], wrong: Sequence[str], why: str) -> None:
    parameters = facts.get("parameters", ())
    gradients = sum(each["gradient"] for each in parameters)
    subject = f"{len(parameters)} tensors"
    subject += f" and {gradients} gradients" if name == "parameters_finite" else ""
    subject += f"; wrong: {', '.join(wrong[:4])}{' ...' if wrong[4:] else ''}" if wrong else ""
    record["done_at"] = record["ended"] or 0.0
    record["checks"].append(
        {"name": name, "actual": len(wrong), "expected": 0, "tolerance": 0, "passed": not wrong,
         "subject": f"0 tensors: {why}" if why else subject, "at": record["done_at"]}
    )  # fmt: skip
