"""What differs between two sets of rows: nothing against itself, the opposite when compared backwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from repro_matrix.analysis import diff as diffs
from repro_matrix.analysis.diff import Diff, compare
from repro_matrix.analysis.inputs import VariantResult, load_folder, load_side
from repro_matrix.cli import main as cli
from repro_matrix.errors import ConfigError, ResultsError
from results_by_hand import BOOM, FAILED, FIRED, HOLDS, REPRODUCED, SETTINGS, SIDES, SKIPPED, cell, variant, write

Rows = list[VariantResult]


def between(one: Rows, other: Rows) -> Diff:
    return compare(one, other, need_common=False)


@given(SIDES)
def test_compare_same_rows_no_difference(rows: Rows) -> None:
    diff = between(rows, rows)
    assert (diff.changes, diff.exit_code, diff.incomparable) == ((), 0, ())


PAIRS = [("new_failure", "failure_gone"), ("fix_stopped_working", "fix_works_now"), ("became_flaky", "became_steady"),
         ("reproduces_now", "no_longer_reproduces"), ("not_measured", "newly_measured"),
         ("cell_removed", "cell_added"), ("different_failure", "different_failure")]  # fmt: skip
OPPOSITE = dict(PAIRS) | {other: one for one, other in PAIRS}


@given(SIDES, SIDES)
def test_compare_backwards_gives_opposite(one: Rows, other: Rows) -> None:
    there, back = between(one, other), between(other, one)
    expected = sorted((OPPOSITE[c.kind], c.variant, repr(c.after), repr(c.before)) for c in there.changes)
    assert sorted((c.kind, c.variant, repr(c.before), repr(c.after)) for c in back.changes) == expected
    assert (there.cells, there.variants, len(there.incomparable)) == (back.cells, back.variants, len(back.incomparable))


@given(SIDES, SIDES)
def test_compare_counts_every_cell_once_and_one_result_change_per_variant(one: Rows, other: Rows) -> None:
    diff = between(one, other)
    sizes = [len({(row.key, row.hardware, row.stack) for row in side}) for side in (one, other)]
    assert len(diff.select(["cell_removed", "cell_added"])) + 2 * diff.cells == sum(sizes)
    results = [c for c in diff.changes if c.variant]
    assert len(results) == len({(c.row.key, c.row.hardware, c.row.stack, c.variant) for c in results})
    assert "".join(diffs.describe_diff(diff, everything=True)).isprintable()
    json.dumps(diffs.diff_to_json(diff), allow_nan=False)


OTHER_CHECK = variant("other_failure", 3, "check x")
LATE_HANG = variant(kinds={"passed": 2, "hang": 1}, failure_ids=("x",))
FLAKY = replace(BOOM, kinds={"other_failure": 2, "passed": 1})


@pytest.mark.parametrize(
    ("name", "old", "new", "kind", "code"),
    [
        ("unfixed", REPRODUCED, variant(), "no_longer_reproduces", 1),
        ("unfixed", REPRODUCED, BOOM, "no_longer_reproduces", 1),
        ("unfixed", variant(), REPRODUCED, "reproduces_now", 1),
        ("fix", HOLDS, REPRODUCED, "fix_stopped_working", 1),
        ("fix", BOOM, HOLDS, "fix_works_now", 1),
        ("new", None, HOLDS, "newly_measured", 0),
        ("new", None, SKIPPED, None, 0),
        ("control", variant(), BOOM, "new_failure", 1),
        ("control", variant(), LATE_HANG, "new_failure", 1),
        ("control", BOOM, OTHER_CHECK, "different_failure", 1),
        ("control", BOOM, replace(BOOM, text="another"), None, 0),
        ("control", BOOM, FLAKY, "became_flaky", 1),
        ("control", variant(), SKIPPED, "not_measured", 3),
    ],
)
def test_compare_variant_gives_kind(
    name: str, old: VariantResult | None, new: VariantResult, kind: str | None, code: int
) -> None:
    same = {} if name in ("unfixed", "control") else {"unfixed": REPRODUCED}
    diff = between(cell(same | ({name: old} if old else {})), cell(same | {name: new}))
    assert {change.variant: change.kind for change in diff.changes} == ({name: kind} if kind else {})
    assert diff.exit_code == code


def test_compare_one_stack_each_goes_across_several_by_name() -> None:
    here = cell({"control": variant()}, path="one.json")
    there = cell({"control": replace(BOOM, error_at="f.py:7")}, path="other.json", stack="old")
    across = between(here, there)
    assert across.across == {"stack": ("now", "old")} and [c.kind for c in across.changes] == ["new_failure"]
    (change,) = diffs.diff_to_json(across)["changes"]
    assert change["documents"] == ["one.json", "other.json"] and change["after"]["error_at"] == "f.py:7"
    by_name = between([*here, *there], here)
    assert not by_name.across and [c.kind for c in by_name.changes] == ["cell_removed"] and by_name.exit_code == 3


def test_compare_cell_measured_twice_uses_newest() -> None:
    older, newer = cell({"control": BOOM}, path="a"), cell({"control": variant()}, started=2.0, path="b")
    assert between([*newer, *older], newer).changes == ()


def test_compare_other_settings_is_listed_not_compared() -> None:
    other = {**SETTINGS, "steps": 2}
    diff = between(cell({"control": variant(settings=SETTINGS)}), cell({"control": replace(BOOM, settings=other)}))
    ((row, reason),) = diff.incomparable
    assert diff.changes == () and row.variant == "control" and "steps" in reason


def test_describe_diff_limits_groups_unless_everything() -> None:
    one = [row for n in range(30) for row in cell({"control": variant()}, case=f"c{n}", key=f"c{n}/m")]
    other = [replace(row, kinds=BOOM.kinds, failure_ids=BOOM.failure_ids) for row in one]
    short, full = (list(diffs.describe_diff(between(one, other), everything)) for everything in (False, True))
    assert len(short) < len(full) and any("18 more" in line for line in short)


# -- agreement


@given(SIDES, SIDES)
def test_agreement_is_symmetric_and_counts_disagreements(one: Rows, other: Rows) -> None:
    try:
        there = diffs.measure_agreement(one, other)
    except ConfigError:
        with pytest.raises(ConfigError):
            diffs.measure_agreement(other, one)
        return
    counts = attrgetter("case", "agree", "both", "one_only", "other_settings")
    assert [counts(each) for each in there] == [counts(each) for each in diffs.measure_agreement(other, one)]
    for each in there:
        low, high = each.interval
        assert each.both - each.agree == len(each.disagreements) and 0 <= low <= high <= 1
    assert all(each.isprintable() for each in diffs.describe_agreement(there))
    json.dumps(diffs.agreement_to_json(there), allow_nan=False)


def test_agreement_gpu_against_cpu_is_counted_by_case() -> None:
    cpu = cell({"unfixed": REPRODUCED, "fix": HOLDS, "never": SKIPPED})
    gpu = cell({"unfixed": REPRODUCED, "fix": BOOM, "never": HOLDS}, hardware="a100x8")
    other = cell({"control": variant()}, case="d", key="d/m", hardware="a100x8")
    (each,) = diffs.measure_agreement(cpu, [*gpu, *other])
    assert (each.case, each.agree, each.both, each.one_only) == ("c", 1, 2, 1)
    assert [(first.variant, second.variant) for first, second in each.disagreements] == [("fix", "fix")]
    for side in (other, cell({"fix": SKIPPED})):
        with pytest.raises(ConfigError):
            diffs.measure_agreement(cpu, side)


# -- the command


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("repro_matrix.config.project.published", list)  # grading compares with the baseline
    return tmp_path / "results"


Run = Callable[..., tuple[int, Any]]


@pytest.fixture
def repro(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*words: object) -> tuple[int, Any]:
        code = cli.main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, json.loads(out) if "--json" in words and code != 2 else " ".join((out + err).split())

    return run


def test_diff_command_gives_documented_exit_codes(results: Path, repro: Run) -> None:
    one, other = write(results / "one", {"unfixed": FIRED}), write(results / "other", {"unfixed": FAILED})
    assert repro("diff", one, one)[0] == 0
    code, values = repro("diff", one, other, "--json")
    assert code == 1 and [change["kind"] for change in values["changes"]] == ["no_longer_reproduces"]
    write(other, {"unfixed": FIRED})
    write(one, {"unfixed": FIRED}, cell_id="some-case/n-fsdp", model="n")
    assert repro("diff", one, other)[0] == 3 and repro("diff", one, other, "model=m")[0] == 0
    assert repro("diff", one, other, "--agreement")[0] == 0
    assert repro("diff", one, other, "--agreement", "--json")[1]["cases"][0]["agree"] == 1


def test_diff_command_unreadable_file_is_named_and_exit_3(results: Path, repro: Run) -> None:
    one, other = write(results / "one", {"unfixed": FIRED}), write(results / "other", {"unfixed": FIRED})
    (other / "cpu" / "s" / "some-case" / "x.json").write_text('{"schema": 1, ')
    code, text = repro("diff", other, one)
    assert code == 3 and "x.json" in text
    code, values = repro("diff", one, other, "--json")
    assert (code, values["exit_code"], values["unreadable"]) == (3, 3, 1)


@pytest.mark.parametrize(
    "content", ["", '{"schema": 1, ', "[1]", '{"hello": "world"}', "[" * 100_000, '{"schema": 7}', b'{"a": "\xff"}'],
    ids=["empty", "truncated", "list", "other keys", "nested", "newer", "latin-1"],
)  # fmt: skip
def test_load_folder_names_unreadable_file_and_keeps_the_rest(results: Path, content: str | bytes) -> None:
    bad = write(results, {"unfixed": FIRED}) / "cpu" / "s" / "some-case" / "bad.json"
    bad.write_bytes(content if isinstance(content, bytes) else content.encode())
    side = load_folder(results)
    assert len(side.rows) == 1 and len(side.unreadable) == 1 and "bad.json" in side.unreadable[0] and bad.exists()


def test_diff_command_unknown_names_are_usage_errors(results: Path, repro: Run) -> None:
    one = write(results / "one", {"unfixed": FIRED})
    (results / "empty").mkdir(parents=True)
    skipped = write(results / "skipped", {"unfixed": "needs 2 GPUs"})
    for words in ((one, results / "none"), (one, one, "case=nothing"), (one, one, "modle=m"), (skipped,) * 2, (one,)):
        assert repro("diff", *words)[0] == 2, words
    with pytest.raises(ResultsError, match="contains no results"):
        load_side(str(results / "empty"))
    assert "neither a folder nor a stack" in repro("diff", one, "torch2.2-tf4.3")[1]
