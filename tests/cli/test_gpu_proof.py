"""`repro gpu-proof` to its last line, with cards, a probe and a launcher that are made up: no GPU takes part."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import Card, FakeNvml
from fake_stack import lines, python_that_says
from repro_matrix.cli import gpu_proof
from repro_matrix.cli import main as cli
from repro_matrix.launch.attempt import Attempt
from repro_matrix.report.proof import of_step
from repro_matrix.runner import workspace as workplace
from repro_matrix.runner.model_facts import Known
from repro_matrix.runner.probe import Prober
from test_engine import Fake, observation

PROBE = {"torch": "2.13.0+cu130", "cuda": "13.0", "arch_list": ["sm_90"], "nccl_version": "2.29.3", "devices": []}


class Cards(Fake):
    """Every attempt is clean, but for the hang; ``cold_differs``: torchrun shows something else than the servers;
    ``no_server``: none came up, and everything was started from cold."""

    def __init__(
        self, cold_differs: bool = False, cold: bool = False, slow: bool = False, no_server: bool = False,
        broken: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.wrong = cold_differs and cold
        self.slow, self.broken = slow, broken
        self.no_server = no_server and not cold

    def launch(self, attempt: Attempt, stop: threading.Event) -> dict[str, Any]:
        assert attempt.settings["device"] == "cuda" and attempt.gpus, "a CPU cell among the GPU's"
        if self.slow:
            assert stop.wait(300), "nobody ended it"
            return observation(attempt, None, interrupted=True)
        if self.broken:
            return {**observation(attempt, None), "infra": {"kind": "device", "message": "a device that cannot be set"}}
        if attempt.settings["case"] in ("fsdp-rank0-state-dict", "ddp-uneven-batches"):
            return observation(attempt, None, timed_out=True)
        made = observation(attempt, None, **({"cold": "no warm server (cuda): because"} if self.no_server else {}))
        for rank in made["ranks"]:
            rank["record"]["peak_gpu_mb"] = 512.0
            rank["exit_code"] = 1 if self.wrong else 0
        return made


def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cards: int, minutes: float = 8, words: Sequence[str] = (),
    place: Sequence[str] | None = None, **kind: bool,
) -> tuple[int, list[Any]]:  # fmt: skip
    """The exit code, and the models whose memory was asked for."""
    asked: list[Any] = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    FakeNvml([Card("NVIDIA H200") for _ in range(cards)]).install(monkeypatch)
    monkeypatch.setattr(Prober, "__call__", lambda *_: (PROBE, None))
    monkeypatch.setattr("repro_matrix.launch.extensions.ready", lambda stack: False)
    monkeypatch.setattr(
        "repro_matrix.launch.extensions.prepare", lambda stack: pytest.fail("minutes, for cells of the CPU")
    )
    monkeypatch.setattr(Known, "ask", lambda self, models, imports: asked.extend(models))  # seconds of a real stack
    monkeypatch.setattr(workplace, "open_launcher", lambda name: Cards(cold=name == "torchrun", **kind))
    words = ["gpu-proof", "case=train-step,fsdp-rank0-state-dict", "model=qwen1.5-0.5b", *words]
    place = ["--out", str(tmp_path / "out")] if place is None else place
    return cli.main([*words, *place, "--minutes", str(minutes)]), asked


def proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cards: int,
    minutes: float = 8, words: Sequence[str] = (), **kind: bool,
) -> tuple[int, dict[str, Any]]:  # fmt: skip
    code, _ = run(tmp_path, monkeypatch, cards, minutes, [*words, "--json"], **kind)
    said = json.loads(capsys.readouterr().out)
    assert said["steps"] == json.loads((tmp_path / "out" / "proof.json").read_text())["steps"]
    return code, said["steps"]


def test_two_cards_go_through_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, steps = proof(tmp_path, monkeypatch, capsys, cards=2)
    assert list(steps) == ["environment", "cells", "cold", "hang", "memory"]
    assert not [step for step, found in steps.items() if "problem" in found]
    assert len(steps["environment"]["cards"]) == 2
    assert steps["environment"]["stacks"]["current"]["probe"]["cuda"] == "13.0"
    assert steps["cells"]["measured"] >= 6 and not steps["cells"]["cut"]
    assert steps["cold"]["compared"] >= 6 and steps["cold"]["differ"] == []
    assert [attempt["outcome"] for attempt in steps["hang"]["known"]] == ["hang"]
    assert steps["memory"]["most_mb"] == 512.0
    assert len(list((tmp_path / "out").rglob("*.json"))) > 10


def test_an_environment_that_is_there_needs_nothing_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`stack=python:...` counted as a stack still to be built, and DeepSpeed's op was compiled for it first."""
    python = python_that_says(tmp_path, *lines())
    _, steps = proof(tmp_path, monkeypatch, capsys, 2, words=[f"stack=python:{python}"])
    assert steps["cells"]["measured"] >= 6 and list(steps["environment"]["stacks"]) == [f"python:{python}"]


def test_one_card_shows_what_it_can_and_says_what_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, steps = proof(tmp_path, monkeypatch, capsys, cards=1)
    assert steps["cells"]["measured"] == 1, "DDP, with ranks that share the card"
    assert any("needs 2 GPUs" in why for why in steps["cells"]["elsewhere"])
    assert [attempt["outcome"] for attempt in steps["hang"]["known"]] == ["hang"], "of ranks that share it"
    assert "skipped" not in steps["hang"] and "problem" not in steps["hang"]


def test_cold_that_shows_something_else_is_exit_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, steps = proof(tmp_path, monkeypatch, capsys, cards=2, cold_differs=True)
    assert code == 1 and steps["cold"]["differ"]


def test_a_proof_that_the_time_cut_says_so_and_is_not_to_be_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It named servers that had not come up, and cards that nobody had used; and ``results=`` was not looked at."""
    out = tmp_path / "named"
    monkeypatch.setattr(gpu_proof, "SHARES", dict.fromkeys(gpu_proof.SHARES, 0.0))
    code, _ = run(tmp_path, monkeypatch, 2, words=[f"results={out}"], place=())
    said = capsys.readouterr().out
    assert code == 3 and "the time was over before an attempt had been made both ways" in said
    assert "no attempt was made before the time was over" in said
    assert f"nothing was measured; {out}" in said and "commit" not in said and (out / "proof.json").is_file()


def test_cold_beside_cold_is_no_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No server had come up, and the step said "6 compared, 0 differ"."""
    code, steps = proof(tmp_path, monkeypatch, capsys, cards=2, no_server=True)
    why = "no warm server (cuda): because"
    assert code == 3 and list(steps["cells"]["started_cold"]) == [why]
    assert steps["cold"]["problem"].startswith("no attempt was made both from cold and from a warm server; ")
    assert why in steps["cold"]["problem"]


def test_a_card_that_fails_in_every_rank_is_said_where_nothing_could_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One card, to the last line: it said that nothing was compared, and not why."""
    code, _ = run(tmp_path, monkeypatch, cards=1, broken=True)
    said = capsys.readouterr().out
    assert code == 3 and said.splitlines()[-1].startswith("exit code 3: ")
    assert "NO ANSWER: " in said and "a device that cannot be set" in said
    cold = json.loads((tmp_path / "out" / "proof.json").read_text())["steps"]["cold"]
    assert "a device that cannot be set" in cold["problem"]


def test_the_person_in_front_reads_what_differs_and_why_the_exit_code_is_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last line was the folder's name: exit 3 without a reason, and no case was named."""
    code, asked = run(tmp_path, monkeypatch, cards=2, cold_differs=True)
    text = capsys.readouterr().out
    assert asked, "memory is planned at tiny size too, else there is nothing to lay beside the peak"
    assert "CASES measured" in text and "fsdp-rank0-state-dict" in text
    assert "hang (" in text and "of 2 ranks 0 backtraces" in text and "NO PLAN to lay beside it" in text
    assert code == 1 and text.splitlines()[-1].startswith("exit code 1: ")
    assert "attempts come out otherwise from cold" in text.splitlines()[-1]


def test_memory_measured_stands_beside_what_was_planned() -> None:
    """A plan has the driver's own part, which torch's peak has not; what failed never got to its fullest moment."""

    def arm(outcome: str, peak: float | None) -> dict[str, Any]:
        ranks = [{"record": None}, {"record": {"peak_gpu_mb": peak}}]
        return {"attempts": [{"outcome": {"outcome": outcome}, "observation": {"ranks": ranks}}]}

    def plan(planned: float) -> dict[str, Any]:
        return {"device_rank_mb": 1000 + planned, "device": {"parts_mb": {"base": 1000.0}}}

    arms = {"broken": arm("fires", 10), "fix": arm("clean", 100), "more": arm("clean", 100),
            "unplanned": arm("clean", 300), "cpu": arm("clean", None)}  # fmt: skip
    document = {"key": "case/cell", "arms": arms, "hardware": {"profile": "gpu2"}}
    said = {"broken": 90, "fix": 110, "more": 70, "cpu": 5}
    plans = {json.dumps(["gpu2", "case/cell", name]): plan(planned) for name, planned in said.items()}
    found = gpu_proof.beside([document], plans)
    assert (found["attempts"], found["most_mb"], found["planned"]) == (4, 300, 2)
    assert found["worst"] == {"cell": "case/cell", "arm": "more", "peak_mb": 100, "planned_mb": 70, "off": -0.3}
    assert "planned for 2 of 4, at worst -30% (case/cell more: 70 planned, 100 measured)" in of_step(found)


def test_without_a_gpu_it_is_exit_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gpu-proof", "hardware=cpu", "case=train-step", "model=qwen1.5-0.5b", "strategy=ddp"]) == 3
    assert "there is no GPU here" in capsys.readouterr().err
    assert cli.main(["gpu-proof", "--minutes", "0"]) == 2


def test_every_step_ends_with_its_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Attempts that would never end by themselves: the last line is reached all the same."""
    code, steps = proof(tmp_path, monkeypatch, capsys, cards=2, minutes=0.02, slow=True)
    assert code == 3 and list(steps) == ["environment", "cells", "cold", "hang", "memory"]
    assert steps["cells"]["cut"] and steps["hang"]["cut"] and "problem" in steps["cold"]


def test_a_fault_of_ours_in_one_step_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("repro_matrix.cli.gpu_proof.cold", lambda proof: {}["missing"])
    code, steps = proof(tmp_path, monkeypatch, capsys, cards=2)
    assert code == 3 and "KeyError" in steps["cold"]["problem"] and steps["memory"]["most_mb"] == 512.0
