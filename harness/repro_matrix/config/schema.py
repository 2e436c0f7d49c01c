"""The schema of a case's file: signatures, claims, variants. Pure.

pydantic refuses unknown keys and wrong values; ``repro_matrix.errors`` turns its messages into a file, a key and the
nearest valid choice.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from repro_matrix.config.axes import Invariants, Needy
from repro_matrix.config.expectations import Expectation
from repro_matrix.config.vocabulary import (
    Capability,
    OutcomeName,
    SignatureKind,
    Strict,
    VerdictName,
    regex,
    requirement,
)


class Frame(Strict):
    """One frame that must be among an exception's (or a hung rank's) frames; regular expressions, whole match."""

    module: str = ".*"
    function: str = ".*"

    _check = field_validator("module", "function")(regex)


class Collective(Strict):
    """A collective of one group in which the ranks of a hang disagree, as torch's flight recorder shows it."""

    kinds: list[str] = Field(min_length=1)  # regular expressions, each for one kind that was entered: allgather ...

    @field_validator("kinds")
    @classmethod
    def _regexes(cls, value: list[str]) -> list[str]:
        return [regex(item) for item in value]


class AmbiguousWith(Strict):
    """Another cause that shows the very same: of an unknown script, a log alone does not tell which it was."""

    cause: str
    ruled_out_by: str | None = None  # a regular expression: a line of the same log that rules the other cause out

    @field_validator("ruled_out_by")
    @classmethod
    def _check(cls, value: str | None) -> str | None:
        return value if value is None else regex(value)


class Signature(Strict):
    """How one known failure shows itself. Which keys apply depends on ``kind``; see docs/guides/add-a-case.md."""

    name: str
    kind: SignatureKind
    # exception: its type's name (or one of its bases), and a regular expression searched for in its message.
    type: str | None = None
    message: str | None = None
    messages: dict[str, str] = {}  # backend (nccl, gloo) -> message, where the backends word it differently
    package: str | None = None  # exception: package of the innermost frame; log: package the record comes from
    frames: list[Frame] = []  # exception, hang and signal: each must match one of the frames
    collective: Collective | None = None  # hang: in what the ranks disagree, beside the frames
    logger: str | None = None  # log: regular expression for the logger or the warning category
    check: str | None = None  # oracle: the name of the check that fails
    signal: str | None = None  # signal: SIGSEGV, SIGABRT ...
    accelerator: Literal["cpu", "cuda"] | None = None  # where it can show at all; None: anywhere
    ranks: Literal["any", "all"] = "any"
    ambiguous_with: AmbiguousWith | None = None  # for `repro match` alone: here the script is known

    @field_validator("message", "logger")
    @classmethod
    def _regexes(cls, value: str | None) -> str | None:
        return value if value is None else regex(value)

    @field_validator("messages")
    @classmethod
    def _variant_regexes(cls, value: dict[str, str]) -> dict[str, str]:
        return {backend: regex(text) for backend, text in value.items()}

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
            raise ValueError(f"collective says where ranks hang; a signature of kind {self.kind} has none")
        for pattern in (self.message, *self.messages.values()):
            # The whole list of foreign messages is for the tests and `repro accept`; these few cost nothing.
            if pattern and any(re.search(pattern, text) for text in ("", "0", "a b", "Error: the x (y) [z] 'w'")):
                raise ValueError(f"message {pattern!r} matches anything: say what the failure's text is")
        if self.type in ("Exception", "BaseException"):
            raise ValueError(f"type {self.type} is every error's: name the type that is raised")
        if self.kind == "exception" and not (self.message or self.messages):
            raise ValueError("a signature of kind exception needs message or messages")
        return self


class Metric(Strict):
    """A comparison with another variant's metric: own <= factor * other (``below``), own >= factor * other
    (``above``)."""

    name: str
    below: str | None = None  # name of the other variant
    above: str | None = None
    factor: float = 1.0

    @model_validator(mode="after")
    def _one(self) -> Metric:
        if (self.below is None) == (self.above is None):
            raise ValueError("a metric comparison needs exactly one of below and above (another variant's name)")
        return self


class Prediction(Strict):
    """What a claim says would be measured. Axes left out match every cell that was measured."""

    variant: str
    case: str | None = None
    model: str | None = None
    strategy: str | None = None
    ranks: int | None = Field(default=None, ge=1)
    stack: str | None = None
    hardware: str | None = None
    verdict: VerdictName | list[VerdictName] | None = None
    outcome: OutcomeName | list[OutcomeName] | None = None
    # The outcome but for what the log says, where the variant reproduces: that a warning is harmless, or is not.
    outcome_without_warning: OutcomeName | list[OutcomeName] | None = None
    metric: Metric | None = None
    condition: str | None = None  # the condition in words, for conditional(on what)
    # The variant in whose place this one stands, where that is not the unfixed variant: one that shares all but the
    # change that the claim is about. The failure must reproduce there for the prediction to be tried.
    relative_to: str | None = None

    @model_validator(mode="after")
    def _one(self) -> Prediction:
        if (
            sum(part is not None for part in (self.verdict, self.outcome, self.outcome_without_warning, self.metric))
            != 1
        ):
            raise ValueError("a prediction needs exactly one of verdict, outcome, otherwise and metric")
        return self


class Claim(Strict):
    id: str
    text: str
    source: str = ""
    predictions: list[Prediction] = []
    untestable: str | None = None  # why nothing here can test it: it stays untested(why)

    @model_validator(mode="after")
    def _some(self) -> Claim:
        if bool(self.predictions) == bool(self.untestable):
            raise ValueError("a claim needs either predicts or untestable")
        return self


class Flag(Strict):
    default: Any = None
    full: Any = None  # its default at scale=full, where that is another
    choices: list[Any] | None = None
    strategies: list[str] | None = None  # those in which another value than the default exists
    help: str = ""


class Variant(Needy):
    """One way to run the case: what it changes against the unfixed variant."""

    help: str = ""
    flags: dict[str, Any] = {}
    options: dict[str, Any] = {}  # strategy options
    model: str | None = None
    strategy: str | None = None
    stack: str | None = None
    world_size: int | None = Field(default=None, ge=1)  # this variant's own number of ranks: wins over the cell's
    tp_size: int | None = Field(default=None, ge=1)
    devices: int | None = Field(default=None, ge=1)  # GPUs that each rank sees; default: as many as there are ranks
    env: dict[str, str] = {}
    depends_on_capabilities: list[
        Capability
    ] = []  # beside the case's: the machine's facts that decide this variant's answer
    invariants: Invariants | None = None  # laid over its strategy's, where the fix is to do without a part of it


class Launch(Strict):
    world_size: int = Field(default=2, ge=1)  # the case's own number of ranks
    tp_size: int = Field(default=1, ge=1)  # of strategies other than tp, which goes over all ranks
    devices: int | None = Field(default=None, ge=1)  # GPUs that each rank sees; default: as many as there are ranks
    deadline: float = Field(default=120, gt=0)  # seconds of work, start-up apart; then it hangs, or is too slow
    imports: list[str] = []  # what a fork server imports ahead for this case
    cold_start_reason: str | None = None  # why this case must start from a fresh interpreter
    process_group: bool = True  # False: the script (Trainer, deepspeed) initialises torch.distributed itself
    backend: Literal["fake"] | None = None  # of the group; fake: no communication (simulated); default: the hardware's
    normal_exit: bool = False  # True: let the interpreter end normally; how the process ends is what is tested
    env: dict[str, str] = {}


class Requires(Strict):
    packages: list[str] = []  # requirements that the stack must meet
    gpus: int = Field(default=0, ge=0)
    requires_default_compute_mode: bool = (
        False  # on GPUs every rank computes on every GPU: one in an exclusive mode lets one process in
    )
    divisible: bool = True  # tp_size must divide the heads; False: that is what the case is about, or it sets its own
    stack: str | None = None  # the shipped stack on which the case is known to reproduce
    reason: str = ""

    _check = field_validator("packages")(lambda cls, value: [requirement(item) for item in value])


class PassCriteria(Strict):
    """What makes a variant clean: these checks, passed on these ranks, and the evidence that what it names was in
    effect.

    What a strategy promises (its file says) need not be listed; ``effects`` names what else the script measures.
    """

    kind: Literal["training", "saving", "loading", "generating", "inference"]
    checks: list[str] = Field(min_length=1)
    ranks: Literal["all", "first"] = "all"
    effects: list[str] = []


class Axes(Strict):
    model: list[str] = Field(min_length=1)
    strategy: list[str] = Field(min_length=1)


class Case(Strict):
    slug: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")  # the file's name, without .yaml
    title: str  # one line for tables
    kind: Literal["failure", "control"] = "failure"  # control: training that must work
    references: list[str] = []  # threads that report it: owner/repository#number
    summary: str = ""  # the cause, in one or two sentences
    simulated: str | None = None  # what is simulated; shown wherever the case is
    script: str | None = None  # in repros/; default: the slug with underscores
    pass_criteria: PassCriteria  # what a variant must show to count as passed
    accelerator: Literal["cpu"] | None = None  # cpu: it never touches a GPU, or cannot show itself on one
    allow_gpu_sharing: bool = False  # ranks may share one GPU (gloo, CUDA tensors): it still means something
    min_ranks: int = Field(default=2, ge=1)  # with fewer ranks it says nothing
    supports_other_world_sizes: bool = (
        False  # whether more ranks than its own (launch.world_size) ask the same question
    )
    steps: int = Field(default=3, ge=1)  # training steps
    repeat: int = Field(default=1, ge=1)  # attempts per variant
    requires: Requires = Requires()  # what stack and machine must have; else the cell is skipped
    launch: Launch = Launch()
    axes: Axes  # the models and strategies it runs on by default
    # Whole models that every rank of the script holds beside the one that it makes parallel (where a reference began,
    # what is compared); 0: the model is drawn and compared part by part. For the memory plan.
    reference_models: int = Field(default=3, ge=0)
    preserve_config: list[str] = []  # keys of the model's configuration that scale=tiny leaves at their real value
    tiny_config: dict[str, Any] = {}  # values of the model's configuration at scale=tiny
    options: dict[str, Any] = {}  # strategy options of every variant
    depends_on_capabilities: list[
        Capability
    ] = []  # facts of the machine that decide its answers: where they differ it has no expectation
    flags: dict[str, Flag] = {}  # the small settings that variants change
    signatures: list[Signature] = []  # any of them is the known failure
    also_matches: list[str] = []  # cases whose signature may match this case's stored observation too
    variants: dict[str, Variant]  # unfixed first; a control has one, named control
    claims: list[Claim] = []  # statements of threads, tested by stored results
    expect: list[Expectation] = []  # never in the case's file: the catalogue reads it from results/expected

    @property
    def script_name(self) -> str:
        return self.script or self.slug.replace("-", "_") + ".py"

    @model_validator(mode="after")
    def _coherent(self) -> Case:
        if self.kind == "failure":
            if not self.signatures:
                raise ValueError("a failure needs at least one signature (key: signatures)")
            if next(iter(self.variants), None) != "unfixed":
                raise ValueError("the first variant of a failure must be 'unfixed'")
            if len(self.variants) < 2:
                raise ValueError("a failure needs at least one fix variant beside 'unfixed'")
        elif list(self.variants) != ["control"]:
            raise ValueError("a control has exactly one variant, named 'control'")
        if self.simulated and self.accelerator != "cpu":
            raise ValueError("a simulated case takes no GPU: it needs accelerator: cpu")
        if bool(self.simulated) != (self.launch.backend == "fake"):
            raise ValueError("launch.backend: fake and simulated go together: its ranks do not communicate")
        if self.launch.world_size < self.min_ranks:
            raise ValueError(f"launch.world_size {self.launch.world_size} is below min_ranks {self.min_ranks}")
        for name, variant in self.variants.items():
            for flag, value in variant.flags.items():
                if flag not in self.flags:
                    raise ValueError(f"variant {name!r} sets flag {flag!r}, which is not declared under flags")
                choices = self.flags[flag].choices
                if choices is not None and value not in choices:
                    raise ValueError(f"variant {name!r}: flag {flag} takes {choices}, not {value!r}")
        return self
