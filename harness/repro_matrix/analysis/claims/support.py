"""Whether a strategy runs at all where an arm failed under it: where it does not, the failure says nothing. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from repro_matrix.config.axes import Strategy
from repro_matrix.grading.consistency import same_release
from repro_matrix.records.document import Cell


class Grounds:
    """What the stored controls, and the strategies themselves, say of strategy x stack x hardware."""

    def __init__(self, documents: Iterable[Cell], strategies: Mapping[str, Strategy]) -> None:
        self.strategies = strategies
        self._controls = [d for d in documents if d["kind"] == "control"]

    def cannot_run(self, arm: str, document: Cell) -> str | None:
        """Why an arm that failed was bound to, in words; None where it may have, or did not fail."""
        held = document["arms"].get(arm)
        outcomes = {attempt["outcome"]["outcome"] for attempt in held["attempts"]} if held else set()
        if held is None or "other_error" not in outcomes or document["kind"] == "control":
            return None
        if held.get("stack") not in (None, document["stack"]["name"]):
            return None  # an arm on a stack of its own: what else is stored is of the document's
        slug = held["settings"].get("strategy", {}).get("slug") or document["strategy"]
        return self._lacks(slug, document) or self._unhealthy(slug, document)

    def _lacks(self, slug: str, document: Cell) -> str | None:
        """What the strategy says that it needs and the stack does not have."""
        strategy = self.strategies.get(slug)
        if strategy is None:
            return None
        versions, accelerator = document["stack"]["versions"], document["hardware"]["accelerator"]
        there = getattr(strategy, "requires_on", {}).get(accelerator, ())
        for item in (*strategy.requires, *there):
            requirement = Requirement(item)
            try:
                met = requirement.specifier.contains(Version(versions[requirement.name]), prereleases=True)
            except (KeyError, InvalidVersion):
                continue
            if not met:
                return f"strategy {slug} does not run here: on {accelerator} it needs {item}"
        return None

    def _unhealthy(self, slug: str, document: Cell) -> str | None:
        """The strategy's controls on this stack and machine: at least one, and none healthy."""
        found = [
            (control["verdicts"]["control"]["name"] if control["verdicts"] else "", control)
            for control in self._controls
            if control["strategy"] == slug and _alike(control, document)
        ]
        names = {name for name, _ in found}
        if "UNHEALTHY" not in names or "HEALTHY" in names:
            return None
        control = next(control for name, control in found if name == "UNHEALTHY")
        shown = f"{control['case']} {control['model']}"
        return f"strategy {slug} does not run here: its control is unhealthy ({shown})"


def _alike(one: Cell, other: Cell) -> bool:
    """The same releases on the same kind of hardware."""
    mine, theirs = one["stack"]["versions"], other["stack"]["versions"]
    both = mine.keys() & theirs.keys() - {"python"}
    same_place = one["hardware"]["profile"] == other["hardware"]["profile"]
    return same_place and "torch" in both and all(same_release(mine[name], theirs[name]) for name in both)
