"""The summary of a results folder: one row per variant of a cell, with everything that reports and comparisons show.

A run appends the rows of each cell to ``summary.jsonl`` as it completes; the baseline has a compressed file for each
hardware. A stored row is used while its evidence, the code of the grader and the definition of its case are those that
it was computed from; every other cell is graded again. Expectations are compared on every read.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, cast

import zstandard
from pydantic import TypeAdapter

from repro_matrix.config import catalog, project
from repro_matrix.config.failure_rules import DEVICE_ERRORS
from repro_matrix.config.schema import Case
from repro_matrix.grading import checks, verdict
from repro_matrix.grading.expectations import comparison
from repro_matrix.grading.observation import NO_RECORD, number, parse_threads
from repro_matrix.grading.regrade import regrade
from repro_matrix.grading.root_cause import failure_ids
from repro_matrix.paths import PACKAGE, write_bytes
from repro_matrix.records.attempt import Rank
from repro_matrix.records.document import Document, DocumentPath, Made, kind_of
from repro_matrix.records.outcome import FailureId, Outcome, StoredOutcome
from repro_matrix.results.store import SUMMARY, Store, document_at, documents_in, files, listed

COMPRESSED = f"{SUMMARY}.zst"  # of the baseline
DIGEST = b',"digest":"'
# The settings that make two measurements comparable; not the device and its backend, because results of a CPU and a GPU
# are compared.
COMPARED = ("model", "flags", "strategy", "world_size", "tp_size", "steps", "seed")


@dataclass(frozen=True)
class Stack:
    label: str  # its folder's name in the results
    name: str
    versions: Mapping[str, str]
    changed: tuple[str, ...] = ()  # what differs from the installed packages


@dataclass(frozen=True)
class Hardware:
    profile: str
    accelerator: str
    gpus: tuple[str, ...]  # their names
    capabilities: Mapping[str, str | bool]
    kind: str  # of the hardware, as an expectation names it
    cpu: str
    driver: str | None
    cores: int | None = None
    memory_gb: float | None = None


@dataclass(frozen=True)
class Attempt:
    """``failures``: failure ids as text, or "hang". ``metrics``: of the script, the greatest of all ranks."""

    outcome: str
    reason: str
    failures: tuple[str, ...]
    finished: bool  # every rank completed its script
    retry: bool  # this attempt repeats one that was no evidence
    wall_s: float
    cpu_s: float | None
    rank_cpu_s: float | None
    peak_rss_mb: float | None
    peak_gpu_mb: float | None
    launcher: str
    metrics: Mapping[str, float]
    outcome_without_warning: str | None = None  # its outcome without a failure that is only a remark in a log


@dataclass(frozen=True)
class Row:
    """One variant of one cell. Text from ranks is not sanitized: do that where it is shown.

    ``state`` is None for a variant without a verdict (``unfixed``); ``attempts`` is empty for a skipped variant.
    """

    cell_id: str  # case/model-strategy...
    case: str
    title: str
    kind: str  # failure, control
    references: tuple[str, ...]
    simulated: str | None
    model: str
    strategy: str
    flags: Mapping[str, Any]
    ranks: int
    overrides: tuple[str, ...]  # name=value: what makes it another measurement than the usual one of this cell
    scale: str
    weights: str
    params: str  # model/strategy[/flag=value...]: the cell as an expectation names it
    stack: Stack
    hardware: Hardware
    complete: bool
    started: float
    ended: float | None
    commit: str | None
    dirty: bool
    run_command: str

    variant: str
    help: str
    role: str  # unfixed, fix, non_fix, probe
    variant_count: int  # of the cell: a summary that was cut off has fewer rows
    first: bool  # the variant that the others are compared with: ``unfixed`` or ``control``
    own_stack: str | None  # the stack of a variant that names one
    settings: Mapping[str, Any]  # those that make two measurements comparable
    skipped: str | None
    skip_kind: str | None
    torchrun: str | None

    verdict: str | None
    measured: bool  # an attempt counts; of a variant without a verdict: there is an attempt that is evidence
    no_evidence: bool  # what was launched is no evidence
    unseen: bool
    interval: tuple[float, float] | None  # 95 % Wilson interval of the share of passed attempts
    failures: tuple[FailureId, ...]  # of the verdict
    reason: str
    state: str | None  # expected, unexpected, no_expectation, matches_cpu, differs_from_cpu, quarantined
    expected_verdict: str | None
    note: str  # another failure than the expected one, or that it is not written down

    attempts: tuple[Attempt, ...]
    checks: tuple[Mapping[str, Any], ...]  # of ``_checks``
    errors: tuple[Mapping[str, Any], ...]  # of ``_errors``: of the rank that failed first, then of the others
    stacks: Mapping[str, tuple[str, ...]]  # of a hang or a crash: rank -> its main thread's frames, outermost first
    error_at: str | None  # file:line of the failure that came first

    evidence: str  # path relative to the results folder, with ":line" in a file of several
    evidence_state: str  # changes when the file of the evidence is written
    graded_by: str  # hash of the grader and of the case's definition
    quarantine: str | None = None  # owner, date and reason, where the state is quarantined

    @property
    def cell(self) -> tuple[str, str, str]:
        """The cell with its stack and hardware."""
        return self.cell_id, self.stack.name, self.hardware.profile

    @property
    def axes(self) -> tuple[str, ...]:
        """The arguments of a command line that select the cell among those of its case."""
        flags = (f"flags.{name}={json.dumps(value)}" for name, value in self.flags.items())
        return f"model={self.model}", f"strategy={self.strategy}", *flags, *self.overrides

    @property
    def counts(self) -> Counter[str]:
        """Outcome -> number of attempts."""
        return Counter(attempt.outcome for attempt in self.attempts)

    @property
    def evidence_attempts(self) -> tuple[Attempt, ...]:
        """The attempts that count."""
        return tuple(attempt for attempt in self.attempts if attempt.outcome not in verdict.NO_EVIDENCE)

    @property
    def lost_attempts(self) -> int:
        """Number of attempts that are no evidence and were not repeated."""
        return self.counts["infra_error"] - sum(attempt.retry for attempt in self.attempts)

    @property
    def outcome(self) -> str:
        """``reproduced`` where all attempts agree, else ``reproduced 2/3, passed 1/3``; ``skipped``."""
        counts = self.counts
        if len(counts) <= 1:
            return next(iter(counts), "skipped")
        return ", ".join(f"{name} {k}/{len(self.attempts)}" for name, k in counts.most_common())

    @property
    def wall_s(self) -> float | None:
        """Median seconds of an attempt."""
        return statistics.median(attempt.wall_s for attempt in self.attempts) if self.attempts else None

    @property
    def command(self) -> tuple[str, ...]:
        """The arguments that measure this variant again."""
        stack = () if self.stack.name == "current" else (f"stack={self.stack.name}",)
        return ("repro", "run", self.case, *self.axes, *stack, f"variants={self.variant}")


@lru_cache(maxsize=1)
def adapter() -> TypeAdapter[Row]:
    """Return what reads and writes rows; it raises ValueError naming the wrong keys."""
    return TypeAdapter(Row)


# Reading and writing


def load_rows(
    folder: Path, cases: Mapping[str, Case] | None = None, notes: list[str] | None = None, write: bool = False
) -> list[Row]:
    """Return the rows of a results folder, cell by cell in the order of their evidence.

    Cells without a fresh row are graded from their evidence; damaged evidence, and a stored cell whose evidence is
    missing, is named in ``notes`` and left out.
    ``write``: store what was computed, where the folder can be written. Raises OSError.
    """
    cases = catalog.load().cases if cases is None else cases
    notes = [] if notes is None else notes
    stored, keys = stored_rows(folder, notes), grading_keys(cases)
    by_file: dict[str, list[str]] = defaultdict(list)
    for path in stored:
        by_file[DocumentPath.parse(path).file].append(path)
    cells: dict[str, list[Row]] = {}  # evidence -> its fresh rows; none: to be graded
    for file in files(folder):
        state = evidence_state(Path(file))
        evidence = by_file.get(os.path.relpath(file, folder), [])
        if not evidence or any(stored[path][0].evidence_state != state for path in evidence):
            evidence = [os.path.relpath(found.path, folder) for found in documents_in(file)]
        for path in evidence:
            rows = stored.get(path, [])
            now = (state, keys.get(rows[0].case, ""), len(rows)) if rows else ()
            fresh = all((row.evidence_state, row.graded_by, row.variant_count) == now for row in rows)
            cells[path] = rows if fresh else []
    results = Store(folder)
    stale = {path: results.read(folder / path) for path, rows in cells.items() if not rows}
    cells |= grade_cells(folder, {path: document for path, document in stale.items() if document}, cases)
    notes += [f"{text}. The cell is left out." for text in results.damaged]
    result = [compared(row, cases) for rows in cells.values() for row in rows]
    missing = {path: rows for path, rows in stored.items() if not (folder / DocumentPath.parse(path).file).exists()}
    notes += [
        f"{folder / path}: missing, and the summary lists {rows[0].cell_id}. The cell is left out. "
        "Restore the file, measure again, or delete the summary, which is computed anew."
        for path, rows in missing.items()
    ]
    if write and stale:
        with suppress(OSError):  # the next reader names what is missing, too
            write_rows(folder, [*result, *chain.from_iterable(missing.values())])
    return result


def stored_rows(
    folder: Path, notes: list[str], wanted: Callable[[bytes], bool] | None = None
) -> dict[str, list[Row]]:  # fmt: skip
    """Read evidence -> rows as they are stored, fresh or not. The last rows of a cell win; lines that cannot be read
    count as missing, and so do edited ones. ``wanted``: of which lines."""
    found: dict[str, list[Row]] = {}
    for path in (folder / SUMMARY, *sorted(folder.glob(f"*/{COMPRESSED}"))):
        try:
            with open(path, "rb") as file:
                stream = zstandard.ZstdDecompressor().stream_reader(file) if path.suffix == ".zst" else file
                # Line by line: most of 25 MB may not be wanted.
                for line in filter(wanted, io.BufferedReader(cast(Any, stream), 1 << 20)):
                    text, _, digest = line.rpartition(DIGEST)
                    if digest.rstrip() != _hash(text)[:8].encode() + b'"}':
                        note = f"{path}: holds edited rows. They are computed from their evidence."
                        notes += [note] if text and note not in notes else []
                        continue
                    with suppress(ValueError):
                        row = adapter().validate_json(line)
                        found[row.evidence] = [*([] if row.first else found.get(row.evidence, [])), row]
        except FileNotFoundError:
            continue
        except (OSError, zstandard.ZstdError) as error:
            notes.append(f"{path}: cannot be read: {error}. Its rows are computed from their evidence.")
    return found


def write_rows(folder: Path, rows: Iterable[Row], name: str = SUMMARY) -> None:
    """Replace the summary in one step."""
    text = b"".join(map(_line, rows))
    write_bytes(folder / name, zstandard.compress(text, 19) if name.endswith(".zst") else text)


def _line(row: Row) -> bytes:
    """Return a row's line, with a digest of what stands before it."""
    text = adapter().dump_json(row)[:-1]
    return text + DIGEST + _hash(text)[:8].encode() + b'"}\n'


def write_baseline(root: Path, cases: Mapping[str, Case]) -> None:
    """Write the summaries of a baseline, one for each hardware."""
    by_hardware: dict[str, list[Row]] = {path.parent.name: [] for path in root.glob(f"*/{COMPRESSED}")}
    for row in load_rows(root, cases) if root.is_dir() else ():
        by_hardware.setdefault(row.evidence.split("/")[0], []).append(row)
    for hardware, rows in by_hardware.items():
        if rows:
            write_rows(root / hardware, rows, COMPRESSED)
        else:
            (root / hardware / COMPRESSED).unlink()


def append_cell(folder: Path, document: Document, cases: Mapping[str, Case], keys: Mapping[str, str]) -> None:
    """Add the rows of a graded document that was just stored at its ``path``. A row that is missing or cut off is
    computed by the next reader, so a folder that cannot be written is no error. ``keys``: of ``grading_keys``."""
    with suppress(OSError):
        state, key = evidence_state(Path(document["path"])), keys.get(document["case"], "")
        rows = rows_of(document, cases, os.path.relpath(document["path"], folder), state, key)
        with open(folder / SUMMARY, "ab") as out:  # an empty line ends one that was cut off
            out.write(b"".join([b"\n", *map(_line, rows)]))


def evidence_state(file: Path) -> str:
    """Return what changes when a file of evidence is written, the same in each checkout."""
    return _hash(file.read_bytes())


def grading_keys(cases: Mapping[str, Case]) -> dict[str, str]:
    """Return case -> hash of the grader, of the case's definition, and of all signatures: failures of other cases are
    recognized, too."""
    signatures = "".join(each.model_dump_json() for slug in sorted(cases) for each in cases[slug].signatures)
    shared = grader_hash() + signatures
    ignored: Any = dict.fromkeys(("expect", "claims", "title", "summary", "references"), True)
    ignored["variants"] = {"__all__": {"help", "role"}}
    return {slug: _hash((shared + case.model_dump_json(exclude=ignored)).encode()) for slug, case in cases.items()}


@lru_cache(maxsize=1)
def grader_hash() -> str:
    """Return the hash of the code that rows are computed by."""
    files = [*(PACKAGE / "grading").rglob("*"), *(PACKAGE / "records").glob("*.py"), Path(__file__)]
    used = sorted(
        path for path in [*files, PACKAGE / "config" / DEVICE_ERRORS] if path.suffix in (".py", ".txt", ".yaml")
    )
    return _hash(b"".join(path.name.encode() + path.read_bytes() for path in used))


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()


# From evidence to rows


def grade_cells(folder: Path, documents: Mapping[str, Document], cases: Mapping[str, Case]) -> dict[str, list[Row]]:
    """Grade cells from their evidence: path -> rows. What else is stored of their cases, here and in the baseline,
    tells a failure that was fixed upstream from one that was never reproduced."""
    documents = {path: {**document, "path": path} for path, document in documents.items()}
    slugs = {document["case"] for document in documents.values()}
    known = {str(folder.resolve() / path) for path in documents}
    history: list[Document] = []
    for root in dict.fromkeys(each.resolve() for each in (folder, *project.published()) if each.is_dir()):
        for found in listed(root, cases=slugs) if slugs else ():
            if found.path not in known:
                with suppress(OSError, ValueError):
                    history.append(document_at(found.path))
    graded = {each.get("path"): each for each in regrade([*documents.values(), *history], cases).documents}
    keys = grading_keys(cases)
    rows = {}
    for path, document in documents.items():
        state = evidence_state(folder / DocumentPath.parse(path).file)
        rows[path] = rows_of(graded.get(path, document), cases, path, state, keys.get(document["case"], ""))
    return rows


def rows_of(
    document: Document, cases: Mapping[str, Case], evidence: str = "", state: str = "", graded_by: str = ""
) -> list[Row]:
    """Return a row per variant of a graded document, ``unfixed`` first."""
    hardware, stack, made = document["hardware"], document["stack"], document["provenance"]
    cell: dict[str, Any] = {
        **document,
        **made,
        "cell_id": document.get("cell_id") or document["case"],
        "params": document.get("params") or f"{document['model']}/{document['strategy']}",
        "stack": {"label": "", **stack},
        "hardware": {
            "capabilities": {},
            **hardware,
            "gpus": [gpu["name"] for gpu in hardware["gpus"]],
            "kind": kind_of(hardware),
        },
        "variant_count": len(document["variants"]),
        "commit": made["git_commit"],
        "dirty": made["git_dirty"],
        "run_command": made["command"],
        "evidence": evidence,
        "evidence_state": state,
        "graded_by": graded_by,
    }
    rows = [{**cell, **_variant(document, name, cases.get(document["case"]))} for name in document["variants"]]
    return [compared(adapter().validate_python(row), cases) for row in rows]


def _variant(document: Document, name: str, case: Case | None) -> dict[str, Any]:
    variant, first = document["variants"][name], next(iter(document["variants"].values()))
    graded: Mapping[str, Any] = document["verdicts"].get(name) or {}
    made = variant["attempts"]
    evidence = any(each["outcome"]["outcome"] not in verdict.NO_EVIDENCE for each in made)
    failed = next((each for each in made if each["outcome"]["outcome"] != "passed"), None)
    shown = failed or (made[0] if made else None)
    own_stack = variant.get("stack") if variant.get("stack") != document["stack"]["name"] else None
    settings: Mapping[str, Any] = variant["settings"]
    return {
        "variant": name,
        "help": "",
        "role": "",
        "first": variant is first,
        "own_stack": own_stack,
        "settings": {key: settings[key] for key in COMPARED if key in settings},
        "skipped": variant["skipped"],
        "skip_kind": skip["kind"] if (skip := variant.get("skip")) else None,
        "torchrun": next((each["observation"]["attempt"].get("torchrun") for each in made), None),
        "verdict": graded.get("name"),
        "measured": graded.get("measured", evidence),
        "no_evidence": bool(graded.get("infra_error")) or (bool(made) and not evidence),
        "unseen": bool(graded.get("unseen")),
        "interval": graded.get("interval"),
        "failures": graded.get("failure_ids", ()),
        "reason": variant["skipped"] or graded.get("reason") or (made[0]["outcome"]["reason"] if made else ""),
        "state": graded.get("expected", "no_expectation") if graded else None,
        "expected_verdict": graded.get("expectation"),
        "note": graded.get("failure_note", ""),
        "attempts": [_attempt(document["case"], each) for each in made],
        "checks": _checks(shown["observation"]["ranks"]) if shown else (),
        "errors": _errors(failed) if failed else (),
        "stacks": _stacks(shown["observation"]["ranks"]) if shown else {},
        "error_at": error_at(made),
    }


def compared(row: Row, cases: Mapping[str, Case]) -> Row:
    """Return the row with what the catalog says of its variant, and how its verdict compares with what is expected."""
    case = cases.get(row.case)
    variant = case.variants.get(row.variant) if case else None
    role = variant.role if variant else "unfixed" if row.first else "probe"
    row = replace(row, help=variant.help if variant else "", role=role)
    if row.verdict is None or case is None:
        return row
    graded = verdict.Verdict(cast(Any, row.verdict), row.reason, measured=row.measured, failure_ids=row.failures)
    found = comparison(
        case, row.params, row.variant, graded, row.stack.versions, row.hardware.kind, row.hardware.capabilities
    )
    return replace(row, state=found["expected"], expected_verdict=found["expectation"], note=found["failure_note"])


def _attempt(case: str, made: Made) -> dict[str, Any]:
    outcome, launched = made["outcome"], made["observation"]["attempt"]
    records = [rank["record"] for rank in made["observation"]["ranks"]]
    greatest: dict[str, float] = {}
    metrics: dict[str, float] = {}
    for record in filter(None, records):
        sizes = {name: record.get(name) for name in ("cpu_s", "peak_rss_mb", "peak_gpu_mb")}
        for values, most in ((sizes, greatest), (record["metrics"], metrics)):
            for name, value in values.items():
                if (measured := number(value)) is not None:
                    most[name] = max(measured, most.get(name, measured))
    failures = [str(each) for each in failure_ids(case, Outcome.from_json(outcome))]
    return {
        **launched,
        **outcome,
        "failures": failures or (["hang"] if outcome["outcome"] == "hang" else []),
        "finished": bool(records) and all(record is not None and record["done"] for record in records),
        "retry": bool(launched.get("retry_of")),
        "rank_cpu_s": greatest.get("cpu_s"),
        "peak_rss_mb": greatest.get("peak_rss_mb"),
        "peak_gpu_mb": greatest.get("peak_gpu_mb"),
        "metrics": metrics,
    }


def _checks(ranks: Sequence[Rank]) -> list[dict[str, Any]]:
    """Return the checks, failed ones first; ranks with the same numbers share an entry."""
    found: dict[str, dict[str, Any]] = {}
    for rank in ranks:
        record = rank["record"] or NO_RECORD
        for check in record["checks"]:
            values = {name: _shorten(check.get(name)) for name in ("name", "actual", "expected", "tolerance")}
            values["state"] = checks.evaluate(check, number(record.get("done_at"))).state
            entry = {**values, "subject": str(check.get("subject") or "")[:200]}
            found.setdefault(repr(entry), {**entry, "ranks": []})["ranks"].append(rank["rank"])
    return sorted(found.values(), key=lambda entry: bool(entry["state"] == "passed"))[:24]


def _shorten(value: Any) -> Any:
    """Return a number or a short value as it is, of any other the beginning of its JSON."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return value if len(text) <= 200 else text[:200]


def _errors(made: Made) -> list[dict[str, Any]]:
    """Return how ranks failed; ranks with the same error share an entry."""
    found: dict[str, dict[str, Any]] = {}
    first = made["outcome"]["primary"]["rank"] if made["outcome"]["primary"] else None
    for rank in sorted(made["observation"]["ranks"], key=lambda rank: rank["rank"] != first):
        raised, ended = (rank["record"] or NO_RECORD)["exception"], _ended(rank)
        if not raised and ended == "finished":
            continue
        frames = [
            f"{'.'.join(filter(None, (frame['module'], frame['function'])))}:{frame['line']}  {frame.get('code') or ''}"
            for frame in (raised["frames"][-6:] if raised else ())
        ]
        error = {"type": raised["type"], "message": raised["message"][:600]} if raised else {"type": "", "message": ""}
        entry = {"ended": ended, **error, "frames": [frame.strip()[:300] for frame in frames]}
        log = rank["log_tail"][-800:]
        found.setdefault(repr(entry), {**entry, "ranks": [], "log": log})["ranks"].append(rank["rank"])
    return list(found.values())[:4]


def _ended(rank: Rank) -> str:
    record = rank["record"] or NO_RECORD
    how = "finished" if record["done"] else "did not finish"
    if rank["terminated_by"] != "self":
        how = f"ended by the {rank['terminated_by']}"
    elif rank["signal"]:
        how = f"died of {rank['signal']}"
    elif rank["exit_code"]:
        how = f"exit code {rank['exit_code']}"
    return f"{how} in {record['phase']}" if record["phase"] and not record["done"] else how


def _stacks(ranks: Sequence[Rank]) -> dict[str, list[str]]:
    """Return the main thread of each rank whose stack was recorded."""
    threads = {str(rank["rank"]): parse_threads((rank["stack"] or "")[:200_000]) for rank in ranks[:16]}
    return {rank: list(found[0].lines[:60][::-1]) for rank, found in threads.items() if found}


def error_at(attempts: Iterable[Made]) -> str | None:
    """Return ``file:line`` of the innermost frame of the failure that came first, in the first attempt that has one."""
    for attempt in attempts:
        primary = attempt["outcome"]["primary"]
        for rank in attempt["observation"]["ranks"] if primary else ():
            raised = (rank["record"] or NO_RECORD)["exception"]
            if primary and rank["rank"] == primary["rank"] and raised and raised["frames"]:
                frame = raised["frames"][-1]
                return f"{frame['file']}:{frame['line']}" if frame["line"] is not None else frame["file"]
    return None


# What failed, as text that can be compared between runs

TEXT = 160  # characters
# What differs from run to run in the same message: addresses in memory and on the network, folders, temporary names.
_VARYING = (
    (re.compile(r"0x[0-9a-fA-F]+"), "0x…"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}:\d+"), "host:port"),
    (re.compile(r"(?<![\w.])(?:/[\w.@+~-]+)+/(?=[\w.@+~-])"), "…/"),
    (re.compile(r"(?<=\w[-_])\d{3,}\b|(?<=\btmp)[a-z0-9_]{6,}"), "…"),
)


def comparable_text(message: str) -> str:
    """Return a message's first line without what differs from run to run."""
    line = next((line.strip() for line in message.splitlines() if line.strip()), "")
    for pattern, instead in _VARYING:
        line = pattern.sub(instead, line)
    return line if len(line) <= TEXT else line[: TEXT - 1] + "…"


def failure_text(case: str, outcomes: Sequence[StoredOutcome]) -> str:
    """Return the known failure's text where an attempt reproduced it, else a hang's, else the most frequent one."""
    for name in ("reproduced", "hang", "other_failure"):
        texts = Counter(_message(case, each) for each in outcomes if each["outcome"] == name)
        if texts:
            return texts.most_common(1)[0][0]
    return ""


def _message(case: str, outcome: StoredOutcome) -> str:
    """Return a failure's message, with its type where it was an exception of the rank that the outcome names."""
    known = next((item for item in outcome["recognized"] if item["case"] == case), None)
    primary = outcome["primary"]
    message = (known["message"] if known else "") or (primary["message"] if primary else "") or outcome["reason"]
    # The message's size may depend on the rank, and which rank was first is chance.
    same = primary is not None and (known is None or primary["rank"] in known["ranks"])
    if primary and same and primary.get("kind", "exception") == "exception":
        message = f"{primary['type']}: {message.removeprefix(primary['type'] + ': ')}"
    return comparable_text(message)
