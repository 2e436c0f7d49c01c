"""A smoke run of each benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from observations import document, observation, ok, outcome
from repro_matrix.results.store import write_json

from bench import catalogue, launch, match, probe, report

PASSED = outcome("passed").to_json()


@pytest.mark.ranks
def test_launch_measures_both_launchers(tmp_path: Path) -> None:
    out = tmp_path / "launch.json"
    launch.main(["--kinds", "fsdp", "--ranks", "2", "--warm", "2", "--cold", "1", "--out", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    assert row["cold"]["cpu_s"] > row["forkserver"]["cpu_s"] > 0 and row["server"]["cpu_s"] > 0


@pytest.mark.ranks
def test_catalogue_runs_the_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    words = ["case=train-step", "model=qwen1.5-0.5b", "strategy=ddp", "repeat=1", "hardware=cpu"]
    row = catalogue.run("forkserver", tmp_path / "results", words)
    assert row["exit_code"] in (0, 1, 3) and row["attempts"] >= 1 and row["cpu_s"] > row["attempts_cpu_s"] > 0
    assert catalogue.outcomes(tmp_path / "results")


def test_probe_takes_off_the_cost_of_the_search_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert not rows[0]["names"] and rows[1]["names"] == rows[2]["names"] != []


def reproduced(signature: str) -> dict[str, Any]:
    known = {"case": "c", "signature": signature, "ranks": [0], "kind": "exception", "message": "m"}
    return {**PASSED, "outcome": "reproduced", "recognized": [known]}


def error(kind: str) -> dict[str, Any]:
    primary = {"rank": 0, "type": kind, "message": "m", "location": "x.py:1"}
    return {**PASSED, "outcome": "other_failure", "primary": primary}


def folder(root: Path, **cells: dict[str, list[dict[str, Any]]]) -> Path:
    for name, variants in cells.items():
        result = document({variant: [("passed", observation(ok(0)))] * len(variants[variant]) for variant in variants})
        for variant, outcomes in variants.items():
            for attempt, judged in zip(result["variants"][variant]["attempts"], outcomes):
                attempt["outcome"] = judged
        path = root / "cpu" / "stack" / "c" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**result, "case": "c", "cell_id": f"c/{name}"})
    return root


def test_catalogue_differences_names_every_difference(tmp_path: Path) -> None:
    m, n = {"unfixed": [reproduced("s")], "other": [error("OSError")]}, {"unfixed": [PASSED]}
    one = folder(tmp_path / "one", m={**m, "fix": [PASSED, error("OSError")]}, n=n)
    same = folder(tmp_path / "same", m={**m, "fix": [error("OSError"), PASSED]}, n=n)
    other = folder(tmp_path / "other", m={"unfixed": [reproduced("t")], "fix": [PASSED], "other": [error("KeyError")]})
    assert list(catalogue.differences(one, same)) == []
    assert [line.split(":")[0] for line in catalogue.differences(one, other)] == [
        "c/m fix", "c/m other", "c/m unfixed", "c/n unfixed"
    ]  # fmt: skip


def test_report_times_the_baseline_and_synthetic_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "report.json"
    monkeypatch.setattr("sys.argv", ["report", "--rows", "20", "--output", str(output)])
    report.main()
    measured = json.loads(output.read_text())
    assert measured["synthetic"]["rows"] >= 20 and measured["baseline"]["page_mb"] > 1
