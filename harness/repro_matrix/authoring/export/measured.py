"""What is stored of a variant with some stack: its versions and outcomes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from repro_matrix.planning.plan import VariantPlan
from repro_matrix.records.document import Document
from repro_matrix.records.outcome import StoredOutcome

_OF_STACK = ("torch", "transformers", "accelerate", "peft", "deepspeed", "colossalai")


@dataclass(frozen=True)
class Measured:
    """The attempts of one stored document's variant."""

    versions: Mapping[str, str]
    outcomes: list[StoredOutcome]

    @property
    def outcome(self) -> StoredOutcome:
        return self.outcomes[0]

    @property
    def equal(self) -> int:
        return sum(one["outcome"] == self.outcome["outcome"] for one in self.outcomes)

    @property
    def fails_by_itself(self) -> bool:
        """Whether what is seen does not depend on what the script checks: an error, a warning, a hang, a crash."""
        kinds = {item["kind"] for item in self.outcome["recognized"]}
        primary = self.outcome["primary"]
        raised = self.outcome["outcome"] in ("other_failure", "hang") or bool(primary and primary["type"])
        return raised or bool(kinds & {"exception", "log", "hang", "signal"})


def measured(
    documents: Iterable[Document],
    variant: VariantPlan,
    stack: str,
    versions: Mapping[str, str],
    defaults: Mapping[str, Any],
) -> Measured | None:
    """The most attempts with these settings on this stack; where ``versions`` are given, with these very releases.

    ``defaults``: of the case's flags. A flag that came after the measurement was at its default then.
    """
    found: list[Measured] = []
    for document in documents:
        stored = document["variants"].get(variant.variant)
        have = document["stack"]["versions"]
        same = all(have.get(name) == versions.get(name) for name in _OF_STACK)
        if (
            stored
            and stored["attempts"]
            and _equal_settings(stored["settings"], variant.settings, defaults)
            and (same if versions else document["stack"]["name"] == stack)
        ):
            found.append(Measured(have, [attempt["outcome"] for attempt in stored["attempts"]]))
    return max(found, key=lambda each: len(each.outcomes), default=None)


def _equal_settings(stored: Mapping[str, Any], asked: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    def options(settings: Mapping[str, Any]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = settings["strategy"].get("options") or {}
        return found

    both = options(stored).keys() & options(asked).keys()
    return (
        {**defaults, **stored["flags"]} == asked["flags"]
        and stored["world_size"] == asked["world_size"]
        and stored["model"]["config"] == asked["model"]["config"]
        and stored["strategy"]["slug"] == asked["strategy"]["slug"]
        and all(options(stored)[name] == options(asked)[name] for name in both)
    )
