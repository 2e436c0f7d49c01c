"""What the ranks of an attempt said: the error of each, who ended it, why it counts as hung. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from repro_matrix.grading.observation import NO_RECORD, number
from repro_matrix.records.observation import Observation, Rank
from repro_matrix.records.rank import Frame, Record
from repro_matrix.report.sanitize import harmless, line

LOG = 1200  # characters of a rank's log that are shown
MESSAGE = 1200  # and of an error's message
MOST_RANKS = 16  # whose errors are listed one by one
FRAMES = 6  # innermost frames of an exception


@dataclass(frozen=True)
class RankSaid:
    """What went wrong on ranks that say the same."""

    ranks: str
    how: str  # exit code, signal, or who ended it
    type: str
    message: str
    frames: tuple[str, ...]
    log: str


def record_of(rank: Rank) -> Record:
    return rank["record"] or NO_RECORD


def said(ranks: Sequence[Rank]) -> Iterable[RankSaid]:
    """The error of every rank; those that say the same are one entry."""
    found: dict[tuple[str, str, str, tuple[str, ...]], list[tuple[int, str]]] = {}
    for rank in ranks:
        error = record_of(rank)["exception"]
        how = _ended(rank)
        if not error and how == "finished":
            continue
        frames = tuple(_frame(frame) for frame in error["frames"][-FRAMES:]) if error else ()
        kind, message = (line(error["type"]), harmless(error["message"], MESSAGE)) if error else ("", "")
        found.setdefault((how, kind, message, frames), []).append((rank["rank"], rank["log_tail"]))
    for (how, kind, message, frames), members in list(found.items())[:MOST_RANKS]:
        log = next((log for _, log in members if log), "")
        said = "" if kind else harmless(log[-LOG:], LOG).strip()  # an exception's frames are the end of its log
        yield RankSaid(numbered([r for r, _ in members]), how, kind, message, frames, said)


def _ended(rank: Rank) -> str:
    record = record_of(rank)
    phase = f" in {line(record['phase'], 60)}" if record["phase"] and not record["done"] else ""
    if rank["ended_by"] != "self":
        return f"ended by the {line(rank['ended_by'], 40)}{phase}"
    if rank["signal"]:
        return f"died of {line(rank['signal'], 40)}{phase}"
    if rank["exit_code"] not in (0, None):
        return f"exit code {rank['exit_code']}{phase}"
    return "finished" if record["done"] else f"did not finish{phase}"


def _frame(frame: Frame) -> str:
    where = ".".join(filter(None, (frame["module"], frame["function"])))
    code = frame.get("code")
    return line(f"{where}:{frame['line']}" + (f"  {code}" if code else ""), 200)


def numbered(ranks: Iterable[int]) -> str:
    """0-3, 7"""
    found: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def why_hang(seen: Observation) -> str:
    hang = seen["attempt"].get("hang")
    if not hang:
        return ""
    if hang["never_meet"]:
        return hang["never_meet"]
    limit = number(hang["limit_s"])
    return f"still at work after {limit:.0f} s" if limit else ""
