"""What the attempts of an arm measured: how often what, seconds and memory, proofs with their numbers, when. Pure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from repro_matrix.grading import checks
from repro_matrix.grading.observation import number, text
from repro_matrix.records.document import Arm, Made
from repro_matrix.records.observation import Rank
from repro_matrix.records.outcome import Verdict
from repro_matrix.report.ranks import numbered, record_of
from repro_matrix.report.sanitize import line
from repro_matrix.results import rows

MOST_PROOFS = 24


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


def spans(arms: Mapping[str, Arm]) -> Iterable[Span]:
    for name, arm in arms.items():
        for attempt in arm["attempts"]:
            made = attempt["observation"]["attempt"]
            began, over = number(made["started"]), number(made["ended"])
            if began is not None and over is not None and over >= began:
                devices = tuple(line(gpu, 60) for gpu in made.get("gpus", ()))
                run = made["id"].rpartition("-")[0]  # an attempt's name begins with its run's
                yield Span(began, over, devices, attempt["outcome"]["outcome"], line(name), line(run, 60))


def counts(row: rows.Row, verdict: Verdict | None) -> str:
    if not row["attempts"]:
        return ""
    if not verdict:
        return f"fires {row['fires']} of {row['attempts']}"
    share = verdict["interval"]
    told = f"clean {verdict['fix_k']} of {verdict['fix_n']}"
    return told + (f" (95 %: {100 * share[0]:.0f} to {100 * share[1]:.0f} %)" if share else "")


def numbers(attempts: Sequence[Made]) -> str:
    """Medians of the attempts: wall and CPU seconds, and the peaks of the rank that had the highest."""
    made = [attempt["observation"]["attempt"] for attempt in attempts]
    records = [[record_of(rank) for rank in attempt["observation"]["ranks"]] for attempt in attempts]
    walls, cpu = [one["wall_s"] for one in made], [took for one in made if (took := one["cpu_s"]) is not None]
    parts = [f"{statistics.median(walls):.1f} s"] if walls else []
    parts += [f"{statistics.median(cpu):.1f} CPU s"] if cpu else []
    resident = [[record.get("peak_rss_mb") for record in one] for one in records]
    on_gpu = [[record.get("peak_gpu_mb") for record in one] for one in records]
    for unit, held in (("MiB a rank", resident), ("MiB on a GPU", on_gpu)):
        peaks = [max(found) for one in held if (found := [v for each in one if (v := number(each)) is not None])]
        parts += [f"{statistics.median(peaks):.0f} {unit}"] if peaks else []
    return ", ".join(parts)


def proofs(ranks: Sequence[Rank]) -> Iterable[Proof]:
    found: dict[tuple[str, str, str, str, str, str], list[int]] = {}
    for rank in ranks:
        record = record_of(rank)
        schema = 1 if record.get("schema", 1) == 1 else 2
        for check in record["checks"]:
            state: str = checks.evaluate(check, schema, number(record.get("done_at"))).state
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


def metrics(attempts: Sequence[Made]) -> Iterable[tuple[str, str]]:
    """What the first rank measured, the median of the attempts."""
    found: dict[str, list[float]] = {}
    for attempt in attempts:
        for rank in attempt["observation"]["ranks"][:1]:
            for name, value in record_of(rank)["metrics"].items():
                if (measured := number(value)) is not None:
                    found.setdefault(line(name, 60), []).append(measured)
    for name, values in list(found.items())[:12]:
        yield name, f"{statistics.median(values):.4g}"


def _short(value: Any) -> str:
    if isinstance(value, list):
        shown = ", ".join(_short(item) for item in value[:4])
        return line(f"[{shown}{', …' if len(value) > 4 else ''}]", 80)
    if isinstance(value, float):
        return f"{value:.4g}"
    if type(value) is int and abs(value) < 10**18:  # as most are; a bool is none
        return str(value)
    return line(value if isinstance(value, str) else json.dumps(value, default=str), 80)
