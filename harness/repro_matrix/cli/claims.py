"""`repro claims [ID]`: the claims of upstream threads, and what stored measurements show; or one, with its evidence."""

from __future__ import annotations

import argparse
from pathlib import Path

from repro_matrix.analysis.claims import ledger
from repro_matrix.config import catalog as catalogues
from repro_matrix.config import project
from repro_matrix.config import selection as overrides
from repro_matrix.config.settings import compose_run
from repro_matrix.errors import ConfigError, ResultsError, unknown
from repro_matrix.report import listing
from repro_matrix.report.terminal import columns, print_json, print_lines, print_notes
from repro_matrix.results import local, runs
from repro_matrix.results.summary import load_rows


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="ID|OVERRIDE", help="a claim, to show its evidence; or case=... and settings"
    )
    parser.add_argument("--json", action="store_true", help="print JSON with stable keys instead of a table")
    parser.add_argument("--from", dest="source", metavar="DIR", help="read only this results folder")


def main(args: argparse.Namespace) -> int:
    ids = [word for word in args.overrides if "=" not in word]
    selection = overrides.parse([word for word in args.overrides if "=" in word])
    settings = compose_run(selection.run)
    catalogue = catalogues.load()
    print_notes([f"left out: {text}" for text in catalogue.left_out])
    cases = [catalogue.cases[name] for name in overrides.expand("case", selection.case, catalogue.cases)]
    if args.source and not Path(args.source).is_dir():
        raise ResultsError(f"--from {args.source}: no such folder")
    current = Path(settings.results).expanduser() if settings.results else local.scratch()
    stored = [current, local.scratch() / runs.SEARCHES, *project.published()]
    notes: list[str] = []
    folders = dict.fromkeys(runs.of(folder) for folder in ([Path(args.source)] if args.source else stored))
    rows = [row for folder in folders if folder.is_dir() for row in load_rows(folder, catalogue.cases, notes)]
    print_notes(notes)
    claims = ledger(cases, rows, catalogue.strategies)
    if ids:
        known = {claim.id: claim for claim in claims}
        wrong = next((name for name in ids if name not in known), None)
        if wrong and ("/" in wrong or Path(wrong).is_dir()):
            raise ConfigError(f"repro claims takes claims by their ids; a folder of results: --from {wrong}")
        if wrong:
            raise unknown("claim", wrong, known)
        claims = [known[name] for name in dict.fromkeys(ids)]
    if args.json:
        print_json([claim.to_json() for claim in claims])
    elif ids:
        for claim in claims:
            print_lines([*listing.evidence(claim, columns()), ""])
    else:
        simulated = [case.slug for case in cases if case.simulated]
        print_lines(list(listing.claims(claims, columns(), simulated))[1:])
    return 0
