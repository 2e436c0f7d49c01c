"""The types of a cell's document, from the document down to a frame of an exception. Pure.

The values that travel are plain JSON: these are ``TypedDict``s, so that mypy checks every key and nothing is converted.
``harness/cell/doubt.py`` compares with them what comes from outside, once: stored documents where they are read, a
rank's record where it arrives. Who is given one of these types need not doubt that its keys are there; what *ranks say*
in them (a NaN, a contradiction) is for the judges.

``NotRequired`` is what older documents do not hold. results/schema/cell-v1.schema.json is generated from this file.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field
from typing_extensions import NotRequired, TypedDict

from repro_matrix.conf.schema import OutcomeName, SignatureKind, VerdictName

T = TypeVar("T")
Compared = Literal["expected", "unexpected", "unset", "as predicted", "differs from cpu"]
InfraKind = Literal[
    "launch", "port", "disk", "memory", "import", "device", "card", "card or program", "cards", "lost", "script",
    "too slow", "start-up too slow", "no-proof", "unknown",
]  # fmt: skip
# Why an attempt is no evidence, beside the kinds that the launcher knows: what the judge found.
NoEvidence = Literal["interrupted", "not-in-force", "stack changed"]
Accelerator = Literal["cpu", "cuda"]
EndedBy = Literal["self", "launcher", "deadline", "user"]
# Why an arm is not launched: a number of ranks, of GPUs, an accelerator, cards that are shared or in a mode of their
# own, a flag's value, what does not divide, a stack or packages that are not there, an extension that could not be
# made here, memory, weights, the same arm.
SkipKind = Literal[
    "ranks", "tp_size", "gpus", "accelerator", "shared", "cards", "flags", "divisible", "stack", "packages", "build",
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


def _closed(kind: type[T]) -> type[T]:
    """It has no other keys."""
    kind.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    return kind


def _open(kind: type[T]) -> type[T]:
    """It may have other keys, which are kept as they are. (What is not marked is as what it lies in.)"""
    kind.__pydantic_config__ = ConfigDict(extra="ignore")  # type: ignore[attr-defined]
    return kind


# -- what a rank says: its record (repros/kit/record.py)


@_open
class Frame(TypedDict):
    file: str
    line: int | None
    function: str
    module: str
    place: NotRequired[str]  # where the code lies (kit/place.py); older records know names only
    code: NotRequired[str]


@_open
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


@_open
class Check(TypedDict):
    """What one check compared; judged by harness/judge/checks.py."""

    name: str
    passed: bool
    got: NotRequired[Any]
    want: NotRequired[Any]
    tolerance: NotRequired[Any]
    looked_at: NotRequired[Any]
    at: NotRequired[Any]


@_open
class InForce(TypedDict):
    """What a rank measured of what its arm names; judged by harness/judge/in_force.py."""

    what: str
    got: NotRequired[Any]
    whole: NotRequired[Any]
    backend: NotRequired[str]
    least: NotRequired[Any]
    most: NotRequired[Any]
    looked_at: NotRequired[str]


@_open
class Warning_(TypedDict):
    category: str
    message: str
    file: str
    module: NotRequired[str]  # who called warnings.warn; ``file`` is whom it blames
    place: NotRequired[str]


@_open
class Log(TypedDict):
    logger: str
    message: str
    file: str
    place: NotRequired[str]


@_open
class Said(TypedDict):
    """The facts that a rank's script and kit recorded."""

    machine: NotRequired[dict[str, str | bool]]


@_open
class Read(TypedDict):
    """The flags and options that its script has read."""

    flags: NotRequired[list[str]]
    options: NotRequired[list[str]]


@_open
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
    in_force: NotRequired[list[InForce]]
    cpu_s: NotRequired[float]
    peak_rss_mb: NotRequired[float]
    peak_gpu_mb: NotRequired[float | None]


# -- what an attempt left (harness/launch/observe.py; docs/observation.md)


@_open
class Look(TypedDict):
    """What was seen of a rank at one moment."""

    at_s: float
    ended: bool
    cpu_s: NotRequired[float | None]
    io: NotRequired[int | None]
    busy: NotRequired[bool]
    phase: NotRequired[str | None]
    stack: NotRequired[str | None]
    inside: NotRequired[str]
    entered: NotRequired[str | None]
    spins: NotRequired[bool]


@_open
class Rank(TypedDict):
    rank: Count
    pid: NotRequired[int | None]
    exit_code: int | None
    signal: Annotated[str, Field(pattern="^SIG")] | None
    ended_by: EndedBy
    record: Annotated[
        Record | None, Field(description="the kit's record (repros/kit/record.py); null: the rank wrote none")
    ]
    doubt: NotRequired[Annotated[str, Field(description="why what it wrote is no record: the key, and what is wrong")]]
    log_tail: str
    stack: str | None
    looks: NotRequired[list[Look]]
    collectives: NotRequired[dict[str, Any] | None]  # what its witness answered: judged by harness/judge/collectives.py


@_open
class Hang(TypedDict):
    """How the launcher came to end an attempt that did not end by itself."""

    starting: bool
    never_meet: str | None
    limit_s: float


@_open
class ModelSettings(TypedDict, total=False):
    slug: str
    scale: str
    weights: str
    config: dict[str, Any]


@_open
class StrategySettings(TypedDict, total=False):
    slug: str
    options: dict[str, Any]
    promises: dict[str, Any]
    copies: dict[str, Any]


@_open
class ProofSettings(TypedDict, total=False):
    kind: str
    checks: list[str]
    in_force: list[str]


@_open
class Settings(TypedDict, total=False):
    """What an arm ran with (harness/conf/arm_settings.py)."""

    case: str
    arm: str
    model: ModelSettings
    strategy: StrategySettings
    flags: dict[str, Any]
    proof: ProofSettings
    world_size: int
    tp_size: int
    devices: int
    process_group: bool
    teardown: bool
    seed: int
    steps: int
    device: str
    backend: str


@_open
class Again(TypedDict):
    """Why an attempt was made once more: the infra of the one before it."""

    kind: InfraKind
    message: str


@_open
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
    working_s: NotRequired[float | None]
    hang: NotRequired[Hang | None]
    interrupted: bool
    leftover: list[str]
    seed: int
    settings: Settings
    gpus: NotRequired[list[str]]
    fingerprint: NotRequired[str]
    versions: NotRequired[Annotated[dict[str, str], Field(description="the releases that it was planned with")]]
    cold: NotRequired[Annotated[str, Field(description="why no warm launcher made it")]]
    shared: NotRequired[Annotated[bool, Field(description="its server was forked from one that stacks share")]]
    again: NotRequired[Annotated[Again | str, Field(description="what came before; older documents say it in words")]]
    apart: NotRequired[Annotated[str, Field(description="why its server was not, though its stack has an overlay")]]


@_open
class Infra(TypedDict):
    kind: InfraKind
    message: str


@_open
class Line(TypedDict):
    """A line that the definition of a script's failure looks for."""

    rank: Annotated[int, Field(ge=-1, description="-1: of the launcher's own log")]
    line: str
    value: NotRequired[Annotated[float, Field(description="of a metric")]]


@_open
class Printed(TypedDict):
    log: list[Line]
    metric: list[Line]
    by_rank: NotRequired[Annotated[dict[str, float], Field(description="the last value that each rank printed")]]
    cut: Annotated[bool, Field(description="a log was too long to be kept whole")]


@_open
class Observation(TypedDict):
    """docs/observation.md; what is not named here is kept as it is."""

    schema: Literal[1]
    attempt: Attempt
    infra: Infra | None
    ranks: list[Rank]
    printed: NotRequired[Annotated[Printed, Field(description="of somebody's own script: what is read of its logs")]]
    command_exit: NotRequired[Annotated[int | None, Field(description="of somebody's own script: its command's")]]


# -- what was judged of it


@_closed
class Recognised(TypedDict):
    case: str
    signature: str
    ranks: Annotated[list[int], Field(min_length=1)]
    kind: SignatureKind
    message: str


@_closed
class Primary(TypedDict):
    """The failure that came first."""

    rank: int
    type: str
    message: str
    where: str
    kind: NotRequired[FailureKind]


@_closed
class Outcome(TypedDict):
    outcome: OutcomeName
    reason: Text
    recognised: list[Recognised]
    primary: Annotated[Primary | None, Field(description="null where no rank failed by itself")]
    failed: NotRequired[Annotated[list[str], Field(description="checks that failed or were not made")]]
    ranks: NotRequired[Annotated[list[int], Field(description="the ranks that the reason is about; empty: all")]]
    check: NotRequired[Annotated[str | None, Field(description="the check that the reason is about: the worst")]]
    infra: NotRequired[Annotated[InfraKind | NoEvidence | None, Field(description="of infra: what kind")]]
    otherwise: NotRequired[
        Annotated[
            OutcomeName | None,
            Field(description="where only a remark in the log fires: what the attempt would be without it"),
        ]
    ]


@_closed
class Met(TypedDict, total=False):
    """A known failure, an exception and the place that raised it, or a check."""

    case: str | None
    signature: str | None
    type: str | None
    place: str | None
    check: str | None


@_closed
class Verdict(TypedDict):
    name: VerdictName
    reason: Text
    broken_k: Annotated[Count, Field(description="attempts of the broken arm in which the signature fired")]
    broken_n: Annotated[Count, Field(description="attempts of the broken arm that count")]
    fix_k: Annotated[Count, Field(description="attempts of this arm that were clean")]
    fix_n: Annotated[Count, Field(description="attempts of this arm that count")]
    interval: Annotated[Interval | None, Field(description="95 % Wilson interval of fix_k / fix_n")]
    broken_interval: Annotated[Interval | None, Field(description="95 % Wilson interval of broken_k / broken_n")]
    named_case: str | None
    measured: bool
    infra: NotRequired[Annotated[bool, Field(description="nothing was measured: what was launched is no evidence")]]
    met: NotRequired[Annotated[list[Met], Field(description="what failed, where the verdict says that something did")]]
    unseen: NotRequired[
        Annotated[bool, Field(description="a failure that nothing stored expects, and that does not fire")]
    ]
    expected: NotRequired[Compared]
    expectation: NotRequired[
        Annotated[
            VerdictName | None,
            Field(description="the verdict that is expected, or predicted where this hardware has no expectation"),
        ]
    ]
    met_note: NotRequired[
        Annotated[str, Field(description="another failure than the expected one was met, or met: unset")]
    ]


# -- the document


@_closed
class Made(TypedDict):
    """One attempt of an arm: what came out of it, and what that is."""

    observation: Observation
    outcome: Outcome


@_closed
class Skip(TypedDict):
    kind: SkipKind
    needs: Annotated[list[str], Field(description="what would have to be there, as it is declared")]


@_closed
class Arm(TypedDict):
    skipped: Annotated[Text | None, Field(description="why the arm was not launched")]
    skip: NotRequired[Annotated[Skip | None, Field(description="the same for programs")]]
    stack: NotRequired[str]
    fingerprint: NotRequired[Annotated[str, Field(description="what the arm's answer depends on")]]
    planned: NotRequired[
        Annotated[
            dict[str, Any],
            Field(description="memory that was planned (MiB; harness/memory), where it is known"),
        ]
    ]
    settings: Settings
    attempts: list[Made]


@_closed
class Stack(TypedDict):
    name: str
    python: str | None
    versions: dict[str, str]
    label: NotRequired[Annotated[str, Field(description="the stack's folder in the results")]]


@_closed
class Gpu(TypedDict):
    name: str
    uuid: str
    memory_mb: Annotated[float, Field(ge=0)]


@_closed
class ProbedDevice(TypedDict):
    name: str | None
    capability: str | None


@_closed
class Probe(TypedDict):
    """What the stack's torch said of these cards before anything was launched; only on GPUs."""

    torch: str | None
    cuda: str | None
    arch_list: list[str] | None
    nccl_version: str | int | None
    devices: list[ProbedDevice]


@_closed
class Hardware(TypedDict):
    profile: str
    facts: NotRequired[Annotated[dict[str, str | bool], Field(description="what all ranks said of their machine")]]
    accelerator: Accelerator
    backend: NotRequired[str]
    shared: NotRequired[Annotated[bool, Field(description="all ranks of an attempt on one GPU")]]
    gpus: list[Gpu]
    cpu: str
    cores: Annotated[int, Field(ge=1)]
    memory_gb: Annotated[float, Field(ge=0)]
    driver: str | None
    os: str
    probe: NotRequired[Probe]


@_closed
class Provenance(TypedDict):
    git_commit: str | None
    git_dirty: bool
    harness_version: str
    command: str
    started: float
    ended: float | None
    seed: int
    launcher: str
    fingerprint: NotRequired[str]


@_closed
class Cell(TypedDict):
    """One cell (case x model x strategy x flags x stack x hardware): where it was measured, every attempt of every arm
    with its outcome, and the verdicts."""

    schema: Literal[1]
    key: NotRequired[Annotated[str, Field(description="the cell's name within one stack and hardware")]]
    where: NotRequired[
        Annotated[
            str,
            Field(description="the cell's axes as an expectation names them: model/strategy[/flag=value...]"),
        ]
    ]
    case: Annotated[str, Field(pattern="^[a-z0-9][a-z0-9-]*$")]
    title: str
    kind: Literal["failure", "control"]
    simulated: Annotated[str | None, Field(description="why this is a simulation")]
    references: list[str]
    model: str
    strategy: str
    flags: Annotated[dict[str, Any], Field(description="the flags that the cell sets against their defaults")]
    ranks: Annotated[
        int, Field(ge=1, description="of the cell; an arm may have a number of its own (settings.world_size)")
    ]
    variant: Annotated[
        list[str],
        Field(description="name=value: what makes it another measurement than the usual one of this cell"),
    ]
    scale: Literal["tiny", "full"]
    weights: Literal["random", "hub"]
    stack: Stack
    hardware: Hardware
    provenance: Provenance
    arms: Annotated[dict[str, Arm], Field(min_length=1)]
    verdicts: dict[str, Verdict]
    complete: Annotated[bool, Field(description="false: the run was stopped before every attempt was made")]


class Document(Cell):
    """A cell's document as it travels: ``path`` is where it was read."""

    path: NotRequired[str]
