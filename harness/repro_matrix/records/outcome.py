"""Define the types of grading: an attempt's outcome, a failure's id, a variant's verdict.

Pure. Documents store them as JSON (``StoredOutcome``, ``StoredVerdict``): the same keys, lists
instead of tuples.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, GetPydanticSchema, TypeAdapter, with_config
from typing_extensions import Self

from repro_matrix.config.vocabulary import OutcomeName, SignatureKind, VerdictName
from repro_matrix.records.attempt import Count, FailureKind, InfraErrorKind

# only the grader finds these
NoEvidence = Literal["interrupted", "no_effect", "environment_changed"]
# With releases that were not measured: as with the nearest measured ones on both sides, or on one
# (a prediction), or as with one of several that disagree. With nothing comparable: a documented fix
# that fails.
Compared = Literal[
    "expected",
    "unexpected",
    "no_expectation",
    "matches_cpu",
    "differs_from_cpu",
    "interpolated",
    "predicted",
    "differs_from_prediction",
    "possible",
    "differs_from_documentation",
]
CONFIRMED = frozenset({"expected", "matches_cpu", "interpolated", "predicted"})
DIFFERS_FROM_PREDICTION = frozenset(
    {"differs_from_cpu", "differs_from_prediction", "differs_from_documentation"}
)
NOTHING_STORED = frozenset({"no_expectation", "differs_from_documentation"})
NOT_GREEN = frozenset({"unexpected", "differs_from_documentation"})  # of a test
Text = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Interval = tuple[Share, Share]  # the 95 % Wilson interval of a share
# The verdicts of a failure: two of one name are the same answer only where the failure ids are the
# same.
FAILING = frozenset(
    {"NOT_FIXED", "DIFFERENT_FAILURE", "FIX_BREAKS", "SIGNATURE_MISMATCH", "FAILED"}
)

# a list for a tuple, a mapping for a nested type
_stored = with_config(ConfigDict(extra="forbid", strict=False))


class _Json:
    """A dataclass that documents hold as JSON."""

    def to_json(self) -> dict[str, Any]:
        return adapter(type(self)).dump_python(self, mode="json")

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Raise ValueError where the data is not of this type."""
        return adapter(cls).validate_python(data)


adapter: Any = cache(TypeAdapter)  # built when it is first needed: `repro --help` reads no document


@_stored
@dataclass(frozen=True)
class Recognized:
    """A known failure that an attempt shows."""

    case: str
    signature: str
    ranks: tuple[int, ...]
    kind: SignatureKind
    message: str


@_stored
@dataclass(frozen=True)
class Primary:
    """The failure that came first. ``location``: module.function of the innermost frame."""

    rank: int
    type: str
    message: str
    location: str
    kind: FailureKind = "exception"


@_stored
@dataclass(frozen=True)
class Outcome(_Json):
    """A graded attempt. ``primary`` is None where no rank failed by itself."""

    outcome: OutcomeName
    reason: Text
    recognized: tuple[Recognized, ...] = ()
    primary: Primary | None = None
    failed: tuple[str, ...] = ()  # every rank finished, and these checks failed or were not made
    # Where only a log record reproduces: the outcome without it. A harmless warning leaves the
    # attempt passed.
    outcome_without_warning: OutcomeName | None = None
    ranks: tuple[int, ...] = ()  # that the reason is about; empty: all
    check: str | None = None  # that the reason is about: the worst failed one, or the missing one
    infra_error: InfraErrorKind | NoEvidence | None = None
    # with CUDA_LAUNCH_BLOCKING=1, because the usual launch ended with an asynchronous error
    blocking: bool = False

    def others(self, case: str) -> tuple[Recognized, ...]:
        """Return other cases' failures in it; their log records do not count."""
        return tuple(item for item in self.recognized if item.case != case and item.kind != "log")


# transformers imports code that came with a model below this name and the name of the folder that
# it was read from, which may be a temporary one of the process:
# transformers_modules.qwen_4711.modeling_qwen.generate.
_REMOTE_CODE = re.compile(r"^transformers_modules\.(?:[^.]+\.)+(?=[^.]+\.[^.]+$)")


@_stored
@dataclass(frozen=True, order=True)
class FailureId(_Json):
    """Identify a failure.

    By a signature, by an exception (or signal, exit code) and its location, or by a failed check.
    """

    case: str | None = None
    signature: str | None = None
    type: str | None = None
    code_location: str | None = None  # module.function of the innermost frame
    check: str | None = None

    def __post_init__(self) -> None:
        if self.code_location:
            object.__setattr__(
                self,
                "code_location",
                _REMOTE_CODE.sub("transformers_modules.*.", self.code_location),
            )

    def __str__(self) -> str:
        """Return it as an expectation writes it."""
        if self.case:
            return f"{self.case}/{self.signature}"
        if self.check:
            return f"check {self.check}"
        return f"{self.type} in {self.code_location}" if self.code_location else str(self.type)


@_stored
@dataclass(frozen=True)
class Verdict(_Json):
    """The verdict of a fix variant or a control, and how it compares with what is expected."""

    name: VerdictName
    reason: Text
    unfixed_k: Count = 0  # attempts of the unfixed variant in which the signature reproduced ...
    unfixed_n: Count = 0  # ... of those that count
    fix_k: Count = 0  # attempts of this variant that passed ...
    fix_n: Count = 0  # ... of those that count
    interval: Interval | None = None  # of fix_k / fix_n
    unfixed_interval: Interval | None = None  # of unfixed_k / unfixed_n
    named_case: str | None = None  # the case of the catalogue whose failure occurred instead
    measured: bool = True  # False: no attempt was left to grade
    # this variant's failures; of SIGNATURE_MISMATCH the unfixed variant's
    failure_ids: tuple[FailureId, ...] = ()
    infra_error: bool = False  # nothing was measured because what was launched is no evidence
    unseen: bool = False  # a failure that nothing stored expects and that does not reproduce here
    expected: Compared = "no_expectation"
    expectation: VerdictName | None = None  # the expected verdict, or the predicted one
    # the releases that it was measured with, where they are not the variant's
    nearest: tuple[str, ...] = ()
    beyond: bool = False  # these are not on both sides of the variant's
    failure_note: str = ""  # another failure than the expected one, or that none is written down


StoredOutcome = Annotated[
    dict[str, Any], GetPydanticSchema(lambda _source, handler: handler(Outcome))
]
StoredVerdict = Annotated[
    dict[str, Any], GetPydanticSchema(lambda _source, handler: handler(Verdict))
]
