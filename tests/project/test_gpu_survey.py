"""The GPU survey as a dry run on the CPU: its file, and whether the grader takes its records."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repro_matrix.grading.observation import is_project_code
from repro_matrix.paths import ROOT
from repro_matrix.records.attempt import RankRecord
from repro_matrix.records.document import adapter

from bench import gpu_survey

pytestmark = pytest.mark.ranks
COMMAND = [sys.executable, str(ROOT / "bench" / "gpu_survey.py")]


def only(*patterns: str) -> list[str]:
    return [word for pattern in patterns for word in ("--only", pattern)]


@pytest.mark.slow
def test_survey_without_a_gpu_records_stand_ins_and_skips_the_rest(tmp_path: Path) -> None:
    out = tmp_path / "survey.json"
    patterns = only(
        "wait.*",
        "error.bad_index.item",
        "error.freed_view.item",
        "gloo.all_reduce",
        "nccl.two_hosts.*",
    )
    subprocess.run(
        [*COMMAND, "--out", str(out), *patterns], check=True, timeout=200, capture_output=True
    )
    text = out.read_text(encoding="utf-8")
    probes: dict[str, dict[str, Any]] = json.loads(text)["probes"]
    ran = {name: probe for name, probe in probes.items() if probe["status"] != "skipped"}
    for probe in ran.values():
        for rank in probe["ranks"]:
            adapter(RankRecord).validate_python(rank)
    assert str(ROOT) not in text and sys.prefix not in text, "no path of this machine"
    index, freed = ran["error.bad_index.item"]["ranks"][0], ran["error.freed_view.item"]["ranks"][0]
    frames = index["record"]["exception"]["frames"]
    assert (
        index["record"]["exception"]["type"] == "IndexError"
        and index["record"]["phase"] == "launch"
    )
    assert is_project_code(frames[0]["module"], frames[0]["file"])
    assert frames[-1]["code_location"] == "torch.nn.functional"
    assert freed["signal"] == "SIGSEGV" and "freed_view" in freed["stack"]
    assert (
        ran["wait.held"]["facts"]["turns_per_s"] < 0.1 * ran["wait.sleep"]["facts"]["turns_per_s"]
    )
    assert "wait" in "".join(ran["wait.held"]["facts"]["stack"]), (
        "the stack of the wait, while it held the GIL"
    )
    assert (
        ran["gloo.all_reduce"]["status"] == "passed" and len(ran["gloo.all_reduce"]["ranks"]) == 2
    )
    assert probes["nccl.two_hosts.fsdp1"] == {"status": "skipped", "reason": "no GPU"}


@pytest.mark.slow
def test_survey_that_is_killed_keeps_every_finished_probe(tmp_path: Path) -> None:
    out = tmp_path / "survey.json"
    command = [*COMMAND, "--out", str(out), *only("wait.*", "gloo.*")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as survey:
        assert survey.stdout is not None
        next(line for line in survey.stdout if line.startswith("wait.sleep"))
        survey.kill()
    probes = json.loads(out.read_text(encoding="utf-8"))["probes"]
    assert (
        probes.keys() == {"machine", "wait.sleep"}
        and probes["wait.sleep"]["facts"]["turns_per_s"] > 0
    )


def test_probe_beyond_its_limit_is_ended_and_leaves_its_stack(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import threading; threading.Event().wait()", encoding="utf-8"
    )
    probe = next(probe for probe in gpu_survey.PROBES if probe.name == "gloo.all_reduce")
    entry = gpu_survey.run_probe(
        dataclasses.replace(probe, env={"PYTHONPATH": str(tmp_path)}), "cpu", 0.0
    )
    assert entry["status"] == "timeout"
    assert {rank["terminated_by"] for rank in entry["ranks"]} == {"timeout"}
    assert all(
        rank["signal"] == "SIGKILL" and "gpu_survey.py" in str(rank["stack"])
        for rank in entry["ranks"]
    )


def test_survey_beyond_its_limit_starts_no_probe(tmp_path: Path) -> None:
    document = gpu_survey.survey(tmp_path / "survey.json", ["wait.sleep"], 0)
    assert gpu_survey.main(["--out", str(tmp_path / "none.json"), "--only", "no-such-probe"]) == 1
    (reason,) = {entry["reason"] for entry in document["probes"].values()}
    assert "limit" in reason and document["probes"].keys() == {"machine", "wait.sleep"}


def test_every_probe_has_a_name_and_limits_of_its_own() -> None:
    names = [probe.name for probe in gpu_survey.PROBES]
    assert len(names) == len(set(names)) > 60 and all(
        probe.limit_s <= 60 for probe in gpu_survey.PROBES
    )
    hosts = {
        probe.env.get("NCCL_HOSTID", "").format(rank=rank)
        for probe in gpu_survey.PROBES
        for rank in (0, 1)
    }
    assert {"survey-0", "survey-1"} < hosts
    recorder = {
        name for probe in gpu_survey.PROBES for name in probe.env if name.endswith("_BUFFER_SIZE")
    }
    assert recorder == {"TORCH_FR_BUFFER_SIZE"}, "torch warns of the other name"
