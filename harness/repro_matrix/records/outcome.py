"""The types of what was judged: an attempt's outcome, and a variant's verdict over all of them. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from repro_matrix.config.vocabulary import OutcomeName, SignatureKind, VerdictName
from repro_matrix.records.base import Compared, Count, FailureKind, InfraErrorKind, Interval, NoEvidence, Text, closed


@closed
class Recognized(TypedDict):
    case: str
    signature: str
    ranks: Annotated[list[int], Field(min_length=1)]
    kind: SignatureKind
    message: str


@closed
class Primary(TypedDict):
    """The failure that came first."""

    rank: int
    type: str
    message: str
    location: str
    kind: NotRequired[FailureKind]


@closed
class Outcome(TypedDict):
    outcome: OutcomeName
    reason: Text
    recognized: list[Recognized]
    primary: Annotated[Primary | None, Field(description="null where no rank failed by itself")]
    failed: NotRequired[Annotated[list[str], Field(description="checks that failed or were not made")]]
    ranks: NotRequired[Annotated[list[int], Field(description="the ranks that the reason is about; empty: all")]]
    check: NotRequired[Annotated[str | None, Field(description="the check that the reason is about: the worst")]]
    infra_error: NotRequired[Annotated[InfraErrorKind | NoEvidence | None, Field(description="of infra: what kind")]]
    outcome_without_warning: NotRequired[
        Annotated[
            OutcomeName | None,
            Field(description="where only a remark in the log reproduces: what the attempt would be without it"),
        ]
    ]


@closed
class FailureId(TypedDict, total=False):
    """A known failure, an exception and the place that raised it, or a check."""

    case: str | None
    signature: str | None
    type: str | None
    code_location: str | None
    check: str | None


@closed
class Verdict(TypedDict):
    name: VerdictName
    reason: Text
    unfixed_k: Annotated[Count, Field(description="attempts of the unfixed variant in which the signature reproduced")]
    unfixed_n: Annotated[Count, Field(description="attempts of the unfixed variant that count")]
    fix_k: Annotated[Count, Field(description="attempts of this variant that passed")]
    fix_n: Annotated[Count, Field(description="attempts of this variant that count")]
    interval: Annotated[Interval | None, Field(description="95 % Wilson interval of fix_k / fix_n")]
    unfixed_interval: Annotated[Interval | None, Field(description="95 % Wilson interval of unfixed_k / unfixed_n")]
    named_case: str | None
    measured: bool
    infra_error: NotRequired[
        Annotated[bool, Field(description="nothing was measured: what was launched is no evidence")]
    ]
    failure_ids: NotRequired[
        Annotated[list[FailureId], Field(description="what failed, where the verdict says that something did")]
    ]
    unseen: NotRequired[
        Annotated[bool, Field(description="a failure that nothing stored expects, and that does not reproduce")]
    ]
    expected: NotRequired[Compared]
    expectation: NotRequired[
        Annotated[
            VerdictName | None,
            Field(description="the verdict that is expected, or predicted where this hardware has no expectation"),
        ]
    ]
    failure_note: NotRequired[
        Annotated[str, Field(description="another failure than the expected one was met, or met: unset")]
    ]
