"""`repro stack list|show|lock|build|prune`: the software stacks that cells can run on."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import spec
from repro_matrix.errors import Options, ReproError, unknown
from repro_matrix.report.terminal import print_json, print_notes, print_table


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in {
        "list": "the stacks of conf/stack, and whether they are built",
        "show": "what the user's cache holds, with versions",
        "lock": "resolve a stack's pins anew and write its lock",
        "build": "build a stack from its lock (a name, a requirements file, NAME+package==version)",
        "prune": "remove built stacks that were not used for long, or those named",
    }.items():
        action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        action.add_argument("names", nargs="+" if name in ("lock", "build") else "*", metavar="STACK")
        action.add_argument("--json", action="store_true", help="print JSON with stable keys instead of a table")
        if name == "list":
            action.add_argument("--all", action="store_true", help="a stack a line, however long")
        if name == "show":
            action.add_argument("--thorough", action="store_true", help="look at every installed file")
        if name == "prune":
            action.add_argument("--older-than", type=float, default=30, metavar="DAYS", help="default: 30")
            action.add_argument("--all", action="store_true", help="every built stack that is not in use")


def main(args: argparse.Namespace) -> int:
    return int(globals()[f"_{args.action}"](args))


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _list(args: argparse.Namespace) -> int:
    known: Options[stacks.Listed] = Options({item.name: item for item in stacks.stacks()})
    known.left_out = spec.definitions().left_out
    print_notes([f"left out: {error}" for error in known.left_out.values()])
    for name in args.names:
        if name not in known:
            raise unknown("stack", name, known)
    found = [known[name] for name in args.names or known]
    if args.json:
        print_json([asdict(item) for item in found])
    else:
        rows = [[item.name, item.state, item.python or "", item.title, " ".join(item.pins)] for item in found]
        columns = ["stack", "state", "python", "title", "pins"]
        print_table("", columns, rows, narrow=("title", "pins"), fold=not args.all)
    return 0


def _in_cache(names: Sequence[str], held: Sequence[stacks.Held]) -> None:
    for name in names:
        if not any(name in (item.name, item.key) for item in held):
            raise ReproError(f"the cache holds no stack {name!r}: `repro stack show` lists what it holds")


def _show(args: argparse.Namespace) -> int:
    found = stacks.show(args.names, thorough=args.thorough)
    _in_cache(args.names, found)
    if args.json:
        print_json([{**asdict(item), "folder": str(item.folder)} for item in found])
        return 0
    rows = [
        [
            item.name,
            item.key,
            "whole" if item.whole else "damaged",
            f"{item.bytes / 2**20:.0f} MiB",
            time.strftime("%Y-%m-%d", time.gmtime(item.used)),
            ", ".join(f"{n} {item.versions[n]}" for n in ("torch", "transformers", "deepspeed") if n in item.versions),
        ]
        for item in found
    ]
    rows.sort(key=lambda row: row[0])
    print_table("", ["stack", "key", "state", "size", "used", "versions"], rows, narrow=("versions",), fold=True)
    return 0


def _lock(args: argparse.Namespace) -> int:
    written = [str(stacks.make_lock(name)) for name in args.names]
    print_json(written) if args.json else print("\n".join(f"wrote {path}" for path in written))
    return 0


def _build(args: argparse.Namespace) -> int:
    built = [stacks.resolve(name, say=_say) for name in args.names]
    if args.json:
        print_json([{"name": stack.name, "python": stack.python, "key": stack.key} for stack in built])
    else:
        print_table("", ["stack", "python", "key"], [[stack.name, stack.python, stack.key] for stack in built])
    return 0


def _prune(args: argparse.Namespace) -> int:
    done = stacks.prune(older_than_days=args.older_than, everything=args.all, names=tuple(args.names))
    _in_cache(args.names, [*done.removed, *(item for item, _ in done.kept)])
    if args.json:
        print_json({"removed": [item.key for item in done.removed], "bytes": done.bytes})
    else:
        for item in done.removed:
            print(f"removed {item.name} ({item.key})")
        for item, reason in done.kept:
            if reason != stacks.NOT_DUE:
                print(f"kept {item.name} ({item.key}): {reason}")
        kept = sum(reason == stacks.NOT_DUE for _, reason in done.kept)
        print(f"{done.bytes / 2**20:.0f} MiB freed" + (f"; {kept} stacks were used lately, and stay" if kept else ""))
    return 0
