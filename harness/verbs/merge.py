"""`repro merge DIR...`: the results of all shards of a run in one folder."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from repro_matrix.conf.errors import ResultsError
from repro_matrix.results import runs
from repro_matrix.running import shards
from repro_matrix.terminal.report import print_json
from repro_matrix.terminal.summary import counted

EPILOG = """Each DIR is the results folder of a run with shard=PART/PARTS. Shards of different commits, stacks or
selections, a shard given twice and a cell in two shards are refused by name.

exit codes: 0 every shard is there and whole; 3 a shard, or a cell of one, is missing (the rest is merged); 2 not shards
of one run."""
SHOWN = 5  # missing cells of a shard


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("folders", nargs="+", metavar="DIR", help="the results of one shard each")
    parser.add_argument("--to", metavar="DIR", required=True, help="where all of them go; new, or empty")
    parser.add_argument("--json", action="store_true", help="print JSON with stable keys")


def main(args: argparse.Namespace) -> int:
    target = Path(args.to).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ResultsError(f"{target}: --to needs a folder that is new or empty")
    # A folder of runs stands for the last of them.
    folders = {name: runs.of(Path(name).expanduser()) for name in dict.fromkeys(args.folders)}
    parts = {name: shards.read(folder) for name, folder in folders.items()}
    absent = shards.missing(parts)
    lacking: dict[str, list[str]] = {}
    merged = 0
    for name, part in parts.items():
        found, left = shards.documents(folders[name], part)
        if left:
            lacking[f"{part['shard']}/{part['of']}"] = left
        for below in found:
            (target / below).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folders[name] / below, target / below)
        merged += len(found)
    code = 3 if absent or lacking else 0
    count = next(iter(parts.values()))["of"]
    if args.json:
        print_json({"merged": merged, "missing": absent, "incomplete": lacking, "to": str(target), "exit_code": code})
        return code
    selection = " ".join(next(iter(parts.values()))["selection"])
    for number in absent:
        print(f"missing: shard {number} of {count}; it is made by: repro matrix {selection} shard={number}/{count}")
    for shard, cells in lacking.items():
        few = "; ".join(cells[:SHOWN]) + (f" and {len(cells) - SHOWN} more" if len(cells) > SHOWN else "")
        lacks = counted(len(cells), "cell")
        print(f"incomplete: shard {shard} lacks {lacks}: {few} (the same command with --resume goes on)")
    if next(iter(parts.values()))["changed"]:
        print("note: measured on a changed tree: `repro accept` will not take it")
    print(f"{counted(merged, 'cell')} of {counted(len(parts), 'shard')} (of {count}) in {target}")
    print(f"exit code {code}: " + ("not all of it is there" if code else "every shard is there and whole"))
    return code
