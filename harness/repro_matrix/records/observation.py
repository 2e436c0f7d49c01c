"""The types of what one attempt left: how it was launched, and how each rank ended (launch/observe.py;
docs/observation.md). Pure.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from repro_matrix.records.base import Count, InfraErrorKind, Seconds, TerminatedBy, may_hold_more
from repro_matrix.records.rank import Record


@may_hold_more
class Sample(TypedDict):
    """What was seen of a rank at one moment."""

    time_s: float
    ended: bool
    cpu_s: NotRequired[float | None]
    io: NotRequired[int | None]
    busy: NotRequired[bool]
    phase: NotRequired[str | None]
    stack: NotRequired[str | None]
    blocking_call: NotRequired[str]
    collectives_digest: NotRequired[str | None]
    busy_waiting: NotRequired[bool]


@may_hold_more
class Rank(TypedDict):
    rank: Count
    pid: NotRequired[int | None]
    exit_code: int | None
    signal: Annotated[str, Field(pattern="^SIG")] | None
    terminated_by: TerminatedBy
    record: Annotated[
        Record | None, Field(description="the kit's record (repros/repro_kit/record.py); null: the rank wrote none")
    ]
    validation_error: NotRequired[
        Annotated[str, Field(description="why what it wrote is no record: the key, and what is wrong")]
    ]
    log_tail: str
    stack: str | None
    samples: NotRequired[list[Sample]]
    collectives: NotRequired[
        dict[str, Any] | None
    ]  # what its witness answered: judged by harness/repro_matrix/grading/hangs/deadlock.py


@may_hold_more
class Hang(TypedDict):
    """How the launcher came to end an attempt that did not end by itself."""

    starting: bool
    deadlock: str | None
    limit_s: float


@may_hold_more
class ModelSettings(TypedDict, total=False):
    slug: str
    scale: str
    weights: str
    config: dict[str, Any]


@may_hold_more
class StrategySettings(TypedDict, total=False):
    slug: str
    options: dict[str, Any]
    invariants: dict[str, Any]
    replicas: dict[str, Any]


@may_hold_more
class PassCriteriaSettings(TypedDict, total=False):
    kind: str
    checks: list[str]
    effects: list[str]


@may_hold_more
class Settings(TypedDict, total=False):
    """What a variant ran with (harness/conf/variant_settings.py)."""

    case: str
    variant: str
    model: ModelSettings
    strategy: StrategySettings
    flags: dict[str, Any]
    pass_criteria: PassCriteriaSettings
    world_size: int
    tp_size: int
    devices: int
    process_group: bool
    normal_exit: bool
    seed: int
    steps: int
    device: str
    backend: str


@may_hold_more
class Again(TypedDict):
    """Why an attempt was made once more: the infra of the one before it."""

    kind: InfraErrorKind
    message: str


@may_hold_more
class Attempt(TypedDict):
    id: str
    launcher: str
    command: list[str]
    torchrun: NotRequired[str | None]
    backend: str
    world_size: Annotated[int, Field(ge=1)]
    started: float
    ended: float
    wall_s: Seconds
    cpu_s: Seconds | None
    deadline_s: Annotated[float, Field(gt=0)]
    timed_out: bool
    startup_s: NotRequired[float | None]
    hang: NotRequired[Hang | None]
    interrupted: bool
    leaked_processes: list[str]
    seed: int
    settings: Settings
    gpus: NotRequired[list[str]]
    fingerprint: NotRequired[str]
    versions: NotRequired[Annotated[dict[str, str], Field(description="the releases that it was planned with")]]
    cold_start_reason: NotRequired[Annotated[str, Field(description="why it was not forked")]]
    retry_of: NotRequired[
        Annotated[Again | str, Field(description="what came before; older documents say it in words")]
    ]


@may_hold_more
class InfraError(TypedDict):
    kind: InfraErrorKind
    message: str


@may_hold_more
class Line(TypedDict):
    """A line that the definition of a script's failure looks for."""

    rank: Annotated[int, Field(ge=-1, description="-1: of the launcher's own log")]
    line: str
    value: NotRequired[Annotated[float, Field(description="of a metric")]]


@may_hold_more
class Printed(TypedDict):
    log: list[Line]
    metric: list[Line]
    by_rank: NotRequired[Annotated[dict[str, float], Field(description="the last value that each rank printed")]]
    cut: Annotated[bool, Field(description="a log was too long to be kept whole")]


@may_hold_more
class Observation(TypedDict):
    """docs/observation.md; what is not named here is kept as it is."""

    schema: Literal[1]
    attempt: Attempt
    infra_error: InfraError | None
    ranks: list[Rank]
    printed: NotRequired[Annotated[Printed, Field(description="of somebody's own script: what is read of its logs")]]
    command_exit: NotRequired[Annotated[int | None, Field(description="of somebody's own script: its command's")]]
