"""The exit code of a run, from its rows: does a result differ from its expectation, was enough measured? Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from repro_matrix.errors import ExitCode
from repro_matrix.results.summary import Row


def exit_code(rows: Sequence[Row], min_cells: int, stopped_early: bool = False) -> ExitCode:
    """Return DIFFERS for a result that differs from its expectation, else INCOMPLETE where less was measured than
    requested: attempts without evidence, cells without a comparison, or mostly results on GPUs that nothing expects."""
    if any(row.state == "unexpected" for row in rows):
        return ExitCode.DIFFERS
    measured = {row.cell for row in rows if row.attempts and row.complete}
    on_gpus = [row.state for row in rows if row.verdict and row.measured and row.hardware.accelerator != "cpu"]
    incomplete = (
        stopped_early
        or len(measured) < min_cells
        # A build that failed is no property of the stack: another try, or a compiler, would measure it.
        or any(row.lost_attempts > 0 or row.skip_kind == "build" or row.unseen for row in rows)
        or unpaired_failures(rows)
        or identical_failures(rows)
        or 2 * on_gpus.count("no_expectation") > len(on_gpus)
    )
    return ExitCode.INCOMPLETE if incomplete else ExitCode.OK


def bisect_exit(rows: Iterable[Row]) -> int:
    """Return the exit code for `git bisect run`: 1 the known failure reproduces, 0 it does not, 125 it is unknown."""
    outcomes = {attempt.outcome for row in rows if row.first for attempt in row.attempts}
    return 1 if "reproduced" in outcomes else 0 if outcomes == {"passed"} else 125


def unpaired_cells(rows: Iterable[Row]) -> int:
    """Count the cells of which only the unfixed variant was measured: an expectation is about the fixes beside it."""
    return sum(all(row.variant == "unfixed" and not row.verdict for row in cell) for cell in _measured_cells(rows))


def unpaired_failures(rows: Iterable[Row]) -> list[Row]:
    """Return unfixed variants that failed with another error than the known one while no other variant gave an answer:
    nothing compares them with an expectation."""
    return [
        row
        for cell in _measured_cells(rows)
        if not any(row.verdict and row.measured for row in cell)
        for row in cell
        if row.variant == "unfixed" and row.counts.keys() - {"reproduced", "passed", "infra_error"}
    ]


def identical_failures(rows: Iterable[Row]) -> list[Row]:
    """Return the unfixed variants of cells in which every attempt of every variant failed with one and the same other
    error: the settings made no difference, so the cell shows nothing of the failure or its fixes. Not where all of it
    is expected."""
    found = []
    for cell in _measured_cells(rows):
        answers = [row for row in cell if row.evidence_attempts]
        states = [row.state for row in answers if row.verdict]
        errors = {each.failures if each.outcome == "other_failure" else () for row in answers
                  for each in row.evidence_attempts}  # fmt: skip
        expected = bool(states) and set(states) == {"expected"}
        if len(answers) > 1 and len(errors) == 1 and errors != {()} and not expected:
            found += [row for row in answers if row.variant == "unfixed"]
    return found


def _measured_cells(rows: Iterable[Row]) -> list[list[Row]]:
    cells: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.attempts:
            cells.setdefault(row.cell, []).append(row)
    return list(cells.values())
