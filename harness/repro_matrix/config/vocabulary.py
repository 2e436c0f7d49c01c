"""Define the words of conf/ and stored results, known packages, and the files' base type."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from packaging import requirements
from pydantic import AfterValidator, BaseModel, ConfigDict

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
# The purpose of a variant: it shows the failure, is meant to cure it, is advice that is known not
# to help, or isolates a condition (no thread claims that it helps).
Role = Literal["unfixed", "fix", "non_fix", "probe"]
Held = Literal["whole", "shard", "part"]
CollectiveKind = Literal["reduce", "gather", "broadcast", "all_to_all"]
# The part of a training that goes wrong.
Area = Literal[
    "loss", "data", "saving", "loading", "sharding", "device", "launch", "memory", "hang"
]
SignatureKind = Literal["exception", "log", "check", "hang", "signal"]
# Capabilities of the machine that every rank records (repros/repro_kit/machine.py).
Capability = Literal["cpu_capability", "cpu_bf16", "cpu_fp16", "gpu_capability"]

# The packages of the failures: releases are searched, and expectations apply to ranges of them.
UPSTREAM = ("torch", "transformers", "accelerate", "peft", "deepspeed", "colossalai")
# Trainers built upon them: a claim's condition or an error's place may name the first, a log's head
# both.
TRAINERS = ("trl", "ray")
# The packages of a stack in a document; the label's key represents all others.
RELEVANT = (
    "python",
    *UPSTREAM,
    "numpy",
    "safetensors",
    "tokenizers",
    "huggingface-hub",
    "datasets",
    "triton",
)
# Packages that people replace in a stack: suggestions for a misspelt name.
REPLACED = (*UPSTREAM, "numpy", "tokenizers", "einops")


class Strict(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, defer_build=True, protected_namespaces=()
    )


def _check_regex(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return value


def _check_requirement(value: str) -> str:
    try:
        requirements.Requirement(value)
    except requirements.InvalidRequirement as error:
        raise ValueError(f"not a requirement such as 'torch>=2.4': {error}") from None
    return value


Regex = Annotated[str, AfterValidator(_check_regex)]
Requirement = Annotated[str, AfterValidator(_check_requirement)]  # torch>=2.4
