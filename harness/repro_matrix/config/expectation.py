"""The schema of an expectation: what stored measurements showed of some cells over a range of releases. Pure."""

from __future__ import annotations

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import Field, field_validator, model_validator

from repro_matrix.config.strict import Strict
from repro_matrix.config.vocabulary import VerdictName


class Stretch(Strict):
    """Some cells on one hardware over a range of releases: a column of results/expected."""

    cells: list[str] = []  # model/strategy[/flag=value ...]; empty: every cell of the case
    hardware: str = "cpu"
    # Facts of the machine it was measured on, of those that its arms depend on: elsewhere it says nothing of these.
    facts: dict[str, str | bool] = {}
    versions: dict[str, str] = {}  # package -> specifier
    measured: list[dict[str, str]] = Field(min_length=1, max_length=2)  # package -> release, at the range's ends
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


class Expectation(Stretch):
    """The verdicts that stored measurements showed there. Written by ``repro accept``."""

    verdicts: dict[str, VerdictName]  # arm -> verdict
    met: dict[str, str | list[str]] = {}  # arm -> what it met, where its verdict says that something failed

    def met_by(self, arm: str) -> list[str] | None:
        """What the arm may meet; None where that was never written down: then the verdict alone is compared."""
        listed = self.met.get(arm)
        return [listed] if isinstance(listed, str) else listed

    @model_validator(mode="after")
    def _met_of_its_arms(self) -> Expectation:
        foreign = sorted(self.met.keys() - self.verdicts.keys())
        if foreign:
            raise ValueError(f"met names {', '.join(foreign)}, of which no verdict is expected")
        return self
