"""`repro claims`: every claim of the write-ups, and what stored measurements say of it."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from harness import arguments, overrides
from harness import catalogue as catalogues
from harness.config import compose_run
from harness.judge import claims as ledger
from harness.judge.again import judged_again
from harness.paths import BASELINE
from harness.report import named, print_json, print_notes, print_table
from harness.running import session
from harness.store import Store


def configure(parser: argparse.ArgumentParser) -> None:
    arguments.overrides(parser)
    parser.add_argument("--from", dest="source", metavar="DIR", help="read only this results folder")


def main(args: argparse.Namespace) -> int:
    selection = overrides.parse(args.overrides)
    settings = compose_run(selection.run)
    catalogue = catalogues.load()
    cases = [catalogue.cases[name] for name in overrides.expand("case", selection.case, catalogue.cases)]
    folders = [Path(args.source)] if args.source else [session.results_folder(settings), BASELINE]
    # Of one cell on one stack and machine the ledger takes the newest that decides: a search for one arm hides nothing.
    stored = [document for folder in folders for document in Store(folder).documents() if document["complete"]]
    judged = judged_again(stored, catalogue.cases)
    print_notes(judged.notes)
    found = ledger.ledger(cases, judged.documents, catalogue.strategies)
    if args.json:
        print_json([asdict(row) for row in found])
        return 0
    table = [[named(r.case, catalogue.cases[r.case].simulated), r.id, r.status, r.detail, r.text] for r in found]
    print_table("", ["case", "claim", "status", "measured", "claim's text"], table)
    totals: dict[str, int] = {}
    for row in found:
        totals[row.status] = totals.get(row.status, 0) + 1
    print(f"{len(found)} claims: " + ", ".join(f"{count} {status}" for status, count in totals.items()))
    return 0
