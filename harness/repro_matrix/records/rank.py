"""The types of what one rank says: its record, down to a frame of an exception (repros/repro_kit/record.py). Pure.

``NotRequired`` is what older records do not hold. What ranks *say* in it (a NaN, a contradiction) is for the judges.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from repro_matrix.records.base import may_hold_more


@may_hold_more
class Frame(TypedDict):
    file: str
    line: int | None
    function: str
    module: str
    code_location: NotRequired[str]  # where the code lies (repro_kit/code_location.py); older records know names only
    code: NotRequired[str]


@may_hold_more
class Exception_(TypedDict):
    type: str
    module: NotRequired[str]
    bases: NotRequired[list[str]]
    message: str
    error_code: NotRequired[
        Annotated[int, Field(description="an accelerator's own code (cudaError_t), where torch tells it")]
    ]
    frames: Annotated[list[Frame], Field(description="outermost first")]
    cause: Exception_ | None


@may_hold_more
class Check(TypedDict):
    """What one check compared; judged by harness/repro_matrix/grading/checks.py."""

    name: str
    passed: bool
    actual: NotRequired[Any]
    expected: NotRequired[Any]
    tolerance: NotRequired[Any]
    subject: NotRequired[Any]
    at: NotRequired[Any]


@may_hold_more
class Effect(TypedDict):
    """What a rank measured of what its variant names; judged by harness/repro_matrix/grading/effect.py."""

    what: str
    actual: NotRequired[Any]
    whole: NotRequired[Any]
    backend: NotRequired[str]
    least: NotRequired[Any]
    most: NotRequired[Any]
    subject: NotRequired[str]


@may_hold_more
class Warning_(TypedDict):
    category: str
    message: str
    file: str
    module: NotRequired[str]  # who called warnings.warn; ``file`` is whom it blames
    code_location: NotRequired[str]


@may_hold_more
class Log(TypedDict):
    logger: str
    message: str
    file: str
    code_location: NotRequired[str]


@may_hold_more
class Said(TypedDict):
    """The facts that a rank's script and kit recorded."""

    machine: NotRequired[dict[str, str | bool]]


@may_hold_more
class Read(TypedDict):
    """The flags and options that its script has read."""

    flags: NotRequired[list[str]]
    options: NotRequired[list[str]]


@may_hold_more
class Record(TypedDict):
    """One rank's own account."""

    schema: NotRequired[Annotated[int, Field(description="2: checks are numbers with a tolerance, or equal JSON")]]
    rank: int
    world_size: NotRequired[int]
    pid: NotRequired[int]
    started: NotRequired[float]
    ended: NotRequired[float | None]
    phase: str
    done: bool
    done_at: NotRequired[float | None]
    exception: Exception_ | None
    checks: list[Check]
    metrics: dict[str, Any]
    facts: Said
    warnings: list[Warning_]
    logs: list[Log]
    versions: dict[str, str]
    packages: NotRequired[Annotated[dict[str, str], Field(description="where what it could import is installed")]]
    read: NotRequired[Read]
    effects: NotRequired[list[Effect]]
    cpu_s: NotRequired[float]
    peak_rss_mb: NotRequired[float]
    peak_gpu_mb: NotRequired[float | None]
