"""Nightly runs: compared with the last passing one, missing results, quarantine, issues,
bisections, the history."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observations import SCRIPT, exception, failed, frame, observation
from repro_matrix.changes import history, nightly
from repro_matrix.changes.history import NightlyRun
from repro_matrix.changes.missing import describe_missing, find_missing
from repro_matrix.changes.regressions import compare_to_last_passing
from repro_matrix.cli import main as cli
from repro_matrix.config import project
from repro_matrix.errors import ResultsError
from repro_matrix.report.formats import to_issue
from repro_matrix.results import runs
from repro_matrix.results.rows import Row
from repro_matrix.results.runs import Run
from repro_matrix.results.summary import load_rows
from results_by_hand import (
    BOOM,
    FAILED,
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

from bench import nights

Rows = list[Row]
make_run = history.make_run
A, B = (
    cell({"unfixed": REPRODUCED, "fix": HOLDS}),
    cell({"unfixed": REPRODUCED}, cell_id="c/n", model="n"),
)
NOW = cell({"unfixed": REPRODUCED, "fix": BOOM}, started=2.0)
PASSING = make_run("passing", A, 0)


def test_compare_to_last_passing_counts_only_result_changes() -> None:
    failed = make_run("failed", NOW, 1)
    (changed,) = compare_to_last_passing(NOW, [PASSING, failed]).changed
    assert (changed.case, changed.passing, changed.changes[0].kind) == (
        "c",
        PASSING,
        "fix_stopped_working",
    )
    assert compare_to_last_passing(NOW, [PASSING, replace(failed, exit_code=0)]).changed == []
    for rows, runs_ in (
        (NOW, [failed]),
        (cell({"unfixed": REPRODUCED}, cell_id="c/other"), [PASSING]),
    ):
        result = compare_to_last_passing(rows, runs_)
        assert (result.changed, result.references, result.new) == ([], {}, {rows[0].cell_id})
    for between in (
        {"unfixed": SKIPPED, "fix": SKIPPED},
        {"unfixed": REPRODUCED},
    ):  # the last run that measured it
        (again,) = compare_to_last_passing(
            NOW, [PASSING, make_run("between", cell(between), 0)]
        ).changed
        assert (again.passing, again.changes) == (PASSING, changed.changes)
    quarantined = compare_to_last_passing(
        NOW, [PASSING], lambda key, name: (key, name) == ("c/m", "fix")
    )
    assert quarantined.changed == [] and quarantined.quarantined.keys() == {("c/m", "fix")}


def test_a_fix_that_dies_in_two_steps_is_compared_with_the_night_before_it_was_flaky() -> None:
    def night(name: str, passed: int) -> NightlyRun:
        kinds = {"passed": passed, "reproduced": 3 - passed}
        row = with_values(
            HOLDS,
            kinds={each: n for each, n in kinds.items() if n},
            failure_ids=("c/norm",) * (passed < 3),
        )
        verdict = {3: "FIXED", 0: "NOT_FIXED"}.get(passed, "FLAKY")
        return make_run(
            name, cell({"unfixed": REPRODUCED, "fix": replace(row, verdict=verdict)}), 0
        )

    def change(tonight: int, *before: int, expected: str | None = None) -> tuple[str, str] | None:
        rows = [with_values(row, state=expected) for row in night("", tonight).rows]
        found = compare_to_last_passing(rows, [night(str(n), k) for n, k in enumerate(before)])
        return (
            (found.changed[0].passing.run_id, found.changed[0].changes[0].kind)
            if found.changed
            else None
        )

    assert change(2, 3) is None, "within its interval"
    assert change(0, 3, 2) is None and change(0, 3, 2, 0, 0, 0) == (
        "0",
        "fix_stopped_working",
    ), "in the fourth night"
    assert change(0, *[3] * 9, 2) == (
        "8",
        "fix_stopped_working",
    ), "at once, where it was steady for long"
    assert (
        change(3, 0, 1) is None
        and change(3, 0, 1, 3, 3, 3) == ("0", "fix_works_now")
        and change(3, 3, 2) is None
    )
    for before, reference in (((3, 2), "0"), ((2, 3), "1"), ((3, 2, 3), "2")):
        assert change(0, *before) is None, "a flaky one may fail three times"
        dead = change(0, *before, expected="unexpected")
        assert dead == (reference, "fix_stopped_working"), "not what is expected: in the same night"
    assert change(0, 2) is None and change(0, 3, 0) is None, (
        "flaky since the first night; acknowledged"
    )


def test_flakiness_beyond_what_all_passing_runs_showed_is_a_change() -> None:
    def night(name: str, passed: int) -> NightlyRun:
        kinds = {"passed": passed, "other_failure": 3 - passed}
        row = with_values(
            HOLDS,
            kinds={each: n for each, n in kinds.items() if n},
            failure_ids=("hang",) * (passed < 3),
        )
        return make_run(name, cell({"unfixed": REPRODUCED, "fix": row}), 0)

    def change(tonight: int, *before: int) -> str:
        found = compare_to_last_passing(
            night("", tonight).rows, [night(str(n), k) for n, k in enumerate(before)]
        )
        return found.changed[0].changes[0].kind if found.changed else ""

    assert change(2, 3, 3) == "" and change(2, *[3] * 30) == change(2, *[3] * 30, 2, 3, 2) == ""
    assert change(1, *[3] * 30) == change(2, *[3] * 30, 2, 2) == "became_flaky", "not by chance"
    assert (
        change(3, *[2] * 30) == change(0, *[2] * 30) == "" and change(0, *[2] * 30, 0, 0) != ""
    ), "beyond a third"
    assert change(2, *[0] * 30, *[3] * 3) == "", "attempts before the last change do not count"


@pytest.mark.parametrize("documented", [False, True])
def test_a_variant_that_is_flaky_always_raises_no_alarm(documented: bool) -> None:
    """A documented fix ends its bad nights with exit code 3; they count, or the others would look
    too steady."""
    chance, nights, alarms = Random(1), list[NightlyRun](), 0
    for number in range(200):
        outcomes = Counter("passed" if chance.random() < 0.7 else "other_failure" for _ in range(3))
        failed = "other_failure" in outcomes
        row = with_values(
            HOLDS,
            kinds=outcomes,
            failure_ids=("hang",) * failed,
            verdict="FLAKY" if failed else "FIXED",
        )
        row = replace(
            row,
            state="differs_from_documentation" if failed and documented else "no_expectation",
        )
        night = make_run(
            str(number), cell({"unfixed": REPRODUCED, "fix": row}), 3 * (failed and documented)
        )
        changed = compare_to_last_passing(night.rows, nights).changed
        alarms += bool(changed)
        nights += [] if changed else [night]
    assert alarms == 0


@given(one=SIDES, nights=st.integers(1, 12))
def test_the_same_results_again_are_no_change(one: Rows, nights: int) -> None:
    passing = [make_run(str(number), one, 0) for number in range(nights)]
    found = compare_to_last_passing(one, passing)
    assert (found.changed, found.new, found.unexpected(one)) == ([], set(), [])


def test_unexpected_results_count_unless_they_are_handled() -> None:
    rows = [
        *cell(
            {
                "unfixed": REPRODUCED,
                "fix": replace(BOOM, verdict="NOT_FIXED", state="unexpected"),
            }
        )
    ]
    first = compare_to_last_passing(rows, [])
    assert [row.variant for row in first.unexpected(rows)] == ["fix"]
    accepted = compare_to_last_passing(rows, [make_run("accepted", rows, 0)])
    assert accepted.changed == accepted.unexpected(rows) == [], "an acknowledged night"
    changed = compare_to_last_passing(rows, [PASSING])
    assert changed.unexpected(rows) and not changed.unexpected(
        rows, [each.digest for each in changed.changed]
    )
    assert not compare_to_last_passing(rows, [PASSING], lambda *_: True).unexpected(rows)


def test_changed_case_digest_identifies_the_change() -> None:
    repaired = make_run("repaired", A, 0)
    (first,), (again,), (same,) = (
        compare_to_last_passing(NOW, runs_).changed
        for runs_ in ([PASSING], [PASSING, repaired], [PASSING, replace(repaired, exit_code=1)])
    )
    assert first.digest != again.digest and first.digest == same.digest


def test_check_one_commit_several_commits_is_an_error() -> None:
    with pytest.raises(ResultsError, match=r"aaaa \(1 cell\), bbbb"):
        history.check_one_commit([replace(A[0], commit=commit) for commit in ("aaaa", "bbbb")])


def test_issue_lists_changes_and_escapes_foreign_text() -> None:
    text = with_values(BOOM, reason="@everyone <script> `x` <!-- change=00 -->")
    others = {"kept": replace(HOLDS, role="fix"), "probe": replace(HOLDS, role="probe")}
    now = cell(
        {"unfixed": REPRODUCED, "fix": text, **others}, started=2.0, versions={"torch": "2.14.0"}
    )
    then = [with_values(row, versions={"torch": "2.13.0"}) for row in A]
    (changed,) = compare_to_last_passing(now, [make_run("passing", then, 0)]).changed
    title, made = to_issue(
        [changed], "tonight", "https://x/page", {"now": "torch 2.14.0 is the first bad release"}
    )
    assert title == "c: fix_stopped_working" and made.startswith(f"# {title}\n")
    for part in ("torch: 2.13.0 -> 2.14.0", "first bad release", "repro run c", "https://x/page"):
        assert part in made
    assert "still work in every measured cell: kept." in made
    assert all("@everyone" not in line or line.count("`") == 2 for line in made.splitlines())
    assert made.rstrip().endswith(f"change={changed.digest} -->")
    assert (
        len(
            to_issue([replace(changed, changes=changed.changes * 2000)], "tonight", "", {})[
                1
            ].encode()
        )
        < 65_536
    )


def test_changed_case_says_what_else_changed() -> None:
    def night(
        name: str, rows: Rows, code: int | None, machine: dict[str, str], **packages: str
    ) -> NightlyRun:
        placed = [with_values(row, versions={"torch": "2.13.0"}, hardware=machine) for row in rows]
        return make_run(name, placed, code, {"now": packages} if packages else None)

    then = night(
        "mon", A, 0, {"cpu": "a", "driver": "550"}, torch="2.13.0", tokenizers="1", idna="3.1"
    )
    tonight = [
        with_values(row, versions={"torch": "2.13.0"}, hardware={"cpu": "a", "driver": "570"})
        for row in NOW
    ]
    packages = {"now": {"torch": "2.13.0", "tokenizers": "1", "idna": "3.2"}}
    (changed,) = compare_to_last_passing(tonight, [then], packages=packages).changed
    assert (changed.versions, changed.machine) == (
        {"idna": ("3.1", "3.2")},
        {"driver": ("550", "570")},
    )
    (usual,) = compare_to_last_passing(tonight, [then]).changed
    assert usual.versions == {"tokenizers": ("1", "none")}, (
        "without a list of all packages, only the usual ones"
    )
    body = to_issue([replace(changed, files=("repros/x.py (uncommitted)",))], "tonight", "", {})[1]
    assert all(
        part in body for part in ("idna: 3.1", "driver: 550", "repros/x.py \\(uncommitted"[:11])
    )
    assert "No package" not in body


BOTH = make_run("passing", [*A, *B], 0)


def run_of(*planned: str, **changes: Any) -> Run:
    return Run(Path("tonight"), (), runs.ENDED, planned=planned, **changes)


ALL = run_of("cpu now c/m", "cpu now c/n")


def missing(tonight: Rows, run: Run = ALL, *history_: NightlyRun) -> list[tuple[str, str, str]]:
    found = find_missing(tonight, history_ or [BOTH], [run])
    return [(each.row.cell_id, each.row.variant, each.excuse) for each in found]


@pytest.mark.parametrize(
    ("tonight", "expected"),
    [
        ([*A, *B], []),
        (A, [("c/n", "unfixed")]),
        ([*cell({"unfixed": REPRODUCED, "fix": SKIPPED}), *B], [("c/m", "fix")]),
        (
            [*cell({"unfixed": REPRODUCED, "fix": variant(kinds={}, reason="a GPU failed")}), *B],
            [("c/m", "fix")],
        ),
        (
            [*(with_values(row, hardware="gpu1-shared") for row in A), *B],
            [("c/m", "unfixed"), ("c/m", "fix")],
        ),
    ],
)
def test_find_missing_lists_cells_and_variants(
    tonight: Rows, expected: list[tuple[str, str]]
) -> None:
    assert missing(tonight) == [(*each, "") for each in expected]


@pytest.mark.parametrize(
    ("run", "excuse"),
    [
        (run_of("cpu now c/m"), "not requested"),
        (run_of("cpu now c/m", "cpu later c/n"), "not requested"),
        (replace(ALL, left=("cpu now c/n",)), "no time left"),
        (run_of("cpu now c/m", "gpu1 now c/n"), ""),
        (replace(run_of("cpu now c/m"), texts=("shard=1/2",)), ""),
        (run_of(), ""),
        (ALL, ""),
    ],
)
def test_find_missing_is_excused_by_the_run_itself(run: Run, excuse: str) -> None:
    assert missing(A, run) == [("c/n", "unfixed", excuse)]


def test_find_missing_a_variant_without_a_result_needs_a_reason() -> None:
    assert missing([A[0], *B]) == [("c/m", "fix", "")], "its document lost it"
    selected = replace(ALL, texts=("variants=unfixed",))
    assert missing([A[0], *B], selected) == [("c/m", "fix", "not requested")]
    assert missing([A[0], *B], run_of()) == [("c/m", "fix", "")]


def test_find_missing_looks_further_back_than_the_last_run() -> None:
    between = make_run("between", A, 0)
    assert missing(A, ALL, BOTH, between) == [("c/n", "unfixed", "")]
    restricted = run_of("cpu now c/m")
    assert missing(A, restricted, BOTH, between) == [], "a note for the last passing run only"
    assert missing(A, ALL, replace(BOTH, exit_code=1)) == []
    (both,) = find_missing(A, [BOTH], [restricted, run_of("cpu now c/n")])
    (none,) = find_missing(A, [BOTH], [])
    assert both.excuse == none.excuse == ""


def test_find_missing_a_skip_counts_unless_the_passing_run_had_it() -> None:
    tonight = cell({"unfixed": SKIPPED, "fix": SKIPPED})
    assert len(missing(tonight, ALL, PASSING)) == 2
    (text,) = describe_missing(find_missing(tonight, [PASSING], [ALL]))
    assert str(SKIPPED.skipped) in text
    assert missing(tonight, ALL, PASSING, make_run("between", tonight, 0)) == []
    other = make_run("other", [replace(row, skipped="no network") for row in tonight], 0)
    assert len(missing(tonight, ALL, PASSING, other)) == 2


CASE = "ddp-ready-once"
KEY = f"{CASE}/qwen1.5-0.5b-ddp"


def raised(message: str, *frames: tuple[str, str]) -> list[tuple[str, Any]]:
    """Return attempts that reproduce a case of the catalog."""
    error = exception("RuntimeError", message, [SCRIPT, *(frame(*each) for each in frames)])
    return [("reproduced", observation(failed(0, error), failed(1, error)))] * 2


KNOWN = raised(
    "Expected to mark a variable ready only once", ("torch.utils.checkpoint", "backward")
)
EMBEDDING = raised(
    "'weight' must be 2-D",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "forward"),
    ("transformers.models.qwen2.modeling_qwen2", "forward"),
    ("torch.nn.functional", "embedding"),
)


@given(one=SIDES, other=SIDES)
def test_history_stores_runs_without_loss(
    one: Rows, other: Rows, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("history")
    first, second = (
        make_run("a", one, 0),
        replace(make_run("b", other, None), quarantined=(("c/m", "fix"),)),
    )
    for run in (make_run("a", other, 0), second, first):
        history.store_run(folder, run)
    assert history.load_history(folder) == [
        first,
        second,
    ], "in the order of storing; a run replaces itself"


@pytest.mark.parametrize(
    "edit",
    [
        {"exit_code": "green"},
        {"rows": 3},
        {"schema": 9},
        {"rows": [{"reason": 5}]},
        {"rows": [{"verdict": "FIXD"}]},
        {"rows": [{"attempts": [{"outcome": "no_outcome"}]}]},
        {"rows": [{"attempts": -2}]},
        {"rows": [{"failures": "norm"}]},
    ],
)
def test_history_damaged_line_is_named(edit: dict[str, Any], tmp_path: Path) -> None:
    history.store_run(tmp_path, PASSING)
    line = json.loads((tmp_path / history.FILE).read_text())
    if isinstance(edit.get("rows"), list):
        edit = {"rows": [{**line["rows"][0], **edit["rows"][0]}]}
    (tmp_path / history.FILE).write_text(json.dumps({**line, **edit}) + "\n")
    with pytest.raises(ResultsError, match=r"nights\.jsonl:1: damaged"):
        history.load_history(tmp_path)


Night = Callable[..., tuple[int, str]]


@pytest.fixture
def night(results: Path, capsys: pytest.CaptureFixture[str]) -> Night:
    """Measure (where variants are given) and run `repro nightly`: exit code and output."""

    def run(
        name: str,
        variants: dict[str, Any] | None = None,
        started: float = 1.0,
        *words: str,
        **changes: Any,
    ) -> Any:
        if variants:
            write(results / name, variants, started, **changes)
        more = ["--history", str(results / "history"), "--run-id", name, *words]
        code = cli.main(["nightly", str(results / name), *more])
        out, err = capsys.readouterr()
        return code, " ".join((out + err).split())

    return run


def codes(results: Path) -> list[tuple[str, int | None]]:
    return [(run.run_id, run.exit_code) for run in history.load_history(results / "history")]


def test_nightly_change_fails_until_acknowledged(results: Path, night: Night) -> None:
    code, text = night("mon", {"unfixed": FIRED}, 1.0)
    assert (
        code == 0
        and "nothing was compared" in text
        and night("tue", {"unfixed": PASSED}, 2.0)[0] == 1
    )
    text = (results / "history" / "issues" / "tue" / "some-case.md").read_text()
    assert text.startswith("# some-case: ") and "before: `reproduced 2/2" in text
    assert night("tue")[0] == 1 and codes(results) == [("mon", 0), ("tue", 1)], "the same run again"
    closed = results / "closed.txt"
    closed.write_text(text)
    acknowledged = ("--acknowledged", str(closed), "--issues", str(results / "wed"))
    assert night("wed", {"unfixed": PASSED}, 3.0, *acknowledged)[0] == 0
    assert not (results / "wed" / "some-case.md").exists()
    assert night("thu", {"unfixed": PASSED}, 4.0)[0] == 0, "compared with wed"
    code, text = night("fri", {"unfixed": PASSED}, 5.0, "--run-exit-code", "3")
    assert (
        code == 3
        and "0 cases changed since the last passing run, but less was measured than requested"
        in text
    )
    assert "exit code 3: the runs ended with exit code 3" in text
    assert codes(results)[-2:] == [("thu", 0), ("fri", 3)]


def test_nightly_another_machine_is_neither_alarm_nor_green(results: Path, night: Night) -> None:
    at = {"case": CASE, "cell_id": KEY}
    assert night("mon", {"unfixed": KNOWN}, 1.0, **at)[0] == 0
    machine = {
        "profile": "gpu1",
        "accelerator": "cuda",
        "gpus": [],
        "cpu": "b",
        "cores": 8,
        "memory_gb": 64.0,
        "driver": "570",
        "os": "Linux",
    }
    code, text = night("tue", {"unfixed": PASSED}, 2.0, hardware=machine, **at)
    assert (code, "nothing was compared" in text, f"{KEY} on cpu" in text) == (3, True, True), text
    assert not (results / "history" / "issues").exists()


def test_nightly_takes_all_shards_and_misses_the_one_that_is_not_given(
    results: Path, night: Night, capsys: pytest.CaptureFixture[str]
) -> None:
    def shards(name: str, started: float) -> list[str]:
        one = write(results / f"{name}-1", {"unfixed": KNOWN}, started, case=CASE, cell_id=KEY)
        other = write(results / f"{name}-2", {"unfixed": FIRED}, started)
        for number, folder in enumerate((one, other), 1):
            runs.note(folder, ["+matrix=full", f"shard={number}/2"], runs.ENDED, [])
        return [str(one), str(other)]

    def nightly_of(name: str, folders: list[str]) -> tuple[int, str]:
        words = ["--history", str(results / "history"), "--run-id", name]
        return cli.main(["nightly", *folders, *words]), " ".join(capsys.readouterr().out.split())

    assert nightly_of("mon", shards("mon", 1.0))[0] == 0
    (stored,) = history.load_history(results / "history")
    assert {row.case for row in stored.rows} == {CASE, "some-case"}, "the union"
    assert nightly_of("tue", shards("tue", 2.0))[0] == 0, "compared with the union"
    code, text = nightly_of("wed", shards("wed", 3.0)[1:])
    assert code == 3 and "Missing: 1 variant" in text and f"{KEY} on cpu" in text
    one, other = shards("thu", 4.0)
    write(results / "thu-1", {"unfixed": PASSED}, 5.0)
    for folders in ([one, other], [other, one]):
        code, text = nightly_of("thu", folders)
        assert code == 1 and "some-case: no_longer_reproduces" in text, "the newest result counts"


def test_nightly_first_run_that_is_broken_is_not_green(results: Path, night: Night) -> None:
    control = {"case": "train-step", "cell_id": "train-step/qwen1.5-0.5b-ddp", "kind": "control"}
    code, text = night("mon", {"control": FAILED}, 1.0, **control)
    assert (
        code == 1
        and "nothing was compared" in text
        and "train-step/qwen1.5-0.5b-ddp variant control" in text
    )
    assert night("wed", {"unfixed": FIRED}, 3.0)[0] == 0
    lost = [("infra_error", FAILED[0][1])]
    assert night("thu", {"unfixed": [*FIRED, *lost]}, 4.0)[0] == 3
    assert night("fri", {"unfixed": FAILED}, 5.0, case=CASE, cell_id=KEY)[0] == 3, (
        "no variant has a verdict"
    )
    code, text = night("sat", {"unfixed": "needs 2 GPUs"}, 6.0, cell_id="some-case/other")
    assert code == 3 and "nothing was measured" in text
    assert [code for _, code in codes(results)] == [1, 0, 3, 3, 3]


def test_nightly_documented_fix_that_fails_without_an_expectation_is_exit_3(
    results: Path, night: Night
) -> None:
    dead = {"unfixed": KNOWN, "non-reentrant": KNOWN}
    code, text = night("mon", dead, 1.0, case=CASE, cell_id=KEY)
    assert (
        code == 3
        and "1 documented fix not working here" in text
        and f"{KEY} variant non-reentrant" in text
    )
    assert "not as predicted" not in text
    advice = {"unfixed": KNOWN, "bucket-view": KNOWN}  # known not to help
    assert night("tue", advice, 2.0, case=CASE, cell_id=KEY)[0] == 0


def test_nightly_names_the_results_that_only_the_nearest_releases_confirm(
    results: Path, night: Night
) -> None:
    versions = {
        "torch": "2.11.0",
        "transformers": "5.17.0",
        "accelerate": "1.15.0",
        "peft": "0.21.0",
    }
    at = {
        "case": CASE,
        "cell_id": KEY,
        "model": "qwen1.5-0.5b",
        "strategy": "ddp",
        "params": "qwen1.5-0.5b/ddp",
        "stack": {"label": "s", "name": "s", "python": "3", "versions": versions},
    }
    code, text = night("mon", {"unfixed": KNOWN, "bucket-view": KNOWN}, 1.0, **at)
    assert code == 0 and "as in the nearest ones: 1 interpolated" in text
    at["stack"]["versions"] = {**versions, "torch": "2.0.1", "transformers": "4.30.0"}
    code, text = night(
        "tue", {"unfixed": KNOWN, "bucket-view": KNOWN, "static-graph": KNOWN}, 2.0, **at
    )
    assert (
        code == 3 and "as in the nearest ones: 1 predicted" in text and "Not as predicted" in text
    )


def test_nightly_names_expectations_that_are_not_committed(
    results: Path, night: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = replace(project.current(), folder=results)
    monkeypatch.setattr(nightly.project, "current", lambda: own)
    subprocess.run(["git", "init", "-q", str(results)], check=True)
    assert "Not reviewed" not in night("mon", {"unfixed": FIRED})[1]
    (results / "quarantine.yaml").write_text("quarantined: []\n")
    code, text = night("mon")
    assert code == 0 and "Not reviewed: 1 file" in text and "quarantine.yaml" in text


def test_nightly_a_run_replaces_the_one_of_the_same_id(results: Path, night: Night) -> None:
    assert night("sun", {"unfixed": FIRED}, 0.5)[0] == 0
    for name, variants, started, code in (("mon", FIRED, 1.0, 0), ("tue", PASSED, 2.0, 1)):
        for again in ({"unfixed": variants}, None):
            stored = any(run_id == "nightly" for run_id, _ in codes(results))
            found, text = night(name, again, started, "--run-id", "nightly")
            assert found == code
            assert ("its entry is replaced" in text) == stored
    assert codes(results) == [("sun", 0), ("nightly", 1)]


def test_nightly_quarantined_difference_passes_until_it_expires(
    results: Path, night: Night
) -> None:
    today = datetime.now(timezone.utc).date()

    def run(name: str, started: float, variants: dict[str, Any], days: int = 1) -> tuple[int, str]:
        entry = {"cell": KEY, "variant": "non-reentrant", "owner": "ada", "reason": "issue 12"}
        until = (today + timedelta(days)).isoformat()
        (results / "quarantine.yaml").write_text(
            json.dumps({"quarantined": [{**entry, "until": until}]})
        )
        return night(name, variants, started, case=CASE, cell_id=KEY)

    good, bad = ({"unfixed": KNOWN, "non-reentrant": each} for each in (KNOWN, FAILED))
    assert run("mon", 1.0, good)[0] == 0
    code, text = run("tue", 2.0, bad)
    assert code == 0 and f"quarantined: {KEY}" in text and "since mon" in text
    (results / "quarantine.yaml").unlink()
    assert night("wed", bad, 3.0, case=CASE, cell_id=KEY)[0] == 1, "compared with mon"
    assert "quarantined:" not in run("thu", 4.0, {"unfixed": "needs 2 GPUs"})[1]
    code, text = run("fri", 5.0, good, days=-1)
    assert code == 1 and "quarantined:" not in text and "ada" in text


@pytest.mark.parametrize(
    ("texts", "state", "left", "expected"),
    [
        ([], runs.UNFINISHED, None, 3),
        ([], runs.ENDED, ["cpu s c/n"], 3),
        ([], runs.ENDED, [], 0),
        (["time_limit=60m"], runs.ENDED, ["cpu s c/n"], 0),
        (["time_limit=60m"], runs.UNFINISHED, [], 3),
    ],
)
def test_nightly_run_that_did_not_end_does_not_pass(
    results: Path, night: Night, texts: list[str], state: str, left: list[str] | None, expected: int
) -> None:
    write(results / "mon", {"unfixed": FIRED})
    runs.note(results / "mon", texts, state, left)
    code, text = night("mon")
    assert (
        code == expected
        and ("did not end" in text) == bool(expected)
        and codes(results) == [("mon", expected)]
    )


def test_nightly_run_that_ended_before_its_first_result_is_incomplete(
    results: Path, night: Night
) -> None:
    (results / "mon").mkdir()
    assert night("mon")[0] == 2, "a folder without a run"
    runs.note(results / "mon", [], runs.UNFINISHED)
    assert night("mon")[0] == 3


def test_nightly_run_is_compared_with_those_stored_before_it_whatever_the_clock(
    results: Path, night: Night
) -> None:
    assert (
        night("mon", {"unfixed": FIRED}, 2.0)[0] == 0
        and night("tue", {"unfixed": PASSED}, 1.0)[0] == 1
    )
    assert night("wed", {"unfixed": FIRED}, 3.0)[0] == 0
    assert night("tue", {"unfixed": PASSED}, 1.0)[0] == 1 and night("mon")[0] == 0, (
        "the same runs again"
    )
    assert codes(results) == [("mon", 0), ("tue", 1), ("wed", 0)]


def test_nightly_of_a_run_that_another_night_has_stored_is_exit_3(night: Night) -> None:
    assert night("mon", {"unfixed": FIRED}, 1.0)[0] == 0
    code, text = night("mon", None, 1.0, "--run-id", "tue")
    assert code == 3 and "this run is stored as" in text


def test_nightly_missing_cell_is_exit_3_unless_it_was_not_requested(
    results: Path, night: Night
) -> None:
    other = {"case": "fsdp-generate", "cell_id": "fsdp-generate/qwen1.5-0.5b-fsdp"}
    at = {"case": CASE, "cell_id": KEY, "model": "qwen1.5-0.5b", "strategy": "ddp"}
    both, only = [f"cpu current {KEY}", f"cpu current {other['cell_id']}"], "case=fsdp-generate"
    write(results / "mon", {"unfixed": KNOWN}, **at)
    for started, (name, texts, left, planned, expected) in enumerate(
        (
            ("mon", [], None, both, 0),
            ("tue", [], None, both, 3),
            ("thu", [only], None, both[1:], 0),
            ("wed", ["time_limit=60m"], both[:1], both, 0),
        ),
        1,
    ):
        write(results / name, {"unfixed": EMBEDDING}, started, **other)
        runs.note(results / name, texts, runs.ENDED, left, planned=planned)
        code, text = night(name)
        assert code == expected and ("Missing: 1 variant" in text) == bool(expected), name


def test_nightly_unreadable_or_deleted_evidence_is_exit_3(results: Path, night: Night) -> None:
    bad = write(results / "mon", {"unfixed": FIRED}) / "cpu" / "s" / "some-case" / "x.json"
    bad.write_text("{")
    assert "x.json" in night("mon")[1]
    load_rows(write(results / "tue", {"unfixed": FIRED}), write=True)
    (results / "tue/cpu/s/some-case/m-fsdp.json").unlink()
    assert cli.main(["diff", *[str(results / "tue")] * 2]) == night("tue")[0] == 3
    write(results / "tue", {"unfixed": FIRED}, cell_id="some-case/other")
    assert "m-fsdp.json: missing" in night("tue")[1] and codes(results) == [("mon", 3), ("tue", 3)]


@pytest.mark.parametrize(
    "words",
    [
        "--run-exit-code -1",
        "--lock newest=nowhere",
        "--run-id a/b",
        "--acknowledged /no/file",
        "--bisect-time soon",
    ],
)
def test_nightly_bad_input_is_a_usage_error(results: Path, night: Night, words: str) -> None:
    assert night("a", {"unfixed": FIRED}, 1.0, *words.split())[0] == 2 == night("no-such-folder")[0]
    assert cli.main(["nightly", str(results / "a")]) == 2, "no history"
    assert not (results / "history").exists()


def test_bisections_search_between_locks_within_the_time(results: Path) -> None:
    (changed,) = compare_to_last_passing(NOW, [PASSING]).changed
    commands: list[list[str]] = []

    def run(words: list[str], seconds: float) -> tuple[str, str]:
        commands.append(words)
        return "torch 2.14.0 is the first bad release", ""

    def report(seconds: float = 60.0) -> str | None:
        deadline = time.monotonic() + seconds
        return nightly.bisect_change(changed, results, "tonight", deadline, run)

    good, bad = (nightly.stored_lock(results, "now", name) for name in ("passing", "tonight"))
    good.parent.mkdir()
    assert report() is None, "a pinned stack has no lock"
    bad.write_text("torch==2.14.0\n")
    assert "Not bisected" in str(report())
    good.write_text("torch==2.14.0\n")
    assert "same lock" in str(report()) and not commands
    good.write_text("torch==2.13.0\n")
    assert report() == "torch 2.14.0 is the first bad release"
    (words,) = commands
    assert cli.parse("bisect", words[1:]).params["any_change"], "the command takes these arguments"
    assert words[:6] == ["bisect", "c", "--good", str(good), "--bad", str(bad)]
    assert {"model=m", "--variant", "fix"} < set(words)
    assert "no time left" in str(report(0.0))
    found, reason = nightly.run_bisect(
        ["bisect", "no-such-case", "--good", "1.0", "--bad", "2.0"], 120.0
    )
    assert not found and "exit code 2" in reason


def test_bench_of_nights_counts_changes_of_cut_results(results: Path) -> None:
    attempts = [*KNOWN, *KNOWN, *KNOWN]
    write(results / "run", {"unfixed": attempts}, case=CASE, cell_id=KEY)
    nights.main([str(results / "run"), "--shuffles", "2", "--out", str(results / "out.json")])
    (row,) = json.loads((results / "out.json").read_text())["rows"]
    assert (row["nights"], row["variants"], row["changes"], row["nights_with_a_change"]) == (
        6,
        1,
        [],
        0,
    )
    write(results / "run", {"unfixed": [*KNOWN, *PASSED]}, case=CASE, cell_id=KEY)
    nights.main([str(results / "run"), "--shuffles", "0", "--out", str(results / "out.json")])
    assert len(json.loads((results / "out.json").read_text())["rows"][1]["changes"]) == 2
