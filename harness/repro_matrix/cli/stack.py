"""`repro stack list|show|lock|build|prune`: the software stacks that cells can run on."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict

from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import build, spec
from repro_matrix.errors import ReproError
from repro_matrix.report.terminal import print_json, print_notes, print_table
from repro_matrix.text import log

ACTIONS = {
    "list": "the stacks of conf/stack, and whether they are built",
    "show": "the stacks in your cache, with their versions",
    "lock": "resolve a stack's pins again and write its lock",
    "build": "build a stack from its lock (a name, a requirements file, NAME+package==version)",
    "prune": "remove built stacks that were not used recently, or those named",
}


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name != "list":
            action.add_argument(
                "names", nargs="+" if name in ("lock", "build") else "*", metavar="STACK"
            )
        if name in ("list", "show"):
            action.add_argument(
                "--json", action="store_true", help="print JSON with stable keys instead of a table"
            )
        if name == "prune":
            action.add_argument(
                "--older-than", type=float, default=30, metavar="DAYS", help="default: 30"
            )
            action.add_argument("--all", action="store_true", help="every built stack")


def main(args: argparse.Namespace) -> int:
    {"list": _list, "show": _show, "lock": _lock, "build": _build, "prune": _prune}[args.action](
        args
    )
    return 0


def _list(args: argparse.Namespace) -> None:
    print_notes([f"left out: {error}" for error in spec.definitions().left_out.values()])
    listed = stacks.defined_stacks()
    if args.json:
        print_json([asdict(item) for item in listed])
        return
    rows = [
        [item.name, item.state, item.python or "", item.title, " ".join(item.pins)]
        for item in listed
    ]
    columns = ["stack", "state", "python", "title", "pins"]
    print_table("", columns, rows, narrow=("title", "pins"))


def _require_cached(names: Sequence[str], cached: Sequence[build.CachedStack]) -> None:
    for name in names:
        if not any(name in (item.name, item.key) for item in cached):
            raise ReproError(f"no stack {name!r} in the cache: `repro stack show` lists them")


def _show(args: argparse.Namespace) -> None:
    cached = stacks.cached_stacks(args.names)
    _require_cached(args.names, cached)
    if args.json:
        print_json([{**asdict(item), "folder": str(item.folder)} for item in cached])
        return
    rows = [
        [
            item.name,
            item.key,
            "whole" if item.whole else "damaged",
            f"{item.bytes / 2**20:.0f} MiB",
            time.strftime("%Y-%m-%d", time.gmtime(item.used)),
            ", ".join(
                f"{n} {item.versions[n]}"
                for n in ("torch", "transformers", "deepspeed")
                if n in item.versions
            ),
        ]
        for item in sorted(cached, key=lambda item: item.name)
    ]
    print_table(
        "", ["stack", "key", "state", "size", "used", "versions"], rows, narrow=("versions",)
    )


def _lock(args: argparse.Namespace) -> None:
    for name in args.names:
        print(f"wrote {stacks.make_lock(name)}")


def _build(args: argparse.Namespace) -> None:
    built = [stacks.resolve(name, say=log) for name in args.names]
    print_table(
        "", ["stack", "python", "key"], [[stack.name, stack.python, stack.key] for stack in built]
    )


def _prune(args: argparse.Namespace) -> None:
    _require_cached(args.names, stacks.cached_stacks(args.names))
    removed = stacks.prune_stacks(
        older_than_days=args.older_than, everything=args.all, names=tuple(args.names)
    )
    for item in removed:
        print(f"removed {item.name} ({item.key})")
    print(f"{sum(item.bytes for item in removed) / 2**20:.0f} MiB freed")
