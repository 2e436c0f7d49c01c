"""Scan a log for what can be judged in it: tracebacks, versions, texts of signatures. Pure.

Constant memory, and a few seconds for 100 MB: only lines with one of a few literals, and those that follow them while a
traceback is open, are looked at.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from packaging.version import InvalidVersion, Version

from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import TRAINERS, UPSTREAM
from repro_matrix.external.logs.tracebacks import HEADER, Error, Errors, Labels, Line

try:  # Python's own parser of regular expressions
    from re import _constants, _parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_constants as _constants
    import sre_parse as _parser

NOTES = 50  # of one text
# Lines that belong to errors: so many are read from the beginning, and the last blocks, of a log that is full of them.
READ = 30_000
LAST = 2
SHOWN = 300  # characters of a line
SHORTEST = 4  # characters of a literal: a shorter one is on every other line
# Where a traceback, a crash, or what a launcher says about an end begins.
BEGIN = (
    HEADER, '", line ', "Error: ", "Exception: ", "Fatal Python error", "Root Cause (first observed failure)",
    "exitcode  :", "rank      :", "traceback : Signal", "(exitcode: -", "/lib/python3", "Python 3.",
)  # fmt: skip
_SUMMARY = re.compile(r"^\s*(?P<key>rank|exitcode|traceback) +: (?P<value>.*)$")
_ELASTIC = re.compile(r"\(exitcode: (?P<code>-\d+)\) local_rank: (?P<rank>\d+)")
_WARNING = re.compile(r"^(?P<file>\S+\.py):\d+: (?P<category>\w+): (?P<message>.*)$")

# --- versions: from what a log prints of its environment

PACKAGES = (*UPSTREAM, *TRAINERS)
_NUMBER = r"v?(?P<version>\d+\.\d+(?:\.\d+)?(?:\.?(?:dev|post|rc|a|b)\d*)?(?:\+[\w.]+)?)"
_PACKAGE = r"(?P<package>pytorch|" + "|".join(PACKAGES) + r")"
_PATTERNS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"(?<![\w-]){_PACKAGE}=={_NUMBER}",  # pip freeze, requirements
        rf"(?<![\w-]){_PACKAGE} {{2,}}{_NUMBER}(?: |$)",  # pip list, conda list
        rf"(?<![\w-]){_PACKAGE}(?:-{_NUMBER})(?=\s|$|\.dist-info)",  # Successfully installed ...
        # transformers env, collect_env, ds_report, a Trainer's model card, what scripts print
        rf"(?<![\w-]){_PACKAGE}[`'\"]?(?:\.__version__|[ _](?:install )?version)(?: \(GPU\?\))?"
        rf"[`'\"]?[ :=.]*[`'\"]?{_NUMBER}",
        rf"(?<![\w-]){_PACKAGE}[ :]+{_NUMBER}(?![\w.])",
        rf"\b{_PACKAGE} info[ :]+(?:version=|\.+ ){_NUMBER}",
        rf"\bUsing {_PACKAGE} (?:version )?{_NUMBER}",
    )
)
_PYTHON = re.compile(r"\bPython (?:version: )?(?P<version>3\.\d+(?:\.\d+)?)|/lib/python(?P<path>3\.\d+)/")
_SPELLINGS = tuple(name.encode() for name in (*PACKAGES, "Transformers", "Accelerate", "DeepSpeed", "PEFT", "Torch"))
_AFTER_PACKAGE = re.compile(rb"(?:==|-\d|  |[`'\"]?(?:\.__version__|[ _](?:install )?version)|[ :]+v?\d|[ ]info)", re.I)


@dataclass
class Versions:
    """Package -> release -> the first line that names it. Of two releases of one package neither is known."""

    releases: dict[str, dict[str, int]] = field(default_factory=dict)
    python: str = ""

    def read(self, text: str, number: int) -> None:
        for found in (match for pattern in _PATTERNS for match in pattern.finditer(text)):
            name = found["package"].lower().removeprefix("py")
            try:
                version = str(Version(found["version"]))
            except InvalidVersion:
                continue
            releases = self.releases.setdefault(name, {})
            if len(releases) < 8:
                releases.setdefault(version, number)

    def read_path(self, text: str) -> None:
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


# --- the prefilter


def required(pattern: str) -> list[str]:
    """Literals of which every match of a regular expression holds at least one; [] where it has none that is long.

    Of what stands in sequence the longest is taken; of alternatives each its own.
    """
    try:
        return _required(_parser.parse(pattern))
    except (re.error, RecursionError):
        return []


def _required(parsed: Any) -> list[str]:
    best: list[str] = []
    literal = ""
    for op, value in [*parsed, (None, None)]:
        if op is _constants.LITERAL:
            literal += chr(value)
            continue
        best, literal = _longer(best, [literal]), ""
        if op is _constants.SUBPATTERN:
            best = _longer(best, _required(value[3]))
        elif op is _constants.BRANCH:
            each = [_required(branch) for branch in value[1]]
            best = _longer(best, [text for part in each for text in part]) if all(each) else best
        elif op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT) and value[0] > 0:
            best = _longer(best, _required(value[2]))
    return best


def _longer(one: list[str], other: list[str]) -> list[str]:
    shortest = min(map(len, other), default=0)
    return other if shortest >= SHORTEST and shortest > min(map(len, one), default=0) else one


def line_starts(block: bytes, literals: Iterable[bytes]) -> list[int]:
    """Where the literals are in a block, at most once in a line each; and packages that a version may follow."""
    found = []
    for literal in literals:
        at = block.find(literal)
        while at >= 0:
            found.append(at)
            end = block.find(b"\n", at)
            at = block.find(literal, end) if end >= 0 else -1
    for name in _SPELLINGS:
        at = block.find(name)
        while at >= 0:
            if _AFTER_PACKAGE.match(block, at + len(name)):
                found.append(at)
            at = block.find(name, at + len(name))
    return sorted(found)


# --- the scan


@dataclass(frozen=True)
class Note:
    """A line that holds what a signature, or what rules out its other causes, looks for."""

    line: int
    label: str
    rank: int | None
    text: str
    file: str = ""  # of the module that a warning blames


@dataclass
class Ended:
    """What torchrun says of its ranks at the end: rank -> its exit code, or its signal's name. The first failure
    that it saw comes last."""

    ranks: dict[int, int | str] = field(default_factory=dict)
    root: int | None = None
    _rank: int | None = None
    _root_next: bool = False

    @property
    def signals(self) -> dict[int, int | str]:
        """Those that a signal ended: its name, or the negative exit code where that is all that is said."""
        return {rank: how for rank, how in self.ranks.items() if isinstance(how, str) or how < 0}

    def read(self, text: str) -> None:
        if "Root Cause" in text:
            self._root_next = True
            return
        found = _SUMMARY.match(text)
        if found is None:
            elastic = _ELASTIC.search(text)
            if elastic:
                self.ranks.setdefault(int(elastic["rank"]), int(elastic["code"]))
            return
        if found["key"] == "rank":
            number = re.match(r"\d+", found["value"])
            self._rank = int(number.group()) if number else None
            if self._root_next and self._rank is not None:
                self.root, self._root_next = self._rank, False
        elif self._rank is not None and len(self.ranks) < 4096:
            code = re.match(r"-?\d+", found["value"])
            if found["key"] == "exitcode" and code:
                self.ranks[self._rank] = int(code.group())
            signal = re.match(r"Signal (\d+) \((SIG\w+)\)", found["value"])
            if signal:
                self.ranks[self._rank] = signal[2]


@dataclass
class Scanned:
    """All that a log shows."""

    lines: int = 0
    bytes: int = 0
    unread: int = 0  # lines in the middle of a log that is full of errors
    errors: list[Error] = field(default_factory=list)
    more: int = 0
    notes: list[Note] = field(default_factory=list)
    versions: Versions = field(default_factory=Versions)
    ended: Ended = field(default_factory=Ended)


class Texts:
    """What is looked for: tracebacks, versions, the texts of log signatures, and of what rules out another cause."""

    def __init__(self, cases: Iterable[Case]) -> None:
        patterns = set()
        for case in cases:
            for signature in case.signatures:
                if signature.kind == "log" and signature.message:
                    patterns.add(signature.message)
                if signature.ambiguous_with and signature.ambiguous_with.ruled_out_by:
                    patterns.add(signature.ambiguous_with.ruled_out_by)
        self.patterns = {text: re.compile(text) for text in sorted(patterns)}
        self._needed = {text: required(text) for text in self.patterns}
        literals = {*BEGIN, *(literal for needed in self._needed.values() for literal in needed)}
        self.literals = [literal.encode() for literal in sorted(literals)]

    def in_line(self, text: str) -> bool:
        return any(
            any(part in text for part in needed) and self.patterns[name].search(text)
            for name, needed in self._needed.items()
        )


def scan(blocks: Iterable[bytes], texts: Texts) -> Scanned:
    """Read a log (blocks of whole lines)."""
    reader = _Reader(texts)
    last: deque[tuple[int, bytes]] = deque(maxlen=LAST)
    lines = 0
    for block in blocks:
        reader.seen.bytes += len(block)
        if reader.read < READ:
            reader.block(block, lines)
        else:
            if len(last) == LAST:
                reader.seen.unread += last[0][1].count(b"\n")
            last.append((lines, block))
        lines += block.count(b"\n")
    for number, block in last:
        reader.block(block, number)
    return reader.end(lines)


class _Reader:
    def __init__(self, texts: Texts) -> None:
        self.texts = texts
        self.seen, self.errors, self.labels = Scanned(), Errors(), Labels()
        self.read = 0  # lines that were looked at
        self._notes = 0

    def block(self, block: bytes, number: int) -> None:
        """Read a block; ``number`` of lines stand before it. Between errors only lines with a literal are looked at."""
        starts = iter(line_starts(block, self.texts.literals))
        start = next(starts, -1)
        at = 0
        while at < len(block):
            if not self.errors.busy:
                if start < 0:
                    return
                line_start = block.rfind(b"\n", at, start) + 1 or at
                number += block.count(b"\n", at, line_start)
                at = line_start
            end = block.find(b"\n", at) + 1 or len(block)
            number += 1
            self.read += 1
            line = self.labels.split(block[at:end], number)
            self.errors.read(line)
            if 0 <= start < end:
                self._notes += _noted(self.seen, line, self.texts, self._notes)
                while 0 <= start < end:
                    start = next(starts, -1)
            at = end

    def end(self, lines: int) -> Scanned:
        self.errors.end()
        self.seen.lines, self.seen.errors, self.seen.more = (
            lines,
            self.errors.distinct.errors,
            self.errors.distinct.more,
        )
        return self.seen


def _noted(seen: Scanned, line: Line, texts: Texts, kept: int) -> int:
    text = line.text
    if '", line ' in text or HEADER in text:
        seen.versions.read_path(text)
        return 0
    seen.ended.read(text)
    seen.versions.read(text, line.number)
    seen.versions.read_path(text)
    if kept < NOTES * len(texts.patterns) and texts.in_line(text):
        found = _WARNING.match(text)
        file, message = (found["file"], found["message"]) if found else ("", text)
        seen.notes.append(Note(line.number, line.label, line.rank, message[: SHOWN * 4], file))
        return 1
    return 0
