"""Store nightly runs in ``nights.jsonl``, a JSON line per run."""

from __future__ import annotations

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
    """The newest result of each cell in one run.

    ``exit_code``: that of `repro nightly`; None if it is unknown. ``packages``: stack -> its
    packages, the complete list if the run stored it. ``quarantined``: (cell id, variant) of changes
    that did not count. ``partial``: it measured or confirmed less than requested.
    """

    run_id: str
    rows: tuple[Row, ...]
    exit_code: int | None = None
    packages: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    quarantined: tuple[tuple[str, str], ...] = ()
    partial: bool = False
    schema: Literal[2] = 2

    __pydantic_config__ = ConfigDict(extra="forbid")

    @property
    def passed(self) -> bool:
        return self.exit_code == 0

    @property
    def description(self) -> str:
        if self.partial:
            return "last run without a difference, which measured or confirmed less than requested"
        return "last passing run"

    @property
    def started(self) -> float:
        return max((row.started for row in self.rows), default=0.0)

    @property
    def commit(self) -> str | None:
        """Return the commit, if all results have the same."""
        commits = {row.commit for row in self.rows}
        return commits.pop() if len(commits) == 1 else None

    @property
    def dirty(self) -> bool:
        return any(row.dirty for row in self.rows)

    def versions(self, stack: str) -> Mapping[str, str]:
        return self.packages.get(stack, {})

    def machine(self, hardware: str) -> Mapping[str, str]:
        machines = (row.hardware for row in self.rows if row.hardware.profile == hardware)
        return next((each.description for each in machines), {})


_ADAPTER = TypeAdapter(NightlyRun)
# Details that no comparison reads, and that would be most of the file.
_OMITTED: dict[str, Any] = {
    "title": "",
    "references": (),
    "help": "",
    "checks": (),
    "errors": (),
    "stacks": {},
    "settings": {},
    "torchrun": None,
    "evidence": "",
}

_OMITTED_OF_ATTEMPT: dict[str, Any] = {
    "reason": "",
    "metrics": {},
    "wall_s": 0.0,
    "cpu_s": None,
    "peak_rss_mb": None,
    "peak_gpu_mb": None,
    "launcher": "",
}


def _compact(row: Row) -> Row:
    attempts = tuple(replace(each, **_OMITTED_OF_ATTEMPT) for each in row.attempts)
    return replace(row, attempts=attempts, stack=replace(row.stack, versions={}), **_OMITTED)


def make_run(
    run_id: str,
    rows: Iterable[Row],
    exit_code: int | None = None,
    packages: Mapping[str, Mapping[str, str]] | None = None,
) -> NightlyRun:
    """Make a run of the newest result of each cell.

    ``packages``: stack -> all its packages, if they are known.
    """
    places = by_place(rows)
    in_order = sorted(places.values(), key=lambda row: row.cell)
    versions = {row.stack.name: row.stack.versions for row in in_order}
    kept = tuple(map(_compact, in_order))
    return NightlyRun(run_id, kept, exit_code, versions | dict(packages or {}))


def load_history(folder: Path) -> list[NightlyRun]:
    """Load the runs in the order in which they were stored.

    Raises ResultsError: the file cannot be read, or a line of it is damaged.
    """
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
            runs.append(_ADAPTER.validate_json(text))
        except ValueError as error:
            raise ResultsError(
                f"{path}:{number}: damaged: {line(str(error))}. Restore the file from a backup, or"
                " move it away to start a new history."
            ) from None
    return runs


def store_run(folder: Path, run: NightlyRun) -> None:
    """Add a run to the history, or replace the one of the same id. Raises OSError."""
    path = folder / FILE
    text = _ADAPTER.dump_json(run, exclude_defaults=True).decode()
    same_id = text[: text.index(',"rows":')]
    content = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = list(filter(None, content.split("\n")))
    stored = [each.startswith(same_id) for each in lines]
    if True in stored:
        lines[stored.index(True)] = text
    else:
        lines.append(text)
    write_text(path, "\n".join(lines) + "\n")


def check_one_commit(rows: Iterable[Row]) -> None:
    """Raise ResultsError if the rows were measured at several commits."""
    cells = Counter((row.commit or "no commit")[:12] for row in rows if row.first)
    if len(cells) > 1:
        commits = ", ".join(f"{each} ({counted(cells[each], 'cell')})" for each in sorted(cells))
        raise ResultsError(
            f"results of several commits: {commits}. Measure all of them at one commit."
        )


Place = tuple[str, str, str, str]  # cell id, stack, hardware, variant


def place_of(row: Row) -> Place:
    return (*row.cell, row.variant)


def by_place(rows: Iterable[Row]) -> dict[Place, Row]:
    """Return the newest result of each variant."""
    return {place_of(row): row for variants in newest(rows).values() for row in variants.values()}
