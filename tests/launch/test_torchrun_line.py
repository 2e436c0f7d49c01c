"""The line that `repro show` prints, run in an empty shell: the same stack and the same errors as in a run."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import launched, recipe_of
from repro_matrix.cli import main as cli
from repro_matrix.environment import stacks
from repro_matrix.grading.observation import raised_chain
from repro_matrix.grading.root_cause import is_peer_error
from repro_matrix.launch.forkserver import ForkserverLauncher
from repro_matrix.paths import ROOT
from repro_matrix.runner import prerequisites

Show = Callable[..., dict[str, str]]
BY_HAND = "device-map-distributed"  # has a Trainer, and a variant with a variable of its own


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    """Variant -> its line."""

    def shown(case: str, *words: str) -> dict[str, str]:
        assert cli.main(["show", case, *words, "--json"]) == 0
        return {variant["variant"]: variant["torchrun"] for variant in json.loads(capsys.readouterr().out)["variants"]}

    return shown


@pytest.fixture
def overlay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a release on top of the stack `current` that raises an error, as `stack=current+transformers@X` does."""
    folder = tmp_path / "over lay"  # a shell splits it unless it is quoted
    (folder / "transformers").mkdir(parents=True)
    (folder / "transformers" / "__init__.py").write_text("raise RuntimeError('the release that was laid over')\n")
    resolve = stacks.resolve
    monkeypatch.setattr(prerequisites, "resolve", lambda name: dataclasses.replace(resolve(name), path=(str(folder),)))
    return folder


def in_a_clean_shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """From the root of the checkout, as `repro show` says."""
    env = {"HOME": os.environ.get("HOME", "/"), "PATH": os.defpath, "TMPDIR": str(folder)}
    return subprocess.run(["/bin/sh", "-c", line], env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)


def prints_recorded_errors(done: subprocess.CompletedProcess[str], ranks: list[dict[str, Any]]) -> bool:
    """Whether the output has the beginning of each error of a rank that failed by itself. Errors that follow from a
    peer's end are not compared, and torchrun may end a rank before it prints its error."""
    raised = {rank["rank"]: rank["record"]["exception"] for rank in ranks if rank["record"]["exception"]}
    errors = {n: e for n, e in raised.items() if not is_peer_error(raised_chain(e)[0])}
    assert errors, "no rank failed by itself"
    lines = [f"[rank {n}] {e['type']}: {e['message'].splitlines()[0][:80]}" for n, e in errors.items()]
    said = [line in done.stdout for line in lines]
    return all(said) or (any(said) and "closing signal SIGTERM" in done.stderr)


def test_torchrun_line_contains_the_stacks_environment(show: Show, overlay: Path, tmp_path: Path) -> None:
    """Without PYTHONPATH an overlay's release would not be used; without PATH a shell would find no torchrun."""
    lines = show(BY_HAND, "model=llama-2-7b")
    own = os.path.dirname(sys.executable)
    for line in lines.values():
        words = shlex.split(line)
        env = dict(word.split("=", 1) for word in words[1 : words.index("torchrun")])
        assert words[0] == "env" and env["PYTHONPATH"] == str(overlay) and env["PATH"] == f"{own}:$PATH"
        assert "TORCH_EXTENSIONS_DIR" in env and f'{own}:"$PATH"' in line, "the reader's own follow, not this user's"
    assert [variant for variant, line in lines.items() if "ACCELERATE_BYPASS_DEVICE_MAP=true" in line] == ["bypass"]
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    line = show(BY_HAND, "model=llama-2-7b", f"stack=python:{python}")["unfixed"]
    assert f" {python} -m torch.distributed.run --standalone --nproc-per-node 2 repros/device_map_distr" in line


@pytest.mark.ranks
def test_torchrun_line_gives_the_errors_of_the_run(show: Show, warm: ForkserverLauncher, tmp_path: Path) -> None:
    """A case that needs torch alone: from cold the line imports a stack three times."""
    case = "fsdp-optim-state-padding"
    seen = launched(warm, recipe_of(tmp_path / "run", case, "unfixed"))
    assert any(rank["record"]["exception"] for rank in seen["ranks"]), seen
    done = in_a_clean_shell(show(case)["unfixed"], tmp_path)
    assert prints_recorded_errors(done, seen["ranks"]), done
