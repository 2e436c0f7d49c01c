"""Load what a report shows from folders of results: rows, headline, claims and remarks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

from repro_matrix.baseline import quarantine
from repro_matrix.baseline.claims import ClaimRow, ledger
from repro_matrix.baseline.derivation import not_whole
from repro_matrix.changes.history import NightlyRun, load_history
from repro_matrix.changes.regressions import (
    Regressions,
    against_history,
    compare_to_last_passing,
    since_last_passing,
)
from repro_matrix.changes.sides import axes_of
from repro_matrix.config import catalog as catalogs
from repro_matrix.config.catalog import Catalogue, left_out
from repro_matrix.config.schema import Case
from repro_matrix.errors import ExitCode, ResultsError
from repro_matrix.paths import BASELINE
from repro_matrix.planning.plan import newer_release
from repro_matrix.records.outcome import NOTHING_STORED
from repro_matrix.report.headline import Headline, headline
from repro_matrix.report.page_model import CellView, cells_of
from repro_matrix.results import runs
from repro_matrix.results.rows import Row
from repro_matrix.results.summary import load_rows, lost
from repro_matrix.text import counted, one_line

PUBLISHED = "published results"


@dataclass(frozen=True)
class Remarks:
    """Remarks that a report must show beside its rows.

    ``damaged``: evidence that cannot be read. ``incomplete``: interrupted runs, and cases that
    cannot be graded. ``expired``: entries of the quarantine whose date has passed.
    """

    damaged: Sequence[str] = ()
    incomplete: Sequence[str] = ()
    expired: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def all(self) -> list[str]:
        return [*self.expired, *self.incomplete, *self.damaged, *self.notes]


@dataclass(frozen=True)
class Results:
    """Everything that a report shows.

    ``stored_cases``: before anything was selected. ``past``: the runs of the history before these
    results. ``target``: the file that the report is written to; None is stdout.
    """

    folders: Sequence[Path]
    catalog: Catalogue
    headline: Headline
    cells: Sequence[CellView]
    remarks: Remarks
    stored_cases: set[str]
    claims: Sequence[ClaimRow]
    past: Sequence[NightlyRun] = ()
    target: Path | None = None

    @property
    def title(self) -> str:
        named = [
            PUBLISHED if folder == BASELINE else f"run {name}"
            for folder, name in zip(self.folders, source_names(self.folders))
        ]
        return f"repro-matrix: {' and '.join(named)}"

    @property
    def created(self) -> str:
        """When and from what the report was made."""
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
        names = ", ".join(source_names(self.folders))
        return (
            f"Created {when} UTC from {names}. Every result comes from a launched process; its"
            " evidence is stored."
        )


def source_names(folders: Sequence[Path]) -> list[str]:
    """Return a short name for each folder: its own, or its path if two have the same."""
    names = ["baseline" if folder == BASELINE else folder.resolve().name for folder in folders]
    return [str(folder) if names.count(name) > 1 else name for folder, name in zip(folders, names)]


def load_results(
    folders: Sequence[Path],
    selection: Mapping[str, Sequence[str]] | None = None,
    history: Path | None = None,
) -> Results:
    """Load the cells of folders, and compare them with the last passing runs.

    ``selection``: axis -> patterns. ``history``: a folder with nights.jsonl; without it, the
    passing runs are those beside a run. Raises ResultsError: a folder is missing or cannot be read.
    """
    catalog = catalogs.load()
    entries, today = quarantine.read_quarantine(), datetime.now(timezone.utc).date()
    cells: list[CellView] = []
    texts: list[str] = []
    expired: list[str] = []
    stored: list[Row] = []
    for folder, name in zip(folders, source_names(folders)):
        found = _read(folder, catalog, texts)
        stored += found
        rows = [
            _for_report(row, folder, catalog.cases) for row in found if row.case in catalog.cases
        ]
        rows = [row for row in rows if _is_selected(row, catalog.cases[row.case], selection or {})]
        expired += quarantine.expired(rows, entries, today)
        cells += cells_of(rows, name if len(folders) > 1 else "")
    rows = quarantine.mark_rows([row for cell in cells for row in cell.rows], entries, today)
    past, since = _compare(folders, history, rows, stored, catalog.cases)
    rows = quarantine.mark_rows(against_history(rows, since), entries, today)
    members, stored_cases = iter(rows), {row.case for row in stored}
    cells = [replace(cell, rows=tuple(islice(members, len(cell.rows)))) for cell in cells]
    incomplete = _incomplete(folders, stored_cases, catalog.cases)
    damaged = lost(texts)
    notes = [text for text in texts if text not in damaged]
    notes += [
        f"left out: {text}"
        for text in catalog.left_out
        if not any(text in each for each in incomplete)
    ]
    remarks = Remarks(damaged, incomplete, list(dict.fromkeys(expired)), notes)
    head = headline(rows, catalog.cases, since, _no_previous(folders, history))
    head = replace(head, incomplete=_missing_part(remarks, rows))
    shown = [catalog.cases[name] for name in dict.fromkeys(row.case for row in rows)]
    return Results(
        folders, catalog, head, cells, remarks, stored_cases, ledger(shown, stored), past
    )


def _read(folder: Path, catalog: Catalogue, notes: list[str]) -> list[Row]:
    try:
        return load_rows(folder, catalog.cases, notes, write=folder != BASELINE)
    except FileNotFoundError:
        hint = (
            "`repro run CASE` stores a run, and `repro report --baseline` shows the published"
            " results."
        )
        raise ResultsError(f"{folder}: no such folder of results. {hint}") from None
    except OSError as error:
        raise ResultsError(f"{folder}: cannot be read ({error.strerror or error})") from None


def _for_report(row: Row, folder: Path, cases: Mapping[str, Case]) -> Row:
    declared = cases[row.case].variants.get(row.variant)
    if row.skip_kind == "same" and declared and declared.stack:
        # Older runs stored only that a fix that is a newer release is the same as unfixed.
        row = replace(row, reason=newer_release(row.stack.name))
    if folder == BASELINE and row.state in NOTHING_STORED:
        # The published results are what is known: a fix that is flaky there is no news.
        row = replace(row, state="no_expectation", note="")
    return row


def _is_selected(row: Row, case: Case, selection: Mapping[str, Sequence[str]]) -> bool:
    values = axes_of(row) | {"area": case.area or "", "silent": str(case.silent).lower()}
    return all(
        any(fnmatchcase(values[axis], one) for one in patterns)
        for axis, patterns in selection.items()
    )


def _compare(
    folders: Sequence[Path],
    history: Path | None,
    rows: Sequence[Row],
    stored: Sequence[Row],
    cases: Mapping[str, Case],
) -> tuple[Sequence[NightlyRun], Regressions]:
    """Return the earlier runs of the history, and the comparison with the last passing ones."""
    if history is None:
        if len(folders) == 1:
            return (), since_last_passing(folders[0], rows, cases)
        return (), Regressions()
    if not history.is_dir():
        raise ResultsError(f"{history}: no such folder")
    end = max((row.started for row in stored), default=0.0)
    past = [run for run in load_history(history) if run.started < end]
    return past, compare_to_last_passing(rows, past)


def _incomplete(
    folders: Sequence[Path], stored_cases: set[str], cases: Mapping[str, Case]
) -> list[str]:
    """Return the runs that measured less than requested, and the cases that cannot be graded."""
    found = []
    for folder in folders:
        run = runs.read_run(folder)
        if run and run.interrupted:
            again = f"repro matrix --resume results={folder}"
            found.append(f"{folder}: the run was interrupted. To continue: {again}")
        if run and run.exit_code == ExitCode.INCOMPLETE:
            less = "less was measured or confirmed than requested"
            found.append(f"{folder}: exit code 3 of its run: {less}")
    wrong = left_out(cases)
    for case in sorted(stored_cases - cases.keys()):
        why = wrong.get(case, "the catalog has no such case")
        found.append(f"{case}: its results are left out: {why}")
    return found


def _missing_part(remarks: Remarks, rows: Sequence[Row]) -> str:
    """Say why these results are not everything that was requested; "" if they are."""
    if remarks.damaged:
        first = one_line(remarks.damaged[0]).partition(". ")[0]
        count = counted(len(remarks.damaged), "file")
        return f"{count} of evidence missing or not readable, the first: {first}"
    less = "Less was measured than requested"
    if rest := not_whole(rows):
        row, count = rest[0], counted(len(rest), "variant")
        lost = (each.reason for each in row.attempts if each.outcome == "infra_error")
        why = row.skipped or next(lost, row.reason) or "its cell was not finished"
        first = f"{row.cell_id} variant {row.variant}: {one_line(why)}"
        return f"{less}: {count} not measured completely, the first: {first}"
    return less if remarks.incomplete else ""


def _no_previous(folders: Sequence[Path], history: Path | None) -> str:
    """Say why these results have no earlier run to compare with; "" of a run."""
    if history is not None:
        return (
            f"Not known yet: {history} has no earlier run that passed. repro nightly adds and"
            " compares each night's."
        )
    if folders == [BASELINE]:
        return "Not compared: these are the published results."
    if len(folders) > 1:
        return "Not compared: these are several results. repro diff compares two."
    return ""
