"""Every statement of the write-ups has a row in the claims ledger: none is dropped because it is awkward to test."""

from __future__ import annotations

from repro_matrix.config import catalog as catalogue
from repro_matrix.config.schema import Case

# By case of the write-ups: what each says of causes and fixes. What nothing can test here says why in its row.
CLAIMS = {
    "1": "small-incompatible ddp-simpler generate-summon generate-cost generate-serving generate-serving-tgi",
    "1a": """
        no-cache eval two-layers incompatible larger-model ddp root-call root-call-layer-wrap no-root-cast
        layer-wrap small-min no-orig-params summon fsdp2 newer
    """,
    "1b": """
        root-call root-call-layer-wrap larger-model uneven rmsnorm-special ddp fsdp-memory fsdp-memory-small
        layer-wrap small-min summon no-orig-params fsdp2 newer
    """,
    "1c": "layer-wrap untied small-min no-cache summon ddp fsdp2 larger-model newer",
    "2": "remove-device-map 1.8b 7b-zero embedding transfers whole newest batch",
    "2b": "drop-device-map",
    "3a": """
        device-map-none device-map-none-900 single-process single-process-cost updated-script model-file implicit
        torch-distributed torch-distributed-instead deepspeed deepspeed-instead fsdp fsdp-instead all-cpu
        before-the-check before-the-check-trains v100 bypass delete-map
    """,
    "3b": "remove-hook older harmless",
    "4a": "between-processes mixed-precision cast consistent-initialisation wrapping sharding-strategy newer-torch",
    "4b": """
        left-out-of-sharding requires-grad-false finer-wrapping sharding-strategy newer-torch check-after-saving
        one-by-one zero-filled
    """,
    "5": """
        exactly-when-not-divisible nearest-multiple mask gather-first divisible check-shapes stages warning
        friendlier-message automatic-padding original-size ignore-mismatched own-numbers tp1 power-of-two
    """,
}


CASES = catalogue.load().cases
ROWS = [(case, claim) for case in CASES.values() for claim in case.claims]


def test_claims_of_the_write_ups_are_in_the_catalog_once() -> None:
    ids = [claim.id for _, claim in ROWS]
    assert {f"{case}-{name}" for case, names in CLAIMS.items() for name in names.split()} <= set(ids)
    assert sorted(ids) == sorted(set(ids))


def test_relative_to_names_a_variant_that_differs_in_one_change() -> None:
    for case, claim in ROWS:
        for prediction in (each for each in claim.predictions if each.relative_to):
            about = CASES[prediction.case or case.slug]
            one, other = (_settings(about, str(name)) for name in (prediction.variant, prediction.relative_to))
            differing = [key for key in one.keys() | other.keys() if one.get(key) != other.get(key)]
            assert len(differing) == 1, f"{claim.id}: {prediction.variant}, {prediction.relative_to}: {differing}"


def _settings(case: Case, name: str) -> dict[str, object]:
    variant = case.variants[name]
    flags = {**{flag: spec.default for flag, spec in case.flags.items()}, **variant.flags}
    axes = {axis: getattr(variant, axis) for axis in ("model", "strategy", "world_size", "tp_size", "devices", "stack")}
    return {**flags, **case.options, **variant.options, **axes}
