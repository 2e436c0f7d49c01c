"""Check that records are what the attempt's own ranks left, on the stack that was planned. Pure.

Records are not signed: one that is forged consistently in everything is trusted.
"""

from __future__ import annotations

from collections.abc import Mapping

from repro_matrix.grading.observation import Attempt, number
from repro_matrix.records.document import Document

CLOCK_SKEW_S = 60.0  # by how much the clocks of a node's ranks and of the controller may differ


def foreign_record(attempt: Attempt) -> tuple[str, list[int]] | None:
    """Return why a record is not of the rank's own process in this attempt, and the rank; None where all are."""
    pids: dict[int, int] = {}
    for rank in attempt.ranks:
        started, size = number(rank.record.get("started")), rank.record.get("world_size")
        reason = rank.record_error
        if not reason and rank.pid in pids:
            reason = f"it is the same process as rank {pids[rank.pid]}"
        if rank.pid is not None:
            pids[rank.pid] = rank.rank
        if not reason and started is not None and attempt.started is not None:
            early = attempt.started - started
            reason = f"its record was begun {early:.0f} s before the attempt" if early > CLOCK_SKEW_S else ""
        if not reason and size is not None and attempt.world_size and size != attempt.world_size:
            reason = f"its record is of {size} ranks, the attempt of {attempt.world_size}"
        if reason:
            return f"rank {rank.rank}: {reason}", [rank.rank]
    return None


def version_mismatch(attempt: Attempt, planned: Mapping[str, str]) -> tuple[str, list[int]] | None:
    """Return where a rank ran on other releases than planned, or than another rank; None where none did.

    ``planned``: the stack's versions, beside those that the attempt itself was planned with.
    """
    for package, version in attempt.planned.items():
        if package in planned and not same_release(version, planned[package]):
            return f"planned with {package} {version}, and stored as {planned[package]}", []
    for plan in (attempt.planned, planned):
        for rank in attempt.ranks:
            for package, version in rank.record["versions"].items():
                expected = plan.get(package)
                if expected is not None and version != "unknown" and not same_release(expected, version):
                    return f"rank {rank.rank} had {package} {version}, the plan {expected}", [rank.rank]
    first_seen: dict[str, tuple[str, int]] = {}
    for rank in attempt.ranks:
        for package, version in rank.record["versions"].items():
            first, other = first_seen.setdefault(package, (version, rank.rank))
            if "unknown" not in (first, version) and first != version:
                return f"rank {rank.rank} had {package} {version}, rank {other} {first}", []
    return None


def same_release(one: str, other: str) -> bool:
    """Compare two versions; a build (+cu121) that only one of them names is ignored: metadata may leave it out."""
    if "+" in one and "+" in other:
        return one == other
    return one.partition("+")[0] == other.partition("+")[0]


def fingerprint_mismatch(document: Document) -> str | None:
    """Return where a variant's fingerprint and those of its attempts do not agree; None where they do."""
    for name, variant in document["variants"].items():
        for attempt in variant["attempts"]:
            fingerprint = attempt["observation"]["attempt"].get("fingerprint")
            if fingerprint is not None and fingerprint != variant.get("fingerprint"):
                return f"variant {name} has the fingerprint {variant.get('fingerprint')}, an attempt {fingerprint}"
    return None
