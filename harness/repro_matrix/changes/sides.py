"""Read what one side of a comparison names: a folder of results or a stack of the baseline ->
rows."""

from __future__ import annotations

import fnmatch
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from pydantic import ConfigDict, PositiveInt

from repro_matrix.baseline.derivation import lacking
from repro_matrix.config import catalog, project
from repro_matrix.config.vocabulary import RELEVANT, OutcomeName, VerdictName
from repro_matrix.errors import ConfigError, MeasureError, ResultsError, nearest, unknown
from repro_matrix.grading.checks import number
from repro_matrix.grading.expected import as_expected
from repro_matrix.results import runs
from repro_matrix.results.rows import Row
from repro_matrix.results.runs import Run
from repro_matrix.results.summary import load_rows

AXES = ("case", "model", "strategy", "stack", "hardware")


@dataclass(frozen=True)
class VariantResult:
    """The result of one variant of a cell. ``kinds``: outcome -> number of attempts that are
    evidence."""

    case: str
    key: str
    variant: str
    axes: tuple[str, ...]
    hardware: str
    stack: str
    model: str = ""
    strategy: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    started: float = 0.0
    commit: str | None = None
    control: bool = False
    first: bool = False
    verdict: VerdictName | None = None
    expected: str | None = None
    kinds: Mapping[OutcomeName, PositiveInt] = field(default_factory=dict)
    failure_ids: tuple[str, ...] = ()
    text: str = ""
    skipped: str | None = None
    error_at: str | None = None
    role: str = ""
    dirty: bool = False  # measured with uncommitted files of the catalog or the harness
    machine: Mapping[str, Any] = field(default_factory=dict)
    settings: Any = field(
        default_factory=dict
    )  # records.attempt.Settings; none: comparable with all
    path: str = ""
    tolerance_used: Mapping[str, float] = field(
        default_factory=dict
    )  # numeric check -> part of it; above 1 it fails

    __pydantic_config__ = ConfigDict(extra="forbid")  # changes/history.py validates what it reads

    @property
    def measured(self) -> int:
        return sum(self.kinds.values())

    @property
    def steady(self) -> bool:
        return len(self.kinds) == 1


def from_row(row: Row, folder: str = "") -> VariantResult:
    """Keep of a summary row what comparisons need. ``folder``: the results folder that holds its
    evidence."""
    attempts = row.evidence_attempts
    failures = sorted({name for each in attempts for name in each.failures})
    return VariantResult(
        row.case,
        row.cell_id,
        row.variant,
        row.axes,
        row.hardware.profile,
        row.stack.name,
        row.model,
        row.strategy,
        {name: version for name, version in row.stack.versions.items() if name in RELEVANT},
        row.started,
        row.commit,
        row.kind == "control",
        row.first,
        cast(Any, as_expected(row.verdict) if row.verdict else None),
        row.state,
        cast(Any, Counter(each.outcome for each in attempts)),
        tuple(failures),
        row.reason if set(row.counts) - {"passed"} else "",
        row.skipped,
        row.error_at,
        row.role,
        row.dirty,
        machine_of(row),
        row.settings,
        os.path.join(folder, row.evidence) if row.evidence else "",
        tolerance_used(row),
    )


def tolerance_used(row: Row) -> dict[str, float]:
    """Return how much of its tolerance each numeric check uses, the most of all ranks."""
    found: dict[str, float] = {}
    for check in row.checks:
        actual, expected = (
            v if isinstance(v, list) else [v] for v in (check["actual"], check["expected"])
        )
        tolerance, pairs = (
            number(check["tolerance"]),
            [(number(a), number(b)) for a, b in zip(actual, expected)],
        )
        differences = [abs(a - b) for a, b in pairs if a is not None and b is not None]
        if tolerance and differences and len(differences) == len(actual) == len(expected):
            found[check["name"]] = round(
                max(max(differences) / tolerance, found.get(check["name"], 0.0)), 3
            )
    return found


def machine_of(row: Row) -> dict[str, Any]:
    """Return what a reader wants to know of the machine when a result changed."""
    hardware = row.hardware
    memory = f"{hardware.memory_gb:.0f} GiB" if hardware.memory_gb else None
    values = {
        "CPU": hardware.cpu,
        "cores": hardware.cores,
        "memory": memory,
        "GPUs": ", ".join(hardware.gpus),
        "driver": hardware.driver,
    }
    return {name: str(value) for name, value in values.items() if value}


def patterns_of(texts: Iterable[str]) -> dict[str, list[str]]:
    """Return axis -> patterns of ``NAME=GLOB,...``. Raises ConfigError: no such axis."""
    found = {}
    for name, equals, value in (text.partition("=") for text in texts):
        if not equals or name not in AXES:
            raise unknown("axis", name, AXES)
        found[name] = [part.strip() for part in value.split(",")]
    return found


@dataclass
class Side:
    """``notes``: remarks on the files; ``unreadable``: those of the notes about results that could
    not be read;
    ``lacking``: cells of which less was measured than requested. ``runs``: the manifests."""

    name: str
    rows: list[VariantResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    @property
    def packages(self) -> dict[str, Mapping[str, str]]:
        """All packages of each stack, if the runs stored them."""
        return {stack: each for run in self.runs for stack, each in run.stacks.items()}

    def select(self, texts: Sequence[str]) -> Side:
        """Return the rows that ``NAME=GLOB,...`` choose. Raises ConfigError: no such axis, or no
        row left."""
        rows = self.rows
        for name, patterns in patterns_of(texts).items():
            rows = [
                r
                for r in rows
                if any(fnmatch.fnmatchcase(getattr(r, name), pattern) for pattern in patterns)
            ]
            if not rows:
                known, text = (
                    sorted({getattr(row, name) for row in self.rows}),
                    f"{name}={','.join(patterns)}",
                )
                raise ConfigError(
                    f"{self.name}: no result has {text}. Present: {', '.join(known[:8])}."
                )
        return replace(self, rows=rows)


def load_side(name: str) -> Side:
    """Load folders of results (``DIR,...``), else a stack of the baseline.

    Raises ResultsError: it is neither, or contains no result; MeasureError: none of its results can
    be read.
    """
    folders = runs.named_folders(name)
    if any(folder.exists() for folder in folders):
        side = join_sides(name, map(load_folder, folders))
        if not side.rows:
            error = MeasureError if side.unreadable else ResultsError
            raise error(
                f"{name}: contains no results" + "".join(f": {note}" for note in side.notes[:1])
            )
        return side
    if os.sep in name or name.startswith(("~", ".")):
        raise ResultsError(f"{name}: no such folder of results")
    side, stacks = Side(name), set()
    for folder in (folder for folder in project.published() if folder.is_dir()):
        rows = load_rows(folder, notes=side.notes)
        side.rows += [
            from_row(row, str(folder)) for row in rows if name in (row.stack.name, row.stack.label)
        ]
        stacks |= {row.stack.name for row in rows}
    if not side.rows:
        raise ResultsError(
            f"{name!r} is neither a folder nor a stack of the baseline{nearest(name, stacks)}"
        )
    return side


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


def load_folder(root: Path, name: str = "") -> Side:
    """Load the results in a folder. Raises ResultsError: there is none; OSError."""
    side = Side(name or str(root))
    if not root.is_dir():
        raise ResultsError(f"{root}: no such folder of results")
    rows = load_rows(root, notes=side.unreadable)
    side.runs = [run for run in [runs.read_run(root)] if run]
    side.rows = [from_row(row, str(root)) for row in rows]
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
