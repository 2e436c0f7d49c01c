"""The proofs are proven: an honest run passes every check, and with the gradients' reduction left out, or one rank's
gradient scaled by 1.01, the parity with a single process fails, for every strategy and on real ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from repros.arm_settings import resolve

yaml = pytest.importorskip("yaml")
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs the stack `current` (torch)"),
]
ROOT = Path(__file__).resolve().parents[1]
CHECKS = ("steps", "loss", "gradient", "checkpoint")


def conf(group: str, name: str) -> dict:
    return yaml.safe_load((ROOT / "conf" / group / f"{name}.yaml").read_text(encoding="utf-8"))


def run_proofs(strategies: tuple[str, ...], folder: Path) -> list[dict]:
    """The facts that each of two ranks recorded: strategy/sabotage -> which checks passed."""
    settings = resolve(
        conf("case", "train-step"), "control", model=conf("model", "llama-3.2-1b"), strategy=conf("strategy", "ddp"),
        device="cpu", record_dir=str(folder), work_dir=str(folder),
    )  # fmt: skip
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1",
               "--master-port", str(port), str(ROOT / "tests" / "proofs_ranks.py"),
               "--settings", str(folder / "settings.json")]  # fmt: skip
    env = {**os.environ, "PROOF_STRATEGIES": ",".join(strategies)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))["facts"] for rank in (0, 1)]


@pytest.mark.parametrize("strategies", [("ddp", "fsdp", "fsdp2", "tp"), ("zero2", "zero3")], ids=",".join)
def test_parity_fails_exactly_when_the_gradients_are_wrong(strategies: tuple[str, ...], tmp_path: Path) -> None:
    if strategies[0].startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    for facts in run_proofs(strategies, tmp_path):
        for strategy in strategies:
            honest = facts[f"{strategy}/none"]
            assert all(honest[check] for check in CHECKS), (strategy, honest)
            for sabotage in ("skip_all_reduce", "scale_gradient"):
                wrong = facts[f"{strategy}/{sabotage}"]
                assert not wrong["gradient"], (strategy, sabotage, wrong)
                assert wrong["steps"], (strategy, sabotage, wrong)  # it ran to its end
