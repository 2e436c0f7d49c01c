"""A strategy, a hardware profile, a launcher and a check, each added by the files that the docs name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from conftest import Repro
from fake_nvml import FakeGpu, FakeNvml
from fake_stack import lines, python_that_says
from repro_matrix.config.settings import compose_run
from repro_matrix.errors import ConfigError
from repro_matrix.launch import open_launcher
from repro_matrix.paths import CONF
from repro_matrix.results.store import Store

TEAM = Path(__file__).parents[1] / "team"
STRATEGY = """
slug: halves
title: a strategy of ours
invariants: {{parameters: {held}, collectives: [gather]}}
{memory}
source_files: ['our_parallel/engine\\.py']
"""
LOG = """
[rank0]: Traceback (most recent call last):
[rank0]:   File "/srv/train.py", line 20, in <module>
[rank0]:     engine(batch)
[rank0]:   File "/env/lib/python3.11/site-packages/our_parallel/engine.py", line 7, in forward
[rank0]:     return self.module(batch)
[rank0]:   File "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 125, in forward
[rank0]:     return F.linear(input, self.weight, self.bias)
[rank0]: RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x3 and 4x2)
"""
CASE = """
slug: lost-rank
title: a sum leaves out a rank
kind: failure
pass_criteria: {kind: inference, checks: [every-rank-counts]}
launch: {world_size: 2, deadline: 60, imports: [torch]}
axes: {model: [our-head], strategy: [by-hand]}
flags:
  added: {default: none, choices: [none, half, whole], help: what the last rank adds}
signatures:
  - {name: lost, kind: check, check: every-rank-counts}
variants:
  unfixed: {help: nothing of the last rank}
  half: {role: non_fix, flags: {added: half}, help: half of it}
  whole: {role: fix, flags: {added: whole}, help: all of it}
"""
CHECK = """
from repro_kit import Run, main

import torch
import torch.distributed as dist


def body(run: Run) -> None:
    share = {"none": 0.0, "half": 0.5, "whole": 1.0}[run.flags["added"]]
    total = torch.full((1,), share if run.rank else 1.0, device=run.device)
    dist.all_reduce(total)
    run.check("every-rank-counts", actual=total.tolist(), expected=[2.0], tolerance=0.0)


if __name__ == "__main__":
    main(body)
"""
PLUG_IN = """
from repro_matrix.launch.torchrun import TorchrunLauncher

class Ours(TorchrunLauncher):
    name = "ours"
"""


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A folder for --config-dir with a strategy, a profile, and train-step under this strategy."""
    folder = tmp_path / "conf"
    for group in ("case", "strategy", "hardware"):
        (folder / group).mkdir(parents=True)
    gpu16 = "{slug: gpu16, title: 16 GPUs, accelerator: cuda, gpus: 16}"
    (folder / "hardware" / "gpu16.yaml").write_text(gpu16)
    case = yaml.safe_load((CONF / "case" / "train-step.yaml").read_text())
    case |= {"slug": "our-step", "script": "train_step.py"}
    case["axes"] = {"model": ["llama-2-7b"], "strategy": ["halves"]}
    (folder / "case" / "our-step.yaml").write_text(yaml.safe_dump(case))
    return folder


def planned(
    repro: Repro, conf: Path, held: str, memory: str, *words: str, gpus: int = 0
) -> tuple[dict[str, object], str]:
    text = STRATEGY.format(held=held, memory=f"memory: {memory}" if memory else "")
    (conf / "strategy" / "halves.yaml").write_text(text)
    done = repro(
        FakeNvml([FakeGpu() for _ in range(gpus)]),
        *("matrix", "--config-dir", str(conf), "case=our-step", "scale=full", "--dry-run"),
        *("--json", *(words or ("hardware=cpu",))),
        env={"REPRO_CONFIG_PATH": ""},  # so that the fixture restores it
    )
    assert done.out, done.err
    (item,) = json.loads(done.out)
    return item, done.err


def test_strategy_from_outside_is_planned_with_its_own_memory(repro: Repro, conf: Path) -> None:
    needs = {}
    for held, memory in (
        ("whole", "{weights: 3}"),
        ("shard", "{weights: 3}"),
        ("shard", "{weights: 3, optimizer_bytes: 12}"),
    ):
        item, said = planned(repro, conf, held, memory)
        assert item["strategy"] == "halves" and "does not show" not in said
        needs[held, memory] = item["memory"]["host_node_mb"]  # type: ignore[index]
    whole, shard, optimizer = needs.values()
    assert shard < 0.6 * whole and optimizer - shard == pytest.approx(
        12 * 6.738e9 / 2**20, rel=0.01
    )


def test_strategy_from_outside_without_memory_is_not_planned_in_silence(
    repro: Repro, conf: Path
) -> None:
    item, said = planned(repro, conf, "shard", "")
    assert item["memory"] is None and item["skipped"] is None
    assert "strategy halves: its file has no `memory`" in " ".join(said.split())


def test_hardware_profile_from_outside_is_planned_for(
    repro: Repro, conf: Path, tmp_path: Path
) -> None:
    stack = f"stack=python:{python_that_says(tmp_path, *lines(16))}"
    item, _ = planned(repro, conf, "shard", "{weights: 2}", "hardware=gpu16", stack, gpus=16)
    assert item["hardware"] == "gpu16" and item["skipped"] is None
    assert item["memory"]["device_rank_mb"] > 1024  # type: ignore[index]


def test_strategy_from_outside_is_recognized_in_a_log(
    repro: Repro, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signature of odd-batch fits; the code of another strategy in the traceback rules it out."""
    team = Path(shutil.copytree(TEAM, tmp_path / "team"))
    monkeypatch.chdir(team)
    log = tmp_path / "train.log"
    log.write_text(LOG)
    strategies = team / "failures" / "strategy"
    assert "odd-batch" in repro(FakeNvml([]), "match", str(log)).out
    other = STRATEGY.format(held="shard", memory="")
    (strategies / "halves.yaml").write_text(other)
    assert "odd-batch" not in repro(FakeNvml([]), "match", str(log)).out
    own = (strategies / "by-hand.yaml").read_text().rstrip()[:-1]
    (strategies / "by-hand.yaml").write_text(own + ", source_files: [our_parallel]}")
    assert "odd-batch" in repro(FakeNvml([]), "match", str(log)).out


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with a launcher."""
    site = tmp_path / "site"
    (site / "ours-1.0.dist-info").mkdir(parents=True)
    (site / "ours-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\n")
    points = "[repro_matrix.launchers]\nours = our_launcher:Ours\n"
    (site / "ours-1.0.dist-info" / "entry_points.txt").write_text(points)
    (site / "our_launcher.py").write_text(PLUG_IN)
    monkeypatch.syspath_prepend(site)


def test_launcher_from_outside_is_found_by_its_name(plug_in: None) -> None:
    assert (
        compose_run(["launcher=ours"]).launcher == "ours" and open_launcher("ours").name == "ours"
    )
    with pytest.raises(ConfigError, match=r"launcher: no such launcher; did you mean 'ours'"):
        compose_run(["launcher=our"])


@pytest.mark.ranks
def test_run_with_launcher_and_strategy_from_outside(
    plug_in: None, repro: Repro, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shutil.copytree(TEAM, tmp_path / "team"))
    results = tmp_path / "results"
    words = ("launcher=ours", "repeat=1", "hardware=cpu", f"results={results}")
    assert repro(FakeNvml([]), "run", "odd-batch", *words).code == 0
    (stored,) = Store(results).documents()
    attempts = [each for name in stored["variants"].values() for each in name["attempts"]]
    assert {each["observation"]["attempt"]["launcher"] for each in attempts} == {"ours"}
    shown = repro(FakeNvml([]), "report", str(results), "--format", "text").out
    assert "odd-batch" in shown and "drop-last" in shown


@pytest.mark.ranks
def test_check_from_outside_decides_in_a_run_and_is_in_the_report(
    repro: Repro, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case and its own check are two files of a catalog; no file of the harness has them."""
    team = Path(shutil.copytree(TEAM, tmp_path / "team"))
    monkeypatch.chdir(team)
    (team / "failures" / "case" / "lost-rank.yaml").write_text(CASE)
    (team / "failures" / "scripts" / "lost_rank.py").write_text(CHECK)
    words = ("case=lost-rank", "repeat=1", "hardware=cpu", f"results={tmp_path / 'results'}")
    plan = json.loads(repro(FakeNvml([]), "matrix", *words, "--dry-run", "--json").out)
    planned = {item["variant"]: item["skipped"] for item in plan}
    assert planned == {"unfixed": None, "half": None, "whole": None}
    done = repro(FakeNvml([]), "matrix", *words)
    report = ("report", str(tmp_path / "results"), "--format")
    rows = json.loads(repro(FakeNvml([]), *report, "json").out)["rows"]
    found = {row["variant"]: row["verdict"] or row["outcome"] for row in rows}
    assert found == {"unfixed": "reproduced", "half": "NOT_FIXED", "whole": "FIXED"}, done.err
    page = repro(FakeNvml([]), *report, "html", "--output", "-").out
    assert "failed: every-rank-counts [1.5]" in page and "passed: every-rank-counts" in page
