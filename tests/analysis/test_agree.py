"""How often one hardware's results predict the other's."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from repro_matrix.analysis.agreement import agree, as_json, lines
from repro_matrix.analysis.brief import Brief
from repro_matrix.errors import ConfigError
from repro_matrix.text import WIDTH
from test_diff import BOOM, FIRES, HOLDS, PARTS, SIDES, arm, cell


@given(SIDES, SIDES)
def test_it_counts_what_both_measured_and_says_the_same_backwards(one: list[Brief], other: list[Brief]) -> None:
    try:
        there, _ = agree(one, other, PARTS)
    except ConfigError:
        with pytest.raises(ConfigError):
            agree(other, one, PARTS)
        return
    back, _ = agree(other, one, PARTS)
    assert [(r.case, r.k, r.n, r.alone, r.unlike) for r in there] == [
        (r.case, r.k, r.n, r.alone, r.unlike) for r in back
    ]
    for row in there:
        low, high = row.interval
        assert 0 <= row.k <= row.n and len(row.otherwise) == row.n - row.k and 0 <= low <= high <= 1
    assert all(len(text) <= WIDTH and text.isprintable() for text in lines(there))
    json.dumps(as_json(there, {}), allow_nan=False)


@given(SIDES)
def test_results_predict_themselves(one: list[Brief]) -> None:
    try:
        rows, across = agree(one, one, PARTS)
    except ConfigError:
        return
    assert not across and all(row.k == row.n and not row.otherwise and not row.alone for row in rows)


def test_a_gpu_against_a_cpu_is_counted_case_by_case() -> None:
    cpu = [cell(broken=FIRES, fix=HOLDS, never=arm(kinds={}, skipped="needs 2 GPUs"))]
    boom = BOOM._replace(error_at="torch/nn/modules/module.py:7")
    gpu = [replace(cell(broken=FIRES, fix=boom, never=HOLDS), hardware="a100x8", path="gpu/m.json")]
    gpu += [replace(cell(control=arm()), case="d", key="d/m", hardware="a100x8")]
    (row,), across = agree(cpu, gpu, PARTS)
    assert (row.case, row.k, row.n, row.alone) == ("c", 1, 2, 1) and across == {"hardware": ("cpu", "a100x8")}
    assert row.otherwise[0].arm == "fix"
    (said,) = as_json([row], across)["cases"][0]["otherwise"]
    assert said["error_at"] == [None, "torch/nn/modules/module.py:7"] and said["documents"][1] == "gpu/m.json"
    told = "\n".join(lines([row]))
    assert "1 of    2  (9 to 91 %); 1 measured by one only" in told and "second: other_error 3/3" in told
    with pytest.raises(ConfigError, match="no cell in common"):
        agree(cpu, gpu[1:], PARTS)
    with pytest.raises(ConfigError, match="nothing that both have measured"):
        agree([cell(fix=arm(kinds={}))], gpu, PARTS)
