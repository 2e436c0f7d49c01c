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

from repro_matrix.cell.document import Arm, Document, Made
from repro_matrix.cell.judged import Verdict
from repro_matrix.cell.observation import Observation, Rank, Settings
from repro_matrix.cell.record import Frame, Record
from repro_matrix.conf.packages import UPSTREAM
from repro_matrix.conf.schema import Case
from repro_matrix.judge import checks
from repro_matrix.judge.evidence import NO_RECORD, number, text
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
    arms, stack, hardware = document["arms"], document["stack"], document["hardware"]
    base = arms["broken"]["settings"] if "broken" in arms else None
    versions = stack["versions"]
    told = document["provenance"]
    started = number(told["started"]) or 0.0
    also = [f"{name}={_value(value)}" for name, value in document["flags"].items()]
    also += document["variant"]
    gpus = [gpu["name"] for gpu in hardware["gpus"]]
    machine = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    machine += [hardware["cpu"], f"{hardware['cores']} cores", f"{hardware['memory_gb']} GiB"]
    machine += [f"driver {hardware['driver']}"] if hardware["driver"] else []
    commit = (told["git_commit"] or "")[:12] + (" with changes" if told["git_dirty"] else "")
    key = repr([rows.where_of(document), stack.get("label") or sorted(versions.items()), hardware["profile"], source])
    return Cell(
        id="c" + hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:10],
        case=line(document["case"]),
        title=line(document["title"]),
        kind=document["kind"],
        simulated=line(document["simulated"] or ""),
        model=line(document["model"]),
        strategy=line(document["strategy"]),
        also=line(" ".join(also)),
        ranks=document["ranks"],
        stack=line(stack["name"]),
        versions=tuple((name, line(versions[name], 40)) for name in ("python", *PACKAGES) if name in versions),
        hardware=line(hardware["profile"]),
        machine=line(", ".join([*machine, hardware["os"]])),
        when=day(started),
        started=started,
        commit=line(commit),
        ran=line(told["command"], 400),
        where=line(rows.where_of(document), 400),
        axes=line(rows.axes_of(document), 400),
        path=line(_path(document), 300),
        scale=document["scale"],
        weights=document["weights"],
        source=source,
        arms=tuple(_arm(document, row, arms[row["arm"]], base, case) for row in listed),
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
    path = document.get("path")
    if not path:  # a run's own, still in memory
        parts = (document["hardware"]["profile"], document["stack"].get("label"), document.get("key"))
        return "/".join(part for part in parts if part) + ".json" if all(parts) else ""
    return path.partition("/results/")[2] or path


def _spans(arms: Mapping[str, Arm]) -> Iterable[Span]:
    for name, arm in arms.items():
        for attempt in arm["attempts"]:
            made = attempt["observation"]["attempt"]
            began, over = number(made["started"]), number(made["ended"])
            if began is not None and over is not None and over >= began:
                devices = tuple(line(gpu, 60) for gpu in made.get("gpus", ()))
                run = made["id"].rpartition("-")[0]  # an attempt's name begins with its run's
                yield Span(began, over, devices, attempt["outcome"]["outcome"], line(name), line(run, 60))


def _arm(document: Document, row: rows.Row, arm: Arm, base: Settings | None, case: Case | None) -> ArmView:
    attempts = arm["attempts"]
    told = next((attempt for attempt in attempts if attempt["outcome"]["outcome"] != "clean"), None)
    shown = told or (attempts[0] if attempts else None)
    seen = shown["observation"] if shown else None
    ranks = seen["ranks"] if seen else []
    name = str(row["arm"])
    known = case.arms.get(name) if case else None
    hung = shown is not None and (shown["outcome"]["outcome"] == "hang" or shown["observation"]["attempt"]["timed_out"])
    stacks = {rank["rank"]: rank["stack"] for rank in ranks if rank["stack"]} if told else {}
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
        counts=_counts(row, document["verdicts"].get(name)),
        numbers=_numbers(attempts),
        changes=tuple(_changes(base, arm, row)),
        said=tuple(_said(ranks)) if told else (),
        hang=tuple(hangs.tree(stacks)) if hung or stacks else (),
        why_hang=line(_why_hang(seen), 300) if hung and seen else "",
        proofs=tuple(_proofs(ranks)),
        metrics=tuple(_metrics(attempts)),
        command=line(rows.again(row), 600),
        torchrun=line(_by_hand(str(row["torchrun"] or "")), 1200),
        skipped=line(arm["skipped"] or "", 400),
        muted=line(_muted(row.get("muted") or {}), 300),
    )


def _changes(base: Settings | None, arm: Arm, row: rows.Row) -> Iterable[change.Change]:
    if not base or row["arm"] == "broken":
        return
    found = change.changes(base, arm["settings"])
    held = arm.get("stack")
    found += [change.Change("stack", row["stack"], held)] if held and held != row["stack"] else []
    for key, before, after in found:
        yield change.Change(line(key, 160), before and line(before, 160), after and line(after, 160))


def _counts(row: rows.Row, verdict: Verdict | None) -> str:
    if not row["attempts"]:
        return ""
    if not verdict:
        return f"fires {row['fires']} of {row['attempts']}"
    share = verdict["interval"]
    told = f"clean {verdict['fix_k']} of {verdict['fix_n']}"
    return told + (f" (95 %: {100 * share[0]:.0f} to {100 * share[1]:.0f} %)" if share else "")


def _numbers(attempts: Sequence[Made]) -> str:
    """Medians of the attempts: wall and CPU seconds, and the peaks of the rank that had the highest."""
    made = [attempt["observation"]["attempt"] for attempt in attempts]
    records = [[_record(rank) for rank in attempt["observation"]["ranks"]] for attempt in attempts]
    walls, cpu = [one["wall_s"] for one in made], [took for one in made if (took := one["cpu_s"]) is not None]
    parts = [f"{statistics.median(walls):.1f} s"] if walls else []
    parts += [f"{statistics.median(cpu):.1f} CPU s"] if cpu else []
    resident = [[record.get("peak_rss_mb") for record in one] for one in records]
    on_gpu = [[record.get("peak_gpu_mb") for record in one] for one in records]
    for unit, held in (("MiB a rank", resident), ("MiB on a GPU", on_gpu)):
        peaks = [max(found) for one in held if (found := [v for each in one if (v := number(each)) is not None])]
        parts += [f"{statistics.median(peaks):.0f} {unit}"] if peaks else []
    return ", ".join(parts)


def _record(rank: Rank) -> Record:
    return rank["record"] or NO_RECORD


def _said(ranks: Sequence[Rank]) -> Iterable[RankSaid]:
    """The error of every rank; those that say the same are one entry."""
    found: dict[tuple[str, str, str, tuple[str, ...]], list[tuple[int, str]]] = {}
    for rank in ranks:
        error = _record(rank)["exception"]
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
    record = _record(rank)
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


def _why_hang(seen: Observation) -> str:
    hang = seen["attempt"].get("hang")
    if not hang:
        return ""
    if hang["never_meet"]:
        return hang["never_meet"]
    limit = number(hang["limit_s"])
    return f"still at work after {limit:.0f} s" if limit else ""


def _proofs(ranks: Sequence[Rank]) -> Iterable[Proof]:
    found: dict[tuple[str, str, str, str, str, str], list[int]] = {}
    for rank in ranks:
        record = _record(rank)
        schema = 1 if record.get("schema", 1) == 1 else 2
        for check in record["checks"]:
            state: str = checks.judged(check, schema, number(record.get("done_at"))).state
            said = (
                line(check["name"], 60), state, _short(check.get("got")), _short(check.get("want")),
                "" if check.get("tolerance") is None else _short(check.get("tolerance")),
                line(text(check.get("looked_at")), 160),
            )  # fmt: skip
            found.setdefault(said, []).append(rank["rank"])
    order = sorted(found.items(), key=lambda item: item[0][1] == "passed")  # what failed first
    for shown, which in order[:MOST_PROOFS]:
        name, state, got, want, tolerance, looked_at = shown
        yield Proof(name, state, got, want, tolerance, looked_at, numbered(which))


def _metrics(attempts: Sequence[Made]) -> Iterable[tuple[str, str]]:
    """What the first rank measured, the median of the attempts."""
    found: dict[str, list[float]] = {}
    for attempt in attempts:
        for rank in attempt["observation"]["ranks"][:1]:
            for name, value in _record(rank)["metrics"].items():
                if (measured := number(value)) is not None:
                    found.setdefault(line(name, 60), []).append(measured)
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
