"""A healthy training agrees, however its samples and parameters are divided."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repro_matrix.traces.alignment import Key, Step
from repro_matrix.traces.comparison import grid, locate
from repro_matrix.traces.reader import read_trace
from simulated import sketch, train

DIVISIONS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["DDP", "shard", "TP"]),
        "world": st.sampled_from([1, 2, 3, 4]),
        "micro": st.sampled_from([1, 2]),
        "order": st.integers(0, 1000),
    }
)


@settings(max_examples=8, deadline=None)
@given(DIVISIONS)
def test_any_division_agrees(good, division):
    runs = list(map(read_trace, good))
    with tempfile.TemporaryDirectory() as folder:
        location = locate(runs[0], read_trace(train(Path(folder) / "x", **division)), runs[1:])
    assert location.verdict == "agrees", location.sentence()
    assert location.largest < 0.5
    assert location.coverage.not_compared == 0
    assert location.coverage.shared == 24 and location.coverage.notes == ()


@settings(max_examples=4, deadline=None)
@given(DIVISIONS, st.integers(1, 10**6))
def test_the_good_side_may_be_divided_too(good, division, seed):
    runs = list(map(read_trace, good))
    with tempfile.TemporaryDirectory() as folder:
        other = train(Path(folder) / "good", **division)
        location = locate(
            read_trace(other),
            read_trace(train(Path(folder) / "x", kind="shard", world=2, order=seed)),
            runs[1:],
        )
    assert location.verdict == "agrees", location.sentence()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.integers(1, 5), st.integers(0, 10**6))
def test_sketches_of_slices_add_up(size, parts, seed):
    value = np.random.default_rng(seed).normal(size=(1, size))
    slices = [sketch(value[:, each], each) for each in np.array_split(np.arange(size), parts)]
    assert np.allclose(sum(slices), sketch(value))


def test_slices_add_up_to_the_whole_whatever_the_order_of_the_files(tmp_path):
    whole = Step(read_trace(train(tmp_path / "whole")), 0)
    folder = train(tmp_path / "slices", kind="shard", world=3)
    for rank in (2, 0, 1):  # written anew, in another order
        path = folder / f"trace-{rank}.jsonl"
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    slices = Step(read_trace(folder), 0)
    for key in whole.events:
        if key.kind == "state":
            assert np.allclose(whole.rows(key).values, slices.rows(key).values)
            assert len(slices.rows(key).values) == 1
    assert (
        slices.rows(Key("fwd", "head")).values.shape == whole.rows(Key("fwd", "head")).values.shape
    )


def test_gradients_that_the_script_reduces_itself_agree(compare):
    location = compare(world=2, plant="reduced by the script")
    assert location.verdict == "agrees" and location.largest < 1


def test_renamed_modules_are_known_by_their_parameters(compare):
    location = compare(rename={"layers.": "model.blocks.", "head": "lm_head"})
    assert location.verdict == "agrees"
    assert location.coverage.renamed["layers.1.up"] == "model.blocks.1.up"
    assert location.coverage.renamed["layers.0.act"] == "model.blocks.0.act"  # it has no parameters
    assert location.coverage.not_compared == 0


def test_the_grid_has_a_cell_for_each_module_and_step(good, tmp_path):
    runs = list(map(read_trace, good))
    found = grid(
        runs[0], read_trace(train(tmp_path / "x", world=2, plant="activation", step=1)), runs[1:]
    )
    rows = {row["module"]: row["cells"] for row in found["rows"]}
    assert found["steps"] == [0, 1, 2]
    assert [ratio > 1 for ratio in rows["layers.1"]] == [False, True, True]
    assert rows["embed"][0] < 1 and rows["loss weight"][0] < 1 and rows["clipping"][0] < 1


@pytest.mark.parametrize("plant", ["activation", "local gradient"])
@pytest.mark.parametrize("strength, verdict", [(0, "agrees"), (1, "differs")])
def test_small_errors_are_found(compare, plant, strength, verdict):
    size = {"activation": 1e-3, "local gradient": 1e-2}[
        plant
    ]  # times 1 %: 1e-5 of an activation, 1e-4 of a gradient
    assert compare(world=2, plant=plant, strength=strength * size).verdict == verdict
