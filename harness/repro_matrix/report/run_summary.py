"""What a run prints at its end: its rows and totals, as text or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from repro_matrix.report import summary as summaries
from repro_matrix.report.terminal import matrix_table, summary_line
from repro_matrix.results import rows
from repro_matrix.results.local import results_folder
from repro_matrix.results.rows import Row
from repro_matrix.runner.engine import Summary
from repro_matrix.runner.session import Session, count_by_case
from repro_matrix.text import counted, wrap


def totals(prepared: Session, summary: Summary, found: Sequence[Row]) -> dict[str, Any]:
    """Return the totals of a run for ``--json``."""
    profiles = [
        {
            "profile": profile.name,
            "accelerator": profile.accelerator,
            "backend": profile.backend,
            "devices": [gpu.name for gpu in profile.gpus],
            "ranks": prepared.sizes(profile),
        }
        for profile in prepared.profiles
    ]
    return {
        "hardware": [profile.name for profile in prepared.profiles],
        "profiles": profiles,
        "stacks": {stack.name: dict(stack.versions) for stack in prepared.stacks.values()},
        "attempts": summary.attempts,
        "reused": summary.reused,
        "cpu_s": round(summary.cpu_s, 1),
        "cpu_s_per_attempt": round(_per_attempt(summary), 2),
        "wall_s": round(summary.wall_s, 1),
        "cold": dict(summary.cold),
        "interrupted": summary.interrupted,
        "problem": summary.problem,
        "cards": summary.cards,
        "changed": prepared.changed(),
        "results": str(results_folder(prepared.settings)),
        "verdicts": rows.counts(found),
        "counts": rows.figures(found),
        "expected": dict(Counter(row["expected"] for row in found if row["expected"])),
        "elsewhere": prepared.elsewhere,
        "left": [" ".join((cell.hardware, cell.stack, cell.key)) for cell in summary.not_started],
        "left_out": prepared.left_out,
    }


def lines(
    prepared: Session, summary: Summary, found: list[Row], expired: Sequence[str], every_variant: bool, width: int
) -> Iterator[str]:
    """Yield the lines of a run. ``expired``: messages about quarantine entries whose day is over."""
    if every_variant:
        matrix_table(found)
    else:
        yield from summaries.lines(summary.documents, found, width)
        yield ""
    yield from summaries.left_out(prepared.left_out, width)
    texts = [f"MUTED no longer: {text}" for text in expired]
    texts.append(summary_line(found))
    if summary.interrupted:
        texts.append(_interrupted(prepared, summary))
    texts.append(
        f"{counted(summary.attempts, 'attempt')} ({summary.reused} more reused), {summary.cpu_s:.0f} CPU-seconds "
        f"({_per_attempt(summary):.2f} per attempt), {summary.wall_s:.0f} s"
    )
    first = prepared.profile.name
    for why, count in prepared.elsewhere.items():
        texts.append(f"{counted(count, 'cell')} measured elsewhere than on {first}: {why}")
    if summary.not_started:
        limit = prepared.settings.time_limit
        texts.append(f"NOT MEASURED within time_limit={limit}: {count_by_case(summary.not_started)}")
    texts += [f"{count} of them started from cold: {why}" for why, count in summary.cold.most_common()]
    lost = map(str, prepared.machine.left_out) if prepared.profile.accelerator != "cpu" else ()
    texts += [f"note: {text}" for text in [*prepared.changed(), *lost, *summary.cards]]
    for text in texts:
        yield from wrap(text, width=width)


def ending(code: int, found: Sequence[Row], summary: Summary, differences: int) -> str:
    """Return the last line: the exit code and its reason."""
    left = counted(len(summary.not_started), "cell")
    return summaries.ending(code, found, differences) + (
        f"; not started within the time limit: {left}" if summary.not_started else ""
    )


def _per_attempt(summary: Summary) -> float:
    return summary.cpu_s / summary.attempts if summary.attempts else 0.0


def _interrupted(prepared: Session, summary: Summary) -> str:
    """Return what the other lines do not include."""
    requested = len({(plan.cell.hardware, plan.cell.stack, plan.cell.key) for plan in prepared.plans})
    requested += sum(len(each.cells) for each in prepared.later)  # what waited for a build
    lacking = requested - sum(document["complete"] for document in summary.documents)
    if lacking <= 0:
        return "INTERRUPTED, when all of it was measured"
    return f"INTERRUPTED: {lacking} of {counted(requested, 'cell')} not measured, or not completely"
