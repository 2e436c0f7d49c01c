"""The outcome of one attempt. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast, get_args

from repro_matrix.config.vocabulary import OutcomeName, SignatureKind
from repro_matrix.records.base import FailureKind, NoEvidence
from repro_matrix.records.base import InfraKind as LaunchersInfra
from repro_matrix.records.outcome import Outcome as Stored


@dataclass(frozen=True)
class Recognised:
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
    where: str
    kind: FailureKind = "exception"


InfraKind = LaunchersInfra | NoEvidence


@dataclass(frozen=True)
class Outcome:
    """A graded attempt."""

    outcome: OutcomeName
    reason: str
    recognised: tuple[Recognised, ...] = ()
    primary: Primary | None = None
    failed: tuple[str, ...] = ()  # every rank finished, and these checks failed or were not made
    # Where only a log record fires: the outcome without it. A harmless warning leaves it clean.
    otherwise: OutcomeName | None = None
    ranks: tuple[int, ...] = ()  # that the reason is about; empty: all
    check: str | None = None  # that the reason is about: the worst failed one, or the missing one
    infra: InfraKind | None = None  # of ``infra``: what kind

    def to_json(self) -> Stored:
        recognised = tuple(dict(vars(item)) for item in self.recognised)  # asdict would copy every value of them
        primary = dict(vars(self.primary)) if self.primary else None
        return cast(Stored, {**vars(self), "recognised": recognised, "primary": primary})

    @classmethod
    def from_json(cls, data: Stored) -> Outcome:
        if data["outcome"] not in get_args(OutcomeName):
            raise ValueError(f"no such outcome: {data['outcome']!r}")
        listed: list[dict[str, Any]] = [{**item, "ranks": tuple(item["ranks"])} for item in data["recognised"]]
        recognised = tuple(Recognised(**item) for item in listed)
        primary = Primary(**data["primary"]) if data["primary"] else None
        failed = tuple(data.get("failed") or ())
        otherwise = data.get("otherwise") if data.get("otherwise") in get_args(OutcomeName) else None
        more = tuple(data.get("ranks") or ()), data.get("check"), data.get("infra")
        return cls(data["outcome"], data["reason"], recognised, primary, failed, otherwise, *more)

    def others(self, case: str) -> tuple[Recognised, ...]:
        """Return other cases' failures in it; their log records do not count."""
        return tuple(item for item in self.recognised if item.case != case and item.kind != "log")


def skipped(reason: str) -> Outcome:
    """Return the outcome of an arm that was not launched."""
    return Outcome("skipped", reason)
