"""`repro match train.log ...`: find known failures in training logs, and what stored measurements say about them."""

from __future__ import annotations

import argparse
from pathlib import Path

EPILOG = """\
exit codes: 0 a known failure was recognised; 1 failures, but none is known; 2 usage (no such file, not a log);
3 no failure. For several logs, the lowest of their codes.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("logs", nargs="*", metavar="LOG", help="a training log, also gzip or UTF-16; - or none: stdin")
    parser.add_argument("--json", action="store_true", help="print JSON with stable keys instead of text")


def main(args: argparse.Namespace) -> int:
    from repro_matrix.config import catalog as catalogue
    from repro_matrix.errors import ConfigError
    from repro_matrix.external.logs.match import Catalogue, recognise
    from repro_matrix.external.logs.read import blocks
    from repro_matrix.external.logs.scan import Texts, scan
    from repro_matrix.report.log_matches import log_json, log_lines
    from repro_matrix.report.terminal import print_json, print_notes

    for word in args.logs:
        name, _, value = word.partition("=")
        if value and not Path(word).exists() and (name in ("log", "logs", "file") or Path(value).exists()):
            raise ConfigError(f"{word!r} is not a file. Name logs without a key: repro match {value}")
    known = catalogue.load()
    print_notes([f"left out: {text}" for text in known.left_out])
    cases = known.cases
    signatures, texts = Catalogue(cases), Texts(cases.values())
    found = []
    codes = set()
    for path in args.logs or ["-"]:
        seen = scan(blocks(path), texts)
        answer = recognise(seen, signatures)
        codes.add(0 if answer.names else 1 if answer.failures else 3)
        if args.json:
            found.append(log_json(path, seen, answer, cases))
        else:
            print("\n".join(log_lines(path, seen, answer, cases)))
    if args.json:
        print_json(found)
    return min(codes)
