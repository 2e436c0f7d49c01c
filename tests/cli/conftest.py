"""`repro` in this process, on a machine with made-up GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_nvml import FakeNvml
from repro_matrix.cli import main as cli


@dataclass
class Done:
    code: int
    out: str
    err: str


Repro = Callable[..., Done]


@pytest.fixture
def repro(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Repro:
    def run(nvml: FakeNvml, *words: str, env: dict[str, str] | None = None) -> Done:
        with monkeypatch.context() as patch:
            patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            for name, value in {
                "REPRO_CACHE": str(tmp_path / "cache"),
                "COLUMNS": "160",
                **(env or {}),
            }.items():
                patch.setenv(name, value)
            nvml.install(patch)
            return Done(cli.main(list(words)), *capsys.readouterr())

    return run
