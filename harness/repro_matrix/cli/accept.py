"""`repro accept --reason ...`: make measured verdicts the expected ones, and publish their results.

The results are written to results/baseline, and each case's table in results/expected is computed
from them. Only this command writes expectations, and the change is reviewed. --dry-run shows what
would be written. With --from DIR,DIR,... the results of several folders are published together.
"""

from __future__ import annotations

import click

from repro_matrix.baseline.accept import Publication, propose, publish
from repro_matrix.baseline.refusals import SUSPICIOUS
from repro_matrix.cli import options
from repro_matrix.config import catalog, project
from repro_matrix.config import selection as overrides
from repro_matrix.config.settings import compose_run
from repro_matrix.errors import ConfigError, ResultsError
from repro_matrix.report.terminal import by_reason, columns, print_notes, print_table
from repro_matrix.results import runs
from repro_matrix.text import counted

SHOWN = 20  # reasons


@options.command
@click.argument(
    "overrides",
    nargs=-1,
    metavar="[OVERRIDE]...",
    help="case=NAME,...: only these cases (default: all that were measured)",
)
@click.option("--reason", help="why these verdicts are now the expected ones")
@options.flag("--dry-run", "show what would change, and write nothing")
@click.option(
    "--from",
    "source",
    metavar="DIR,...",
    help="folders of results (default: the last run in results/scratch)",
)
@click.option(
    "--allow",
    multiple=True,
    type=options.Choice(SUSPICIOUS),
    help="also publish verdicts that may be an error of the case (may be given for each)",
)
def main(args: options.Arguments) -> int:
    selection = overrides.parse_overrides(args.overrides)
    for key, text in selection.words:
        if key not in ("case", "results"):
            raise ConfigError(
                f"{text}: all results of a case are accepted together. Select with case= and"
                " --from."
            )
    if not args.dry_run and not (args.reason or "").strip():
        raise ConfigError(
            "accept: --reason is missing: why are these verdicts now expected? (--dry-run shows"
            " them)"
        )
    known, own = catalog.load(), project.current()
    named = args.source or compose_run(selection.run).results
    sources = runs.named_folders(named or str(runs.scratch()))
    for folder in sources if named else ():
        if not folder.is_dir():
            raise ResultsError(f"{folder}: no such folder of results. `repro matrix` writes one.")
    names = set(overrides.expand("case", selection.case, known.cases))
    shipped = set() if own.is_shipped else names - known.own.get("case", {}).keys()
    found = propose(sources, known, names - shipped, args.reason or "", args.allow)
    notes = [f"left out: {text}" for text in known.left_out]
    if shipped:
        notes.append(
            "left out: cases that are shipped with repro-matrix. Their expectations are read-only"
            " here."
        )
    print_notes([*notes, *found.notes])
    if args.dry_run or not found.refused:
        _print(found)
    if found.refused:
        reasons = ((each.reason, f"{each.cell} {each.variant}".strip()) for each in found.refused)
        head = f"{named or sources[0]}: cannot be published:"
        raise ResultsError("\n".join([head, *by_reason(reasons, columns(), SHOWN)]))
    if not args.dry_run:
        publish(found, known)
        print(f"written to {own.baseline} and {own.expected}. Review and commit them.")
    return 0


def _print(found: Publication) -> None:
    rows = [
        [c.case, c.where, c.stack, c.variant, c.old or "(nothing)", c.new] for c in found.changes
    ]
    if rows:
        print_table(
            "changed expectations", ["case", "cell", "stack", "variant", "old", "new"], rows
        )
    for places, meaning in (
        (found.written, "to publish"),
        (found.same, "with the same results as published"),
        (found.left_out, "left out: no expectation rests on them"),
        (found.dropped, "to remove: no expectation rests on them any more"),
    ):
        if places:
            print(f"{counted(len(places), 'document')} {meaning}")
