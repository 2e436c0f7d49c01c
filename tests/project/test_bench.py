"""A smoke run of each benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import catalogue, chromium, launch, match, probe, report, triggers
from bench.plants import table


@pytest.mark.slow
@pytest.mark.ranks
def test_launch_measures_both_launchers(tmp_path: Path) -> None:
    out = tmp_path / "launch.json"
    launch.main(
        ["--kinds", "fsdp", "--ranks", "2", "--warm", "2", "--cold", "1", "--out", str(out)]
    )
    (row,) = json.loads(out.read_text())["rows"]
    assert row["cold"]["cpu_s"] > row["forkserver"]["cpu_s"] > 0 and row["server"]["cpu_s"] > 0


@pytest.mark.slow
@pytest.mark.ranks
def test_catalogue_runs_the_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    words = ["case=train-step", "model=qwen1.5-0.5b", "strategy=ddp", "repeat=1", "hardware=cpu"]
    row = catalogue.run("forkserver", tmp_path / "results", words)
    assert (
        row["exit_code"] in (0, 1, 3)
        and row["attempts"] >= 1
        and row["cpu_s"] > row["attempts_cpu_s"] > 0
    )
    assert catalogue.outcomes(tmp_path / "results")


def test_probe_takes_off_the_cost_of_the_search_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = iter([(True, 10.0), (False, 4.0)])

    def command(*words: str, env: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        launched, cpu_s = next(costs)
        return {"probes": [{"launched": launched}] * 2}, {"wall_s": cpu_s, "cpu_s": cpu_s}

    monkeypatch.setattr(probe, "command", command)
    assert probe.measure(["case"], tmp_path)["each"] == {"wall_s": 3.0, "cpu_s": 3.0}


def test_match_reads_every_kind_of_log(tmp_path: Path) -> None:
    match.main(["--bytes", "2000000", "--out", str(tmp_path / "match.json")])
    rows = json.loads((tmp_path / "match.json").read_text())["rows"]
    assert [row["log"] for row in rows] == list(match.KINDS)
    assert [bool(row["names"]) for row in rows] == [False, False, True, True]


@pytest.mark.slow
def test_report_times_the_baseline_and_synthetic_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "report.json"
    monkeypatch.setattr("sys.argv", ["report", "--rows", "20", "--output", str(output)])
    report.main()
    measured = json.loads(output.read_text())
    assert measured["synthetic"]["rows"] >= 20 and measured["baseline"]["page_mb"] > 1
    assert chromium.PATH is None or measured["synthetic"]["ready_ms"] > 0


def test_page_of_planted_errors_shows_what_was_measured() -> None:
    measured = json.loads((table.PAGE.parents[2] / "bench" / "plants.json").read_text())
    assert table.PAGE.read_text() == table.page(measured)
    counted = [row for row in measured["planted"] if "answer" in row]
    assert sum(row["right"] for row in counted) >= 0.95 * len(counted)
    assert len(measured["healthy"]) >= 100 and all(
        row["verdict"] == "agrees" for row in measured["healthy"]
    )
    for strategy in table.STRATEGIES:
        assert len({row["kind"] for row in counted if row["strategy"] == strategy}) >= 16


def test_triggers_removes_each_step_once_and_no_evidence() -> None:
    source = """
def body(run):
    model = made()
    with no_grad():
        model.load(1)
    run.check("loaded", actual=model)
    model.count += 1
    model.mode = "train"
"""
    found = dict(triggers.mutants(source))
    assert sorted(found) == [
        "4: with no_grad():",
        "5: model.load(1)",
        "7: model.count += 1",
        "8: model.mode = 'train'",
    ]
    assert "model.load(1)" in found["4: with no_grad():"]
    for statement, text in found.items():
        assert statement.partition(": ")[2] not in text and "run.check" in text
