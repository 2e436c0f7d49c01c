"""The words that files in conf/ and documents share: outcomes, verdicts, kinds of signatures, facts of a machine."""

from __future__ import annotations

from typing import Literal

OutcomeName = Literal["reproduced", "passed", "other_failure", "hang", "infra_error", "skipped"]
VerdictName = Literal[
    "FIXED",
    "NOT_FIXED",
    "DIFFERENT_FAILURE",
    "NOT_REPRODUCED",
    "FIXED_UPSTREAM",
    "FIX_BREAKS",
    "SIGNATURE_MISMATCH",
    "FLAKY",
    "INCONCLUSIVE",
    "PASSED",
    "FAILED",
]
Held = Literal["whole", "shard", "part"]
CollectiveKind = Literal["reduce", "gather", "broadcast", "all_to_all"]
SignatureKind = Literal["exception", "log", "check", "hang", "signal"]
# Capabilities of the machine that every rank records (repros/repro_kit/machine.py).
Capability = Literal["cpu_capability", "cpu_bf16", "cpu_fp16", "gpu_capability"]
