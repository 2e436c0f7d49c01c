"""Put the tracebacks of a log together, per process, each error once. Pure.

torchrun, Ray, SLURM, mpirun, pdsh and containers put a prefix before every line of a process; time stamps may stand
before or after it. Prefixes of another shape are learned: what stands before ``Traceback (most recent call last)``
stands before the lines that belong to it, too. Where several processes write into one stream without a prefix, their
tracebacks interleave: they are marked as ``mixed``, and nothing is recognised by their frames.

Read as well: a traceback whose beginning is cut off, rich's boxes, IPython's, faulthandler's dump of a crash.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

HEADER = "Traceback (most recent call last)"
ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_TIME = re.compile(
    r"\[?(?:\d{4}[-/]\d\d[-/]\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:?"
    r"(?: \[?(?:stderr|stdout)\]?[F:]?)?\s?"
)
# Each names its process, so that the lines of one belong together; the group is its rank, where the label tells it.
_LABELS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\[rank:? ?(?P<rank>\d+)\]:? ?",  # torch, Lightning
        r"\[[A-Za-z_]+(?P<rank>\d+)\]: ?",  # torchrun --tee: its role and rank
        r"\[\d+,(?P<rank>\d+)\]<std(?:err|out)>: ?",  # mpirun --tag-output
        r"\((?:[\w.:<>-]+ )*pid=\d+(?:, [a-z_]+=[^,()]+)*\) ?",  # Ray
        r"[\w.-]*\w {1,20}\| ",  # docker compose
    )
)
# A logger's format before every line of a traceback.
_FORMAT = re.compile(r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./]+:\d+\] ?")
_LEARNED = re.compile(r"(?P<rank>\d+): ?|[\w.@-]+: ?|[\w.-]+ +\| ?|\[?[\w./:-]+\]? ?")
_REPEATED = re.compile(r" \[repeated \d+x across cluster\].*$")
MAX_PREFIXES = 512  # that are learned


@dataclass(frozen=True)
class Line:
    number: int
    label: str  # of the process that wrote it, "" where nothing tells
    rank: int | None
    text: str


@dataclass
class Labels:
    """What prefixes a log has; learns as it goes."""

    learned: dict[str, int | None] = field(default_factory=dict)

    def split(self, raw: bytes, number: int) -> Line:
        text = raw.decode("utf-8", errors="replace").rstrip()
        if "\x1b" in text:
            text = ANSI.sub("", text)
        label, rank, text = self._known(text)
        if not label:
            for prefix, of in self.learned.items():
                if text.startswith(prefix):
                    label, rank, text = prefix, of, _without_time(text[len(prefix) :])
                    break
            else:
                at = text.find(HEADER)
                if at < 0:
                    at = text.find('  File "')
                label, rank, text = self._learn(text, at) if at > 0 else ("", None, text)
        if label and text.endswith("cluster]"):
            text = _REPEATED.sub("", text)
        return Line(number, label, rank, text)

    def _known(self, text: str) -> tuple[str, int | None, str]:
        text = _without_format(_without_time(text))
        label, rank = "", None
        for _ in range(3):  # a label may stand inside another one's
            found = next((m for m in (pattern.match(text) for pattern in _LABELS) if m), None)
            if found is None:
                break
            label += found.group().strip()
            number = found.groupdict().get("rank")
            rank = int(number) if number else rank
            text = _without_format(_without_time(text[found.end() :]))
        return label, rank, text

    def _learn(self, text: str, at: int) -> tuple[str, int | None, str]:
        prefix = text[:at]
        if prefix.isspace():
            return "", None, text
        found = _LEARNED.fullmatch(prefix)
        if found is None or len(self.learned) >= MAX_PREFIXES:
            # A progress bar, or a sentence: the lines that follow do not have it.
            return "", None, text[at:] if text.startswith(HEADER, at) else text
        rank = int(found["rank"]) if found["rank"] else None
        self.learned[prefix] = rank
        return prefix, rank, text[at:]


def _without_time(text: str) -> str:
    if text[:1].isdigit() or (text[:1] == "[" and text[1:2].isdigit()):
        found = _TIME.match(text)
        if found:
            return text[found.end() :]
    return text


def _without_format(text: str) -> str:
    found = _FORMAT.match(text) if text[:1] in "DIWEC" else None
    return text[found.end() :] if found else text


# --- distinct errors

MAX_ERRORS = 300  # different ones that are listed


@dataclass(frozen=True)
class Error:
    """One error of the log; ``record`` is what a rank of ours would have recorded (docs/observation.md)."""

    line: int  # of its message, else of its beginning
    label: str
    rank: int | None
    record: dict[str, Any]  # its exception; empty for a signal
    signal: str = ""
    stack: str = ""  # of a signal, as faulthandler printed it
    whole: bool = True  # nothing of it is cut off
    mixed: bool = False  # lines of another traceback may be among its own
    count: int = 1
    labels: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def type(self) -> str:
        return self.signal or str(self.record.get("type", ""))

    @property
    def message(self) -> str:
        return str(self.record.get("message", ""))

    @property
    def places(self) -> list[dict[str, Any]]:
        return list(self.record.get("frames") or ())


@dataclass
class Distinct:
    """``errors``: in order; ``more``: how many beyond MAX_ERRORS."""

    errors: list[Error] = field(default_factory=list)
    more: int = 0
    _keys: dict[tuple[str, ...], int] = field(default_factory=dict)

    def add(self, error: Error) -> None:
        key = _key(error)
        at = self._keys.get(key)
        if at is None:
            if len(self.errors) >= MAX_ERRORS:
                self.more += 1
                return
            self._keys[key] = len(self.errors)
            ranks_of = () if error.rank is None else (error.rank,)
            self.errors.append(replace(error, labels=(error.label,), ranks=ranks_of))
            return
        old = self.errors[at]
        # Of equal errors the one that is whole stands for all, at the place of the first.
        better = (error.whole, not error.mixed, len(error.places)) > (old.whole, not old.mixed, len(old.places))
        base = replace(error, line=old.line, label=old.label, rank=old.rank) if better else old
        labels = sorted({*old.labels, error.label})[:512]
        ranks = sorted({*old.ranks, *(() if error.rank is None else (error.rank,))})[:4096]
        self.errors[at] = replace(base, count=old.count + 1, labels=tuple(labels), ranks=tuple(ranks))


def _key(error: Error) -> tuple[str, str, str]:
    """What errors have in common that are put together."""
    last = error.places[-1] if error.places else {}
    where = f"{last.get('file')}:{last.get('line')}" if last else error.stack[-2000:]
    return error.type, re.sub(r"\d+", "N", error.message.partition("\n")[0])[:300], where


# --- tracebacks

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
    ended: int = 0

    @property
    def closed(self) -> bool:
        return bool(self.type)


@dataclass
class Errors:
    """Puts the tracebacks of a log together, line by line; ``distinct`` holds each error once, in order."""

    distinct: Distinct = field(default_factory=Distinct)
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
        for each in mine:
            each.mixed = True  # no line says whose it is
        fit = [each for each in mine if each.wants_code != frame] or mine
        return max(fit, key=lambda item: item.number)

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
                                    type=bare["type"], message=[bare["message"]], ended=line.number))  # fmt: skip

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
        owner = max([each for each in mine if not each.wants_code] or mine, key=lambda item: item.number)
        owner.mixed = owner.mixed or len(mine) > 1
        owner.type, owner.ended, owner.number = error["type"], line.number, line.number
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
        self.distinct.add(Error(line.number, line.label, line.rank, {}, name, "\n".join(lines), whole=bool(lines)))

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
            self.distinct.add(
                Error(each.ended or each.begun, each.label, each.rank, error, whole=whole, mixed=each.mixed)
            )

    def _exception(self, each: _Open) -> dict[str, Any]:
        kind = each.type.rpartition(".")[2] if "(" not in each.type else each.type
        module = each.type.rpartition(".")[0] if "(" not in each.type else ""
        message = "\n".join(each.message).rstrip()[:MESSAGE]
        return {"type": kind, "module": module, "message": message, "frames": each.frames, "cause": each.cause}
