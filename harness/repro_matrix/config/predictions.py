"""The schema of a claim, and of what it says would be measured. Pure."""

from __future__ import annotations

from pydantic import Field, model_validator

from repro_matrix.config.strict import Strict
from repro_matrix.config.vocabulary import OutcomeName, VerdictName


class Metric(Strict):
    """A comparison with another variant's metric: own <= factor * other (``below``), own >= factor * other
    (``above``)."""

    name: str
    below: str | None = None  # name of the other variant
    above: str | None = None
    factor: float = 1.0

    @model_validator(mode="after")
    def _one(self) -> Metric:
        if (self.below is None) == (self.above is None):
            raise ValueError("a metric comparison needs exactly one of below and above (another variant's name)")
        return self


class Prediction(Strict):
    """What a claim says would be measured. Axes left out match every cell that was measured."""

    variant: str
    case: str | None = None
    model: str | None = None
    strategy: str | None = None
    ranks: int | None = Field(default=None, ge=1)
    stack: str | None = None
    hardware: str | None = None
    verdict: VerdictName | list[VerdictName] | None = None
    outcome: OutcomeName | list[OutcomeName] | None = None
    # The outcome but for what the log says, where the variant reproduces: that a warning is harmless, or is not.
    outcome_without_warning: OutcomeName | list[OutcomeName] | None = None
    metric: Metric | None = None
    condition: str | None = None  # the condition in words, for conditional(on what)
    # The variant in whose place this one stands, where that is not the unfixed variant: one that shares all but the
    # change that the claim is about. The failure must reproduce there for the prediction to be tried.
    relative_to: str | None = None

    @model_validator(mode="after")
    def _one(self) -> Prediction:
        if (
            sum(part is not None for part in (self.verdict, self.outcome, self.outcome_without_warning, self.metric))
            != 1
        ):
            raise ValueError("a prediction needs exactly one of verdict, outcome, otherwise and metric")
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
            raise ValueError("a claim needs either predicts or untestable")
        return self
