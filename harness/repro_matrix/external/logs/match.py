"""What a log shows -> which known failures it is, by the very signatures that judge an attempt of ours. Pure.

Every error becomes what a rank of ours would have recorded, in the order of the log, so that harness/judge decides what
matches (signature.py) and which errors only follow from another rank's (peers.py). A signature is *recognised* where
all that it asks for is in the log. It *may be* where nothing in the log contradicts and something is missing: what was
cut off, or the way to tell it from another cause (a signature's ``elsewhere``; two cases that show the same). Numbers
that are wrong without an error are in no log.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from repro_matrix.config.expectations import Expectation
from repro_matrix.config.schema import AmbiguousWith, Case, Signature
from repro_matrix.external.logs.scan import Note, Scanned
from repro_matrix.external.logs.tracebacks import Error
from repro_matrix.grading.observation import NO_RECORD, Attempt, Rank, module_names
from repro_matrix.grading.root_cause import Failures, find_failures, is_peer_error
from repro_matrix.grading.signature import match_attempt
from repro_matrix.records.observation import Attempt as AttemptLeft
from repro_matrix.records.observation import Rank as RankLeft
from repro_matrix.records.rank import Exception_, Frame, Record

# Errors of launchers and drivers, that only say that some process of theirs failed.
_LAUNCHERS = re.compile(
    r"(?:[\w.]+\.)?(ChildFailedError|CalledProcessError|ProcessRaisedException|ProcessExitedException|RayTaskError(\(.*\))?"
    r"|RayActorError|ActorDiedError|WorkerCrashedError|TrainingFailedError|SignalException|TuneError|SystemExit)"
)
# What may stand before a warning's text: a logger's format.
_BEFORE = re.compile(
    r"\[[\w.]+\] |"  # transformers 5: the package
    r"[\[\](){}|:\w./ ,=<>-]{0,160}(?:WARN|WARNING|warning|Warning|\d) ?[\])|>]* ?[:|-]? ?"
    r"(?:[\w.]+:\d+ ?[-:|>]+ ?)?"
)
_ONLOOKER = re.compile(r"(^|/)repros/(kit/effects|repro_kit/instrumentation)\.py$")
# Bases of torch's own exceptions, which a log does not tell; of Python's they are looked up.
_BASES = {
    "OutOfMemoryError": ["RuntimeError"],
    "FakeTensorDeviceMismatchError": ["RuntimeError"],
    "AcceleratorError": ["RuntimeError"],
    "DistError": ["RuntimeError"],
    "DistBackendError": ["DistError", "RuntimeError"],
    "DistNetworkError": ["DistError", "RuntimeError"],
    "DistStoreError": ["DistError", "RuntimeError"],
}


@dataclass(frozen=True)
class Known:
    """A signature that an error (or a line) of the log shows. ``missing``: why it is no more than possible."""

    case: str
    signature: str
    line: int
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """One error of the log, with the known failures that it is, or may be."""

    error: Error
    where: str  # what raised it: module.function, with the file and line
    known: tuple[Known, ...] = ()
    perhaps: tuple[Known, ...] = ()
    echo: bool = False  # it only follows from another process's failure


@dataclass
class Answer:
    failures: list[Failure] = field(default_factory=list)  # the first cause first, echoes last
    remarks: list[Known] = field(default_factory=list)  # warnings that are a known failure's
    evidence: dict[int, str] = field(default_factory=dict)  # the lines of remarks

    @property
    def names(self) -> list[str]:
        """The cases that were recognised, the first cause's first."""
        every = [*(known for failure in self.failures for known in failure.known), *self.remarks]
        return list(dict.fromkeys(known.case for known in every))

    @property
    def causes(self) -> list[Failure]:
        return [failure for failure in self.failures if not failure.echo]


def recognise(seen: Scanned, catalogue: Catalogue) -> Answer:
    """What a log shows, in the catalogue's words."""
    launchers = [error for error in seen.errors if _LAUNCHERS.fullmatch(error.type)]
    own = [error for error in seen.errors if error not in launchers]
    attempt = _attempt(_rank(index, error) for index, error in enumerate(own))
    # An error that only a lost peer explains is an echo, also where the log does not hold what it echoes.
    primary = find_failures(attempt).ranks - {rank.rank for rank in attempt.ranks if _lost_peer(rank)}
    found = [
        _failure(error, catalogue, seen) if index in primary else Failure(error, where(error), echo=True)
        for index, error in enumerate(own)
    ]
    found += [Failure(error, where(error), echo=True) for error in launchers]
    # What was cut off before it said what it is comes after what is known.
    found.sort(key=lambda failure: (failure.echo, not failure.error.type, failure.error.line))
    answer = Answer(found)
    _remarks(answer, catalogue, seen)
    return answer


def _lost_peer(rank: Rank) -> bool:
    return rank.raised is not None and is_peer_error(rank.raised)


def _attempt(ranks: Iterable[RankLeft]) -> Attempt:
    """The attempt that a log is of, of which it says no more."""
    listed = list(ranks)
    about: AttemptLeft = {
        "id": "log", "launcher": "", "command": [], "backend": "", "world_size": 1, "started": 0.0, "ended": 0.0,
        "wall_s": 0.0, "cpu_s": None, "deadline_s": 1.0, "timed_out": False, "interrupted": False,
        "leaked_processes": [], "seed": 0, "settings": {},
    }  # fmt: skip
    return Attempt({"schema": 1, "attempt": about, "infra_error": None, "ranks": listed})


def _left(index: int, record: Record) -> RankLeft:
    return {
        "rank": index, "exit_code": None, "signal": None, "terminated_by": "self", "record": record, "log_tail": "",
        "stack": None,
    }  # fmt: skip


def _rank(index: int, error: Error) -> RankLeft:
    exception = completed(error.record) if error.record else None
    record: Record = {**NO_RECORD, "rank": index, "ended": float(error.line), "exception": exception}
    code = None if error.signal else 1
    return {**_left(index, record), "exit_code": code, "signal": error.signal or None, "stack": error.stack or None}


def completed(record: Mapping[str, Any]) -> Exception_:
    """An exception with the bases of its type; the kit's onlookers, which records leave out, are left out here."""
    kind = str(record.get("type", ""))
    python = getattr(builtins, kind, None)
    bases = _BASES.get(kind, [])
    if isinstance(python, type) and issubclass(python, BaseException):
        bases = [base.__name__ for base in python.__mro__[1:-1]]
    frames = [frame for frame in record.get("frames") or () if not _ONLOOKER.search(str(frame.get("file")))]
    cause = record.get("cause")
    inner = completed(cause) if isinstance(cause, Mapping) else None
    return {
        "type": kind, "module": str(record.get("module") or ""), "bases": bases,
        "message": str(record.get("message") or ""), "cause": inner,
        "frames": [_framed(frame) for frame in frames],
    }  # fmt: skip


def _framed(frame: Mapping[str, Any]) -> Frame:
    """A frame of a log, which may say less of it."""
    found: Frame = {
        "file": str(frame.get("file") or ""), "line": frame.get("line"), "function": str(frame.get("function") or ""),
        "module": str(frame.get("module") or ""),
    }  # fmt: skip
    if "code_location" in frame:
        found["code_location"] = str(frame["code_location"])
    return found


@dataclass(frozen=True)
class _Query:
    """A signature as a log can be asked for it: no log shows a rank that said nothing, and few name their backend."""

    case: Case
    signature: Signature
    backend: str
    unframed: Signature


class Catalogue:
    """The signatures that a log can show: numbers that are wrong without an error, and hangs, are in none."""

    def __init__(self, cases: Mapping[str, Case]) -> None:
        every = [(case, signature) for case in cases.values() for signature in case.signatures]
        self.remarks = [item for item in every if item[1].kind == "log"]
        self.failures = []
        for case, signature in every:
            if signature.kind in ("exception", "signal"):
                anywhere = signature.model_copy(update={"ranks": "any"})
                unframed = anywhere.model_copy(update={"frames": []})
                self.failures.append(_Query(case, anywhere, ",".join(signature.messages), unframed))


def _failure(error: Error, catalogue: Catalogue, seen: Scanned) -> Failure:
    known: list[Known] = []
    perhaps: list[Known] = []
    attempt = _attempt([_rank(0, error)])
    judged = find_failures(attempt)
    strategies = strategies_of(error)
    for asked in catalogue.failures:
        # The same words under another strategy have another cause (grading/grade.py says so as well).
        if strategies and not strategies & set(asked.case.axes.strategy):
            continue
        missing = _missing(asked, error, attempt, judged)
        if missing is None:
            continue
        ambiguous_with = asked.signature.ambiguous_with
        if asked.signature.kind == "signal":  # of an unknown script: any mistake can end in a crash
            missing = (*missing, "a crash at this place may have other causes")
        elif ambiguous_with and not _ruled_out(ambiguous_with, error, seen):
            missing = (*missing, f"it may as well be {ambiguous_with.cause}")
        item = Known(asked.case.slug, asked.signature.name, error.line, missing)
        (perhaps if missing else known).append(item)
    if len({item.case for item in known}) > 1:
        every = list(dict.fromkeys(item.case for item in known))
        perhaps[:0] = [
            replace(item, missing=tuple(f"{other} shows the same" for other in every if other != item.case))
            for item in known
        ]
        known = []
    return Failure(error, where(error), tuple(known), () if known else tuple(perhaps))


def _missing(asked: _Query, error: Error, attempt: Attempt, judged: Failures) -> tuple[str, ...] | None:
    """What the log does not show of a signature that it does not contradict: () where all is there, None where not."""
    signature, less = asked.signature, asked.unframed
    if match_attempt(signature, attempt, judged, asked.backend):
        return ("lines of several tracebacks stand among each other",) if error.mixed and signature.frames else ()
    if error.whole and not error.mixed:
        return None
    if signature.kind == "exception" and not error.places:
        framed = {
            **error.record,
            "frames": [{"file": "", "function": "", "code_location": f"{signature.package}.unknown"}],
        }
        bare = _attempt([_rank(0, replace(error, record=framed))])
        return ("its last line alone, no traceback",) if match_attempt(less, bare, judged, asked.backend) else None
    if signature.frames and match_attempt(less, attempt, judged, asked.backend):
        return ("the frames that would tell are cut off",)
    return None


_STRATEGIES = (
    (re.compile(r"torch/distributed/(_composable/fsdp|fsdp/_fully_shard)/"), {"fsdp2"}),
    (re.compile(r"torch/distributed/fsdp/"), {"fsdp"}),
    (re.compile(r"torch/nn/parallel/distributed\.py"), {"ddp"}),
    (re.compile(r"(^|/)deepspeed/(runtime|zero)/"), {"zero2", "zero3"}),
)


def strategies_of(error: Error) -> set[str]:
    """The strategies whose code is in a traceback; empty where none is."""
    found: set[str] = set()
    for place in error.places:
        found |= next((names for pattern, names in _STRATEGIES if pattern.search(str(place["file"]))), set())
    return found


def _ruled_out(ambiguous_with: AmbiguousWith, error: Error, seen: Scanned) -> bool:
    """Whether the error itself, or another line of the log, shows that the other cause is not what happened."""
    if ambiguous_with.ruled_out_by is None:
        return False
    own = [error.message, *(f"{place['file']} {place['function']} {place.get('code')}" for place in error.places)]
    return any(re.search(ambiguous_with.ruled_out_by, text) for text in (*own, *(note.text for note in seen.notes)))


def where(error: Error) -> str:
    """What raised an error: module, function, file and line."""
    place = error.places[-1] if error.places else None
    if place is None:
        return ""
    names = module_names(str(place["file"]))
    at = f"{place['file']}:{place['line']}" if place.get("line") else str(place["file"])
    return f"{names[0]}.{place['function']} ({at})" if len(names) == 1 else f"{place['function']} ({at})"


def _remarks(answer: Answer, catalogue: Catalogue, seen: Scanned) -> None:
    """Warnings that are a known failure's. Who wrote a line of a log only a warning tells; of others the text alone
    counts, where the line begins with it or a logger's name stands before it."""
    for case, signature in catalogue.remarks:
        note = next((each for each in seen.notes if _is_remark(signature, each)), None)
        if note is not None:
            answer.remarks.append(Known(case.slug, signature.name, note.line))
            answer.evidence[note.line] = note.text


def _is_remark(signature: Signature, note: Note) -> bool:
    found = re.search(signature.message or "", note.text)
    if found is None or (found.start() > 0 and not _BEFORE.fullmatch(note.text[: found.start()])):
        return False
    record: Record = {**NO_RECORD, "rank": 0}
    if note.file:
        record["warnings"] = [{"message": note.text, "file": note.file, "category": "UserWarning"}]
    else:
        record["logs"] = [{"logger": signature.package or "", "message": note.text, "file": ""}]
    attempt = _attempt([_left(0, record)])
    return match_attempt(signature, attempt, find_failures(attempt)) is not None


_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|(?<![\w.])\d+(?:\.\d+)*(?![\w])|(?<=[:=])\d+")
_PATHS = re.compile(r"(?<![\w.])(?:/[\w.@+-]+){2,}/?")


def normalised(message: str) -> str:
    """A message without what differs between machines and runs: numbers, addresses, paths."""
    first = message.strip().partition("\n")[0]
    return _NUMBERS.sub("N", _PATHS.sub("PATH", first))[:300]


# --- stored measurements

NEAREST = 2


@dataclass(frozen=True)
class VersionRange:
    """What was measured of a case over a range of releases."""

    cells: tuple[str, ...]
    hardware: str
    versions: Mapping[str, str]  # package -> range
    unnamed: tuple[str, ...]  # packages of the range of which the log says nothing
    outside: tuple[str, ...]  # packages whose release in the log lies outside
    verdicts: Mapping[str, str]

    @property
    def holds(self) -> list[str]:
        return [variant for variant, verdict in self.verdicts.items() if verdict == "FIXED"]

    @property
    def holds_not(self) -> dict[str, str]:
        return {variant: verdict for variant, verdict in self.verdicts.items() if verdict != "FIXED"}


@dataclass(frozen=True)
class Stored:
    """``fits``: measured on the log's releases. Where none is, ``nearest``: the ones that differ least."""

    fits: tuple[VersionRange, ...] = ()
    nearest: tuple[VersionRange, ...] = ()


def stored(case: Case, versions: Mapping[str, str]) -> Stored:
    """The stored measurements of a case for these releases (results/expected). Without any known release none fits; a
    package that the log does not name is listed with the range."""
    every = [_version_range(entry, versions) for entry in case.expect]
    fits = [each for each in every if not each.outside and len(each.unnamed) < len(each.versions)]
    if fits:
        return Stored(fits=tuple(fits))
    return Stored(nearest=tuple(sorted(every, key=lambda each: _distances(each, versions))[:NEAREST]))


def _version_range(entry: Expectation, versions: Mapping[str, str]) -> VersionRange:
    unnamed = tuple(name for name in entry.versions if name not in versions)
    outside = tuple(name for name, bounds in entry.versions.items() if name in versions
                    and not _within(versions[name], bounds))  # fmt: skip
    return VersionRange(
        tuple(entry.cells), entry.hardware, dict(entry.versions), unnamed, outside, dict(entry.verdicts)
    )


def _within(version: str, bounds: str) -> bool:
    try:
        return SpecifierSet(bounds).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _distances(version_range: VersionRange, versions: Mapping[str, str]) -> tuple[float, ...]:
    """How far the log's releases are from a range, torch's and transformers' first; the newest of equal ones."""
    far, newest = [], []
    for name in ("torch", "transformers"):
        bounds = version_range.versions.get(name, "")
        ends = [_number(end.lstrip("<>=")) for end in bounds.split(",")]
        here = versions.get(name)
        inside = here is None or not bounds or _within(here, bounds)
        far.append(0.0 if inside else min(abs(_number(here or "") - end) for end in ends))
        newest.append(-ends[0])
    return (*far, len(version_range.outside), *newest)


def _number(version: str) -> float:
    """A release on a line: 4.39.3 is 4.039003."""
    try:
        parts = (*Version(version).release, 0, 0)[:3]
    except InvalidVersion:
        return 0.0
    return parts[0] + parts[1] / 1e3 + parts[2] / 1e6
