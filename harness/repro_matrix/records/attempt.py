"""Define the types of an attempt: its launch, the end of each rank, and the ranks' records.

Pure. Records are written by repros/repro_kit/record.py, observations by launch/observe.py
(docs/concepts/evidence.md). Keys that are not listed here are kept. The graders check the values in
a record (a NaN, a contradiction).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, with_config
from typing_extensions import NotRequired, TypedDict

InfraErrorKind = Literal[
    "launch",
    "port",
    "disk",
    "memory",
    "import",
    "device",
    "gpu_failure",
    "gpu_or_program",
    "not_enough_gpus",
    "launcher_died",
    "script_error",
    "timeout_while_progressing",
    "startup_timeout",
    "missing_check",
    "unknown",
]
# phases of a rank (repros/repro_kit/run.py) before its body
STARTING = frozenset({"start", "init_process_group"})
# left: exit code 0, without the done marker
FailureKind = Literal["exception", "signal", "exit", "left"]

Count = Annotated[int, Field(ge=0, strict=True)]
Seconds = Annotated[float, Field(ge=0)]

# Nested types without a mark of their own are as open as the type that holds them.
closed = with_config(ConfigDict(extra="forbid", strict=True))
open_ended = with_config(ConfigDict(extra="ignore", strict=True))

# -- one rank's record


class Frame(TypedDict):
    """Store one frame of a traceback.

    ``code_location``: the module of the code (repro_kit/code_location.py). A frame from a log has
    none.
    """

    file: str
    line: int | None
    function: str
    module: str
    code_location: NotRequired[str]
    code: NotRequired[str]


class Exception_(TypedDict):
    """``frames``: outermost first.

    ``error_code``: an accelerator's own (cudaError_t), where torch gives it.
    """

    type: str
    module: NotRequired[str]
    bases: NotRequired[list[str]]
    message: str
    error_code: NotRequired[int]
    frames: list[Frame]
    cause: Exception_ | None


class Check(TypedDict):
    """Store the values that one check compared; grading/checks.py evaluates it."""

    name: str
    passed: bool
    actual: NotRequired[Any]
    expected: NotRequired[Any]
    tolerance: NotRequired[Any]
    subject: NotRequired[Any]
    at: NotRequired[Any]


class Effect(TypedDict):
    """Store a rank's measurement of an option of its variant; grading/effect.py evaluates it."""

    what: str
    actual: NotRequired[Any]
    whole: NotRequired[Any]
    backend: NotRequired[str]
    least: NotRequired[Any]
    most: NotRequired[Any]
    subject: NotRequired[str]


class Warning_(TypedDict):
    """Store one warning.

    ``code_location``: of the caller of warnings.warn; ``file`` is the one that the warning blames.
    """

    category: str
    message: str
    file: str
    code_location: str


class Log(TypedDict):
    logger: str
    message: str
    file: str
    code_location: str


class Facts(TypedDict):
    """The facts that a rank's script and kit recorded."""

    machine: NotRequired[dict[str, str | bool]]


class Read(TypedDict):
    """The flags and options that a rank's script has read, and keys of its strategy and model."""

    flags: NotRequired[list[str]]
    options: NotRequired[list[str]]
    strategy: NotRequired[list[str]]
    model: NotRequired[list[str]]


class Collective(TypedDict):
    """One collective of torch's flight recorder.

    ``frames``: (file, function) of its call, innermost first.
    """

    group: str
    sequence: int | None
    op: str
    p2p: bool
    waits: bool
    frames: NotRequired[list[list[str]]]


class Collectives(TypedDict):
    """Store the report of a rank's monitor (repros/repro_kit/rank_monitor.py).

    Null: nothing was recorded.
    """

    groups: dict[str, list[int]]
    collectives: list[Collective] | None
    complete: bool


@open_ended
class Record(TypedDict):
    """Store the record that one rank wrote. ``packages``: name -> where it is installed."""

    rank: int
    world_size: NotRequired[int]
    pid: NotRequired[int]
    started: NotRequired[float]
    ended: NotRequired[float | None]
    phase: str
    # the GPU on which it began its body: torch's name, and NVML's (null: unknown)
    device: NotRequired[str]
    gpu_uuid: NotRequired[str | None]
    done: bool
    done_at: NotRequired[float | None]
    exception: Exception_ | None
    checks: list[Check]
    metrics: dict[str, Any]
    facts: Facts
    warnings: list[Warning_]
    logs: list[Log]
    threads: NotRequired[list[Exception_]]  # what ended threads, but not the process
    unraisable: NotRequired[list[Exception_]]  # of destructors and atexit handlers
    versions: dict[str, str]
    packages: NotRequired[dict[str, str]]
    read: NotRequired[Read]
    effects: NotRequired[list[Effect]]
    cpu_s: NotRequired[float]
    peak_rss_bytes: NotRequired[Count]
    peak_gpu_bytes: NotRequired[Count]
    peak_rss_mb: NotRequired[float]  # MiB, rounded to tenths: of older records, as the next one
    peak_gpu_mb: NotRequired[float | None]
    collectives: NotRequired[Collectives]  # at its end, on a GPU


# -- how a rank ended


class SampleRecord(TypedDict):
    """Store the state of a rank at one moment (launch/sampling.py).

    An ended rank has only the first two keys.
    """

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


class RankRecord(TypedDict):
    """Store how one rank ended.

    ``record``: null if the rank wrote none. ``validation_error``: why its file is not a record.
    """

    rank: Count
    node: NotRequired[Count]  # in the attempt's ``nodes``, where it has several
    pid: NotRequired[int | None]
    exit_code: int | None
    signal: Annotated[str, Field(pattern="^SIG")] | None
    terminated_by: Literal["self", "launcher", "timeout", "user"]
    record: Record | None
    validation_error: NotRequired[str]
    log_tail: str
    stack: str | None
    samples: NotRequired[list[SampleRecord]]
    collectives: NotRequired[Collectives | None]


# -- the attempt


class HangRecord(TypedDict):
    """Why the launcher ended an attempt that did not end by itself.

    ``starting``: a rank had not begun its script.
    """

    starting: bool
    deadlock: str | None
    limit_s: float


class StrategySettings(TypedDict, total=False):
    slug: str
    options: dict[str, Any]
    invariants: dict[str, Any]
    replicas: dict[str, Any]


@open_ended
class Settings(TypedDict, total=False):
    """Store the settings of a variant (repros/repro_kit/settings.py)."""

    case: str
    variant: str
    model: dict[str, Any]
    strategy: StrategySettings
    flags: dict[str, Any]
    pass_criteria: dict[str, Any]
    world_size: int
    tp_size: int
    devices: int
    process_group: bool
    normal_exit: bool
    seed: int
    steps: int
    device: str
    backend: str


class InfraError(TypedDict):
    kind: InfraErrorKind
    message: str


class NodeRecord(TypedDict):
    """A node of an attempt.

    ``interface``: which GLOO_SOCKET_IFNAME names; null: none was found for the address.
    """

    host: str
    address: str | None
    interface: NotRequired[str | None]


class AttemptRecord(TypedDict):
    """One launch. ``nodes``: null is one whose agent never started.

    ``versions``: the releases that it was planned with. ``cold_start_reason``: why it was not
    forked.

    ``retry_of``: the infrastructure error of the attempt that this one repeats.
    """

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
    hang: NotRequired[HangRecord | None]
    interrupted: bool
    leaked_processes: list[str]
    seed: int
    settings: Settings
    gpus: NotRequired[list[str]]
    nodes: NotRequired[list[NodeRecord | None]]
    slurm_job: NotRequired[str | None]
    fingerprint: NotRequired[str]
    versions: NotRequired[dict[str, str]]
    cold_start_reason: NotRequired[str]
    retry_of: NotRequired[InfraError]


class TraceFiles(TypedDict):
    """The trace of a user's script. ``folder``: in its results folder."""

    folder: str
    bytes: Count


class LogLine(TypedDict):
    """A line of a log that a user's failure definition looks for.

    ``rank`` -1: the launcher's log.
    """

    rank: Annotated[int, Field(ge=-1)]
    line: str
    value: NotRequired[float]


class Printed(TypedDict):
    """Store the values found in the logs of a user's script.

    ``by_rank``: the last value of each rank; ``cut``: a log was too long.
    """

    log: list[LogLine]
    metric: list[LogLine]
    by_rank: NotRequired[dict[str, float]]
    cut: bool


@open_ended
class Observation(TypedDict):
    """Everything that an attempt left.

    ``printed``, ``command_exit`` and ``trace``: of a user's script only.

    ``place``: where a training whose check failed begins to differ from the single process, found
    by a repetition with
    a trace (repro_matrix.traces.Location, with its ``sentence``).
    """

    schema: Literal[1]
    attempt: AttemptRecord
    infra_error: InfraError | None
    ranks: list[RankRecord]
    printed: NotRequired[Printed]
    command_exit: NotRequired[int | None]
    trace: NotRequired[TraceFiles]
    place: NotRequired[dict[str, Any]]
