"""Shared by the project's tests. Real ranks are marked `ranks`; property tests are deterministic, so that CI is."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from repro_matrix.paths import CONF, REPROS

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What launches ranks first: one of those at the end would keep one core at work, and the others idle."""
    items.sort(key=lambda item: item.get_closest_marker("ranks") is None)


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A private copy of conf/, to break."""
    return Path(shutil.copytree(CONF, tmp_path / "conf"))


@pytest.fixture
def repros() -> Path:
    return REPROS


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], Any]], Any]:
    """``once(name, make)``: what ``make`` returned (JSON) in whichever worker asked first. For what several tests look
    at and nobody changes: launches from cold cost most of what tests cost."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers

    def made(name: str, make: Callable[[], Any]) -> Any:
        path = folder / f"once-{name}.json"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                path.write_text(json.dumps(make()), encoding="utf-8")
            return json.loads(path.read_text(encoding="utf-8"))

    return made
