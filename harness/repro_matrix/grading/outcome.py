"""The outcome of one attempt. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast, get_args

from repro_matrix.config.vocabulary import OutcomeName, SignatureKind
from repro_matrix.records.base import FailureKind, NoEvidence
from repro_matrix.records.base import InfraErrorKind as LauncherInfraError
from repro_matrix.records.outcome import Outcome as Stored


@dataclass(frozen=True)
class Recognized:
    """A known failure that an attempt shows."""

    case: str
    signature: str
    ranks: tuple[int, ...]
    kind: SignatureKind
    message: str


@dataclass(frozen=True)
class Primary:
    """The failure that came first."""

    rank: int
    type: str
    message: str
    location: str
    kind: FailureKind = "exception"


InfraErrorKind = LauncherInfraError | NoEvidence


@dataclass(frozen=True)
class Outcome:
    """A graded attempt."""

    outcome: OutcomeName
    reason: str
    recognized: tuple[Recognized, ...] = ()
    primary: Primary | None = None
    failed: tuple[str, ...] = ()  # every rank finished, and these checks failed or were not made
    # Where only a log record reproduces: the outcome without it. A harmless warning leaves it clean.
    outcome_without_warning: OutcomeName | None = None
    ranks: tuple[int, ...] = ()  # that the reason is about; empty: all
    check: str | None = None  # that the reason is about: the worst failed one, or the missing one
    infra_error: InfraErrorKind | None = None  # of ``infra``: what kind

    def to_json(self) -> Stored:
        recognized = tuple(dict(vars(item)) for item in self.recognized)  # asdict would copy every value of them
        primary = dict(vars(self.primary)) if self.primary else None
        return cast(Stored, {**vars(self), "recognized": recognized, "primary": primary})

    @classmethod
    def from_json(cls, data: Stored) -> Outcome:
        if data["outcome"] not in get_args(OutcomeName):
            raise ValueError(f"no such outcome: {data['outcome']!r}")
        listed: list[dict[str, Any]] = [{**item, "ranks": tuple(item["ranks"])} for item in data["recognized"]]
        recognized = tuple(Recognized(**item) for item in listed)
        primary = Primary(**data["primary"]) if data["primary"] else None
        failed = tuple(data.get("failed") or ())
        outcome_without_warning = (
            data.get("outcome_without_warning")
            if data.get("outcome_without_warning") in get_args(OutcomeName)
            else None
        )
        more = tuple(data.get("ranks") or ()), data.get("check"), data.get("infra_error")
        return cls(data["outcome"], data["reason"], recognized, primary, failed, outcome_without_warning, *more)

    def others(self, case: str) -> tuple[Recognized, ...]:
        """Return other cases' failures in it; their log records do not count."""
        return tuple(item for item in self.recognized if item.case != case and item.kind != "log")


def skipped(reason: str) -> Outcome:
    """Return the outcome of a variant that was not launched."""
    return Outcome("skipped", reason)
