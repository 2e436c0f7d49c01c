"""A location is stored as JSON and read as one sentence."""

import json

from repro_matrix.traces.location import Coverage, Location

FOUND = Location(
    "differs", stage="backward", step=1, ranks=(1,), place="layers.1.self_attn.o_proj", role="gradient", size=0.13,
    tolerance=2.4e-5, rounding=3e-6, agreed=412, coverage=Coverage(aligned=500, renamed={"a": "b"}, notes=("note",)),
)  # fmt: skip


def test_a_location_is_stored_as_json():
    stored = json.loads(json.dumps(Location("differs", stage="data", step=0, beyond=FOUND).to_json()))
    assert stored["beyond"]["place"] == FOUND.place and stored["beyond"]["coverage"]["renamed"] == {"a": "b"}


def test_the_sentence_has_what_a_reader_needs():
    sentence = FOUND.sentence()
    assert sentence.startswith("step 1, rank 1, layers.1.self_attn.o_proj: gradient")
    for part in ("off by 0.13", "rounding explains 3e-6", "412 tensors"):
        assert part in sentence
    assert "why" in Location("inconclusive", reason="why").sentence()
