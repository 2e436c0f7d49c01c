"""Project a graded document to rows: its attempts, checks and errors as reports use them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from repro_matrix.config.schema import Case
from repro_matrix.grading import checks, verdict
from repro_matrix.grading.checks import number
from repro_matrix.grading.expected import Situation, comparison
from repro_matrix.grading.observation import NO_RECORD, parse_threads, peak_bytes, raised_first
from repro_matrix.grading.root_cause import failure_ids
from repro_matrix.records.attempt import RankRecord
from repro_matrix.records.document import Document, GradedAttempt, kind_of
from repro_matrix.records.outcome import Outcome, adapter
from repro_matrix.results.rows import Row

# The settings that make two measurements comparable; not the device and its backend, because
# results of a CPU and a GPU are compared.
COMPARED = ("model", "flags", "strategy", "world_size", "tp_size", "steps", "seed")


def rows_of(
    document: Document,
    cases: Mapping[str, Case],
    evidence: str = "",
    state: str = "",
    graded_by: str = "",
) -> list[Row]:
    """Return a row per variant of a graded document, ``unfixed`` first."""
    hardware, stack, made = document["hardware"], document["stack"], document["provenance"]
    cell: dict[str, Any] = {
        **document,
        **made,
        "cell_id": document.get("cell_id") or document["case"],
        "params": document.get("params") or f"{document['model']}/{document['strategy']}",
        "stack": {"label": "", **stack},
        "hardware": {
            "capabilities": {},
            **hardware,
            "gpus": [gpu["name"] for gpu in hardware["gpus"]],
            "kind": kind_of(hardware),
        },
        "variant_count": len(document["variants"]),
        "commit": made["git_commit"],
        "dirty": made["git_dirty"],
        "evidence": evidence,
        "evidence_state": state,
        "graded_by": graded_by,
    }
    rows = [
        {**cell, **_variant(document, name, cases.get(document["case"]))}
        for name in document["variants"]
    ]
    return [with_catalog(adapter(Row).validate_python(row), cases) for row in rows]


def _variant(document: Document, name: str, case: Case | None) -> dict[str, Any]:
    variant = document["variants"][name]
    graded: Mapping[str, Any] = document["verdicts"].get(name) or {}
    made = variant["attempts"]
    evidence = any(each["outcome"]["outcome"] not in verdict.NO_EVIDENCE for each in made)
    failed = next((each for each in made if each["outcome"]["outcome"] != "passed"), None)
    shown = failed or (made[0] if made else None)
    own_stack = variant.get("stack") if variant.get("stack") != document["stack"]["name"] else None
    settings: Mapping[str, Any] = variant["settings"]
    return {
        "variant": name,
        "help": "",
        "role": "",
        "first": name == next(iter(document["variants"])),
        "own_stack": own_stack,
        "settings": {key: settings[key] for key in COMPARED if key in settings},
        "skipped": variant["skipped"],
        "skip_kind": skip["kind"] if (skip := variant.get("skip")) else None,
        "torchrun": next((each["observation"]["attempt"].get("torchrun") for each in made), None),
        "verdict": graded.get("name"),
        "measured": graded.get("measured", evidence),
        "no_evidence": bool(graded.get("infra_error")) or (bool(made) and not evidence),
        "unseen": bool(graded.get("unseen")),
        "failures": graded.get("failure_ids", ()),
        "reason": (
            variant["skipped"]
            or graded.get("reason")
            or (made[0]["outcome"]["reason"] if made else "")
        ),
        "state": graded.get("expected", "no_expectation") if graded else None,
        "expected_verdict": graded.get("expectation"),
        "note": graded.get("failure_note", ""),
        "nearest": graded.get("nearest", ()),
        "beyond": graded.get("beyond", False),
        "attempts": [_attempt(document["case"], each) for each in made],
        "checks": _checks(shown["observation"]["ranks"]) if shown else (),
        "errors": _errors(failed) if failed else (),
        "stacks": _stacks(shown["observation"]["ranks"]) if shown else {},
        "error_at": error_at(made),
    }


def with_catalog(row: Row, cases: Mapping[str, Case]) -> Row:
    """Add what the catalog says of the variant, and compare the verdict with the expectation."""
    case = cases.get(row.case)
    variant = case.variants.get(row.variant) if case else None
    role = variant.role if variant else "unfixed" if row.first else "probe"
    row = replace(row, help=variant.help if variant else "", role=role)
    if row.verdict is None or case is None:
        return row
    graded = verdict.Verdict(
        row.verdict,
        row.reason,
        fix_k=row.counts["passed"],
        fix_n=len(row.evidence_attempts),
        measured=row.measured,
        failure_ids=row.failures,
    )
    machine = row.hardware
    here = Situation(row.params, row.stack.versions, machine.kind, machine.capabilities)
    found = comparison(case, row.variant, here, graded)
    names = {"expected": "state", "expectation": "expected_verdict", "failure_note": "note"}
    return replace(row, **{names.get(name, name): value for name, value in found.items()})


def _attempt(case: str, made: GradedAttempt) -> dict[str, Any]:
    outcome, launched = made["outcome"], made["observation"]["attempt"]
    records = [rank["record"] for rank in made["observation"]["ranks"]]
    greatest: dict[str, float] = {}
    metrics: dict[str, float] = {}
    for record in filter(None, records):
        peaks = {"peak_rss_mb": peak_bytes(record, "rss"), "peak_gpu_mb": peak_bytes(record, "gpu")}
        sizes = {name: size and size / 2**20 for name, size in peaks.items()}
        for values, most in ((sizes, greatest), (record["metrics"], metrics)):
            for name, value in values.items():
                if (measured := number(value)) is not None:
                    most[name] = max(measured, most.get(name, measured))
    failures = [str(each) for each in failure_ids(case, Outcome.from_json(outcome))]
    return {
        **launched,
        **outcome,
        "failures": failures or (["hang"] if outcome["outcome"] == "hang" else []),
        "finished": (
            bool(records) and all(record is not None and record["done"] for record in records)
        ),
        "retry": bool(launched.get("retry_of")),
        "peak_rss_mb": greatest.get("peak_rss_mb"),
        "peak_gpu_mb": greatest.get("peak_gpu_mb"),
        "metrics": metrics,
    }


def _checks(ranks: Sequence[RankRecord]) -> list[dict[str, Any]]:
    """Return the checks, failed ones first; ranks with the same numbers share an entry."""
    found: dict[str, dict[str, Any]] = {}
    for rank in ranks:
        record = rank["record"] or NO_RECORD
        for check in record["checks"]:
            names = ("name", "actual", "expected", "tolerance")
            entry = {
                **{name: _shorten(check.get(name)) for name in names},
                "state": checks.evaluate(check, number(record.get("done_at"))).state,
                "subject": str(check.get("subject") or "")[:200],
            }
            found.setdefault(repr(entry), {**entry, "ranks": []})["ranks"].append(rank["rank"])
    return sorted(found.values(), key=lambda entry: bool(entry["state"] == "passed"))[:24]


def _shorten(value: Any) -> Any:
    """Return a number or a short value as it is, of any other the beginning of its JSON."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return value if len(text) <= 200 else text[:200]


def _errors(made: GradedAttempt) -> list[dict[str, Any]]:
    """Return how ranks failed; ranks with the same error share an entry."""
    found: dict[str, dict[str, Any]] = {}
    first = made["outcome"]["primary"]["rank"] if made["outcome"]["primary"] else None
    for rank in sorted(made["observation"]["ranks"], key=lambda rank: rank["rank"] != first):
        ended = _ended(rank)
        raised: Mapping[str, Any] = raised_first(rank["record"] or NO_RECORD) or {}
        if not raised and ended == "finished":
            continue
        frames = [
            f"{'.'.join(filter(None, (frame['module'], frame['function'])))}:{frame['line']} "
            f" {frame.get('code') or ''}"
            for frame in raised.get("frames", ())[-6:]
        ]
        entry = {
            "ended": ended,
            "type": raised.get("type", ""),
            "message": raised.get("message", "")[:600],
            "frames": [frame.strip()[:300] for frame in frames],
        }
        log = rank["log_tail"][-800:]
        found.setdefault(repr(entry), {**entry, "ranks": [], "log": log})["ranks"].append(
            rank["rank"]
        )
    return list(found.values())[:4]


def _ended(rank: RankRecord) -> str:
    record = rank["record"] or NO_RECORD
    how = "finished" if record["done"] else "did not finish"
    if rank["terminated_by"] != "self":
        how = f"ended by the {rank['terminated_by']}"
    elif rank["signal"]:
        how = f"died of {rank['signal']}"
    elif rank["exit_code"]:
        how = f"exit code {rank['exit_code']}"
    return f"{how} in {record['phase']}" if record["phase"] and not record["done"] else how


def _stacks(ranks: Sequence[RankRecord]) -> dict[str, list[str]]:
    """Return the main thread of each rank whose stack was recorded."""
    threads = {
        str(rank["rank"]): parse_threads((rank["stack"] or "")[:200_000]) for rank in ranks[:16]
    }
    return {rank: list(found[0].lines[:60][::-1]) for rank, found in threads.items() if found}


def error_at(attempts: Iterable[GradedAttempt]) -> str | None:
    """Return ``file:line`` of the innermost frame of the first failure, if an attempt has one."""
    for attempt in attempts:
        primary = attempt["outcome"]["primary"]
        for rank in attempt["observation"]["ranks"] if primary else ():
            raised = raised_first(rank["record"] or NO_RECORD)
            if rank["rank"] == primary["rank"] and raised and raised["frames"]:
                frame = raised["frames"][-1]
                line = "" if frame["line"] is None else f":{frame['line']}"
                return frame["file"] + line
    return None
