"""The rows of the claims ledger in conf/case."""

from __future__ import annotations

from repro_matrix.config import catalog as catalogue
from repro_matrix.config.schema import Case

CASES = catalogue.load().cases
ROWS = [(case, claim) for case in CASES.values() for claim in case.claims]


def test_ids_of_claims_are_unique() -> None:
    ids = [claim.id for _, claim in ROWS]
    assert sorted(ids) == sorted(set(ids))


def test_relative_to_names_a_variant_that_differs_in_one_change() -> None:
    for case, claim in ROWS:
        for prediction in (each for each in claim.predictions if each.relative_to):
            about = CASES[prediction.case or case.slug]
            one, other = (
                _settings(about, str(name)) for name in (prediction.variant, prediction.relative_to)
            )
            differing = [key for key in one.keys() | other.keys() if one.get(key) != other.get(key)]
            assert len(differing) == 1, (
                f"{claim.id}: {prediction.variant}, {prediction.relative_to}: {differing}"
            )


def _settings(case: Case, name: str) -> dict[str, object]:
    variant = case.variants[name]
    flags = {**{flag: spec.default for flag, spec in case.flags.items()}, **variant.flags}
    axes = {
        axis: getattr(variant, axis)
        for axis in ("model", "strategy", "world_size", "devices", "stack")
    }
    return {**flags, **case.options, **variant.options, **axes}
