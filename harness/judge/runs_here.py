"""Whether a strategy runs at all where an arm failed under it: where it does not, the failure says nothing. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from repro_matrix.conf.schema import Strategy
from repro_matrix.judge.evidence import items, mapping, text
from repro_matrix.judge.grade import same_release

Document = Mapping[str, Any]


class Grounds:
    """What the stored controls, and the strategies themselves, say of strategy x stack x hardware."""

    def __init__(self, documents: Iterable[Document], strategies: Mapping[str, Strategy]) -> None:
        self.strategies = strategies
        self._controls = [d for d in documents if d.get("kind") == "control"]

    def cannot_run(self, arm: str, document: Document) -> str | None:
        """Why an arm that failed was bound to, in words; None where it may have, or did not fail."""
        held = mapping(mapping(document.get("arms")).get(arm))
        outcomes = {text(mapping(a.get("outcome")).get("outcome")) for a in items(held.get("attempts"))}
        if "other_error" not in outcomes or document.get("kind") == "control":
            return None
        if held.get("stack") not in (None, mapping(document.get("stack")).get("name")):
            return None  # an arm on a stack of its own: what else is stored is of the document's
        slug = text(mapping(mapping(held.get("settings")).get("strategy")).get("slug")) or text(
            document.get("strategy")
        )
        return self._lacks(slug, document) or self._unhealthy(slug, document)

    def _lacks(self, slug: str, document: Document) -> str | None:
        """What the strategy says that it needs and the stack does not have."""
        strategy = self.strategies.get(slug)
        if strategy is None:
            return None
        versions = mapping(mapping(document.get("stack")).get("versions"))
        accelerator = text(mapping(document.get("hardware")).get("accelerator"))
        there = getattr(strategy, "requires_on", {}).get(accelerator, ())
        for item in (*strategy.requires, *there):
            requirement = Requirement(item)
            try:
                met = requirement.specifier.contains(Version(str(versions[requirement.name])), prereleases=True)
            except (KeyError, InvalidVersion):
                continue
            if not met:
                return f"strategy {slug} does not run here: on {accelerator} it needs {item}"
        return None

    def _unhealthy(self, slug: str, document: Document) -> str | None:
        """The strategy's controls on this stack and machine: at least one, and none healthy."""
        found = [
            (text(mapping(control.get("verdicts")).get("control", {}).get("name")), control)
            for control in self._controls
            if control.get("strategy") == slug and _alike(control, document)
        ]
        names = {name for name, _ in found}
        if "UNHEALTHY" not in names or "HEALTHY" in names:
            return None
        control = next(control for name, control in found if name == "UNHEALTHY")
        shown = f"{text(control.get('case'))} {text(control.get('model'))}"
        return f"strategy {slug} does not run here: its control is unhealthy ({shown})"


def _alike(one: Document, other: Document) -> bool:
    """The same releases on the same kind of hardware."""
    mine, theirs = (mapping(mapping(d.get("stack")).get("versions")) for d in (one, other))
    both = mine.keys() & theirs.keys() - {"python"}
    same_place = mapping(one.get("hardware")).get("profile") == mapping(other.get("hardware")).get("profile")
    return same_place and "torch" in both and all(same_release(str(mine[n]), str(theirs[n])) for n in both)
