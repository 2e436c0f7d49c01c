"""Read one side of a comparison: folders of results, or a stack of the baseline."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from repro_matrix.baseline.derivation import lacking
from repro_matrix.config import catalog, project
from repro_matrix.errors import ConfigError, MeasureError, ResultsError, nearest, unknown
from repro_matrix.results.rows import Row
from repro_matrix.results.runs import Run, named_folders, read_run
from repro_matrix.results.summary import load_rows

AXES = ("case", "model", "strategy", "stack", "hardware")


def patterns_of(texts: Iterable[str], axes: Sequence[str] = AXES) -> dict[str, list[str]]:
    """Return axis -> patterns of ``NAME=GLOB,...``. Raises ConfigError: no such axis."""
    found = {}
    for name, equals, value in (text.partition("=") for text in texts):
        if not equals or name not in axes:
            raise unknown("axis", name, axes)
        found[name] = [part.strip() for part in value.split(",")]
    return found


@dataclass
class Side:
    """The results of one side.

    ``notes``: remarks on the files. ``unreadable``: the notes about results that could not be read.
    ``lacking``: cells that were not measured completely. ``runs``: the manifests.
    """

    name: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    @property
    def packages(self) -> dict[str, Mapping[str, str]]:
        """All packages of each stack, if the runs stored them."""
        return {stack: each for run in self.runs for stack, each in run.stacks.items()}

    def select(self, texts: Sequence[str]) -> Side:
        """Return the rows that ``NAME=GLOB,...`` choose.

        Raises ConfigError: unknown axis, or no row left.
        """
        rows = self.rows
        for name, patterns in patterns_of(texts).items():
            rows = [
                row
                for row in rows
                if any(fnmatch.fnmatchcase(axes_of(row)[name], pattern) for pattern in patterns)
            ]
            if not rows:
                known = sorted({axes_of(row)[name] for row in self.rows})
                raise ConfigError(
                    f"{self.name}: no result has {name}={','.join(patterns)}. Present:"
                    f" {', '.join(known[:8])}."
                )
        return replace(self, rows=rows)


def axes_of(row: Row) -> dict[str, str]:
    """Return the values of ``AXES``."""
    return dict(zip(AXES, (row.case, row.model, row.strategy, *row.cell[1:])))


def _in_folder(row: Row, folder: Path) -> Row:
    """Return the row with a path to its evidence that does not depend on the results folder."""
    return replace(row, evidence=str(folder / row.evidence)) if row.evidence else row


def load_sides(names: Sequence[str]) -> list[Side]:
    """Load folders of results (``DIR,...``), else a stack of the baseline, for each name.

    A wrong name is found before any folder is read. Raises ResultsError: it is neither, or contains
    no result; MeasureError: none of its results can be read.
    """
    folders = {name: named_folders(name) for name in names}
    stacks = [name for name in names if not any(each.exists() for each in folders[name])]
    for folder in (each for name in folders.keys() - stacks for each in folders[name]):
        _check_folder(folder)
    sides = _load_stacks(stacks) if stacks else {}
    return [sides.get(name) or _load_folders(name, folders[name]) for name in names]


def _load_folders(name: str, folders: Sequence[Path]) -> Side:
    side = join_sides(name, map(load_folder, folders))
    if not side.rows:
        error = MeasureError if side.unreadable else ResultsError
        raise error(
            f"{name}: contains no results" + "".join(f": {note}" for note in side.notes[:1])
        )
    return side


def _load_stacks(names: Sequence[str]) -> dict[str, Side]:
    """Load stacks of the baseline. Raise ResultsError for a name that is none of them."""
    for name in names:
        if os.sep in name or name.startswith(("~", ".")):
            raise ResultsError(f"{name}: no such folder of results")
    sides = {name: Side(name) for name in names}
    stacks = set()
    for folder in (folder for folder in project.published() if folder.is_dir()):
        notes: list[str] = []
        for row in load_rows(folder, notes=notes):
            stacks.add(row.stack.name)
            for name in sides.keys() & {row.stack.name, row.stack.label}:
                sides[name].rows.append(_in_folder(row, folder))
        sides[names[0]].notes += notes  # once, where both names are stacks
    for name, side in sides.items():
        if not side.rows:
            raise ResultsError(
                f"{name!r} is neither a folder nor a stack of the baseline{nearest(name, stacks)}"
            )
    return sides


def join_sides(name: str, sides: Iterable[Side]) -> Side:
    """Join what several folders contain."""
    joined = Side(name)
    for side in sides:
        joined.rows += side.rows
        joined.notes += side.notes
        joined.unreadable += side.unreadable
        joined.lacking += side.lacking
        joined.runs += side.runs
    return joined


def _check_folder(root: Path) -> None:
    if not root.is_dir():
        raise ResultsError(f"{root}: no such folder of results")


def load_folder(root: Path) -> Side:
    """Load the results in a folder. Raises ResultsError: there is none; OSError."""
    side = Side(str(root))
    _check_folder(root)
    rows = load_rows(root, notes=side.unreadable)
    side.runs = [run for run in [read_run(root)] if run]
    side.rows = [_in_folder(row, root) for row in rows]
    side.lacking = list(dict.fromkeys(row.cell_id for row in lacking(rows)))
    cases = catalog.load().cases
    unknown_cases = sorted({row.case for row in rows} - cases.keys())
    wrong = catalog.left_out(cases) if unknown_cases else {}
    for case in unknown_cases:
        if case in wrong:  # its file is there and cannot be used: nothing says what to expect of it
            side.unreadable.append(f"{root}: case {case!r} cannot be graded: {wrong[case]}")
        else:
            side.notes.append(
                f"{root}: case {case!r} is not in this catalog: its stored verdicts are used"
            )
    side.notes += side.unreadable
    return side
