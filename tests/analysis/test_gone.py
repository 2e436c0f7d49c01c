"""What the last green night measured and tonight has no word of: said, and never green, unless tonight says why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from repro_matrix.analysis.missing import Asked, count, gone, notes, told
from repro_matrix.analysis.night import of_briefs
from repro_matrix.cli import main as cli
from repro_matrix.results import history as kept
from repro_matrix.results import requested as asked
from repro_matrix.results import runs
from test_diff import FIRES, HOLDS, arm, cell
from test_nightly import SKIPPED, results
from test_nights import FIRES as FIRED
from test_nights import write

__all__ = ["results"]  # a fixture

A, B = cell(broken=FIRES, fix=HOLDS), replace(cell(broken=FIRES), key="c/n", axes=("model=n",))
GREEN = of_briefs("green", [A, B], 0)
ARMS = {"c": {"broken", "fix"}}
ALL = Asked(ARMS, {"c/m": {"now"}, "c/n": {"now"}})
LOST = arm()._replace(kinds={}, text="a card fell off")
NOTHING = arm()._replace(kinds={}, text="")


def told_of(tonight: list[Any], words: Asked = ALL, *nights: Any) -> list[tuple[str, str, str]]:
    return [(one.cell.key, one.arm, one.why) for one in gone(tonight, [*(nights or [GREEN])], [words], [])]


@pytest.mark.parametrize(
    ("tonight", "lost"),
    [
        ([A, B], []),
        ([A], [("c/n", "", "")]),
        ([cell(broken=FIRES), B], [("c/m", "fix", "")]),
        ([cell(broken=FIRES, fix=NOTHING), B], [("c/m", "fix", "")]),
        ([cell(broken=FIRES, fix=SKIPPED), B], []),
        ([cell(broken=FIRES, fix=LOST), B], []),
        ([replace(A, hardware="gpu1-shared"), B], [("c/m", "", "")]),
        ([replace(A, stack="other"), B], [("c/m", "", "")]),
    ],
    ids=["all there", "a cell", "an arm", "an arm without a word", "skipped", "infra", "a lost card", "a stack"],
)
def test_what_is_not_there_is_named(tonight: list[Any], lost: list[tuple[str, str, str]]) -> None:
    assert told_of(tonight) == lost


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (replace(ALL, cells={"c/m": {"now"}}), "not asked for"),
        (replace(ALL, cells={**dict(ALL.cells or {}), "c/n": {"later"}}), "not asked for"),
        (replace(ALL, hardware=("gpu*",)), "not asked for"),
        (replace(ALL, arms={}), "not asked for"),
        (replace(ALL, left=("cpu now c/n",)), "no room in the budget"),
        (replace(ALL, left=None), "no room in the budget"),
        (replace(ALL, part={"c/m"}), "in another shard"),
        (replace(ALL, cells={"c/m": {"now"}, "c/n": {"later"}}, stacks={"now"}), ""),
        (replace(ALL, hardware=("c*",)), ""),
        (replace(ALL, part={"c/n"}), ""),
        (Asked(ARMS), ""),
        (Asked({}), "not asked for"),
    ],
)
def test_tonights_own_words_say_why(words: Asked, why: str) -> None:
    assert told_of([A], words) == [("c/n", "", why)]


def test_one_run_that_was_asked_for_it_is_enough() -> None:
    found = gone([A], [GREEN], [replace(ALL, cells={}), ALL], [])
    assert [one.why for one in found] == [""]


def test_it_is_missed_though_a_green_night_between_had_no_room_for_it() -> None:
    """What need not be there is told once: of the last green night."""
    between = of_briefs("between", [replace(A, started=2.0)], 0)
    assert told_of([A], ALL, GREEN, between) == [("c/n", "", "")]
    assert told_of([A], ALL, GREEN, replace(between, code=1)) == [("c/n", "", "")]
    assert told_of([A], ALL, replace(GREEN, code=1)) == []
    assert told_of([A], replace(ALL, part={"c/m"}), GREEN, between) == []
    assert told_of([A], Asked(ARMS), GREEN, between) == [], "without words: what was given up long ago is not known"


def test_the_first_few_are_named_and_where_they_were_measured_instead() -> None:
    many = [replace(A, key=f"c/{n}", axes=(f"model={n}",)) for n in range(9)]
    tonight = [replace(one, hardware="gpu1-shared") for one in many]
    words = Asked(ARMS, {one.key: {"now"} for one in many})
    found = gone(tonight, [of_briefs("mon", many, 0)], [words], [])
    assert count(found) == "9 cells"
    assert "9 cells that a green night (mon) measured: case=c model=0 [now on cpu]; " in told(found)
    assert "and 6 more. Measured on gpu1-shared instead." in told(found)
    unread = gone([], [GREEN], [ALL], ["/r/cpu/s/c/n.json: left out: cut off"])
    assert [one.why for one in unread] == ["", "in a document that cannot be read"]
    assert notes(unread[1:]) == ["1 cell that green measured, tonight in a document that cannot be read: "
                                 "case=c model=n [now on cpu]"]  # fmt: skip


CASE = "ddp-ready-once"
KEY = f"{CASE}/qwen1.5-0.5b-ddp"


def night(root: Path, *texts: str, also: bool = True, left: list[str] | None = None) -> None:
    at: dict[str, Any] = {"model": "qwen1.5-0.5b", "strategy": "ddp"}
    started = {"mon": 1.0, "tue": 2.0, "wed": 3.0, "thu": 4.0}[root.name]
    write(root, {"broken": FIRED}, started, case="fsdp-generate", key="fsdp-generate/qwen1.5-0.5b-fsdp")
    if also:
        write(root, {"broken": FIRED}, started, case=CASE, key=KEY, **at)
    if texts:
        runs.note(root, texts, runs.ENDED, left)


def test_a_night_that_lost_a_cell_is_not_green(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (f"case=fsdp-generate,{CASE}", "hardware=cpu")

    def run(name: str) -> tuple[int, str]:
        line = ["nightly", str(results / name), "--nights", str(results / "nights"), "--name", name, "--code", "0"]
        code = cli.main(line)
        out, err = capsys.readouterr()
        return code, " ".join((out + err).split())

    night(results / "mon", *words)
    night(results / "tue", *words, also=False)
    assert run("mon")[0] == 0
    code, said = run("tue")
    assert code == 3 and "GONE: tonight has no word of 1 cell that a green night (mon) measured" in said
    assert "exit code 3: 1 cell of a green night gone" in said
    assert [(n.name, n.code) for n in kept.ledger(results / "nights", [])] == [("mon", 0), ("tue", 3)]
    night(results / "wed", *words, "time_limit=60m", also=False, left=[f"cpu current {KEY}"])
    code, said = run("wed")
    assert code == 0 and "1 cell that mon measured, tonight no room in the budget" in said
    night(results / "thu", "case=fsdp-generate", also=False)
    assert run("thu")[0] == 0, "it was not asked for"
    runs.read(results / "thu")
    (results / "thu" / runs.MANIFEST).unlink()
    assert run("thu")[0] == 0, "nothing says what was asked for, and the last green night had none of it"


def test_what_a_run_was_asked_for(tmp_path: Path) -> None:
    runs.note(tmp_path, [f"case={CASE}", "arms=[non-*]", "hardware=cpu", "shard=1/2"], runs.ENDED, ["a b c"])
    found = asked.of(tmp_path, [])
    assert found.cells is not None and found.cells[KEY] == {"current"} and found.hardware == ("cpu",)
    assert found.arms == {CASE: {"broken", "non-reentrant"}} and found.left == ("a b c",) and found.part is None
    written = {"schema": 1, "shard": 1, "of": 2, "selection": [], "repeat": {}, "cells": [["cpu", "current", KEY]]}
    (tmp_path / "shard-1-of-2.manifest").write_text(
        json.dumps({**written, "commit": "c", "changed": False, "stacks": {}})
    )
    assert asked.of(tmp_path, []).part == {KEY}
    runs.note(tmp_path, [f"case={CASE}", "time_limit=60m"], runs.ENDED)
    assert asked.of(tmp_path, []).left is None, "an older run does not name what it had no room for"
    for text in ("case=no-such-case", "case=[["):
        runs.note(tmp_path, [text], runs.ENDED)
        assert asked.of(tmp_path, []).cells is None and CASE in asked.of(tmp_path, []).arms
