"""CUDA_VISIBLE_DEVICES is read as CUDA reads it: compared with torch's own reading of it."""

from __future__ import annotations

import os
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.environment.visible_devices import read

UUIDS = ["GPU-ab12", "GPU-ab34", "GPU-c", "GPU-d56", "GPU-d57"]
ENTRY = st.one_of(
    st.sampled_from([*UUIDS, "GPU-", "GPU-a", "GPU-ab1", "GPU-d5", "MIG-1", "all", "", " 1", "-1", "2x", "+3", "x2"]),
    st.integers(-2, 7).map(str),
    st.text("0123GPU-abcd ,", max_size=6),
)


def torchs_reading(text: str, uuids: list[str]) -> list[int]:
    """What torch makes of it: the list, then (as `_device_count_nvml` does) up to the first that is not there."""
    import torch.cuda as cuda

    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": text}):
        listed = cuda._parse_visible_devices()
    if listed and isinstance(listed[0], str):
        return [] if listed[0].startswith("MIG-") else list(cuda._transform_uuid_to_ordinals(listed, uuids))
    ends = next((place for place, index in enumerate(listed) if index >= len(uuids)), len(listed))
    return listed[:ends]


@given(st.lists(ENTRY, max_size=6).map(",".join), st.integers(0, len(UUIDS)))
def test_the_same_cards_as_torch_sees(text: str, count: int) -> None:
    uuids = UUIDS[:count]
    try:
        wanted = torchs_reading(text, uuids)
    except ValueError:  # torch stumbles over a lone sign
        return
    seen = read(text, uuids, ["A100"] * count)
    assert list(seen.cards) == wanted
    if not wanted and not seen.wished:
        assert seen.problem, "none is left, and nothing says why"


def test_not_set_shows_all_in_their_order() -> None:
    assert read(None, UUIDS, ["A", "B", "A", "B", "A"]).cards == (0, 1, 2, 3, 4)


def test_numbers_mean_nothing_certain_among_different_cards() -> None:
    names = ["A100", "H200", "A100"]
    unknown = read("0,1", UUIDS[:3], names)
    assert unknown.cards == () and unknown.problem and "CUDA_DEVICE_ORDER=PCI_BUS_ID" in unknown.problem
    assert read("0,1", UUIDS[:3], names, "PCI_BUS_ID").cards == (0, 1)
    assert read("2,0,1", UUIDS[:3], names).cards == (2, 0, 1)  # all of them, in whatever order
    assert read("GPU-c,GPU-ab1", UUIDS[:3], names).cards == (2, 0)  # named: no order is needed


def test_a_list_without_commas_is_one_card_and_that_is_said() -> None:
    """CUDA reads a number and stops; that the run then had one card of two was said nowhere."""
    for text, cards, said in (("0 1", (0,), "'0 1' as 0"), ("1;2,0", (1, 0), "'1;2' as 1"), ("2x", (2,), "'2x' as 2")):
        seen = read(text, UUIDS, ["A100"] * len(UUIDS))
        assert seen.cards == cards and seen.problem and said in seen.problem and "commas" in seen.problem
    for text in ("0,1", " 1 , 0", "+3", "GPU-c"):
        assert read(text, UUIDS, ["A100"] * len(UUIDS)).problem is None
