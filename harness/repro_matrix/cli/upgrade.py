"""`repro upgrade --from STACK --to STACK`: what an upgrade changes, and which package and release changed it."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Mapping
from typing import Any

from repro_matrix.analysis import upgrade
from repro_matrix.analysis.diff import KINDS
from repro_matrix.analysis.inputs import side_of_run
from repro_matrix.cli import options
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import Stack
from repro_matrix.errors import ConfigError, ReproError
from repro_matrix.records.document import Document
from repro_matrix.report.run_summary import Progress
from repro_matrix.report.terminal import print_json, print_table, print_wrapped
from repro_matrix.runner import session
from repro_matrix.runner import workspace as workplace
from repro_matrix.runner.session import Request, ask
from repro_matrix.search.algorithms import Stopped
from repro_matrix.search.prober import Target
from repro_matrix.text import log

WHY = {"all": tuple(KINDS), "worse": upgrade.WORSE, "none": ()}
EPILOG = """Stored results of the two stacks are used, the others are measured.

exit codes: 1 a failure appears, a control fails, or a fix stops working; else 3 a result is missing; else 0"""


def configure(parser: argparse.ArgumentParser) -> None:
    options.overrides(parser)
    add = parser.add_argument
    help_text = "the stack in use: a name, a lock, a requirements file, python:PATH"
    add("--from", dest="source", metavar="STACK", required=True, help=help_text)
    add("--to", dest="target", metavar="STACK", required=True, help="the stack to upgrade to")
    add("--why", choices=WHY, default="all", help="for which changes to search the package that caused them")
    add("--releases", action="store_true", help="also search for the package's release")
    add("--budget", type=options.number(3), metavar="N", help="at most N probes for each release")
    add("--script", metavar="SCRIPT", help="your own script instead of the catalog, e.g. ./train.py")
    options.script(parser)


def main(args: argparse.Namespace) -> int:
    _, texts = options.one_stack(args, {"stack": "the stacks are --from and --to"})
    args.case = args.script
    if args.script:
        return _upgrade_script(args)
    options.refuse(args)
    specs, request, stop = (args.source, args.target), ask(texts), threading.Event()
    ends = _resolve(*specs)
    stopped: Stopped | None = None
    with workplace.interruptible(stop, log):
        documents = _measure(request, dict(zip(specs, ends)), stop)
        rows = side_of_run("", documents).rows
        result = upgrade.compare_stacks(*([row for row in rows if row.stack == spec] for spec in specs))
        search = upgrade.CauseSearch(request, specs, ends, stop, args.releases, args.budget, log)
        try:
            search.run([change for change in result.changes if change.kind in WHY[args.why]], documents)
        except Stopped as error:
            stopped = error
    changes = upgrade.changes_to_json(result.changes, search.causes)
    data = upgrade.to_json(specs, ends, changes, result.unknown, result.same)
    _show(args, {**data, "stopped": str(stopped) if stopped else None})
    return options.stopped(stopped) if stopped else result.exit_code


def _resolve(source: str, target: str) -> tuple[Stack, Stack]:
    ends = stacks.resolve(source, say=log), stacks.resolve(target, say=log)
    if source == target or ends[0].key == ends[1].key:
        raise ConfigError(f"--from and --to are the same stack, {source}")
    return ends


def _upgrade_script(args: argparse.Namespace) -> int:
    from repro_matrix.config.schema import VARIANT
    from repro_matrix.external.lockfiles import endpoints
    from repro_matrix.external.scripts import ScriptProber
    from repro_matrix.search.bisect import Bisector

    script, _, settings = options.script_of(args, needs_limit=False)
    source, target, notes = endpoints(args.source, args.target, script.results)
    specs, ends, stop = (source, target), _resolve(source, target), threading.Event()
    prober = ScriptProber(script, log, stop, settings.repeat)
    search = upgrade.CauseSearch(None, specs, ends, stop, args.releases, args.budget, log)
    with workplace.interruptible(stop, log), prober:
        try:
            prober.learn(Target(source, source), Target(target, target))
            before, after = (prober.probe(Target(spec, spec)).variants[VARIANT] for spec in specs)
            kind = upgrade.kind_of(before, after)
            cause = search.cause(Bisector(prober, VARIANT)) if kind in WHY[args.why] else None
        except Stopped as error:
            return options.stopped(error)
    changes, unknown = upgrade.compare_answers(script.command.name, VARIANT, before, after, cause)
    data = upgrade.to_json(specs, ends, changes, unknown, int(not changes and not unknown))
    _show(args, {**data, "stopped": None, "notes": [*notes, *prober.notes]})
    return 3 if unknown else int(kind in upgrade.WORSE)


def _measure(request: Request, ends: Mapping[str, Stack], stop: threading.Event) -> list[Document]:
    prepared = session.prepare(request.with_values({"stack": list(ends)}), given=ends)
    with Progress() as progress:
        summary = workplace.execute(prepared, progress.event, stop, resume=True, on_warning=progress.warn)
    if summary.problem:
        raise ReproError(summary.problem)
    if summary.interrupted:
        raise KeyboardInterrupt
    return summary.documents


def _show(args: argparse.Namespace, data: Mapping[str, Any]) -> None:
    if args.json:
        return print_json(data)
    table, lines = upgrade.describe(data)
    title = f"{data['from']} -> {data['to']}"
    if table:
        print_table(title, upgrade.COLUMNS, table)
    print_wrapped(*([] if table else [title]), *lines)
