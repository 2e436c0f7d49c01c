"""`repro claims [ID ...]`: the claims of upstream threads, and what stored measurements show."""

from __future__ import annotations

import argparse
from pathlib import Path

from repro_matrix.analysis.claims import ledger
from repro_matrix.config import catalog, project, selection
from repro_matrix.config.settings import compose_run
from repro_matrix.errors import ResultsError, unknown
from repro_matrix.report.terminal import claim_lines, columns, evidence_lines, print_json, print_lines, print_notes
from repro_matrix.results import runs
from repro_matrix.results.summary import load_rows


def configure(parser: argparse.ArgumentParser) -> None:
    help_text = "the id of a claim, to show its evidence; or overrides such as case=qwen15-*"
    parser.add_argument("overrides", nargs="*", metavar="ID|OVERRIDE", help=help_text)
    parser.add_argument("--json", action="store_true", help="print JSON with stable keys")
    parser.add_argument("--from", dest="source", metavar="DIR", help="read only this folder of results")


def main(args: argparse.Namespace) -> int:
    ids = [word for word in args.overrides if "=" not in word]
    selected = selection.parse([word for word in args.overrides if "=" in word])
    conf = catalog.load()
    print_notes([f"left out: {text}" for text in conf.left_out])
    cases = [conf.cases[name] for name in selection.expand("case", selected.case, conf.cases)]
    if args.source:
        folders = [Path(args.source)]
        if not folders[0].is_dir():
            raise ResultsError(f"--from {args.source}: no such folder")
    else:
        settings = compose_run(selected.run)
        current = Path(settings.results).expanduser() if settings.results else runs.scratch()
        folders = [current, runs.scratch() / runs.SEARCHES, *project.published()]
    notes: list[str] = []
    folders = list(dict.fromkeys(map(runs.of, folders)))
    rows = [row for folder in folders if folder.is_dir() for row in load_rows(folder, conf.cases, notes)]
    print_notes(notes)
    claims = ledger(cases, rows, conf.strategies)
    if ids:
        known = {claim.id: claim for claim in claims}
        for name in ids:
            if name not in known:
                raise unknown("claim", name, known)
        claims = [known[name] for name in dict.fromkeys(ids)]
    if args.json:
        print_json([claim.to_json() for claim in claims])
    elif ids:
        for claim in claims:
            print_lines([*evidence_lines(claim, columns()), ""])
    else:
        print_lines(claim_lines(claims, columns(), [case.slug for case in cases if case.simulated]))
    return 0
