"""An attempt's outcome: what it is, why, and which known failures were recognised in it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast, get_args

from repro_matrix.config.vocabulary import OutcomeName, SignatureKind
from repro_matrix.records.base import FailureKind, NoEvidence
from repro_matrix.records.base import InfraKind as LaunchersInfra
from repro_matrix.records.outcome import Outcome as Stored


@dataclass(frozen=True)
class Recognised:
    """A known failure seen in an attempt."""

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
    """An attempt judged. ``to_json`` makes it JSON; ``from_json`` reads it back."""

    outcome: OutcomeName
    reason: str
    recognised: tuple[Recognised, ...] = ()
    primary: Primary | None = None
    failed: tuple[str, ...] = ()  # every rank finished, and these checks failed or were not made
    # Where only a remark in the log fires: what the attempt would be without it. A harmless one leaves it clean.
    otherwise: OutcomeName | None = None
    ranks: tuple[int, ...] = ()  # which the reason is about; empty: all of them
    check: str | None = None  # which the reason is about: the worst of those that failed, or the one that was not made
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
        seen = tuple(Recognised(**item) for item in listed)
        primary = Primary(**data["primary"]) if data["primary"] else None
        failed = tuple(data.get("failed") or ())
        otherwise = data.get("otherwise") if data.get("otherwise") in get_args(OutcomeName) else None
        more = tuple(data.get("ranks") or ()), data.get("check"), data.get("infra")
        return cls(data["outcome"], data["reason"], seen, primary, failed, otherwise, *more)

    def others(self, case: str) -> tuple[Recognised, ...]:
        """Other cases' failures in it (their remarks in the log are none)."""
        return tuple(item for item in self.recognised if item.case != case and item.kind != "log")


def skipped(reason: str) -> Outcome:
    """The outcome of an arm that was not launched."""
    return Outcome("skipped", reason)
