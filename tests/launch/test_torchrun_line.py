"""The line that `repro show` prints, run in an empty shell: the same stack and the same errors as
in a run."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import launched, recipe_of
from repro_matrix.cli import main as cli
from repro_matrix.environment.stacks import spec
from repro_matrix.grading.observation import raised_chain
from repro_matrix.grading.root_cause import is_peer_error
from repro_matrix.launch.attempt import torchrun_line
from repro_matrix.launch.forkserver import ForkserverLauncher
from repro_matrix.paths import ROOT

Show = Callable[..., dict[str, str]]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    """Variant -> its line."""

    def shown(case: str, *words: str) -> dict[str, str]:
        assert cli.main(["show", case, *words, "--json"]) == 0
        return {
            variant["variant"]: variant["torchrun"]
            for variant in json.loads(capsys.readouterr().out)["variants"]
        }

    return shown


def test_torchrun_line_contains_the_stacks_environment(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without PYTHONPATH an overlay's release would not be used; without PATH a shell would find no
    torchrun."""
    overlay, existing = (
        str(tmp_path / "over lay"),
        spec.existing,
    )  # a shell splits it unless it is quoted
    monkeypatch.setattr(
        spec, "existing", lambda *args: dataclasses.replace(existing(*args), path=(overlay,))
    )
    by_hand = (
        "device-map-distributed",
        "model=llama-2-7b",
    )  # has a variant with a variable of its own
    lines, own = show(*by_hand), os.path.dirname(sys.executable)
    for line in lines.values():
        words = shlex.split(line)
        env = dict(word.split("=", 1) for word in words[1 : words.index("torchrun")])
        assert words[0] == "env" and env["PYTHONPATH"] == overlay and env["PATH"] == f"{own}:$PATH"
        assert "TORCH_EXTENSIONS_DIR" in env and f'{own}:"$PATH"' in line, (
            "the reader's own follow, not this user's"
        )
    assert [
        variant for variant, line in lines.items() if "ACCELERATE_BYPASS_DEVICE_MAP=true" in line
    ] == ["bypass"]
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    line = show(*by_hand, f"stack=python:{python}")["unfixed"]
    assert (
        f" {python} -m torch.distributed.run --standalone --nproc-per-node 2"
        " repros/device_map_distr" in line
    )


@pytest.mark.ranks
def test_torchrun_line_gives_the_errors_of_the_run(
    show: Show, warm: ForkserverLauncher, tmp_path: Path
) -> None:
    """A case that needs torch alone: from cold the line imports a stack three times."""
    case = "fsdp-optim-state-padding"
    ranks = launched(warm, recipe_of(tmp_path / "run", case, "unfixed"))["ranks"]
    raised = [(rank["rank"], rank["record"]["exception"]) for rank in ranks]
    own = [(n, error) for n, error in raised if error and not is_peer_error(raised_chain(error)[0])]
    assert own, "no rank failed by itself"
    env = {"HOME": os.environ.get("HOME", "/"), "PATH": os.defpath, "TMPDIR": str(tmp_path)}
    command = [
        "/bin/sh",
        "-c",
        show(case)["unfixed"],
    ]  # from the root of the checkout, as `repro show` says
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    printed = [
        f"[rank {n}] {error['type']}: {error['message'].splitlines()[0][:80]}" in done.stdout
        for n, error in own
    ]
    # torchrun may end a rank before it prints its error.
    assert all(printed) or (any(printed) and "closing signal SIGTERM" in done.stderr), done


def test_torchrun_line_of_ranks_that_share_a_gpu_names_backend_and_devices(tmp_path: Path) -> None:
    attempt = recipe_of(tmp_path / "run", "train-step", "control")
    assert "--devices" not in torchrun_line(attempt)
    attempt.settings.update(device="cuda", backend="nccl", devices=1)
    assert "--device cuda" in torchrun_line(
        attempt
    ) and "--backend nccl --devices 1" in torchrun_line(attempt)
