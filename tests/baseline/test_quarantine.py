"""A quarantine entry accepts a measured difference until its date, and is an error afterwards."""

from __future__ import annotations

import json
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import document, observation, ok, summary_rows
from report_cells import cases_of
from repro_matrix.baseline import quarantine
from repro_matrix.baseline.derivation import exit_code
from repro_matrix.baseline.quarantine import Quarantine
from repro_matrix.cli import main as cli
from repro_matrix.config import catalog
from repro_matrix.errors import ConfigError
from repro_matrix.report.attention import ATTENTION
from repro_matrix.report.headline import headline
from repro_matrix.report.result_lines import result_lines
from repro_matrix.results.rows import Row

TODAY = date(2026, 11, 22)
OK = observation(ok(0), ok(1))
REAL = "ddp-ready-once/qwen1.5-0.5b-ddp"
KEY = "fsdp-generate/qwen2-0.5b-fsdp"


def made(expected: str = "unexpected", outcome: str = "passed", **verdict: Any) -> list[Row]:
    found = document(
        {"unfixed": [(outcome, OK)], "fix": [(outcome, OK)]}, {"fix": "NOT_FIXED"}, cell_id=KEY
    )
    found["verdicts"]["fix"] |= {"expected": expected, "expectation": "FIXED", **verdict}
    return summary_rows(found)


def entry(days: int = 1, **changes: Any) -> Quarantine:
    return Quarantine(
        **{
            "cell": KEY,
            "owner": "ada",
            "until": TODAY + timedelta(days),
            "reason": "#12",
            **changes,
        }
    )


@given(
    st.sampled_from(
        ["unexpected", "expected", "no_expectation", "matches_cpu", "differs_from_cpu"]
    ),
    st.sampled_from(["passed", "infra_error", "reproduced"]),
    st.integers(-2, 2),
    st.sampled_from([None, "fix", "unfixed"]),
    st.sampled_from([KEY, "other/cell"]),
)
def test_mark_rows_changes_only_a_difference_that_an_active_entry_covers(
    expected: str, outcome: str, days: int, variant: str | None, key: str
) -> None:
    rows, entries = made(expected, outcome), [entry(days, variant=variant, cell=key)]
    after = quarantine.mark_rows(rows, entries, TODAY)
    accepted = expected == "unexpected" and days >= 0 and variant != "unfixed" and key == KEY
    assert [row.state for row in after] == [None, "quarantined" if accepted else expected]
    assert bool(quarantine.expired(rows, entries, TODAY)) == (days < 0 and key == KEY)
    before, now = exit_code(rows, 1), exit_code(after, 1)
    assert now == (before if not accepted else 3 if outcome == "infra_error" else 0)


def test_summary_lists_quarantined_variants_that_were_measured() -> None:
    lost = made(outcome="infra_error", name="INCONCLUSIVE", measured=False)
    assert quarantine.mark_rows(lost, [entry()], TODAY) == lost and exit_code(lost, 1) == 1
    rows = quarantine.mark_rows(made(), [entry()], TODAY)
    shown = list(result_lines(headline(rows, cases_of(rows))))
    assert "QUARANTINED: 1 variant" in shown and any(
        "#12 (ada, until 2026-11-23)" in text for text in shown
    )
    assert not any(text.startswith(tuple(ATTENTION.values())) for text in shown)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(quarantine, "file", lambda: tmp_path / "quarantine.yaml")
    return tmp_path / "quarantine.yaml"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("quarantined: [{cell: x, owner: a, until: 2026-01-01}]", "quarantined.0.reason"),
        ("quarantined: [{cell: x, owner: a, until: never, reason: r}]", "quarantined.0.until"),
        ("quarantine: []", "did you mean 'quarantined'"),
        (
            "quarantined: [{cell: x, owner: a, until: 2026-12-01, until: 2026-12-24, reason: r}]",
            "given twice",
        ),
        (
            "quarantined: [{cell: x, owner: a, until: 2999-01-31, reason: r}]",
            "quarantined.0: x: until 2999-01-31",
        ),
        (
            "quarantined: [&x {cell: x, owner: a, until: 2026-01-01, reason: r}, *x]",
            "quarantined twice",
        ),
    ],
)
def test_read_wrong_file_names_it_and_its_key(file: Path, text: str, key: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"quarantine\.yaml") as error:
        quarantine.read_quarantine()
    assert key in str(error.value)


@pytest.mark.parametrize(
    ("suffix", "exists"), [("", True), ("-ranks=4", True), ("-env.A=1", True), ("x", False)]
)
def test_check_accepts_a_cell_with_other_settings(suffix: str, exists: bool) -> None:
    try:
        quarantine.check_quarantine([entry(cell=REAL + suffix)], catalog.load())
    except ConfigError as error:
        assert not exists and REAL + suffix in str(error)
    else:
        assert exists


def test_run_with_an_entry_for_an_unknown_cell_is_an_error(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(
        "quarantined: [{cell: fsdp-generate/nobody-fsdp, owner: a, until: 2026-12-01, reason: r}]"
    )
    words = ["matrix", "case=fsdp-generate", "hardware=cpu", "--dry-run", "--json"]
    assert (
        cli.main(words) == 2
        and "'fsdp-generate/nobody-fsdp'; did you mean" in capsys.readouterr().err
    )
    file.unlink()
    assert cli.main(words) == 0 and json.loads(capsys.readouterr().out)
