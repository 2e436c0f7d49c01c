"""What attempts took when they were last measured: what the scheduler expects of the next ones. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from repro_matrix.planning.memory import GIB
from repro_matrix.planning.plan import MEMORY_PER_RANK_GB, ArmPlan
from repro_matrix.records.document import Document, Made

UNKNOWN_S = 10.0  # where nothing was ever measured


@dataclass(frozen=True)
class Took:
    """Seconds and GiB of one attempt, all its ranks together."""

    seconds: float
    memory_gb: float | None
    scale: str = "tiny"


Recorded = Mapping[tuple[str, str], Took]


def recorded(documents: Iterable[Document]) -> dict[tuple[str, str], Took]:
    """(cell key, arm) -> what its attempts took, by the latest of the documents."""
    found: dict[tuple[str, str], Took] = {}
    for document in sorted(documents, key=lambda document: document["provenance"]["started"]):
        for name, arm in document["arms"].items():
            if arm["attempts"]:
                seconds = statistics.median(made["observation"]["attempt"]["wall_s"] for made in arm["attempts"])
                found[document["key"], name] = Took(seconds, _memory(arm["attempts"]), document["scale"])
    return found


def peak_rss_mb(attempts: Iterable[Made]) -> float | None:
    """The fullest rank's peak over these attempts of an arm."""
    return max((peak for made in attempts for peak in _peaks(made)), default=0.0) or None


def _peaks(made: Made) -> list[float]:
    """Of each rank that said it, in MiB."""
    return [rank["record"].get("peak_rss_mb", 0.0) for rank in made["observation"]["ranks"] if rank["record"]]


def _memory(attempts: Sequence[Made]) -> float | None:
    return max(sum(_peaks(made)) / 1024 for made in attempts) or None


def expect(known: Recorded, key: str, arm: ArmPlan) -> Took:
    """What to expect of one attempt. Of one that was never measured: what its case takes at that size, in the middle;
    of a case that never was, long: it may be, and shall not come last."""
    took = known.get((key, arm.arm))
    seconds = took.seconds if took else arm.expected_s or _usual(known, key, arm) or UNKNOWN_S
    planned = arm.memory.host_node / GIB if arm.memory else MEMORY_PER_RANK_GB * arm.world_size
    memory = (took.memory_gb if took else None) or planned
    return Took(min(seconds, arm.deadline), memory)


def _usual(known: Recorded, key: str, arm: ArmPlan) -> float | None:
    case, scale = key.partition("/")[0], arm.settings["model"]["scale"]
    alike = [
        each.seconds for (other, _), each in known.items() if other.partition("/")[0] == case and each.scale == scale
    ]
    return statistics.median(alike) if alike else None
