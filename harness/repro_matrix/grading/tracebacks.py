"""Put the tracebacks of a log together, per process, each error once. Pure.

Where a traceback begins before another one of the same label has ended, several processes write
into one stream: what follows within MIXED lines is marked as ``mixed``.

Read as well: a traceback whose beginning is cut off, rich's boxes, IPython's, faulthandler's dump
of a crash.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from repro_matrix.grading.log_labels import HEADER, Line

MAX_ERRORS = 300  # distinct ones that are listed


@dataclass(frozen=True)
class Error:
    """Hold one error of the log.

    ``record`` is what a rank would have recorded (docs/concepts/evidence.md).
    """

    line: int  # of its message, else of its beginning
    label: str
    rank: int | None
    record: dict[str, Any]  # its exception; empty for a signal
    signal: str = ""
    stack: str = ""  # of a signal, as faulthandler printed it
    whole: bool = True  # nothing of it is cut off
    mixed: bool = False  # lines of another traceback may be among its own
    count: int = 1
    ranks: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()  # that the messages of equal errors name
    last: int = 0  # the line of the last equal one
    # the line of the error of the same process that it was raised from, or while handling
    after: int = 0
    ignored: bool = False  # Python went on after it, or a text quotes it

    @property
    def type(self) -> str:
        return self.signal or str(self.record.get("type", ""))

    @property
    def message(self) -> str:
        return str(self.record.get("message", ""))

    @property
    def places(self) -> list[dict[str, Any]]:
        return list(self.record.get("frames") or ())

    @property
    def completeness(self) -> tuple[bool, bool, int, int]:
        return self.whole, not self.mixed, len(self.places), self.message.count("\n")

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what errors that are listed as one have in common."""
        where = (
            f"{self.places[-1]['file']}:{self.places[-1]['line']}"
            if self.places
            else self.stack[-2000:]
        )
        return self.type, re.sub(r"\d+", "N", self.message.partition("\n")[0])[:300], where


_GPU = re.compile(r"(?<=cuda:)\d+|(?<='cuda', index=)\d+")
MIXED = 500  # lines after a traceback that began inside another one
BETWEEN = 64  # lines of other processes between two of a message
PATIENCE = 4000  # lines until a traceback without a new line of its own is given up
MESSAGE = 4000  # characters
FRAMES = 400
_FRAME = re.compile(
    r'^[\s^~]*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:,? in (?P<function>.+?))?\s*$'
)
_RICH = re.compile(r"^│ (?P<file>\S.*?):(?P<line>\d+) in (?P<function>\S+)\s*│$")
_IPYTHON = re.compile(
    r"^(?:File )?(?P<file>[~/][^\s:]*\.py)(?::(?P<line>\d+))?,? in (?P<function>[\w.<>]+)\(.*$"
)
_ERROR = re.compile(
    r"^(?P<type>[A-Za-z_][\w]*(?:\.[A-Za-z_]\w*)*(?:\([\w.]+\))?)(?:: ?(?P<message>.*))?$"
)
_NAMED = re.compile(r"(?:Error|Exception|Warning|Interrupt|Exit|Iteration|Timeout|Failure|Fault)$")
# Without a traceback only a line that looks like the end of one is an error.
_BARE = re.compile(
    # A job's prefix, a quotation. All spaces are taken at once, else a row of asterisks takes for
    # ever.
    r"^ *(?:(?:\[[^\[\]]{1,80}\]:?|\([^()]{1,80}\):?|<[^<>]{1,80}>:?|[>`\"'*]) *(?! ))*(?<! {2})"
    r"(?P<type>(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception|Expired|Exit|Fault)|Exception(?=: )"
    r"|(?:errors?|exceptions?|exc)\.[A-Z]\w*))"
    r"(?:: (?P<message>\S.*)|:?\s*)$"
)
# of two ranks on one line
_TWICE = re.compile(r"^(?P<type>[\w.]{0,80}?[A-Z]\w{0,80}?(?:Error|Exception))(?P=type)+")
# Lines above a traceback: if the log is truncated, they are the only evidence. Warnings can contain
# C++ frames too.
_SIGN = re.compile(
    r"^Exception in thread \S|^Process \S*Process-[\d:]+:$|^-- Process \d+ terminated|^\s*frame"
    r" #(?P<cpp>\d+): "
)
_CPP_WARNING = re.compile(r"\[W\d* |^W\d{4} ")
CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
_FATAL = re.compile(r"Fatal Python error: (?P<what>[\w ]+)")
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
_LOGGED = re.compile(
    r"^(?:\[|\d{4}-\d\d|[IWEF]\d{4}"
    r" |(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)\b|={4}|-{4}|\{|srun|slurm|Traceback"
    r"|Killing subprocess )"
)


@dataclass
class _Open:
    """Hold a traceback, or a crash's stack, that is being read."""

    begun: Line
    number: int  # of its last line
    whole: bool = True
    mixed: bool = False
    after: int = 0  # as an Error's
    ignored: bool = False
    indent: int = 0  # of the whole traceback, where it stands indented in its log
    frames: list[dict[str, Any]] = field(default_factory=list)
    wants_code: bool = False
    signal: str = ""
    # once its last line has been read:
    type: str = ""
    message: list[str] = field(default_factory=list)

    @property
    def patience(self) -> int:
        """Return how many lines after the last one its message may go on."""
        return BETWEEN if self.begun.label else 1

    @property
    def error(self) -> Error:
        module, _, kind = ("", "", self.type) if "(" in self.type else self.type.rpartition(".")
        text, begun = "\n".join(self.message), self.begun
        message = text.rstrip()[:MESSAGE]
        found = {"type": kind, "module": module, "message": message, "frames": self.frames}
        unlabelled = begun.rank is None and not self.signal
        return Error(
            begun.number,
            begun.label,
            begun.rank,
            {} if self.signal else {**found, "cause": None},
            self.signal,
            stack="\n".join(self.message[:FRAMES]) if self.signal else "",
            whole=bool(text) if self.signal else self.whole and bool(self.type),
            mixed=self.mixed and not self.signal,
            ranks=() if begun.rank is None else (begun.rank,),
            gpus=tuple(sorted(set(_GPU.findall(message)))) if unlabelled else (),
            last=begun.number,
            after=self.after,
            ignored=self.ignored,
        )


@dataclass
class _Stream:
    """Hold what the lines of one label have shown."""

    mixed_until: int = 0  # the last line that may be of another traceback
    last: int = 0  # the line of its last error
    chained: int = 0  # the line of the error from which the next one is raised
    ignored: int = -BETWEEN  # the line that announces that Python ignores the next traceback


class Errors:
    """Read lines and collect their errors.

    After ``end``, ``found`` has the distinct errors in order, at most MAX_ERRORS.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[str, str, str], Error] = {}  # by what they have in common
        self._open: dict[str, _Open] = {}  # by label
        self._streams: defaultdict[str, _Stream] = defaultdict(_Stream)  # by label
        self._cut: Line | None = None  # the first sign of a traceback without frames
        self._warned = -100  # the line of the last warning of C++
        self.quoted = False  # what is read is a text that quotes a traceback
        self._wrapped = ""  # the first part of a line that rich has wrapped

    @property
    def busy(self) -> bool:
        """Return whether the next line may belong to an error, whatever it contains."""
        return bool(self._open)

    @property
    def unfinished(self) -> bool:
        """Return whether a traceback, or a crash's stack, has not ended yet."""
        return any(not now.type for now in self._open.values())

    def read(self, line: Line) -> bool:
        """Read a line; return whether it belongs to an error."""
        self._read(line)
        now = self._open.get(line.label)
        return now is not None and now.number == line.number

    def add_message(self, line: Line, kind: str, message: str) -> None:
        """Add an error of which one line is in the log, without its type."""
        self._add(_Open(line, line.number, whole=False, type=kind, message=[message]).error)

    def _read(self, line: Line) -> None:
        text, now, stream = line.text, self._open.get(line.label), self._streams[line.label]
        if now and line.number - now.number > PATIENCE:
            self._finish(line.label)
            now = None
        if now and now.signal:
            if not text or text.startswith(("Thread ", "Current thread ")) or _FRAME.match(text):
                now.message.append(text)
                now.number = line.number
                return
            self._finish(line.label)
            now = None
        if text.strip().startswith(CHAINED):
            self._finish(line.label, closed=True)
            stream.chained = stream.last
            return
        if text.startswith(("Exception ignored in", "Exception in thread")):
            stream.ignored = line.number
        fatal, sign = _FATAL.search(text), _SIGN.match(text)
        if sign and not (sign["cpp"] and line.number - self._warned < 100):
            self._cut = self._cut or line
        self._warned = line.number if _CPP_WARNING.search(text) else self._warned
        frame = self._frame_in(line)
        if fatal:
            self._begin(line).signal = _SIGNALS.get(fatal["what"].strip(), "SIGABRT")
        elif HEADER in text:
            self._header(line, now)
        elif frame:
            self._frame(line, frame, now)
        elif not (now and self._in_traceback(line, now)):
            self._finish(line.label, closed=True)
            bare = _BARE.match(_TWICE.sub(r"\g<type>", text))
            if bare:
                found = self._begin(line, whole=False)
                found.type, found.message = bare["type"], [(bare["message"] or "").lstrip(": ")]

    def expire(self, number: int) -> None:
        """List the errors to which no line after this number can belong.

        The lines that follow need not be read then.
        """
        for label, now in list(self._open.items()):
            if number - now.number > (now.patience if now.type else PATIENCE):
                self._finish(label)

    def end(self) -> None:
        for label in list(self._open):
            self._finish(label)
        if not self.found and (line := self._cut):
            self._add(_Open(line, line.number, whole=False).error)

    def _begin(self, line: Line, whole: bool = True) -> _Open:
        self._finish(line.label)
        stream = self._streams[line.label]
        mixed = line.number <= stream.mixed_until
        now = _Open(line, line.number, whole=whole, mixed=mixed, after=stream.chained)
        self._open[line.label], stream.chained = now, 0
        return now

    def _header(self, line: Line, now: _Open | None) -> None:
        if re.search(r"\w", line.text.rpartition(HEADER)[2]):  # a text that quotes a traceback
            self._cut = self._cut or (
                line if f"{HEADER}:" in line.text and not self.quoted else None
            )
            return
        stream = self._streams[line.label]
        if now and not now.type:
            stream.mixed_until = line.number + MIXED
            now.mixed = True
        self._begin(line).ignored = self.quoted or line.number - stream.ignored <= 2

    def _frame_in(self, line: Line) -> re.Match[str] | None:
        text = line.text
        if '", line ' in text:
            return _FRAME.match(text)
        if text.startswith("│"):
            inner = text.strip("│ ")
            found = _RICH.match(f"│ {self._wrapped}{inner} │")
            wraps = (
                found is None
                and self.busy
                and inner.startswith("/")
                and "│" not in inner
                and "❱" not in inner
            )
            if "❱" in inner and not self.busy:
                self._cut = self._cut or line
            self._wrapped = inner + (" " if inner.endswith(" in") else "") if wraps else ""
            return found
        return _IPYTHON.match(text) if ".py" in text and self._open else None

    def _frame(self, line: Line, found: re.Match[str], now: _Open | None) -> None:
        if now is None or now.type:
            # After Ray's own line the traceback of the remote function follows, whole and without a
            # header.
            remote = now is not None and any("ray::" in part for part in now.message)
            now = self._begin(line, whole=remote)
        if not now.frames:
            now.indent = max(0, len(line.text) - len(line.text.lstrip()) - 2)
        now.number, now.wants_code = line.number, True
        function = (found.groupdict().get("function") or "").rpartition(".")[2]
        at = int(found["line"]) if found["line"] else None
        now.frames.append(
            {"file": found["file"], "line": at, "function": function, "module": "", "code": ""}
        )

    def _in_traceback(self, line: Line, now: _Open) -> bool:
        """Take a line that may be code, the last line of a traceback, or a part of its message."""
        text = line.text
        if now.type:
            return _continues(now, line)
        depth = len(text) - len(text.lstrip())
        error = (
            _ERROR.match(_TWICE.sub(r"\g<type>", text[depth:]))
            if depth in (0, now.indent)
            else None
        )
        if error and self._ends(line, error, now):
            return True
        if depth >= 4 and now.wants_code:
            now.frames[-1]["code"] = text.strip()[:200]
            now.number, now.wants_code = line.number, False
        return True

    def _ends(self, line: Line, error: re.Match[str], now: _Open) -> bool:
        kind = error["type"].partition("(")[0]
        now.whole = now.whole and bool(now.frames)
        if not now.frames and (not error["message"] or not _NAMED.search(kind)):
            return False
        if not _NAMED.search(kind):
            # "Epoch: 3" does not end a traceback, unless it is at the place of an error.
            near = line.number - now.number <= 2 and not now.wants_code
            if not near or not kind.rpartition(".")[2][:1].isupper() or _LOGGED.match(line.text):
                return False
        now.type, now.message, now.number = (
            error["type"],
            [(error["message"] or "").lstrip(": ")],
            line.number,
        )
        rank = now.begun.rank if line.rank is None else line.rank
        now.begun = replace(now.begun, number=line.number, rank=rank)
        return True

    def _finish(self, label: str, closed: bool = False) -> None:
        """List what is open under a label; ``closed``: only if its last line has been read."""
        now = self._open.get(label)
        if now is None or (closed and not now.type):
            return
        del self._open[label]
        if now.signal or now.type or now.frames:
            self._add(now.error)
        elif f"{HEADER}:" in now.begun.text:  # a mention has no colon
            self._cut = self._cut or now.begun

    def _add(self, error: Error) -> None:
        """List an error, or count it with an equal one."""
        key = error.key
        if key not in self.found and error.type:  # the message and the frames may be apart
            for each, other in self.found.items():
                unplaced = not (other.places and error.places)
                if each[:2] == key[:2] and (other.key == key or unplaced):
                    key = each
                    break
        if (old := self.found.get(key)) is None:
            if len(self.found) < MAX_ERRORS:
                self.found[key] = error
                self._streams[error.label].last = error.line
            return
        # The most complete one of equal errors represents all, at the place of the first.
        best = old
        if error.completeness > old.completeness:
            best = replace(error, line=old.line, label=old.label, rank=old.rank)
        record = best.record
        if key != error.key and (message := max(error.message, old.message, key=len)):
            record = {**record, "message": message}
        self.found[key] = replace(
            best,
            record=record,
            count=old.count + 1,
            ranks=tuple(sorted({*old.ranks, *error.ranks})),
            gpus=tuple(sorted({*old.gpus, *error.gpus})),
            last=error.line,
            ignored=error.ignored and old.ignored,
        )
        self._streams[best.label].last = best.line


def _continues(now: _Open, line: Line) -> bool:
    """Add a line to the message of a traceback that has ended, if it belongs to it."""
    text = line.text
    indented = text[:1] in (" ", "\t") and bool(text.strip())
    plain = (
        bool(text) and not _LOGGED.match(text) and not _BARE.match(text) and len(now.message) < 8
    )
    if text.lstrip().startswith("raise "):  # another process's code
        return False
    if line.number - now.number > now.patience or not (indented or plain) or len(now.message) >= 60:
        return False
    now.message.append(text[:MESSAGE])
    now.number = line.number
    return True
