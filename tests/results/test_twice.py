"""A cell is one document of its folder: copies are counted once, contradictions named, and so are names of others."""

from __future__ import annotations

import pytest
from repro_matrix.results.twice import Held, sort_out

CASE = "fsdp-generate"
KEY = f"{CASE}/qwen1.5-0.5b-fsdp"


def held(path: str, started: float = 1.0, says: str = "x", key: str = "c/m-ddp", hardware: str = "cpu") -> Held:
    return Held(path, key, hardware, "now", started, says)


OWN = held("r/cpu/s/c/m-ddp.json")


@pytest.mark.parametrize(
    ("others", "dropped", "notes", "wrong"),
    [
        ([], 0, 0, 0),
        ([held("r/cpu/s/c/copy.json")], 1, 1, 0),
        ([held("r/cpu/s/c/copy.json", started=2.0)], 1, 0, 1),
        ([held("r/cpu/s/other/m-ddp.json", says="y")], 1, 0, 1),
        ([held("r/cpu/s/c/copy.json", 2.0, "y"), held("r/cpu/s/c/copy2.json")], 2, 1, 1),
        ([held("r/cpu/s/c/n-ddp.json", key="c/n-ddp", says="y")], 0, 0, 0),
        ([held("r/cpu/t/c/m-ddp.json", says="y")], 0, 0, 0),
        ([held("s/cpu/s/c/m-ddp.json", says="y")], 0, 0, 0),
        ([held("r/gpu1/s/c/m-ddp.json", says="y", hardware="gpu1")], 0, 0, 0),
        ([held("r/cpu/s/c/n-ddp.json", key="c/o-ddp", says="y")], 0, 1, 0),
        ([held("before.json", key="c/o-ddp", says="y")], 0, 0, 0),
        ([held("r/cpu/now.jsonl:2"), held("r/cpu/now.jsonl:3", says="y", key="c/n-ddp")], 0, 0, 0),
    ],
    ids=["alone", "a copy", "another time", "says otherwise", "both", "another cell", "another stack",
         "another folder", "other hardware", "another cell's name", "no tree of results", "lines"],
)  # fmt: skip
def test_a_cell_is_one_document(others: list[Held], dropped: int, notes: int, wrong: int) -> None:
    for order in ([OWN, *others], [*others, OWN]):
        found = sort_out(order)
        assert (len(found.dropped), len(found.notes), len(found.wrong)) == (dropped, notes, wrong)
        assert OWN.path not in found.dropped
