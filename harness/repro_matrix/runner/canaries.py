"""Measure the canary cells, whose results are planted, before anything else is measured.

A failure, a working fix, a fix after which a number is wrong, and healthy work are measured like
every cell, with the run's stacks, profiles and launcher, the ranks' kit and the grader. If a result
is not as planted, nothing else is measured (conf/canary).
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from repro_matrix.config.catalog import Catalogue, parse_file, read_yaml
from repro_matrix.config.schema import Case, Model, Strategy
from repro_matrix.config.settings import RunSettings
from repro_matrix.environment.machine import no_loopback
from repro_matrix.environment.profiles import Profile
from repro_matrix.paths import CONF, REPROS
from repro_matrix.planning.cells import Cell
from repro_matrix.planning.plan import CellPlan
from repro_matrix.records.document import Document, GradedAttempt
from repro_matrix.records.outcome import FailureId
from repro_matrix.results.store import Store
from repro_matrix.runner.attempts import Workplace
from repro_matrix.runner.engine import Engine
from repro_matrix.runner.prepared import Session

_MODEL = {"slug": "none", "title": "no model", "hub": "none", "model_type": "none", "config": {}}
_STRATEGY = {
    "slug": "none",
    "title": "no strategy",
    "allow_gpu_sharing": True,
    "invariants": {"collectives": ["reduce"]},
}
NCCL_ALONE = "nccl-alone"  # the profile of one rank with NCCL on any of the run's GPUs
# processes that want to run for each core, above which load explains a canary that timed out
LOADED = 2.0
# case -> variant -> (verdict, failures it must report)
PLANTED: dict[str, dict[str, tuple[str, list[str]]]] = {
    "canary-failure": {"works": ("FIXED", []), "lies": ("DIFFERENT_FAILURE", ["check sum"])},
    "canary-healthy": {"control": ("PASSED", [])},
}


def canary_catalogue(of: Catalogue) -> Catalogue:
    """Return the canary cases with the run's stacks and hardware."""
    raws = {path.stem: read_yaml(path) for path in sorted((CONF / "canary").glob("*.yaml"))}
    cases = {
        slug: parse_file(Case, raw, CONF / "canary" / f"{slug}.yaml") for slug, raw in raws.items()
    }
    raw_of = {**of.raw, "case": raws, "model": {"none": _MODEL}, "strategy": {"none": _STRATEGY}}
    models, strategies = {"none": Model(**_MODEL)}, {"none": Strategy(**_STRATEGY)}
    return Catalogue(cases, models, strategies, of.stacks, of.hardware, raw_of, REPROS)


def plan_canary(session: Session, ranks: Mapping[str, int]) -> list[CellPlan]:
    """Plan the canary cells on every stack and profile where the run launches something.

    On GPUs that includes one rank with NCCL. ``session``: with the canary catalogue. ``ranks``:
    profile -> number of ranks.
    """
    launched = [(each.stack, each.cell.hardware) for each in session.launched]
    on_gpus = {profile.name for profile in session.profiles if profile.gpus}
    launched += [
        (stack, NCCL_ALONE)
        for stack, name in launched
        if name in on_gpus and _has_nccl(session, stack)
    ]
    cells = [
        Cell(case, "none", "none", (), stack, name, ranks[name])
        for stack, name in dict.fromkeys(launched)
        for case in (session.catalogue.cases if name != NCCL_ALONE else ["canary-healthy"])
        if name in ranks
    ]
    usual = replace(session, settings=RunSettings(env=session.settings.env))
    return usual.planner(session.stacks, code={}).plan(cells)


def _has_nccl(session: Session, stack: str) -> bool:
    probe = session.stacks[stack].probe
    return not probe or bool(probe["nccl_version"])


def wrong_canaries(documents: Iterable[Document]) -> list[str]:
    """Return a line for each result that is not as planted. Pure."""
    lines = []
    for document in documents:
        for variant, (verdict, failures) in PLANTED[document["case"]].items():
            graded: Any = document["verdicts"].get(variant)
            graded = graded or {"name": "nothing", "reason": "not graded"}
            found = [str(FailureId(**item)) for item in graded.get("failure_ids", ())]
            if (graded["name"], found) != (verdict, failures):
                where = f"stack {document['stack']['name']} on {document['hardware']['profile']}"
                result = f"the result is {graded['name']}: {graded['reason']}"
                lines.append(f"{document['case']}/{variant}, {where}: planted {verdict}, {result}")
    return lines


def _nccl_errors(documents: Iterable[Document]) -> list[str]:
    """Return the causes that NCCL reports below its first line: "Last error: ..."."""
    records = (
        rank["record"]
        for document in documents
        for each in _attempts(document)
        for rank in each["observation"]["ranks"]
    )
    messages = (
        record["exception"]["message"] for record in records if record and record["exception"]
    )
    found = (re.search(r"Last error:\s*(.+)", message) for message in messages)
    return list(dict.fromkeys(f"NCCL: {text[1]}" for text in found if text))


def canary_problem(session: Session, place: Workplace, stop: threading.Event) -> str | None:
    """Measure the canary cells; return why nothing else may be measured, or None.

    Their documents are not kept. There are no canary cells where nothing is launched.
    """
    if why := no_loopback():
        return why
    planted = canary_catalogue(session.catalogue)
    alone = [Profile(NCCL_ALONE, "cuda", "nccl", tuple(session.gpus))] if session.gpus else []
    inner = replace(
        session, catalogue=planted, time_limit=None, profiles=[*session.profiles, *alone]
    )
    ranks = {NCCL_ALONE: 1}
    for profile in session.profiles:
        ranks[profile.name] = 1 if len(profile.gpus) == 1 and not profile.shared else 2
    while cells := plan_canary(inner, ranks):
        summary = Engine(inner, place, Store(place.run_dir / "canary"), lambda event: None).run(
            cells, stop
        )
        if stop.is_set():
            return None
        lacking = [
            document for document in summary.documents if any(map(_lacks_gpus, _attempts(document)))
        ]
        problems = wrong_canaries(
            document for document in summary.documents if document not in lacking
        )
        problems += [str(summary.problem)] if summary.problem else []
        if problems:
            return _describe_problem(session, summary.documents, problems)
        # Others use the GPUs. Cells that need as many will report it; try the canary cells with
        # fewer.
        fewer = {document["hardware"]["profile"] for document in lacking}
        ranks = {name: count - 1 for name, count in ranks.items() if name in fewer and count > 1}
    return None


def _describe_problem(
    session: Session, documents: Sequence[Document], problems: Iterable[str]
) -> str:
    attempts = [attempt for document in documents for attempt in _attempts(document)]
    slow = any(attempt["observation"]["attempt"]["timed_out"] for attempt in attempts)
    load = os.getloadavg()[0] / session.machine.cores
    what = "the harness itself does not work here (see `repro doctor`)"
    if slow and load > LOADED:
        what = (
            f"this machine is too loaded ({load:.1f} processes for each core). Wait until less"
            " runs here"
        )
    return f"{what}; nothing was measured: {'; '.join([*_nccl_errors(documents), *problems])}"


def _attempts(document: Document) -> list[GradedAttempt]:
    return [attempt for variant in document["variants"].values() for attempt in variant["attempts"]]


def _lacks_gpus(attempt: GradedAttempt) -> bool:
    return attempt["outcome"].get("infra_error") == "not_enough_gpus"
