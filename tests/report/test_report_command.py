"""`repro report`: folders in, files out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml
from report_cells import rows, stored_cell
from repro_matrix.changes import history
from repro_matrix.cli.main import main
from repro_matrix.config import project
from repro_matrix.errors import ResultsError
from repro_matrix.report import formats
from repro_matrix.report.page import write_site
from repro_matrix.report.page_model import cells_of
from repro_matrix.results import runs
from repro_matrix.results.store import write_json

SLUG = "fsdp-generate"


def store(folder: Path, name: str = "cell", **changes: Any) -> Path:
    path = folder / "cpu" / "stack" / SLUG / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, stored_cell(case=SLUG, **changes) | {"cell_id": f"{SLUG}/{name}"})
    return path


@pytest.fixture(autouse=True)
def nothing_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """New results are graded beside the published ones, which takes seconds."""
    monkeypatch.setattr(project, "published", list)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store(tmp_path / "mine")
    return tmp_path / "mine"


def test_report_writes_a_page_a_site_and_the_formats(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    site = folder.parent / "site"
    assert main(["report", str(folder), "--site", str(site)]) == 0
    assert {path.name for path in site.iterdir()} == {"index.html", "badge.json", f"{SLUG}.html"}
    badge = json.loads((site / "badge.json").read_text(encoding="utf-8"))
    assert (
        badge["schemaVersion"] == 1
        and badge["label"] == "known failures"
        and badge["color"] in ("red", "green")
    )
    capsys.readouterr()
    assert main(["report", str(folder), "--format", "json"]) == 0
    assert {row["case"] for row in json.loads(capsys.readouterr().out)["rows"]} == {SLUG}
    for name in ("junit", "markdown"):
        assert (
            main(["report", str(folder), "--format", name, "--output", str(folder.parent / name)])
            == 0
        )
        assert (folder.parent / name).stat().st_size > 50


def test_report_selects_by_area_and_silence(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def code(*words: str) -> int:
        return main(["report", str(folder), "--format", "text", *words])

    assert (code("silent=false"), code("silent=true")) == (0, 2)
    assert (code("area=s*,launch"), code("area=data")) == (0, 2)
    assert "unknown axis" not in capsys.readouterr().err
    assert code("sillent=true") == 2 and "did you mean 'silent'" in capsys.readouterr().err


def test_another_distribution_adds_a_format(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = tmp_path / "plugin"
    (site / "slugs-1.0.dist-info").mkdir(parents=True)
    (site / "slugs.py").write_text(
        "def slugs(found):\n    return found.title + ''.join(row.case for row in found.headline.rows[:1])\n"
    )
    (site / "slugs-1.0.dist-info" / "METADATA").write_text("Name: slugs\nVersion: 1.0\n")
    (site / "slugs-1.0.dist-info" / "entry_points.txt").write_text(
        f"[{formats.GROUP}]\nslugs = slugs:slugs\n"
    )
    assert main(["report", str(folder), "--format", "slugs"]) == 2, "not installed"
    monkeypatch.syspath_prepend(str(site))
    capsys.readouterr()
    assert main(["report", str(folder), "--format", "slugs"]) == 0
    assert capsys.readouterr().out == f"repro-matrix: run mine{SLUG}"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["case=fsdp-generat"], "did you mean"),
        (["cas=x"], "did you mean 'case'"),
        (["--output", "{here}"], "cannot be written"),
        (["--output", "{here}/x.json"], "read as evidence"),
        (["--site", "{here}/site", "--format", "json"], "--site"),
        (["--history", "{here}/no"], "no such folder"),
    ],
)
def test_report_names_bad_input(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    given = [one.format(here=folder) for one in arguments]
    assert main(["report", str(folder), *given]) == 2 and part in capsys.readouterr().err


def test_report_of_a_folder_without_results_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2 and "no results" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "missing")]) == 2


def test_report_of_a_run_that_measured_nothing_is_not_green(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / runs.MANIFEST).write_text(
        json.dumps({"schema": 1, "texts": [], "state": runs.ENDED})
    )
    assert main(["report", str(tmp_path)]) == 3
    assert "Nothing was measured." in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_report_of_edited_versions_is_not_green(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every attempt then ran on other releases than its document says: none is evidence."""
    path = next(folder.rglob("cell.json"))
    stored = json.loads(path.read_text(encoding="utf-8"))
    for made in stored["variants"].values():
        for rank in made["attempts"][0]["observation"]["ranks"]:
            rank["record"]["versions"] = {"torch": "2.13.0"}
    write_json(path, stored)
    assert main(["report", str(folder)]) == 0
    stored["stack"]["versions"]["torch"] = "2.1.0"
    write_json(path, stored)
    capsys.readouterr()
    assert main(["report", str(folder), "--format", "text"]) == 3
    text = " ".join(capsys.readouterr().err.split())
    assert "rank 0 had torch 2.13.0, the stack 2.1.0" in text and "variant unfixed" in text


def test_report_of_damaged_evidence_reports_the_rest_and_is_not_green(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(folder, "other", model="n").write_text("{", encoding="utf-8")
    assert main(["report", str(folder), "--format", "junit"]) == 3
    captured = capsys.readouterr()
    assert "other.json" in captured.err
    xml = JUnitXml.fromstring(captured.out.encode())
    assert xml.errors == 1 and {suite.name for suite in xml} == {SLUG, "results", "headline"}
    assert main(["report", str(folder)]) == 3
    assert "other.json" in (folder / "report.html").read_text(encoding="utf-8")


def test_report_of_deleted_evidence_names_the_cell_each_time(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = store(folder, "other", model="n")
    assert main(["report", str(folder)]) == 0
    for path in (other, *folder.rglob("cell.json")):  # one of two, then the last one
        path.unlink()
        for _ in range(2):
            capsys.readouterr()
            assert main(["report", str(folder), "--format", "markdown"]) == 3
            assert f"{path}: missing" in " ".join(capsys.readouterr().err.split())


def test_report_names_a_cell_that_is_lost_with_its_rows(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = [
        f"cpu {stored_cell()['stack']['name']} {SLUG}/{name}" for name in ("cell", "other", "late")
    ]
    for state, code in ((runs.UNFINISHED, 3), (runs.ENDED, 0)):
        store(folder, "other", model="n")
        runs.note(folder, [], state, planned[2:], planned=planned)
        assert main(["report", str(folder)]) == code
    store(folder, "other", model="n").unlink()
    (folder / "summary.jsonl").unlink()
    capsys.readouterr()
    assert main(["report", str(folder), "--format", "text"]) == 3
    text = " ".join(capsys.readouterr().err.split())
    assert planned[1] in text and planned[0] not in text and planned[2] not in text
    manifest = folder / runs.MANIFEST
    manifest.write_text(manifest.read_text(encoding="utf-8")[:30], encoding="utf-8")
    store(folder, "other", model="n")
    assert main(["report", str(folder)]) == 3  # whether the run ended is not known


def test_report_names_unknown_cases_and_how_to_continue_an_interrupted_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "cpu" / "stack" / "of-another-team" / "cell.json"
    path.parent.mkdir()
    write_json(path, stored_cell(case="of-another-team") | {"cell_id": "of-another-team/cell"})
    (folder / runs.MANIFEST).write_text(
        json.dumps({"schema": 1, "texts": [], "state": runs.UNFINISHED})
    )
    assert main(["report", str(folder), "--format", "markdown"]) == 3
    out = capsys.readouterr().out.replace("\\", "")
    assert out.count("of-another-team") == 1 and "repro matrix --resume results=" in out


def test_report_of_several_folders_names_the_folder_of_each_cell(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for one in folders:
        store(one)
    target = tmp_path / "page.html"
    assert main(["report", *map(str, folders), "--output", str(target)]) == 0
    text = target.read_text(encoding="utf-8")
    assert "\none\n" in text and "\ntwo\n" in text


def test_report_shows_the_history_of_nightly_runs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = cells_of(rows(stored_cell("NOT_FIXED", case=SLUG)))
    run = history.make_run("this run", [row for one in stored for row in one.rows], 0)
    history.store_run(tmp_path, run)
    command = ["report", str(folder), "--history", str(tmp_path)]
    assert main([*command, "--format", "text"]) == 0
    assert "has no earlier run that passed" in " ".join(capsys.readouterr().out.split()), (
        "not compared with itself"
    )
    earlier = tuple(replace(row, started=row.started - 9) for row in run.rows)
    history.store_run(tmp_path, replace(run, run_id="monday", rows=earlier))
    assert main(command) == 0
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "monday" in text and "these results" in text and "this run" not in text


def test_a_site_is_not_written_among_other_files(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ResultsError, match="other files"):
        write_site(tmp_path, {"index.html": "repro-matrix"})
    write_site(tmp_path / "new", {"index.html": "repro-matrix"})
    write_site(tmp_path / "new", {"index.html": "repro-matrix, again"})
    assert "again" in (tmp_path / "new" / "index.html").read_text()


def test_report_shows_the_cells_of_all_folders(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(folder.parent / "other", "other")
    store(folder.parent / "other")
    assert main(["report", str(folder), str(folder.parent / "other"), "--format", "json"]) == 0
    variants = json.loads(capsys.readouterr().out)["rows"]
    cells = {(each["results"], Path(each["document"]).stem) for each in variants}
    assert cells == {("mine", "cell"), ("other", "cell"), ("other", "other")}, "one is in both"
