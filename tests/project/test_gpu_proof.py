"""`make gpu-proof` with a `repro` that only says what a test wants."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from repro_matrix.paths import ROOT


@pytest.mark.parametrize(
    ("gpus", "doctor", "code", "launched"),
    [
        ("2; driver 580", 0, 0, True),
        ("2; driver 580", 3, 3, False),
        ("2; driver 580", 2, 2, False),  # a misspelt selection
        ("none", 0, 3, False),  # all would be green, on the CPU
        ("none that can be used; driver 580", 3, 3, False),
    ],
)
def test_proof_launches_nothing_after_a_problem(
    gpus: str, doctor: int, code: int, launched: bool, tmp_path: Path
) -> None:
    repro, ready = tmp_path / "repro", tmp_path / "ready"
    answer = f'[ "$1" != doctor ] || {{ echo "GPUs: {gpus}"; exit {doctor}; }}'
    repro.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n{answer}\n', encoding="utf-8")
    repro.chmod(0o755)
    ready.touch()
    folder = tmp_path / "proof"
    command = [
        "make",
        "-C",
        str(ROOT),
        "gpu-proof",
        f"BIN={tmp_path}",
        f"READY={ready}",
        f"PROOF={folder}",
    ]
    done = subprocess.run([*command, "ARGS=stack=x"], capture_output=True, text=True, timeout=60)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert (
        calls[0] == "doctor +matrix=gpu-smoke stack=x"
        and "GPUs:" in (folder / "doctor.txt").read_text()
    )
    assert (len(calls) > 1) == launched and f"GPUs: {gpus}" in done.stdout
    assert done.returncode == (2 if code else 0), "make's own code for an error of a recipe"
    assert launched or (f"Error {code}" in done.stderr and "nothing was launched" in done.stderr)
