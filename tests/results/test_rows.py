"""The summary of a results folder: complete, computed anew where it is stale, and fast."""

from __future__ import annotations

import copy
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from repro_matrix.baseline.audit import regrade_folder
from repro_matrix.baseline.derivation import lacking
from repro_matrix.changes.regressions import since_last_passing
from repro_matrix.cli.main import main
from repro_matrix.config import catalog
from repro_matrix.config.schema import Case
from repro_matrix.paths import BASELINE
from repro_matrix.records.document import Document
from repro_matrix.records.outcome import adapter
from repro_matrix.results import runs, summary
from repro_matrix.results.projection import with_catalog
from repro_matrix.results.rows import Row
from repro_matrix.results.store import Store, write_json
from repro_matrix.results.summary import SUMMARY, load_rows, lost, write_rows

CASE = "fsdp-generate-uneven"


@pytest.fixture(scope="module")
def cases() -> Mapping[str, Case]:
    return catalog.load().cases


@pytest.fixture(scope="session")
def evidence() -> list[Document]:
    """Read two cells of published evidence."""
    return list(islice(Store(BASELINE).documents(cases=[CASE]), 2))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evidence: list[Document]) -> Path:
    """A run folder with two cells of published evidence, and no baseline beside it."""
    monkeypatch.setattr("repro_matrix.config.project.published", lambda: [])
    for document in evidence:
        hardware, label = document["hardware"]["profile"], document["stack"]["label"]
        path = tmp_path / hardware / label / f"{document['cell_id']}.json"
        path.parent.mkdir(parents=True)
        write_json(path, document)
    return tmp_path


@pytest.fixture
def graded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The evidence that was graded."""
    found: list[str] = []
    real = summary.grade_documents

    def grade(folder: Path, evidence: list[str], *args: object) -> dict[str, Document]:
        if not folder.is_relative_to(BASELINE):
            found.extend(evidence)
        return real(folder, evidence, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(summary, "grade_documents", grade)
    return found


def shown(rows: list[Row]) -> list[tuple[str, str, str]]:
    return [(row.evidence, row.variant, row.outcome) for row in rows]


@pytest.mark.parametrize("how", ["edited", "grader", "variant", "cut", "verdict"])
def test_load_rows_grades_only_stale_cells(
    how: str,
    folder: Path,
    cases: Mapping[str, Case],
    graded: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored = rows = load_rows(folder, cases, write=True)
    first = rows[0].evidence
    graded.clear()
    if how == "edited":
        document = json.loads((folder / first).read_text())
        document["title"] = "another title"
        write_json(folder / first, document)
    elif how == "grader":
        stored = [replace(row, graded_by="other") if row.evidence == first else row for row in rows]
    elif how == "variant":
        stored = [row for row in rows if row is not rows[1]]
    write_rows(folder, stored)
    if how == "cut":
        lines = (folder / SUMMARY).read_bytes().splitlines(keepends=True)
        others = [line for line in lines if adapter(Row).validate_json(line).evidence != first]
        (folder / SUMMARY).write_bytes(b"".join(others) + lines[0][:200])
    elif how == "verdict":  # of a row that is otherwise fresh
        path = folder / SUMMARY
        path.write_bytes(
            path.read_bytes().replace(b'"outcome":"reproduced"', b'"outcome":"passed"', 1)
        )
    notes: list[str] = []
    again = load_rows(folder, cases, notes)
    assert graded == [first] and bool(notes) == (how == "verdict")
    if how == "edited":
        assert again[0].title == "another title"
    else:
        assert again == rows


@pytest.mark.parametrize("through", ["report", "show"])
def test_evidence_that_a_run_adds_while_it_is_read_is_graded_by_the_next_reader(
    through: str, folder: Path, cases: Mapping[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, path = summary.regrade, sorted(folder.rglob("*.json"))[0]

    def regrade_while_the_run_goes_on(*args: Any) -> Any:
        document = json.loads(path.read_text())
        document["title"] = "measured to its end"
        write_json(path, document)
        return real(*args)

    monkeypatch.setattr(summary, "regrade", regrade_while_the_run_goes_on)
    load_rows(folder, cases, write=True)
    monkeypatch.setattr(summary, "regrade", real)
    monkeypatch.setattr(runs, "scratch", lambda: folder)
    rows = load_rows(folder, cases) if through == "report" else runs.rows_of_cases([CASE])
    assert {row.title for row in rows if folder / row.evidence == path} == {"measured to its end"}


def test_load_rows_takes_roles_from_the_catalog_without_grading_again(
    folder: Path, cases: Mapping[str, Case], graded: list[str]
) -> None:
    before = load_rows(folder, cases, write=True)
    graded.clear()
    known = cases[CASE].variants
    assert (
        all(row.role == known[row.variant].role for row in before) and before[0].role == "unfixed"
    )
    variants = {
        **known,
        "synced": known["synced"].model_copy(update={"role": "probe", "help": "other words"}),
    }
    changed = load_rows(
        folder, {**cases, CASE: cases[CASE].model_copy(update={"variants": variants})}
    )
    synced = {(row.variant, row.role, row.help) for row in changed if row.variant == "synced"}
    assert synced == {("synced", "probe", "other words")} and graded == []
    assert {with_catalog(row, {}).role for row in before if not row.first} == {"probe"}, (
        "a case that is gone"
    )


def test_load_rows_names_damaged_evidence_and_loses_nothing_else(
    folder: Path, cases: Mapping[str, Case]
) -> None:
    rows = load_rows(folder, cases)
    path = folder / rows[0].evidence
    path.write_text(path.read_text()[:1000])
    notes: list[str] = []
    again = load_rows(folder, cases, notes)
    assert shown(again) == shown([row for row in rows if row.evidence != rows[0].evidence])
    assert len(notes) == 1 and str(path) in notes[0]


def test_load_rows_reads_what_a_run_appended(
    folder: Path, cases: Mapping[str, Case], graded: list[str]
) -> None:
    rows = load_rows(folder, cases)
    assert {row.variant for row in rows} >= {"unfixed"} and all(
        row.attempts or row.skipped for row in rows
    )
    for document in Store(folder).documents():
        summary.append_cell(folder, document, cases, summary.grading_keys(cases))
    graded.clear()
    assert shown(load_rows(folder, cases)) == shown(rows) and graded == []
    write_rows(folder, rows)
    began = time.process_time()
    for _ in range(10_000 // len(rows)):
        summary.stored_rows(folder, [])
    assert time.process_time() - began < 3, "10,000 rows"
    assert load_rows(folder, cases) == rows and graded == []
    line = json.loads(adapter(Row).dump_json(rows[0]))
    del line["title"]
    with pytest.raises(ValueError, match="title"):
        adapter(Row).validate_python(line)


@pytest.mark.parametrize(
    "how", ["verdict", "fingerprint", "settings", "record", "versions", "outcome", "truncated"]
)
def test_regrade_names_what_was_edited(how: str, folder: Path, cases: Mapping[str, Case]) -> None:
    rows = load_rows(folder, cases)
    write_rows(folder, rows)
    assert not any(regrade_folder(folder, cases)[1].values())
    path = folder / rows[0].evidence
    document = json.loads(path.read_text())
    attempt = document["variants"]["unfixed"]["attempts"][0]["observation"]
    if how == "verdict":
        write_rows(
            folder,
            [replace(row, verdict="FIXED") if row.variant == "unfixed" else row for row in rows],
        )
    elif how == "fingerprint":
        document["variants"]["unfixed"]["fingerprint"] = "edited"
    elif how == "settings":
        list(document["variants"].values())[-1]["settings"] = {"variant": "another"}
    elif how == "record":
        attempt["ranks"][0]["record"]["pid"] = attempt["ranks"][0]["pid"] + 1
    elif how == "versions":
        attempt["ranks"][0]["record"]["versions"]["torch"] = "9.9.9"
    elif how == "outcome":
        document["variants"]["unfixed"]["attempts"][0]["outcome"]["outcome"] = "passed"
    if how == "truncated":
        path.write_text(path.read_text()[:500])
    elif how != "verdict":
        write_json(path, document)
    found = regrade_folder(folder, cases)[1][
        {"verdict": "differences", "truncated": "damaged"}.get(how, "edited")
    ]
    assert found and all(rows[0].evidence in text or how == "verdict" for text in found)
    notes: list[str] = []
    left = {row.evidence for row in load_rows(folder, cases, notes)}
    contradicts = how in ("fingerprint", "settings", "record", "versions", "truncated")
    assert (rows[0].evidence in left) != contradicts, "a report does not grade it"
    assert any(rows[0].evidence in text for text in lost(notes)) == contradicts


@pytest.mark.parametrize("how", ["missing", "older", "edited", "lacks a cell"])
def test_rows_of_stacks_does_not_trust_a_summary_that_is_behind_its_evidence(
    how: str,
    folder: Path,
    cases: Mapping[str, Case],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What `upgrade` reads: a fix whose evidence shows the failure counts, whatever the summary
    says."""
    monkeypatch.setattr(runs, "scratch", lambda: tmp_path / "none")
    rows = load_rows(folder, cases, write=True)
    stacks = [{"torch": row.stack.versions["torch"]} for row in rows]
    assert shown(runs.rows_of_stacks(stacks, folder, [])) == shown(rows)
    path, file = folder / SUMMARY, folder / rows[0].evidence
    fix = next(
        row.variant for row in rows if row.evidence == rows[0].evidence and row.verdict == "FIXED"
    )
    document = json.loads(file.read_bytes())
    changed = document["variants"][fix]
    changed["attempts"] = copy.deepcopy(document["variants"]["unfixed"]["attempts"])
    for number, each in enumerate(changed["attempts"]):
        own = {"id": f"changed-{number}", "fingerprint": changed["fingerprint"]}
        each["observation"]["attempt"].update(own)
    if how == "edited":
        path.write_bytes(path.read_bytes().replace(b"reproduced", b"Reproduced", 1))
    elif how == "lacks a cell":
        path.write_bytes(
            b"".join(line for line in path.open("rb") if rows[0].evidence.encode() not in line)
        )
    write_json(file, document)
    if how == "missing":
        path.unlink()
    elif how != "older":
        os.utime(path, (time.time() + 9, time.time() + 9))
    found = runs.rows_of_stacks(stacks, folder, [])
    assert [
        row.verdict for row in found if (row.evidence, row.variant) == (rows[0].evidence, fix)
    ] == ["NOT_FIXED"]


@pytest.mark.parametrize("how", ["removed", "truncated"])
def test_evidence_that_is_lost_is_no_row_and_stops_an_upgrade(
    how: str, folder: Path, cases: Mapping[str, Case], capsys: pytest.CaptureFixture[str]
) -> None:
    evidence = load_rows(folder, cases, write=True)[0].evidence
    if how == "removed":
        (folder / evidence).unlink()
    else:
        (folder / evidence).write_bytes((folder / evidence).read_bytes()[:1000])
    notes: list[str] = []
    assert (
        evidence not in {row.evidence for row in runs.current_rows(folder, notes)}
        and evidence in notes[0]
    )
    ends = ("--from", "torch2.6-tf4.51", "--to", "current", f"case={CASE}")
    assert (
        main(["upgrade", *ends, f"results={folder}"]) == 3 and evidence in capsys.readouterr().err
    )
    main(["upgrade", *ends, f"results={folder}-mistyped"])
    assert f"{folder}-mistyped" in capsys.readouterr().err


def test_cell_that_did_not_end_is_reported_as_less_than_requested(
    folder: Path, cases: Mapping[str, Case]
) -> None:
    assert (
        not lacking(load_rows(folder, cases))
        and main(["report", str(folder), "--format", "json"]) == 0
    )
    file = sorted(folder.rglob("*.json"))[0]
    write_json(file, {**json.loads(file.read_bytes()), "complete": False})
    assert (
        lacking(load_rows(folder, cases)) and main(["report", str(folder), "--format", "json"]) == 3
    )


def test_run_whose_evidence_is_lost_is_no_passing_run(
    folder: Path, tmp_path: Path, cases: Mapping[str, Case]
) -> None:
    earlier, later = tmp_path / "runs" / "2", tmp_path / "runs" / "1"
    rows = load_rows(folder, cases, write=True)
    for place in (earlier, later):  # in the order of time, which their names do not have
        shutil.copytree(folder, place, ignore=shutil.ignore_patterns("runs"))
        runs.note(place, [], runs.ENDED)
        runs.store_exit_code(place, 0)
    assert [run.run_id for run in since_last_passing(later, rows, cases).passing] == [str(earlier)]
    assert not since_last_passing(earlier, rows, cases).passing
    for code, passed in ((1, False), (2, False), (3, True), (0, True)):
        runs.store_exit_code(earlier, code)
        assert bool(since_last_passing(later, rows, cases).passing) is passed
    (later / runs.MANIFEST).rename(later / "moved")
    assert not since_last_passing(
        later, rows, cases
    ).passing  # a folder that is no run, e.g. published results
    (later / "moved").rename(later / runs.MANIFEST)
    cell = " ".join(rows[0].cell[::-1])
    manifest = json.loads((earlier / runs.MANIFEST).read_bytes()) | {
        "planned": [cell, "cpu current case/not-there"]
    }
    for planned, partial in (([cell], False), (manifest["planned"], True)):
        (earlier / runs.MANIFEST).write_text(json.dumps({**manifest, "planned": planned}))
        previous = since_last_passing(later, rows, cases).previous
        assert previous and previous.partial == partial, "a cell that it measured is missing"
    (earlier / runs.MANIFEST).write_text(json.dumps({**manifest, "project": "/another/checkout"}))
    assert not since_last_passing(later, rows, cases).passing
    (earlier / runs.MANIFEST).write_text(json.dumps(manifest))
    for file in earlier.rglob("*.json"):
        file.unlink()
    assert not since_last_passing(later, rows, cases).passing


def test_closed_pipe_is_no_success() -> None:
    command = f"{shlex.quote(sys.executable)} -m repro_matrix list --json | true"
    assert subprocess.run(["bash", "-o", "pipefail", "-c", command]).returncode != 0
