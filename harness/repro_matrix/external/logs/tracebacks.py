"""The lines of a log -> the errors that were raised in it: tracebacks put together per process, each once. Pure.

Lines that name their process are easy. Where several processes write into one stream without a name, their lines
interleave: as ranks fail alike, a line belongs to the traceback that is behind another one and follows it; else to the
one whose turn it is (a ``File`` line and its code alternate). Where neither decides, the tracebacks are ``mixed``.

Read as well: a traceback whose beginning is cut off, rich's boxes, IPython's, faulthandler's dump of a crash, what
torchrun says at the end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from repro_matrix.external.logs.distinct import Distinct, Error
from repro_matrix.external.logs.lines import HEADER, Line

OPEN = 64  # tracebacks at a time
PATIENCE = 4000  # lines until a traceback that got no more of its own is given up
MESSAGE = 4000  # characters
FRAMES = 400
_FRAME = re.compile(r'^[\s^~]*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:,? in (?P<function>.+?))?\s*$')
_RICH = re.compile(r"^│ (?P<file>\S.*?):(?P<line>\d+) in (?P<function>\S+)\s*│$")
_IPYTHON = re.compile(r"^(?:File )?(?P<file>[~/][^\s:]*\.py)(?::(?P<line>\d+))?,? in (?P<function>[\w.<>]+)\(.*$")
_ERROR = re.compile(r"^(?P<type>[A-Za-z_][\w]*(?:\.[A-Za-z_]\w*)*(?:\([\w.]+\))?)(?:: ?(?P<message>.*))?$")
_NAMED = re.compile(r"(?:Error|Exception|Warning|Interrupt|Exit|Iteration|Timeout|Failure|Fault)$")
# Without a traceback only a line that looks like the end of one is an error.
_BARE = re.compile(r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)): (?P<message>\S.*)$")
_CARET = re.compile(r"^\s*[~^]+\s*$")
_FATAL = re.compile(r"Fatal Python error: (?P<what>[\w ]+)")
_SIGNALS = {
    "Segmentation fault": "SIGSEGV", "Aborted": "SIGABRT", "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE", "Illegal instruction": "SIGILL",
}  # fmt: skip
_WHILE = "During handling of the above exception, another exception occurred"
_FROM = "The above exception was the direct cause of the following exception"
_LOGGED = re.compile(
    r"^(?:\[|\d{4}-\d\d|[IWEF]\d{4} |(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)\b|={4}|-{4}|\{|srun|slurm|Traceback)"
)


@dataclass
class _Open:
    """A traceback that is being read."""

    label: str
    rank: int | None
    header: bool
    number: int  # of its last line
    begun: int
    indent: int = 0  # of the whole traceback, where it stands indented in its log
    frames: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    wants_code: bool = False
    cause: dict[str, Any] | None = None
    whole: bool = True
    mixed: bool = False
    # once its last line has been read:
    type: str = ""
    message: list[str] = field(default_factory=list)
    said: int = 0

    @property
    def closed(self) -> bool:
        return bool(self.type)


@dataclass
class Errors:
    """Puts the tracebacks of a log together, line by line; ``kept`` holds each error once, in order."""

    kept: Distinct = field(default_factory=Distinct)
    _open: list[_Open] = field(default_factory=list)
    _last: dict[str, dict[str, Any]] = field(default_factory=dict)  # label -> the exception it raised last
    _cause: dict[str, dict[str, Any]] = field(default_factory=dict)  # label -> what the next traceback follows from
    _crash: tuple[Line, str, list[str]] | None = None
    _wrapped: str = ""  # the first half of a rich frame that was too wide

    @property
    def busy(self) -> bool:
        """Whether following lines may belong to something that was begun."""
        return bool(self._open) or self._crash is not None

    def read(self, line: Line) -> None:
        text = line.text
        if self._crash is not None and self._crash_goes_on(line):
            return
        fatal = _FATAL.search(text)
        if fatal:
            self._crash = (line, _SIGNALS.get(fatal["what"].strip(), "SIGABRT"), [])
            return
        if HEADER in text:
            self._header(line)
            return
        frame = self._frame_in(text)
        if frame:
            self._frame(line, frame)
            return
        if text.startswith((_WHILE, _FROM)):
            self._finish([each for each in self._open if each.label == line.label and each.closed])
            if line.label in self._last:
                self._cause[line.label] = self._last[line.label]
            return
        self._other(line)
        if len(self._open) > 1 or (self._open and line.number % 256 == 0):
            self._finish([each for each in self._open if line.number - each.number > PATIENCE])

    def end(self) -> None:
        if self._crash is not None:
            self._crashed()
        self._finish(list(self._open))

    # --- the parts of a traceback

    def _header(self, line: Line) -> None:
        self._finish([each for each in self._open if each.label == line.label and each.closed])
        while len(self._open) >= OPEN:
            self._finish(self._open[:1])
        cause = self._cause.pop(line.label, None)
        self._open.append(
            _Open(line.label, line.rank, True, line.number, line.number, cause=cause)
        )  # fmt: skip

    def _frame_in(self, text: str) -> re.Match[str] | None:
        if '", line ' in text:
            return _FRAME.match(text)
        if text.startswith("│"):
            if self._wrapped:
                joined = f"│ {self._wrapped}{text[1:].rstrip('│ ').strip()} │"
                self._wrapped = ""
                return _RICH.match(joined)
            found = _RICH.match(text)
            inner = text.strip("│ ")
            if found is None and self._open and inner.startswith("/") and "│" not in inner and "❱" not in inner:
                self._wrapped = inner + (" " if inner.endswith(" in") else "")
            return found
        return _IPYTHON.match(text) if ".py" in text and self._open else None

    def _frame(self, line: Line, found: re.Match[str]) -> None:
        owner = self._owner(line, frame=True)
        if owner is None:
            # After Ray's own line the traceback of the remote function follows, whole and without a header.
            before = [each for each in self._open if each.label == line.label and each.closed]
            remote = any("ray::" in part for each in before for part in each.message)
            self._finish(before)
            owner = _Open(line.label, line.rank, False, line.number, line.number, whole=remote)
            self._open.append(owner)
        if not owner.frames:
            owner.indent = max(0, len(line.text) - len(line.text.lstrip()) - 2)
        owner.number = line.number
        owner.lines.append(line.text.strip())
        owner.wants_code = True
        if len(owner.frames) >= FRAMES:
            del owner.frames[FRAMES // 2]
        function = (found.groupdict().get("function") or "").rpartition(".")[2]
        at = int(found["line"]) if found["line"] else None
        owner.frames.append({"file": found["file"], "line": at, "function": function, "module": "", "code": ""})

    def _owner(self, line: Line, frame: bool) -> _Open | None:
        """The open traceback that a line goes to."""
        mine = [each for each in self._open if each.label == line.label and not each.closed]
        if not mine and frame:
            # A header under a prefix that its other lines lack ("ERROR: Traceback ...").
            strays = [
                e for e in self._open if e.header and not e.frames and line.number - e.begun <= 2 and not e.closed
            ]
            for each in strays[-1:]:
                each.label, each.rank = line.label, line.rank
                return each
        if len(mine) <= 1:
            return mine[0] if mine else None
        text = line.text.strip()
        ahead = [each for each in self._open if each.label == line.label]  # also those that have ended
        for each in sorted(mine, key=lambda item: len(item.lines)):
            at = len(each.lines)
            if any(o is not each and o.lines[: at + 1] == [*each.lines, text] for o in ahead):
                return each
        fit = [each for each in mine if each.wants_code != frame] or mine
        if len({tuple(each.lines) for each in fit}) > 1:
            for each in fit:
                each.mixed = True
        return max(fit, key=lambda item: (len(item.lines), item.number))

    def _other(self, line: Line) -> None:
        """Code, the last line of a traceback, a message that goes on, or nothing of it."""
        text = line.text
        if text[:1] in (" ", "\t", "│", "╰", "❱"):
            self._indented(line)
            return
        error = _ERROR.match(text)
        if error:
            owner = self._ends(line, error)
            if owner is not None:
                return
        for each in self._open:
            if each.closed and each.label == line.label:
                self._goes_on(each, line, least=not error)
        self._finish([each for each in self._open if each.closed and each.number < line.number and
                      each.label == line.label])  # fmt: skip
        bare = _BARE.match(text)
        if bare and error:
            self._open.append(_Open(line.label, line.rank, False, line.number, line.number, whole=False,
                                    type=bare["type"], message=[bare["message"]], said=line.number))  # fmt: skip

    def _indented(self, line: Line) -> None:
        code = line.text.startswith("    ") and any(
            each.wants_code and each.label == line.label and not each.closed for each in self._open
        )
        for each in self._open:
            if each.closed and each.label == line.label and not code and self._goes_on(each, line, least=True):
                return
        depth = len(line.text) - len(line.text.lstrip())
        if any(each.indent == depth and each.label == line.label and not each.closed for each in self._open):
            inner = replace(line, text=line.text.strip())
            error = _ERROR.match(inner.text)
            if error and self._ends(inner, error):
                return
        owner = self._owner(line, frame=False)
        if owner is None:
            return
        if _CARET.match(line.text):
            owner.number = line.number
        elif owner.wants_code and line.text.startswith("    "):
            owner.number = line.number
            owner.lines.append(line.text.strip())
            owner.wants_code = False
            owner.frames[-1]["code"] = line.text.strip()[:200]

    def _ends(self, line: Line, error: re.Match[str]) -> _Open | None:
        mine = [each for each in self._open if each.label == line.label and not each.closed and each.frames]
        if not mine:
            return None
        if not _NAMED.search(error["type"].partition("(")[0]):
            # "Epoch: 3" ends no traceback, unless it stands where one ends.
            mine = [each for each in mine if line.number - each.number == 1 and not each.wants_code]
            if not mine or not error["type"].rpartition(".")[2][:1].isupper() or _LOGGED.match(line.text):
                return None
        text = line.text
        following = [e for e in mine if any(o.type and o.lines == e.lines and _said(o) == text for o in self._open)]
        ready = [each for each in mine if not each.wants_code] or mine
        owner = (following or sorted(ready, key=lambda item: item.number))[0 if following else -1]
        if len(ready) > 1 and len({tuple(each.lines) for each in ready}) > 1:
            owner.mixed = True
        owner.type, owner.said, owner.number = error["type"], line.number, line.number
        owner.message = [error["message"] or ""]
        if line.rank is not None:
            owner.rank = line.rank
        self._last[owner.label] = self._exception(owner)
        return owner

    def _goes_on(self, each: _Open, line: Line, least: bool) -> bool:
        """Whether a line belongs to the message of a traceback that has ended; it is added then."""
        text = line.text
        near = line.number - each.number <= 1
        indented = text[:1] in (" ", "\t") and bool(text.strip())
        plain = least and bool(text) and not _LOGGED.match(text) and len(each.message) < 8
        size = sum(map(len, each.message))
        if not near or not (indented or plain) or size >= MESSAGE or len(each.message) >= 60:
            return False
        each.message.append(text[:MESSAGE])
        each.number = line.number
        return True

    # --- crashes

    def _crash_goes_on(self, line: Line) -> bool:
        first, _, lines = self._crash or (line, "", [])
        if line.label != first.label:
            return False
        text = line.text
        if not text or text.startswith(("Thread ", "Current thread ")) or _FRAME.match(text):
            if len(lines) < FRAMES:
                lines.append(text)
            return True
        self._crashed()
        return False

    def _crashed(self) -> None:
        line, name, lines = self._crash or (Line(0, "", None, ""), "", [])
        self._crash = None
        self.kept.add(Error(line.number, line.label, line.rank, {}, name, "\n".join(lines), whole=bool(lines)))

    # --- what was found

    def _finish(self, those: list[_Open]) -> None:
        for each in those:
            if each not in self._open:
                continue
            self._open.remove(each)
            if not each.closed and not each.frames:
                continue  # a header alone
            error, whole = self._exception(each), each.whole and each.closed
            self._last[each.label] = error
            self.kept.add(Error(each.said or each.begun, each.label, each.rank, error, whole=whole, mixed=each.mixed))

    def _exception(self, each: _Open) -> dict[str, Any]:
        kind = each.type.rpartition(".")[2] if "(" not in each.type else each.type
        module = each.type.rpartition(".")[0] if "(" not in each.type else ""
        message = "\n".join(each.message).rstrip()[:MESSAGE]
        return {"type": kind, "module": module, "message": message, "frames": each.frames, "cause": each.cause}


def _said(each: _Open) -> str:
    return f"{each.type}: {each.message[0]}" if each.message and each.message[0] else each.type
