"""Define results/expected/<case>.yaml: a table of the verdicts that stored measurements showed.

One line per variant, one column per range: some cells on one hardware over a range of releases. A
changed verdict is one changed word in a diff. ``repro accept`` writes the whole file; a column's
cells and the releases at its ends (``measured_at``) identify the measurements that support it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import Field, field_validator, model_validator

from repro_matrix.config.vocabulary import OutcomeName, Strict, VerdictName

HEAD = (
    "# Written by `repro accept`: what the measurements in results/baseline showed. Not for editing"
    " by hand.\n"
)


class VersionRange(Strict):
    """Define a column: some cells on one hardware over a range of releases."""

    cells: list[str] = []  # model/strategy[/flag=value ...]; empty: every cell of the case
    hardware: str = "cpu"
    # Capabilities of the machine of the measurement on which its variants depend: it does not
    # apply to these variants on other machines.
    capabilities: dict[str, str | bool] = {}
    versions: dict[str, str] = {}  # package -> specifier
    # package -> release, at the range's ends
    measured_at: list[dict[str, str]] = Field(min_length=1, max_length=2)
    reason: str

    @field_validator("versions")
    @classmethod
    def _specifiers(cls, value: dict[str, str]) -> dict[str, str]:
        for package, text in value.items():
            try:
                SpecifierSet(text)
            except InvalidSpecifier:
                raise ValueError(
                    f"{package}: not a version range such as '>=2.4,<2.6': {text!r}"
                ) from None
        return value


class Expectation(VersionRange):
    """Hold the verdicts of one range. Written by ``repro accept``."""

    verdicts: dict[str, VerdictName]  # variant -> verdict
    # variant -> how it failed, if its verdict is a failure; and how ``unfixed``
    # failed, which has none
    failure_ids: dict[str, str | list[str]] = {}

    def failure_ids_of(self, variant: str) -> list[str] | None:
        """Return the failures that the variant may show.

        None if they were never written down: then the verdict alone is compared.
        """
        listed = self.failure_ids.get(variant)
        return [listed] if isinstance(listed, str) else listed

    @model_validator(mode="after")
    def _failure_ids_of_variants(self) -> Expectation:
        foreign = sorted(self.failure_ids.keys() - self.verdicts.keys() - {"unfixed"})
        if foreign:
            raise ValueError(
                f"failure_ids names {', '.join(foreign)}, of which no verdict is expected"
            )
        return self


class Table(Strict):
    """One case's file."""

    case: str
    ranges: list[VersionRange] = Field(min_length=1)
    verdicts: dict[str, list[VerdictName | None]]  # variant -> by range
    # likewise, where something failed
    failure_ids: dict[str, list[str | list[str] | None]] = Field(default={})

    @model_validator(mode="after")
    def _even(self) -> Table:
        for key in ("verdicts", "failure_ids"):
            for variant, row in getattr(self, key).items():
                if len(row) != len(self.ranges):
                    raise ValueError(
                        f"{key} of {variant!r}: {len(row)} columns for {len(self.ranges)} ranges"
                    )
        return self

    @property
    def expectations(self) -> list[Expectation]:
        """Return an expectation for each column."""
        found = []
        for index, version_range in enumerate(self.ranges):
            values: dict[str, Any] = version_range.model_dump()
            for key in ("verdicts", "failure_ids"):
                rows = getattr(self, key).items()
                values[key] = {
                    variant: row[index] for variant, row in rows if row[index] is not None
                }
            found.append(Expectation.model_validate(values))
        return found


class ExpectedMetric(Strict):
    """Compare a variant's metric with another variant's.

    ``below``: own <= factor * other; ``above``: own >= factor * other.
    """

    name: str
    below: str | None = None  # name of the other variant
    above: str | None = None
    factor: float = 1.0

    @model_validator(mode="after")
    def _one(self) -> ExpectedMetric:
        if (self.below is None) == (self.above is None):
            raise ValueError(
                "a metric comparison needs exactly one of below and above (another variant's name)"
            )
        return self


class Prediction(Strict):
    """Hold what a claim predicts for a measurement.

    Axes that are not set match every measured cell.
    """

    variant: str
    case: str | None = None
    model: str | None = None
    strategy: str | None = None
    stack: str | None = None
    hardware: str | None = None
    verdict: VerdictName | list[VerdictName] | None = None
    outcome: OutcomeName | list[OutcomeName] | None = None
    # The outcome without the log, if the variant reproduces: that a warning is
    # harmless, or is not.
    outcome_without_warning: OutcomeName | list[OutcomeName] | None = None
    metric: ExpectedMetric | None = None
    condition: str | None = None  # as text, for conditional(on what)
    # The variant that this one is compared with, if not the unfixed variant: one that
    # shares all but the change that the claim is about. The failure must reproduce there for the
    # prediction to be tried.
    relative_to: str | None = None

    @model_validator(mode="after")
    def _one(self) -> Prediction:
        kinds = (self.verdict, self.outcome, self.outcome_without_warning, self.metric)
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError(
                "a prediction needs exactly one of verdict, outcome, outcome_without_warning and"
                " metric"
            )
        return self


class Claim(Strict):
    id: str
    text: str
    source: str = ""
    predictions: list[Prediction] = []
    untestable: str | None = None  # why nothing here can test it: it stays untested(why)

    @model_validator(mode="after")
    def _some(self) -> Claim:
        if bool(self.predictions) == bool(self.untestable):
            raise ValueError("a claim needs either predictions or untestable")
        return self


def text(slug: str, entries: Iterable[Expectation]) -> str:
    """Return the file of a case with these expectations, in their order."""
    entries = list(entries)
    lines = [f"{HEAD}case: {slug}", "ranges:"]
    for entry in entries:
        values = entry.model_dump(exclude_defaults=True) | {"hardware": entry.hardware}
        items = [
            f"  {_yaml_line({key: values[key]})}"
            for key in VersionRange.model_fields
            if key in values
        ]
        lines += [f"- {items[0].strip()}", *items[1:]]
    for key in ("verdicts", "failure_ids"):
        rows: list[Mapping[str, Any]] = [getattr(entry, key) for entry in entries]
        variants = dict.fromkeys(variant for row in rows for variant in row)
        lines += [f"{key}:"] if variants else []
        lines += [
            f"  {_yaml_line({variant: [row.get(variant) for row in rows]})}" for variant in variants
        ]
    return "\n".join(lines) + "\n"


def _yaml_line(item: Mapping[str, Any]) -> str:
    """``key: value`` in one line."""
    dumped = yaml.safe_dump(
        dict(item), default_flow_style=True, width=1 << 30, allow_unicode=True, sort_keys=False
    )
    return dumped.strip()[1:-1]
