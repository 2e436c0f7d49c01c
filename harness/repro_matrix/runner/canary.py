"""Canary cells that every run of the matrix measures first: does the harness itself work here?

A failure, a working fix, a fix after which a number is wrong, and healthy work are measured like every cell, with the
run's stacks, profiles and launcher, the ranks' kit and the grader. Where one has another result than it must have, no
result of this run could be trusted, and nothing is measured. They are not in the catalogue: no list, claim or
published result includes them (conf/canary).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from repro_matrix.config.catalog import Catalogue, parse, read_yaml
from repro_matrix.config.schema import Case, Model, Strategy
from repro_matrix.config.settings import RunSettings
from repro_matrix.paths import CONF, REPROS
from repro_matrix.planning.cells import Cell
from repro_matrix.planning.plan import CellPlan, Planner
from repro_matrix.records.document import Document
from repro_matrix.records.outcome import FailureId
from repro_matrix.results.store import Store
from repro_matrix.runner.attempts import imports_of
from repro_matrix.runner.engine import Event, RunContext, Summary

_MODEL = {"slug": "none", "title": "no model", "hub": "none", "model_type": "none", "config": {}}
_INVARIANTS = {"collectives": ["reduce"]}
_STRATEGY = {"slug": "none", "title": "no strategy", "allow_gpu_sharing": True, "invariants": _INVARIANTS}
# case -> variant -> (verdict, failures it must report)
PLANTED: dict[str, dict[str, tuple[str, list[str]]]] = {
    "canary-failure": {"works": ("FIXED", []), "lies": ("DIFFERENT_FAILURE", ["check sum"])},
    "canary-healthy": {"control": ("PASSED", [])},
}


def catalogue(of: Catalogue, imports: Sequence[str] = ()) -> Catalogue:
    """Return the canary cases with the run's stacks and hardware. ``imports``: of their fork server."""
    raws = {path.stem: read_yaml(path) for path in sorted((CONF / "canary").glob("*.yaml"))}
    for raw in raws.values() if imports else ():
        raw["launch"]["imports"] = list(imports)
    cases = {slug: parse(Case, raw, CONF / "canary" / f"{slug}.yaml") for slug, raw in raws.items()}
    raw_of = {**of.raw, "case": raws, "model": {"none": _MODEL}, "strategy": {"none": _STRATEGY}}
    models, strategies = {"none": Model(**_MODEL)}, {"none": Strategy(**_STRATEGY)}
    return Catalogue(cases, models, strategies, of.stacks, of.hardware, raw_of, REPROS)


def plans(planted: Catalogue, context: RunContext, of: Iterable[CellPlan], ranks: Mapping[str, int]) -> list[CellPlan]:
    """Plan the canary cells on every stack and profile of ``ranks`` (profile -> how many) where the run launches
    something."""
    used = dict.fromkeys(
        (variant.stack, plan.profile.name) for plan in of for variant in plan.variants if not variant.skipped
    )
    profiles = {profile.name: profile for profile in context.profiles}
    cells = [
        Cell(case, "none", "none", (), stack, name, ranks[name])
        for stack, name in used
        if name in ranks
        for case in planted.cases
    ]
    settings = RunSettings(env=dict(context.settings.env))
    return Planner(planted, settings, profiles, context.machine, dict(context.stacks), {}).plan(cells)


def usual_imports(of: Catalogue, among: Iterable[CellPlan]) -> tuple[str, ...]:
    """Return what most variants' servers import: such a server serves the canary cells too."""
    counts: Counter[tuple[str, ...]] = Counter()
    for plan in among:
        case = of.cases[plan.cell.case]
        if not case.launch.env and not case.launch.cold_start_reason:
            counts.update(imports_of(of, case, variant) for variant in plan.variants if not variant.skipped)
    return counts.most_common(1)[0][0] if counts else ()


def wrong(documents: Iterable[Document]) -> list[str]:
    """Return a line for each result that is not as planted. Pure."""
    lines = []
    for document in documents:
        for variant, (verdict, failures) in PLANTED[document["case"]].items():
            graded: Any = document["verdicts"].get(variant) or {"name": "nothing", "reason": "not graded"}
            found = [str(FailureId(**item)) for item in graded.get("failure_ids", ())]
            if (graded["name"], found) != (verdict, failures):
                where = f"stack {document['stack']['name']} on {document['hardware']['profile']}"
                result = f"the result is {graded['name']}: {graded['reason']}"
                lines.append(f"{document['case']}/{variant}, {where}: planted {verdict}, {result}")
    return lines


def look(
    context: RunContext,
    of: Sequence[CellPlan],
    run: Callable[[RunContext, list[CellPlan], Store, Callable[[Event], None]], Summary],
    store: Store,
    stop: threading.Event,
) -> str | None:
    """Measure the canary cells by ``run``; return why nothing else may be measured, or None.

    ``store``: of their documents, which are not kept. There are no canary cells where nothing is launched.
    """
    planted = catalogue(context.catalogue, usual_imports(context.catalogue, of))
    context = replace(context, catalogue=planted, earlier=(), ends=None)
    two = {profile.name for profile in context.profiles if not profile.gpus or profile.shared or len(profile.gpus) > 1}
    ranks = {profile.name: 2 if profile.name in two else 1 for profile in context.profiles}
    while cells := plans(planted, context, of, ranks):
        summary = run(context, cells, store, lambda event: None)
        if stop.is_set():
            return None
        lacking = [document for document in summary.documents if _lacks_gpus(document)]
        problems = wrong(document for document in summary.documents if document not in lacking)
        problems += [summary.problem] if summary.problem else []
        if problems:
            return "the harness itself does not work here, nothing was measured: " + "; ".join(problems)
        # Others use the GPUs. Cells that need as many will report it; try the canary cells with fewer.
        fewer = {document["hardware"]["profile"] for document in lacking}
        ranks = {name: count - 1 for name, count in ranks.items() if name in fewer and count > 1}
    return None


def _lacks_gpus(document: Document) -> bool:
    attempts = (attempt for variant in document["variants"].values() for attempt in variant["attempts"])
    return any(attempt["outcome"].get("infra_error") == "not_enough_gpus" for attempt in attempts)
