"""A location is stored as JSON and read as one sentence."""

import json

import pytest
from repro_matrix.traces.location import Coverage, Location

FOUND = Location(
    "differs", stage="backward", step=1, ranks=(1,), place="layers.1.self_attn.o_proj", role="gradient", size=0.13,
    tolerance=2.4e-5, rounding=3e-6, agreed=412, coverage=Coverage(aligned=500, renamed={"a": "b"}, notes=("note",)),
)  # fmt: skip


def test_a_location_survives_json():
    nested = Location("differs", stage="data", step=0, beyond=FOUND)
    for each in (FOUND, nested, Location("inconclusive", reason="why")):
        assert Location.from_json(json.loads(json.dumps(each.to_json()))) == each


@pytest.mark.parametrize("wrong", [None, {}, {"verdict": "perhaps"}, {"verdict": "agrees", "step": "x"}])
def test_other_json_is_refused(wrong):
    with pytest.raises(ValueError):
        Location.from_json(wrong)


def test_the_sentence_has_what_a_reader_needs():
    sentence = FOUND.sentence()
    assert sentence.startswith("step 1, rank 1, layers.1.self_attn.o_proj: gradient")
    for part in ("off by 0.13", "rounding explains 3e-6", "412 tensors"):
        assert part in sentence
    assert "why" in Location("inconclusive", reason="why").sentence()
