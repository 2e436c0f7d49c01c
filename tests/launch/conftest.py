"""Fixtures of the launcher tests."""

from __future__ import annotations

import pytest
from repro_matrix.launch.attempt import Launcher
from repro_matrix.launch.forkserver import ForkserverLauncher
from repro_matrix.launch.torchrun import TorchrunLauncher

TORCHRUN = pytest.param("torchrun", marks=pytest.mark.slow)  # each start takes seconds: the gate runs only a few


@pytest.fixture(params=["forkserver", TORCHRUN])
def launcher(request: pytest.FixtureRequest, warm: ForkserverLauncher) -> Launcher:
    """Each launcher in turn. ``parametrize("launcher", [...], indirect=True)`` selects and marks otherwise."""
    return TorchrunLauncher() if request.param == "torchrun" else warm
