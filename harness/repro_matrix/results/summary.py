"""The summary of a results folder: its rows, stored.

A run appends the rows of each cell to ``summary.jsonl`` as it completes; the baseline has a
compressed file for each hardware. A stored row is used while its evidence, the code of the grader
and the definition of its case are those that it was computed from; every other cell is graded
again. Expectations are compared on every read.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import zstandard

from repro_matrix.config import catalog, project
from repro_matrix.config.failure_rules import DEVICE_ERRORS
from repro_matrix.config.schema import Case
from repro_matrix.grading.regrade import regrade
from repro_matrix.paths import PACKAGE, write_bytes
from repro_matrix.records.document import Document, DocumentPath
from repro_matrix.records.outcome import adapter
from repro_matrix.results.inconsistencies import inconsistencies
from repro_matrix.results.projection import rows_of, with_catalog
from repro_matrix.results.rows import Row
from repro_matrix.results.store import (
    ENDED,
    MANIFEST,
    SUMMARY,
    Store,
    document_at,
    documents_in,
    documents_in_order,
    files,
)

COMPRESSED = f"{SUMMARY}.zst"  # of the baseline
DIGEST = b',"digest":"'


def load_rows(
    folder: Path,
    cases: Mapping[str, Case] | None = None,
    notes: list[str] | None = None,
    write: bool = False,
) -> list[Row]:
    """Return the rows of a results folder, cell by cell in the order of their evidence.

    Cells without a fresh row are graded from their evidence; damaged evidence, and a stored cell
    whose evidence is missing, is named in ``notes`` and left out.
    ``write``: store what was computed, where the folder can be written. Raises OSError.
    """
    cases = catalog.load().cases if cases is None else cases
    notes = [] if notes is None else notes
    stored, keys = stored_rows(folder, notes), grading_keys(cases)
    by_file: dict[str, list[str]] = defaultdict(list)
    for path in stored:
        by_file[DocumentPath.parse(path).file].append(path)
    cells: dict[str, list[Row]] = {}  # evidence -> its fresh rows; none: to be graded
    states = evidence_states(folder)
    for file, state in states.items():
        evidence = by_file.get(file, [])
        if not evidence or any(stored[path][0].evidence_state != state for path in evidence):
            evidence = [
                os.path.relpath(found.path, folder) for found in documents_in(str(folder / file))
            ]
        for path in evidence:
            rows = stored.get(path, [])
            fresh = all(
                (row.evidence_state, row.graded_by, row.variant_count)
                == (state, keys.get(row.case, ""), len(rows))
                for row in rows
            )
            cells[path] = rows if fresh else []
    results = Store(folder)
    read = {path: results.read(folder / path) for path, rows in cells.items() if not rows}
    stale = {path: document for path, document in read.items() if document}
    edited = {path: reason for path, each in stale.items() for reason in inconsistencies(each)}
    graded = grade_documents(
        folder, {path: each for path, each in stale.items() if path not in edited}, cases
    )
    cells |= rows_of_cells(graded, cases, states)
    notes += [f"{text}. The cell is left out." for text in results.damaged]
    notes += [
        f"{folder / path}: damaged: edited: {reason}. The cell is left out."
        for path, reason in edited.items()
    ]
    result = [with_catalog(row, cases) for rows in cells.values() for row in rows]
    missing = {
        path: rows
        for path, rows in stored.items()
        if not (folder / DocumentPath.parse(path).file).exists()
    }
    notes += [
        f"{folder / path}: missing, and the summary lists {rows[0].cell_id}. The cell is left out. "
        "Restore the file, measure again, or delete the summary, which is computed anew."
        for path, rows in missing.items()
    ]
    notes += [
        f"{folder}: no result of {name}, which this run measured. The cell is left out. Measure it"
        " again."
        for name in missing_cells(folder, chain(result, *missing.values()), notes)
    ]
    if write and graded:
        with suppress(OSError):  # the next reader names what is missing, too
            write_rows(folder, [*result, *chain.from_iterable(missing.values())])
    return result


def missing_cells(folder: Path, rows: Iterable[Row], notes: list[str]) -> list[str]:
    """Return the cells (hardware, stack, id) that a run measured and that have no row."""
    known = {" ".join(row.cell[::-1]) for row in rows}
    return [name for name in _measured(folder, notes) if name not in known]


def _measured(folder: Path, notes: list[str]) -> list[str]:
    """Return the cells (hardware, stack, id) that a run that has ended measured."""
    path = folder / MANIFEST
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        if run["state"] == ENDED:
            return [name for name in run.get("planned", ()) if name not in run.get("left", ())]
    except FileNotFoundError:  # no run's folder
        pass
    except (OSError, ValueError, KeyError, TypeError):
        notes.append(f"{path}: damaged, so that nothing says whether the run ended. Measure again.")
    return []


def summaries(folder: Path) -> list[Path]:
    """Return the files that hold a folder's rows; a run's may not exist yet."""
    return [folder / SUMMARY, *sorted(folder.glob(f"*/{COMPRESSED}"))]


def stored_rows(
    folder: Path, notes: list[str], wanted: Callable[[bytes], bool] | None = None
) -> dict[str, list[Row]]:
    """Read evidence -> rows as they are stored, fresh or not.

    The last rows of a cell win; lines that cannot be read count as missing, and so do edited ones.
    ``wanted``: of which lines.
    """
    found: dict[str, list[Row]] = {}
    for path in summaries(folder):
        try:
            with open(path, "rb") as file:
                stream: Any = file
                if path.suffix == ".zst":
                    stream = zstandard.ZstdDecompressor().stream_reader(file)
                # Line by line: most of 25 MB may not be wanted.
                for line in filter(wanted, io.BufferedReader(stream, 1 << 20)):
                    text, _, digest = line.rpartition(DIGEST)
                    if digest.rstrip() != _hash(text)[:8].encode() + b'"}':
                        note = f"{path}: holds edited rows. They are computed from their evidence."
                        if text and note not in notes:
                            notes.append(note)
                        continue
                    with suppress(ValueError):
                        row = adapter(Row).validate_json(line)
                        if row.first:  # a later result of the cell
                            found[row.evidence] = []
                        found.setdefault(row.evidence, []).append(row)
        except FileNotFoundError:
            continue
        except (OSError, zstandard.ZstdError) as error:
            notes.append(
                f"{path}: cannot be read: {error}. Its rows are computed from their evidence."
            )
    return found


def lost(notes: Iterable[str]) -> list[str]:
    """Return the notes about evidence that is lost. A lost summary loses nothing."""
    return [text for text in notes if "computed from their evidence" not in text]


def write_rows(folder: Path, rows: Iterable[Row], name: str = SUMMARY) -> None:
    """Replace the summary in one step."""
    text = b"".join(map(_line, rows))
    write_bytes(folder / name, zstandard.compress(text, 19) if name.endswith(".zst") else text)


def _line(row: Row) -> bytes:
    """Return a row's line, with a digest of what stands before it."""
    text = adapter(Row).dump_json(row)[:-1]
    return text + DIGEST + _hash(text)[:8].encode() + b'"}\n'


def write_baseline_summaries(root: Path, rows: Iterable[Row]) -> None:
    """Write the summaries of a baseline, one for each hardware."""
    by_hardware: dict[str, list[Row]] = {
        path.parent.name: [] for path in root.glob(f"*/{COMPRESSED}")
    }
    for row in rows:
        by_hardware.setdefault(row.evidence.split("/")[0], []).append(row)
    for hardware, rows in by_hardware.items():
        if rows:
            write_rows(root / hardware, rows, COMPRESSED)
        else:
            (root / hardware / COMPRESSED).unlink()


def append_cell(
    folder: Path, document: Document, cases: Mapping[str, Case], keys: Mapping[str, str]
) -> None:
    """Add the rows of a graded document that was just stored at its ``path``.

    A row that is missing or cut off is computed by the next reader, so a folder that cannot be
    written is no error. ``keys``: of ``grading_keys``.
    """
    with suppress(OSError):
        state, key = evidence_state(Path(document["path"])), keys.get(document["case"], "")
        rows = rows_of(document, cases, os.path.relpath(document["path"], folder), state, key)
        with open(folder / SUMMARY, "ab") as out:  # an empty line ends one that was cut off
            out.write(b"".join([b"\n", *map(_line, rows)]))


def evidence_state(file: Path) -> str:
    """Return what changes when a file of evidence is written, the same in each checkout."""
    return _hash(file.read_bytes())


def evidence_states(folder: Path) -> dict[str, str]:
    """Return file of evidence -> its state.

    Take them before the documents are read: then what a run adds meanwhile is graded by the next
    reader.
    """
    return {os.path.relpath(file, folder): evidence_state(Path(file)) for file in files(folder)}


def grading_keys(cases: Mapping[str, Case]) -> dict[str, str]:
    """Return case -> hash of the grader, of the case's definition and of all signatures.

    Failures of other cases are recognized, too.
    """
    signatures = "".join(
        each.model_dump_json() for slug in sorted(cases) for each in cases[slug].signatures
    )
    shared = grader_hash() + signatures
    ignored: Any = dict.fromkeys(("expect", "claims", "title", "summary", "references"), True)
    ignored["variants"] = {"__all__": {"help", "role"}}
    return {
        slug: _hash((shared + case.model_dump_json(exclude=ignored)).encode())
        for slug, case in cases.items()
    }


@lru_cache(maxsize=1)
def grader_hash() -> str:
    """Return the hash of the code that rows are computed by."""
    files = [
        *(PACKAGE / "grading").rglob("*"),
        *(PACKAGE / "records").glob("*.py"),
        PACKAGE / "results" / "rows.py",
        PACKAGE / "results" / "projection.py",
    ]
    used = sorted(
        path
        for path in [*files, PACKAGE / "config" / DEVICE_ERRORS]
        if path.suffix in (".py", ".txt", ".yaml")
    )
    return _hash(b"".join(path.name.encode() + path.read_bytes() for path in used))


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def grade_documents(
    folder: Path, documents: Mapping[str, Document], cases: Mapping[str, Case]
) -> dict[str, Document]:
    """Grade documents from their evidence.

    What else is stored of their cases, here and in the baseline, tells a failure that was fixed
    upstream from one that was never reproduced.
    """
    documents = {path: {**document, "path": path} for path, document in documents.items()}
    slugs = {document["case"] for document in documents.values()}
    known = {str(folder.resolve() / path) for path in documents}
    history: list[Document] = []
    for root in dict.fromkeys(
        each.resolve() for each in (folder, *project.published()) if each.is_dir()
    ):
        for found in documents_in_order(root, cases=slugs) if slugs else ():
            if found.path not in known:
                with suppress(OSError, ValueError):
                    history.append(document_at(found.path))
    graded = {each.get("path"): each for each in regrade([*documents.values(), *history], cases)}
    return {path: graded.get(path, document) for path, document in documents.items()}


def rows_of_cells(
    graded: Mapping[str, Document], cases: Mapping[str, Case], states: Mapping[str, str]
) -> dict[str, list[Row]]:
    keys = grading_keys(cases)
    return {
        path: rows_of(
            document,
            cases,
            path,
            states[DocumentPath.parse(path).file],
            keys.get(document["case"], ""),
        )
        for path, document in graded.items()
    }
