"""The errors of a log, each once, however many ranks raised it and however their lines interleave. Pure."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

DISTINCT = 300  # errors that are kept


@dataclass(frozen=True)
class Error:
    """One error of the log; ``record`` is what a rank of ours would have recorded (docs/concepts/evidence.md)."""

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
    """``found``: in order; ``more``: errors beyond DISTINCT."""

    found: list[Error] = field(default_factory=list)
    more: int = 0
    _keys: dict[tuple[str, ...], int] = field(default_factory=dict)

    def add(self, error: Error) -> None:
        key = _key(error)
        at = self._keys.get(key)
        if at is None and (twin := self._twin(error)) is not None:
            at, error = twin
            self._keys.setdefault(_key(error), at)
        if at is None:
            if len(self.found) >= DISTINCT:
                self.more += 1
                return
            self._keys[key] = len(self.found)
            ranks_of = () if error.rank is None else (error.rank,)
            self.found.append(replace(error, labels=(error.label,), ranks=ranks_of))
            return
        old = self.found[at]
        # Of several alike the one that is whole stands for all, at the place of the first.
        better = (error.whole, not error.mixed, len(error.places)) > (old.whole, not old.mixed, len(old.places))
        base = replace(error, line=old.line, label=old.label, rank=old.rank) if better else old
        if error.mixed and old.mixed and error.places == old.places:
            base = replace(base, mixed=False)  # put together alike twice
        labels = sorted({*old.labels, error.label})[:512]
        ranks = sorted({*old.ranks, *(() if error.rank is None else (error.rank,))})[:4096]
        self.found[at] = replace(base, count=old.count + 1, labels=tuple(labels), ranks=tuple(ranks))

    def _twin(self, error: Error) -> tuple[int, Error] | None:
        """One kept before that says the same, where lines of one of the two may stand among the other's: its frames are
        some of the whole one's, or those of both are two equal tracebacks dealt out unevenly, each frame an even number
        of times. Where it stands, and the error with a whole traceback's frames."""
        for at, old in enumerate(self.found):
            if not (old.mixed or error.mixed) or (old.type, old.message) != (error.type, error.message):
                continue
            if not (old.mixed and error.mixed):
                part, whole = (old, error) if old.mixed else (error, old)
                if not Counter(map(_name, part.places)) - Counter(map(_name, whole.places)):
                    return at, replace(error, record=whole.record)
                continue
            if old.count > 1:
                continue
            fuller = max(old, error, key=lambda one: len(one.places))
            times = Counter(map(_name, (*old.places, *error.places)))
            if any(count % 2 for count in times.values()):
                continue
            left = {frame: count // 2 for frame, count in times.items()}
            half = []
            for frame in fuller.places:
                if left[_name(frame)]:
                    left[_name(frame)] -= 1
                    half.append(frame)
            if not any(left.values()):  # the fuller one has a whole traceback's
                self.found[at] = replace(old, record={**old.record, "frames": half})
                return at, replace(error, record={**error.record, "frames": half})
        return None


def _name(frame: dict[str, Any]) -> tuple[Any, Any, Any]:
    return frame["file"], frame["line"], frame["function"]


def _key(error: Error) -> tuple[str, str, str]:
    """What errors have in common that are put together."""
    last = error.places[-1] if error.places else {}
    where = f"{last.get('file')}:{last.get('line')}" if last else error.stack[-2000:]
    return error.type, re.sub(r"\d+", "N", error.message.partition("\n")[0])[:300], where
