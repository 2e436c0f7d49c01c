"""A cell's document: built as attempts come in, judged when its arms are done. Pure (times and machine are given)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, cast

from repro_matrix.cell.types import Observation
from repro_matrix.conf.schema import Case
from repro_matrix.hardware import Machine
from repro_matrix.judge import expect, facts, grade, verdict
from repro_matrix.judge.comparable import machine
from repro_matrix.planning.plan import CellPlan
from repro_matrix.results.store import SCHEMA

Document = dict[str, Any]


def new(
    plan: CellPlan,
    case: Case,
    machine: Machine,
    stack: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> Document:
    """A document without attempts. ``stack``: {"name", "python", "versions"}; ``provenance`` gets ``started``."""
    cell, profile = plan.cell, plan.profile
    settings = plan.arms[0].settings
    return {
        "schema": SCHEMA,
        "case": cell.case,
        "title": case.title,
        "kind": case.kind,
        "simulated": case.simulated,
        "references": list(case.references),
        "model": cell.model,
        "strategy": cell.strategy,
        "flags": dict(cell.flags),
        "ranks": cell.ranks,
        "variant": list(cell.variant),
        "scale": settings["model"]["scale"],
        "weights": settings["model"]["weights"],
        "stack": dict(stack),
        "hardware": {
            "profile": profile.name,
            "accelerator": profile.accelerator,
            "backend": profile.backend,
            "shared": profile.shared,
            "gpus": [{"name": gpu.name, "uuid": gpu.uuid, "memory_mb": gpu.memory_mb} for gpu in profile.gpus],
            "cpu": machine.cpu,
            "cores": machine.cores,
            "memory_gb": machine.memory_gb,
            "driver": machine.driver,
            "os": machine.os,
        },
        "provenance": {**provenance, "ended": None},
        "arms": {
            arm.arm: {
                "skipped": arm.skipped,
                "skip": arm.skip.to_json() if arm.skip else None,
                "stack": arm.stack,
                "fingerprint": arm.fingerprint,
                **({"planned": arm.memory.to_json()} if arm.memory else {}),
                "settings": arm.settings,
                "attempts": [],
            }
            for arm in plan.arms
        },
        "verdicts": {},
        "complete": False,
    }


def take_over(
    document: Document, older: Mapping[str, Any], plan: CellPlan, case: Case, cases: Mapping[str, Case]
) -> None:
    """Resume: attempts already recorded are kept where they are still the answer, also more of them than are asked for.

    They are where they were made on this machine under the fingerprint that the arm has now, asked for or not; an arm's
    recorded fingerprint must be the one that its attempts were made under. What they showed stays; how it is judged may
    have changed since (a signature was mended), so all are judged again. Where something is left behind, the older
    document stays as it is in the history, and this one says where it comes from itself.
    """
    now = {arm.arm: arm.fingerprint for arm in plan.arms if not arm.skipped} | dict(plan.unasked)
    here = machine(older) == machine(document)
    whole = True
    for name, before in older["arms"].items():
        made = [a for a in before["attempts"] if a["outcome"]["outcome"] != "infra"]
        same = here and before.get("fingerprint") == now.get(name) and name in case.arms
        kept = [_judged_again(a, case, name, cases) for a in made if same and made_under(a) in (None, now[name])]
        whole = whole and len(kept) == len(made)
        if name in document["arms"]:
            document["arms"][name]["attempts"] = kept
        elif same and (kept or before["skipped"]):
            document["arms"][name] = {**before, "attempts": kept}
    if whole and any(arm["attempts"] for arm in document["arms"].values()):
        document["provenance"] = {**older["provenance"], "ended": None}


def made_under(attempt: Mapping[str, Any]) -> str | None:
    """The fingerprint that an attempt was launched with; None where it is from before that was stored."""
    found = attempt["observation"]["attempt"].get("fingerprint")
    return str(found) if found else None


def add_attempt(
    document: Document, arm: str, observation: Mapping[str, Any], case: Case, cases: Mapping[str, Case]
) -> grade.Outcome:
    """Judge one observation and keep both."""
    outcome = grade.grade(case, arm, cast(Observation, observation), cases)
    document["arms"][arm]["attempts"].append({"observation": dict(observation), "outcome": asdict(outcome)})
    return outcome


def missing(document: Mapping[str, Any], plan: CellPlan) -> list[tuple[str, int]]:
    """(arm, index) of every attempt that is still to be made."""
    return [
        (arm.arm, index)
        for arm in plan.arms
        if not arm.skipped
        for index in range(len(document["arms"][arm.arm]["attempts"]), arm.repeat)
    ]


def settle(
    document: Document,
    case: Case,
    cases: Mapping[str, Case],
    history: Iterable[Mapping[str, Any]],
    ended: float,
    where: str,
) -> None:
    """Judge the cell over all its attempts. ``history``: older documents of the same cell (other stacks)."""
    outcomes: dict[str, list[grade.Outcome]] = {}
    for name, arm in document["arms"].items():
        if arm["skipped"]:
            outcomes[name] = [grade.skipped(arm["skipped"])]
        else:
            outcomes[name] = [grade.Outcome.from_json(attempt["outcome"]) for attempt in arm["attempts"]]
    settings = document["arms"].get("broken", {}).get("settings")
    document["hardware"]["facts"] = facts.seen(document)
    judged = verdict.judge(
        case, outcomes, history, document["stack"]["versions"], settings, document["hardware"]["facts"]
    )
    hardware, versions = document["hardware"], document["stack"]["versions"]
    document["verdicts"] = {
        name: asdict(found) | expect.told(case, where, name, found, versions, hardware["profile"], hardware["facts"])
        for name, found in judged.items()
    }
    document["provenance"]["ended"] = ended
    document["complete"] = True


def _judged_again(attempt: Mapping[str, Any], case: Case, arm: str, cases: Mapping[str, Case]) -> Mapping[str, Any]:
    return {**attempt, "outcome": asdict(grade.grade(case, arm, attempt["observation"], cases))}
