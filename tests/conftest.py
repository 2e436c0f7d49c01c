"""Shared by the project's tests. Real ranks are marked `ranks`; property tests are deterministic, so that CI is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from harness.paths import CONF, REPROS

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A private copy of conf/, to break."""
    return Path(shutil.copytree(CONF, tmp_path / "conf"))


@pytest.fixture
def repros() -> Path:
    return REPROS
