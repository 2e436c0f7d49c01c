"""Run every cell of a selection; report what reproduces, with each fix and without.

Arguments are overrides: commas sweep, globs match. The results are stored, and written as an HTML
page beside them. Exit codes: 0 as expected, 1 unexpected, 2 usage, 3 less was measured than
requested.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone

from repro_matrix.baseline import quarantine
from repro_matrix.baseline.derivation import bisect_exit, exit_code
from repro_matrix.changes.nightly import not_committed
from repro_matrix.changes.regressions import against_history, since_last_passing
from repro_matrix.cli import options
from repro_matrix.cluster.controller import Controller
from repro_matrix.cluster.queue import check_slurm
from repro_matrix.config import executors
from repro_matrix.errors import ConfigError, ExitCode
from repro_matrix.report import run_summary
from repro_matrix.report.formats import variant_record
from repro_matrix.report.headline import headline
from repro_matrix.report.page_model import cells_of
from repro_matrix.report.result_lines import print_rows
from repro_matrix.report.terminal import columns, print_json, print_lines
from repro_matrix.results.projection import rows_of
from repro_matrix.results.runs import results_folder, store_exit_code
from repro_matrix.results.store import code_hashes
from repro_matrix.runner import run as workspace
from repro_matrix.runner import session
from repro_matrix.runner.engine import RunTotals
from repro_matrix.text import counted, log

run_options = options.together(
    options.flag("--resume", "continue the interrupted run, or this selection's: keep its results"),
    options.flag("--dry-run", "show what would be launched, and launch nothing"),
)


@options.command
@options.overrides
@options.json
@options.flag("--all", "a line for every variant of every cell")
@run_options
def main(args: options.Arguments) -> int:
    if args.all and args.dry_run:
        raise ConfigError(
            "--all: shows results, and --dry-run has none. --json lists every variant."
        )
    return run_selection(args, args.overrides)


def run_selection(args: options.Arguments, texts: Sequence[str], live: bool = False) -> int:
    """Run a selection, print its results and return the exit code.

    ``live``: print a line for each attempt and each variant. Otherwise measure the canary cells
    first, and write the run's page beside its results.
    """
    entries, resumed = quarantine.read_quarantine(), None
    if args.resume:
        texts, resumed = workspace.resumed(texts)
    executor, selected = executors.split(texts)
    if executor is not None:
        check_slurm()
    prepared = session.prepare(
        selected, build_stacks=not args.dry_run, probe=True, as_locked=args.dry_run
    )
    quarantine.check_quarantine(entries, prepared.catalogue)
    where, notes = "", prepared.notes()
    if executor is not None:
        where = "on this node: "
        notes.append("each job plans its cells anew, with the hardware of its node")
    head = f"repro: {where}{prepared.headline()}"
    log("\n".join([head, *(f"note: {note}" for note in notes)]))
    if args.dry_run:
        return run_summary.show_plan(prepared, args.json)

    stop = threading.Event()
    with (
        workspace.folder(prepared, texts, resumed) as finish,
        run_summary.RunProgress(live, prepared.catalogue.cases) as progress,
        workspace.interruptible(stop, progress.warn, workspace.RESUMED),
    ):
        if executor is None:
            short = prepared.shortfall()
            summary = workspace.execute(
                prepared, progress.event, stop, args.resume, progress.warn, with_canary=not live
            )
        else:
            root = results_folder(prepared.settings)
            nodes = max(executor.nodes, prepared.nodes)
            executor = executor.model_copy(update={"nodes": nodes})
            cells = [plan.cell for plan in prepared.plans]
            code = code_hashes(prepared.catalogue, {cell.case for cell in cells})
            controller = Controller(
                executor, selected, cells, root, progress.warn, args.resume, code
            )
            summary = controller.run(stop)
            short = controller.problems()
        finish(summary)
    return _report(args, prepared, summary, entries, short, live)


def _report(
    args: options.Arguments,
    prepared: session.Session,
    summary: RunTotals,
    entries: Sequence[quarantine.Quarantine],
    short: Sequence[str],
    live: bool,
) -> int:
    """Compare the results with what is expected, print them and return the exit code."""
    from repro_matrix.report.page import write_run_page  # imports Jinja

    today = datetime.now(timezone.utc).date()
    cases, folder = prepared.catalogue.cases, results_folder(prepared.settings)
    rows = []
    for document in summary.documents:
        rows += rows_of(document, cases, str(document.get("path", "")))
    rows = quarantine.mark_rows(rows, entries, today)
    expired = quarantine.expired(rows, entries, today)
    since = since_last_passing(folder, rows, cases)
    rows = quarantine.mark_rows(against_history(rows, since), entries, today)
    head = headline(rows, cases, since)
    if summary.problem or summary.interrupted:
        complete = f"{len(summary.documents)} of {counted(len(prepared.plans), 'cell')} complete"
        stopped = f"Stopped after {counted(summary.attempts, 'attempt')}, {complete}"
        head = replace(head, incomplete=stopped)
    code = exit_code(rows, prepared.settings.min_cells, bool(prepared.left_out or short))
    code = code or (ExitCode.USAGE if expired else ExitCode.OK)
    if not (summary.problem or summary.interrupted):
        store_exit_code(folder, code)
    written = None if live else write_run_page(folder)
    if args.json:
        records = [variant_record(cell, row) for cell in cells_of(rows) for row in cell.rows]
        totals = run_summary.totals(prepared, summary, head)
        totals["page"] = str(written) if written else None
        print_json({"rows": records, "summary": totals})
    else:
        if live or args.all:
            print_rows(head.rows)
            print()
        print_lines(run_summary.summary_lines(prepared, summary, head, expired, columns()))
        print(f"page: {written}" if written else f"results: {folder}")
    if summary.problem:
        if not args.json:
            number = int(summary.problem.exit_code)
            print(f"exit code {number}: stopped before everything was measured")
        raise summary.problem
    if summary.interrupted:
        log("interrupted: --resume continues with what is missing")
        return ExitCode.INTERRUPTED
    if "--bisect-exit" in args.given:
        return bisect_exit(rows)
    for text in (*expired, *short):
        log(f"repro: {text}")
    text = run_summary.exit_line(code, head, summary, not_committed())
    log(f"repro: {text}") if args.json else print(text)
    return code
