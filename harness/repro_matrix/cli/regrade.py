"""Grade stored evidence again; report every verdict that differs.

Exit codes: 0 the stored summary and the evidence agree; 1 something differs, was edited or cannot
be read.
"""

from __future__ import annotations

from pathlib import Path

import click

from repro_matrix.baseline.audit import regrade_folder
from repro_matrix.cli import options
from repro_matrix.config import catalog, project
from repro_matrix.errors import ConfigError, ExitCode, ResultsError
from repro_matrix.results import runs, summary
from repro_matrix.text import counted


@options.command
@click.argument(
    "folder",
    required=False,
    metavar="[FOLDER]",
    help="results of a run (default: the last run)",
)
@options.flag("--baseline", "the published results, and their expectations")
@options.flag("--write", "store the computed summary")
def main(args: options.Arguments) -> int:
    if args.baseline and args.folder:
        raise ConfigError("regrade: FOLDER and --baseline exclude each other. Name one of them.")
    folder = (
        project.current().baseline
        if args.baseline
        else runs.last_run(Path(args.folder or runs.scratch()).expanduser())
    )
    if not folder.is_dir():
        raise ResultsError(f"{folder}: no such folder of results. `repro matrix` writes one.")
    cases = catalog.load().cases
    rows, problems = regrade_folder(folder, cases, args.baseline)
    if not rows and not any(problems.values()):
        raise ResultsError(f"{folder}: no results. Name a folder of results.")
    if args.write and args.baseline:
        summary.write_baseline_summaries(folder, rows)
    elif args.write:
        summary.write_rows(folder, rows)
    texts = [text for found in problems.values() for text in found]
    for text in texts:
        print(text)
    print(f"{counted(len(rows), 'row')} regraded: {counted(len(texts), 'difference')}")
    return ExitCode.DIFFERS if texts else ExitCode.OK
