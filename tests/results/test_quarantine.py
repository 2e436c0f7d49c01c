"""A quarantine entry is silent until its day, about an answer only, and an error afterwards."""

from __future__ import annotations

import json
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import document, observation, ok
from repro_matrix.cli import main as cli
from repro_matrix.errors import ConfigError
from repro_matrix.report import run_summary
from repro_matrix.results import quarantine
from repro_matrix.results.exit_code import exit_code
from repro_matrix.results.quarantine import Quarantine
from repro_matrix.results.summary import rows_of
from repro_matrix.text import WIDTH

TODAY = date(2026, 11, 22)
OK = observation(ok(0), ok(1))
KEY = "fsdp-generate/qwen2-0.5b-fsdp"


def made(expected: str = "unexpected", outcome: str = "passed", **changes: Any) -> dict[str, Any]:
    found = document({"unfixed": [(outcome, OK)], "fix": [(outcome, OK)]}, {"fix": "NOT_FIXED"}, cell_id=KEY, **changes)
    found["verdicts"]["fix"] |= {"expected": expected, "expectation": "FIXED"}
    return found


def entry(days: int = 1, **changes: Any) -> Quarantine:
    return Quarantine(**{"cell": KEY, "owner": "ada", "until": TODAY + timedelta(days), "reason": "#12", **changes})


@given(
    st.sampled_from(["unexpected", "expected", "no_expectation", "matches_cpu", "differs_from_cpu"]),
    st.sampled_from(["passed", "infra_error", "reproduced"]),
    st.integers(-2, 2),
    st.sampled_from([None, "fix", "unfixed"]),
    st.sampled_from([KEY, "other/cell"]),
)
def test_only_a_live_entry_of_that_variant_changes_what_differs(
    expected: str, outcome: str, days: int, variant: str | None, key: str
) -> None:
    one = made(expected, outcome)
    found = quarantine.applied([one], [entry(days, variant=variant, cell=key)], TODAY)
    (after,) = found.documents
    silent = expected == "unexpected" and days >= 0 and variant != "unfixed" and key == KEY
    assert after["verdicts"]["fix"]["expected"] == ("quarantined" if silent else expected)
    assert bool(found.expired) == (days < 0 and key == KEY)
    before, now = exit_code([one], 1), exit_code(found.documents, 1)
    assert now == (before if not silent else 3 if outcome == "infra_error" else 0), (
        "what was not measured is never quarantined"
    )
    assert one == made(expected, outcome), "what is stored stays"


def test_what_gave_no_answer_stays_what_it_is() -> None:
    one = made(outcome="infra_error")
    one["verdicts"]["fix"] |= {"name": "INCONCLUSIVE", "measured": False}
    (after,) = quarantine.applied([one], [entry()], TODAY).documents
    assert after["verdicts"]["fix"]["expected"] == "unexpected" and exit_code([after], 1) == 1


def test_summary_lists_quarantined_variants_with_their_owner() -> None:
    stored: Any = made()
    rows = quarantine.mark_rows(rows_of(stored, None, {}), [entry()], TODAY)
    assert [(row.variant, row.state) for row in rows if row.quarantine] == [("fix", "quarantined")]
    shown = list(run_summary.sections([stored], rows))
    assert "QUARANTINED: 1 variant" in shown and any("#12 (ada, until 2026-11-23)" in text for text in shown)
    assert all(len(text) <= WIDTH for text in shown) and not any(text.startswith("DIFFERENT") for text in shown)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(quarantine, "file", lambda: tmp_path / "quarantine.yaml")
    monkeypatch.setattr(quarantine.read, "__defaults__", (tmp_path / "quarantine.yaml",))
    return tmp_path / "quarantine.yaml"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("quarantined: [{cell: x, owner: a, until: 2026-01-01}]", "quarantined.0.reason' is missing"),
        ("quarantined: [{cell: x, owner: a, until: 2026-01-01, reason: r, untill: 1}]", "did you mean 'until'"),
        ("quarantined: [{cell: x, owner: a, until: never, reason: r}]", "quarantined.0.until"),
        ("quarantine: []", "did you mean 'quarantined'"),
        ("quarantined: [", "cannot be read"),
        (
            "quarantined: []\nquarantined: [{cell: x, owner: a, until: 2026-12-01, reason: r}]",
            "key 'quarantined' given twice",
        ),
        (
            "quarantined: [{cell: x, owner: a, until: 2026-12-01, until: 2026-12-24, reason: r}]",
            "key 'until' given twice",
        ),
        ("quarantined:\n" + "- {cell: x, owner: a, until: 2026-01-01, reason: r}\n" * 2, "x: quarantined twice"),
        ("quarantined: [{cell: x, owner: a, until: 2026-13-01, reason: r}]", "cannot be read"),
        ("[]", "the whole file"),
        ("quarantined: [{cell: x, owner: a, until: 2999-01-01, reason: r}]", "x: until 2999-01-01: at most 366 days"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(file: Path, text: str, told: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"quarantine\.yaml") as error:
        quarantine.read(file)
    assert told in str(error.value)


def test_a_cell_that_there_is_not_any_more_is_an_error_of_the_run(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("quarantined: [{cell: fsdp-generate/nobody-fsdp, owner: a, until: 2026-12-01, reason: r}]")
    words = ["matrix", "case=fsdp-generate", "hardware=cpu", "--dry-run", "--json"]
    assert cli.main(words) == 2 and "no cell 'fsdp-generate/nobody-fsdp'; did you mean" in capsys.readouterr().err
    file.unlink()
    assert cli.main(words) == 0 and json.loads(capsys.readouterr().out)
