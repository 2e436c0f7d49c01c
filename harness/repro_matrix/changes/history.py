"""The history of nightly runs: ``nights.jsonl``, a JSON line per run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter

from repro_matrix.changes.diff import newest
from repro_matrix.errors import ResultsError
from repro_matrix.paths import write_text
from repro_matrix.results.rows import Row
from repro_matrix.text import counted, line

FILE = "nights.jsonl"


@dataclass(frozen=True)
class NightlyRun:
    """``exit_code``: that of `repro nightly`; None where it is unknown. ``stacks``: stack ->
    versions.

    ``rows``: without settings, paths and what they have in common. ``quarantined``: (cell id,
    variant) of changes that
    did not count.
    """

    schema: Literal[1]
    run_id: str
    started: float
    commit: str | None
    exit_code: int | None
    rows: tuple[Row, ...]
    stacks: Mapping[str, Mapping[str, str]]
    quarantined: tuple[tuple[str, str], ...] = ()
    dirty: bool = False
    machines: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict
    )  # hardware -> CPU, cores, memory ...
    partial: bool = False  # it measured or confirmed less than requested: exit code 3

    __pydantic_config__ = ConfigDict(extra="forbid")

    @property
    def passed(self) -> bool:
        return self.exit_code == 0

    @property
    def description(self) -> str:
        less = "run without a difference, which measured or confirmed less than requested"
        return f"last {less if self.partial else 'passing run'}"


_ADAPTER = TypeAdapter(NightlyRun)
# Details that no comparison reads, and that would be most of the file.
_OMITTED: dict[str, Any] = {
    "checks": (),
    "errors": (),
    "stacks": {},
    "settings": {},
    "torchrun": None,
    "evidence": "",
    "started": 0.0,
    "commit": None,
    "dirty": False,
}


def make_run(
    run_id: str,
    rows: Iterable[Row],
    exit_code: int | None = None,
    packages: Mapping[str, Mapping[str, str]] | None = None,
) -> NightlyRun:
    """Make a run of the newest result of each cell. ``packages``: all those of a stack, where they
    are known."""
    cells = newest(rows)
    kept = [row for cell_id in sorted(cells) for row in cells[cell_id].values()]
    commits = {row.commit for row in kept}
    return NightlyRun(
        1,
        run_id,
        max((row.started for row in kept), default=0.0),
        commits.pop() if len(commits) == 1 else None,
        exit_code,
        tuple(replace(row, stack=replace(row.stack, versions={}), **_OMITTED) for row in kept),
        {row.stack.name: row.stack.versions for row in kept} | dict(packages or {}),
        (),
        any(row.dirty for row in kept),
        {
            row.hardware.profile: row.hardware.description
            for row in kept
            if row.hardware.description
        },
    )


def load_history(folder: Path) -> list[NightlyRun]:
    """Load the runs in the order in which they were stored. Raises ResultsError: the file cannot be
    read, or a line of it is damaged."""
    path = folder / FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read: {error}") from None
    runs = []
    for number, text in enumerate(content.splitlines(), 1):
        try:
            runs.append(_ADAPTER.validate_python(json.loads(text)))
        except ValueError as error:
            raise ResultsError(
                f"{path}:{number}: damaged: {line(str(error))}. Restore the file from a backup, or"
                " move it away to start a new history."
            ) from None
    return runs


def store_run(folder: Path, run: NightlyRun) -> None:
    """Add a run to the history, or replace the one of the same id. Raises OSError."""
    runs = {each.run_id: each for each in [*load_history(folder), run]}
    values = [
        _ADAPTER.dump_python(each, mode="json", exclude_defaults=True) for each in runs.values()
    ]
    write_text(
        folder / FILE, "".join(json.dumps(each, separators=(",", ":")) + "\n" for each in values)
    )


def check_one_commit(rows: Iterable[Row]) -> None:
    """Raise ResultsError if the rows were measured at several commits."""
    cells = Counter((row.commit or "no commit")[:12] for row in rows if row.first)
    if len(cells) > 1:
        commits = ", ".join(
            f"{commit} ({counted(count, 'cell')})" for commit, count in sorted(cells.items())
        )
        raise ResultsError(
            f"results of several commits: {commits}. Measure all of them at one commit."
        )


Place = tuple[str, str, str, str]  # cell id, hardware, stack, variant


def place_of(row: Row) -> Place:
    return (
        row.cell_id,
        row.hardware.profile,
        row.stack.name,
        row.variant,
    )


def by_place(rows: Iterable[Row]) -> dict[Place, Row]:
    """Return the newest result of each variant."""
    return {place_of(row): row for variants in newest(rows).values() for row in variants.values()}
