"""Nothing agrees of which nothing, or too little, was compared; and reading never fails."""

import base64
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repro_matrix.traces.comparison import grid, locate
from repro_matrix.traces.reader import read_trace
from simulated import train


@pytest.fixture
def edited(good, tmp_path):
    """Compare the good side with a copy of it whose events were changed, or left out (None)."""

    def edited(change, noise=True, both=False):
        bad = tmp_path / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        bad.mkdir()
        lines = (good[0] / "trace-0.jsonl").read_text().splitlines()
        events = [change(event) for event in map(json.loads, lines)]
        (bad / "trace-0.jsonl").write_text(
            "".join(json.dumps(event) + "\n" for event in events if event)
        )
        runs = list(map(read_trace, good))
        return locate(
            read_trace(bad) if both else runs[0], read_trace(bad), runs[1:] if noise else []
        )

    return edited


def without(*kinds):
    return lambda event: None if event["k"] in kinds else event


@pytest.mark.parametrize(
    "kinds, reason",
    [
        (["fwd"], "forward"),
        (["bwd", "lgrad", "rgrad", "ograd"], "gradient"),
        (["param"], "update"),
        (["start"], "no trace"),
        (
            [
                "fwd",
                "in",
                "bwd",
                "batch",
                "lgrad",
                "rgrad",
                "ograd",
                "param",
                "step",
                "state",
                "buffer",
                "random",
                "loss",
                "clip",
                "opt",
            ],
            "first forward pass",
        ),
    ],
)
def test_nothing_agrees_of_which_nothing_was_compared(edited, kinds, reason):
    location = edited(without(*kinds))
    assert location.verdict == "inconclusive" and reason in location.reason


def test_parameters_that_nothing_changed_are_no_update(edited):
    values = {}

    def change(event):
        if event["k"] == "state":
            values[event["n"]] = event["v"]
        return {**event, "v": values[event["n"]]} if event["k"] == "param" else event

    location = edited(change, both=True)
    assert location.verdict == "inconclusive" and "no update" in location.reason


def test_nothing_agrees_of_which_too_little_was_compared(edited):
    def few(event):
        compared = event.get("n", "").startswith(("layers", "head")) and event["k"] != "clip"
        return None if compared else event

    location = edited(few)
    assert location.verdict == "inconclusive" and "could be compared" in location.reason


def test_without_noise_runs_the_tolerance_is_said_to_be_a_guess(edited):
    location = edited(lambda event: event, noise=False)
    assert location.verdict == "agrees" and any("guess" in note for note in location.coverage.notes)


def test_not_a_number_on_both_sides_does_not_agree(good, tmp_path):
    folders = [
        train(tmp_path / str(noise), plant="nan", step=0, noise=noise) for noise in (None, 1, 2)
    ]
    runs = list(map(read_trace, folders))
    location = locate(runs[0], runs[0], runs[1:])
    assert location.verdict == "inconclusive" and "layers.1.act" in location.reason


def test_a_trace_that_is_cut_is_said_to_be(compare):
    location = compare(world=2, plant="killed", step=1)
    assert (location.verdict, location.stage, location.step) == ("inconclusive", "stopped", 1)


def test_an_error_before_the_cut_is_found(edited):
    def change(event):
        if event.get("s") == 2 or event["k"] == "end":
            return None
        return (
            {**event, "groups": [{**event["groups"][0], "lr": 1.0}]}
            if event["k"] == "opt"
            else event
        )

    assert edited(change).stage == "optimizer setting"


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_without_a_trace_is_said_to_have_none(good, tmp_path, missing):
    folder = train(tmp_path / "x", world=2)
    (folder / f"trace-{missing}.jsonl").unlink()
    runs = list(map(read_trace, good))
    location = locate(runs[0], read_trace(folder), runs[1:])
    assert location.verdict == "inconclusive" and location.ranks == (missing,)


def test_other_random_draws_on_each_run(tmp_path):
    draws = {"dropout": True, "plant": "other draws"}
    runs = [
        read_trace(train(tmp_path / str(noise), noise=noise, **draws)) for noise in (None, 1, 2)
    ]
    location = locate(
        runs[0], read_trace(train(tmp_path / "x", world=2, noise=3, **draws)), runs[1:]
    )
    assert (location.verdict, location.stage) == ("inconclusive", "random draws")


def test_random_draws_that_differ_are_told_from_an_error(tmp_path):
    runs = [
        read_trace(train(tmp_path / str(noise), noise=noise, dropout=True))
        for noise in (None, 1, 2)
    ]
    location = locate(runs[0], read_trace(train(tmp_path / "x", world=2, dropout=True)), runs[1:])
    assert (location.verdict, location.stage, location.place) == (
        "differs",
        "random draws",
        "layers.0.act",
    )


def test_more_layers_in_one_release(compare):
    location = compare(layers=3)
    assert location.verdict in ("differs", "inconclusive")
    assert any("layers.2" in note for note in location.coverage.notes)


def test_modules_in_another_order_on_two_ranks(good, tmp_path):
    folder = train(tmp_path / "x", world=2)
    path = folder / "trace-1.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    forward = [
        place for place, line in enumerate(lines) if '"k": "fwd"' in line and '"s": 0' in line
    ]
    for place, line in zip(forward, [lines[place] for place in reversed(forward)]):
        lines[place] = line
    path.write_text("".join(lines))
    runs = list(map(read_trace, good))
    assert locate(runs[0], read_trace(folder), runs[1:]).verdict == "agrees"


def test_rows_that_differ_are_found_beside_rows_that_are_missing(good, tmp_path):
    """Nothing follows from either: one hook saw less, and the other another gradient."""
    folder = train(tmp_path / "bad", world=2)
    for rank in (0, 1):
        path = folder / f"trace-{rank}.jsonl"
        events = list(map(json.loads, path.read_text().splitlines()))
        for event in [each for each in events if each["k"] == "bwd" and each["n"] == "layers.1.up"]:
            table = np.frombuffer(base64.b64decode(event["v"]))
            event["v"] = base64.b64encode((1.01 * table).tobytes()).decode()
            if rank == 0:
                events.remove(event)
        path.write_text("".join(json.dumps(event) + "\n" for event in events))
    runs = list(map(read_trace, good))
    location = locate(runs[0], read_trace(folder), runs[1:])
    assert (location.stage, location.place) == ("backward", "layers.1.up")
    assert location.ranks == (1,)


@settings(max_examples=15, deadline=None)
@given(st.floats(0, 1), st.binary(max_size=40))
def test_reading_never_fails(good, share, garbage):
    content = (good[0] / "trace-0.jsonl").read_bytes()
    place = int(share * len(content))
    runs = list(map(read_trace, good))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "trace-0.jsonl").write_bytes(content[:place] + garbage)
        (Path(folder) / "trace-1.jsonl").write_bytes(garbage)
        location = locate(runs[0], read_trace(Path(folder)), runs[1:])
        grid(runs[0], read_trace(Path(folder)), runs[1:])
    assert location.sentence()
    assert place >= len(content) - 1 or location.verdict != "agrees"


def test_a_folder_that_is_not_there(tmp_path, good):
    location = locate(read_trace(good[0]), read_trace(tmp_path / "nothing"))
    assert location.verdict == "inconclusive" and "nothing" in location.reason


def test_a_script_that_only_evaluates_has_other_samples(tmp_path):
    """Without gradients, a call on other samples is all that such a script shows."""
    for side, order in (("good", 0), ("bad", 1)):
        (tmp_path / side).mkdir()
        batch = {"k": "batch", "s": 0, "m": 0, "root": 0, "grad": False, "samples": [order]}
        lines = [{"k": "start", "rank": 0, "world": 1}, batch, {"k": "end", "reason": "exit"}]
        text = "\n".join(json.dumps(line) for line in lines)
        (tmp_path / side / "trace-0.jsonl").write_text(text)
    found = locate(read_trace(tmp_path / "good"), read_trace(tmp_path / "bad"))
    assert (found.verdict, found.stage) == ("differs", "data")
