"""Accept differences until a date: ``results/quarantine.yaml``, reviewed like any other file.

A quarantined variant that differs from its expectation does not make a run fail until the date;
every summary lists it with its owner. Afterwards it counts as before, and the entry itself is an
error. A variant that could not be measured is never quarantined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

from pydantic import Field

from repro_matrix.config import project
from repro_matrix.config.catalog import Catalogue, parse_file, read_yaml
from repro_matrix.config.selection import Selection
from repro_matrix.config.vocabulary import Strict
from repro_matrix.errors import ConfigError, unknown
from repro_matrix.planning.cells import enumerate_cells
from repro_matrix.records.outcome import NOT_GREEN
from repro_matrix.results.rows import Row

AT_MOST = timedelta(days=366)  # ahead of today


class Quarantine(Strict):
    """An accepted difference.

    ``cell``: case/model-strategy[-name=value...], as a row's cell id. ``variant``: None means all
    variants of the cell.
    """

    cell: str = Field(min_length=1)
    variant: str | None = None
    owner: str = Field(min_length=1)
    until: date
    reason: str = Field(min_length=1)

    def covers(self, cell_id: str, variant: str) -> bool:
        return self.cell == cell_id and self.variant in (None, variant)

    def describe(self) -> str:
        variant = f" variant {self.variant}" if self.variant else ""
        return f"{self.cell}{variant}, {self.owner} until {self.until}: {self.reason}"


class _File(Strict):
    quarantined: tuple[Quarantine, ...] = ()


def file() -> Path:
    return project.current().results / "quarantine.yaml"


def read_quarantine() -> Sequence[Quarantine]:
    """Return the entries of the file, if there is one.

    Raises ConfigError with the file and the key.
    """
    path = file()
    entries = parse_file(_File, read_yaml(path), path).quarantined if path.exists() else ()
    latest = datetime.now(timezone.utc).date() + AT_MOST
    counts = Counter((entry.cell, entry.variant) for entry in entries)
    for number, entry in enumerate(entries):
        place = f"{path}: quarantined.{number}: {entry.cell}"
        if entry.until > latest:
            raise ConfigError(
                f"{place}: until {entry.until} is more than a year ahead. Use {latest} or earlier."
            )
        if counts[entry.cell, entry.variant] > 1:
            raise ConfigError(f"{place} {entry.variant or ''}: quarantined twice. Keep one entry.")
    return entries


def check_quarantine(entries: Sequence[Quarantine], catalogue: Catalogue) -> None:
    """Raise ConfigError for a cell or a variant that the catalogue does not have.

    The settings after a cell's key (``-ranks=4``) are not checked: wrong ones accept nothing.
    """
    known = [cell.key for cell in enumerate_cells(catalogue, Selection())] if entries else []
    for entry in entries:
        case = entry.cell.partition("/")[0]
        if not any(f"{entry.cell}-".startswith(f"{key}-") for key in known):
            near = [key for key in known if key.startswith(f"{case}/")] or known
            raise unknown("cell", entry.cell, near, str(file()))
        variants = catalogue.cases[case].variants
        if entry.variant is not None and entry.variant not in variants:
            raise unknown("variant", entry.variant, variants, f"{file()}: {entry.cell}")


def mark_rows(rows: Iterable[Row], entries: Sequence[Quarantine], today: date) -> list[Row]:
    """Mark the measured differences that the quarantine accepts today."""
    active = [entry for entry in entries if entry.until >= today]
    marked = []
    for row in rows:
        entry = next((each for each in active if each.covers(row.cell_id, row.variant)), None)
        if entry and row.state in NOT_GREEN and row.measured:
            text = f"{entry.reason} ({entry.owner}, until {entry.until})"
            row = replace(row, state="quarantined", quarantine=text)
        marked.append(row)
    return marked


def expired(rows: Iterable[Row], entries: Sequence[Quarantine], today: date) -> list[str]:
    """Return messages about expired entries that cover any of the rows."""
    past = [entry for entry in entries if entry.until < today]
    texts = [
        f"{file()}: entry expired: {each.describe()}. Fix the failure, extend the date, or delete"
        " the entry."
        for row in rows
        for each in past
        if each.covers(row.cell_id, row.variant)
    ]
    return list(dict.fromkeys(texts))
