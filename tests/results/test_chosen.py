"""Which stored cells an override of an axis means: `repro accept ranks=4` had published every size."""

from __future__ import annotations

from typing import Any

import pytest
from observations import document, observation, ok
from repro_matrix.config.selection import parse
from repro_matrix.errors import ConfigError
from repro_matrix.results.accept import select


def cell(**changes: Any) -> dict[str, Any]:
    return document({"unfixed": [("reproduced", observation(ok(0)))]}, {}, **changes)


STORED = [
    cell(model="qwen-7b", strategy="ddp", ranks=2),
    cell(model="qwen-7b", strategy="fsdp", ranks=4, flags={"peft": True}),
    cell(model="llama-2-7b", strategy="ddp", ranks=8),
]


@pytest.mark.parametrize(
    ("texts", "places"),
    [
        ([], [0, 1, 2]),
        (["case=*"], [0, 1, 2]),
        (["hardware=auto", "results=/tmp/x"], [0, 1, 2]),
        (["ranks=4"], [1]),
        (["ranks=2,8"], [0, 2]),
        (["model=qwen*"], [0, 1]),
        (["model=qwen-7b", "strategy=ddp"], [0]),
        (["flags.peft=true"], [1]),
        (["stack=current"], [0, 1, 2]),
    ],
)
def test_select_by_axis_returns_its_documents(texts: list[str], places: list[int]) -> None:
    documents = [{**each, "stack": {**each["stack"], "name": "current"}} for each in STORED]
    assert select(documents, parse(texts)) == [documents[place] for place in places]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["ranks=5"], "ranks=5: no stored cell (there are: 2, 4, 8)"),
        (["model=qwen-77b"], "did you mean 'qwen-7b'?"),
        (["ranks=8", "strategy=fsdp"], "no stored cell"),
        (["repeat=3"], "repeat=3: no axis of stored cells"),
        (["hardware=gpu"], "hardware=gpu: no stored cell"),
    ],
)
def test_select_without_a_match_is_an_error(texts: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        select(STORED, parse(texts))
    assert said in str(raised.value)


def test_select_from_an_empty_folder_returns_nothing() -> None:
    assert select([], parse(["ranks=4"])) == []
