"""What was met in an attempt that did not go as its case says: the failure by its identity, not by its words. Pure.

Two verdicts of the same name are only the same answer when they met the same thing. Messages hold sizes and paths that
differ between machines; a known failure's signature, an exception's type and the place that raised it, and the name of
a failed check do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from repro_matrix.grading.outcome import Outcome

# transformers imports code that came with a model below this name and the name of the folder that it lay in, which may
# be a temporary one of the process: transformers_modules.qwen_4711.modeling_qwen.generate.
_REMOTE = re.compile(r"^transformers_modules\.(?:[^.]+\.)+(?=[^.]+\.[^.]+$)")


@dataclass(frozen=True, order=True)
class Met:
    """One of: a case's signature; an exception (or a signal, an exit code) with its place; a failed check."""

    case: str | None = None
    signature: str | None = None
    type: str | None = None
    place: str | None = None  # module.function of the innermost frame
    check: str | None = None

    def __post_init__(self) -> None:
        if self.place:
            object.__setattr__(self, "place", _REMOTE.sub("transformers_modules.*.", self.place))

    def __str__(self) -> str:
        """As an expectation writes it."""
        if self.case:
            return f"{self.case}/{self.signature}"
        if self.check:
            return f"check {self.check}"
        return f"{self.type} in {self.place}" if self.place else str(self.type)


def met_in(case: str, outcome: Outcome) -> tuple[Met, ...]:
    """What one attempt met: nothing where it was clean or is no evidence; several things where more checks failed."""
    if outcome.outcome not in ("fires", "other_error"):
        return ()
    fires = outcome.outcome == "fires"
    known = [item for item in outcome.recognised if item.case == case] if fires else list(outcome.others(case))
    if known:
        return (Met(case=known[0].case, signature=known[0].signature),)
    primary = outcome.primary
    if primary is not None:
        # Where the main thread stood when a signal came is chance; an exit code has no place at all.
        place = primary.where if primary.kind == "exception" else ""
        return (Met(type=primary.type, place=place or None),)
    if outcome.failed:
        return tuple(Met(check=name) for name in outcome.failed)
    return (Met(type="unfinished"),)  # a rank that left nothing behind, or was ended without a failure of its own


def all_met(case: str, outcomes: Iterable[Outcome]) -> tuple[Met, ...]:
    """What the attempts of an arm met, each thing once."""
    found = {str(item): item for outcome in outcomes for item in met_in(case, outcome)}
    return tuple(found[name] for name in sorted(found))
