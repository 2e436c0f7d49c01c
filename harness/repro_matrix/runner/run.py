"""Run a prepared session: its folder (new, or that of the run it continues), canary cells,
launcher, locks, Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from repro_matrix.config import selection as overrides
from repro_matrix.config.catalog import Catalogue, parse_file, read_yaml
from repro_matrix.config.schema import Case, Model, Strategy
from repro_matrix.config.settings import RunSettings, compose_run
from repro_matrix.environment.gpus import Gpu, Nvml
from repro_matrix.environment.machine import Profile
from repro_matrix.errors import ConfigError, MeasureError
from repro_matrix.launch import open_launcher
from repro_matrix.paths import CONF, REPROS, cache_dir
from repro_matrix.planning.cells import Cell
from repro_matrix.planning.plan import CellPlan, Planner
from repro_matrix.records.document import Document, Made
from repro_matrix.records.outcome import FailureId
from repro_matrix.results import runs
from repro_matrix.results.store import Store
from repro_matrix.runner.attempts import Workplace, new_run_dir
from repro_matrix.runner.engine import Engine, Event, RunTotals
from repro_matrix.runner.gpu_pool import GpuLocks, clear_leftovers, register_run
from repro_matrix.runner.session import Session, selected_by
from repro_matrix.text import log

RESUMED = "what is recorded is kept: --resume continues the run"

_MODEL = {"slug": "none", "title": "no model", "hub": "none", "model_type": "none", "config": {}}
_INVARIANTS = {"collectives": ["reduce"]}
_STRATEGY = {
    "slug": "none",
    "title": "no strategy",
    "allow_gpu_sharing": True,
    "invariants": _INVARIANTS,
}
NCCL_ALONE = "nccl-alone"  # the profile of one rank with NCCL on any of the run's GPUs
# processes that want to run for each core, above which load explains a canary that timed out
LOADED = 2.0
# case -> variant -> (verdict, failures it must report)
PLANTED: dict[str, dict[str, tuple[str, list[str]]]] = {
    "canary-failure": {"works": ("FIXED", []), "lies": ("DIFFERENT_FAILURE", ["check sum"])},
    "canary-healthy": {"control": ("PASSED", [])},
}


# The folder of a run


def resumed(texts: Sequence[str]) -> tuple[list[str], Path | None]:
    """Return the overrides of the run that ``--resume`` continues, and its folder (None: a new one,
    or ``results=``).

    With a selection it is the last run of that selection, without one the last interrupted run.
    Overrides on the command line replace those of the run. Raises ConfigError: there is no such
    run.
    """
    line = overrides.parse_overrides(texts)
    named = compose_run(line.run).results
    root = Path(named).expanduser() if named else runs.scratch()
    runs.check_latest(root)
    selected = selected_by(line)
    if named:
        last = None if selected else runs.read_run(root)
        if last is None and not (root.is_dir() and any(root.iterdir())):
            log(f"--resume: {root} holds no results. The run begins from the start.")
    elif selected:
        last = next(
            (run for run in reversed(runs.list_runs(root)) if _selection(run.texts) == selected),
            None,
        )
        if last is None:
            log(f"--resume: {root} holds no run of this selection. The run begins from the start.")
    else:
        last = next((run for run in reversed(runs.list_runs(root)) if run.interrupted), None)
        if last is None:
            raise ConfigError(
                f"--resume: {root} holds no interrupted run. Add the selection of the run"
                " (case=...)."
            )
    if last is None:
        return list(texts), None
    log(f"continuing {last.folder}: {' '.join(last.texts) or 'everything'}")
    given = {key for key, _ in line.words}
    stored = [text for key, text in overrides.parse_overrides(last.texts).words if key not in given]
    return [*stored, *texts], None if named else last.folder


def _selection(texts: Sequence[str]) -> list[str] | None:
    """Parse a run's stored overrides; None where the current grammar does not accept them."""
    try:
        return selected_by(overrides.parse_overrides(texts))
    except ConfigError:
        return None


@contextlib.contextmanager
def folder(
    session: Session, texts: Sequence[str], before: Path | None = None
) -> Iterator[Callable[[RunTotals], None]]:
    """Open the run's folder for as long as it is measured; call what is yielded with the summary at
    the end.

    ``before``: the folder of the run that it continues. A new folder in which nothing was measured
    is removed.
    """
    named = session.settings.results
    fresh = not named and before is None
    root = Path(named).expanduser() if named else before or runs.create_run(runs.scratch(), texts)
    session.settings.results = str(root)

    def note(state: str, left: Sequence[str] = ()) -> None:
        with contextlib.suppress(
            OSError
        ):  # a folder that cannot be written to is reported with the first document
            root.mkdir(parents=True, exist_ok=True)
            versions = {name: dict(stack.versions) for name, stack in session.stacks.items()}
            runs.note(
                root, texts, state, left, versions, [_name(plan.cell) for plan in session.plans]
            )

    def finish(ended: RunTotals) -> None:
        left = list(map(_name, ended.not_started))
        note(runs.UNFINISHED if ended.interrupted or ended.problem else runs.ENDED, left)

    if not fresh:
        note(runs.UNFINISHED)
    if before is not None:
        runs.point(root)
    try:
        yield finish
    except BaseException:
        if fresh:
            runs.drop(root)
        raise


def _name(cell: Cell) -> str:
    return " ".join((cell.hardware, cell.stack, cell.key))


# The canary cells, which every run of the matrix measures first: does the harness itself work here?
#
# A failure, a working fix, a fix after which a number is wrong, and healthy work are measured like
# every cell, with the run's stacks, profiles and launcher, the ranks' kit and the grader. Where one
# has another result than it must have, no result of this run could be trusted, and nothing is
# measured. They are not in the catalogue: no list, claim or published result includes them
# (conf/canary).


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
    """Plan the canary cells on every stack and profile of ``ranks`` (profile -> how many) where the
    run launches something, and one rank with NCCL where that is on GPUs. ``session``: with the
    canary catalogue."""
    launched = [
        (each.stack, plan.profile.name)
        for plan in session.plans
        for each in plan.variants
        if not each.skipped
    ]
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
    settings, profiles = (
        RunSettings(env=dict(session.settings.env)),
        {each.name: each for each in session.profiles},
    )
    return Planner(
        session.catalogue, settings, profiles, session.machine, dict(session.stacks), {}
    ).plan(cells)


def _has_nccl(session: Session, stack: str) -> bool:
    probe = session.stacks[stack].probe
    return not probe or bool(probe["nccl_version"])


def wrong_canaries(documents: Iterable[Document]) -> list[str]:
    """Return a line for each result that is not as planted. Pure."""
    lines = []
    for document in documents:
        for variant, (verdict, failures) in PLANTED[document["case"]].items():
            graded: Any = document["verdicts"].get(variant) or {
                "name": "nothing",
                "reason": "not graded",
            }
            found = [str(FailureId(**item)) for item in graded.get("failure_ids", ())]
            if (graded["name"], found) != (verdict, failures):
                where = f"stack {document['stack']['name']} on {document['hardware']['profile']}"
                result = f"the result is {graded['name']}: {graded['reason']}"
                lines.append(f"{document['case']}/{variant}, {where}: planted {verdict}, {result}")
    return lines


def _nccl_errors(documents: Iterable[Document]) -> list[str]:
    """Return what NCCL gives as the cause, below its first line: "Last error: ..."."""
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
    planted = canary_catalogue(session.catalogue)
    alone = [Profile(NCCL_ALONE, "cuda", "nccl", tuple(session.gpus))] if session.gpus else []
    inner = replace(
        session, catalogue=planted, time_limit=None, profiles=[*session.profiles, *alone]
    )
    two = {
        profile.name
        for profile in session.profiles
        if not profile.gpus or profile.shared or len(profile.gpus) > 1
    }
    ranks = {profile.name: 2 if profile.name in two else 1 for profile in inner.profiles}
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
            attempts = (
                attempt for document in summary.documents for attempt in _attempts(document)
            )
            slow = any(attempt["observation"]["attempt"]["timed_out"] for attempt in attempts)
            load = os.getloadavg()[0] / session.machine.cores
            loaded = (
                f"this machine is too loaded ({load:.1f} processes for each core). Wait until less"
                " runs here"
            )
            what = (
                loaded
                if slow and load > LOADED
                else "the harness itself does not work here (see `repro doctor`)"
            )
            return (
                f"{what}; nothing was measured:"
                f" {'; '.join([*_nccl_errors(summary.documents), *problems])}"
            )
        # Others use the GPUs. Cells that need as many will report it; try the canary cells with
        # fewer.
        fewer = {document["hardware"]["profile"] for document in lacking}
        ranks = {name: count - 1 for name, count in ranks.items() if name in fewer and count > 1}
    return None


def _attempts(document: Document) -> list[Made]:
    return [attempt for variant in document["variants"].values() for attempt in variant["attempts"]]


def _lacks_gpus(attempt: Made) -> bool:
    return attempt["outcome"].get("infra_error") == "not_enough_gpus"


# The run


@contextlib.contextmanager
def workplace(
    launcher: str = "auto",
    gpus: Iterable[Gpu] = (),
    on_warning: Callable[[str], None] = lambda text: None,
) -> Iterator[Workplace]:
    """Open what runs share; everything is ended and released at the end. ``launcher``: of the
    settings."""
    state = cache_dir() / "state"
    for text in clear_leftovers(state):
        on_warning(f"cleared what an earlier run left: {text}")
    run_dir = new_run_dir(state)
    with contextlib.ExitStack() as opened:
        opened.enter_context(register_run(state, run_dir.name))
        opened.callback(shutil.rmtree, run_dir, ignore_errors=True)
        nvml = opened.enter_context(Nvml(gpu.uuid for gpu in gpus))
        locks = opened.enter_context(GpuLocks(state, run_dir.name, nvml))
        yield Workplace(
            opened.enter_context(contextlib.closing(open_launcher(launcher))), locks, nvml, run_dir
        )


def execute(
    session: Session,
    on_event: Callable[[Event], None],
    stop: threading.Event,
    resume: bool = False,
    on_warning: Callable[[str], None] = lambda text: None,
    with_canary: bool = False,
    shared: Workplace | None = None,
) -> RunTotals:
    """Run the session's plans over its results folder. ``with_canary``: measure the canary cells
    first, and nothing else where their results are wrong (MeasureError). ``shared``: where several
    runs share a launcher."""
    store = Store(runs.results_folder(session.settings))
    store.open()
    try:
        with contextlib.ExitStack() as opened:
            launcher = session.settings.launcher
            place = shared or opened.enter_context(workplace(launcher, session.gpus, on_warning))
            if with_canary and (problem := canary_problem(session, place, stop)):
                raise MeasureError(problem)
            earlier = runs.measured_rows(session.settings, place.published)
            return Engine(session, place, store, on_event, earlier).run(session.plans, stop, resume)
    finally:
        for text in dict.fromkeys(store.damaged):
            on_warning(text)
        store.close()


@contextlib.contextmanager
def interruptible(
    stop: threading.Event,
    say: Callable[[str], None],
    kept: str = "what is recorded is kept: the same command continues",
) -> Iterator[None]:
    """Ctrl-C (or SIGTERM) ends the ranks and keeps what is recorded; a second one does not wait for
    anything.

    ``kept``: what becomes of the results, for the message."""

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.kill()
            os._exit(130)
        stop.set()
        say(f"stopping: ending the ranks; {kept}. Press Ctrl-C again to stop at once")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
