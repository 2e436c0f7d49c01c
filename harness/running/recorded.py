"""What attempts took when they were last measured: what the scheduler expects of the next ones. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from repro_matrix.memory.arithmetic import GIB
from repro_matrix.planning.plan import MEMORY_PER_RANK_GB, ArmPlan

UNKNOWN_S = 10.0  # where nothing was ever measured


@dataclass(frozen=True)
class Took:
    """Seconds and GiB of one attempt, all its ranks together."""

    seconds: float
    memory_gb: float | None


Recorded = Mapping[tuple[str, str], Took]


def recorded(documents: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Took]:
    """(cell key, arm) -> what its attempts took, by the latest of the documents."""
    found: dict[tuple[str, str], Took] = {}
    for document in sorted(documents, key=lambda document: document["provenance"].get("started") or 0):
        for name, arm in document["arms"].items():
            seen = [attempt["observation"] for attempt in arm["attempts"]]
            if seen:
                seconds = statistics.median(float(each["attempt"].get("wall_s") or 0) for each in seen)
                found[document["key"], name] = Took(seconds, _memory(seen))
    return found


def peak_rss_mb(attempts: Iterable[Mapping[str, Any]]) -> float | None:
    """The fullest rank's peak over these attempts of an arm."""
    ranks = [rank for attempt in attempts for rank in attempt["observation"]["ranks"]]
    return max((float((rank.get("record") or {}).get("peak_rss_mb") or 0) for rank in ranks), default=0.0) or None


def _memory(seen: list[Mapping[str, Any]]) -> float | None:
    sums = [
        sum(float((rank.get("record") or {}).get("peak_rss_mb") or 0) for rank in each["ranks"]) / 1024 for each in seen
    ]
    return max(sums, default=0.0) or None


def expect(known: Recorded, key: str, arm: ArmPlan) -> Took:
    """What to expect of one attempt. One that was never measured counts as long: it may be, and shall not come last."""
    took = known.get((key, arm.arm))
    unknown = max([UNKNOWN_S, arm.expected_s or 0.0, *(each.seconds for each in known.values())])
    seconds = took.seconds if took else unknown
    planned = arm.memory.host_node / GIB if arm.memory else MEMORY_PER_RANK_GB * arm.world_size
    memory = (took.memory_gb if took else None) or planned
    return Took(min(seconds, arm.deadline), memory)
