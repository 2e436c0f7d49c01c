"""The types of a cell's document; of what lies in it: judged.py, observation.py, record.py. Pure.

The values that travel are plain JSON: these are ``TypedDict``s, so that mypy checks every key and nothing is converted.
``records/validate.py`` compares with them what comes from outside, once: stored documents where they are read, a
rank's record where it arrives. Who is given one of these types need not doubt that its keys are there.

``NotRequired`` is what older documents do not hold. results/schema/cell-v1.schema.json is generated from these files.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from repro_matrix.records.base import Accelerator, SkipKind, Text, closed
from repro_matrix.records.observation import Observation, Settings
from repro_matrix.records.outcome import Outcome, Verdict


@closed
class Made(TypedDict):
    """One attempt of a variant: what came out of it, and what that is."""

    observation: Observation
    outcome: Outcome


@closed
class Skip(TypedDict):
    kind: SkipKind
    requires: Annotated[list[str], Field(description="what would have to be there, as it is declared")]


@closed
class Variant(TypedDict):
    skipped: Annotated[Text | None, Field(description="why the variant was not launched")]
    skip: NotRequired[Annotated[Skip | None, Field(description="the same for programs")]]
    stack: NotRequired[str]
    fingerprint: NotRequired[Annotated[str, Field(description="what the variant's answer depends on")]]
    planned: NotRequired[
        Annotated[
            dict[str, Any],
            Field(description="memory that was planned (MiB; harness/memory), where it is known"),
        ]
    ]
    settings: Settings
    attempts: list[Made]


@closed
class Stack(TypedDict):
    name: str
    python: str | None
    versions: dict[str, str]
    label: NotRequired[Annotated[str, Field(description="the stack's folder in the results")]]
    changed: NotRequired[Annotated[list[str], Field(description="what of it is not as its packages were installed")]]


@closed
class Gpu(TypedDict):
    name: str
    uuid: str
    memory_mb: Annotated[float, Field(ge=0)]


@closed
class ProbedDevice(TypedDict):
    name: str | None
    capability: str | None


@closed
class Probe(TypedDict):
    """What the stack's torch said of these GPUs before anything was launched; only on GPUs."""

    torch: str | None
    cuda: str | None
    arch_list: list[str] | None
    nccl_version: str | int | None
    devices: list[ProbedDevice]


class Around(TypedDict):
    """What else of the machine an answer can depend on."""

    shm_mb: NotRequired[Annotated[int | None, Field(description="the size of shared memory; null: there is none")]]
    ptrace: NotRequired[Annotated[bool, Field(description="whether py-spy can look into hung ranks")]]


@closed
class Hardware(Around):
    profile: str
    capabilities: NotRequired[
        Annotated[dict[str, str | bool], Field(description="what all ranks said of their machine")]
    ]
    accelerator: Accelerator
    backend: NotRequired[str]
    shares_gpu: NotRequired[Annotated[bool, Field(description="all ranks of an attempt on one GPU")]]
    gpus: list[Gpu]
    cpu: str
    cores: Annotated[int, Field(ge=1)]
    memory_gb: Annotated[float, Field(ge=0)]
    driver: str | None
    os: str
    probe: NotRequired[Probe]


@closed
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


@closed
class Cell(TypedDict):
    """One cell (case x model x strategy x flags x stack x hardware): where it was measured, every attempt of every
    variant with its outcome, and the verdicts."""

    schema: Literal[1]
    cell_id: NotRequired[Annotated[str, Field(description="the cell's name within one stack and hardware")]]
    params: NotRequired[
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
        int, Field(ge=1, description="of the cell; a variant may have a number of its own (settings.world_size)")
    ]
    overrides: Annotated[
        list[str],
        Field(description="name=value: what makes it another measurement than the usual one of this cell"),
    ]
    scale: Literal["tiny", "full"]
    weights: Literal["random", "hub"]
    stack: Stack
    hardware: Hardware
    provenance: Provenance
    variants: Annotated[dict[str, Variant], Field(min_length=1)]
    verdicts: dict[str, Verdict]
    complete: Annotated[bool, Field(description="false: the run was stopped before every attempt was made")]


class Document(Cell):
    """A cell's document as it travels: ``path`` is where it was read."""

    path: NotRequired[str]
