"""The schema of an expectation: what stored measurements showed of some cells over a range of releases. Pure."""

from __future__ import annotations

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import Field, field_validator, model_validator

from repro_matrix.config.strict import Strict
from repro_matrix.config.vocabulary import VerdictName


class VersionRange(Strict):
    """Some cells on one hardware over a range of releases: a column of results/expected."""

    cells: list[str] = []  # model/strategy[/flag=value ...]; empty: every cell of the case
    hardware: str = "cpu"
    # Capabilities of the machine it was measured on, of those that its variants depend on: elsewhere it says nothing of
    # these.
    capabilities: dict[str, str | bool] = {}
    versions: dict[str, str] = {}  # package -> specifier
    measured_at: list[dict[str, str]] = Field(min_length=1, max_length=2)  # package -> release, at the range's ends
    reason: str

    @field_validator("versions")
    @classmethod
    def _specifiers(cls, value: dict[str, str]) -> dict[str, str]:
        for package, text in value.items():
            try:
                SpecifierSet(text)
            except InvalidSpecifier:
                raise ValueError(f"{package}: not a version range such as '>=2.4,<2.6': {text!r}") from None
        return value


class Expectation(VersionRange):
    """The verdicts that stored measurements showed there. Written by ``repro accept``."""

    verdicts: dict[str, VerdictName]  # variant -> verdict
    failure_ids: dict[str, str | list[str]] = {}  # variant -> what it met, where its verdict says that something failed

    def failure_ids_of(self, variant: str) -> list[str] | None:
        """What the variant may meet; None where that was never written down: then the verdict alone is compared."""
        listed = self.failure_ids.get(variant)
        return [listed] if isinstance(listed, str) else listed

    @model_validator(mode="after")
    def _failure_ids_of_variants(self) -> Expectation:
        foreign = sorted(self.failure_ids.keys() - self.verdicts.keys())
        if foreign:
            raise ValueError(f"met names {', '.join(foreign)}, of which no verdict is expected")
        return self
