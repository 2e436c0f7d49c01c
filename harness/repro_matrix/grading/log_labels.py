"""Split the labels of processes off the lines of a log. Pure.

torchrun, Ray, SLURM, mpirun, pdsh and containers put a prefix before every line of a process; time
stamps may stand before or after it. Prefixes of another shape are learned: what stands before
``Traceback (most recent call last)`` stands before the lines that belong to it, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from repro_matrix.text import ESCAPE

HEADER = "Traceback (most recent call last)"
# A time stamp or a logger's format, which say nothing of the process.
_TIME = re.compile(
    r"\[?(?:\d{4}[-/]\d\d[-/]\d\d[T ]|[A-Z][a-z]{2} [ \d]\d"
    r" )?\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:?"
    r"(?: \[?(?:stderr|stdout)\]?[F:]?)?\s?(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (?:\d+"
    r" )?\[[\w./]+:\d+\] ?)?"
    r"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./]+:\d+\] ?"
)
# Each names its process, so that the lines of one belong together; the group is its rank, where the
# label has it.
_LABEL = re.compile(
    r"\[rank:? ?(?P<a>\d+)\]:? ?"  # torch, Lightning
    r"|\[[A-Za-z_]+(?P<b>\d+)\]: ?"  # torchrun --tee: its role and rank
    # mpirun --tag-output, SageMaker
    r"|\[\d+,(?:mpirank:)?(?P<c>\d+)(?:,[\w-]+)?\]<std(?:err|out)>: ?"
    r"|\((?:[\w.:<>-]+ )*pid=\d+(?:, [a-z_]+=[^,()]+)*\) ?"  # Ray
    r"|[\w.-]*\w {1,20}\| "  # docker compose
    # pdsh, a pod or a number before torch's own label
    r"|[^\s=]{1,80}[:|\])>] ?(?=\[(?:rank|default)\d+\]:)"
)
_LEARNED = re.compile(
    r"(?P<rank>\d+): ?|[\w.@-]+: ?|[\w.-]+ +\| ?|\[?[\w./:-]+\]? ?"
    # a job's own, a quotation, milabench
    r"|[\[(<][^\[\]<>]{1,80}[\])>]:? ?|(?:> ?)+|[\w.-]+ \[std(?:err|out)\] ?"
)
_REPEATED = re.compile(r" \[repeated \d+x across cluster\].*$")
_LEVEL = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")  # no process is named so
MAX_PREFIXES = 512  # that are learned
FORMATTED = 3  # lines after a traceback's last one of code that may begin with the logger's format


@dataclass(frozen=True)
class Line:
    number: int
    label: str  # of the process that wrote it, "" if unknown
    rank: int | None
    text: str


@dataclass
class Labels:
    """Split the prefixes off a log's lines; learn those of another shape."""

    learned: dict[str, int | None] = field(default_factory=dict)
    _format: re.Pattern[str] | None = None  # a logger's, before the header of the last traceback
    _until: int = 0  # the last line that is expected to begin with it

    def split(self, raw: str, number: int) -> Line:
        text = ESCAPE.sub("", raw).rstrip() if "\x1b" in raw else raw.rstrip()
        label, rank, text = _known(text)
        if not label:
            prefix = next((each for each in self.learned if text.startswith(each)), None)
            if prefix is not None:
                label, rank, text = prefix, self.learned[prefix], without_time(text[len(prefix) :])
            else:
                at = text.find(HEADER) if HEADER in text else text.find('  File "')
                label, rank, text = self._learn(text, at) if at > 0 else ("", None, text)
        text = self._without_format(text, number)
        return Line(
            number,
            label,
            rank,
            _REPEATED.sub("", text) if label and text.endswith("cluster]") else text,
        )

    def _learn(self, text: str, at: int) -> tuple[str, int | None, str]:
        prefix = text[:at]
        found = _LEARNED.fullmatch(prefix)
        if found is None or _LEVEL.search(prefix) or len(self.learned) >= MAX_PREFIXES:
            return "", None, text
        self.learned[prefix] = int(found["rank"]) if found["rank"] else None
        return prefix, self.learned[prefix], text[at:]

    def _without_format(self, text: str, number: int) -> str:
        """Return a line without a logger's format before a traceback's header.

        The logger may write it before each of the lines that follow too. Other text before the
        header (a progress bar, a sentence) is not before those lines.
        """
        if (at := text.find(HEADER)) > 0 and text.strip("\"': ").endswith(HEADER):
            self._format = re.compile(re.sub(r"\d+", r"\\d+", re.escape(text[:at])))
        found = (
            self._format.match(text) if self._format and (at > 0 or number <= self._until) else None
        )
        if at > 0 or (found and text.startswith(" ", found.end())):
            self._until = number + FORMATTED
        return text[at:] if at > 0 else text[found.end() :] if found else text


def _known(text: str) -> tuple[str, int | None, str]:
    text = without_time(text)
    label, rank = "", None
    while found := _LABEL.match(text):  # a label may stand inside another one's
        label += found.group().strip()
        rank = int(found[found.lastgroup]) if found.lastgroup else rank
        text = without_time(text[found.end() :])
    return label, rank, text


def without_time(text: str) -> str:
    """Return a line without the time stamp at its beginning."""
    found = _TIME.match(text)
    return text[found.end() :] if found else text
