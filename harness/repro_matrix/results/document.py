"""A cell's document: built as attempts come in, judged when its arms are done. Pure (times and machine are given)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from repro_matrix.config.schema import Case
from repro_matrix.environment.machine import Machine
from repro_matrix.grading import grade, outcome
from repro_matrix.grading.comparability import machine, recorded_capabilities
from repro_matrix.grading.consistency import fingerprint_mismatch
from repro_matrix.grading.regrade import verdicts_of, with_expectations
from repro_matrix.planning.plan import ArmPlan, CellPlan
from repro_matrix.records.base import Accelerator
from repro_matrix.records.document import Arm, Document, Made, Provenance, Stack
from repro_matrix.records.observation import Observation, Settings


def new(
    plan: CellPlan,
    case: Case,
    machine: Machine,
    stack: Stack,
    provenance: Provenance,
) -> Document:
    """A document without attempts. ``stack``: {"name", "python", "versions"}; ``provenance`` gets ``started``."""
    cell, profile = plan.cell, plan.profile
    settings = plan.arms[0].settings
    return {
        "schema": 1,
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
        "stack": stack,
        "hardware": {
            "profile": profile.name,
            "accelerator": cast(Accelerator, profile.accelerator),
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
        "arms": {arm.arm: _arm(arm) for arm in plan.arms},
        "verdicts": {},
        "complete": False,
    }


def _arm(plan: ArmPlan) -> Arm:
    made: Arm = {
        "skipped": plan.skipped,
        "skip": plan.skip.to_json() if plan.skip else None,
        "stack": plan.stack,
        "fingerprint": plan.fingerprint,
        "settings": cast(Settings, plan.settings),
        "attempts": [],
    }
    if plan.memory:
        made["planned"] = plan.memory.to_json()
    return made


def believed(document: Document, case: Case) -> bool:
    """Whether a document may be gone on with: one whose attempts contradict it is measured anew (and stays in the
    history), and so is another case's. An arm under another fingerprint is left behind by itself (``take_over``)."""
    return document["case"] == case.slug and fingerprint_mismatch(document) is None


def take_over(document: Document, older: Document, plan: CellPlan, case: Case, cases: Mapping[str, Case]) -> None:
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


def made_under(attempt: Made) -> str | None:
    """The fingerprint that an attempt was launched with; None where it is from before that was stored."""
    return attempt["observation"]["attempt"].get("fingerprint") or None


def add_attempt(
    document: Document, arm: str, observation: Observation, case: Case, cases: Mapping[str, Case]
) -> outcome.Outcome:
    """Judge one observation and keep both."""
    outcome = grade.grade(case, arm, observation, cases)
    document["arms"][arm]["attempts"].append({"observation": observation, "outcome": outcome.to_json()})
    return outcome


def missing(document: Document, plan: CellPlan) -> list[tuple[str, int]]:
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
    history: Iterable[Document],
    ended: float,
    where: str,
) -> None:
    """Judge the cell over all its attempts. ``history``: older documents of the same cell (other stacks)."""
    document["hardware"]["facts"] = recorded_capabilities(document)
    document["verdicts"] = verdicts_of(document, case, history)
    document["verdicts"] = with_expectations({**document, "where": where}, case)["verdicts"]
    document["provenance"]["ended"] = ended
    document["complete"] = True


def _judged_again(attempt: Made, case: Case, arm: str, cases: Mapping[str, Case]) -> Made:
    return {**attempt, "outcome": grade.grade(case, arm, attempt["observation"], cases).to_json()}
