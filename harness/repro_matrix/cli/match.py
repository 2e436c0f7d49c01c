"""`repro match train.log ...`: find known failures in training logs, and what stored measurements say about them."""

from __future__ import annotations

import argparse

from repro_matrix.config import catalog
from repro_matrix.external.log_match import recognize
from repro_matrix.external.log_scan import Catalogue, lines, scan
from repro_matrix.report.terminal import log_json, log_lines, print_json, print_notes

EPILOG = """\
exit codes: 0 a known failure was recognized; 1 a failure, but none is known; 2 usage (no such file, not a log);
3 no failure. For several logs, the lowest of their codes.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("logs", nargs="*", metavar="LOG", help="a training log, also gzip or UTF-16; - or none: stdin")
    parser.add_argument("--json", action="store_true", help="print JSON with stable keys instead of text")


def main(args: argparse.Namespace) -> int:
    cases = catalog.load()
    print_notes([f"left out: {text}" for text in cases.left_out])
    known = Catalogue(cases.cases)
    found = []
    codes = set()
    for path in args.logs or ["-"]:
        seen = scan(lines(path), known)
        answer = recognize(seen, known)
        codes.add(0 if answer.names else 1 if answer.failures or seen.endings else 3)
        if args.json:
            found.append(log_json(path, seen, answer, cases.cases))
        else:
            print("\n".join(log_lines(path, seen, answer, cases.cases)))
    if args.json:
        print_json(found)
    return min(codes)
