"""weights=hub: one download before the run; what cannot be had is a skip that says why. The hub is
a fake module."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import pytest
from repro_matrix.config import catalog as catalogue
from repro_matrix.config import selection as overrides
from repro_matrix.config.settings import RunSettings
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile
from repro_matrix.environment.stacks import Stack
from repro_matrix.environment.stacks.spec import StackError
from repro_matrix.errors import ReproError
from repro_matrix.planning import cells as matrix
from repro_matrix.planning.cells import place
from repro_matrix.planning.plan import CellPlan, Planner
from repro_matrix.runner import prerequisites, session
from repro_matrix.runner.prerequisites import download, with_weights

CATALOGUE = catalogue.load()
HUB = """
import atexit, os
atexit.register(print, "bye")  # as a sitecustomize may
class GatedRepoError(Exception): pass
class LocalEntryNotFoundError(Exception): pass
def snapshot_download(name, allow_patterns=None):
    with open(os.environ["FAKE_HUB_LOG"], "a") as log:
        log.write(name + "\\n")
    if "Llama" in name:
        raise GatedRepoError("401: you must be granted access")
    if "14B" in name:
        raise LocalEntryNotFoundError("cannot find an appropriate cached snapshot folder")
    return "/somewhere"
"""


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """This Python, with a huggingface_hub of its own."""
    (tmp_path / "huggingface_hub.py").write_text(HUB, encoding="utf-8")
    monkeypatch.setenv("FAKE_HUB_LOG", str(tmp_path / "asked"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    versions = {"torch": "2.13.0", "transformers": "5.23.0", "deepspeed": "0.19.8"}
    return Stack("current", sys.executable, versions, path=(str(tmp_path),))


def plans(stack: Stack, *texts: str, weights: Literal["random", "hub"] = "hub") -> list[CellPlan]:
    machine, profile = Machine((), None, "cpu", 2, 24.0, "linux"), Profile("cpu", "cpu", "gloo", ())
    named = matrix.enumerate_cells(
        CATALOGUE, overrides.parse_overrides(["case=train-step", *texts])
    )
    cells = place(CATALOGUE, named, [profile], auto=False)[0]
    stacks = {"current": stack}
    return Planner(
        CATALOGUE, RunSettings(weights=weights), {"cpu": profile}, machine, stacks, {}
    ).plan(cells)


def test_weights_are_downloaded_once_per_model_and_a_failure_skips_its_cells(
    stack: Stack, tmp_path: Path
) -> None:
    found = with_weights(
        plans(stack, "model=qwen1.5-0.5b,qwen-14b", "strategy=ddp,fsdp"), {"current": stack}
    )
    assert [plan.skipped is None for plan in found] == [
        plan.cell.model == "qwen1.5-0.5b" for plan in found
    ]
    asked = (tmp_path / "asked").read_text(encoding="utf-8").split()
    assert sorted(asked) == ["Qwen/Qwen-14B", "Qwen/Qwen1.5-0.5B"]
    random = plans(stack, "model=qwen-14b", "strategy=ddp", weights="random")
    assert with_weights(random, {"current": stack}) == random
    assert download(stack, "Qwen/Qwen1.5-0.5B") is None, (
        "although the process prints more than its answer"
    )


def test_download_failure_gives_the_reason(stack: Stack) -> None:
    for name, reason in [
        ("meta-llama/Llama-2-7b-hf", "HF_TOKEN"),
        ("Qwen/Qwen-14B", "LocalEntryNotFoundError: cannot find"),
    ]:
        problem = download(stack, name)
        assert problem and problem.startswith(f"weights=hub: {name}") and reason in problem


@pytest.mark.parametrize(("case", "built"), [("fsdp2-optimizer-first", 0), ("ddp-ready-once", 1)])
def test_stack_is_built_only_if_its_pins_let_something_run(
    case: str, built: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`repro run` built a stack for minutes, and then skipped every variant on it."""
    resolved: list[str] = []

    def resolve(name: str) -> Stack:
        resolved.append(name)
        raise StackError("not built in this test")

    monkeypatch.setenv("REPRO_CACHE", str(tmp_path))
    monkeypatch.setattr(prerequisites, "resolve", resolve)
    words = [f"case={case}", "stack=colossalai", "variants=[unfixed]", "hardware=cpu"]
    if built:
        with pytest.raises(ReproError, match="not built in this test"):
            session.prepare(words, build_stacks=True)
    else:
        (variant,) = session.prepare(words, build_stacks=True).plans[0].variants
        assert variant.skipped and "torch>=2.7 (it has 2.4.1)" in variant.skipped
    assert len(resolved) == built
