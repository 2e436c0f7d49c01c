"""The shape of every file in conf/: what keys there are, which values they take. Pure.

pydantic refuses unknown keys and wrong values; ``conf.errors`` turns its complaints into a file, a key and the nearest
valid choice.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from repro_matrix.conf.errors import nearest

OutcomeName = Literal["fires", "clean", "other_error", "hang", "infra", "skipped"]
VerdictName = Literal[
    "FIX_HOLDS", "FIX_BROKEN", "FIX_UNMASKS", "NOT_FIRING", "UPSTREAM_FIXED", "FIX_HARMFUL", "CHANGED", "FLAKY",
    "INCONCLUSIVE", "HEALTHY", "UNHEALTHY",
]  # fmt: skip
Held = Literal["whole", "shard", "part"]
CollectiveKind = Literal["reduce", "gather", "broadcast", "all_to_all"]
SignatureKind = Literal["exception", "log", "oracle", "hang", "signal"]
# Facts of the machine that every rank records (repros/kit/machine.py).
Fact = Literal["cpu_capability", "cpu_bf16", "cpu_fp16", "gpu_capability"]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


def _regex(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return value


def _requirement(value: str) -> str:
    try:
        Requirement(value)
    except InvalidRequirement as error:
        raise ValueError(f"not a requirement such as 'torch>=2.4': {error}") from None
    return value


class Frame(Strict):
    """One frame that must be among an exception's (or a hung rank's) frames; regular expressions, whole match."""

    module: str = ".*"
    function: str = ".*"

    _check = field_validator("module", "function")(_regex)


class Collective(Strict):
    """A collective of one group in which the ranks of a hang disagree, as torch's flight recorder shows it."""

    kinds: list[str] = Field(min_length=1)  # regular expressions, each for one kind that was entered: allgather ...
    missing: bool | None = None  # whether some rank never entered it

    @field_validator("kinds")
    @classmethod
    def _regexes(cls, value: list[str]) -> list[str]:
        return [_regex(item) for item in value]


class Elsewhere(Strict):
    """Another cause that shows the very same: of an unknown script, a log alone does not tell which it was."""

    cause: str
    unless: str | None = None  # a regular expression: a line of the same log that rules the other cause out

    @field_validator("unless")
    @classmethod
    def _check(cls, value: str | None) -> str | None:
        return value if value is None else _regex(value)


class Signature(Strict):
    """How one known failure shows itself. Which keys apply depends on ``kind``; see docs/cases.md."""

    name: str
    kind: SignatureKind
    # exception: its type's name (or one of its bases), and a regular expression searched for in its message.
    type: str | None = None
    message: str | None = None
    variants: dict[str, str] = {}  # backend (nccl, gloo) -> message, where the backends word it differently
    package: str | None = None  # exception: package of the innermost frame; log: package the record comes from
    frames: list[Frame] = []  # exception, hang and signal: each must match one of the frames
    collective: Collective | None = None  # hang: in what the ranks disagree, beside the frames
    logger: str | None = None  # log: regular expression for the logger or the warning category
    check: str | None = None  # oracle: the name of the check that fails
    signal: str | None = None  # signal: SIGSEGV, SIGABRT ...
    accelerator: Literal["cpu", "cuda"] | None = None  # where it can show at all; None: anywhere
    ranks: Literal["any", "all"] = "any"
    elsewhere: Elsewhere | None = None  # for `repro match` alone: here the script is known

    @field_validator("message", "logger")
    @classmethod
    def _regexes(cls, value: str | None) -> str | None:
        return value if value is None else _regex(value)

    @field_validator("variants")
    @classmethod
    def _variant_regexes(cls, value: dict[str, str]) -> dict[str, str]:
        return {backend: _regex(text) for backend, text in value.items()}

    @model_validator(mode="after")
    def _needs(self) -> Signature:
        needed = {
            "exception": ("type", "package"),
            "log": ("message", "package"),
            "oracle": ("check",),
            "hang": () if self.collective else ("frames",),
            "signal": ("signal",),
        }[self.kind]
        missing = [key for key in needed if not getattr(self, key)]
        if missing:
            raise ValueError(f"a signature of kind {self.kind} needs {', '.join(missing)}")
        if self.collective and self.kind != "hang":
            raise ValueError(f"collective says where ranks hang; a signature of kind {self.kind} has none")
        for pattern in (self.message, *self.variants.values()):
            # The whole list of foreign messages is for the tests and `repro accept`; these few cost nothing.
            if pattern and any(re.search(pattern, text) for text in ("", "0", "a b", "Error: the x (y) [z] 'w'")):
                raise ValueError(f"message {pattern!r} matches anything: say what the failure's text is")
        if self.type in ("Exception", "BaseException"):
            raise ValueError(f"type {self.type} is every error's: name the type that is raised")
        if self.kind == "exception" and not (self.message or self.variants):
            raise ValueError("a signature of kind exception needs message or variants")
        return self


class Flag(Strict):
    default: Any = None
    full: Any = None  # its default at scale=full, where that is another
    choices: list[Any] | None = None
    strategies: list[str] | None = None  # those in which another value than the default exists
    help: str = ""


class Needy(Strict):
    """What an arm or a strategy needs of a stack."""

    requires: list[str] = []
    requires_on: dict[Literal["cpu", "cuda"], list[str]] = {}  # what it needs on that hardware beside ``requires``

    _check = field_validator("requires")(lambda cls, value: [_requirement(item) for item in value])

    @field_validator("requires_on")
    @classmethod
    def _requirements(cls, value: dict[str, list[str]]) -> dict[str, list[str]]:
        return {kind: [_requirement(item) for item in listed] for kind, listed in value.items()}

    def needs_on(self, accelerator: str) -> list[str]:
        """All that a stack must have for it on ``cpu`` or ``cuda``."""
        beside = [item for kind, listed in self.requires_on.items() if kind == accelerator for item in listed]
        return [*self.requires, *beside]


class Arm(Needy):
    """One way to run the case: what it changes against the broken arm."""

    help: str = ""
    flags: dict[str, Any] = {}
    options: dict[str, Any] = {}  # strategy options
    model: str | None = None
    strategy: str | None = None
    stack: str | None = None
    world_size: int | None = Field(default=None, ge=1)  # this arm's own number of ranks: wins over the cell's
    tp_size: int | None = Field(default=None, ge=1)
    devices: int | None = Field(default=None, ge=1)  # GPUs that each rank sees; default: as many as there are ranks
    env: dict[str, str] = {}
    depends_on: list[Fact] = []  # beside the case's: the machine's facts that decide this arm's answer
    promises: Promises | None = None  # laid over its strategy's, where the fix is to do without a part of it


class Launch(Strict):
    world_size: int = Field(default=2, ge=1)  # the case's own number of ranks
    tp_size: int = Field(default=1, ge=1)  # of strategies other than tp, which goes over all ranks
    devices: int | None = Field(default=None, ge=1)  # GPUs that each rank sees; default: as many as there are ranks
    deadline: float = Field(default=120, gt=0)  # seconds of work, start-up apart; then it hangs, or is too slow
    imports: list[str] = []  # what a warm server imports ahead for this case
    cold: str | None = None  # why this case must start from a fresh interpreter
    process_group: bool = True  # False: the script (Trainer, deepspeed) initialises torch.distributed itself
    backend: Literal["fake"] | None = None  # of the group; fake: reaches nobody (simulated); default: the hardware's
    teardown: bool = False  # True: let the interpreter end normally; how the process ends is what is tested
    env: dict[str, str] = {}


class Needs(Strict):
    requires: list[str] = []  # requirements that the stack must meet
    gpus: int = Field(default=0, ge=0)
    open_cards: bool = False  # on GPUs every rank computes on every card: one in an exclusive mode lets one process in
    divisible: bool = True  # tp_size must divide the heads; False: that is what the case is about, or it sets its own
    stack: str | None = None  # the shipped stack on which the case is known to fire
    why: str = ""

    _check = field_validator("requires")(lambda cls, value: [_requirement(item) for item in value])


class Proof(Strict):
    """What makes an arm clean: these checks, passed on these ranks, and the evidence that what it names was in force.

    What a strategy promises (its file says) need not be listed; ``in_force`` names what else the script measures.
    """

    kind: Literal["training", "saving", "loading", "generating", "inference"]
    checks: list[str] = Field(min_length=1)
    ranks: Literal["all", "first"] = "all"
    in_force: list[str] = []


class Metric(Strict):
    """A comparison with another arm's metric: own <= factor * other (``below``), own >= factor * other (``above``)."""

    name: str
    below: str | None = None  # name of the other arm
    above: str | None = None
    factor: float = 1.0

    @model_validator(mode="after")
    def _one(self) -> Metric:
        if (self.below is None) == (self.above is None):
            raise ValueError("a metric comparison needs exactly one of below and above (another arm's name)")
        return self


class Prediction(Strict):
    """What a claim says would be measured. Axes left out match every cell that was measured."""

    arm: str
    case: str | None = None
    model: str | None = None
    strategy: str | None = None
    ranks: int | None = Field(default=None, ge=1)
    stack: str | None = None
    hardware: str | None = None
    verdict: VerdictName | list[VerdictName] | None = None
    outcome: OutcomeName | list[OutcomeName] | None = None
    # The outcome but for what the log says, where the arm fires: that a warning is harmless, or is not.
    otherwise: OutcomeName | list[OutcomeName] | None = None
    metric: Metric | None = None
    when: str | None = None  # the condition in words, for conditional(on what)
    # The arm in whose place this one stands, where that is not the broken arm: one that shares all but the change that
    # the claim is about. The failure must fire there for the prediction to be tried.
    against: str | None = None

    @model_validator(mode="after")
    def _one(self) -> Prediction:
        if sum(part is not None for part in (self.verdict, self.outcome, self.otherwise, self.metric)) != 1:
            raise ValueError("a prediction needs exactly one of verdict, outcome, otherwise and metric")
        return self


class Claim(Strict):
    id: str
    text: str
    source: str = ""
    predicts: list[Prediction] = []
    untestable: str | None = None  # why nothing here can test it: it stays untested(why)

    @model_validator(mode="after")
    def _some(self) -> Claim:
        if bool(self.predicts) == bool(self.untestable):
            raise ValueError("a claim needs either predicts or untestable")
        return self


class Stretch(Strict):
    """Some cells on one hardware over a range of releases: a column of results/expected."""

    cells: list[str] = []  # model/strategy[/flag=value ...]; empty: every cell of the case
    hardware: str = "cpu"
    # Facts of the machine it was measured on, of those that its arms depend on: elsewhere it says nothing of these.
    facts: dict[str, str | bool] = {}
    versions: dict[str, str] = {}  # package -> specifier
    measured: list[dict[str, str]] = Field(min_length=1, max_length=2)  # package -> release, at the range's ends
    reason: str

    @field_validator("versions")
    @classmethod
    def _specifiers(cls, value: dict[str, str]) -> dict[str, str]:
        for package, text in value.items():
            try:
                SpecifierSet(text)
            except InvalidSpecifier:
                raise ValueError(f"{package}: not a version range such as '>=2.4,<2.6': {text!r}") from None
        return value


class Expectation(Stretch):
    """The verdicts that stored measurements showed there. Written by ``repro accept``."""

    verdicts: dict[str, VerdictName]  # arm -> verdict
    met: dict[str, str | list[str]] = {}  # arm -> what it met, where its verdict says that something failed

    def met_by(self, arm: str) -> list[str] | None:
        """What the arm may meet; None where that was never written down: then the verdict alone is compared."""
        listed = self.met.get(arm)
        return [listed] if isinstance(listed, str) else listed

    @model_validator(mode="after")
    def _met_of_its_arms(self) -> Expectation:
        foreign = sorted(self.met.keys() - self.verdicts.keys())
        if foreign:
            raise ValueError(f"met names {', '.join(foreign)}, of which no verdict is expected")
        return self


class Axes(Strict):
    model: list[str] = Field(min_length=1)
    strategy: list[str] = Field(min_length=1)


class Case(Strict):
    slug: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    title: str
    kind: Literal["failure", "control"] = "failure"
    references: list[str] = []
    summary: str = ""
    simulated: str | None = None  # what is simulated; shown wherever the case is
    script: str | None = None  # in repros/; default: the slug with underscores
    proof: Proof
    accelerator: Literal["cpu"] | None = None  # cpu: it never touches a GPU, or cannot show itself on one
    shared: bool = False  # ranks may share one GPU (gloo, CUDA tensors): it still means something
    min_ranks: int = Field(default=2, ge=1)  # with fewer ranks it says nothing
    scales: bool = False  # whether more ranks than its own (launch.world_size) ask the same question
    steps: int = Field(default=3, ge=1)
    repeat: int = Field(default=1, ge=1)
    needs: Needs = Needs()
    launch: Launch = Launch()
    axes: Axes
    # Whole models that every rank of the script holds beside the one that it makes parallel (where a reference began,
    # what is compared); 0: the model is drawn and compared part by part. For the memory plan.
    copies: int = Field(default=3, ge=0)
    keeps: list[str] = []  # keys of the model's configuration that scale=tiny leaves at their real value
    options: dict[str, Any] = {}  # strategy options of every arm
    depends_on: list[Fact] = []  # facts of the machine that decide its answers: where they differ it has no expectation
    flags: dict[str, Flag] = {}
    signatures: list[Signature] = []
    occurs_with: list[str] = []  # cases whose signature may match this case's stored observation too
    arms: dict[str, Arm]
    claims: list[Claim] = []
    expect: list[Expectation] = []  # never in the case's file: the catalogue reads it from results/expected

    @property
    def script_name(self) -> str:
        return self.script or self.slug.replace("-", "_") + ".py"

    @model_validator(mode="after")
    def _coherent(self) -> Case:
        if self.kind == "failure":
            if not self.signatures:
                raise ValueError("a failure needs at least one signature (key: signatures)")
            if next(iter(self.arms), None) != "broken":
                raise ValueError("the first arm of a failure must be 'broken'")
            if len(self.arms) < 2:
                raise ValueError("a failure needs at least one fix arm beside 'broken'")
        elif list(self.arms) != ["control"]:
            raise ValueError("a control has exactly one arm, named 'control'")
        if self.simulated and self.accelerator != "cpu":
            raise ValueError("a simulated case takes no GPU: it needs accelerator: cpu")
        if bool(self.simulated) != (self.launch.backend == "fake"):
            raise ValueError("launch.backend: fake and simulated go together: its ranks reach nobody")
        if self.launch.world_size < self.min_ranks:
            raise ValueError(f"launch.world_size {self.launch.world_size} is below min_ranks {self.min_ranks}")
        for name, arm in self.arms.items():
            for flag, value in arm.flags.items():
                if flag not in self.flags:
                    raise ValueError(f"arm {name!r} sets flag {flag!r}, which is not declared under flags")
                choices = self.flags[flag].choices
                if choices is not None and value not in choices:
                    raise ValueError(f"arm {name!r}: flag {flag} takes {choices}, not {value!r}")
        return self


class Model(Strict):
    slug: str
    title: str
    hub: str
    model_type: str
    remote_code: str | None = None
    requires: list[str] = []
    config: dict[str, Any]
    tiny: dict[str, Any] = {}


class Promises(Strict):
    """What of a model each rank holds: ``whole``, a ``shard`` (one of as many as there are ranks) or only ``part``."""

    parameters: Held | None = None
    gradients: Held | None = None  # when the optimizer steps
    updates: Held | None = None  # what the rank's own optimizer steps on
    collectives: list[CollectiveKind] = []  # called in every training step


class Strategy(Needy):
    slug: str
    title: str
    divides: list[str] = []  # keys of a model's configuration that tp_size must divide
    shared: bool = False  # its collectives exist in gloo for CUDA tensors too
    options: dict[str, Any] = {}  # every option with its default
    choices: dict[str, list[Any]] = {}  # the values of those options that take only some
    promises: Promises  # what every attempt under it must show to have been in force
    copies: dict[str, dict[str, int]] = {}  # option -> value -> how often the ranks together hold the model then

    @model_validator(mode="after")
    def _values(self) -> Strategy:
        if not self.promises.model_dump(exclude_defaults=True):
            raise ValueError("promises: none, so that nothing could show that it was in force")
        for option, value in self.options.items():
            problem = self.refuses(option, value)
            if problem:
                raise ValueError(f"option {option}: {problem}")
        for key in ("choices", "copies"):
            for option in getattr(self, key):
                if option not in self.options:
                    raise ValueError(f"{key} of {option!r}, which is not among the options")
        return self

    def refuses(self, option: str, value: Any) -> str | None:
        """Why an option that it has does not take a value, or None. A bool is no number here, nor 1 a bool."""
        choices = self.choices.get(option)
        if choices is None:
            default = self.options[option]
            return None if type(value) is type(default) else f"{value!r} is not of type {type(default).__name__}"
        if any(type(value) is type(choice) and value == choice for choice in choices):
            return None
        return f"{value!r} is not valid{nearest(str(value), map(str, choices))}"


class Stack(Strict):
    slug: str
    title: str
    kind: Literal["current", "python", "lock"] = "lock"
    python: str | None = None
    pins: list[str] = []
    no_deps: list[str] = []  # installed as they are, without what they say they depend on
    constraints: list[str] = []
    floating: bool = False  # no committed lock: whatever the index holds today
    index_from: str | None = None  # an environment variable that holds the index these packages come from


class Hardware(Strict):
    slug: str
    title: str
    accelerator: Literal["auto", "cpu", "cuda"]
    gpus: int = Field(default=0, ge=0)
    gpu_name: str | None = None
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    shared: bool = False  # all ranks of an attempt on one GPU
    # Of a usual node of this kind, for `repro plan` on a machine that has none (GiB).
    gpu_memory_gb: float | None = Field(default=None, gt=0)
    memory_gb: float | None = Field(default=None, gt=0)
    cores: int | None = Field(default=None, ge=1)
