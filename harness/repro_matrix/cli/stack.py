"""List, show, lock, build or remove the software stacks that cells can run on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict

import click

from repro_matrix.cli import options
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import build, spec
from repro_matrix.errors import ReproError
from repro_matrix.report.terminal import print_json, print_notes, print_table
from repro_matrix.text import log

main = options.config_dir(
    click.Group(
        "stack",
        help=options.as_written(__doc__),
        context_settings=options.CONTEXT,
        no_args_is_help=False,
    )
)
_some_stacks = click.argument("names", nargs=-1, metavar="[STACK]...")
_stacks = click.argument("names", nargs=-1, metavar="STACK...", required=True)


@main.command("list")
@options.json
@options.config_dir
def _list(json: bool) -> None:
    """List the stacks of conf/stack, and whether they are built."""
    print_notes([f"left out: {error}" for error in spec.definitions().left_out.values()])
    listed = stacks.defined_stacks()
    if json:
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


@main.command("show")
@_some_stacks
@options.json
@options.config_dir
def _show(names: tuple[str, ...], json: bool) -> None:
    """Show the stacks in your cache, with their versions."""
    cached = stacks.cached_stacks(names)
    _require_cached(names, cached)
    if json:
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


@main.command("lock")
@_stacks
@options.config_dir
def _lock(names: tuple[str, ...]) -> None:
    """Resolve a stack's pins again and write its lock."""
    for name in names:
        print(f"wrote {stacks.make_lock(name)}")


@main.command("build")
@_stacks
@options.config_dir
def _build(names: tuple[str, ...]) -> None:
    """Build a stack from its lock: a name, a requirements file, NAME+package==version."""
    built = [stacks.resolve(name, say=log) for name in names]
    print_table(
        "", ["stack", "python", "key"], [[stack.name, stack.python, stack.key] for stack in built]
    )


@main.command("prune")
@_some_stacks
@options.config_dir
@click.option("--older-than", type=float, default=30, metavar="DAYS", help="default: 30")
@options.flag("--all", "every built stack")
def _prune(names: tuple[str, ...], older_than: float, all: bool) -> None:
    """Remove the stacks that are named, else those that were not used recently."""
    _require_cached(names, stacks.cached_stacks(names))
    removed = stacks.prune_stacks(older_than_days=older_than, everything=all, names=names)
    for item in removed:
        print(f"removed {item.name} ({item.key})")
    print(f"{sum(item.bytes for item in removed) / 2**20:.0f} MiB freed")
