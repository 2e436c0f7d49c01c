"""Where the user's own measurements lie, and the rows of earlier measurements: published, and of the last runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from repro_matrix.config import project
from repro_matrix.config.settings import RunSettings
from repro_matrix.records.document import Document
from repro_matrix.results import runs
from repro_matrix.results.summary import Row, stored_rows


def results_folder(settings: RunSettings) -> Path:
    """Where documents go. A run of the matrix takes a folder of its own first (``runs.begin``); what is left are
    searches, which go on with what they have."""
    return Path(settings.results).expanduser() if settings.results else scratch() / runs.SEARCHES


def scratch() -> Path:
    """The folder of runs."""
    return project.current().results / "scratch"


LOOK_BACK = 5  # runs


def measured_rows(settings: RunSettings | None = None, published: list[Row] | None = None) -> list[Row]:
    """Return the stored rows of earlier measurements, with the grading that they were stored with.

    They are the published ones (``published``, where they were read before) and, with ``settings``, those of that run's
    folder and, where it is one of scratch/, of the last runs before it.
    """
    folders: list[Path] = []
    if settings is not None:
        folders = [results_folder(settings)]
        if folders[0].parent.resolve() == scratch().resolve():
            folders += [run.folder for run in runs.listed(scratch())[-LOOK_BACK:]]
    rows = _rows(project.published()) if published is None else published
    return [*rows, *_rows(folders)]


def _rows(folders: list[Path]) -> list[Row]:
    stored = [stored_rows(folder, []) for folder in dict.fromkeys(map(Path.resolve, folders))]
    return [row for cells in stored for rows in cells.values() for row in rows]


def past_measurements(rows: Iterable[Row]) -> dict[str, list[Document]]:
    """Return cell id -> what ``verdict.judge`` reads of measurements on other stacks."""
    found: dict[str, list[Document]] = defaultdict(list)
    for row in rows:
        if row.variant == "unfixed":
            attempts = [{"outcome": {"outcome": attempt.outcome}} for attempt in row.attempts]
            past: Any = {
                "stack": {"name": row.stack.name, "versions": row.stack.versions, "changed": list(row.stack.changed)},
                "hardware": {"accelerator": row.hardware.accelerator, "capabilities": row.hardware.capabilities},
                "variants": {"unfixed": {"settings": row.settings, "attempts": attempts}},
            }
            found[row.cell_id].append(past)
    return found
