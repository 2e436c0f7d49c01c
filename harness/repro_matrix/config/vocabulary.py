"""The words that files in conf/ and documents share: outcomes, verdicts, kinds of signatures, facts of a machine."""

from __future__ import annotations

from typing import Literal

OutcomeName = Literal["fires", "clean", "other_error", "hang", "infra", "skipped"]
VerdictName = Literal[
    "FIX_HOLDS", "FIX_BROKEN", "FIX_UNMASKS", "NOT_FIRING", "UPSTREAM_FIXED", "FIX_HARMFUL", "CHANGED", "FLAKY",
    "INCONCLUSIVE", "HEALTHY", "UNHEALTHY",
]  # fmt: skip
Held = Literal["whole", "shard", "part"]
CollectiveKind = Literal["reduce", "gather", "broadcast", "all_to_all"]
SignatureKind = Literal["exception", "log", "oracle", "hang", "signal"]
# Facts of the machine that every rank records (repros/repro_kit/machine.py).
Fact = Literal["cpu_capability", "cpu_bf16", "cpu_fp16", "gpu_capability"]
