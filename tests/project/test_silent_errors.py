"""docs/examples/silent-errors.md shows what docs/examples/numbers/results.json holds."""

from __future__ import annotations

from bench import silent_errors


def test_table_shows_the_stored_results() -> None:
    known, results = silent_errors.cases(), silent_errors.stored()
    text = silent_errors.PAGE.read_text(encoding="utf-8")
    assert silent_errors.table(known, results) in text
    assert set(results) <= set(known)


def test_scripts_exist_and_stay_short() -> None:
    for case in silent_errors.cases().values():
        lines = (silent_errors.FOLDER / case["script"]).read_text(encoding="utf-8").splitlines()
        assert 15 < len(lines) < 70
