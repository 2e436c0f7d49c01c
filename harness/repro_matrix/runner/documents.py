"""Create the document of a cell, and take over attempts of an earlier one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import RELEVANT
from repro_matrix.environment.machine import conditions
from repro_matrix.grading import grade
from repro_matrix.grading.expected import machine as machine_of
from repro_matrix.launch.observe import EITHER
from repro_matrix.planning.plan import CellPlan, VariantPlan
from repro_matrix.records.attempt import Settings
from repro_matrix.records.document import (
    Accelerator,
    Document,
    GradedAttempt,
    Probe,
    Provenance,
    VariantRecord,
)
from repro_matrix.results.inconsistencies import inconsistencies
from repro_matrix.results.store import stack_label

if TYPE_CHECKING:
    from repro_matrix.runner.prepared import Session


def new_document(session: Session, plan: CellPlan, started: Mapping[str, Any]) -> Document:
    """Return a document without attempts. ``started``: its provenance."""
    cell, profile, machine = plan.cell, plan.profile, session.machine
    case, settings = session.catalogue.cases[cell.case], plan.variants[0].settings
    stack = session.stacks.get(cell.stack)
    versions = dict(stack.versions) if stack else {}
    document: Document = {
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
        "stack": {
            "name": cell.stack,
            "python": versions.get("python"),
            "versions": {name: versions[name] for name in RELEVANT if name in versions},
            "label": (
                stack_label(versions, stack.label_key)
                if stack
                else f"unavailable-{cell.stack}".replace("/", "_")
            ),
        },
        "hardware": {
            "profile": profile.name,
            "accelerator": cast(Accelerator, profile.accelerator),
            "backend": profile.backend,
            "shares_gpu": profile.shared,
            "gpus": [
                {"name": gpu.name, "uuid": gpu.uuid, "memory_mb": gpu.memory_mb}
                for gpu in profile.gpus
            ],
            "cpu": machine.cpu,
            "cores": machine.cores,
            "memory_gb": round(machine.memory_gb, 1),
            "driver": machine.driver,
            "os": machine.os,
            **conditions(),
        },
        "provenance": cast(Provenance, {**started, "ended": None}),
        "variants": {variant.variant: _new_variant(variant) for variant in plan.variants},
        "verdicts": {},
        "complete": False,
        "cell_id": cell.key,
        "params": cell.where,
    }
    if stack and stack.changed:
        document["stack"]["changed"] = list(stack.changed[:20])
    if stack and stack.probe and profile.accelerator != "cpu":
        document["hardware"]["probe"] = cast(Probe, dict(stack.probe))
    return document


def _new_variant(plan: VariantPlan) -> VariantRecord:
    variant: VariantRecord = {
        "skipped": plan.skipped,
        "skip": plan.skip.to_json() if plan.skip else None,
        "stack": plan.stack,
        "fingerprint": plan.fingerprint,
        "settings": cast(Settings, plan.settings),
        "attempts": [],
    }
    if plan.memory:
        variant["planned"] = plan.memory.to_json()
    return variant


def take_over(
    document: Document, older: Document, plan: CellPlan, cases: Mapping[str, Case]
) -> None:
    """Keep the earlier attempts of this machine whose variant still has the same fingerprint.

    Keep them whether they are requested or not, and more of them than requested.

    All are graded again, because a signature may have changed. Where some are not kept, the older
    document remains in the history, and this one has its own provenance.
    """
    case = cases[document["case"]]
    now = dict(plan.unasked)
    for variant in plan.variants:
        if not variant.skipped:
            now[variant.variant] = variant.fingerprint
    here = machine_of(older) == machine_of(document)
    whole = True
    for name, before in older["variants"].items():
        usable = _usable(before["attempts"])
        same = (
            here
            and before.get("fingerprint") == now.get(name)
            and name in case.variants
            and not any(inconsistencies(older, name))
        )
        regraded: list[GradedAttempt] = [
            {**a, "outcome": grade.grade(case, name, a["observation"], cases).to_json()}
            for a in usable
            if same
        ]
        whole = whole and len(regraded) == len(usable)
        if name in document["variants"]:
            document["variants"][name]["attempts"] = regraded
        elif same and (regraded or before["skipped"]):
            document["variants"][name] = {**before, "attempts": regraded}
    if whole and any(variant["attempts"] for variant in document["variants"].values()):
        document["provenance"] = {**older["provenance"], "ended": None}


def _usable(attempts: Sequence[GradedAttempt]) -> list[GradedAttempt]:
    """Return the attempts that are evidence, and errors that must not be hidden.

    These are what the attempts repeated, and errors that a GPU or the program caused: a new attempt
    would hide that they did not occur again.
    """
    found: list[GradedAttempt] = []
    repeated: list[Any] = []
    for each in reversed(attempts):
        error, outcome = each["observation"]["infra_error"], each["outcome"]
        if error in repeated:
            repeated.remove(error)
        elif outcome["outcome"] == "infra_error" and outcome.get("infra_error") != EITHER:
            continue
        found.insert(0, each)
        if before := each["observation"]["attempt"].get("retry_of"):
            repeated.append(before)
    return found


def missing_attempts(document: Document, plan: CellPlan) -> list[tuple[str, int]]:
    """Return (variant, index) of every attempt that is still to be launched."""
    missing = []
    for variant in plan.variants:
        if variant.skipped:
            continue
        # An attempt that was repeated counts as one with its repetition.
        made = sum(
            "retry_of" in each["observation"]["attempt"]
            or each["outcome"]["outcome"] != "infra_error"
            for each in document["variants"][variant.variant]["attempts"]
        )
        missing += [(variant.variant, index) for index in range(made, variant.repeat)]
    return missing
