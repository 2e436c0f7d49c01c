"""`repro run CASE`: one case, all its arms, live."""

from __future__ import annotations

import argparse

from harness import arguments, catalogue
from harness.errors import unknown
from harness.overrides import expand
from harness.verbs import matrix


def configure(parser: argparse.ArgumentParser) -> None:
    arguments.case(parser)
    arguments.overrides(parser)
    matrix.how(parser)
    told = "for git bisect run: of the broken arm, 0 clean, 1 fires, 125 neither; 128 and more: an error"
    parser.add_argument("--bisect-exit", action="store_true", help=told)


def main(args: argparse.Namespace) -> int:
    known = catalogue.load().cases
    if "=" in args.case:
        raise unknown("case", args.case, known, "the first argument of `repro run` is a case")
    expand("case", args.case.split(","), known)
    texts = [f"case={args.case}", *args.overrides]
    return matrix.measure(args, texts, every_arm=True, live=True, for_git=args.bisect_exit)
