from pathlib import Path

import pytest
from repro_matrix.baseline import quarantine


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "repro_matrix.config.project.published", list
    )  # grading compares with the baseline
    monkeypatch.setattr(quarantine, "file", lambda: tmp_path / "quarantine.yaml")
    return tmp_path
