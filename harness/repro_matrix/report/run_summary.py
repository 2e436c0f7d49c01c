"""A run on the terminal: its plan, its progress, and the end: results, totals and the exit code."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from repro_matrix.config.schema import Case
from repro_matrix.environment.gpus import describe_unusable
from repro_matrix.errors import ExitCode
from repro_matrix.planning.plan import VariantPlan
from repro_matrix.records.document import Document
from repro_matrix.records.outcome import NOT_GREEN
from repro_matrix.report.headline import Headline
from repro_matrix.report.result_lines import result_lines
from repro_matrix.report.terminal import (
    axes_of,
    by_reason,
    case_label,
    columns,
    label,
    print_json,
    print_lines,
)
from repro_matrix.results.projection import rows_of
from repro_matrix.results.runs import results_folder
from repro_matrix.runner.engine import Event, RunTotals
from repro_matrix.runner.prepared import Session
from repro_matrix.text import counted, first_line, list_some, log, one_line, printable, wrap

QUIET_S = 30.0  # without a terminal: after so long without a line, print what runs


# The plan (`--dry-run`)


def show_plan(prepared: Session, as_json: bool) -> int:
    """Print what would be launched; return the exit code that a run could not improve."""
    variants = [variant for plan in prepared.plans for variant in plan.variants]
    items = [_item(prepared, variant) for variant in variants]
    short = [*prepared.shortfall(), *prepared.too_few_free()]
    for text in short:
        log(f"repro: {text}")
    code = ExitCode.INCOMPLETE if short or prepared.left_out else ExitCode.OK
    if as_json:
        print_json(items)
        return code
    for item, variant in zip(items, variants):
        item |= {"case": case_label(item["case"], item["simulated"]), "cell": variant.cell}
    print_lines(plan_lines(items, columns()))
    for name in prepared.to_build:
        print(f"stack {name} would be built first")
    for why, count in prepared.elsewhere.items():
        print(
            f"{counted(count, 'cell')} would be measured elsewhere than on {prepared.profile.name}:"
            f" {why}"
        )
    return code


def _item(prepared: Session, variant: VariantPlan) -> dict[str, Any]:
    cell, simulated = variant.cell, prepared.catalogue.cases[variant.cell.case].simulated
    item = {
        name: getattr(cell, name) for name in ("case", "model", "strategy", "ranks", "hardware")
    }
    item |= {name: getattr(variant, name) for name in ("stack", "variant", "world_size", "skipped")}
    item |= {"flags": dict(cell.flags), "devices": variant.gpus, "attempts": variant.repeat}
    item |= {"deadline_s": variant.deadline, "simulated": simulated}
    return item | {"memory": variant.memory.to_json() if variant.memory else None}


def plan_lines(items: Sequence[Mapping[str, Any]], width: int) -> Iterator[str]:
    """Yield a line for each case that would be launched, then the reasons of the others.

    ``items``: case, cell, model, strategy, attempts and skipped (the reason, or None) of each
    variant.
    """
    launched: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for item in items:
        if not item["skipped"]:
            launched[item["case"]].append(item)
    names = max(map(len, launched), default=0)
    for case, variants in launched.items():
        yield from wrap(
            f"{case:<{names}}  {_size(variants)}: {axes_of(variants)}", "", names + 2, width
        )
    skipped = [(item["skipped"], item["case"]) for item in items if item["skipped"]]
    if skipped:
        yield from ("", f"not launched: {counted(len(skipped), 'variant')}")
        yield from by_reason(skipped, width)
    if items:
        every = [item for variants in launched.values() for item in variants]
        yield from ("", *wrap(f"{_size(every)}; --json lists every variant", width=width))


def _size(variants: Sequence[Mapping[str, Any]]) -> str:
    cells = len({item["cell"] for item in variants})
    attempts = sum(item["attempts"] for item in variants)
    numbers = (cells, "cell"), (len(variants), "variant"), (attempts, "attempt")
    return ", ".join(counted(number, what) for number, what in numbers)


# While it runs: a bar with the running attempts on a terminal, a line per cell elsewhere


class RunProgress:
    """Use as a context manager; pass ``event`` to the engine.

    ``bar``: the whole run, then what runs.
    """

    def __init__(self, verbose: bool = False, cases: Mapping[str, Case] | None = None) -> None:
        import rich.progress
        from rich.console import Console

        self.out = Console(stderr=True, highlight=False)
        self.verbose, self.catalog = verbose, cases or {}
        self.attempts = self.done = self.cells = self.all_cells = self.different = 0
        self.reason = ""  # of the last cell, if it was skipped
        self._printed = time.monotonic()
        # The bar counts expected seconds, so that the time left is that of long attempts, not of
        # their number.
        self.bar = rich.progress.Progress(
            rich.progress.BarColumn(24),
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=self.out,
            transient=True,
            refresh_per_second=2,
            speed_estimate_period=1e6,
            get_time=lambda: time.monotonic(),
            disable=not self.out.is_terminal,
        )
        self.run = self.bar.add_task("", total=0)
        self.running: dict[Any, rich.progress.TaskID] = {}

    def __enter__(self) -> RunProgress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def warn(self, text: str) -> None:
        self._print(f"note: {text}", "magenta")

    def event(self, event: Event) -> None:
        """Show an event of the engine."""
        key = (event.plan.cell.key, event.variant, event.index) if event.plan else event.text
        waiting = ""
        if event.kind in ("cells", "more"):
            self.attempts += event.attempts
            self.all_cells += event.kind == "cells"
            self.bar.update(self.run, total=(self.bar.tasks[0].total or 0) + event.seconds)
        if event.kind in ("more", "note"):
            self.warn(event.text)
        elif event.kind == "start":
            text = f"{event.device:>8}  {event.plan.cell.key if event.plan else ''} {event.variant}"
            self.running[key] = self.bar.add_task(text, total=None)
        elif event.kind == "attempt" and key in self.running:
            self.bar.remove_task(self.running.pop(key))
        if event.kind == "attempt":
            self.done += 1
            self.bar.advance(self.run, event.seconds)
            if self.verbose and event.outcome is not None:
                name, reason = event.outcome["outcome"], event.outcome.get("reason") or ""
                self._print(f"{event.variant}: {name} in {event.wall_s:.1f}s  {reason}")
        elif event.kind == "cell":
            self.cells += 1
            if event.plan and event.document:
                self._cell(event.plan.cell.key, event.document)
        elif event.kind == "time":
            waiting = event.text
        different = f", {counted(self.different, 'difference')}" if self.different else ""
        cells = f"{self.cells}/{self.all_cells} cells{different}"
        status = f"{self.done}/{self.attempts} attempts, {cells}  {waiting}".rstrip()
        self.bar.update(self.run, description=status)
        if not self.out.is_terminal and time.monotonic() - self._printed > QUIET_S:
            tasks = [
                f"{' '.join(task.description.split())} {task.elapsed or 0:.0f}s"
                for task in self.bar.tasks
            ]
            self._print("; ".join(tasks))

    def _cell(self, key: str, document: Document) -> None:
        rows = rows_of(document, self.catalog)
        different = [row for row in rows if row.state in NOT_GREEN]
        self.different += len(different)
        if self.out.is_terminal or self.verbose:
            return
        first, reason = rows[0], first_line(rows[0].reason)
        fixes = [row for row in rows if row.role == "fix" and row.measured]
        texts = [label(first.verdict or first.outcome).text] if first.attempts else []
        if first.counts["reproduced"] and fixes:
            works = sum(row.verdict == "FIXED" for row in fixes)
            texts.append(f"documented fixes that work: {works} of {len(fixes)}")
        texts += [f"{row.variant}: {row.difference}" for row in different]
        same = reason == self.reason
        text = "; ".join(texts) or ("skipped, as above" if same else f"skipped: {reason}")
        self.reason = reason
        self._print(
            one_line(
                f"[{self.cells}/{self.all_cells}] {key} on {document['stack']['name']}: {text}"
            )
        )

    def _print(self, text: str, style: str = "") -> None:
        self._printed = time.monotonic()
        self.out.print(printable(text), style=style, markup=False, soft_wrap=True)


# Totals


def totals(prepared: Session, summary: RunTotals, head: Headline) -> dict[str, Any]:
    """Return the totals of a run for ``--json``."""
    verdicts = (row.verdict or "skipped" for row in head.rows if row.verdict or not row.attempts)
    profiles = [
        {
            "profile": each.name,
            "accelerator": each.accelerator,
            "backend": each.backend,
            "devices": [gpu.name for gpu in each.gpus],
            "ranks": prepared.sizes(each),
        }
        for each in prepared.profiles
    ]
    return {
        "hardware": [profile.name for profile in prepared.profiles],
        "profiles": profiles,
        "stacks": {stack.name: dict(stack.versions) for stack in prepared.stacks.values()},
        **{
            key: getattr(summary, key) for key in ("attempts", "reused", "interrupted", "gpu_notes")
        },
        "problem": str(summary.problem) if summary.problem else None,
        "cpu_s": round(summary.cpu_s, 1),
        "wall_s": round(summary.wall_s, 1),
        "torchrun_reasons": dict(summary.torchrun_reasons),
        "changed": prepared.changed(),
        "results": str(results_folder(prepared.settings)),
        "headline": head.to_json(),
        "verdicts": dict(Counter(verdicts)),
        "expected": dict(Counter(row.state for row in head.rows if row.state)),
        "elsewhere": prepared.elsewhere,
        "left": [" ".join((cell.hardware, cell.stack, cell.key)) for cell in summary.not_started],
        "left_out": prepared.left_out,
    }


def summary_lines(
    prepared: Session,
    summary: RunTotals,
    head: Headline,
    expired: Sequence[str],
    width: int,
) -> Iterator[str]:
    """Yield the lines of a run.

    ``expired``: messages about quarantine entries whose date has passed.
    """
    yield from result_lines(head, width)
    texts = [f"LEFT OUT: {text}" for text in prepared.left_out]
    texts += [f"QUARANTINE EXPIRED: {text}" for text in expired]
    if summary.reused:
        texts.append(
            f"{counted(summary.reused, 'attempt')} of an earlier run used again, {summary.attempts}"
            " launched"
        )
    for reason, count in prepared.elsewhere.items():
        texts.append(
            f"{counted(count, 'cell')} measured on another profile than {prepared.profile.name}:"
            f" {reason}"
        )
    if summary.not_started:
        names = ", ".join(dict.fromkeys(cell.case for cell in summary.not_started))
        texts.append(f"NOT MEASURED within time_limit={prepared.settings.time_limit}: {names}")
    for reason, count in summary.torchrun_reasons.most_common():
        texts.append(
            f"{counted(count, 'attempt')} used torchrun, each some seconds slower: {reason}"
        )
    blocking = {
        f"{row.case}/{row.variant}"
        for row in head.rows
        for each in row.evidence_attempts
        if each.blocking
    }
    if blocking:
        names = ", ".join(sorted(blocking))
        why = "in a second attempt, after an asynchronous CUDA error"
        texts.append(f"note: graded with CUDA_LAUNCH_BLOCKING=1, {why}: {names}")
    notes = [*prepared.changed(), *summary.gpu_notes]
    if prepared.profile.accelerator != "cpu":
        notes += describe_unusable(prepared.machine.left_out)
    texts += [f"note: {text}" for text in notes]
    for text in texts:
        yield from wrap(text, width=width)


def exit_line(
    code: int, head: Headline, summary: RunTotals, not_committed: Sequence[str] = ()
) -> str:
    """Return the last line: the exit code and its reason.

    ``not_committed``: files of expectations.
    """
    reasons = {
        0: head.agreement,
        1: "; ".join(head.differences),
        2: "a quarantine entry has expired: see above",
        3: "less was measured or confirmed than requested: see above, and `repro doctor`",
    }
    parts = [reasons[code], *head.unconfirmed]
    if summary.not_started:
        left = counted(len(summary.not_started), "cell")
        parts.append(f"not started within the time limit: {left}")
    if not_committed:
        parts.append(f"expectations are not committed: {list_some(not_committed)}")
    return f"exit code {code}: {'; '.join(parts)}"
