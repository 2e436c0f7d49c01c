"""A location is stored as JSON and read as one sentence."""

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.traces.location import Coverage, Location

FOUND = Location(
    "differs",
    stage="backward",
    step=1,
    ranks=(1,),
    place="layers.1.self_attn.o_proj",
    role="gradient",
    size=0.13,
    tolerance=2.4e-5,
    rounding=3e-6,
    agreed=412,
    coverage=Coverage(aligned=500, renamed={"a": "b"}, notes=("note",)),
)


def test_a_location_is_stored_as_json():
    stored = json.loads(
        json.dumps(Location("differs", stage="data", step=0, beyond=FOUND).to_json())
    )
    assert stored["beyond"]["place"] == FOUND.place and stored["beyond"]["coverage"]["renamed"] == {
        "a": "b"
    }


def test_the_sentence_has_what_a_reader_needs():
    sentence = FOUND.sentence()
    assert sentence.startswith("step 1, rank 1, layers.1.self_attn.o_proj: gradient")
    for part in ("off by 0.13", "rounding explains 3e-6", "412 tensors"):
        assert part in sentence
    assert "why" in Location("inconclusive", reason="why").sentence()


@given(
    truths=st.lists(st.integers(-6, 6), min_size=1, max_size=4, unique=True),
    noise=st.lists(st.floats(-0.01, 0.01), min_size=2, max_size=4),
    order=st.randoms(use_true_random=False),
    as_factor=st.booleans(),
)
def test_noise_never_splits_an_error_and_a_factor_of_two_always_does(
    truths, noise, order, as_factor
):
    def found(truth, error):
        scale = 3.0 * 2.0**truth
        if as_factor:  # near 1, noise of the factor is a larger part of the size
            scale *= 1 + error / 4
            return replace(FOUND, size=abs(scale - 1), factor=scale, tolerance=1e-4)
        return replace(FOUND, size=scale * (1 + error), tolerance=1e-4)

    kept, names = [], {}
    runs = [(truth, error) for truth in truths for error in noise]
    order.shuffle(runs)
    for truth, error in runs:
        location = found(truth, error)
        first = next((each for each in kept if location.repeats(each)), location)
        kept += [location] if first is location else []
        names.setdefault(truth, set()).add(first.failure)
    assert all(len(each) == 1 for each in names.values()) and len(
        set.union(*names.values())
    ) == len(truths)
