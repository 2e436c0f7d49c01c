"""Keep the history of nightly runs: ``nights.jsonl``, a JSON line per run with its rows, without settings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from repro_matrix.analysis.diff import newest
from repro_matrix.analysis.inputs import VariantResult, load_folder
from repro_matrix.config.vocabulary import OutcomeName, VerdictName
from repro_matrix.errors import ResultsError
from repro_matrix.results.store import write_text

FILE = "nights.jsonl"
SCHEMA = 1
_ONCE = ("versions", "started", "commit")  # of a row: stored once for the run
_DROPPED = (*_ONCE, "settings", "path")
_DEFAULTS = {each.name: each.default for each in fields(VariantResult) if each.name not in _DROPPED}


@dataclass(frozen=True)
class NightlyRun:
    """``exit_code``: that of `repro nightly`; None where it is unknown."""

    run_id: str
    started: float
    commit: str | None
    exit_code: int | None
    rows: tuple[VariantResult, ...]

    @property
    def passed(self) -> bool:
        return self.exit_code == 0

    @property
    def stacks(self) -> dict[str, Mapping[str, str]]:
        return {row.stack: row.versions for row in self.rows}


_ADAPTER = TypeAdapter(NightlyRun)


def make_run(run_id: str, rows: Iterable[VariantResult], exit_code: int | None = None) -> NightlyRun:
    """Make a run of the newest result of each cell."""
    cells = newest(rows)
    kept = tuple(row for cell_id in sorted(cells) for row in cells[cell_id].values())
    commits = {row.commit for row in kept}
    started = max((row.started for row in kept), default=0.0)
    return NightlyRun(run_id, started, commits.pop() if len(commits) == 1 else None, exit_code, kept)


def to_json(run: NightlyRun) -> dict[str, Any]:
    rows = [
        {name: value for name, default in _DEFAULTS.items() if (value := getattr(row, name)) not in (default, {}, ())}
        for row in run.rows
    ]
    stacks = {stack: dict(versions) for stack, versions in run.stacks.items()}
    return {"schema": SCHEMA, **vars(run), "stacks": stacks, "rows": rows}


def from_json(data: Any) -> NightlyRun:
    """Raises ValueError: this is not a run, a newer schema, or a value that no run can have."""
    if not isinstance(data, dict) or not isinstance(data.get("schema"), int):
        raise ValueError("not a nightly run")
    if data["schema"] > SCHEMA:
        raise ValueError(f"schema {data['schema']} was written by a newer repro-matrix; this one reads up to {SCHEMA}")
    try:
        shared = {"started": data["started"], "commit": data["commit"]}
        rows = [{**row, **shared, "versions": data["stacks"][row["stack"]]} for row in data["rows"]]
        values = {name: data[name] for name in ("run_id", "started", "commit", "exit_code")}
        run = _ADAPTER.validate_python({**values, "rows": tuple(rows)}, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a nightly run: {type(error).__name__}: {error}") from None
    for row in run.rows:
        if row.verdict not in (None, *get_args(VerdictName)):
            raise ValueError(f"{row.key} variant {row.variant}: unknown verdict {row.verdict!r}")
        if row.kinds.keys() - set(get_args(OutcomeName)) or any(count < 1 for count in row.kinds.values()):
            raise ValueError(f"{row.key} variant {row.variant}: invalid outcomes {dict(row.kinds)!r}")
    return run


def load_history(folder: Path, notes: list[str]) -> list[NightlyRun]:
    """Load the runs in the order of time. A truncated last line is added to ``notes``.

    Raises ResultsError: the file cannot be read, or a line of it is damaged.
    """
    path = folder / FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path}: cannot be read: {error}") from None
    runs = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        try:
            runs.append(from_json(json.loads(line)))
        except ValueError as error:
            if not line.endswith("\n"):
                notes.append(f"{path}:{number}: truncated line ignored")
                break
            raise ResultsError(f"{path}:{number}: damaged: {error}") from None
    return sorted(runs, key=lambda run: (run.started, run.run_id))


def store_run(folder: Path, run: NightlyRun) -> None:
    """Add a run to the history; it replaces one of the same id. Raises ResultsError: the folder cannot be written."""
    runs = [each for each in load_history(folder, []) if each.run_id != run.run_id]
    ordered = sorted([*runs, run], key=lambda run: (run.started, run.run_id))
    lines = [json.dumps(to_json(each), separators=(",", ":")) + "\n" for each in ordered]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / FILE, "".join(lines))
    except OSError as error:
        raise ResultsError(f"{folder / FILE}: cannot be written: {error.strerror or error}") from None


def load_runs(folders: Sequence[Path]) -> tuple[list[NightlyRun], list[str]]:
    """Load runs from folders with a history and from folders of results (a run each), in the order of time.

    Return them with notes. Raises ResultsError: a folder cannot be read.
    """
    runs: dict[str, NightlyRun] = {}
    notes: list[str] = []
    for folder in folders:
        if (folder / FILE).exists():
            runs |= {run.run_id: run for run in load_history(folder, notes)}
            continue
        side = load_folder(folder)
        notes += side.notes
        path = folder.resolve()
        name = path.name if path.name not in runs else os.path.join(path.parent.name, path.name)
        if side.rows:
            runs[name] = make_run(name, side.rows)
        else:
            notes.append(f"{folder}: contains no results; not shown as a run")
    return sorted(runs.values(), key=lambda run: (run.started, run.run_id)), notes
