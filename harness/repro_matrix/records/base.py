"""What a key of a document may hold, and whether a mapping may have other keys than its type names. Pure."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import ConfigDict, Field

T = TypeVar("T")
Compared = Literal["expected", "unexpected", "no_expectation", "matches_cpu", "differs_from_cpu"]
InfraErrorKind = Literal[
    "launch", "port", "disk", "memory", "import", "device", "gpu_failure", "gpu_or_program", "not_enough_gpus",
    "launcher_died", "script_error", "timeout_while_progressing", "startup_timeout", "missing_check", "unknown",
]  # fmt: skip
# Why an attempt is no evidence, beside the kinds that the launcher knows: what the judge found.
NoEvidence = Literal["interrupted", "no_effect", "environment_changed"]
Accelerator = Literal["cpu", "cuda"]
TerminatedBy = Literal["self", "launcher", "timeout", "user"]
# Why a variant is not launched: a number of ranks, of GPUs, an accelerator, GPUs that are shared or in a mode of their
# own, a flag's value, what does not divide, a stack or packages that are not there, an extension that could not be
# made here, memory, weights, the same variant.
SkipKind = Literal[
    "ranks", "tp_size", "gpus", "accelerator", "shared", "gpu_mode", "flags", "divisible", "stack", "packages", "build",
    "memory", "weights", "same", "unknown",
]  # fmt: skip
# How a rank failed; left: it ended with exit code 0, and did not finish.
FailureKind = Literal["exception", "signal", "exit", "left"]

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
# The 95 % Wilson interval of a share.
Interval = Annotated[list[Share], Field(min_length=2, max_length=2)]


def closed(kind: type[T]) -> type[T]:
    """It has no other keys."""
    kind.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    return kind


def may_hold_more(kind: type[T]) -> type[T]:
    """It may have other keys, which are kept as they are. (What is not marked is as what it lies in.)"""
    kind.__pydantic_config__ = ConfigDict(extra="ignore")  # type: ignore[attr-defined]
    return kind
