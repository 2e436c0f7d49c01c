"""The summary of a results folder: one row per variant of a cell, with everything that a report or a comparison shows.

A run writes ``summary.jsonl`` beside its evidence, a line per row. ``load_rows`` reads it. A row is fresh while its
evidence, the code of the grader and the definition of its case are those that it was made from; all other cells are
graded again from their evidence. What is expected is compared on every read: it needs no evidence.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import zstandard
from pydantic import ConfigDict, TypeAdapter, ValidationError

from repro_matrix.config import catalog, project
from repro_matrix.config.schema import Case
from repro_matrix.files import write_bytes
from repro_matrix.grading import checks, verdict
from repro_matrix.grading.expectations import comparison as compare_with_expectation
from repro_matrix.grading.observation import NO_RECORD, number, parse_threads
from repro_matrix.grading.regrade import outcomes_of, verdicts_of, with_outcomes
from repro_matrix.grading.root_cause import failure_ids
from repro_matrix.paths import PACKAGE
from repro_matrix.records.attempt import Observation, Rank
from repro_matrix.records.document import Document, DocumentPath, Made, Variant
from repro_matrix.records.outcome import FailureId, Outcome, StoredOutcome
from repro_matrix.results.rows import error_at, words_of
from repro_matrix.results.store import SUMMARY, document_at, listed

FILE = SUMMARY
COMPRESSED = f"{FILE}.zst"  # of the baseline
LOG, MESSAGE, FRAMES = 800, 600, 6  # characters of a log and of a message, and innermost frames, that a row keeps
MOST_ERRORS, MOST_CHECKS, MOST_STACKS, MOST_FRAMES = 4, 24, 16, 60
# The parts of a variant's settings that make it another measurement (grading/comparability.py); ``device`` and
# ``backend`` are left out, since a comparison of two machines is about those.
PLAIN_SETTINGS = ("world_size", "tp_size", "steps", "seed")


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
    cpu: str
    cores: int
    memory_gb: float
    driver: str | None
    os: str


@dataclass(frozen=True)
class Change:
    """A setting that a variant changes against ``broken``; None: that side has no such setting."""

    setting: str  # flags.call, strategy, world_size ...
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Attempt:
    """``failures``: failure ids as text, or "hang". ``metrics``: of the script, the greatest of all ranks."""

    outcome: str
    reason: str
    failures: tuple[str, ...]
    infra_error: str | None  # the kind of an attempt that is no evidence
    outcome_without_warning: str | None  # its outcome without a failure that is only a remark in a log
    finished: bool  # every rank completed its script
    again: bool  # this attempt repeats one that was no evidence
    started: float
    ended: float
    wall_s: float
    cpu_s: float | None
    rank_cpu_s: float | None
    peak_rss_mb: float | None
    peak_gpu_mb: float | None
    launcher: str
    run: str  # attempts of one run share it
    gpus: tuple[str, ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Check:
    """One check over the ranks of the attempt that the row shows; ``state``: passed, failed or void."""

    name: str
    state: str
    actual: Any
    expected: Any
    tolerance: Any
    subject: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RankError:
    """What ended ranks that failed in the same way. ``frames`` and ``stack`` are shortened; texts are as written."""

    ranks: tuple[int, ...]
    ended: str  # "exit code 1", "died of SIGSEGV in train", "finished" ...
    type: str
    message: str
    frames: tuple[str, ...]
    log: str  # the end of the first such rank's log


@dataclass(frozen=True)
class Row:
    """One variant of one cell. Text from ranks is not sanitized: do that where it is shown.

    ``state`` is None for a variant without a verdict (``broken``); ``attempts`` is empty for a skipped variant.
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
    axes: tuple[str, ...]  # the same as arguments of a command line, without the case
    stack: Stack
    hardware: Hardware
    complete: bool
    started: float
    ended: float | None
    commit: str | None
    dirty: bool
    run_command: str
    launcher: str

    variant: str
    help: str
    variants: int  # of the cell: a summary that was cut off has fewer rows
    first: bool  # the variant that the others are compared with: ``broken`` or ``control``
    changes: tuple[Change, ...]
    own_stack: str | None  # the stack of a variant that names one
    settings: Mapping[str, Any]  # model, flags, strategy and plain values: what makes two measurements comparable
    fingerprint: str
    skipped: str | None
    skip_kind: str | None
    skip_needs: tuple[str, ...]
    torchrun: str | None

    failure_text: str  # what failed, without what differs from run to run; "" where nothing did
    verdict: str | None
    measured: bool  # an attempt counts; of a variant without a verdict: there is an attempt that is evidence
    no_evidence: bool  # what was launched is no evidence
    unseen: bool
    named_case: str | None
    interval: tuple[float, float] | None  # 95 % Wilson interval of the share of clean attempts
    failures: tuple[FailureId, ...]  # of the verdict
    reason: str
    state: str | None  # expected, unexpected, unset, as predicted, differs from cpu, muted
    expected_verdict: str | None
    note: str  # another failure than the expected one, or that it is not written down
    quarantine: str | None  # owner, date and reason, where the state is muted

    attempts: tuple[Attempt, ...]
    checks: tuple[Check, ...]
    errors: tuple[RankError, ...]
    hang_reason: str
    stacks: Mapping[str, tuple[str, ...]]  # of a hang: rank -> its main thread's frames, outermost first
    error_at: str | None  # file:line of the failure that came first

    evidence: str  # path relative to the results folder, with ":line" in a file of several
    evidence_size: int
    evidence_mtime_ns: int
    evidence_hash: str
    grader_hash: str
    case_hash: str  # "": a case that the catalogue does not have, whose grading is taken as stored

    @property
    def counts(self) -> Counter[str]:
        """Outcome -> number of attempts."""
        return Counter(attempt.outcome for attempt in self.attempts)

    @property
    def evidence_attempts(self) -> tuple[Attempt, ...]:
        """The attempts that count."""
        return tuple(attempt for attempt in self.attempts if attempt.outcome not in verdict.NO_EVIDENCE)

    @property
    def outcome(self) -> str:
        """``reproduces`` where all attempts agree, else ``reproduces 2/3, clean 1/3``; ``skipped``."""
        counts, n = self.counts, len(self.attempts)
        if len(counts) <= 1:
            return next(iter(counts), "skipped")
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{name} {k}/{n}" for name, k in ordered)

    @property
    def wall_s(self) -> float | None:
        """Median seconds of an attempt."""
        return statistics.median(attempt.wall_s for attempt in self.attempts) if self.attempts else None

    @property
    def peak_mb(self) -> float | None:
        """Median of the fullest rank's peak in MiB: of its GPU where it used one, else of its process."""
        peaks = [peak for each in self.evidence_attempts if (peak := each.peak_gpu_mb or each.peak_rss_mb)]
        return statistics.median(peaks) if peaks else None

    @property
    def command(self) -> tuple[str, ...]:
        """The arguments that measure this variant again."""
        stack = () if self.stack.name == "current" else (f"stack={self.stack.name}",)
        return ("repro", "run", self.case, *self.axes, *stack, f"variants={self.variant}")


_FORBID = ConfigDict(extra="forbid")
for _type in (Stack, Hardware, Change, Attempt, Check, RankError, Row):
    setattr(_type, "__pydantic_config__", _FORBID)  # noqa: B010 - which mypy knows nothing of


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[Row]:
    return TypeAdapter(Row)


def to_json(row: Row) -> bytes:
    return _adapter().dump_json(row)


def from_json(line: bytes | str) -> Row:
    """Raise ValueError naming the first wrong key."""
    try:
        return _adapter().validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'row'}: {first['msg']}") from None


# Reading and writing


def load_rows(
    folder: Path, cases: Mapping[str, Case] | None = None, notes: list[str] | None = None, write: bool = False
) -> list[Row]:
    """Return the rows of a results folder, cell by cell in the order of their evidence.

    Cells without a fresh row are graded from their evidence; damaged evidence is named in ``notes`` and left out.
    ``write``: store what was computed, where the folder can be written. Raises OSError.
    """
    cases = catalog.load().cases if cases is None else cases
    notes = [] if notes is None else notes
    stored = _stored(folder, notes)
    current = _Current(folder, cases)
    fresh: dict[str, list[Row]] = {}
    stale: list[str] = []
    for file, state in _files(folder):
        rows = stored.pop(file, {})
        whole = rows and current.is_content(next(iter(rows.values()))[0], state)
        paths_of = list(rows) if whole else [os.path.relpath(each.path, folder) for each in listed(folder / file)]
        for path in paths_of:
            if whole and current.is_grading(rows[path]):
                fresh[path] = rows[path]
            else:
                stale.append(path)
    if stale:
        fresh |= grade_cells(folder, stale, cases, [row for rows in fresh.values() for row in rows], notes)
    order = sorted(fresh, key=lambda path: ((place := DocumentPath.parse(path)).file.split("/"), place.line or 0))
    found = [compared(row, cases) for path in order for row in fresh[path]]
    if write and (stale or stored):
        with suppress(OSError):
            write_rows(folder, found)
    return found


def _files(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The files of evidence below a folder, each once, relative to it."""
    for found in listed(folder, lines=False):
        yield os.path.relpath(found.path, folder), found.state


def write_rows(folder: Path, rows: Iterable[Row], name: str = FILE) -> None:
    """Replace the summary in one step."""
    text = b"".join(to_json(row) + b"\n" for row in rows)
    write_bytes(folder / name, zstandard.compress(text, 19) if name.endswith(".zst") else text)


def rewrite(folder: Path, cases: Mapping[str, Case]) -> None:
    """Write the whole summary of a run that has ended, without the rows that were replaced while it ran."""
    with suppress(OSError):
        if (folder / FILE).exists():
            write_rows(folder, load_rows(folder, cases))


def write_baseline(root: Path, cases: Mapping[str, Case]) -> None:
    """Write the summaries of a baseline, one for each hardware. A file's time says nothing in a checkout: it is 0."""
    by_hardware: dict[str, list[Row]] = defaultdict(list)
    if not root.is_dir():
        return
    for row in load_rows(root, cases):
        by_hardware[row.evidence.split("/")[0]].append(replace(row, evidence_mtime_ns=0))
    for path in root.glob(f"*/{COMPRESSED}"):
        if path.parent.name not in by_hardware:
            path.unlink()
    for hardware, rows in sorted(by_hardware.items()):
        write_rows(root / hardware, rows, COMPRESSED)


def append_rows(folder: Path, rows: Iterable[Row]) -> None:
    """Add the rows of a cell as it completes. A line that is cut off is computed again by the next reader."""
    with open(folder / FILE, "a+b") as out:
        whole = out.tell() == 0 or (out.seek(-1, os.SEEK_END) >= 0 and out.read(1) == b"\n")
        out.write((b"" if whole else b"\n") + b"".join(to_json(row) + b"\n" for row in rows))


def append_cell(folder: Path, path: Path, document: Document, cases: Mapping[str, Case]) -> None:
    """Add the rows of a graded document that was just stored at ``path``. The summary is derived: a folder that cannot
    be written costs time, and nothing else."""
    with suppress(OSError):
        content, state = path.read_bytes(), path.stat()
        case = cases.get(document["case"])
        relative = os.path.relpath(path, folder)
        append_rows(folder, rows_of(document, case, cases, relative, state, evidence_hash(content)))


def stored_rows(folder: Path, notes: list[str]) -> dict[tuple[str, str], Row]:
    """(evidence, variant) -> the row as it is stored, whether or not it is fresh."""
    cells = [rows for file in _stored(folder, notes).values() for rows in file.values()]
    return {(row.evidence, row.variant): row for rows in cells for row in rows}


def _stored(folder: Path, notes: list[str]) -> dict[str, dict[str, list[Row]]]:
    """File -> evidence -> its rows. The last rows of a cell win; a line that cannot be read is one that is missing."""
    found: dict[str, dict[str, list[Row]]] = defaultdict(dict)
    for path in (folder / FILE, folder / COMPRESSED, *sorted(folder.glob(f"*/{COMPRESSED}"))):
        if not path.is_file():
            continue
        try:
            content = path.read_bytes()
            if path.suffix == ".zst":
                content = zstandard.ZstdDecompressor().decompressobj().decompress(content)
        except (OSError, zstandard.ZstdError) as error:
            notes.append(f"{path}: cannot be read: {error}. Its rows are computed from their evidence.")
            continue
        for line in content.split(b"\n"):
            with suppress(ValueError):
                if line:
                    row = from_json(line)
                    cells = found[DocumentPath.parse(row.evidence).file]
                    if row.first:
                        cells[row.evidence] = []
                    if row.evidence in cells:
                        cells[row.evidence].append(row)
    return dict(found)


class _Current:
    """Tells whether stored rows are still what their evidence, the grader and the case say."""

    def __init__(self, folder: Path, cases: Mapping[str, Case]) -> None:
        self.folder, self.cases = folder, cases
        self._case_hashes: dict[str, str] = {}

    def is_content(self, row: Row, state: tuple[int, ...]) -> bool:
        if row.evidence_size != state[2]:
            return False
        if row.evidence_mtime_ns == state[0]:
            return True
        try:  # a copy, or a checkout
            content = (self.folder / DocumentPath.parse(row.evidence).file).read_bytes()
            return row.evidence_hash == evidence_hash(content)
        except OSError:
            return False

    def is_grading(self, rows: Sequence[Row]) -> bool:
        row = rows[0]
        if row.case not in self._case_hashes:
            self._case_hashes[row.case] = case_hash(row.case, self.cases)
        return (row.grader_hash, row.case_hash, len(rows)) == (
            grader_hash(), self._case_hashes[row.case], row.variants,
        )  # fmt: skip


def evidence_hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()


@lru_cache(maxsize=1)
def grader_hash() -> str:
    """Return the hash of the code that rows are computed by."""
    digest = hashlib.blake2b(digest_size=12)
    files = [*(PACKAGE / "grading").rglob("*"), *(PACKAGE / "records").glob("*.py"), Path(__file__)]
    for path in sorted(path for path in files if path.suffix in (".py", ".txt")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def case_hash(slug: str, cases: Mapping[str, Case]) -> str:
    """Return the hash of a case's definition and of all signatures: other cases' failures are recognised, too."""
    if slug not in cases:
        return ""
    own = cases[slug].model_dump_json(exclude={"expect", "claims", "title", "summary", "references"})
    return evidence_hash(own.encode() + _signatures(cases))


def _signatures(cases: Mapping[str, Case]) -> bytes:
    found = _SIGNATURES.get(id(cases))
    if found is None or found[0] is not cases:
        text = "".join(slug + "".join(s.model_dump_json() for s in cases[slug].signatures) for slug in sorted(cases))
        _SIGNATURES.clear()
        found = _SIGNATURES[id(cases)] = (cases, hashlib.blake2b(text.encode()).digest())
    return found[1]


_SIGNATURES: dict[int, tuple[Mapping[str, Case], bytes]] = {}


# From evidence


def grade_cells(
    folder: Path,
    evidence: Iterable[str],
    cases: Mapping[str, Case],
    known: Iterable[Row] = (),
    notes: list[str] | None = None,
) -> dict[str, list[Row]]:
    """Grade cells from their evidence: path -> rows. ``known``: fresh rows, whose measurements on other stacks tell a
    failure that was fixed upstream from one that was never reproduced."""
    graded: dict[str, list[Document]] = defaultdict(list)  # cell id -> documents
    where: list[tuple[str, Document]] = []
    for path in evidence:
        try:
            document = document_at(str(folder / path))
        except (OSError, ValueError) as error:
            if notes is not None:
                notes.append(f"{folder / path}: damaged: {error}. The cell is left out.")
            continue
        case = cases.get(document["case"])
        if case is not None:
            document = with_outcomes(document, outcomes_of(document, case, cases))
        where.append((path, document))
        graded[document.get("cell_id", "")].append(document)
    history = past_measurements(known)
    if where and folder.resolve() not in {root.resolve() for root in project.published()}:
        slugs = {document["case"] for _, document in where}
        for root in project.published():
            if root.is_dir():
                past = past_measurements(row for row in load_rows(root, cases) if row.case in slugs)
                history = {key: [*history.get(key, ()), *past.get(key, ())] for key in history.keys() | past.keys()}
    found = {}
    states: dict[str, tuple[os.stat_result, str]] = {}
    for path, document in where:
        case, key = cases.get(document["case"]), document.get("cell_id", "")
        if case is not None:
            older = [other for other in (*graded[key], *history.get(key, ())) if _on_other_stack(other, document)]
            document["verdicts"] = verdicts_of(document, case, older)
        file = DocumentPath.parse(path).file
        if file not in states:
            states[file] = os.stat(folder / file), evidence_hash((folder / file).read_bytes())
        found[path] = rows_of(document, case, cases, path, *states[file])
    return found


def past_measurements(rows: Iterable[Row]) -> dict[str, list[Document]]:
    """Cell id -> what ``verdict.judge`` asks of measurements on other stacks."""
    found: dict[str, list[Document]] = defaultdict(list)
    for row in rows:
        if row.variant != "unfixed":
            continue
        stack, hardware = row.stack, row.hardware
        past: Any = {
            "stack": {"name": stack.name, "versions": stack.versions, "changed": list(stack.changed)},
            "hardware": {"accelerator": hardware.accelerator, "capabilities": hardware.capabilities},
            "variants": {"unfixed": {"settings": {**row.settings, **row.settings.get("plain", {})},
                                "attempts": [{"outcome": {"outcome": one.outcome}} for one in row.attempts]}},
        }  # fmt: skip
        found[row.cell_id].append(past)
    return found


def _on_other_stack(other: Document, document: Document) -> bool:
    same_machine = other["hardware"]["accelerator"] == document["hardware"]["accelerator"]
    return same_machine and other["stack"]["versions"] != document["stack"]["versions"]


def rows_of(
    document: Document,
    case: Case | None,
    cases: Mapping[str, Case],
    evidence: str = "",
    state: os.stat_result | None = None,
    content_hash: str = "",
) -> list[Row]:
    """Return a row per variant of a graded document, ``broken`` first."""
    stack, hardware, made = document["stack"], document["hardware"], document["provenance"]
    first = next(iter(document["variants"].values()))
    base = flatten(first["settings"])
    cell: dict[str, Any] = {
        "cell_id": document.get("cell_id") or document["case"],
        "case": document["case"],
        "title": document["title"],
        "kind": document["kind"],
        "references": tuple(document["references"]),
        "simulated": document["simulated"],
        "model": document["model"],
        "strategy": document["strategy"],
        "flags": document["flags"],
        "ranks": document["ranks"],
        "overrides": tuple(document["overrides"]),
        "scale": document["scale"],
        "weights": document["weights"],
        "params": document.get("params") or f"{document['model']}/{document['strategy']}",
        "axes": words_of(document),
        "stack": Stack(stack.get("label", ""), stack["name"], stack["versions"], tuple(stack.get("changed", ()))),
        "hardware": Hardware(
            hardware["profile"],
            hardware["accelerator"],
            tuple(gpu["name"] for gpu in hardware["gpus"]),
            hardware.get("capabilities", {}),
            hardware["cpu"],
            hardware["cores"],
            hardware["memory_gb"],
            hardware["driver"],
            hardware["os"],
        ),
        "complete": document["complete"],
        "variants": len(document["variants"]),
        "started": made["started"],
        "ended": made["ended"],
        "commit": made["git_commit"],
        "dirty": made["git_dirty"],
        "run_command": made["command"],
        "launcher": made["launcher"],
        "evidence": evidence,
        "evidence_size": state.st_size if state else 0,
        "evidence_mtime_ns": state.st_mtime_ns if state else 0,
        "evidence_hash": content_hash,
        "grader_hash": grader_hash(),
        "case_hash": case_hash(document["case"], cases),
    }
    rows = [
        Row(**cell, **_variant(document, name, variant, base, case), first=variant is first)
        for name, variant in document["variants"].items()
    ]
    return [compared(row, cases) for row in rows]


def _variant(
    document: Document, name: str, variant: Variant, base: Mapping[str, Any], case: Case | None
) -> dict[str, Any]:
    graded: Mapping[str, Any] = document["verdicts"].get(name) or {}
    attempts = tuple(_attempt(document["case"], each) for each in variant["attempts"])
    failed = next((each for each in variant["attempts"] if each["outcome"]["outcome"] != "passed"), None)
    shown = failed or (variant["attempts"][0] if variant["attempts"] else None)
    seen = shown["observation"] if shown else None
    skip = variant.get("skip")
    hung = shown is not None and (shown["outcome"]["outcome"] == "hang" or shown["observation"]["attempt"]["timed_out"])
    known = case.variants.get(name) if case else None
    own_stack = variant.get("stack")
    changes = () if base is None or name == "unfixed" else differing(base, flatten(variant["settings"]))
    if own_stack and own_stack != document["stack"]["name"]:
        changes = (*changes, Change("stack", document["stack"]["name"], own_stack))
    evidence = any(each.outcome not in verdict.NO_EVIDENCE for each in attempts)
    return {
        "variant": name,
        "help": known.help if known else "",
        "changes": changes,
        "own_stack": own_stack if own_stack != document["stack"]["name"] else None,
        "settings": _comparable(variant["settings"]),
        "fingerprint": variant.get("fingerprint", ""),
        "skipped": variant["skipped"],
        "skip_kind": skip["kind"] if skip else None,
        "skip_needs": tuple(skip["requires"]) if skip else (),
        "torchrun": next((each["observation"]["attempt"].get("torchrun") for each in variant["attempts"]), None),
        "failure_text": failure_text(document["case"], [each["outcome"] for each in variant["attempts"]]),
        "verdict": graded.get("name"),
        "measured": graded.get("measured", evidence),
        "no_evidence": bool(graded.get("infra_error")) or (bool(attempts) and not evidence),
        "unseen": bool(graded.get("unseen")),
        "named_case": graded.get("named_case"),
        "interval": tuple(graded["interval"]) if graded.get("interval") else None,
        "failures": tuple(FailureId(**each) for each in graded.get("failure_ids", ())),
        "reason": variant["skipped"] or graded.get("reason") or (attempts[0].reason if attempts else ""),
        "state": graded.get("expected", "no_expectation") if graded else None,
        "expected_verdict": graded.get("expectation"),
        "note": graded.get("failure_note", ""),
        "quarantine": None,
        "attempts": attempts,
        "checks": tuple(_checks(seen["ranks"])) if seen else (),
        "errors": tuple(_errors(seen["ranks"])) if seen and failed else (),
        "hang_reason": _hang_reason(seen) if hung and seen else "",
        "stacks": _stacks(seen["ranks"]) if hung and seen else {},
        "error_at": error_at(variant["attempts"]),
    }


def compared(row: Row, cases: Mapping[str, Case]) -> Row:
    """Return the row with how its verdict compares with what is expected now."""
    case = cases.get(row.case)
    if row.verdict is None or case is None:
        return row
    graded = verdict.Verdict(cast(Any, row.verdict), row.reason, measured=row.measured, failure_ids=row.failures)
    more = compare_with_expectation(
        case, row.params, row.variant, graded, row.stack.versions, row.hardware.profile, row.hardware.capabilities
    )
    now = more["expected"], more["expectation"], more["failure_note"]
    if now == (row.state, row.expected_verdict, row.note) and row.quarantine is None:
        return row
    return replace(row, state=now[0], expected_verdict=now[1], note=now[2], quarantine=None)


def _attempt(case: str, made: Made) -> Attempt:
    outcome, observation = made["outcome"], made["observation"]
    launched = observation["attempt"]
    records = [rank["record"] for rank in observation["ranks"]]
    written = [record for record in records if record]

    def greatest(name: str) -> float | None:
        return max((value for each in written if (value := number(each.get(name))) is not None), default=None)

    metrics: dict[str, float] = {}
    for record in written:
        for name, value in record["metrics"].items():
            if (measured := number(value)) is not None:
                metrics[name] = max(measured, metrics.get(name, measured))
    failures = [str(each) for each in failure_ids(case, Outcome.from_json(outcome))]
    return Attempt(
        outcome=outcome["outcome"],
        reason=outcome["reason"],
        failures=tuple(failures) or (("hang",) if outcome["outcome"] == "hang" else ()),
        infra_error=outcome.get("infra_error"),
        outcome_without_warning=outcome.get("outcome_without_warning"),
        finished=bool(records) and all(record is not None and record["done"] for record in records),
        again=bool(launched.get("retry_of")),
        started=launched["started"],
        ended=launched["ended"],
        wall_s=launched["wall_s"],
        cpu_s=launched["cpu_s"],
        rank_cpu_s=greatest("cpu_s"),
        peak_rss_mb=greatest("peak_rss_mb"),
        peak_gpu_mb=greatest("peak_gpu_mb"),
        launcher=launched["launcher"],
        run=launched["id"].rpartition("-")[0],
        gpus=tuple(launched.get("gpus", ())),
        metrics=metrics,
    )


def _checks(ranks: Sequence[Rank]) -> Iterator[Check]:
    """Checks that failed first; ranks with the same numbers are one entry."""
    found: dict[str, tuple[Check, list[int]]] = {}
    for rank in ranks:
        record = rank["record"] or NO_RECORD
        for check in record["checks"]:
            state = checks.evaluate(check, number(record.get("done_at"))).state
            one = Check(
                check["name"], state, _short(check.get("actual")), _short(check.get("expected")),
                _short(check.get("tolerance")), str(check.get("subject") or "")[:200], (),
            )  # fmt: skip
            found.setdefault(repr(one), (one, []))[1].append(rank["rank"])
    ordered = sorted(found.values(), key=lambda item: item[0].state == "passed")
    for one, which in ordered[:MOST_CHECKS]:
        yield replace(one, ranks=tuple(which))


def _short(value: Any) -> Any:
    """A number as it is; of lists the first values; of texts the beginning."""
    if isinstance(value, list):
        return [_short(item) for item in value[:4]] + (["..."] if len(value) > 4 else [])
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return (value if isinstance(value, str) else json.dumps(value, default=str))[:200]


def _errors(ranks: Sequence[Rank]) -> Iterator[RankError]:
    """The error of every rank; ranks with the same error are one entry."""
    found: dict[tuple[str, str, str, tuple[str, ...]], list[Rank]] = {}
    for rank in ranks:
        error = (rank["record"] or NO_RECORD)["exception"]
        ended = _ended(rank)
        if not error and ended == "finished":
            continue
        frames = []
        for frame in error["frames"][-FRAMES:] if error else ():
            place = ".".join(filter(None, (frame["module"], frame["function"])))
            frames.append(f"{place}:{frame['line']}" + (f"  {frame['code'][:160]}" if frame.get("code") else ""))
        key = (ended, error["type"] if error else "", error["message"][:MESSAGE] if error else "", tuple(frames))
        found.setdefault(key, []).append(rank)
    for (ended, type_, message, lines), members in list(found.items())[:MOST_ERRORS]:
        log = next((rank["log_tail"] for rank in members if rank["log_tail"]), "")[-LOG:]
        yield RankError(tuple(rank["rank"] for rank in members), ended, type_, message, lines, log)


def _ended(rank: Rank) -> str:
    record = rank["record"] or NO_RECORD
    phase = f" in {record['phase']}" if record["phase"] and not record["done"] else ""
    if rank["terminated_by"] != "self":
        return f"ended by the {rank['terminated_by']}{phase}"
    if rank["signal"]:
        return f"died of {rank['signal']}{phase}"
    if rank["exit_code"] not in (0, None):
        return f"exit code {rank['exit_code']}{phase}"
    return "finished" if record["done"] else f"did not finish{phase}"


def _hang_reason(observation: Observation) -> str:
    hang = observation["attempt"].get("hang")
    if not hang:
        return ""
    limit = number(hang["limit_s"])
    return hang["deadlock"] or (f"still running after {limit:.0f} s" if limit else "")


def _stacks(ranks: Sequence[Rank]) -> dict[str, tuple[str, ...]]:
    found = {}
    for rank in [rank for rank in ranks if rank["stack"]][:MOST_STACKS]:
        threads = parse_threads((rank["stack"] or "")[:200_000])
        if threads:
            found[str(rank["rank"])] = tuple(threads[0].lines[:MOST_FRAMES][::-1])
    return found


# What failed, as text that can be compared between runs

TEXT = 160
# What differs from run to run in the same message: addresses in memory and on the network, folders, temporary names.
_VARYING = (
    (re.compile(r"0x[0-9a-fA-F]+"), "0x…"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}:\d+"), "host:port"),
    (re.compile(r"(?<![\w.])(?:/[\w.@+~-]+)+/(?=[\w.@+~-])"), "…/"),
    (re.compile(r"(?<=\w[-_])\d{3,}\b|(?<=\btmp)[a-z0-9_]{6,}"), "…"),
)
_SET = re.compile(r"\{('[^'{}]*'(?:, '[^'{}]*')+)\}")  # printed in an order that differs from process to process


def comparable_text(message: str) -> str:
    """Return a message's first line without what differs from run to run."""
    line = next((line.strip() for line in message.splitlines() if line.strip()), "")
    for pattern, instead in _VARYING:
        line = pattern.sub(instead, line)
    line = _SET.sub(lambda found: "{" + ", ".join(sorted(found[1].split(", "))) + "}", line)
    return line if len(line) <= TEXT else line[: TEXT - 1] + "…"


def failure_text(case: str, outcomes: Sequence[StoredOutcome]) -> str:
    """Return the known failure's text where an attempt reproduced it, else the most frequent other failure's."""
    fired = next((outcome for outcome in outcomes if outcome["outcome"] == "reproduced"), None)
    if fired is not None:
        return _known_failure_text(case, fired)
    hung = next((outcome for outcome in outcomes if outcome["outcome"] == "hang"), None)
    if hung is not None:
        return comparable_text(f"hang: {hung['reason']}")
    others = Counter(_other_failure_text(case, each) for each in outcomes if each["outcome"] == "other_failure")
    return others.most_common(1)[0][0] if others else ""


def _known_failure_text(case: str, outcome: StoredOutcome) -> str:
    known = next((each for each in outcome["recognized"] if each["case"] == case), None)
    primary = outcome["primary"]
    message = (known["message"] if known else "") or (primary["message"] if primary else "") or outcome["reason"]
    # Ranks report it with sizes of their own, and which of them was first is chance.
    same = primary and (primary["message"][:TEXT] == message[:TEXT] or (known and primary["rank"] in known["ranks"]))
    if primary and same and not message.startswith(f"{primary['type']}: "):
        message = f"{primary['type']}: {message}"
    return comparable_text(message)


def _other_failure_text(case: str, outcome: StoredOutcome) -> str:
    others = [each for each in outcome["recognized"] if each["case"] != case and each["kind"] != "log"]
    known = f" [{others[0]['case']}]" if others else ""
    primary = outcome["primary"]
    if primary is None:  # a check failed; its value differs from run to run, and which ranks failed it may
        check = outcome.get("check")
        return (f"silent: check {check} failed" if check else comparable_text(outcome["reason"])) + known
    # A signal or an exit code has no message: there it is the last line of the log.
    message = comparable_text(primary["message"]) if primary.get("kind", "exception") == "exception" else ""
    return (f"{primary['type']}: {message}" if message else primary["type"]) + known


# What a variant changes


def _comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    if not settings:
        return {}
    model, strategy = settings.get("model") or {}, settings.get("strategy") or {}
    return {
        "model": {key: model.get(key) for key in ("slug", "scale", "weights", "config")},
        "flags": settings.get("flags"),
        "strategy": {key: strategy.get(key) for key in ("slug", "options")},
        "plain": {key: settings[key] for key in PLAIN_SETTINGS if key in settings},
    }


def flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by their dotted names, without what names a variant or says how it is graded."""
    found: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                add(f"{name}.{key}", inner)
        else:
            found[name] = value

    for key, value in settings.items():
        if key not in ("variant", "case", "pass_criteria"):
            add(key, value)
    return found


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[Change, ...]:
    """Settings that differ. Of another model or strategy only the name and the options are listed."""
    for group in ("model", "strategy"):
        if one.get(f"{group}.slug") != other.get(f"{group}.slug"):
            kept = (f"{group}.slug", "strategy.options.")
            one, other = (
                {key: value for key, value in side.items() if not key.startswith(f"{group}.") or key.startswith(kept)}
                for side in (one, other)
            )
    changes = []
    for key in dict.fromkeys((*one, *other)):
        if (key in one) == (key in other) and one.get(key) == other.get(key):
            continue
        before, after = (_text(side[key]) if key in side else None for side in (one, other))
        if before != after:
            changes.append(Change(key.replace("strategy.options.", "options.").replace(".slug", ""), before, after))
    return tuple(changes)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
