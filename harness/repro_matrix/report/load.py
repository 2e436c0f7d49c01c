"""Load what a report shows from results folders, and write its files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from pathlib import Path

from repro_matrix.analysis.claims import ClaimRow, ledger
from repro_matrix.analysis.history import load_history
from repro_matrix.config import catalog as catalogs
from repro_matrix.config.catalog import Catalogue
from repro_matrix.errors import ResultsError
from repro_matrix.paths import BASELINE
from repro_matrix.report.formats import Remarks
from repro_matrix.report.page_model import Cell, Page, build_page, cells_of
from repro_matrix.report.strips import Run, run_of, run_of_history
from repro_matrix.results import quarantine, runs
from repro_matrix.results.store import write_bytes
from repro_matrix.results.summary import Row, load_rows

AXES = ("case", "model", "strategy", "stack", "hardware")


@dataclass
class Results:
    """``sources``: names of the results, where there are several. ``stored_cases``: before anything was selected."""

    catalog: Catalogue
    cells: list[Cell] = field(default_factory=list)
    remarks: Remarks = field(default_factory=Remarks)
    sources: list[str] = field(default_factory=list)
    stored_cases: set[str] = field(default_factory=set)
    claims: list[ClaimRow] = field(default_factory=list)


def load_results(folders: Sequence[Path], selection: Mapping[str, Sequence[str]] | None = None) -> Results:
    """Load the cells of these folders. ``selection``: axis -> patterns. Cases that are not in the catalogue cannot be
    graded: they are named, and left out. Raises ResultsError: a folder is missing or cannot be read."""
    catalog = catalogs.load()
    found = Results(catalog)
    entries = quarantine.read()
    names = source_names(folders)
    found.sources = names if len(folders) > 1 else []
    texts: list[str] = []
    expired: list[str] = []
    ungraded: set[str] = set()
    stored: list[Row] = []
    for folder, name in zip(folders, names):
        try:
            rows = load_rows(folder, catalog.cases, texts, write=folder not in (BASELINE,))
        except OSError as error:
            raise ResultsError(f"{folder}: cannot be read ({error.strerror or error})") from None
        found.stored_cases |= {row.case for row in rows}
        stored += rows
        ungraded |= {row.case for row in rows} - catalog.cases.keys()
        rows = [row for row in rows if row.case in catalog.cases and _is_selected(row, selection or {})]
        rows = quarantine.mark_rows(rows, entries, datetime.now(timezone.utc).date(), expired)
        found.cells += cells_of(rows, name if len(folders) > 1 else "")
    shown = dict.fromkeys(cell.row.case for cell in found.cells)
    found.claims = ledger([catalog.cases[name] for name in shown], stored, catalog.strategies)
    incomplete = [
        f"{folder}: the run was interrupted. To continue: repro matrix --resume results={folder}"
        for folder in folders
        if (run := runs.read(folder)) and runs.died(run)
    ]
    incomplete += [f"{case}: the catalogue has no such case, so its results are left out" for case in sorted(ungraded)]
    damaged = [text for text in texts if "left out" in text]  # a summary that cannot be read loses nothing
    notes = [*(text for text in texts if text not in damaged), *(f"left out: {text}" for text in catalog.left_out)]
    found.remarks = Remarks(damaged, incomplete, list(dict.fromkeys(expired)), notes)
    return found


def _is_selected(row: Row, selection: Mapping[str, Sequence[str]]) -> bool:
    if not selection:
        return True
    values = {"case": row.case, "model": row.model, "strategy": row.strategy, "stack": row.stack.name,
              "hardware": row.hardware.profile}  # fmt: skip
    return all(any(fnmatchcase(values[axis], one) for one in patterns) for axis, patterns in selection.items())


def is_results(folder: Path) -> bool:
    """Whether a run has written there, also one that has not stored anything yet."""
    return (folder / ".lock").exists() or folder.name == "scratch" or runs.read(folder) is not None


def page(found: Results, folders: Sequence[Path], history: Path | None = None) -> Page:
    """Build the page of loaded results. ``history``: a folder with nights.jsonl or with folders of earlier runs."""
    past: list[Run] = []
    notes = found.remarks.all
    if history is not None:
        if not history.is_dir():
            raise ResultsError(f"{history}: no such folder")
        past += map(run_of_history, load_history(history, notes))
        for folder in sorted(path for path in history.iterdir() if path.is_dir() and not path.is_symlink()):
            rows = load_rows(folder, found.catalog.cases)
            past += [run_of(folder.name, cells_of(rows))] if rows else []
        past.append(run_of("these results", found.cells))
    elif len(found.sources) > 2:  # two stand side by side
        past = [run_of(name, [cell for cell in found.cells if cell.source == name]) for name in found.sources]
    return build_page(found.cells, title(folders), created_line(folders), found.catalog.cases, sources=found.sources,
                      notes=notes, claims=found.claims, runs=past)  # fmt: skip


def title(folders: Sequence[Path]) -> str:
    """Return the page's title."""
    names = source_names(folders)
    return "repro-matrix: " + ("published results" if names == ["baseline"] else " and ".join(names))


def source_names(folders: Sequence[Path]) -> list[str]:
    """Return a short name for each folder: its own, with its parent's where two have the same."""
    names = ["baseline" if folder == BASELINE else folder.resolve().name for folder in folders]
    return [
        str(Path(folder.resolve().parent.name) / name) if names.count(name) > 1 else name
        for folder, name in zip(folders, names)
    ]


def created_line(folders: Sequence[Path]) -> str:
    """Return when and from what a report was made."""
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    names = ", ".join(source_names(folders))
    return f"Created {when} UTC from {names}. Every result comes from a launched process; its evidence is stored."


def write(path: Path, text: str) -> None:
    """Write a file in one step. Raises ResultsError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, text.encode(errors="replace"))
    except OSError as error:
        raise ResultsError(f"{path}: cannot be written ({error.strerror or error})") from None


def write_site(folder: Path, files: Mapping[str, str]) -> None:
    """Write a site. Raises ResultsError: the folder holds other files, among which ours would lie."""
    index = folder / "index.html"
    ours = index.is_file() and "repro-matrix" in index.read_text(encoding="utf-8", errors="replace")
    if folder.is_dir() and any(folder.iterdir()) and not ours:
        raise ResultsError(f"{folder}: holds other files. --site takes a new or empty folder.")
    for name, content in files.items():
        write(folder / name, content)


def write_run_page(folder: Path) -> Path:
    """Write the page of a run that has ended, from its summary. Raises ResultsError: it cannot be written."""
    from repro_matrix.report.html import render_file

    target = folder / "report.html"
    write(target, render_file(page(load_results([folder]), [folder])))
    return target
