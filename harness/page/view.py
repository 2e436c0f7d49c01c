"""What is to be shown of a cell's document. Pure: a document (judged) -> a ``Cell``, which templates and formats read.

Every text that another program wrote goes through ``safe`` here; a text that is only in the document is not shown.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from repro_matrix.cell.types import Document
from repro_matrix.conf.packages import UPSTREAM
from repro_matrix.conf.schema import Case
from repro_matrix.judge import checks
from repro_matrix.judge.evidence import items, mapping, number, text
from repro_matrix.page import change, hangs
from repro_matrix.page.marks import Mark, mark, of_row
from repro_matrix.page.safe import harmless, line
from repro_matrix.results import rows

LOG = 1200  # characters of a rank's log that are shown
MESSAGE = 1200  # and of an error's message
MOST_RANKS = 16  # whose errors are listed one by one
MOST_PROOFS = 24
FRAMES = 6  # innermost frames of an exception
PACKAGES = (*UPSTREAM, "numpy")


@dataclass(frozen=True)
class RankSaid:
    """What went wrong on ranks that say the same."""

    ranks: str
    how: str  # exit code, signal, or who ended it
    type: str
    message: str
    frames: tuple[str, ...]
    log: str


@dataclass(frozen=True)
class Proof:
    """One check over all ranks of an attempt."""

    name: str
    state: str  # passed, failed, void
    got: str
    want: str
    tolerance: str
    looked_at: str
    ranks: str


@dataclass(frozen=True)
class Span:
    """When an attempt ran, where, and how it came out."""

    started: float
    ended: float
    devices: tuple[str, ...]  # empty: the CPU
    outcome: str
    arm: str
    run: str  # attempts of one run share it


@dataclass(frozen=True)
class ArmView:
    name: str
    help: str
    mark: Mark
    expected: Mark | None
    expectation: Mark | None  # the verdict that was expected, where another one was seen
    reason: str
    outcome: str
    kinds: tuple[str, ...]  # what its attempts came out as, the most frequent first
    infra: bool  # and it is no evidence
    attempts: int
    counts: str  # clean 3 of 3 (44 to 100 %)
    numbers: str  # seconds, memory
    changes: tuple[change.Change, ...]
    said: tuple[RankSaid, ...]
    hang: tuple[hangs.Node, ...]
    why_hang: str
    proofs: tuple[Proof, ...]
    metrics: tuple[tuple[str, str], ...]
    command: str
    torchrun: str
    skipped: str
    muted: str = ""  # by whom, until when and why


@dataclass(frozen=True)
class Cell:
    id: str  # of the page: stable while the cell, its stack and its machine are the same
    case: str
    title: str
    kind: str
    simulated: str
    model: str
    strategy: str
    also: str  # flags and variants: what makes it another cell than the usual one
    ranks: int
    stack: str
    versions: tuple[tuple[str, str], ...]
    hardware: str
    machine: str
    when: str
    started: float
    commit: str
    ran: str  # the command of the run
    where: str
    axes: str  # the same without its case
    path: str
    scale: str
    weights: str
    source: str  # which of several results
    arms: tuple[ArmView, ...]
    rows: tuple[Mapping[str, Any], ...]  # repro_matrix.results.rows of the same arms
    spans: tuple[Span, ...] = ()
    states: tuple[str, ...] = field(default=())  # expected, unexpected ...: what the filter knows

    @property
    def groups(self) -> list[tuple[Mark, list[str]]]:
        """Arms by how they look, the worst first."""
        found: dict[Mark, list[str]] = {}
        for arm in self.arms:
            found.setdefault(arm.mark, []).append(arm.name)
        return sorted(found.items(), key=lambda item: WORST.index(item[0].tone))

    @property
    def odd(self) -> list[ArmView]:
        return [arm for arm in self.arms if arm.expected and arm.expected.name in ("unexpected", "differs from cpu")]


WORST = ("bad", "warn", "fire", "good", "info", "none")


def cell(document: Document, case: Case | None = None, source: str = "") -> Cell:
    """``case``: its arms' help, where the catalogue has it. ``source``: which results these are."""
    listed = rows.arm_rows(document)
    arms = mapping(document.get("arms"))
    base = mapping(mapping(arms.get("broken")).get("settings"))
    stack, hardware = mapping(document.get("stack")), mapping(document.get("hardware"))
    versions = mapping(stack.get("versions"))
    told = mapping(document.get("provenance"))
    started = number(told.get("started")) or 0.0
    also = [f"{name}={_value(value)}" for name, value in mapping(document.get("flags")).items()]
    also += [text(word) for word in document.get("variant") or ()]
    gpus = [text(gpu.get("name")) for gpu in items(hardware.get("gpus"))]
    machine = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    machine += [text(hardware.get("cpu")), f"{hardware.get('cores')} cores", f"{hardware.get('memory_gb')} GiB"]
    machine += [f"driver {hardware['driver']}"] if hardware.get("driver") else []
    commit = text(told.get("git_commit"))[:12] + (" with changes" if told.get("git_dirty") else "")
    key = repr(
        [rows.where_of(document), stack.get("label") or sorted(versions.items()), hardware.get("profile"), source]
    )
    return Cell(
        id="c" + hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:10],
        case=line(text(document.get("case"))),
        title=line(text(document.get("title"))),
        kind=text(document.get("kind")),
        simulated=line(text(document.get("simulated"))),
        model=line(text(document.get("model"))),
        strategy=line(text(document.get("strategy"))),
        also=line(" ".join(also)),
        ranks=int(number(document.get("ranks")) or 0),
        stack=line(text(stack.get("name"))),
        versions=tuple((name, line(str(versions[name]), 40)) for name in ("python", *PACKAGES) if name in versions),
        hardware=line(text(hardware.get("profile"))),
        machine=line(", ".join([*machine, text(hardware.get("os"))])),
        when=day(started),
        started=started,
        commit=line(commit),
        ran=line(text(told.get("command")), 400),
        where=line(rows.where_of(document), 400),
        axes=line(rows.axes_of(document), 400),
        path=line(_path(document), 300),
        scale=text(document.get("scale")),
        weights=text(document.get("weights")),
        source=source,
        arms=tuple(_arm(document, row, mapping(arms.get(row["arm"])), base, case) for row in listed),
        rows=tuple(listed),
        spans=tuple(_spans(arms)),
        states=tuple(dict.fromkeys(str(row["expected"]) for row in listed if row["expected"])),
    )


def day(seconds: float) -> str:
    """A moment, in UTC."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M") if seconds else "unknown"
    except (OverflowError, ValueError, OSError):
        return "unknown"


def _path(document: Document) -> str:
    """Where it is stored, from the results folder on."""
    path = text(document.get("path"))
    if not path:  # a run's own, still in memory
        stack, hardware = mapping(document.get("stack")), mapping(document.get("hardware"))
        parts = (text(hardware.get("profile")), text(stack.get("label")), text(document.get("key")))
        return "/".join(parts) + ".json" if all(parts) else ""
    return path.partition("/results/")[2] or path


def _spans(arms: Mapping[str, Any]) -> Iterable[Span]:
    for name, arm in arms.items():
        for attempt in items(mapping(arm).get("attempts")):
            made = mapping(mapping(attempt.get("observation")).get("attempt"))
            began, over = number(made.get("started")), number(made.get("ended"))
            if began is not None and over is not None and over >= began:
                listed = made.get("gpus")
                devices = tuple(line(str(gpu), 60) for gpu in listed) if isinstance(listed, list) else ()
                outcome = text(mapping(attempt.get("outcome")).get("outcome"))
                run = text(made.get("id")).rpartition("-")[0]  # an attempt's name begins with its run's
                yield Span(began, over, devices, outcome, line(str(name)), line(run, 60))


def _arm(
    document: Document, row: Mapping[str, Any], arm: Mapping[str, Any], base: Mapping[str, Any], case: Case | None
) -> ArmView:
    attempts = items(arm.get("attempts"))
    told = next((a for a in attempts if mapping(a.get("outcome")).get("outcome") != "clean"), None)
    shown = told or (attempts[0] if attempts else {})
    seen = mapping(shown.get("observation"))
    ranks = items(seen.get("ranks"))
    name = str(row["arm"])
    known = case.arms.get(name) if case else None
    hung = mapping(shown.get("outcome")).get("outcome") == "hang" or mapping(seen.get("attempt")).get("timed_out")
    stacks = {int(number(r.get("rank")) or 0): text(r.get("stack")) for r in ranks if r.get("stack")} if told else {}
    expected = mark(str(row["expected"])) if row["expected"] and row["attempts"] else None
    odd = expected is not None and expected.name in ("unexpected", "differs from cpu", "muted") and row["expectation"]
    return ArmView(
        name=line(name),
        help=line(known.help, 300) if known else "",
        mark=of_row(row),
        expected=expected,
        expectation=mark(str(row["expectation"])) if odd else None,
        reason=line(str(row["reason"]), 500),
        outcome=str(row["outcome"]),
        kinds=tuple(row["kinds"]),
        infra=row["infra"],
        attempts=len(attempts),
        counts=_counts(row, mapping(mapping(document.get("verdicts")).get(name))),
        numbers=_numbers(attempts),
        changes=tuple(_changes(base, arm, row)),
        said=tuple(_said(ranks)) if told else (),
        hang=tuple(hangs.tree(stacks)) if hung or stacks else (),
        why_hang=line(_why_hang(seen), 300) if hung else "",
        proofs=tuple(_proofs(ranks)),
        metrics=tuple(_metrics(attempts)),
        command=line(rows.again(row), 600),
        torchrun=line(_by_hand(str(row["torchrun"] or "")), 1200),
        skipped=line(str(arm.get("skipped") or ""), 400),
        muted=line(_muted(mapping(row.get("muted"))), 300),
    )


def _changes(base: Mapping[str, Any], arm: Mapping[str, Any], row: Mapping[str, Any]) -> Iterable[change.Change]:
    if not base or row["arm"] == "broken":
        return
    found = change.changes(base, mapping(arm.get("settings")))
    held = text(arm.get("stack"))
    found += [change.Change("stack", row["stack"], held)] if held and held != row["stack"] else []
    for key, before, after in found:
        yield change.Change(line(key, 160), before and line(before, 160), after and line(after, 160))


def _counts(row: Mapping[str, Any], verdict: Mapping[str, Any]) -> str:
    if not row["attempts"]:
        return ""
    share = verdict.get("interval")
    if not verdict:
        return f"fires {row['fires']} of {row['attempts']}"
    told = f"clean {verdict.get('fix_k')} of {verdict.get('fix_n')}"
    if isinstance(share, (list, tuple)) and len(share) == 2:
        told += f" (95 %: {100 * share[0]:.0f} to {100 * share[1]:.0f} %)"
    return told


def _numbers(attempts: Sequence[Mapping[str, Any]]) -> str:
    """Medians of the attempts: wall and CPU seconds, and the peaks of the rank that had the highest."""
    made = [mapping(mapping(a.get("observation")).get("attempt")) for a in attempts]
    records = [
        [mapping(rank.get("record")) for rank in items(mapping(a.get("observation")).get("ranks"))] for a in attempts
    ]
    parts = []
    for key, unit in (("wall_s", "s"), ("cpu_s", "CPU s")):
        values = [value for one in made if (value := number(one.get(key))) is not None]
        parts += [f"{statistics.median(values):.1f} {unit}"] if values else []
    for key, unit in (("peak_rss_mb", "MiB a rank"), ("peak_gpu_mb", "MiB on a GPU")):
        peaks = [max(found) for one in records if (found := [v for r in one if (v := number(r.get(key))) is not None])]
        parts += [f"{statistics.median(peaks):.0f} {unit}"] if peaks else []
    return ", ".join(parts)


def _said(ranks: Sequence[Mapping[str, Any]]) -> Iterable[RankSaid]:
    """The error of every rank; those that say the same are one entry."""
    found: dict[tuple[str, str, str, tuple[str, ...]], list[tuple[int, str]]] = {}
    for position, rank in enumerate(ranks):
        record = mapping(rank.get("record"))
        error = mapping(record.get("exception"))
        how = _ended(rank, record)
        if not error and how == "finished":
            continue
        frames = tuple(_frame(frame) for frame in items(error.get("frames"))[-FRAMES:])
        kind, message = line(text(error.get("type"))), harmless(text(error.get("message")), MESSAGE)
        log = text(rank.get("log_tail"))
        which = int(number(rank.get("rank")) or position)
        found.setdefault((how, kind, message, frames), []).append((which, log))
    for (how, kind, message, frames), members in list(found.items())[:MOST_RANKS]:
        log = next((log for _, log in members if log), "")
        said = "" if kind else harmless(log[-LOG:], LOG).strip()  # an exception's frames are the end of its log
        yield RankSaid(numbered([r for r, _ in members]), how, kind, message, frames, said)


def _ended(rank: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    by = text(rank.get("ended_by"))
    phase = f" in {line(text(record.get('phase')), 60)}" if record.get("phase") and not record.get("done") else ""
    if by not in ("", "self"):
        return f"ended by the {line(by, 40)}{phase}"
    if rank.get("signal"):
        return f"died of {line(text(rank.get('signal')), 40)}{phase}"
    if rank.get("exit_code") not in (0, None):
        return f"exit code {rank.get('exit_code')}{phase}"
    return "finished" if record.get("done") else f"did not finish{phase}"


def _frame(frame: Mapping[str, Any]) -> str:
    where = ".".join(filter(None, (text(frame.get("module")), text(frame.get("function")))))
    code = text(frame.get("code"))
    return line(f"{where}:{frame.get('line')}" + (f"  {code}" if code else ""), 200)


def numbered(ranks: Iterable[int]) -> str:
    """0-3, 7"""
    found: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def _why_hang(seen: Mapping[str, Any]) -> str:
    hang = mapping(mapping(seen.get("attempt")).get("hang"))
    if hang.get("never_meet"):
        return text(hang.get("never_meet"))
    limit = number(hang.get("limit_s"))
    return f"still at work after {limit:.0f} s" if limit else ""


def _proofs(ranks: Sequence[Mapping[str, Any]]) -> Iterable[Proof]:
    found: dict[tuple[str, str, str, str, str, str], list[int]] = {}
    for position, rank in enumerate(ranks):
        record = mapping(rank.get("record"))
        schema = 1 if record.get("schema") in (1, None) else 2
        for check in items(record.get("checks")):
            state: str = checks.judged(check, schema, number(record.get("done_at"))).state
            said = (
                line(text(check.get("name")), 60), state, _short(check.get("got")), _short(check.get("want")),
                "" if check.get("tolerance") is None else _short(check.get("tolerance")),
                line(text(check.get("looked_at")), 160),
            )  # fmt: skip
            found.setdefault(said, []).append(int(number(rank.get("rank")) or position))
    order = sorted(found.items(), key=lambda item: item[0][1] == "passed")  # what failed first
    for shown, which in order[:MOST_PROOFS]:
        name, state, got, want, tolerance, looked_at = shown
        yield Proof(name, state, got, want, tolerance, looked_at, numbered(which))


def _metrics(attempts: Sequence[Mapping[str, Any]]) -> Iterable[tuple[str, str]]:
    """What the first rank measured, the median of the attempts."""
    found: dict[str, list[float]] = {}
    for attempt in attempts:
        for rank in items(mapping(attempt.get("observation")).get("ranks"))[:1]:
            for name, value in mapping(mapping(rank.get("record")).get("metrics")).items():
                if (measured := number(value)) is not None:
                    found.setdefault(line(str(name), 60), []).append(measured)
    for name, values in list(found.items())[:12]:
        yield name, f"{statistics.median(values):.4g}"


def _muted(by: Mapping[str, Any]) -> str:
    return f"muted by {by.get('owner')} until {by.get('until')}: {by.get('reason')}" if by else ""


def _by_hand(torchrun: str) -> str:
    """The line that starts it by hand, without this machine's own search path."""
    return re.sub(r"^env PATH=\S+ ", "env ", torchrun).replace("env torchrun", "torchrun")


def _short(value: Any) -> str:
    if isinstance(value, list):
        shown = ", ".join(_short(item) for item in value[:4])
        return line(f"[{shown}{', …' if len(value) > 4 else ''}]", 80)
    if isinstance(value, float):
        return f"{value:.4g}"
    return line(value if isinstance(value, str) else json.dumps(value, default=str), 80)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
