"""Define a cell's document: its types, name, validation and JSON Schema.

Pure. Documents are plain JSON. Their types are ``TypedDict``s, so that mypy checks the keys and
nothing is converted. External data is validated once: stored documents when they are read, a rank's
record when it arrives.

``python -m repro_matrix.records.document`` (``make schema``) writes
results/schema/cell-v1.schema.json.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, NamedTuple, cast

from pydantic import Field, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import NotRequired, TypedDict

from repro_matrix.paths import RESULTS
from repro_matrix.records.attempt import Observation, Record, Settings, closed
from repro_matrix.records.outcome import StoredOutcome, StoredVerdict, Text, adapter

Accelerator = Literal["cpu", "cuda"]
# Why a variant is not launched: the number of ranks or GPUs, the accelerator, GPUs that are shared
# or in a special mode, a flag's value, an uneven division, a missing stack or package, an extension
# that cannot be built, memory, weights, an equal variant.
SkipKind = Literal[
    "ranks",
    "nodes",
    "tp_size",
    "gpus",
    "accelerator",
    "shared",
    "gpu_mode",
    "flags",
    "divisible",
    "stack",
    "packages",
    "build",
    "memory",
    "weights",
    "same",
    "unknown",
]


class GradedAttempt(TypedDict):
    """One attempt of a variant and its outcome."""

    observation: Observation
    outcome: StoredOutcome


class SkipRecord(TypedDict):
    """Why a variant was not launched, for programs.

    ``requires``: what would have to be there, as it is declared.
    """

    kind: SkipKind
    requires: list[str]


class VariantRecord(TypedDict):
    """``skipped``: why it was not launched.

    ``fingerprint``: what its answer depends on. ``planned``: MiB of memory.
    """

    skipped: Text | None
    skip: NotRequired[SkipRecord | None]
    stack: NotRequired[str]
    fingerprint: NotRequired[str]
    planned: NotRequired[dict[str, Any]]
    settings: Settings
    attempts: list[GradedAttempt]


class StackRecord(TypedDict):
    """``label``: its folder in the results.

    ``changed``: files that are not as their packages installed them.
    """

    name: str
    python: str | None
    versions: dict[str, str]
    label: NotRequired[str]
    changed: NotRequired[list[str]]


class GpuRecord(TypedDict):
    name: str
    uuid: str
    memory_mb: Annotated[float, Field(ge=0)]


class ProbedDevice(TypedDict):
    name: str | None
    capability: str | None


class Probe(TypedDict):
    """Store the report of the stack's torch about these GPUs, made before any launch."""

    torch: str | None
    cuda: str | None
    arch_list: list[str] | None
    nccl_version: str | int | None
    devices: list[ProbedDevice]
    # packages that do not import where a GPU is visible, and why
    imports: NotRequired[dict[str, str]]


class Around(TypedDict):
    """Store other properties of the machine that an answer can depend on.

    ``shm_mb``: the size of shared memory (null: there is none). ``ptrace``: whether py-spy can look
    into hung ranks.
    """

    shm_mb: NotRequired[int | None]
    ptrace: NotRequired[bool]


class HardwareRecord(Around):
    """``capabilities``: those that all ranks reported alike.

    ``shares_gpu``: all ranks of an attempt use one GPU.
    """

    profile: str
    capabilities: NotRequired[dict[str, str | bool]]
    accelerator: Accelerator
    backend: NotRequired[str]
    shares_gpu: NotRequired[bool]
    gpus: list[GpuRecord]
    cpu: str
    cores: Annotated[int, Field(ge=1)]
    memory_gb: Annotated[float, Field(ge=0)]
    driver: str | None
    os: str
    probe: NotRequired[Probe]


def hardware_kind(accelerator: str, capability: object, shares_gpu: bool) -> str:
    """Return the kind under which evidence is stored: "cpu", "sm_80", "sm_90-shared" ...

    A profile is a place: two of them may have the same GPUs, and one may have others next year.
    "cuda": unknown, or of several kinds. The number of ranks belongs to the cell.
    """
    if accelerator == "cpu":
        return "cpu"
    kind = f"sm_{capability}".replace(".", "") if capability else "cuda"
    return f"{kind}-shared" if shares_gpu else kind


def kind_of(hardware: HardwareRecord) -> str:
    """Return the kind of hardware of a document.

    It is the one that all its ranks reported, or else the one that was probed.
    """
    capabilities, devices = (
        hardware.get("capabilities", {}),
        hardware.get("probe", {}).get("devices", ()),
    )
    probed = {device["capability"] for device in devices}
    capability = capabilities.get("gpu_capability") or (probed.pop() if len(probed) == 1 else None)
    return hardware_kind(hardware["accelerator"], capability, hardware.get("shares_gpu", False))


@closed
class JobRecord(TypedDict):
    """A job of SLURM. ``log``: in the folder of the run, where `repro` submitted it."""

    id: str
    task: NotRequired[str]
    node: str
    log: NotRequired[str]


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
    job: NotRequired[JobRecord]


@closed
class CellRecord(TypedDict):
    """Store one cell (case x model x strategy x flags x stack x hardware).

    A document has the place of measurement, every attempt of every variant with its outcome, and
    the verdicts.

    ``params``: the cell's axes as an expectation names them, model/strategy[/flag=value...].
    ``simulated``: why this is
    a simulation. ``flags``: those that the cell sets against their defaults. ``ranks``: of the
    cell; a variant may have its own number (settings.world_size). ``overrides``: name=value, what
    makes this another measurement than the usual one of this cell. ``complete``: false where the
    run was stopped before every attempt was made.
    """

    schema: Literal[1]
    cell_id: NotRequired[str]
    params: NotRequired[str]
    case: Annotated[str, Field(pattern="^[a-z0-9][a-z0-9-]*$")]
    title: str
    kind: Literal["failure", "control"]
    simulated: str | None
    references: list[str]
    model: str
    strategy: str
    flags: dict[str, Any]
    ranks: Annotated[int, Field(ge=1)]
    overrides: list[str]
    scale: Literal["tiny", "full"]
    weights: Literal["random", "hub"]
    stack: StackRecord
    hardware: HardwareRecord
    provenance: Provenance
    variants: Annotated[dict[str, VariantRecord], Field(min_length=1)]
    verdicts: dict[str, StoredVerdict]
    complete: bool


class Document(CellRecord):
    """A cell's document as it travels: ``path`` is where it was read."""

    path: NotRequired[str]


LINES = ".jsonl.zst"  # ends the name of a file with a document on each line
_LINE = re.compile(r"(?P<file>.+\.jsonl\.zst):(?P<line>[0-9]+)")


class DocumentPath(NamedTuple):
    """Locate a stored document: a file of its own, or a line of a stack's file.

    A line is written as ``.../<stack>.jsonl.zst:<line>``.
    """

    file: str
    line: int | None = None  # from 1; None: the whole file is the document

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"

    @classmethod
    def parse(cls, path: str) -> DocumentPath:
        found = _LINE.fullmatch(path)
        return cls(found["file"], int(found["line"])) if found else cls(path)


# -- validation

MAX_ERRORS = 3  # that a message names


def validate_cell(value: Any) -> Document:
    """Return the same value, known to be a cell's document.

    Raise ValueError, which names each wrong key.
    """
    _validate(CellRecord, value)
    _validate_variants(value)
    return cast(Document, value)


def validate_record(value: Any) -> Record:
    """Return the same value, known to be a rank's record.

    Raise ValueError, which names each wrong key.
    """
    _validate(Record, value)
    return cast(Record, value)


def _validate(kind: Any, value: Any) -> None:
    """Compare without converting: what was stored stays what it is."""
    try:
        adapter(kind).validate_python(value)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        # an unknown key explains missing ones
        errors.sort(key=lambda item: item["type"] != "extra_forbidden")
        more = f"; and {len(errors) - MAX_ERRORS} more" if len(errors) > MAX_ERRORS else ""
        raise ValueError(
            "; ".join(f"{key_path(e['loc'])}: {e['msg']}" for e in errors[:MAX_ERRORS]) + more
        ) from None


def key_path(parts: tuple[int | str, ...]) -> str:
    """Return ``variants.unfixed.attempts[0].outcome``; a key that is not a word is quoted."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += ("." if path else "") + (part if re.fullmatch(r"[\w+-]+", part) else repr(part))
    return path or "it"


# -- what types, and the JSON Schema generated from them, cannot express


def _validate_variants(document: CellRecord) -> None:
    variants, verdicts = document["variants"], document["verdicts"]
    if document["kind"] == "control":
        wrong = [
            f"{key}.{name}"
            for key, names in (("variants", variants), ("verdicts", verdicts))
            for name in names
            if name != "control"
        ]
        if wrong:
            raise ValueError(f"{wrong[0]}: a control has the one variant control")
    elif "unfixed" not in variants:
        raise ValueError("variants: a failure has the variant unfixed")
    elif "unfixed" in verdicts:
        raise ValueError("verdicts.unfixed: verdicts are of the other variants")
    for name, variant in variants.items():
        if variant["skipped"] is not None and variant["attempts"]:
            raise ValueError(f"variants.{name}: a variant that was skipped has no attempts")


FILE = RESULTS / "schema" / "cell-v1.schema.json"


class _Untitled(GenerateJsonSchema):
    """Without a title for every key."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema() -> str:
    """Return the text of the JSON Schema."""
    schema = adapter(CellRecord).json_schema(schema_generator=_Untitled)
    definitions = schema.pop("$defs")
    for each in (schema, *definitions.values()):
        each.pop("title", None)
        if "description" in each:
            each["description"] = " ".join(each["description"].split())
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": FILE.name,
        "title": "A cell's document",
    }
    return (
        json.dumps({**head, **schema, "$defs": dict(sorted(definitions.items()))}, indent=1) + "\n"
    )


if __name__ == "__main__":
    FILE.write_text(json_schema(), encoding="utf-8")
