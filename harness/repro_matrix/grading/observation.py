"""Read an observation: what each rank raised, checked and logged, and in which code. Pure.

Types are validated where an observation arrives (records/). The content that ranks wrote is not
trusted: ``number`` and the graders check the values.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from repro_matrix.config.failure_rules import peer_errors
from repro_matrix.grading.checks import CheckResult, evaluate, number
from repro_matrix.records.attempt import Exception_, Observation, Record
from repro_matrix.records.attempt import RankRecord as RankData

# -- code locations

_INSTALLED = re.compile(r"(?:^|/)(?:site|dist)-packages/(.+)$")
_STANDARD_LIBRARY = re.compile(r"(?:^|/)lib(?:64)?/python3(?:\.\d+)?t?/(.+)$")
_REPROS = re.compile(
    r"(?:^|/)repros/(?!.*(?:(?:site|dist)-packages/|transformers_modules/|lib/python3)).+\.py$"
)
# the first part of an origin that is this project's code (repros/repro_kit/code_location.py)
_PROJECT = "repros"
_PROJECT_MODULES = {"__main__", "__mp_main__", "kit", "repro_kit", "repros"}
_PYSPY = re.compile(r"^\s+(?P<function>\S.*?) \((?P<file>[^()]+?)(?::\d+)?\)\s*$")
_FAULTHANDLER = re.compile(r'^\s*File "(?P<file>[^"]*)", line \d+,? in (?P<function>.+?)\s*$')


def in_package(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@lru_cache(maxsize=4096)
def module_names(file: str) -> tuple[str, ...]:
    """Return the dotted module names that a source file may have, the most likely first.

    Under site-packages or the standard library there is one. Elsewhere (an overlay on PYTHONPATH, a
    checkout, paths that py-spy shortened) the root is unknown: every suffix of the path is
    possible.
    """
    path = file.replace("\\", "/")
    found = _INSTALLED.search(path) or _STANDARD_LIBRARY.search(path)
    rest = found.group(1) if found else path.lstrip("/")
    names = re.sub(r"\.(py|pyc|so|pyx)$", "", rest).split("/")
    parts = [part for part in names if part not in ("", ".", "..")]
    if parts[-1:] == ["__init__"]:
        parts.pop()
    return tuple(".".join(parts[start:]) for start in range(1 if found else len(parts)))


@lru_cache(maxsize=4096)
def is_project_code(module: str, file: str) -> bool:
    """Return whether a frame is this project's (the case's script, the kit).

    Such a frame never counts as upstream.
    """
    return module.partition(".")[0] in _PROJECT_MODULES or bool(
        _REPROS.search(file.replace("\\", "/"))
    )


def origin_of(file: str, packages: Mapping[str, str]) -> str | None:
    """Return the installed module that a file is, by where the rank's packages are installed.

    A file that only looks like a known package's has the origin "". None: this project's own file.
    """
    path = file.replace("\\", "/")
    for name, root in packages.items():
        if path == root:
            return name
        folder = root.rstrip("/") + "/"
        if path.startswith(folder):
            return ".".join(
                filter(None, (name, *module_names("/site-packages/" + path[len(folder) :])))
            )
    if _REPROS.search(path):
        return None
    installed = _INSTALLED.search(path) or _STANDARD_LIBRARY.search(path)
    name = module_names(path)[0] if installed else ""
    return name if name.partition(".")[0] not in packages else ""


class CodeLocation(NamedTuple):
    """One frame of an exception or of a hung rank's stack.

    ``origin``: the installed module that the code is, as the rank determined it; "repros..." for
    the project's own; ""
    for neither; None where only the file is known (a stack from outside the process, a traceback of
    a log).
    """

    module: str
    file: str
    function: str
    origin: str | None = None
    line: int | None = None

    @property
    def is_project(self) -> bool:
        if self.origin is None:
            return is_project_code(self.module, self.file)
        return in_package(self.origin, _PROJECT)

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the names to match: the origin, else the module's name, else those of its file."""
        if self.origin is not None:
            return (self.origin,) if self.origin and not self.is_project else ()
        if self.module not in ("", "builtins"):
            return (self.module,)
        return module_names(self.file) if not self.file.startswith("<") else ()

    @property
    def is_known(self) -> bool:
        """Return whether the code is known; other frames are passed over.

        Generated code (``<string>``) is not known if the rank did not look up its origin.
        """
        return self.origin is not None or bool(self.modules) or self.is_project

    @property
    def raises_for_caller(self) -> bool:
        """Return whether it is torch._check or similar, which raises its caller's text.

        The caller counts then.
        """
        return self.function.startswith("_check") and "torch" in self.modules

    def __str__(self) -> str:
        named = self.origin or (
            self.modules[0] if self.modules else self.module if self.origin is None else self.file
        )
        return ".".join(part for part in (named or "?", self.function) if part)


class Thread(NamedTuple):
    """Hold one thread of a stack dump: its printed frames, and their locations, innermost first."""

    main: bool
    lines: list[str]
    frames: list[CodeLocation]


def parse_threads(stack: str, packages: Mapping[str, str] | None = None) -> list[Thread]:
    """Parse a stack dump of py-spy or faulthandler; the main thread comes first.

    ``packages``: where the rank's packages are installed; without it, files are located by their
    path.
    """
    found = [Thread(True, [], [])]
    for line in stack.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            # faulthandler calls the interrupted thread the current one; py-spy names the main
            # thread
            found.append(Thread(line.startswith("Current") or "MainThread" in line, [], []))
            continue
        frame = _FAULTHANDLER.match(line) or _PYSPY.match(line)
        if frame:
            found[-1].lines.append(line.strip())
            # py-spy gives the qualified name (f.<locals>.wrapper); records and faulthandler give
            # the plain one
            function = frame["function"].rpartition(".")[2]
            found[-1].frames.append(_located(frame["file"], function, packages))
    return sorted((each for each in found if each.lines), key=lambda thread: not thread.main)


def _located(file: str, function: str, packages: Mapping[str, str] | None) -> CodeLocation:
    return CodeLocation("", file, function, origin_of(file, packages) if packages else None)


# -- what a rank raised and logged


@dataclass(frozen=True)
class RaisedException:
    type: str
    names: frozenset[str]  # the type, with and without its module, and its bases
    message: str
    frames: tuple[CodeLocation, ...]  # outermost first
    error_code: int | None = None  # of the driver

    @property
    def innermost(self) -> CodeLocation | None:
        """Return the innermost frame whose origin is known; C code leaves no frame."""
        return next(
            (f for f in reversed(self.frames) if f.is_known and not f.raises_for_caller), None
        )


def raised_chain(exception: Exception_ | None) -> list[RaisedException]:
    """Return the raised exception and those that it merely wraps.

    ``cause`` may be anything that was being handled at the time. It counts only where the one that
    was raised repeats
    its message (a lazy import, a compiler, a pool).
    """
    chain: list[RaisedException] = []
    while exception is not None:
        message = exception["message"].strip()
        if chain and (len(message) < 8 or message not in chain[-1].message):
            break
        name, module = exception["type"], exception.get("module", "")
        frames = (
            CodeLocation(f["module"], f["file"], f["function"], f.get("code_location"), f["line"])
            for f in exception["frames"]
        )
        names = frozenset({name, f"{module}.{name}", *exception.get("bases", ())} - {"", "."})
        code = exception.get("error_code")
        chain.append(RaisedException(name, names, exception["message"], tuple(frames), code))
        exception = exception["cause"]
    return chain


# The text of NCCL's watchdog before it aborts the process.
_WATCHDOG = re.compile(
    r"(?:watchdog thread terminated with|raised the following async) exception: "
    r"(?P<message>(?P<of>CUDA|NCCL) error: (?:.*\n)*?.*)(?=\nException raised|$)"
)
_TYPES = {"CUDA": "AcceleratorError", "NCCL": "DistBackendError"}


def exception_of(data: RankData) -> Exception_ | None:
    """Return what a rank raised in its main thread or in the thread of NCCL's watchdog.

    The watchdog aborts the process. It is chance which of the two sees an error of CUDA first, and
    whether a limit ends the rank while the watchdog, which knows that a peer has exited, still
    dumps its collectives. Other errors of NCCL (a truncated message) follow from a mismatch in
    which the rank hangs.
    """
    record = data["record"]
    if record and (record["exception"] or record["done"]):
        return record["exception"]
    found = _WATCHDOG.search(data["log_tail"])
    aborted = data["signal"] == "SIGABRT" or data["exit_code"] == -6
    if not found or not (
        aborted if data["terminated_by"] == "self" else peer_errors().search(found["message"])
    ):
        return None
    return {
        "type": _TYPES[found["of"]],
        "module": "torch",
        "bases": ["RuntimeError"],
        "message": found["message"],
        "frames": [],
        "cause": None,
    }


def raised_first(record: Record) -> Exception_ | None:
    """Return what ended a rank, or else the first of its threads that failed."""
    return record["exception"] or next(iter(record.get("threads", [])), None)


class LogEntry(NamedTuple):
    """Hold a warning (``name``: its category) or a log record (``name``: its logger).

    ``origin``: the module of the code that logged it. Any code can use a logger's name, and a
    warning may blame its caller's line; neither counts.
    """

    name: str
    message: str
    origin: str


# The record of a rank that wrote none.
NO_RECORD: Record = {
    "rank": -1,
    "phase": "",
    "done": False,
    "exception": None,
    "checks": [],
    "metrics": {},
    "facts": {},
    "warnings": [],
    "logs": [],
    "versions": {},
}


def peak_bytes(record: Record, of: Literal["rss", "gpu"]) -> float | None:
    """Return the most memory that a rank used, on the host or of its GPU; None: unknown."""
    size, older = number(record.get(f"peak_{of}_bytes")), number(record.get(f"peak_{of}_mb"))
    return older * 2**20 if size is None and older is not None else size


class Rank:
    """One rank of an attempt."""

    def __init__(self, data: RankData) -> None:
        self.rank = data["rank"]
        self.pid = data.get("pid")
        self.exit_code = data["exit_code"]
        self.signal = data["signal"] or ""
        self.terminated_by = data["terminated_by"]
        record = data["record"]
        self.record_error = record_error(data)  # why the record is not evidence; ""
        self.wrote = record is not None and not self.record_error
        self.record: Record = record if record is not None and self.wrote else NO_RECORD
        self._exception = exception_of({**data, "record": self.record})
        self.done = self.record["done"]
        self.log_tail = data["log_tail"]
        self.stack = data["stack"] or ""
        # The rank monitor's last answer; of a rank that ended by itself on a GPU, its record's.
        self.collectives = data.get("collectives") or self.record.get("collectives")
        self.samples = data.get("samples")  # None: no process samples were taken
        # by the rank's own clock; None: it did not get that far
        self.ended_at = number(self.record.get("ended"))

    @cached_property
    def chain(self) -> list[RaisedException]:
        return raised_chain(self._exception)

    @property
    def raised(self) -> RaisedException | None:
        return self.chain[0] if self.chain else None

    @cached_property
    def threads(self) -> list[list[RaisedException]]:
        """Return the exceptions that ended threads of this rank, and not the rank."""
        return list(map(raised_chain, self.record.get("threads", [])))

    @cached_property
    def unraisable(self) -> list[list[RaisedException]]:
        """Return the exceptions of destructors and atexit handlers, which Python only reports."""
        return list(map(raised_chain, self.record.get("unraisable", [])))

    @cached_property
    def checks(self) -> list[CheckResult]:
        """Return the evaluated checks of the rank.

        Checks of the same name are void, except those that failed.
        """
        done_at = number(self.record.get("done_at"))
        results = [evaluate(check, done_at) for check in self.record["checks"]]
        count = Counter(one.name for one in results)
        return [
            (
                one.as_void(f"made {count[one.name]} times; ")
                if count[one.name] > 1 and not one.failed
                else one
            )
            for one in results
        ]

    @cached_property
    def log_entries(self) -> list[LogEntry]:
        """Warnings and log records, each once."""
        warnings = (
            LogEntry(w["category"], w["message"], w["code_location"])
            for w in self.record["warnings"]
        )
        logs = (
            LogEntry(log["logger"], log["message"], log["code_location"])
            for log in self.record["logs"]
        )
        return list(dict.fromkeys([*warnings, *logs]))

    @cached_property
    def packages(self) -> Mapping[str, str]:
        """Return the places of the packages that this rank could import."""
        return self.record.get("packages", {})

    @cached_property
    def stack_frames(self) -> tuple[CodeLocation, ...]:
        """Return the frames of a hung rank: innermost first, the main thread first."""
        return tuple(
            frame for thread in parse_threads(self.stack, self.packages) for frame in thread.frames
        )

    @cached_property
    def collective_frames(self) -> tuple[CodeLocation, ...]:
        """Return the calls of the collectives in which this rank waits (torch's flight recorder).

        On a GPU the host has gone on from there, and is in a synchronize.
        """
        entered = (self.collectives["collectives"] if self.collectives else None) or ()
        frames = (frame for each in entered if each["waits"] for frame in each.get("frames", ()))
        return tuple(_located(file, function, self.packages) for file, function in frames)


def record_error(data: RankData) -> str:
    """Return why a record is not evidence; "" if it is.

    It is damaged, of another rank, or written by another process than the started one.
    """
    record, pid = data["record"], data.get("pid")
    if data.get("validation_error"):
        return f"its record is damaged: {data['validation_error']}"
    if record and record["rank"] != data["rank"]:
        return f"its record says rank {record['rank']}"
    if record and pid is not None and record.get("pid") not in (pid, None):
        return f"its record was written by process {record.get('pid')}, the rank was process {pid}"
    return ""


class Evidence:
    """Parse an observation once."""

    def __init__(self, observation: Observation) -> None:
        attempt = observation["attempt"]
        self.backend = attempt["backend"]
        self.timed_out = attempt["timed_out"]
        self.interrupted = attempt["interrupted"]
        self.started = attempt["started"]
        self.deadline = attempt["deadline_s"]
        self.hang = attempt.get("hang")  # how the launcher detected the hang
        self.settings = attempt["settings"]
        self.strategy = self.settings.get("strategy", {}).get("slug", "")
        self.planned = attempt.get("versions", {})  # the releases that it was planned with
        self.accelerator = self.settings.get("device", "")
        self.gpus = attempt.get("gpus", [])  # UUIDs of those that were leased to it
        self.infra_error = observation["infra_error"]
        self.place = observation.get("place")  # the first different number, by a trace
        self.command_exit = observation.get("command_exit")  # of a user's script
        self.startup_s = attempt.get("startup_s")  # from the start until all ranks were at work
        self.leaked = [
            each for each in attempt["leaked_processes"] if not each.startswith("/dev/shm/")
        ]
        # of a user's script, from its logs
        self.printed: Mapping[str, Any] = observation.get("printed", {})
        self.ranks = sorted(
            (Rank(each) for each in observation["ranks"]), key=lambda rank: rank.rank
        )
        self.world_size = attempt["world_size"]
        self.missing = sorted(set(range(self.world_size)) - {rank.rank for rank in self.ranks})
