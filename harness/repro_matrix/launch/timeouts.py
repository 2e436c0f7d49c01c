"""How long an attempt may take: to start, and to do its work. Stated numbers, per accelerator and ranks.

A case's deadline is for its work. Its clock starts when every rank is past ``init_process_group`` (or has ended); what
comes before has a limit of its own, beyond which the machine was too slow to say anything about the case.
"""

from __future__ import annotations

from dataclasses import dataclass

STARTING = frozenset({"start", "init_process_group"})  # phases of a rank (repros/repro_kit/run.py) before its work


@dataclass(frozen=True)
class Costs:
    """Seconds."""

    start: float  # limit for starting, however few the ranks
    start_per_rank: float
    bring_up: (
        float  # added to a case's deadline: NCCL connects in the first collective, after the process group is made
    )
    bring_up_per_rank: float

    def start_limit(self, ranks: int) -> float:
        return self.start + self.start_per_rank * ranks

    def work_limit(self, deadline: float, ranks: int) -> float:
        return deadline + self.bring_up + self.bring_up_per_rank * ranks


# CPU: a cold interpreter takes up to 10 CPU s to import a stack, and other attempts run beside it. CUDA: besides,
# cuInit and the contexts of 8 cards on a node without persistence mode, and NCCL's first connection, take 20 to 60 s
# from cold (figures of public reports; none was measured by this project).
COSTS = {"cpu": Costs(60, 20, 0, 0), "cuda": Costs(120, 20, 20, 5)}


def costs(device: str) -> Costs:
    return COSTS.get(device, COSTS["cuda"])
