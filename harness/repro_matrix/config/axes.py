"""The schema of the files of the axes: models, strategies, stacks, hardware. Pure."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from repro_matrix.config.vocabulary import CollectiveKind, Held, Strict, requirement
from repro_matrix.errors import nearest


class Needy(Strict):
    """What a variant or a strategy needs of a stack."""

    requires: list[str] = []
    requires_on: dict[Literal["cpu", "cuda"], list[str]] = {}  # what it needs on that hardware beside ``requires``

    _check = field_validator("requires")(lambda cls, value: [requirement(item) for item in value])

    @field_validator("requires_on")
    @classmethod
    def _requirements(cls, value: dict[str, list[str]]) -> dict[str, list[str]]:
        return {kind: [requirement(item) for item in listed] for kind, listed in value.items()}

    def needs_on(self, accelerator: str) -> list[str]:
        """All that a stack must have for it on ``cpu`` or ``cuda``."""
        beside = [item for kind, listed in self.requires_on.items() if kind == accelerator for item in listed]
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
    """What of a model each rank holds: ``whole``, a ``shard`` (one of as many as there are ranks) or only ``part``."""

    parameters: Held | None = None
    gradients: Held | None = None  # when the optimizer steps
    updates: Held | None = None  # what the rank's own optimizer steps on
    collectives: list[CollectiveKind] = []  # called in every training step


class Strategy(Needy):
    slug: str
    title: str
    must_divide: list[str] = []  # keys of a model's configuration that tp_size must divide
    allow_gpu_sharing: bool = False  # its collectives exist in gloo for CUDA tensors too
    options: dict[str, Any] = {}  # every option with its default
    choices: dict[str, list[Any]] = {}  # the values of those options that take only some
    invariants: Invariants  # what every attempt under it must show to have been in effect
    replicas: dict[str, dict[str, int]] = {}  # option -> value -> how often the ranks together hold the model then

    @model_validator(mode="after")
    def _values(self) -> Strategy:
        if not self.invariants.model_dump(exclude_defaults=True):
            raise ValueError("invariants: none, so that nothing could show that the strategy took effect")
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


class Hardware(Strict):
    slug: str
    title: str
    accelerator: Literal["auto", "cpu", "cuda"]
    gpus: int = Field(default=0, ge=0)
    gpu_name: str | None = None
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    shared: bool = False  # all ranks of an attempt on one GPU
    # Of a usual node of this kind, for `--dry-run --memory` on a machine that has none (GiB).
    gpu_memory_gb: float | None = Field(default=None, gt=0)
    memory_gb: float | None = Field(default=None, gt=0)
    cores: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _gpu_fields(self) -> Hardware:
        if self.accelerator == "cpu" and (self.gpus or self.backend == "nccl" or self.shared):
            raise ValueError("accelerator: cpu uses no GPU: leave out gpus, shared and backend: nccl, or say cuda")
        return self
