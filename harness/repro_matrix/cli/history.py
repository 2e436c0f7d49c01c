"""`repro history CASE [NIGHTS...]`: a case over the nights, as a strip for each arm."""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

from repro_matrix.cli import options as arguments
from repro_matrix.config import project
from repro_matrix.config.selection import GROUPS
from repro_matrix.errors import ConfigError, ResultsError, unknown
from repro_matrix.report import history as strip
from repro_matrix.report.terminal import columns, print_json, print_lines, print_notes
from repro_matrix.results import history as kept
from repro_matrix.text import counted

EPILOG = """NIGHTS: folders of results, one for each night, or a folder of nights (default: results/nights): folders
of results in it, and nights.jsonl, where old nights are kept as what differs from the night before.

  repro history fsdp-generate monday/ tuesday/
  repro history --compact 7 results/nights      fold all but the newest 7 folders into nights.jsonl; evidence goes,
                                                verdicts, attempts, and what was met stay

exit codes: 0; 2 nothing there to be shown"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="CASE [NIGHTS...]", help="the case's slug, then folders")
    told = "fold all but the newest N folders of a folder of nights; no CASE then"
    parser.add_argument("--compact", type=arguments.number(0), metavar="N", help=told)
    parser.add_argument("--json", action="store_true", help="print JSON with stable keys")


def main(args: argparse.Namespace) -> int:
    if args.compact is not None:
        return _compact(args)
    if not args.names:
        raise ConfigError("history is of a case: `repro history CASE [NIGHTS...]` (`repro list` names them)")
    case, *folders = args.names
    settings = (*GROUPS, "results", "nights")
    setting = next((name for name in args.names if "=" in name and name.partition("=")[0] in settings), None)
    if setting:
        said = next((name for name in args.names if "=" not in name), "CASE")
        said = setting.partition("=")[2] if setting.startswith("case=") else said
        folder = "DIR" if setting.startswith("case=") else setting.partition("=")[2] or "DIR"
        raise ConfigError(f"{setting}: history takes words, no settings: repro history {said} {folder}")
    if not folders and Path(case).expanduser().is_dir():
        raise ConfigError(f"{case}: is a folder; the case comes first: repro history CASE {case}")
    usual = project.current().results / "nights"
    if not folders and not usual.is_dir():
        told = (
            f"`repro nightly ... --nights {usual}` keeps some; or name folders of results: repro history {case} DIR ..."
        )
        raise ResultsError(f"{usual}: no night is kept there yet: {told}")
    paths = [Path(name).expanduser() for name in folders] or [usual]
    found = kept.read(paths)
    nights = found.found
    known = {name for night in nights for name in night.cases}
    print_notes(found.notes)
    if case not in known:
        if Path(case).expanduser().is_dir() and not known:
            raise ConfigError(f"{case}: is a folder; the case comes first: repro history CASE {case}")
        where = ", ".join(map(str, paths))
        if not nights:
            raise ResultsError(f"{where}: no night in it (folders of results, or {kept.FILE})")
        raise unknown("case", case, known, f"{where}: {counted(len(nights), 'night')}")
    for one, other in itertools.pairwise(nights):
        if not one.cells.keys() & other.cells.keys():
            print(f"note: {one.name} and {other.name} have no cell in common", file=sys.stderr)
    strips = strip.strips(nights, case)
    if args.json:
        print_json(strip.as_json(nights, strips))
    else:
        print_lines(strip.lines(nights, strips, columns()))
    return 0


def _compact(args: argparse.Namespace) -> int:
    if len(args.names) != 1:
        got = " ".join(args.names) or "none"
        raise ConfigError(f"--compact takes one folder of nights, and no case (got {got}): --compact 7 results/nights")
    names, notes = kept.compact(Path(args.names[0]).expanduser(), args.compact)
    print_notes(notes)
    if args.json:
        print_json({"compacted": names})
    else:
        print(f"{counted(len(names), 'night')} folded into {kept.FILE}: {', '.join(names) or 'none is older'}")
    return 0
