"""A cell's document: built as attempts end, graded when its variants are done. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from repro_matrix.config.schema import Case
from repro_matrix.environment.machine import Machine
from repro_matrix.grading import grade
from repro_matrix.grading.comparability import machine, recorded_capabilities
from repro_matrix.grading.regrade import verdicts_of, with_expectations
from repro_matrix.planning.plan import CellPlan, VariantPlan
from repro_matrix.records.attempt import Observation, Settings
from repro_matrix.records.document import Accelerator, Document, Made, Provenance, Stack, Variant
from repro_matrix.records.outcome import Outcome


def new(plan: CellPlan, case: Case, machine: Machine, stack: Stack, provenance: Provenance) -> Document:
    """Return a document without attempts."""
    cell, profile = plan.cell, plan.profile
    settings = plan.variants[0].settings
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
        "overrides": list(cell.overrides),
        "scale": settings["model"]["scale"],
        "weights": settings["model"]["weights"],
        "stack": stack,
        "hardware": {
            "profile": profile.name,
            "accelerator": cast(Accelerator, profile.accelerator),
            "backend": profile.backend,
            "shares_gpu": profile.shared,
            "gpus": [{"name": gpu.name, "uuid": gpu.uuid, "memory_mb": gpu.memory_mb} for gpu in profile.gpus],
            "cpu": machine.cpu,
            "cores": machine.cores,
            "memory_gb": machine.memory_gb,
            "driver": machine.driver,
            "os": machine.os,
        },
        "provenance": {**provenance, "ended": None},
        "variants": {variant.variant: _variant(variant) for variant in plan.variants},
        "verdicts": {},
        "complete": False,
    }


def _variant(plan: VariantPlan) -> Variant:
    made: Variant = {
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


def take_over(document: Document, older: Document, plan: CellPlan, case: Case, cases: Mapping[str, Case]) -> None:
    """Resume: keep the attempts that were measured on this machine under the fingerprint that the variant has now,
    requested or not, and more of them than requested.

    All are graded again, because a signature may have changed. Where some are not kept, the older document remains in
    the history, and this one has its own provenance.
    """
    planned = {variant.variant: variant.fingerprint for variant in plan.variants if not variant.skipped}
    now = {**planned, **dict(plan.unasked)}
    here = machine(older) == machine(document)
    whole = True
    for name, before in older["variants"].items():
        made = [a for a in before["attempts"] if a["outcome"]["outcome"] != "infra_error"]
        same = here and before.get("fingerprint") == now.get(name) and name in case.variants
        kept: list[Made] = [
            {**a, "outcome": grade.grade(case, name, a["observation"], cases).to_json()} for a in made if same
        ]
        whole = whole and len(kept) == len(made)
        if name in document["variants"]:
            document["variants"][name]["attempts"] = kept
        elif same and (kept or before["skipped"]):
            document["variants"][name] = {**before, "attempts": kept}
    if whole and any(variant["attempts"] for variant in document["variants"].values()):
        document["provenance"] = {**older["provenance"], "ended": None}


def add_attempt(
    document: Document, variant: str, observation: Observation, case: Case, cases: Mapping[str, Case]
) -> Outcome:
    """Grade one observation and add both."""
    outcome = grade.grade(case, variant, observation, cases)
    document["variants"][variant]["attempts"].append({"observation": observation, "outcome": outcome.to_json()})
    return outcome


def missing(document: Document, plan: CellPlan) -> list[tuple[str, int]]:
    """Return (variant, index) of every attempt that is still to be launched."""
    return [
        (variant.variant, index)
        for variant in plan.variants
        if not variant.skipped
        for index in range(len(document["variants"][variant.variant]["attempts"]), variant.repeat)
    ]


def settle(document: Document, case: Case, history: Iterable[Document], ended: float, where: str) -> None:
    """Grade the cell over all its attempts. ``history``: older documents of the same cell on other stacks."""
    document["hardware"]["capabilities"] = recorded_capabilities(document)
    document["verdicts"] = verdicts_of(document, case, history)
    document["verdicts"] = with_expectations({**document, "params": where}, case)["verdicts"]
    document["provenance"]["ended"] = ended
    document["complete"] = True
