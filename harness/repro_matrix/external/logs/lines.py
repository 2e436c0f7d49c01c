"""One line of a log: what launchers put before it, and what was said. Pure.

torchrun, Ray, SLURM, mpirun, DeepSpeed's pdsh and containers each put a prefix before every line of a process; time
stamps may stand before or after it. Prefixes that are not known by their shape are learned: whatever stands before
``Traceback (most recent call last)`` stands before the lines that belong to it, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

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
_MOST = 512  # prefixes that are learned


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
                    label, rank, text = prefix, of, _after_time(text[len(prefix) :])
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
        text = _after_format(_after_time(text))
        label, rank = "", None
        for _ in range(3):  # a label may stand inside another one's
            found = next((m for m in (pattern.match(text) for pattern in _LABELS) if m), None)
            if found is None:
                break
            label += found.group().strip()
            said = found.groupdict().get("rank")
            rank = int(said) if said else rank
            text = _after_format(_after_time(text[found.end() :]))
        return label, rank, text

    def _learn(self, text: str, at: int) -> tuple[str, int | None, str]:
        prefix = text[:at]
        if prefix.isspace():
            return "", None, text
        found = _LEARNED.fullmatch(prefix)
        if found is None or len(self.learned) >= _MOST:
            # A progress bar, or a sentence: the lines that follow do not have it.
            return "", None, text[at:] if text.startswith(HEADER, at) else text
        rank = int(found["rank"]) if found["rank"] else None
        self.learned[prefix] = rank
        return prefix, rank, text[at:]


def _after_time(text: str) -> str:
    if text[:1].isdigit() or (text[:1] == "[" and text[1:2].isdigit()):
        found = _TIME.match(text)
        if found:
            return text[found.end() :]
    return text


def _after_format(text: str) -> str:
    found = _FORMAT.match(text) if text[:1] in "DIWEC" else None
    return text[found.end() :] if found else text
