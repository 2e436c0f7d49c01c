"""`repro agree A B`: how often one hardware's results predict the other's, case by case."""

from __future__ import annotations

import argparse
from pathlib import Path

from repro_matrix.analysis import show_diff as show
from repro_matrix.analysis.agreement import agree, as_json, lines
from repro_matrix.analysis.inputs import side
from repro_matrix.cli.diff import selected
from repro_matrix.report.terminal import columns, print_json, print_lines, print_notes, print_wrapped
from repro_matrix.results import runs

EPILOG = """A, B: as of `repro diff`: a folder of results, one document, or the name of a stack of the baseline. Where
each has one hardware (or one stack) and they differ, cells are compared across it; case=, model=, strategy=, stack=,
hardware= (globs) choose. An arm agrees where its verdict and the failures met are the same, on both sides always or on
both sides sometimes.

exit codes: 0; 2 usage, no results, or nothing that both have measured"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("one", metavar="A", help="what predicts (a CPU's results)")
    parser.add_argument("other", metavar="B", help="what is predicted (a GPU's)")
    only = "only these: case='fsdp*' stack=current"
    parser.add_argument("overrides", nargs="*", default=[], metavar="NAME=VALUE", help=only)
    parser.add_argument("--all", action="store_true", help="every arm that does not agree")
    parser.add_argument("--json", action="store_true", help="print JSON with stable keys")


def main(args: argparse.Namespace) -> int:
    one, other = (selected(side(name), args.overrides) for name in (args.one, args.other))
    rows, across = agree(one.briefs, other.briefs, {**one.parts, **other.parts})
    print_notes([*one.notes, *other.notes])
    if _same(args.one, args.other):
        print_notes([f"{args.one} and {args.other} are the same results: that they agree says nothing"])
    if args.json:
        print_json({"a": args.one, "b": args.other, **as_json(rows, across)})
        return 0
    print_wrapped(show.described(one.name, one.briefs), show.described(other.name, other.briefs))
    if "stack" in across:
        print("note: the stacks differ too: what does not agree may be the releases' doing")
    print()
    print_lines(lines(rows, args.all, columns()))
    return 0


def _same(one: str, other: str) -> bool:
    """Whether both names mean one folder (or document), or one stack."""
    folders = [runs.of(Path(name).expanduser()).resolve() for name in (one, other)]
    return one == other or folders[0] == folders[1]
