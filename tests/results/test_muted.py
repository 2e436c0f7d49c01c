"""A mute is silent until its day, about an answer only, and an error afterwards."""

from __future__ import annotations

import json
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from judging import document, observation, ok
from repro_matrix.cli import main as cli
from repro_matrix.config import catalog as catalogue
from repro_matrix.errors import ConfigError
from repro_matrix.report import formats, summary
from repro_matrix.report.view import cell
from repro_matrix.results import quarantine as muted
from repro_matrix.results import rows
from repro_matrix.results.exit_code import exit_code
from repro_matrix.results.quarantine import Mute
from repro_matrix.text import WIDTH

TODAY = date(2026, 11, 22)
OK = observation(ok(0), ok(1))
KEY = "fsdp-generate/qwen2-0.5b-fsdp"


def made(expected: str = "unexpected", outcome: str = "clean", **changes: Any) -> dict[str, Any]:
    found = document({"broken": [(outcome, OK)], "fix": [(outcome, OK)]}, {"fix": "FIX_BROKEN"}, key=KEY, **changes)
    found["verdicts"]["fix"] |= {"expected": expected, "expectation": "FIX_HOLDS"}
    return found


def mute(days: int = 1, **changes: Any) -> Mute:
    return Mute(**{"cell": KEY, "owner": "ada", "until": TODAY + timedelta(days), "reason": "#12", **changes})


@given(
    st.sampled_from(["unexpected", "expected", "unset", "as predicted", "differs from cpu"]),
    st.sampled_from(["clean", "infra", "fires"]), st.integers(-2, 2), st.sampled_from([None, "fix", "broken"]),
    st.sampled_from([KEY, "other/cell"]),
)  # fmt: skip
def test_only_a_live_mute_of_that_arm_changes_what_differs(
    expected: str, outcome: str, days: int, arm: str | None, key: str
) -> None:
    one = made(expected, outcome)
    found = muted.applied([one], [mute(days, arm=arm, cell=key)], TODAY)
    (after,) = found.documents
    silent = expected == "unexpected" and days >= 0 and arm != "broken" and key == KEY
    assert after["verdicts"]["fix"]["expected"] == ("muted" if silent else expected)
    assert bool(found.expired) == (days < 0 and key == KEY)
    before, now = exit_code([one], 1), exit_code(found.documents, 1)
    assert now == (before if not silent else 3 if outcome == "infra" else 0), "what was not measured is never muted"
    assert one == made(expected, outcome), "what is stored stays"


def test_what_gave_no_answer_stays_what_it_is() -> None:
    one = made(outcome="infra")
    one["verdicts"]["fix"] |= {"name": "INCONCLUSIVE", "measured": False}
    (after,) = muted.applied([one], [mute()], TODAY).documents
    assert after["verdicts"]["fix"]["expected"] == "unexpected" and exit_code([after], 1) == 1


def test_it_is_said_in_the_summary_and_in_every_format() -> None:
    (one,) = muted.applied([made()], [mute()], TODAY).documents
    listed = rows.arm_rows(one)
    said = list(summary.lines([one], listed))
    assert "MUTED, known and owned (`repro mute`): 1 arm" in said and all(len(text) <= WIDTH for text in said)
    assert any("FIX_BROKEN: #12 (ada, until 2026-11-23)" in text for text in said)
    assert not any(text.startswith("DIFFERS") for text in said)
    shown = [cell(one)]
    assert "Muted: known, and owned" in formats.as_markdown(shown) and "ada" in formats.as_markdown(shown)
    junit = formats.as_junit(shown)
    assert "<skipped" in junit and "muted by ada until 2026-11-23: #12" in junit and "<failure" not in junit
    assert shown[0].states == ("muted",) and not shown[0].odd


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(muted, "file", lambda: tmp_path / "muted.yaml")
    monkeypatch.setattr(muted.read, "__defaults__", (tmp_path / "muted.yaml",))
    return tmp_path / "muted.yaml"


def test_the_verb_writes_lists_and_removes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = catalogue.load()
    case = known.cases["fsdp-generate"]
    key = f"fsdp-generate/{case.axes.model[0]}-{case.axes.strategy[0]}"
    until = str(datetime.now(timezone.utc).date() + muted.LONGEST)
    words = ["--owner", "Ada Ü", "--until", until, "--reason", "https://example.org/12: waits"]
    assert cli.main(["mute", key, *words]) == 0
    assert [m.owner for m in muted.read(file)] == ["Ada Ü"]
    assert cli.main(["mute", f"{key}-ranks=4", *words, "--arm", "broken"]) == 0
    capsys.readouterr()
    assert cli.main(["mute"]) == 0 and "Ada Ü" in capsys.readouterr().out
    assert cli.main(["mute", key, "--remove"]) == 0 and len(muted.read(file)) == 1
    for wrong, told in (
        (["mute", key[:-1], *words], f"did you mean {key!r}"),
        (["mute", "nowhere/at-all", *words], " cells are known; `repro list --json` names them: key)"),
        (["mute", "train-step/qwen1.5-0.5b-fsd", *words], "; did you mean 'train-step/qwen1.5-0.5b-fsdp'? Also near:"),
        (["mute", key, *words, "--arm", "brokn"], "did you mean 'broken'"),
        (["mute", key, *words[:2], "--until", "2001-01-01", *words[4:]], "that day is over"),
        (["mute", key, *words[:2], "--until", "soon", *words[4:]], "a day, as"),
        (["mute", key, *words[:2], "--until", "2999-01-01", *words[4:]], "at most 366 days from today"),
        (["mute", key, "--owner", "x"], "--until, --reason missing"),
        (["mute", key, "--remove"], "is not muted"),
        (["mute", key, "--owner", " ", *words[2:]], "--owner: an empty value was given"),
        (["mute", "--owner", "Ada", "--remove"], "--owner, --remove: of which cell?"),
    ):
        capsys.readouterr()
        assert cli.main(wrong) == 2
        said = capsys.readouterr().err
        assert told in said and "muted.yaml" not in said, "what is wrong stands on the command line"
        assert len(said) < 500, "the nearest few and how many there are, not all of them"
    file.write_text(file.read_text().replace(until, "2001-01-01"))
    assert cli.main(["mute"]) == 2 and "EXPIRED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("muted: [{cell: x, owner: a, until: 2026-01-01}]", "muted.0.reason' is missing"),
        ("muted: [{cell: x, owner: a, until: 2026-01-01, reason: r, untill: 1}]", "did you mean 'until'"),
        ("muted: [{cell: x, owner: a, until: never, reason: r}]", "muted.0.until"),
        ("mutes: []", "did you mean 'muted'"),
        ("muted: [", "cannot be read"),
        ("muted: []\nmuted: [{cell: x, owner: a, until: 2026-12-01, reason: r}]", "key 'muted' given twice"),
        ("muted: [{cell: x, owner: a, until: 2026-12-01, until: 2026-12-24, reason: r}]", "key 'until' given twice"),
        ("muted:\n" + "- {cell: x, owner: a, until: 2026-01-01, reason: r}\n" * 2, "x: muted twice"),
        ("muted: [{cell: x, owner: a, until: 2026-13-01, reason: r}]", "cannot be read"),
        ("[]", "the whole file"),
        ("muted: [{cell: x, owner: a, until: 2999-01-01, reason: r}]", "x: until 2999-01-01: at most 366 days"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(file: Path, text: str, told: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"muted\.yaml") as error:
        muted.read(file)
    assert told in str(error.value)


def test_a_file_that_somebody_edited_obeys_no_terminal_and_is_made_where_there_is_none(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(muted.written([mute(cell=KEY, reason="gone\x1b[2J\x1b]0;x\x07 \u202egnitset\u200b")]))
    assert cli.main(["mute"]) in (0, 2)
    told = capsys.readouterr()
    assert not [c for c in told.out + told.err if not c.isprintable() and c != "\n"] and "gone" in told.out
    monkeypatch.setattr(muted, "file", lambda: file.parent / "results" / "muted.yaml")
    known = catalogue.load().cases["fsdp-generate"].axes
    key = f"fsdp-generate/{known.model[0]}-{known.strategy[0]}"
    until = str(datetime.now(timezone.utc).date())
    words = ["--owner", "ada", "--until", until, "--reason", "r", "--json"]
    file.unlink()
    assert cli.main(["mute", key, *words]) == 0
    assert json.loads(capsys.readouterr().out)[0]["owner"] == "ada" and (file.parent / "results").is_dir()


def test_a_cell_that_there_is_not_any_more_is_an_error_of_the_run(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(muted.written([mute(cell="fsdp-generate/nobody-fsdp")]))
    words = ["matrix", "case=fsdp-generate", "hardware=cpu", "--plan", "--json"]
    assert cli.main(words) == 2 and "no cell 'fsdp-generate/nobody-fsdp'; did you mean" in capsys.readouterr().err
    file.unlink()
    assert cli.main(words) == 0 and json.loads(capsys.readouterr().out)
