"""Planted cells that every run of the matrix measures first: is it the harness that is broken here?

A failure, a fix that holds, a fix after which a number is wrong, and healthy work take the way of every cell: the run's
stacks and profiles, its launcher, the ranks' kit and the judge. Where one does not come out as it was planted, nothing
that this run says could be believed, and nothing is measured. Not of the catalogue: no list, claim or published result
knows them (conf/canary).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from repro_matrix.config.axes import Model, Strategy
from repro_matrix.config.catalog import Catalogue, parse, read_yaml
from repro_matrix.config.schema import Case
from repro_matrix.config.settings import RunSettings
from repro_matrix.environment.profiles import Profile
from repro_matrix.grading.failure_id import Met
from repro_matrix.paths import CONF, REPROS
from repro_matrix.planning.cells import Cell
from repro_matrix.planning.plan import CellPlan, Planner, StackLike
from repro_matrix.records.document import Document
from repro_matrix.results.store import Store
from repro_matrix.runner.attempts import imports_of
from repro_matrix.runner.context import Given
from repro_matrix.runner.events import Event, Summary

NONE: dict[str, dict[str, Any]] = {
    "model": {"slug": "none", "title": "no model", "hub": "none", "model_type": "none", "config": {}},
    "strategy": {"slug": "none", "title": "no strategy", "shared": True, "promises": {"collectives": ["reduce"]}},
}
# case -> arm -> (verdict, what it must have met)
PLANTED: dict[str, dict[str, tuple[str, list[str]]]] = {
    "canary-failure": {"works": ("FIX_HOLDS", []), "lies": ("FIX_UNMASKS", ["check sum"])},
    "canary-healthy": {"control": ("HEALTHY", [])},
}


def catalogue(of: Catalogue, imports: Sequence[str] = ()) -> Catalogue:
    """The planted cases with the run's stacks and hardware. ``imports``: of their warm server."""
    cases, raws = {}, {}
    for path in sorted((CONF / "canary").glob("*.yaml")):
        raw = read_yaml(path)
        if imports:
            raw["launch"]["imports"] = list(imports)
        raws[path.stem] = raw
        cases[path.stem] = parse(Case, raw, path)
    models, strategies = {"none": Model(**NONE["model"])}, {"none": Strategy(**NONE["strategy"])}
    raw_of = {**of.raw, "case": raws, "model": {"none": NONE["model"]}, "strategy": {"none": NONE["strategy"]}}
    return Catalogue(cases, models, strategies, of.stacks, of.hardware, raw_of, REPROS)


def plans(planted: Catalogue, given: Given, of: Iterable[CellPlan], ranks: Mapping[str, int]) -> list[CellPlan]:
    """The planted cells on every stack and profile of ``ranks`` (profile -> how many) that the run launches something
    on."""
    used = dict.fromkeys((arm.stack, plan.profile.name) for plan in of for arm in plan.arms if not arm.skipped)
    profiles: dict[str, Profile] = {profile.name: profile for profile in given.profiles}
    cells = [
        Cell(case, "none", "none", (), stack, name, ranks[name])
        for stack, name in used
        if name in ranks
        for case in planted.cases
    ]
    settings = RunSettings(env=dict(given.settings.env))
    stacks: Mapping[str, StackLike | str] = given.stacks
    return Planner(planted, settings, profiles, given.machine, stacks, {}).plan(cells)


def _two(profile: Profile) -> bool:
    return profile.accelerator == "cpu" or profile.shared or len(profile.gpus) > 1


def usual_imports(of: Catalogue, among: Iterable[CellPlan]) -> tuple[str, ...]:
    """What most arms' servers import: a server that the run starts anyway serves the planted cells too."""
    found = Counter(
        imports_of(of, of.cases[plan.cell.case], arm)
        for plan in among
        for arm in plan.arms
        if not arm.skipped and not of.cases[plan.cell.case].launch.env and not of.cases[plan.cell.case].launch.cold
    )
    return found.most_common(1)[0][0] if found else ()


def wrong(documents: Iterable[Document]) -> list[str]:
    """What did not come out as it was planted, in words. Pure."""
    found = []
    for document in documents:
        for arm, (verdict, met) in PLANTED[document["case"]].items():
            judged = document["verdicts"].get(arm)
            name, why = (judged["name"], judged["reason"]) if judged else ("nothing", "not judged")
            if judged is None or name != verdict or [str(Met(**item)) for item in judged.get("met", ())] != met:
                where = f"stack {document['stack']['name']} on {document['hardware']['profile']}"
                came = f"came out as {name}: {why}"
                found.append(f"{document['case']}/{arm}, {where}: planted {verdict}, {came}")
    return found


def look(
    given: Given,
    of: Sequence[CellPlan],
    run: Callable[[Given, list[CellPlan], Store, Callable[[Event], None]], Summary],
    store: Store,
    stop: threading.Event,
) -> str | None:
    """Measure the planted cells by ``run``; why nothing else may be measured, or None.

    ``store``: of their documents, which nobody keeps. Nothing is planted where nothing is launched.
    """
    planted = catalogue(given.catalogue, usual_imports(given.catalogue, of))
    given = replace(given, catalogue=planted, history={})
    ranks = {profile.name: 2 if _two(profile) else 1 for profile in given.profiles}
    while own := plans(planted, given, of, ranks):
        summary = run(given, own, store, lambda event: None)
        if stop.is_set():
            return None
        lacking = [document for document in summary.documents if _lacks_cards(document)]
        found = wrong(document for document in summary.documents if document not in lacking)
        if found or summary.problem:
            return "the harness itself is broken here, nothing was measured: " + "; ".join(
                found or [str(summary.problem)]
            )
        # Others are on the cards. What needs as many will say so; what needs fewer is planted with fewer.
        fewer = {document["hardware"]["profile"] for document in lacking}
        ranks = {name: count - 1 for name, count in ranks.items() if name in fewer and count > 1}
    return None


def _lacks_cards(document: Document) -> bool:
    attempts = (attempt for arm in document["arms"].values() for attempt in arm["attempts"])
    return any(attempt["outcome"].get("infra") == "cards" for attempt in attempts)
