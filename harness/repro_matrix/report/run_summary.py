"""The end of a run: what differs from its expectation, what is new, a line per case, what was not measured and why,
the totals and the exit code.

Modelled on pytest's short summary: the important first. Lines have at most ``width`` columns; ``--all`` prints a row
for every variant instead.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from repro_matrix.planning.memory import GIB, fullest
from repro_matrix.planning.plan import VariantPlan
from repro_matrix.records.document import Document
from repro_matrix.report.terminal import axes_of, by_reason, columns, label, named, print_json, print_lines, print_table
from repro_matrix.results import runs
from repro_matrix.results.expectations import uncompared_failures
from repro_matrix.results.runs import results_folder
from repro_matrix.results.summary import Row, rows_of
from repro_matrix.runner import session
from repro_matrix.runner.engine import Event, Summary
from repro_matrix.runner.session import Session
from repro_matrix.text import WIDTH, counted, first_line, one_line, printable, wrap

LOG_LINES = 4
MEMORY_HEADS = ["case", "model", "strategy", "variant", "ranks", "GiB/rank device", "GiB/rank host", "GiB host"]
MEMORY_HEADS += ["measured", "fullest moment, or why it is skipped"]
QUIET_S = 30.0  # without a terminal: after so long without a line, print what runs
DIFFERENCES = {
    "unexpected": "DIFFERENT FROM THEIR EXPECTATION",
    "differs_from_cpu": "DIFFERENT FROM WHAT A CPU SHOWED (news, not an error)",
    "quarantined": "QUARANTINED",
}
# The order of attention; all other states come last.
ATTENTION = ("unexpected", "differs_from_cpu", "no_expectation")


# The plan (`--dry-run`, `--memory`)


def show_plan(prepared: Session, as_json: bool) -> int:
    """Print what would be launched."""
    variants = [variant for plan in prepared.plans for variant in plan.variants]
    items = [_item(prepared, variant) for variant in variants]
    for name in sorted({item["stack"] for item in items} & prepared.unavailable.keys() | prepared.unusable):
        print(f"repro: stack={name}: {prepared.unavailable[name]}", file=sys.stderr)
    if as_json:
        print_json(items)
        return 0
    lines = []
    for item, cell in zip(items, [variant.cell for variant in variants]):
        place = repr((cell.hardware, cell.stack, cell.key))
        lines.append(item | {"case": named(cell.case, item["simulated"]), "cell": place})
    print_lines(plan_lines(lines, columns()))
    for name in prepared.to_build:
        print(f"stack {name} would be built first")
    for why, count in prepared.elsewhere.items():
        print(f"{counted(count, 'cell')} would be measured elsewhere than on {prepared.profile.name}: {why}")
    return 0


def _item(prepared: Session, variant: VariantPlan) -> dict[str, Any]:
    cell, simulated = variant.cell, prepared.catalogue.cases[variant.cell.case].simulated
    item = {name: getattr(cell, name) for name in ("case", "model", "strategy", "ranks", "hardware")}
    item |= {name: getattr(variant, name) for name in ("stack", "variant", "world_size", "skipped")}
    item |= {"flags": dict(cell.flags), "devices": variant.gpus, "attempts": variant.repeat}
    return item | {"deadline_s": variant.deadline, "simulated": simulated}


def plan_lines(items: Sequence[Mapping[str, Any]], width: int) -> Iterator[str]:
    """Yield a line for each case that would be launched, then what would not, by reason. ``items``: case, cell, model,
    strategy, attempts and skipped (the reason, or None) of each variant."""
    launched: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for item in items:
        if not item["skipped"]:
            launched[item["case"]].append(item)
    names = max(map(len, launched), default=0)
    for case, variants in launched.items():
        yield from wrap(f"{case:<{names}}  {_size(variants)}: {axes_of(variants)}", "", names + 2, width)
    yield from skipped_lines(items, width)
    if items:
        every = [item for variants in launched.values() for item in variants]
        yield from ("", *wrap(f"{_size(every)}; --json lists every variant", width=width))


def _size(variants: Sequence[Mapping[str, Any]]) -> str:
    cells, attempts = len({item["cell"] for item in variants}), sum(item["attempts"] for item in variants)
    return f"{counted(cells, 'cell')}, {counted(len(variants), 'variant')}, {counted(attempts, 'attempt')}"


def skipped_lines(items: Iterable[Mapping[str, Any]], width: int) -> Iterator[str]:
    """Yield the reasons of skipped variants, each with its number and its cases. ``items`` as for ``plan_lines``."""
    skipped = [(item["skipped"], item["case"]) for item in items if item["skipped"]]
    if skipped:
        yield from ("", f"not launched: {counted(len(skipped), 'variant')}")
        yield from by_reason(skipped, width)


def show_memory(texts: list[str], as_json: bool) -> int:
    """Print what each variant needs, beside the recorded peak; also for hardware that this machine does not have."""
    prepared = session.prepare(texts, build_stacks=False, plan_only=True)
    stored = runs.measured_rows(prepared.settings)
    rows = []
    for variant in (variant for plan in prepared.plans for variant in plan.variants):
        row = _item(prepared, variant) | {"reference": variant.settings.get("reference")}
        row |= {"planned": variant.memory.to_json() if variant.memory else None}
        rows.append((variant, row | {"measured_mb": _measured(stored, variant)}))
    if as_json:
        cells, hardware = [row for _, row in rows], prepared.profile.name
        print_json({"hardware": hardware, "planned_only": prepared.planned, "cells": cells})
    else:
        _print_memory(prepared, rows)
    for note in [*(f"left out: {text}" for text in prepared.catalogue.left_out), *prepared.unplanned]:
        print(f"repro: {note}", file=sys.stderr)
    return 0


def _measured(rows: Sequence[Row], variant: VariantPlan) -> float | None:
    """Return the largest recorded peak of a rank (MiB) on the host, from the latest result on this stack."""
    wanted = (variant.cell.key, variant.variant, variant.stack)
    matching = (row for row in rows if row.attempts and (row.cell_id, row.variant, row.stack.name) == wanted)
    latest = max(matching, key=lambda row: row.started, default=None)
    return max((attempt.peak_rss_mb or 0.0 for attempt in latest.attempts), default=0.0) or None if latest else None


def _print_memory(prepared: Session, rows: list[tuple[VariantPlan, dict[str, Any]]]) -> None:
    profile, machine = prepared.profile, prepared.machine
    gpus = f"{len(profile.gpus)} x {profile.gpus[0].name}, " if profile.gpus else ""
    only = " (planned only: not this machine)" if prepared.planned else ""
    print(f"hardware {profile.name}{only}: {gpus}{machine.cores} cores, {machine.memory_gb:g} GiB on the host")
    table, hidden = [], []
    for variant, row in rows:
        plan, measured = variant.memory, row["measured_mb"]
        if row["skipped"] and plan is None:
            hidden.append(row)
            continue
        sizes = [plan.device_rank, plan.host_rank, plan.host_node] if plan else []
        sizes_text = [f"{size / GIB:.2f}" if size else "-" for size in sizes] or ["?", "?", "?"]
        off = f" ({plan.host_rank / 2**20 / measured - 1:+.0%})" if measured and plan else ""
        recorded = f"{measured / 1024:.2f}{off}" if measured else "-"
        full = fullest(plan.device or plan.host) if plan else None
        why = "simulated: its tensors need no memory" if row["simulated"] else "not known: the stack cannot build it"
        last = row["skipped"] or (f"{full.name}: {full.describe()}" if full else why)
        cells = [row[name] for name in ("case", "model", "strategy", "variant", "world_size")]
        table.append([*cells, *sizes_text, recorded, last])
    print_table("", MEMORY_HEADS, table, narrow=MEMORY_HEADS[-1:])
    print_lines(skipped_lines(hidden, columns()))
    print(f"{sum(bool(row['skipped']) for _, row in rows)} of {len(rows)} variants skipped")


# While it runs: a bar with the running attempts on a terminal, a line per cell elsewhere


class Progress:
    """Use as a context manager; pass ``event`` to the engine. ``bar``: the whole run, then what runs."""

    def __init__(self, verbose: bool = False) -> None:
        import rich.progress
        from rich.console import Console

        self.out = Console(stderr=True, highlight=False)
        self.verbose = verbose
        self.attempts = self.done = self.cells = self.all_cells = 0
        self.verdicts: Counter[str] = Counter()
        self.reasons: set[str] = set()  # of skipped cells
        self._printed = time.monotonic()
        # The bar counts expected seconds, so that the time left is that of long attempts, not of their number.
        self.bar = rich.progress.Progress(
            rich.progress.BarColumn(24), rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.TimeElapsedColumn(), rich.progress.TimeRemainingColumn(), console=self.out, transient=True,
            refresh_per_second=2, speed_estimate_period=1e6, get_time=lambda: time.monotonic(),
            disable=not self.out.is_terminal,
        )  # fmt: skip
        self.run = self.bar.add_task("", total=0)
        self.running: dict[Any, rich.progress.TaskID] = {}

    def __enter__(self) -> Progress:
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
        counts = "  ".join(f"{name} {count}" for name, count in self.verdicts.items())
        status = f"{self.done}/{self.attempts} attempts  {counts}  {waiting}".rstrip()
        self.bar.update(self.run, description=status)
        if not self.out.is_terminal and time.monotonic() - self._printed > QUIET_S:
            tasks = [f"{' '.join(task.description.split())} {task.elapsed or 0:.0f}s" for task in self.bar.tasks]
            self._print("; ".join(tasks))

    def _cell(self, key: str, document: Document) -> None:
        rows = rows_of(document, {})
        self.verdicts.update(row.verdict for row in rows if row.verdict)
        if self.out.is_terminal or self.verbose:
            return
        counts = Counter(row.verdict or row.outcome for row in rows if row.attempts)
        text = ", ".join(f"{name} {count}" if count > 1 else name for name, count in counts.items())
        reason = first_line(rows[0].reason)
        text = text or ("skipped, as above" if reason in self.reasons else f"skipped: {reason}")
        self.reasons.add(reason)
        self._print(one_line(f"[{self.cells}/{self.all_cells}] {key} on {document['stack']['name']}: {text}"))

    def _print(self, text: str, style: str = "") -> None:
        self._printed = time.monotonic()
        self.out.print(printable(text), style=style, markup=False, soft_wrap=True)


# Counting rows


def by_attention(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of cells in which something differs first: from the expectation, then from what a CPU showed."""
    rows = list(rows)
    rank = {state: place for place, state in enumerate(ATTENTION)}
    worst: dict[tuple[str, str, str], int] = {}
    for row in rows:
        worst[row.cell] = min(worst.get(row.cell, 9), rank.get(row.state or "", ATTENTION.index("no_expectation")))
    return sorted(rows, key=lambda row: worst[row.cell])


def without_expectation(rows: Iterable[Row]) -> list[Row]:
    """Return measured variants with a verdict that have neither an expectation nor a prediction."""
    return [row for row in rows if row.attempts and row.verdict and row.state == "no_expectation"]


def figures(rows: Sequence[Row]) -> dict[str, int]:
    """Count the variants whose verdict is simulated, differs, is quarantined, or has no expectation."""
    states = Counter(row.state for row in rows)
    return {
        "simulated": sum(bool(row.simulated and row.verdict) for row in rows),
        **{state: states[state] for state in ("unexpected", "quarantined", "differs_from_cpu")},
        "without_expectation": len(without_expectation(rows)),
    }


def count_verdicts(rows: Iterable[Row]) -> dict[str, int]:
    """Count variants by verdict, the most frequent first; variants that were not run count as ``skipped``."""
    names = (row.verdict or (None if row.attempts else "skipped") for row in rows)
    return dict(Counter(name for name in names if name).most_common())


def totals(prepared: Session, summary: Summary, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the totals of a run for ``--json``."""
    profiles: list[dict[str, Any]] = []
    for each in prepared.profiles:
        profiles.append({"profile": each.name, "accelerator": each.accelerator, "backend": each.backend})
        profiles[-1] |= {"devices": [gpu.name for gpu in each.gpus], "ranks": prepared.sizes(each)}
    return {
        "hardware": [profile.name for profile in prepared.profiles],
        "profiles": profiles,
        "stacks": {stack.name: dict(stack.versions) for stack in prepared.stacks.values()},
        **{key: getattr(summary, key) for key in ("attempts", "reused", "interrupted", "problem", "gpu_notes")},
        "cpu_s": round(summary.cpu_s, 1),
        "wall_s": round(summary.wall_s, 1),
        "torchrun_reasons": dict(summary.torchrun_reasons),
        "changed": prepared.changed(),
        "results": str(results_folder(prepared.settings)),
        "verdicts": count_verdicts(rows),
        "counts": figures(rows),
        "expected": dict(Counter(row.state for row in rows if row.state)),
        "elsewhere": prepared.elsewhere,
        "left": [" ".join((cell.hardware, cell.stack, cell.key)) for cell in summary.not_started],
        "left_out": prepared.left_out,
    }


# Sections of results


def lines(
    prepared: Session, summary: Summary, rows: Sequence[Row], expired: Sequence[str], every_variant: bool, width: int
) -> Iterator[str]:
    """Yield the lines of a run. ``expired``: messages about quarantine entries whose date has passed."""
    if every_variant:
        print_rows(rows)
    else:
        yield from sections(rows, width)
        yield ""
    texts = [f"LEFT OUT: {text}" for text in prepared.left_out]
    texts += [f"QUARANTINE EXPIRED: {text}" for text in expired]
    texts.append(describe_counts(rows))
    if summary.interrupted:
        complete = len({row.cell for row in rows if row.complete})
        texts.append(f"INTERRUPTED: {counted(complete, 'cell')} complete. --resume measures the others.")
    reused = f" ({summary.reused} more reused)" if summary.reused else ""
    attempts = f"{counted(summary.attempts, 'attempt')}{reused}"
    texts.append(f"{attempts}, {summary.cpu_s:.0f} CPU-seconds, {summary.wall_s:.0f} s")
    for reason, count in prepared.elsewhere.items():
        texts.append(f"{counted(count, 'cell')} measured on another profile than {prepared.profile.name}: {reason}")
    if summary.not_started:
        names = ", ".join(dict.fromkeys(cell.case for cell in summary.not_started))
        texts.append(f"NOT MEASURED within time_limit={prepared.settings.time_limit}: {names}")
    for reason, count in summary.torchrun_reasons.most_common():
        texts.append(f"{counted(count, 'attempt')} used torchrun: {reason}")
    unused = map(str, prepared.machine.left_out) if prepared.profile.accelerator != "cpu" else ()
    texts += [f"note: {text}" for text in [*prepared.changed(), *unused, *summary.gpu_notes]]
    for text in texts:
        yield from wrap(text, width=width)


def sections(rows: Sequence[Row], width: int = WIDTH) -> Iterator[str]:
    """Yield everything about the results, each section after an empty line."""
    for state, title in DIFFERENCES.items():
        differing = [row for row in rows if row.state == state]
        if differing:
            yield from _title(f"{title}: {_variants(differing)}", width)
        same: dict[object, list[Row]] = defaultdict(list)  # often an unfixed variant that fails differently
        for row in differing:
            same[row.cell, row.verdict, row.reason, row.expected_verdict].append(row)
        for members in same.values():
            yield from _detail(members, width)
    failures = uncompared_failures(rows)
    if failures:
        meaning = "the unfixed variant fails with an unexpected error, and no variant shows anything else"
        yield from _title(f"NOT COMPARED: in {counted(len(failures), 'cell')} {meaning}. Run the whole case.", width)
        for row in failures:
            reason = next(each.reason for each in row.evidence_attempts if each.outcome not in ("reproduced", "passed"))
            yield from wrap(f"case={row.case} {' '.join(row.axes)}: {reason}", "  ", 4, width)
    unanswered = [row for row in rows if _is_unanswered(row)]
    if unanswered:
        yield from _title(f"NO RESULT: {_variants(unanswered)} ran and gave no evidence", width)
        yield from by_reason(((row.reason, row.case) for row in unanswered), width)
    new = [row for row in without_expectation(rows) if not _is_unanswered(row)]
    if new:
        hint = "marked + below. `repro accept` writes expectations"
        yield from _title(f"NEW: {_variants(new)} without an expectation, {hint}", width)
    measured_rows = [row for row in rows if row.attempts]
    if measured_rows:
        yield from _title("CASES", width)
        yield from _cases(measured_rows, {row.case for row in new}, width)
    skipped = [row for row in rows if not row.attempts and row.reason]
    if skipped:
        yield from _title(f"NOT MEASURED: {_variants(skipped)}", width)
        yield from by_reason(((row.reason, row.case) for row in skipped), width)


def _title(text: str, width: int) -> Iterator[str]:
    yield ""
    yield from wrap(text, "", 2, width)


def _variants(rows: Sequence[Row]) -> str:
    return counted(len(rows), "variant")


def _is_unanswered(row: Row) -> bool:
    """Whether a variant ran and gave no evidence; what an expectation accepts is left out."""
    no_answer = row.no_evidence or row.verdict == "INCONCLUSIVE"
    return bool(row.attempts) and no_answer and row.state in (None, "no_expectation")


def _detail(rows: Sequence[Row], width: int) -> Iterator[str]:
    row, variants = rows[0], [each.variant for each in rows]
    heading = f"{row.case} {row.model}/{row.strategy}, variant{'s' * (len(variants) > 1)} {', '.join(variants)}"
    yield from wrap(heading, "  ", 4, width)
    note = "".join(f" [{text}]" for text in (row.note, row.quarantine) if text)
    measured = f"expected {row.expected_verdict or 'PASSED'}, measured {row.verdict}: {row.reason}{note}"
    yield from wrap(measured, "    ", 3, width)
    printed = [one_line(line) for line in row.errors[0]["log"].splitlines()] if row.errors else []
    for line in [line for line in printed if line.strip()][-LOG_LINES:]:
        yield f"    | {line}" if len(line) + 6 <= width else f"    | {line}"[: width - 4] + " ..."
    command = replace(row, variant=",".join(variants)).command
    yield f"    $ {one_line(shlex.join(command))}"  # one line, however long: it can be pasted


def _cases(rows: Sequence[Row], new: set[str], width: int) -> Iterator[str]:
    """Yield a line for each case: what its unfixed variants did, and the verdicts of the others."""
    by_case: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_case[row.case].append(row)
    names = max(map(len, by_case))
    for case, members in by_case.items():
        outcomes = Counter(row.outcome for row in members if not row.verdict)
        all_runs, verdicts = outcomes.total(), Counter(row.verdict for row in members if row.verdict)
        unfixed = ", ".join(name if n == all_runs else f"{name} in {n}" for name, n in outcomes.items())
        others = ", ".join(label(name).count(n) for name, n in verdicts.most_common())
        mark = "!" if any(row.state in ATTENTION[:2] for row in members) else "+" if case in new else " "
        cells = counted(len({row.cell for row in members}), "cell")
        head = f"{mark} {case.ljust(names)}  {cells:>8}  "
        parts = [f"unfixed {unfixed}" if unfixed else "", others]
        simulated = " [simulated]" if members[0].simulated else ""
        yield from wrap(head + "; ".join(filter(None, parts)) + simulated, "", min(len(head), width // 2), width)


def print_rows(rows: Sequence[Row]) -> None:
    """Print a line for every variant of every cell."""
    table = []
    for row in rows:
        flags = " ".join(f"{name}={json.dumps(value)}" for name, value in row.flags.items())
        seconds = "" if row.wall_s is None else f"{row.wall_s:.1f}s"
        reason = f"{row.reason} [{row.note}]" if row.note else row.reason
        table.append([
            named(row.case, row.simulated), row.model, f"{row.strategy} {flags}".strip(), row.variant,
            row.verdict or row.outcome, row.state, seconds, reason,
        ])  # fmt: skip
    heads = ["case", "model", "strategy", "variant", "verdict", "expected?", "time", "reason"]
    print_table("", heads, table, narrow=("time", "reason"))


# Totals and the exit code


def describe_counts(rows: Sequence[Row]) -> str:
    """Return the numbers of a run in one line."""
    numbers = figures(rows)
    unfixed: dict[str, bool] = {}
    for row in rows:
        if row.first and row.attempts and row.kind != "control":
            unfixed[row.case] = unfixed.get(row.case, False) or row.counts.most_common(1)[0][0] == "reproduced"
    others = {name: name for name in ("simulated", "quarantined")}
    others |= {"differs_from_cpu": "different from the CPU", "without_expectation": "without an expectation"}
    fine = "nothing unexpected" if any(row.measured for row in rows) else "no results"
    parts = [
        f"{sum(unfixed.values())} of {counted(len(unfixed), 'known failure')} reproduced" if unfixed else "",
        ", ".join(f"{name} {count}" for name, count in count_verdicts(rows).items()),
        _describe_differences(numbers["unexpected"]) if numbers["unexpected"] else fine,
        *(f"{counted(numbers[name], 'variant')} {text}" for name, text in others.items() if numbers[name]),
    ]
    return "; ".join(filter(None, parts))


def _describe_differences(count: int) -> str:
    return f"{counted(count, 'variant')} {'differs from its' if count == 1 else 'differ from their'} expectation"


def describe_exit(code: int, rows: Sequence[Row], summary: Summary, differences: int = 0) -> str:
    """Return the last line: the exit code and its reason. ``differences``: from the results of ``--compare-to``."""
    unexpected, left = figures(rows)["unexpected"], len(summary.not_started)
    different = [_describe_differences(unexpected)] if unexpected else []
    different += [f"{counted(differences, 'result')} changed since the compared run"] if differences else []
    reasons = {
        0: "nothing unexpected",
        1: "; ".join(different) or "a result differs",
        2: "a quarantine entry has expired: see above",
        3: "less was measured than requested: see above, and `repro doctor`",
    }
    parts = [reasons[code]] if code in reasons else []
    parts += [f"not started within the time limit: {counted(left, 'cell')}"] if left else []
    return ": ".join(filter(None, (f"exit code {code}", "; ".join(parts))))
