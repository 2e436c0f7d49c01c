"""Summarize one case on the newest stack that was measured. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from packaging.version import InvalidVersion, Version

from repro_matrix.baseline.releases import STATES, Releases, releases_of
from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import UPSTREAM
from repro_matrix.records.outcome import NOTHING_STORED
from repro_matrix.results.rows import Row
from repro_matrix.text import counted

CaseState = Literal[
    "reproduces", "fixed", "absent", "other_failure", "unclear", "passes", "fails", "not_measured"
]
# The state of a case -> its symbol and its name, in the order of a table. Only the first two need
# action.
CASE_STATES: Mapping[str, tuple[str, str]] = {
    "attention": ("!", "needs attention"),
    "fails": ("!", "control fails"),
    "reproduces": ("R", "reproduces"),
    "fixed": ("f", "fixed upstream"),
    "absent": ("o", "not reproduced"),
    "other_failure": ("e", "another error"),
    "unclear": ("?", "unclear"),
    "passes": ("✓", "control passes"),
    "not_measured": ("–", "not measured"),
}
GONE = "no longer reproduces"


@dataclass(frozen=True)
class CaseStatus:
    """The state of a case, and its documented fixes.

    ``fixes``: those that work in every cell in which the failure reproduces. ``failing``: the
    others, also those that fail on an older stack without an expectation. ``unmeasured``: those
    without a result, or without a result of the failure.
    """

    case: str
    title: str
    state: CaseState
    detail: str
    simulated: bool
    fixes: tuple[str, ...]
    failing: tuple[str, ...]
    unmeasured: tuple[str, ...]
    releases: Releases
    silent: bool
    area: str


def case_status(rows: Sequence[Row], case: Case) -> CaseStatus:
    """Return what the rows of one case show."""
    newest = max(map(age, rows))
    older = [row for row in rows if age(row) != newest]
    rows = [row for row in rows if age(row) == newest]
    releases = releases_of(case)
    first = [row for row in rows if row.first and row.attempts]
    state, detail = _state(first, rows, releases)
    verdicts: dict[str, set[str]] = defaultdict(set)
    fixes = [row for row in rows if row.role == "fix"]
    for row in fixes:
        shown = state
        if row.verdict != "INCONCLUSIVE":
            shown = STATES.get(row.verdict or "", "reproduces")
        if row.verdict and row.measured and shown == "reproduces":
            verdicts[row.variant].add(row.verdict)
    for row in older:
        if row.state in (*NOTHING_STORED, "possible") and is_failing_fix(row):
            verdicts[row.variant].add(str(row.verdict))
    works = tuple(variant for variant, found in verdicts.items() if found == {"FIXED"})
    failing = tuple(variant for variant in verdicts if variant not in works)
    without = (
        row.variant
        for row in fixes
        if row.skip_kind != "same" and not (row.measured and state == "reproduces")
    )
    unclear = state in ("reproduces", "unclear")
    unmeasured = tuple(dict.fromkeys(name for name in without if unclear and name not in verdicts))
    return CaseStatus(
        case.slug,
        case.title,
        state,
        detail,
        bool(rows[0].simulated),
        works,
        failing,
        unmeasured,
        releases,
        case.silent,
        case.area or "",
    )


def _state(first: Sequence[Row], rows: Sequence[Row], releases: Releases) -> tuple[CaseState, str]:
    """Return the state of a case and the details.

    ``first``: the unfixed or control variants that were launched.
    """
    if not first:
        return "not_measured", next((row.reason for row in rows if row.reason), "")
    if first[0].kind == "control":
        failed = sorted(
            (row for row in first if row.verdict != "PASSED"),
            key=lambda row: row.verdict != "FAILED",
        )
        if not failed:
            return "passes", counted(len(first), "cell")
        state: CaseState = "unclear" if failed[0].verdict == "INCONCLUSIVE" else "fails"
        return state, failed[0].reason
    reproducing = [row for row in first if row.counts["reproduced"]]
    if reproducing:
        flaky = next((row for row in reproducing if len(row.counts) > 1), None)
        if flaky:
            return "reproduces", f"flaky: {flaky.outcome}"
        if len(reproducing) == len(first):
            return "reproduces", ""
        return "reproduces", f"in {len(reproducing)} of {len(first)} cells"
    if all(row.counts.most_common(1)[0][0] == "passed" for row in first):
        upstream = any(row.verdict == "FIXED_UPSTREAM" for row in rows)
        if any(
            row.state in ("unexpected", "quarantined")
            and STATES.get(row.expected_verdict or "") == "reproduces"
            for row in rows
        ):
            return "absent", GONE  # on a release on which it did
        if releases.fixed and any(row.stack.changed for row in first):
            return "absent", "its packages are not as they were installed"
        fixed = upstream or releases.fixed
        return ("fixed", releases.fixed or "upstream") if fixed else ("absent", "")
    failures = dict.fromkeys(
        name for row in first for each in row.evidence_attempts for name in each.failures
    )
    if not any(row.evidence_attempts for row in first):
        return "unclear", first[0].reason
    others = dict.fromkeys(name.partition("/")[0] for name in failures if "/" in name)
    return "other_failure", f"as in {', '.join(others)}" if others else first[0].reason


def is_failing_fix(row: Row) -> bool:
    return row.role == "fix" and row.measured and row.verdict in ("NOT_FIXED", "DIFFERENT_FAILURE")


def age(row: Row) -> tuple[Version, ...]:
    """Return the releases to sort stacks by, those of torch and transformers first."""
    return tuple(release(row.stack.versions.get(name, "0")) for name in UPSTREAM)


@lru_cache(maxsize=1000)
def release(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")
