"""Lists on a terminal: grouped, never wider than it, nothing left out without a word."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repro_matrix.analysis.claims.ledger import ClaimRow, Evidence
from repro_matrix.config.vocabulary import VerdictName
from repro_matrix.report import listing
from repro_matrix.report import terminal as report
from repro_matrix.results.rows import ATTENTION
from rich.console import Console

ODD = st.text(max_size=300)
WIDTHS = st.sampled_from([40, 60, 80, 119, 120])


def claim(**changes: Any) -> ClaimRow:
    made = {"case": "some-case", "id": "1a", "text": "it helps", "source": "a/b#1", "status": "upheld",
            "detail": "2 measurements: fix FIX_HOLDS; and 1 more", "evidence": (),
            "brief": "2 measurements"}  # fmt: skip
    return ClaimRow(**{**made, **changes})


def seen(holds: bool | None, **changes: Any) -> Evidence:
    made = {"document": "results/x.json", "case": "some-case", "arm": "fix", "model": "m", "strategy": "fsdp",
            "ranks": "2 ranks", "stack": "current", "hardware": "cpu", "setting": "", "predicted": "FIX_HOLDS",
            "measured": "FIX_HOLDS (clean 3/3)", "holds": holds}  # fmt: skip
    return Evidence(**{**made, **changes})


@given(ODD, ODD, st.sampled_from(listing.STATUSES), WIDTHS)
def test_no_claim_is_wider_than_its_line_and_each_has_one(text: str, detail: str, status: str, width: int) -> None:
    rows = [claim(text=text, detail=detail, status=status, id=f"1a-{n}") for n in range(3)]
    told = list(listing.claims(rows, width))
    assert all(len(line) <= width and line.isprintable() for line in told)
    assert [len(re.findall(rf" 1a-{n}[ :]", "\n".join(told))) for n in range(3)] == [1, 1, 1]
    shown = list(listing.evidence(claim(text=text, detail=detail, evidence=(seen(True, measured=detail),)), width))
    assert all(line.isprintable() for line in shown)


def test_a_claim_is_its_status_its_words_and_when_it_holds() -> None:
    rows = [claim(), claim(id="1b", status="conditional", detail="holds for torch <= 2.5; not for >= 2.6", brief="")]
    assert list(listing.claims(rows, 120)) == [
        "", "some-case",
        "  upheld       1a  it helps | 2 measurements",
        "  conditional  1b  it helps | holds for torch <= 2.5; not for >= 2.6",
        "", "2 claims: 1 conditional, 1 upheld. `repro claims ID` shows the evidence.",
    ]  # fmt: skip
    narrow = list(listing.claims(rows, 80))
    assert narrow[4:6] == ["  conditional  it helps", "               1b: holds for torch <= 2.5; not for >= 2.6"]
    long = [claim(text="some words " * 20, id="a-name-of-some-length")]
    assert list(listing.claims(long, 80))[2].count("some words") == 5
    assert " ".join(" ".join(listing.claims(long, 40)).split()).count("some words") == 20, "nothing is cut"


def test_the_evidence_is_a_list_what_decides_first_and_the_rest_by_reason() -> None:
    row = claim(evidence=(seen(None, measured="skipped: needs 2 GPUs"), seen(None, measured="skipped: needs 2 GPUs"),
                          seen(True), seen(False, stack="old")))  # fmt: skip
    told = list(listing.evidence(row, 120))
    titles = [line for line in told if line[:1].isalnum()]
    assert titles == ["1a: it helps", "bears it out: 1", "speaks against it: 1", "decides nothing: 2"]
    assert "   2  skipped: needs 2 GPUs [fix]" in told and any("results/x.json" in line for line in told)


def test_cases_are_grouped_and_their_titles_are_whole() -> None:
    made = {"cells": 1, "arms": 3, "models": {"m"}, "strategies": {"a", "b", "c"}, "simulated": None, "kind": "failure"}
    entries = [{**made, "case": "one", "title": "a failure " * 12},
               {**made, "case": "two", "title": "t", "kind": "control"},
               {**made, "case": "three", "title": "t", "simulated": "no device"}]  # fmt: skip
    told = list(listing.cases(entries, 80))
    assert [line.partition(":")[0] for line in told if line[:1].isalpha()] == [
        "known failures",
        "simulated",
        "controls",
    ]
    assert (
        "  one    1 cell, 3 arms: m / 3 strategies" in told
        and " ".join(" ".join(told).split()).count("a failure") == 12
    )
    assert all(len(line) <= 80 for line in told)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), ODD), max_size=12), WIDTHS)
def test_doctor_names_every_case_and_every_reason(found: list[tuple[str, bool, str]], width: int) -> None:
    rows = [
        {"case": f"case-{name}", "model": "m", "strategy": "s", "simulated": None, "runs": runs,
         "reason": None if runs else f"needs {reason}", "skipped_arms": {"fix": f"needs {reason}"} if runs else {}}
        for name, runs, reason in found
    ]  # fmt: skip
    told = list(listing.runs_here(rows, width))
    assert all(line.isprintable() for line in told)
    text = " ".join(" ".join(told).split())
    assert all(row["case"] in text for row in rows)
    counted = sum(int(line.split()[0]) for line in told if line[:4].strip().isdigit())
    assert counted >= len(rows)


@pytest.mark.parametrize("width", [80, 119, 120, 200])
def test_a_column_that_has_no_room_stands_below(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    shown = Console(file=out, force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(report, "console", lambda stderr=False: shown)
    report.print_table("a title", ["case", "reason"], [["one", "because of this"], ["two", ""]], narrow=("reason",))
    told = [line.rstrip() for line in out.getvalue().splitlines()]
    below = width < 120
    assert ("    reason: because of this" in told) is below and any("because of this" in line for line in told)
    assert sum("case" in line for line in told) == 1 and any(line.startswith("two") for line in told)


@pytest.mark.parametrize(("said", "width"), [("", 120), ("40", 40), ("7", 40), ("200", 120), ("many", 120)])
def test_off_a_terminal_lines_are_as_wide_as_columns_says(
    said: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", said)
    assert report.columns() == width
    report.print_wrapped("one word " * 40 + "\x1b[2J" + "/a-path" * 20 + " and")
    told = capsys.readouterr().out.splitlines()
    assert {len(line) <= width for line in told if "/" not in line} == {True} and len(told) > 3
    assert any("/a-path" * 20 in line for line in told), "a path is copied in one piece"


def test_no_color_is_obeyed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, as far as rich can tell
    monkeypatch.setenv("COLUMNS", "80")
    report.print_lines(["CASES measured", "! loud  1 cell  FIX_BROKEN", "  upheld       1a  it helps"])
    assert "\x1b[3" not in capsys.readouterr().out


def test_a_line_that_begins_with_a_verdict_is_no_title(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard", highlight=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(report, "console", lambda stderr=False: out)
    report.print_lines(["CASES measured", "FIX_HOLDS 224, HEALTHY 98"])
    title, counts = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert title == "\x1b[1mCASES measured\x1b[0m" and counts.startswith("\x1b[32mFIX_HOLDS\x1b[0m 224")


def test_no_word_has_a_colour_that_vanishes_on_somebody_s_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Yellow and cyan did on white, dim on black."""
    out = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard", highlight=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(report, "console", lambda stderr=False: out)
    words = [*VerdictName.__args__, *listing.STATUSES, *ATTENTION, "fires", "clean", "hang", "infra", "skipped"]  # type: ignore[attr-defined]
    report.print_table(
        "all", ["case", "verdict", "reason"], [["a", word, "because " * 20] for word in words], ("reason",)
    )
    report.print_lines([*words, *(f"  {word}  it" for word in words), "NEW: one", "! a case"])
    told = out.file.getvalue()  # type: ignore[attr-defined]
    used = {code for found in re.findall(r"\x1b\[([0-9;]*)m", told) for code in found.split(";")}
    assert {"1", "31", "32"} <= used <= {"0", "1", "31", "32", "35"}, "bold, red, green, magenta"
    assert all(word in told for word in words)


@given(ODD, WIDTHS, st.integers(1, 3))
def test_a_plan_is_a_line_a_case_and_what_is_not_launched_stands_by_reason(why: str, width: int, repeat: int) -> None:
    def arm(case: str, cell: str, skipped: str | None = None) -> dict[str, Any]:
        return {"case": case, "cell": cell, "model": "m", "strategy": "fsdp", "attempts": repeat, "skipped": skipped}

    items = [
        arm("a-case", "1"),
        arm("a-case", "1"),
        arm("a-case", "2"),
        arm("other", "3"),
        arm("other", "3", "w" + why),
    ]
    told = list(listing.planned(items, width))
    assert all(len(line) <= width for line in told)
    tries = f", {3 * repeat} attempts" if repeat > 1 else ""
    assert told[0].startswith(f"a-case  2 cells, 3 arms{tries}"[:width]) and "m / fsdp" in "".join(told)
    assert "not launched: 1 arm" in told and "[other]" in "".join(told)
    whole = f"{4 * repeat} attempts of 4 arms in 3 cells; `--all` names every arm"
    assert " ".join(told).endswith(whole)
    assert list(listing.planned([], width)) == []
