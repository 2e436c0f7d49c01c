"""`repro merge DIR...`: the results of all shards of a run in one folder.

Each DIR is the results folder of a run with shard=PART/PARTS. Shards of different commits, stacks
or selections, a shard given twice and a cell in two shards are refused by name.

exit codes: 0 every shard is complete; 3 a shard, or a cell of one, is missing (the rest is merged);
2 not shards of one run.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from repro_matrix.cli import options
from repro_matrix.errors import ResultsError
from repro_matrix.results import runs
from repro_matrix.results.store import UNFINISHED
from repro_matrix.text import counted, list_some

SHOWN = 5  # missing cells of a shard


@options.command
@click.argument(
    "folders", nargs=-1, required=True, metavar="DIR...", help="the results of one shard each"
)
@click.option("--to", metavar="DIR", required=True, help="where all of them go; new, or empty")
def main(args: options.Arguments) -> int:
    target = Path(args.to).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ResultsError(f"{target}: --to needs a folder that is new or empty")
    # A folder of runs stands for the last of them.
    folders = {name: runs.last_run(Path(name).expanduser()) for name in args.folders}
    places = [folders[name].resolve() for name in args.folders]
    twice = next(
        (name for name, place in zip(args.folders, places) if places.count(place) > 1), None
    )
    if twice:
        raise ResultsError(f"{twice}: is given twice")
    if any(target.resolve().is_relative_to(place) for place in places):
        raise ResultsError(f"{target}: lies in a shard's own folder; --to takes one beside them")
    parts = {name: runs.read_manifest(folder) for name, folder in folders.items()}
    absent = runs.missing_shards(parts)
    lacking: dict[str, list[str]] = {}
    files: dict[Path, Path] = {}  # below the target -> where it is
    for name, part in parts.items():
        found, left = runs.shard_documents(folders[name], part)
        if left:
            lacking[f"{part.shard}/{part.of}"] = left
        files |= {below: folders[name] / below for below in found}
    count = next(iter(parts.values())).of
    selection = next(iter(parts.values())).selection
    code = 3 if absent or lacking else 0
    _copy(files, target, selection if code else None)
    for number in absent:
        made = shlex.join(["repro", "matrix", *selection, f"shard={number}/{count}"])
        print(f"missing: shard {number} of {count}; to measure it: {made}")
    for shard, cells in lacking.items():
        few = list_some(cells, SHOWN, "; ")
        lacks = counted(len(cells), "cell")
        print(
            f"incomplete: shard {shard} lacks {lacks}: {few} (the same command with --resume"
            " goes on)"
        )
    if next(iter(parts.values())).changed:
        print("note: measured on a changed tree: `repro accept` will not take it")
    print(
        f"{counted(len(files), 'cell')} of {counted(len(parts), 'shard')} (of {count}) in {target}"
    )
    print(
        f"exit code {code}: "
        + ("a shard or a cell is missing" if code else "every shard is complete")
    )
    return code


def _copy(files: Mapping[Path, Path], target: Path, unfinished: Sequence[str] | None) -> None:
    """All of them or none: half a copy would be taken for the run. ``unfinished``: the selection of
    a run that lacks results; reports of it then say so. Raises ResultsError: it cannot be
    written."""
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        beside.mkdir(parents=True)
        for below, source in files.items():
            (beside / below).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, beside / below)
        if unfinished is not None:
            runs.note(beside, unfinished, UNFINISHED)
        os.replace(beside, target)  # an empty folder gives way
    except OSError as error:
        raise ResultsError(f"{target}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
