"""`repro matrix`, and what `repro run CASE` does too: launch, watch, print the results."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone

from repro_matrix.baseline import quarantine
from repro_matrix.baseline.derivation import bisect_exit, exit_code
from repro_matrix.changes.nightly import not_committed
from repro_matrix.changes.regressions import against_history, since_last_passing
from repro_matrix.cli import options as arguments
from repro_matrix.errors import ConfigError, ExitCode
from repro_matrix.report import run_summary
from repro_matrix.report.formats import variant_record
from repro_matrix.report.headline import headline
from repro_matrix.report.page_model import cells_of
from repro_matrix.report.terminal import columns, print_json, print_lines
from repro_matrix.results.rows import rows_of
from repro_matrix.results.runs import results_folder, store_exit_code
from repro_matrix.runner import run as workspace
from repro_matrix.runner import session
from repro_matrix.text import counted, log


def configure(parser: argparse.ArgumentParser) -> None:
    arguments.overrides(parser)
    parser.add_argument("--all", action="store_true", help="a line for every variant of every cell")
    run_options(parser)


def run_options(parser: argparse.ArgumentParser) -> None:
    """Add what `repro run CASE` takes as well."""
    add = parser.add_argument
    add(
        "--resume",
        action="store_true",
        help="continue the interrupted run, or this selection's: keep its results",
    )
    add("--dry-run", action="store_true", help="show what would be launched, and launch nothing")


def main(args: argparse.Namespace) -> int:
    if args.all and args.dry_run:
        raise ConfigError(
            "--all: shows results, and --dry-run has none. --json lists every variant."
        )
    return run_selection(args, args.overrides, every_variant=args.all, page=True)


def run_selection(
    args: argparse.Namespace,
    texts: Sequence[str],
    *,
    every_variant: bool,
    live: bool = False,
    page: bool = False,
) -> int:
    """Run a selection and print its results; return the exit code. ``every_variant`` and ``live``
    (each attempt): print a line for each. ``page``: measure the canary cells first, and write the
    run's page beside its results."""
    entries, for_git = quarantine.read_quarantine(), getattr(args, "bisect_exit", False)
    texts, resumed = workspace.resumed(texts) if args.resume else (list(texts), None)
    prepared = session.prepare(
        texts, build_stacks=not args.dry_run, probe=True, as_locked=args.dry_run
    )
    quarantine.check_quarantine(entries, prepared.catalogue)
    log(
        "\n".join(
            [f"repro: {prepared.headline()}", *(f"note: {note}" for note in prepared.notes())]
        )
    )
    if args.dry_run:
        return run_summary.show_plan(prepared, args.json)
    from repro_matrix.report.page import write_run_page  # imports Jinja

    stop = threading.Event()
    with (
        workspace.folder(prepared, texts, resumed) as finish,
        run_summary.RunProgress(live, prepared.catalogue.cases) as progress,
        workspace.interruptible(stop, progress.warn, workspace.RESUMED),
    ):
        summary = workspace.execute(
            prepared, progress.event, stop, args.resume, progress.warn, with_canary=page
        )
        finish(summary)
    today, cases = datetime.now(timezone.utc).date(), prepared.catalogue.cases
    rows = [
        row for each in summary.documents for row in rows_of(each, cases, str(each.get("path", "")))
    ]
    rows = quarantine.mark_rows(rows, entries, today)
    expired = quarantine.expired(rows, entries, today)
    folder = results_folder(prepared.settings)
    since = since_last_passing(folder, rows, cases)
    rows = quarantine.mark_rows(against_history(rows, since), entries, today)
    head = headline(rows, cases, since)
    if summary.problem:
        complete = f"{len(summary.documents)} of {counted(len(prepared.plans), 'cell')} complete"
        head = replace(
            head, incomplete=f"Stopped after {counted(summary.attempts, 'attempt')}, {complete}"
        )
    short = prepared.shortfall()
    code = exit_code(rows, prepared.settings.min_cells, bool(prepared.left_out or short))
    code = code or (ExitCode.USAGE if expired else ExitCode.OK)
    if not (summary.problem or summary.interrupted):
        store_exit_code(folder, code)
    written = write_run_page(folder) if page else None
    if args.json:
        records = [variant_record(cell, row) for cell in cells_of(rows) for row in cell.rows]
        totals = {
            **run_summary.totals(prepared, summary, head),
            "page": str(written) if written else None,
        }
        print_json({"rows": records, "summary": totals})
    else:
        print_lines(
            run_summary.summary_lines(prepared, summary, head, expired, every_variant, columns())
        )
        print(f"page: {written}" if written else f"results: {folder}")
    if summary.problem:
        if not args.json:
            print(
                f"exit code {int(summary.problem.exit_code)}: stopped before everything was"
                " measured"
            )
        raise summary.problem
    if summary.interrupted:
        log("interrupted: --resume continues with what is missing")
    if summary.interrupted or for_git:
        return ExitCode.INTERRUPTED if summary.interrupted else bisect_exit(rows)
    for text in (*expired, *short):
        log(f"repro: {text}")
    text = run_summary.exit_line(code, head, summary, not_committed())
    if args.json:
        log(f"repro: {text}")
    else:
        print(text)
    return code
