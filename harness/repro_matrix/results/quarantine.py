"""Differences that are accepted until a date: ``results/quarantine.yaml``, reviewed as any other file.

A quarantined variant that differs from its expectation does not make a run fail until the date; every summary lists it
with its owner. Afterwards it counts as before, and the entry itself is an error. What could not be measured is never
quarantined.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from repro_matrix.config import project
from repro_matrix.config.catalog import Catalogue, parse_yaml
from repro_matrix.config.selection import Selection
from repro_matrix.errors import ConfigError, describe_validation, nearest
from repro_matrix.planning.cells import enumerate_cells
from repro_matrix.records.document import Document
from repro_matrix.records.outcome import StoredVerdict

if TYPE_CHECKING:
    from repro_matrix.results.summary import Row

LONGEST = timedelta(days=366)  # what is silent for longer is an expectation: `repro accept`


class Quarantine(BaseModel):
    """``cell``: case/model-strategy[-name=value...], as a document's key. ``variant``: None for all of its variants."""

    model_config = ConfigDict(extra="forbid", str_strip_whitespace=True)
    cell: str = Field(min_length=1)
    variant: str | None = None
    owner: str = Field(min_length=1)
    until: date
    reason: str = Field(min_length=1)

    def covers(self, key: str, variant: str) -> bool:
        return self.cell == key and self.variant in (None, variant)

    def over(self) -> str:
        """Return the message of an entry that has expired."""
        variant = f" variant {self.variant}" if self.variant else ""
        return (
            f"{file()}: entry for {self.cell}{variant} expired on {self.until} (owner: {self.owner}, "
            f"reason: {self.reason}). Fix the failure, extend the date, or delete the entry."
        )

    def told(self) -> str:
        variant = f" variant {self.variant}" if self.variant else ""
        return f"{self.cell}{variant}, {self.owner} until {self.until}: {self.reason}"


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")
    quarantined: list[Quarantine] = []


@dataclass
class Applied:
    """``expired``: those of the documents' cells whose day is over."""

    documents: list[Document]
    expired: list[Quarantine] = field(default_factory=list)


def file() -> Path:
    return project.current().results / "quarantine.yaml"


def read(path: Path | None = None) -> list[Quarantine]:
    """Return the entries; none where there is no file. Raises ConfigError that names the file and the key."""
    path = path or file()
    try:
        found = parse_yaml(path.read_text(encoding="utf-8"))
        entries = _File.model_validate({} if found is None else found).quarantined
    except FileNotFoundError:
        return []
    except ValidationError as error:
        raise describe_validation(error, _File, path) from None
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: no text, or a day that no calendar has
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    counts = Counter((entry.cell, entry.variant) for entry in entries)
    twice = next((" variant ".join(filter(None, at)) for at, count in counts.items() if count > 1), None)
    if twice:  # with two days: which of them is meant?
        raise ConfigError(f"{path}: {twice}: quarantined twice; one entry each")
    last = datetime.now(timezone.utc).date() + LONGEST
    far = next((entry for entry in entries if entry.until > last), None)
    if far:
        raise ConfigError(f"{path}: {far.cell}: until {far.until}: at most {LONGEST.days} days from today, {last}")
    return entries


def check(entries: Iterable[Quarantine], catalogue: Catalogue, where: str = "") -> None:
    """Raise ConfigError for a cell or a variant that the catalogue does not have, with the nearest. ``where``: where
    they are written (default: the file)."""
    entries, where = list(entries), where or str(file())
    if not entries:
        return
    known = {cell.key: cell.case for cell in enumerate_cells(catalogue, Selection())}
    for entry in entries:
        # Another size, scale or flag of a known cell: its name goes on with name=value.
        case = known.get(entry.cell) or next(
            (own for key, own in known.items() if entry.cell.startswith(f"{key}-") and "=" in entry.cell[len(key) :]),
            None,
        )
        if case is None:
            raise ConfigError(f"{where}: no cell {entry.cell!r}{_near(entry.cell, _like(entry.cell, known))}")
        variants = catalogue.cases[case].variants
        if entry.variant is not None and entry.variant not in variants:
            raise ConfigError(
                f"{where}: {entry.cell} has no variant {entry.variant!r}{nearest(entry.variant, variants)}"
            )


NEAR = 5  # cells that are named beside one that there is not


def _near(cell: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(cell, names, n=NEAR, cutoff=0.5)
    if not near:
        return f" ({len(names)} cells are known; `repro list --json` names them: key)"
    others = f" Also near: {', '.join(near[1:])}" if near[1:] else ""
    more = f"; {len(names) - len(near)} more in `repro list --json` (key)" if len(names) > len(near) else ""
    return f"; did you mean {near[0]!r}?{others}{more}"


def _like(cell: str, known: Iterable[str]) -> list[str]:
    """Of many cells those of the named case, where there is one."""
    names = list(known)
    return [name for name in names if name.partition("/")[0] == cell.partition("/")[0]] or names


def applied(documents: Iterable[Document], entries: Sequence[Quarantine], today: date) -> Applied:
    """Return the documents; an accepted difference says ``quarantined`` instead of ``unexpected``, and by whom."""
    found = Applied([])
    for document in documents:
        key = document.get("cell_id", "")
        own = [entry for entry in entries if entry.cell == key]
        found.expired += [entry for entry in own if entry.until < today and entry not in found.expired]
        live = [entry for entry in own if entry.until >= today]
        verdicts = {
            variant: _quarantined(said, next((entry for entry in live if entry.covers(key, variant)), None))
            for variant, said in document["verdicts"].items()
        }
        found.documents.append({**document, "verdicts": verdicts} if live else document)
    return found


def _quarantined(said: StoredVerdict, entry: Quarantine | None) -> StoredVerdict:
    if entry is None or said.get("expected") != "unexpected" or not said["measured"]:
        return said
    by = {"owner": entry.owner, "until": entry.until.isoformat(), "reason": entry.reason}
    return {**said, "expected": "quarantined", "quarantined": by}  # is shown, and never stored


def mark_rows(
    rows: Iterable[Row], entries: Iterable[Quarantine], today: date, expired: list[str] | None = None
) -> list[Row]:
    """Mark differences that the quarantine accepts. Messages about entries whose date has passed go to ``expired``."""
    by_cell: dict[str, list[Quarantine]] = {}
    for entry in entries:
        by_cell.setdefault(entry.cell, []).append(entry)
    marked = []
    for row in rows:
        matching = by_cell.get(row.cell_id, [])
        if expired is not None:
            expired += [each.over() for each in matching if each.until < today]
        active = next(
            (each for each in matching if each.until >= today and each.covers(row.cell_id, row.variant)), None
        )
        if active and row.state == "unexpected" and row.measured:
            text = f"{active.reason} ({active.owner}, until {active.until})"
            row = replace(row, state="quarantined", quarantine=text)
        marked.append(row)
    return marked
