"""Fixtures of the launcher tests."""

from __future__ import annotations

import pytest
from repro_matrix.launch.attempt import Launcher
from repro_matrix.launch.forkserver import ForkserverLauncher
from repro_matrix.launch.torchrun import TorchrunLauncher


@pytest.fixture(
    params=["forkserver", pytest.param("torchrun", marks=pytest.mark.slow)]
)  # its starts take seconds
def launcher(request: pytest.FixtureRequest, warm: ForkserverLauncher) -> Launcher:
    """Each launcher in turn. ``parametrize("launcher", [...], indirect=True)`` selects and marks
    otherwise."""
    return TorchrunLauncher() if request.param == "torchrun" else warm
