"""A log in blocks -> what can be judged in it. Constant memory, and a few seconds for 100 MB. Pure.

Only lines that hold a literal (literals.py), and those that follow them while a traceback is open, are read at all.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from repro_matrix.config.schema import Case
from repro_matrix.external.logs.distinct import Error
from repro_matrix.external.logs.lines import HEADER, Labels, Line
from repro_matrix.external.logs.literals import BEGIN, Prefilter, required
from repro_matrix.external.logs.tracebacks import Errors
from repro_matrix.external.logs.versions import LITERALS, Versions

NOTES = 50  # of one text
# Lines that belong to errors: so many are read from the beginning, and the last blocks, of a log that is full of them.
READ = 30_000
LAST = 2
SHOWN = 300  # characters of a line
_SUMMARY = re.compile(r"^\s*(?P<key>rank|exitcode|traceback) +: (?P<value>.*)$")
_ELASTIC = re.compile(r"\(exitcode: (?P<code>-\d+)\) local_rank: (?P<rank>\d+)")
_WARNING = re.compile(r"^(?P<file>\S+\.py):\d+: (?P<category>\w+): (?P<message>.*)$")


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
class Seen:
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
        literals = {*BEGIN, *LITERALS}
        for case in cases:
            for signature in case.signatures:
                if signature.kind == "log" and signature.message:
                    patterns.add(signature.message)
                if signature.ambiguous_with and signature.ambiguous_with.ruled_out_by:
                    patterns.add(signature.ambiguous_with.ruled_out_by)
        self.patterns = {text: re.compile(text) for text in sorted(patterns)}
        self._needed = {text: required(text) for text in self.patterns}
        for needed in self._needed.values():
            literals |= set(needed)
        self.prefilter = Prefilter(literals)

    def in_line(self, text: str) -> bool:
        return any(
            any(part in text for part in needed) and self.patterns[name].search(text)
            for name, needed in self._needed.items()
        )


def scan(blocks: Iterable[bytes], texts: Texts) -> Seen:
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
        self.seen, self.errors, self.labels = Seen(), Errors(), Labels()
        self.read = 0  # lines that were looked at
        self._notes = 0

    def block(self, block: bytes, number: int) -> None:
        """Read a block; ``number`` of lines stand before it. Between errors only lines with a literal are looked at."""
        starts = self.texts.prefilter.starts(block)
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

    def end(self, lines: int) -> Seen:
        self.errors.end()
        self.seen.lines, self.seen.errors, self.seen.more = lines, self.errors.kept.found, self.errors.kept.more
        return self.seen


def _noted(seen: Seen, line: Line, texts: Texts, kept: int) -> int:
    text = line.text
    if '", line ' in text or HEADER in text:
        if not seen.versions.python:
            seen.versions.read_path(text)
        return 0
    seen.ended.read(text)
    seen.versions.read(text, line.number)
    if not seen.versions.python:
        seen.versions.read_path(text)
    if kept < NOTES * len(texts.patterns) and texts.in_line(text):
        found = _WARNING.match(text)
        file, said = (found["file"], found["message"]) if found else ("", text)
        seen.notes.append(Note(line.number, line.label, line.rank, said[: SHOWN * 4], file))
        return 1
    return 0
