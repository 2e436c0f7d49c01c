"""Published evidence stored as what differs: nothing is lost but what is said to be, and little is said twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import document, failed, observation, ok
from repro_matrix.paths import BASELINE
from repro_matrix.results import sheet
from repro_matrix.results.compact import TAIL, applied, compacted, difference, expanded
from repro_matrix.results.store import Store

LINE = st.lists(st.sampled_from(["", "a", "Traceback", "[rank1]:"]), max_size=3).map(" ".join)
LINES = st.lists(LINE, max_size=5).map("\n".join)
PLAIN = st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | st.text(max_size=3) | LINES
JSON = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
)


def same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@given(JSON, JSON)
def test_a_difference_made_gives_the_value(base: Any, value: Any) -> None:
    written = json.dumps(base)
    found = json.loads(json.dumps(difference(base, value)))
    assert same(applied(base, found), value)
    assert json.dumps(base) == written, "the base stays as it is"
    assert (found == []) == same(base, value)


@given(LINES, LINES)
def test_a_text_is_told_by_its_lines(base: str, value: str) -> None:
    found = json.loads(json.dumps(difference(base, value)))
    assert applied(base, found) == value
    assert len(json.dumps(found)) <= len(json.dumps([value]))


def test_of_a_command_only_the_words_that_differ_are_written() -> None:
    command = "env PATH=/a:/b torchrun repros/x.py --arm broken --flag a=1"
    later = command.replace("broken", "fix") + " --flag b=2"
    assert difference(command, later) == {"words": 10, "5": "fix", "8": "--flag", "9": "b=2"}
    assert (
        applied(command, difference(command, later)) == later and applied(later, difference(later, command)) == command
    )


def test_of_a_log_only_the_lines_that_differ_are_written() -> None:
    log = "\n".join(f"  File x, line {number}" for number in range(40))
    later = "0%| 12 it/s\n" + log.replace("line 17", "line 18")
    assert difference(log, later) == {"lines": 41, "22": {"5": "18"}, "40": "0%| 12 it/s"}
    assert applied(log, difference(log, later)) == later and applied(later, difference(later, log)) == log


@given(JSON, st.lists(JSON, max_size=3), st.lists(st.sampled_from(["clean", "fires"]), min_size=1, max_size=3))
def test_a_document_comes_back_whole(value: Any, ranks: list[Any], outcomes: list[str]) -> None:
    attempts = [
        (name, observation(*(ok(n) | {"rank": n, "more": item} for n, item in enumerate(ranks)), more=[value, number]))
        for number, name in enumerate(outcomes)
    ]
    made = document({"broken": attempts, "fix": "a reason"}, {"fix": "FIX_HOLDS"})
    written = json.loads(json.dumps(compacted(made | {"path": "where/it/was.json"})))
    assert same(expanded(written), made)


def test_a_repeated_attempt_costs_what_differs() -> None:
    made = observation(failed(0), failed(1))
    once = len(json.dumps(compacted(document({"broken": [("fires", made)]}))))
    later = observation(failed(0), failed(1), id="a2", started=199.0)
    thrice = len(json.dumps(compacted(document({"broken": [("fires", made), ("fires", later), ("fires", later)]}))))
    assert thrice - once < 200 < once


def test_an_arm_like_another_costs_what_differs() -> None:
    made = observation(failed(0), failed(1))
    once = len(json.dumps(compacted(document({"broken": [("fires", made)]}))))
    alike = document({"broken": [("fires", made)], "fix": [("fires", made)]})
    alike["arms"]["fix"]["settings"] = alike["arms"]["broken"]["settings"]
    written = compacted(alike)
    assert written["arms"]["fix"]["like"] == "broken" and len(json.dumps(written)) - once < 300 < once
    assert same(expanded(json.loads(json.dumps(written))), alike)


def test_logs_of_clean_attempts_are_left_out_and_others_trimmed() -> None:
    seen = observation(ok(0, log_tail="x" * TAIL + "end"))
    kept = expanded(compacted(document({"broken": [("fires", seen)], "fix": [("clean", seen)]})))["arms"]
    (fires,) = kept["broken"]["attempts"][0]["observation"]["ranks"]
    (clean,) = kept["fix"]["attempts"][0]["observation"]["ranks"]
    assert fires["log_tail"] == "x" * (TAIL - 3) + "end" and clean["log_tail"] == ""


@pytest.mark.parametrize(
    "wrong", [{"no": {"a": []}}, {"schema": {"a": []}}, [1, 2], {"ranks": {"7": [1]}}, {"no": 0}, 3]
)
def test_a_difference_that_does_not_fit_is_a_damaged_document(tmp_path: Path, wrong: Any) -> None:
    made = compacted(document({"broken": [("fires", observation(failed(0)))] * 2}))
    made["arms"]["broken"]["attempts"][1] = {"observation": wrong} if wrong != 3 else wrong
    path = tmp_path / "cpu" / "stack" / "some-case" / "m.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(made))
    store = Store(tmp_path)
    assert store.read(path) is None and "damaged" in store.damaged[0]


def test_all_that_is_published_is_compact() -> None:
    for path in BASELINE.rglob("*.jsonl"):
        held = sheet.of(path.read_bytes())
        for number in held.keys:
            made = held.document(number)
            assert made["compact"] == 1, path
            arms = expanded(made)["arms"].values()
            attempts = [a for arm in arms for a in arm["attempts"][:1] if a["outcome"]["outcome"] == "clean"]
            assert not any(rank.get("log_tail") for a in attempts for rank in a["observation"]["ranks"][:1]), path
