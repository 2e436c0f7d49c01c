"""Define the schema of the files in conf/. Pure.

pydantic refuses unknown keys and wrong values; ``repro_matrix.errors`` turns its messages into a
file, a key and the nearest valid choice.
"""

from __future__ import annotations

import operator
import re
from datetime import date
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from repro_matrix.config.expectations import Claim, Expectation
from repro_matrix.config.vocabulary import (
    Area,
    Capability,
    CollectiveKind,
    Held,
    Regex,
    Requirement,
    Role,
    SignatureKind,
    Strict,
)
from repro_matrix.errors import as_yaml, nearest


class FramePattern(Strict):
    """Match a frame of an exception or of a hung rank.

    Both are regular expressions for the whole name.
    """

    module: Regex = ".*"
    function: Regex = ".*"


class CollectivePattern(Strict):
    """Match a collective in which the ranks of a hang disagree.

    torch's flight recorder shows it.
    """

    # regular expressions, each for one kind that was entered: allgather ...
    kinds: list[Regex] = Field(min_length=1)


class AmbiguousWith(Strict):
    """Describe another cause that looks the same.

    In an unknown script, a log alone does not show which of the two it was.
    """

    cause: str
    # a regular expression: a line of the same log that rules the other cause out
    ruled_out_by: Regex | None = None


class Signature(Strict):
    """Define how one known failure shows itself.

    Which keys apply depends on ``kind``; see docs/guides/add-a-case.md.
    """

    name: str
    kind: SignatureKind
    # exception: its type's name (or one of its bases), and a regular expression searched for in its
    # message.
    type: str | None = None
    message: Regex | None = None
    # backend (nccl, gloo) -> message, where the backends word it differently
    messages: dict[str, Regex] = {}
    # exception: package of the innermost frame; log: package the record comes from
    package: str | None = None
    frames: list[FramePattern] = []  # exception, hang and signal: each must match one of the frames
    # hang: in what the ranks disagree, beside the frames
    collective: CollectivePattern | None = None
    logger: Regex | None = None  # log: regular expression for the logger or the warning category
    check: str | None = None  # oracle: the name of the check that fails
    actual: tuple[float, float] | None = None  # check: the bounds of its wrong numbers
    signal: str | None = None  # signal: SIGSEGV, SIGABRT ...
    accelerator: Literal["cpu", "cuda"] | None = None  # where it can show at all; None: anywhere
    ranks: Literal["any", "all"] = "any"
    ambiguous_with: AmbiguousWith | None = None  # for `repro match` alone: here the script is known

    @model_validator(mode="after")
    def _needs(self) -> Signature:
        needed = {
            "exception": ("type", "package"),
            "log": ("message", "package"),
            "check": ("check",),
            "hang": () if self.collective else ("frames",),
            "signal": ("signal",),
        }[self.kind]
        missing = [key for key in needed if not getattr(self, key)]
        if missing:
            raise ValueError(f"a signature of kind {self.kind} needs {', '.join(missing)}")
        if self.collective and self.kind != "hang":
            raise ValueError(
                f"collective says where ranks hang; a signature of kind {self.kind} has none"
            )
        for pattern in (self.message, *self.messages.values()):
            # The whole list of foreign messages is for the tests and `repro accept`; these few cost
            # nothing.
            if pattern and any(
                re.search(pattern, text) for text in ("", "0", "a b", "Error: the x (y) [z] 'w'")
            ):
                raise ValueError(
                    f"message {pattern!r} matches anything: say what the failure's text is"
                )
        if self.actual and (self.kind != "check" or self.actual[0] > self.actual[1]):
            raise ValueError("actual: [least, most] belongs to a signature of kind check")
        if self.type in ("Exception", "BaseException"):
            raise ValueError(f"type {self.type} is every error's: name the type that is raised")
        if self.kind == "exception" and not (self.message or self.messages):
            raise ValueError("a signature of kind exception needs message or messages")
        return self


class Needy(Strict):
    """Define what a variant or a strategy needs of a stack."""

    requires: list[Requirement] = []
    # Needs on that hardware in addition to ``requires``.
    # shared_gpu: a GPU that all ranks share, over gloo.
    requires_on: dict[Literal["cpu", "cuda", "shared_gpu"], list[Requirement]] = {}

    def needs_on(self, *kinds: str) -> list[str]:
        """Return everything that a stack must have for it on hardware of these kinds.

        The kinds are keys of ``requires_on``.
        """
        beside = [
            item for kind, listed in self.requires_on.items() if kind in kinds for item in listed
        ]
        return [*self.requires, *beside]


class Model(Strict):
    slug: str
    title: str
    hub: str
    model_type: str
    remote_code: str | None = None
    requires: list[str] = []
    config: dict[str, Any]
    tiny: dict[str, Any] = {}


class Invariants(Strict):
    """Define how much of a model each rank holds.

    ``whole``, a ``shard`` (one of as many as there are ranks) or only ``part``.
    """

    parameters: Held | None = None
    gradients: Held | None = None  # when the optimizer steps
    updates: Held | None = None  # what the rank's own optimizer steps on
    collectives: list[CollectiveKind] = []  # called in every training step


class StrategyMemory(Strict):
    """Define a rank's peak memory, in proportion to its weights."""

    weights: float = Field(ge=1)  # copies: weights, gradients, buckets, a second model
    optimizer_bytes: float = Field(default=0, ge=0)  # per trained parameter, spread over the ranks
    gathers: bool = False  # makes the sharded parameters of the layers at work whole


class Strategy(Needy):
    slug: str
    title: str
    # keys of a model's configuration that the number of ranks must divide
    must_divide: list[str] = []
    allow_gpu_sharing: bool = False  # its collectives exist in gloo for CUDA tensors too
    options: dict[str, Any] = {}  # every option with its default
    choices: dict[str, list[Any]] = {}  # the values of those options that take only some
    invariants: Invariants  # what every attempt under it must show to have been in effect
    # option -> value -> the number of copies of the model that the ranks together hold then
    replicas: dict[str, dict[str, int]] = {}
    memory: StrategyMemory | None = None  # at full size; None: unknown, nothing is planned
    source_files: list[Regex] = []  # of its library: in a traceback they show this strategy

    @model_validator(mode="after")
    def _values(self) -> Strategy:
        if not self.invariants.model_dump(exclude_defaults=True):
            raise ValueError(
                "invariants: none, so that nothing could show that the strategy took effect"
            )
        for option, value in self.options.items():
            problem = self.refuses(option, value)
            if problem:
                raise ValueError(f"option {option}: {problem}")
        for key in ("choices", "replicas"):
            for option in getattr(self, key):
                if option not in self.options:
                    raise ValueError(f"{key} of {option!r}, which is not among the options")
        return self

    def refuses(self, option: str, value: Any) -> str | None:
        """Return why one of its options does not take a value, or None.

        A bool is not a number here, nor 1 a bool.
        """
        choices = self.choices.get(option)
        if choices is None:
            default = self.options[option]
            if type(value) is type(default):
                return None
            return f"{value!r} is not of type {type(default).__name__}"
        if any(type(value) is type(choice) and value == choice for choice in choices):
            return None
        return f"{as_yaml(value)!r} is not valid{nearest(as_yaml(value), map(as_yaml, choices))}"


class StackFile(Strict):
    slug: str
    title: str
    python: str | None = None
    pins: list[str] = []
    no_deps: list[str] = []  # installed as they are, without what they say they depend on
    floating: bool = False  # no committed lock: whatever the index holds today


class HardwareProfile(Strict):
    slug: str
    title: str
    accelerator: Literal["auto", "cpu", "cuda"]
    gpus: int = Field(default=0, ge=0)
    gpu_name: str | None = None
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    shared: bool = False  # all ranks of an attempt on one GPU

    @model_validator(mode="after")
    def _gpu_fields(self) -> HardwareProfile:
        if self.accelerator == "cpu" and (self.gpus or self.backend == "nccl" or self.shared):
            raise ValueError(
                "accelerator: cpu uses no GPU: leave out gpus, shared and backend: nccl, or say"
                " cuda"
            )
        return self


class Flag(Strict):
    default: Any = None
    full: Any = None  # its default at scale=full, where that is another
    choices: list[Any] | None = None
    strategies: list[str] | None = None  # those in which another value than the default exists
    effect: bool = False  # another value than the default needs evidence: an effect of this name
    help: str = ""


class Variant(Needy):
    """One way to run the case: what it changes against the unfixed variant."""

    role: Role  # the variants named unfixed and control may leave it out: it is unfixed
    help: str = ""
    flags: dict[str, Any] = {}
    options: dict[str, Any] = {}  # strategy options
    model: str | None = None
    strategy: str | None = None
    stack: str | None = None
    # this variant's own number of ranks: wins over the cell's
    world_size: int | None = Field(default=None, ge=1)
    nodes: int | None = Field(default=None, ge=1)  # wins over the case's
    # GPUs that each rank sees; default: as many as there are ranks
    devices: int | None = Field(default=None, ge=1)
    env: dict[str, str] = {}
    # Beside the case's: the machine's facts that decide this variant's answer.
    depends_on_capabilities: list[Capability] = []
    # instead of its strategy's, where the fix gives up a part of the strategy
    invariants: Invariants | None = None


class Launch(Strict):
    world_size: int = Field(default=2, ge=1)  # the case's own number of ranks
    nodes: int = Field(default=1, ge=1)  # over which the ranks are spread, in equal parts
    # GPUs that each rank sees; default: as many as a node has ranks
    devices: int | None = Field(default=None, ge=1)
    # seconds of work, start-up apart; then it hangs, or is too slow
    deadline: float = Field(default=120, gt=0)
    imports: list[str] = []  # what a fork server imports ahead for this case
    cold_start_reason: str | None = None  # why this case must start from a fresh interpreter
    # False: the script (Trainer, deepspeed) initialises torch.distributed itself
    process_group: bool = True
    # of the group; fake: no communication (simulated); default: the hardware's
    backend: Literal["fake"] | None = None
    # True: let the interpreter end normally; how the process ends is what is tested
    normal_exit: bool = False
    env: dict[str, str] = {}


class Requires(Strict):
    packages: list[Requirement] = []  # requirements that the stack must meet
    gpus: int = Field(default=0, ge=0)
    # On GPUs every rank computes on every GPU: one in an exclusive mode lets one process in.
    requires_default_compute_mode: bool = False
    # tp must divide the heads; False: that is what the case is about, or it sets its own
    divisible: bool = True
    stack: str | None = None  # the shipped stack on which the case is known to reproduce
    reason: str = ""


class PassCriteria(Strict):
    """Define the evidence that a variant needs to pass: checks on ranks, and effects.

    The promises of a strategy need not be listed; ``effects`` are other measurements of the script.
    """

    kind: Literal["training", "saving", "loading", "generating", "inference"]
    checks: list[str] = Field(min_length=1)
    ranks: Literal["all", "first"] = "all"
    effects: list[str] = []


# the names of the variants of role unfixed, one for each kind of case
UNFIXED = ("unfixed", "control")


class Axes(Strict):
    model: list[str] = Field(min_length=1)
    strategy: list[str] = Field(min_length=1)


class Case(Strict):
    slug: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")  # the file's name, without .yaml
    title: str  # one line for tables
    kind: Literal["failure", "control"] = "failure"  # control: training that must work
    area: Area | None = None  # the part of a training that goes wrong
    references: list[str] = []  # threads that report it: owner/repository#number
    unreported: date | None = None  # the day on which a search found no open upstream report
    summary: str = ""  # the cause, in one or two sentences
    simulated: str | None = None  # what is simulated; shown wherever the case is
    script: str | None = None  # in repros/; default: the slug with underscores
    pass_criteria: PassCriteria  # what a variant must show to count as passed
    # cpu: it never touches a GPU, or cannot show itself on one
    accelerator: Literal["cpu"] | None = None
    # ranks may share one GPU (gloo, CUDA tensors): it still means something
    allow_gpu_sharing: bool = False
    min_ranks: int = Field(default=2, ge=1)  # with fewer ranks it says nothing
    # more ranks than its own (launch.world_size) ask the same question
    supports_other_world_sizes: bool = False
    steps: int = Field(default=3, ge=1)  # training steps
    repeat: int = Field(default=1, ge=1)  # attempts per variant
    requires: Requires = Requires()  # what stack and machine must have; else the cell is skipped
    launch: Launch = Launch()
    axes: Axes  # the models and strategies it runs on by default
    # Whole models that every rank holds in addition to the parallel one (the one from which
    # a reference began, the compared one); 0: the model is compared part by part. For the
    # memory plan.
    reference_models: int = Field(default=3, ge=0)
    # keys of the model's configuration that scale=tiny leaves at their real value
    preserve_config: list[str] = []
    tiny_config: dict[str, Any] = {}  # values of the model's configuration at scale=tiny
    options: dict[str, Any] = {}  # strategy options of every variant
    # Facts of the machine that decide its answers: where they differ it has no expectation.
    depends_on_capabilities: list[Capability] = []
    flags: dict[str, Flag] = {}  # the small settings that variants change
    signatures: list[Signature] = []  # any of them is the known failure
    # cases whose signature may match this case's stored observation too
    also_matches: list[str] = []
    variants: dict[str, Variant]  # unfixed first; a control has one, named control
    claims: list[Claim] = []  # statements of threads, tested by stored results
    # never in the case's file: the catalogue reads it from results/expected
    expect: list[Expectation] = []

    @property
    def silent(self) -> bool:
        """Return True if its first signature is wrong numbers, without an error or a hang."""
        return bool(self.signatures) and self.signatures[0].kind == "check"

    @property
    def script_name(self) -> str:
        return self.script or self.slug.replace("-", "_") + ".py"

    @field_validator("variants", mode="before")
    @classmethod
    def _roles_of_names(cls, variants: Any) -> Any:
        if not isinstance(variants, dict):
            return variants
        known = {
            name: {"role": "unfixed", **variants[name]}
            for name in UNFIXED
            if isinstance(variants.get(name), dict)
        }
        return {**variants, **known}

    @field_validator("variants")
    @classmethod
    def _one_unfixed(cls, variants: dict[str, Variant]) -> dict[str, Variant]:
        for name, variant in variants.items():
            if variant.role != "unfixed" and name in UNFIXED:
                raise ValueError(f"{name}: its role is unfixed, not {variant.role}: leave role out")
            if variant.role == "unfixed" and name not in UNFIXED:
                others = nearest("", set(get_args(Role)) - {"unfixed"})
                raise ValueError(
                    f"{name}: role unfixed is for the variants {' and '.join(UNFIXED)}"
                    f" alone{others}"
                )
        return variants

    @model_validator(mode="after")
    def _coherent(self) -> Case:
        if self.kind == "failure":
            if not self.signatures:
                raise ValueError("a failure needs at least one signature (key: signatures)")
            if next(iter(self.variants), None) != "unfixed":
                raise ValueError("the first variant of a failure must be 'unfixed'")
            if len(self.variants) < 2:
                raise ValueError("a failure needs another variant beside 'unfixed'")
        elif list(self.variants) != ["control"]:
            raise ValueError("a control has exactly one variant, named 'control'")
        if self.simulated and self.accelerator != "cpu":
            raise ValueError("a simulated case takes no GPU: it needs accelerator: cpu")
        if bool(self.simulated) != (self.launch.backend == "fake"):
            raise ValueError(
                "launch.backend: fake and simulated go together: its ranks do not communicate"
            )
        if self.launch.world_size < self.min_ranks:
            raise ValueError(
                f"launch.world_size {self.launch.world_size} is below min_ranks {self.min_ranks}"
            )
        for name, variant in self.variants.items():
            for flag, value in variant.flags.items():
                if flag not in self.flags:
                    raise ValueError(
                        f"variant {name!r} sets flag {flag!r}, which is not declared under flags"
                    )
                choices = self.flags[flag].choices
                if choices is not None and value not in choices:
                    raise ValueError(
                        f"variant {name!r}: flag {flag} takes {choices}, not {value!r}"
                    )
        return self


# -- a user's script as an ad-hoc case: one variant, and a signature built from the command line's
# options

VARIANT = "unfixed"  # its one variant
COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
INFINITE = 1e308  # stands for infinity, which JSON does not have


class Metric(Strict):
    """Define a number that the script prints.

    It shows the failure when the comparison with the limit is true; without ``op`` a search finds
    the limit between its two ends.
    """

    name: str
    pattern: str  # group 1 is the number
    op: Literal["", "<", "<=", ">", ">="] = ""
    limit: float = 0.0

    def violated_by(self, value: float) -> bool:
        return self.op != "" and COMPARISONS[self.op](value, self.limit)


class AdhocCase(Case):
    """``argv`` follows the stack's interpreter; ``title`` is the command as a person writes it."""

    argv: tuple[str, ...]
    path: Path | None = None  # the script; None: a module
    plain: bool = False  # no launcher: the command's one process is rank 0
    single: bool = False  # it may be one process without a rank
    failure: str = ""  # a description of the failure; "": any failure
    log: str = ""  # the lines to keep from the ranks' logs
    metric: Metric | None = None
    checks: tuple[str, ...] = ()  # of its ranks' parameters when they end: replicas, finite
    trace: dict[str, str] | None = None  # it is traced, with these variables (launch/worker/tracer)

    @model_validator(mode="after")
    def _coherent(self) -> AdhocCase:
        return self  # one variant is enough, and the failure may be any
