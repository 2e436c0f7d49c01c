"""What is to be shown of a cell's document. Pure: a document (judged) -> a ``Cell``, which templates and formats read.

Every text that another program wrote goes through ``safe`` here; a text that is only in the document is not shown.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from repro_matrix.config.packages import UPSTREAM
from repro_matrix.config.schema import Case
from repro_matrix.grading.observation import number
from repro_matrix.records.document import Arm, Document
from repro_matrix.report import change, ranks
from repro_matrix.report import hang_tree as hangs
from repro_matrix.report import metrics as measured
from repro_matrix.report.icons import Mark, mark, of_row
from repro_matrix.report.metrics import Proof, Span
from repro_matrix.report.ranks import RankSaid
from repro_matrix.report.sanitize import line
from repro_matrix.results import rows

PACKAGES = (*UPSTREAM, "numpy")
NAMED = 3  # arms of a verdict that a cell's line names; a search knows all


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
    def unnamed(self) -> str:
        """The arms that its line does not name."""
        return " ".join(arm for _, arms in self.groups for arm in arms[NAMED:])

    @property
    def odd(self) -> list[ArmView]:
        return [arm for arm in self.arms if arm.expected and arm.expected.name in ("unexpected", "differs from cpu")]


WORST = ("bad", "warn", "fire", "good", "info", "none")


def cell(document: Document, case: Case | None = None, source: str = "") -> Cell:
    """``case``: its arms' help, where the catalogue has it. ``source``: which results these are."""
    listed = rows.arm_rows(document)
    arms, stack, hardware = document["arms"], document["stack"], document["hardware"]
    settings = arms["broken"]["settings"] if "broken" in arms else None
    base = change.flat(settings) if settings else None
    versions = stack["versions"]
    told = document["provenance"]
    started = number(told["started"]) or 0.0
    also = [f"{name}={_value(value)}" for name, value in document["flags"].items()]
    also += document["variant"]
    gpus = [gpu["name"] for gpu in hardware["gpus"]]
    machine = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    machine += [hardware["cpu"], f"{hardware['cores']} cores", f"{hardware['memory_gb']} GiB"]
    machine += [f"driver {hardware['driver']}"] if hardware["driver"] else []
    machine += [f"changed after it was installed: {note}" for note in stack.get("changed", ())]
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
        spans=tuple(measured.spans(arms)),
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


def _arm(document: Document, row: rows.Row, arm: Arm, base: change.Flat | None, case: Case | None) -> ArmView:
    attempts = arm["attempts"]
    told = next((attempt for attempt in attempts if attempt["outcome"]["outcome"] != "clean"), None)
    shown = told or (attempts[0] if attempts else None)
    seen = shown["observation"] if shown else None
    listed = seen["ranks"] if seen else []
    name = str(row["arm"])
    known = case.arms.get(name) if case else None
    hung = shown is not None and (shown["outcome"]["outcome"] == "hang" or shown["observation"]["attempt"]["timed_out"])
    stacks = {rank["rank"]: rank["stack"] for rank in listed if rank["stack"]} if told else {}
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
        counts=measured.counts(row, document["verdicts"].get(name)),
        numbers=measured.numbers(attempts),
        changes=tuple(_changes(base, arm, row)),
        said=tuple(ranks.said(listed)) if told else (),
        hang=tuple(hangs.tree(stacks)) if hung or stacks else (),
        why_hang=line(ranks.why_hang(seen), 300) if hung and seen else "",
        proofs=tuple(measured.proofs(listed)),
        metrics=tuple(measured.metrics(attempts)),
        command=line(rows.again(row), 600),
        torchrun=line(_by_hand(str(row["torchrun"] or "")), 1200),
        skipped=line(arm["skipped"] or "", 400),
        muted=line(_muted(row.get("muted") or {}), 300),
    )


def _changes(base: change.Flat | None, arm: Arm, row: rows.Row) -> Iterable[change.Change]:
    if base is None or row["arm"] == "broken":
        return
    found = change.differing(base, arm["settings"])
    held = arm.get("stack")
    found += [change.Change("stack", row["stack"], held)] if held and held != row["stack"] else []
    for key, before, after in found:
        yield change.Change(line(key, 160), before and line(before, 160), after and line(after, 160))


def _muted(by: Mapping[str, Any]) -> str:
    return f"muted by {by.get('owner')} until {by.get('until')}: {by.get('reason')}" if by else ""


def _by_hand(torchrun: str) -> str:
    """The line that starts it by hand, without this machine's own search path."""
    return re.sub(r"^env PATH=\S+ ", "env ", torchrun).replace("env torchrun", "torchrun")


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
