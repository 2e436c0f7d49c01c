"""`repro claims [ID]`: the claims of the write-ups, and what stored measurements say; or one, with its evidence."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from repro_matrix.analysis.claims import ledger
from repro_matrix.config import catalog as catalogues
from repro_matrix.config import project
from repro_matrix.config import selection as overrides
from repro_matrix.config.settings import compose_run
from repro_matrix.errors import ConfigError, ResultsError, unknown
from repro_matrix.grading.regrade import regrade
from repro_matrix.report import listing
from repro_matrix.report.terminal import columns, print_json, print_lines, print_notes
from repro_matrix.results import local as own_results
from repro_matrix.results import runs, unshown
from repro_matrix.results.store import Store


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="ID|OVERRIDE", help="a claim, to see its evidence; or case=... and settings"
    )
    parser.add_argument("--json", action="store_true", help="print JSON with stable keys instead of a table")
    parser.add_argument("--from", dest="source", metavar="DIR", help="read only this results folder")


def main(args: argparse.Namespace) -> int:
    named = [word for word in args.overrides if "=" not in word]
    selection = overrides.parse([word for word in args.overrides if "=" in word])
    settings = compose_run(selection.run)
    catalogue = catalogues.load()
    print_notes([*(f"left out: {text}" for text in catalogue.left_out), *unshown.dropped(catalogue)])
    cases = [catalogue.cases[name] for name in overrides.expand("case", selection.case, catalogue.cases)]
    if args.source and not Path(args.source).is_dir():
        raise ResultsError(f"--from {args.source}: no such folder")
    own = [Path(settings.results).expanduser()] if settings.results else [own_results.scratch()]
    read = [Path(args.source)] if args.source else [*own, own_results.scratch() / runs.SEARCHES, *project.published()]
    folders = [runs.of(folder) for folder in read]
    # Of one cell on one stack and machine the ledger takes the newest that decides: a search for one arm hides nothing.
    stores = [Store(folder) for folder in folders]
    stored = [document for store in stores for document in store.documents() if document["complete"]]
    judged = regrade(stored, catalogue.cases)
    print_notes([*(text for store in stores for text in store.damaged), *judged.notes])
    found = ledger.ledger(cases, judged.documents, catalogue.strategies)
    if named:
        known = {row.id: row for row in found}
        wrong = next((name for name in named if name not in known), None)
        if wrong and ("/" in wrong or Path(wrong).is_dir()):
            raise ConfigError(f"repro claims takes claims by their ids; a folder of results: --from {wrong}")
        if wrong:
            raise unknown("claim", wrong, known)
        found = [known[name] for name in dict.fromkeys(named)]
    if args.json:
        print_json([asdict(row) for row in found])
    elif named:
        for row in found:
            print_lines([*listing.evidence(row, columns()), ""])
    else:
        simulated = [case.slug for case in cases if case.simulated]
        print_lines(list(listing.claims(found, columns(), simulated))[1:])
    return 0
