"""Nights: folded without loss, shown as strips in which every column is one night, damaged ones named."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import NORM, document, exception, failed, observation, ok
from repro_matrix.analysis.diff import compare
from repro_matrix.analysis.night import Night, briefs_of, from_json, of_briefs, to_json
from repro_matrix.cli import main as cli
from repro_matrix.config import project
from repro_matrix.errors import ResultsError
from repro_matrix.report import history as strip
from repro_matrix.results import history as kept
from repro_matrix.text import WIDTH

KINDS = ["fires", "clean", "other_error", "hang"]
TEXTS = st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=5)
ARMS = st.dictionaries(
    st.sampled_from(["broken", "fix", "other"]),
    st.tuples(
        st.sampled_from([None, "FIX_HOLDS", "FIX_BROKEN", "FLAKY"]),
        st.dictionaries(st.sampled_from(KINDS), st.integers(1, 3), max_size=2),
        st.lists(st.sampled_from(["c/norm", "check x"]), max_size=2), TEXTS, st.none() | TEXTS, st.none(),
    ).map(list),
    min_size=1,
)  # fmt: skip


@st.composite
def nights(draw: Any) -> list[Night]:
    found = []
    for number in range(draw(st.integers(1, 4))):
        cells = {
            f"cpu now c/{model}": {
                "case": "c", "axes": [f"model={model}", "strategy=ddp"], "hardware": "cpu", "stack": "now",
                "key": f"c/{model}", "control": False, "arms": draw(ARMS),
            }
            for model in draw(st.sets(st.sampled_from("mn")))
        }  # fmt: skip
        versions = {"now": {"torch": draw(st.sampled_from(["2.13.0", "2.14.0"]))}}
        found.append(
            Night(f"night-{number}", float(number), None, draw(st.sampled_from([None, 0, 1])), versions, cells)
        )
    return found


def test_a_night_of_the_first_schema_is_read() -> None:
    """It said a cell in a sentence; a flag's value may have spaces."""
    cell = {"case": "c", "hardware": "cpu", "stack": "now", "key": "c/m", "control": False, "arms": {}}
    where = 'case=c model=m strategy=ddp flags.call="a b" ranks=4'
    old = {"schema": 1, "name": "n", "started": 1.0, "cells": {"cpu now c/m": {**cell, "where": where}}}
    axes = ["model=m", "strategy=ddp", 'flags.call="a b"', "ranks=4"]
    made = from_json(old)
    assert made.cells == {"cpu now c/m": {**cell, "axes": axes}}
    assert [(brief.axes, brief.where) for brief in briefs_of(made)] == [(tuple(axes), where)]


@given(made=nights())
def test_nights_that_were_folded_are_the_same_again(
    made: list[Night], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("nights")
    for night in made[::-1]:  # also when a lost one comes late
        kept.keep(folder, night)
    assert kept.ledger(folder, []) == made
    kept.keep(folder, made[0])
    assert kept.ledger(folder, []) == made, "a night that is given again is there once"
    assert from_json(json.loads(json.dumps(to_json(made[0])))) == made[0]


@given(made=nights())
def test_every_column_is_a_night_and_a_night_in_brief_compares_as_it_did(made: list[Night]) -> None:
    found = strip.strips(made, "c")
    for one in found:
        assert len(one.letters) == len(made)
        for turn in one.turns:
            assert turn.before < turn.night and one.entries[turn.before].answer != one.entries[turn.night].answer
        k, n = one.flaky
        assert 0 <= k <= n and (k == 0 or len(one.entries) > 0)
    assert {(s.where, s.arm) for s in found} == {
        (" ".join(["case=c", *cell["axes"]]), arm)
        for night in made
        for cell in night.cells.values()
        for arm in cell["arms"]
    }
    many = made * 6
    for width in (40, 80, WIDTH) if found else ():
        for text in strip.lines(many, strip.strips(many), width):
            assert len(text) <= width and text.isprintable()
    json.dumps(strip.as_json(made, found), allow_nan=False)
    for night in made:
        again = of_briefs(night.name, briefs_of(night), night.code)
        assert (again.cells, again.code) == ({key: night.cells[key] for key in again.cells}, night.code)
        assert again.cells.keys() == night.cells.keys()
        assert compare(briefs_of(night), briefs_of(night), {}, need_common=False).changes == ()


FIRES = [("fires", observation(failed(0), failed(1)))] * 2
BOOM = [("other_error", observation(failed(0, exception("ValueError", "boom")), ok(1)))]
CLEAN = [("clean", observation(ok(0), ok(1)))] * 2


def write(root: Path, arms: dict[str, Any], started: float, **changes: Any) -> Path:
    made = document(arms, {}, **changes)
    made["provenance"]["started"] = started
    path = root / "cpu" / "s" / made["case"] / f"{made['model']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for attempt in made["arms"]["broken"]["attempts"]:
        raised = attempt["observation"]["ranks"][0]["record"]["exception"]
        if raised:
            first = {"rank": 0, "type": raised["type"], "message": raised["message"], "where": ""}
            attempt["outcome"]["primary"] = first
    path.write_text(json.dumps(made))
    return root


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "nights"
    write(root / "monday", {"broken": FIRES}, 1.0)
    write(root / "tuesday", {"broken": [*FIRES, *CLEAN[:1]]}, 2.0)
    write(root / "wednesday", {"broken": "needs 2 GPUs"}, 3.0)
    write(root / "thursday", {"broken": BOOM}, 4.0)
    return root


def test_a_case_is_a_strip_in_the_order_of_its_nights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["history", "some-case", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "  f~-e  broken: 1 of 6 attempts went otherwise" in out
    assert "some-case over 4 nights, a column each: monday to thursday" in out
    assert "thursday: broken: flaky" in out and "- not measured" in out
    assert cli.main(["history", "some-case", str(folder / "thursday"), str(folder / "monday"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [n["name"] for n in told["nights"]] == ["monday", "thursday"] and told["strips"][0]["letters"] == "fe"
    assert told["strips"][0]["changes"] == [{"night": "thursday", "before": "monday"}]
    monday, thursday = told["strips"][0]["entries"]
    assert monday["document"] == str(folder / "monday/cpu/s/some-case/m.json")
    assert thursday["error_at"] == f"{NORM['file']}:1" and Path(thursday["document"]).is_file()
    assert cli.main(["history", "--compact", "0", str(folder)]) == 0 and capsys.readouterr()
    assert cli.main(["history", "some-case", str(folder), "--json"]) == 0
    (strip,) = json.loads(capsys.readouterr().out)["strips"]
    assert {(entry["document"], entry["error_at"]) for entry in strip["entries"]} == {(None, None)}, "it is gone"


def test_a_folder_without_results_is_no_night(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whose upload failed: no night in which every cell was gone, and no mistake of the case's name."""
    empty = folder.parent / "friday"
    empty.mkdir()
    assert cli.main(["history", "some-case", str(folder / "monday"), str(empty)]) == 0
    said = capsys.readouterr()
    assert "some-case over 1 night, a column each: monday" in said.out
    assert f"{empty}: no results in it: it counts as no night" in said.err
    assert cli.main(["history", "some-case", str(empty)]) == 2
    said = capsys.readouterr()
    assert f"{empty}: no night in it" in said.err and "unknown case" not in said.err


def test_old_nights_are_folded_and_show_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["history", "some-case", str(folder)])
    before = capsys.readouterr().out
    assert cli.main(["history", "--compact", "1", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["nights.jsonl", "thursday"]
    capsys.readouterr()
    assert cli.main(["history", "some-case", str(folder)]) == 0
    assert capsys.readouterr().out == before
    whole, *others = (folder / "nights.jsonl").read_text().splitlines()
    assert len(others) == 2 and all(len(text) < len(whole) for text in others)


def test_what_a_folder_is_called_says_nothing_of_what_can_be_read(folder: Path) -> None:
    """Whether a document was left out is known, not read from the sentence that tells of it."""
    (folder / "monday").rename(folder / "monday: left out")
    names, notes = kept.compact(folder, 1)
    assert "monday: left out" in names and notes


def test_a_folder_may_be_called_as_a_setting_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`repro history CASE nights`, as docs/nightly.md names it, was taken for nights=."""
    folder.rename(folder.parent / "nights")
    monkeypatch.chdir(folder.parent)
    assert cli.main(["history", "some-case", "nights"]) == 0
    assert "some-case over 4 nights" in capsys.readouterr().out
    assert cli.main(["history", "some-case", "nights=nights"]) == 2
    assert "takes words, no settings: repro history some-case nights" in capsys.readouterr().err


def test_a_night_of_which_nothing_can_be_read_is_no_column(folder: Path) -> None:
    """It stood first, as a night in which the cell was not there."""
    for path in (folder / "tuesday").rglob("*.json"):
        path.write_text("{")
    read = kept.read([folder])
    assert [night.name for night in read.found] == ["monday", "wednesday", "thursday"]
    assert any("tuesday: no results in it: it counts as no night" in note for note in read.notes) and read.unread


def test_what_cannot_be_read_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["history", "some-cas", str(folder)]) == 2 and "did you mean 'some-case'" in capsys.readouterr().err
    assert cli.main(["history", "some-case", str(folder / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
    (folder / "monday" / "cpu" / "s" / "some-case" / "x.json").write_text("{")
    with pytest.raises(ResultsError, match=r"nothing is compacted: .*x\.json"):
        kept.compact(folder, 0)
    assert (folder / "tuesday").exists() and not (folder / kept.FILE).exists()
    (folder / "monday" / "cpu" / "s" / "some-case" / "x.json").unlink()
    kept.compact(folder, 0)
    text = (folder / kept.FILE).read_text()
    (folder / kept.FILE).write_text(text[:-20])
    notes: list[str] = []
    assert len(kept.ledger(folder, notes)) == 3 and "cut off" in notes[0]
    (folder / kept.FILE).write_text("[3]\n" + text)
    with pytest.raises(ResultsError, match=r"nights\.jsonl:1: damaged"):
        kept.ledger(folder, [])
    (folder / kept.FILE).write_text(text.replace('"schema":[2]', '"schema":[9]'))
    with pytest.raises(ResultsError, match="a newer repro-matrix wrote it"):
        kept.ledger(folder, [])


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (0, "FIX_HODLS", "verdict 'FIX_HODLS' is none"),
        (0, 7, "verdict 7 is none"),
        (1, {"fired": 2}, "outcomes {'fired': 2} are none"),
        (1, {"fires": -2}, "are counted from 1 on"),
        (1, {"fires": "2"}, "are counted from 1 on"),
        (1, {"fires": True}, "are counted from 1 on"),
        (1, ["fires"], "are none"),
        (2, "norm", "is no list of names"),
        (2, [1], "is no list of names"),
        (3, None, "are no texts"),
        (4, 5, "are no texts"),
        (5, [], "are no texts"),
    ],
)
def test_nonsense_in_an_arm_of_a_folded_night_is_damage(folder: Path, place: int, value: Any, told: str) -> None:
    kept.compact(folder, 0)
    first, *others = kept.ledger(folder, [])
    (cell,) = first.cells.values()
    honest = cell["arms"]["broken"][place]
    cell["arms"]["broken"][place] = value
    with pytest.raises(ValueError, match=r"cpu current .*, arm broken: ") as error:
        from_json(json.loads(json.dumps(to_json(first))))
    assert told in str(error.value)
    kept._write(folder, [first, *others])
    with pytest.raises(ResultsError, match=r"nights\.jsonl:1: damaged: .*arm broken"):
        kept.ledger(folder, [])
    cell["arms"]["broken"][place] = honest
    assert from_json(json.loads(json.dumps(to_json(first)))) == first


def test_who_has_no_night_yet_or_forgets_the_case_is_told_what_to_write(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(project, "current", lambda: SimpleNamespace(results=tmp_path / "none"))
    assert cli.main(["history", "some-case"]) == 2
    assert "no night is kept there yet: `repro nightly" in capsys.readouterr().err
    assert cli.main(["history", str(folder / "monday")]) == 2
    assert f"the case comes first: repro history CASE {folder / 'monday'}" in capsys.readouterr().err


def test_nights_without_a_common_cell_are_shown_and_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "friday", {"broken": FIRES}, 5.0, model="n")
    assert cli.main(["history", "some-case", str(folder)]) == 0
    said = capsys.readouterr()
    assert "thursday and friday have no cell in common" in said.err
    assert "  ····f  broken" in said.out and "  f~-e·  broken" in said.out


def test_the_page_shows_what_changed_over_the_nights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = folder.parent / "page.html"
    three = [str(folder / name) for name in ("monday", "tuesday", "thursday")]
    assert cli.main(["report", *three, "--output", str(target)]) == 0
    text = target.read_text()
    assert 'id="nights"' in text and "1 arms changed their answer" in text and "1 of 6" in text
    assert cli.main(["report", three[0], "--nights", str(folder), "--output", str(target)]) == 0
    assert "4 nights, monday to thursday" in target.read_text()
    assert cli.main(["report", three[0], "--output", str(target)]) == 0
    assert 'id="nights"' not in target.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--compact", "7"], "--compact takes one folder of nights, and no case (got none)"), ([], "repro history CASE")],
)  # fmt: skip
def test_history_of_nothing_says_what_it_takes(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["history", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
