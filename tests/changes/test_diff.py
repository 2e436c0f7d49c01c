"""What differs between two sets of rows: nothing against itself, the opposite when compared
backwards."""

from __future__ import annotations

import json
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from repro_matrix.changes import agreement, sides
from repro_matrix.changes import diff as diffs
from repro_matrix.changes.diff import compare_rows as between
from repro_matrix.cli import main as cli
from repro_matrix.errors import ConfigError
from repro_matrix.results import runs
from repro_matrix.results.rows import Row
from results_by_hand import (
    BOOM,
    FIRED,
    HOLDS,
    PASSED,
    REPRODUCED,
    SIDES,
    SKIPPED,
    cell,
    variant,
    with_values,
    write,
)

Rows = list[Row]


PAIRS = [
    ("new_failure", "failure_gone"),
    ("fix_stopped_working", "fix_works_now"),
    ("became_flaky", "became_steady"),
    ("reproduces_now", "no_longer_reproduces"),
    ("not_measured", "newly_measured"),
    ("cell_removed", "cell_added"),
    ("different_failure", "different_failure"),
]
OPPOSITE = dict(PAIRS) | {other: one for one, other in PAIRS}


@given(SIDES, SIDES)
def test_compare_backwards_gives_opposite_and_with_itself_nothing(one: Rows, other: Rows) -> None:
    assert (between(one, one).changes, between(one, one).incomparable) == ((), ())
    there, back = between(one, other), between(other, one)
    expected = sorted(
        (OPPOSITE[c.kind], c.variant, repr(c.after), repr(c.before)) for c in there.changes
    )
    assert (
        sorted((c.kind, c.variant, repr(c.before), repr(c.after)) for c in back.changes) == expected
    )
    assert (there.cells, there.variants, len(there.incomparable)) == (
        back.cells,
        back.variants,
        len(back.incomparable),
    )


@given(SIDES, SIDES)
def test_compare_counts_every_cell_once_and_one_result_change_per_variant(
    one: Rows, other: Rows
) -> None:
    diff = between(one, other)
    sizes = [len({row.cell for row in side}) for side in (one, other)]
    assert len(diff.select(["cell_removed", "cell_added"])) + 2 * diff.cells == sum(sizes)
    results = [c for c in diff.changes if c.variant]
    assert len(results) == len({(c.row.cell, c.variant) for c in results})
    assert "".join(diffs.describe_diff(diff, everything=True)).isprintable()
    json.dumps(diffs.diff_to_json(diff), allow_nan=False)


OTHER_CHECK = variant("other_failure", 3, "check x")
LATE_HANG = variant(kinds={"passed": 2, "hang": 1}, failure_ids=("x",))
EITHER = variant(
    "other_failure", 3, "x", verdict="DIFFERENT_FAILURE", state="expected"
)  # or "y", both reviewed
FLAKY = with_values(BOOM, kinds={"other_failure": 2, "passed": 1})


@pytest.mark.parametrize(
    ("name", "old", "new", "kind", "code"),
    [
        ("unfixed", REPRODUCED, variant(), "no_longer_reproduces", 1),
        ("unfixed", REPRODUCED, BOOM, "no_longer_reproduces", 1),
        ("unfixed", variant(), REPRODUCED, "reproduces_now", 1),
        ("fix", HOLDS, REPRODUCED, "fix_stopped_working", 1),
        (
            "fix",
            HOLDS,
            variant("hang", 3, "hang", verdict="INCONCLUSIVE"),
            "fix_stopped_working",
            1,
        ),
        (
            "fix",
            HOLDS,
            variant("other_failure", 3, "x", verdict="SIGNATURE_MISMATCH"),
            "new_failure",
            1,
        ),
        ("fix", BOOM, HOLDS, "fix_works_now", 1),
        ("new", None, HOLDS, "newly_measured", 0),
        ("new", None, SKIPPED, None, 0),
        ("control", variant(), BOOM, "new_failure", 1),
        ("control", variant(), LATE_HANG, None, 0),  # 3 of 3 and 2 of 3: their intervals overlap
        (
            "control",
            variant("passed", 20),
            with_values(LATE_HANG, kinds={"passed": 8, "hang": 12}),
            "new_failure",
            1,
        ),
        (
            "control",
            variant(),
            with_values(LATE_HANG, kinds={"other_failure": 2, "hang": 1}),
            "new_failure",
            1,
        ),
        ("control", BOOM, OTHER_CHECK, "different_failure", 1),
        ("control", BOOM, with_values(BOOM, reason="another"), None, 0),
        ("control", BOOM, FLAKY, None, 0),
        (
            "control",
            variant("other_failure", 20, "x"),
            variant(kinds={"passed": 12, "other_failure": 8}, failure_ids=("x",)),
            "became_flaky",
            1,
        ),
        ("fix", EITHER, with_values(EITHER, failure_ids=("y",)), None, 0),
        (
            "fix",
            EITHER,
            with_values(EITHER, failure_ids=("z",), state="unexpected"),
            "different_failure",
            1,
        ),
        ("control", variant(), SKIPPED, "not_measured", 3),
    ],
)
def test_compare_variant_gives_kind(
    name: str, old: Row | None, new: Row, kind: str | None, code: int
) -> None:
    same = {} if name in ("unfixed", "control") else {"unfixed": REPRODUCED}
    diff = between(cell(same | ({name: old} if old else {})), cell(same | {name: new}))
    assert {change.variant: change.kind for change in diff.changes} == (
        {name: kind} if kind else {}
    )
    assert diff.exit_code == code


def test_compare_one_stack_each_goes_across_several_by_name() -> None:
    here = cell({"control": variant()}, evidence="one.json")
    there = cell({"control": replace(BOOM, error_at="f.py:7")}, evidence="other.json", stack="old")
    across = between(here, there)
    assert across.across == {"stack": ("now", "old")} and [c.kind for c in across.changes] == [
        "new_failure"
    ]
    (change,) = diffs.diff_to_json(across)["changes"]
    assert (
        change["documents"] == ["one.json", "other.json"]
        and change["after"]["error_at"] == "f.py:7"
    )
    by_name = between([*here, *there], here)
    assert (
        not by_name.across
        and [c.kind for c in by_name.changes] == ["cell_removed"]
        and by_name.exit_code == 3
    )


def test_compare_cell_measured_twice_uses_newest() -> None:
    older, newer = (
        cell({"control": BOOM}, evidence="a"),
        cell({"control": variant()}, started=2.0, evidence="b"),
    )
    assert between([*newer, *older], newer).changes == ()


@given(SIDES, SIDES)
def test_agreement_is_symmetric_and_counts_disagreements(one: Rows, other: Rows) -> None:
    try:
        there = agreement.measure_agreement(one, other)
    except ConfigError:
        with pytest.raises(ConfigError):
            agreement.measure_agreement(other, one)
        return
    counts = attrgetter("case", "counts")
    assert [counts(each) for each in there] == [
        counts(each) for each in agreement.measure_agreement(other, one)
    ]
    for each in there:
        assert each.counts[1] - each.counts[0] == len(each.disagreements)
    assert all(each.isprintable() for each in agreement.describe_agreement(there))
    json.dumps(agreement.agreement_to_json(there), allow_nan=False)


def test_agreement_of_a_gpu_run_with_its_cpu_twin_is_across_hardware_and_shows_the_tolerances() -> (
    None
):
    """`make gpu-proof`: what the GPU run measured on the CPU itself is no comparison of the two."""

    def side(hardware: str, used: float, outcome: str = "passed", key: str = "c/m") -> Rows:
        gpus = () if hardware == "cpu" else ("NVIDIA H200",)
        check = {"name": "gradient", "actual": used, "expected": 0.0, "tolerance": 1.0}
        row = variant(outcome, checks=(check,), hardware={"profile": hardware, "gpus": gpus})
        return cell({"control": row}, cell_id=key)

    cpu = [
        *side("cpu", 0.1),
        *side("cpu", 0.2, key="c/n"),
        *side("cpu", 0.1, key="c/cpu-only"),
    ]
    gpu = [
        *side("gpu1-shared", 0.3),
        *side("gpu1-shared", 300.0, "other_failure", "c/n"),
        *side("cpu", 9, key="c/cpu-only"),
    ]
    (there,) = agreement.measure_agreement(cpu, gpu)
    assert (
        there.counts == (1, 2) and there.across and there.tolerance_used == {"gradient": [0.2, 0.3]}
    )
    ((first, second),) = there.disagreements
    assert (first.hardware.profile, second.hardware.profile) == ("cpu", "gpu1-shared")
    assert "gradient 0.2 | 0.3" in "\n".join(agreement.describe_agreement([there]))
    assert agreement.agreement_to_json([there])["cases"][0]["tolerance_used"] == {
        "gradient": [0.2, 0.3]
    }
    (same,) = agreement.measure_agreement(gpu, gpu)
    assert same.counts == (3, 3) and not same.across, "the same hardware on both sides stays a pair"


def test_tolerance_used_is_of_numbers_only() -> None:
    def check(name: str, actual: Any, expected: Any, tolerance: Any) -> dict[str, Any]:
        return {"name": name, "actual": actual, "expected": expected, "tolerance": tolerance}

    checks = [
        check("loss", 1.5, 1.0, 2.0),
        check("loss", 1.2, 1.0, 2.0),
        check("sum", [1.0, 3.0], [1.0, 2.0], 4),
        check("steps", 3, 3, 0),
        check("tokens", "a", "a", None),
        check("cut", "[1.0, 2.0", "[1.0, 2.0", 1.0),
        check("nan", "nan", 0.0, 1.0),
    ]
    assert variant(checks=checks).tolerance_used == {"loss": 0.25, "sum": 0.25}


def diff(*words: object) -> int:
    return cli.main(["diff", *map(str, words)])


def test_diff_command_gives_documented_exit_codes(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = (
        write(results / "one", {"unfixed": FIRED}),
        write(results / "other", {"unfixed": PASSED}),
    )
    assert diff(one, one) == 0
    capsys.readouterr()
    assert diff(one, other, "--json") == 1
    assert [change["kind"] for change in json.loads(capsys.readouterr().out)["changes"]] == [
        "no_longer_reproduces"
    ]
    write(other, {"unfixed": FIRED})
    write(one, {"unfixed": FIRED}, cell_id="some-case/n-fsdp", model="n")
    assert diff(one, other) == 3 and diff(one, other, "model=m") == 0
    assert diff(one, other, "--agreement") == 3 and "no GPU was compared" in capsys.readouterr().err
    at = {"case": "ddp-ready-once", "cell_id": "ddp-ready-once/qwen1.5-0.5b-ddp"}
    generate = {"case": "fsdp-generate", "cell_id": "fsdp-generate/qwen1.5-0.5b-fsdp"}
    subset = write(results / "subset", {"unfixed": FIRED}, **at)
    both = write(write(results / "both", {"unfixed": FIRED}, **at), {"unfixed": FIRED}, **generate)
    planned = [f"cpu current {each['cell_id']}" for each in (at, generate)]
    for names, code in ((planned[:1], 0), (planned, 3), ([], 3)):
        runs.note(subset, [], runs.ENDED, planned=names)
        assert diff(both, subset) == code, names
    (other / "cpu" / "s" / "some-case" / "x.json").write_text('{"schema": 1, ')
    assert diff(other, one) == 3 and "x.json" in "".join(capsys.readouterr().err.split())
    assert (
        diff(other, other, "--json") == 3 and json.loads(capsys.readouterr().out)["unreadable"] == 2
    )


def test_diff_command_joins_folders_and_takes_the_newest_result_of_a_cell(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write(results / "whole", {"unfixed": FIRED})
    write(whole, {"unfixed": FIRED}, cell_id="some-case/n-fsdp", model="n")
    one = write(results / "one", {"unfixed": FIRED})
    other = write(results / "other", {"unfixed": FIRED}, cell_id="some-case/n-fsdp", model="n")
    assert diff(whole, one) == 3, "a shard without the others"
    assert "CELL_REMOVED: 1" in capsys.readouterr().out
    assert diff(whole, f"{one},{other}") == diff(f"{one},{other}", whole) == 0
    again = write(results / "again", {"unfixed": PASSED}, 2.0)
    assert diff(whole, f"{one},{other},{again}") == diff(whole, f"{again},{one},{other}") == 1


def test_diff_command_unknown_names_are_usage_errors(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write(results / "one", {"unfixed": FIRED})
    skipped = write(results / "skipped", {"unfixed": "needs 2 GPUs"})
    other = write(results / "other", {"unfixed": FIRED}, cell_id="some-case/n-fsdp", model="n")
    (results / "empty").mkdir()
    for words in (
        (one, results / "none"),
        (one, one, "case=nothing"),
        (one, one, "modle=m"),
        (skipped,) * 2,
        (one,),
        (one, results / "empty"),
        (one, other),
        (one, other, "--agreement"),
    ):
        assert diff(*words) == 2, words
    assert diff(one, __file__) == 2 and "no such folder" in " ".join(
        capsys.readouterr().err.split()
    )
    assert (
        diff(one, "torch2.2-tf4.3") == 2
        and "neither a folder nor a stack" in capsys.readouterr().err
    )


def test_diff_command_checks_both_names_before_it_reads_the_first(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = write(results / "one", {"unfixed": FIRED})
    monkeypatch.setattr(sides, "load_folder", lambda folder: pytest.fail(f"{folder} was read"))
    for typo in (results / "oen", "torch2.2-tf4.3", f"{one},{results / 'oen'}"):
        assert diff(one, typo) == 2
        assert str(typo).rpartition(",")[2] in "".join(capsys.readouterr().err.split())
