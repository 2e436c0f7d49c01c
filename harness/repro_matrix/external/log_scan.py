"""Read a log, and scan it for what can be judged in it: tracebacks, versions, texts of signatures.

Constant memory, and a few seconds for 100 MB: only lines with one of a few words, and those that follow them while a
traceback is open, are parsed.
"""

from __future__ import annotations

import codecs
import gzip
import io
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.version import Version

from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import TRAINERS, UPSTREAM
from repro_matrix.errors import ReproError
from repro_matrix.external.tracebacks import HEADER, Error, Errors, Labels, Line

MAX_LINE = 1 << 16  # characters of one line that are read
MAX_NOTES = 1000
MAX_NOTE = 1200  # characters

# --- reading


class LogError(ReproError):
    """A log that cannot be read as one."""


def lines(path: str) -> Iterator[str]:
    """Yield the lines of a log, plain or gzip, UTF-8 or UTF-16; ``-`` is the standard input. Raises LogError."""
    try:
        if path == "-":
            yield from _lines(sys.stdin.buffer, path)
        else:
            with open(path, "rb") as file:
                yield from _lines(file, path)
    except (OSError, EOFError, zlib.error) as error:  # gzip.BadGzipFile is an OSError
        raise LogError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _lines(raw: Any, path: str) -> Iterator[str]:
    """A carriage return alone (a progress bar) ends a line as well. Of a long line only the beginning is kept."""
    file: Any = io.BufferedReader(raw)
    if file.peek(2).startswith(b"\x1f\x8b"):
        file = io.BufferedReader(gzip.GzipFile(fileobj=file))
    head = file.peek(4096)
    encoding = "utf-16" if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    if encoding != "utf-16" and b"\0" in head:
        raise LogError(f"{path}: binary, not the text of a log. Unpack it first.")
    text = io.TextIOWrapper(file, encoding, errors="replace", newline=None)
    begins = True
    while part := text.readline(MAX_LINE):
        if begins:
            yield part
        begins = part.endswith("\n")


# --- versions: from what a log prints of its environment

_NUMBER = r"v?(?P<version>\d+\.\d+(?:\.\d+)?(?:\.?(?:dev|post|rc|a|b)\d*)?(?:\+[a-z0-9]+(?:[._][a-z0-9]+)*)?)"
_VERSION = re.compile(
    rf"(?<![\w-])(?P<package>pytorch|{'|'.join((*UPSTREAM, *TRAINERS))})"
    r"(?:=="  # pip freeze, requirements
    r"| {2,}"  # pip list, conda list
    r"|-"  # Successfully installed ...
    # transformers env, collect_env, ds_report, a Trainer's model card, what scripts print
    r"|[`'\"]?(?:\.__version__|[ _](?:install )?version)(?: \(GPU\?\))?[`'\"]?[ :=.]*[`'\"]?"
    r"| info[ :]+(?:version=|\.+ )"
    rf"|[ :]+){_NUMBER}(?=$|[\s,;'\"`)]|\.dist-info)",
    re.IGNORECASE | re.ASCII,
)
_PYTHON = re.compile(r"\bPython (?:version: )?(?P<version>3\.\d+(?:\.\d+)?)|/lib/python(?P<path>3\.\d+)/")


@dataclass
class Versions:
    """Package -> release -> the first line that names it. Of two releases of one package neither is known."""

    releases: dict[str, dict[str, int]] = field(default_factory=dict)
    python: str = ""

    def read(self, text: str, number: int) -> None:
        for found in _VERSION.finditer(text):
            version = str(Version(found["version"]))
            self.releases.setdefault(found["package"].lower().removeprefix("py"), {}).setdefault(version, number)

    def read_python(self, text: str) -> None:
        found = None if self.python else _PYTHON.search(text)
        if found:
            self.python = found["version"] or found["path"]

    @property
    def known(self) -> dict[str, str]:
        """The packages of which the log names one release. ``2.2.2`` beside ``2.2.2+cu121`` is one."""
        known = {}
        for name, releases in self.releases.items():
            full = {v for v in releases if not any(o != v and Version(o).public == v for o in releases)}
            if len(full) == 1:
                known[name] = full.pop()
        return known

    @property
    def unclear(self) -> dict[str, list[str]]:
        return {name: sorted(releases) for name, releases in self.releases.items() if name not in self.known}


# --- torchrun's summary

_SUMMARY = re.compile(r"^\s*(?:rank +: (?P<rank>\d+)|exitcode +: )")


@dataclass
class Summary:
    """The ranks that torchrun lists. ``root``: the first that failed; ``rank``: that of the current line."""

    root: int | None = None
    rank: int | None = None
    _root_next: bool = False

    def read(self, text: str) -> None:
        self._root_next = self._root_next or "Root Cause" in text
        found = _SUMMARY.match(text)
        if found and found["rank"]:
            self.rank = int(found["rank"])
            if self._root_next:
                self.root, self._root_next = self.rank, False


# --- processes that ended without a traceback

_ENDING = re.compile(
    r"(?P<collective_timeout>Watchdog caught collective operation timeout|Some NCCL operations have failed or timed out"
    r"|Heartbeat monitor timed out)"
    r"|(?P<out_of_memory>(?i:(?:slurmstepd|srun): error: .*(?:oom.kill|out of memory)|out of memory: killed process))"
    r"|(?P<signal>^terminate called after throwing|\(core dumped\)|\bexited on signal \d|\bexitcode *:? *-\d"
    r"|(?:^srun: error: .*|: line \d+: +\d+ )"  # Slurm, a shell
    r"(?:Aborted|Bus error|Floating point exception|Illegal instruction|Segmentation fault)|^srun: error: .*: Killed)"
    r"|(?P<SIGKILL_or_out_of_memory>: line \d+: +\d+ Killed\b)"
    r"|(?P<time_limit>\bCANCELLED .*DUE TO TIME LIMIT)"
    r"|(?P<CUDA_assertion>\bthread: \[[\d, ]+\] Assertion .* failed)"
    r"|(?P<GPU_error>\bNVRM: Xid \()"
    r"|(?P<exit_code>\bexitcode *:? *[1-9]|^srun: error: .*: Exited with exit code|^\S+\.py FAILED$"
    r"|\bmake(?:\[\d+\])?: \*\*\* .*\bError \d)"
)
_ENDED_RANK = re.compile(r"\[Rank (\d+)\]|\btask (\d+):|\bprocess rank (\d+)")
MAX_ENDINGS = 300


@dataclass(frozen=True)
class Ending:
    """A line that reports the end of a process, not its cause."""

    line: int
    rank: int | None
    kind: str  # the name of a group of _ENDING: "collective timeout", "out of memory", "signal" ...


# --- the scan

# A line with one of these may belong to an error, a launcher's summary or an environment.
_NAMES = (*UPSTREAM, *TRAINERS, "DeepSpeed", "PEFT")
WORDS = (
    HEADER, '", line ', "Error", "Exception", "Fatal Python error", "Root Cause", "exitcode", "rank  ", "traceback :",
    "Watchdog caught", "NCCL operations", "Heartbeat monitor", "terminate called", "core dumped", "on signal",
    "FAILED", "srun: error", "slurmstepd: error", "illed process", ": line ",
    "TIME LIMIT", "thread: [", "NVRM: Xid", "/lib/python3", "Python 3.", "Python version",
    *(word for name in _NAMES for word in {name, name.capitalize()}),
)  # fmt: skip


@dataclass(frozen=True)
class Note:
    """A line that holds what a signature, or what rules out its other causes, looks for."""

    line: int
    label: str
    rank: int | None
    text: str
    file: str = ""  # of the module that a warning blames


@dataclass
class Scanned:
    """All that a log shows."""

    lines: int = 0
    errors: list[Error] = field(default_factory=list)
    more: int = 0
    notes: list[Note] = field(default_factory=list)
    versions: Versions = field(default_factory=Versions)
    summary: Summary = field(default_factory=Summary)
    endings: list[Ending] = field(default_factory=list)  # the first of each rank and kind


class Catalogue:
    """The signatures that a log can show, on any rank: a log has no rank without a word, and seldom a backend."""

    def __init__(self, cases: Mapping[str, Case]) -> None:
        every = [(case, signature) for case in cases.values() for signature in case.signatures]
        self.remarks = [item for item in every if item[1].kind == "log"]
        kinds = ("exception", "signal")
        self.failures = [(case, s.model_copy(update={"ranks": "any"})) for case, s in every if s.kind in kinds]
        patterns = {s.message for _, s in self.remarks}
        patterns |= {s.ambiguous_with.ruled_out_by for _, s in every if s.ambiguous_with}
        self.patterns = [(re.compile(pattern), words_of(pattern)) for pattern in sorted(filter(None, patterns))]
        self.words = tuple(dict.fromkeys((*WORDS, *(word for _, words in self.patterns for word in words))))

    def in_line(self, text: str) -> bool:
        """Whether a line holds a text that a signature, or what rules out another cause of it, looks for."""
        return any(any(word in text for word in words) and pattern.search(text) for pattern, words in self.patterns)


def words_of(pattern: str) -> list[str]:
    """Return words of which every line that matches has one: of each alternative the longest; [""] if unknown."""
    bare = re.sub(r"\\.|\[[^]]*\]|.[?*{]", "\n", pattern)
    words = [max(re.findall(r"[^\n.+^$]+", part), key=len, default="") for part in bare.split("|")]
    return [""] if "(" in bare else words


_WARNING = re.compile(r"^(?P<file>\S+\.py):\d+: \w+: (?P<message>.*)$")


def scan(log: Iterable[str], known: Catalogue) -> Scanned:
    """Scan the lines of a log."""
    found, errors, labels = Scanned(), Errors(), Labels()
    for number, raw in enumerate(log, 1):
        found.lines = number
        has_word = any(word in raw for word in known.words)
        if has_word or errors.busy:
            line = labels.split(raw, number)
            errors.read(line)
            if has_word:
                _note(found, line, known)
    errors.end()
    found.errors, found.more = list(errors.found.values()), errors.more
    return found


def _note(found: Scanned, line: Line, known: Catalogue) -> None:
    text = line.text
    found.versions.read_python(text)
    if '", line ' in text or HEADER in text:
        return
    found.summary.read(text)
    ending = _ENDING.search(text)
    if ending and len(found.endings) < MAX_ENDINGS:
        stated = _ENDED_RANK.search(text)
        rank = int(stated[stated.lastindex or 1]) if stated else line.rank
        if rank is None and _SUMMARY.match(text):
            rank = found.summary.rank
        kind = str(ending.lastgroup).replace("_", " ")
        if not any((each.rank, each.kind) == (rank, kind) for each in found.endings):
            found.endings.append(Ending(line.number, rank, kind))
    found.versions.read(text, line.number)
    if len(found.notes) < MAX_NOTES and known.in_line(text):
        warning = _WARNING.match(text)
        file, message = (warning["file"], warning["message"]) if warning else ("", text)
        found.notes.append(Note(line.number, line.label, line.rank, message[:MAX_NOTE], file))
