"""Compare what the ranks of a user's script report of their parameters (`repro run --check`).

Pure.

A check that could compare nothing gives the reason, and is not evidence (grading/checks.py).
Replicas must be equal to the last bit: every rank computes the same update from the same gradient.
So must the gradients of the last step, because an update that depends only on their signs (the
first of AdamW) hides that they were not reduced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from repro_matrix.launch import sample_checks
from repro_matrix.text import counted, list_some

Json = dict[str, Any]


def add_checks(records: Sequence[Json], wanted: Sequence[str]) -> None:
    """Add the wanted checks (``replicas``, ``finite``, ``data``) to each rank's record."""
    if not records:
        return  # no rank has started
    ended = {"missing": "the process ended without Python's exit"}
    samples = [record["facts"].get("samples", ended) for record in records]
    ranks = [record["facts"].get("parameters", ended) for record in records]
    if "data" in wanted:
        data = sample_checks.compare_samples(samples)
        for record in records:
            _add(record, "data_partitioned", *data)
    missing = next((each["missing"] for each in ranks if "missing" in each), "")
    if "replicas" in wanted:
        why = missing or _no_replicas(ranks)
        replicas = ("", [], why) if why else _compare(ranks)
        for record in records:
            _add(record, "replicas_equal", *replicas)
    if "finite" in wanted:
        for record, facts in zip(records, ranks):
            parameters = facts.get("parameters", ())
            wrong = [each["name"] for each in parameters if not each["finite"]]
            gradients = sum(each["gradient"] for each in parameters)
            compared = f"{len(parameters)} tensors and {gradients} gradients"
            _add(record, "parameters_finite", compared, wrong, missing)


def _no_replicas(ranks: Sequence[Mapping[str, Any]]) -> str:
    split = sorted({name for each in ranks for name in each["sharded"]})
    if split:
        return f"sharded by {', '.join(split)}"
    if len(ranks) < 2:
        return "there is one rank"
    grouped = min(each["group"] for each in ranks)
    if grouped < len(ranks):
        group = (
            f"the process group has {counted(grouped, 'rank')}"
            if grouped
            else "no process group was created"
        )
        return f"{group}: the {len(ranks)} ranks are not one training"
    shapes = [[(each["name"], each["shape"]) for each in facts["parameters"]] for facts in ranks]
    return (
        "" if all(each == shapes[0] for each in shapes) else "the ranks train different parameters"
    )


def _compare(ranks: Sequence[Mapping[str, Any]]) -> tuple[str, list[str], str]:
    """Return what was compared, the names of what differs, and why gradients were not compared.

    Equal parameters alone are no proof.
    """
    columns = [
        each for each in zip(*(facts["parameters"] for facts in ranks)) if not each[0]["ignored"]
    ]
    frozen = sum(each[0]["frozen"] for each in columns)
    compared = counted(len(columns), "parameter")
    if frozen:
        compared += f" ({frozen} frozen)"
    numbers = {
        "that DDP ignores": len(ranks[0]["parameters"]) - len(columns),
        "that no optimizer has stepped on": max(each["others"] for each in ranks),
    }
    left = "".join(
        f"; {counted(number, 'parameter')} {which} {'was' if number == 1 else 'were'} not compared"
        for which, number in numbers.items()
        if number
    )
    wrong = _different(columns, "hash")
    used = [[rank["used"][0] for rank in each] for each in columns]
    steps = sorted({max(each, default=0) for each in zip(*used)})
    unknown = [error for facts in ranks for error in facts["errors"]]
    if len(steps) > 1:
        unknown.append(f"the ranks made {' and '.join(map(str, steps))} steps")
    if not any(steps):
        unknown.append("no parameter has one after a step")
    if unknown:
        why = f"gradients not compared: {unknown[0]}"
        return f"{compared}; {why}{left}", wrong, f"the parameters are equal; {why}{left}"
    wrong += [f"gradient of {name}" for name in _different(columns, "used")]
    compared += (
        f" and {counted(sum(map(any, used)), 'gradient')} of the last of"
        f" {counted(steps[0], 'step')}"
    )
    return (
        f"{compared} {'compared' if wrong else 'are equal'} on {len(ranks)} ranks{left}",
        wrong,
        "",
    )


def _different(columns: Sequence[Sequence[Json]], key: str) -> list[str]:
    return [each[0]["name"] for each in columns if any(rank[key] != each[0][key] for rank in each)]


def _add(record: Json, name: str, compared: str, wrong: Sequence[str], why: str) -> None:
    """Add a check.

    ``why``: the reason why nothing is known to be right, where nothing is ``wrong``.
    """
    subject = f"0 tensors: {why}" if why else compared
    if wrong:
        subject = f"{compared}; wrong: {list_some(wrong, 4)}"
    record["done_at"] = record["ended"] or 0.0
    record["checks"].append(
        {
            "name": name,
            "actual": len(wrong),
            "expected": 0,
            "tolerance": 0,
            "passed": not wrong,
            "subject": subject,
            "at": record["done_at"],
        }
    )
