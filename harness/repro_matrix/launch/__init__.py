"""Launch attempts, watch them, and end each one as a whole."""

from __future__ import annotations

from typing import cast

from repro_matrix.config.launchers import AUTO, DEFAULT, launchers
from repro_matrix.launch.attempt import Launcher


def open_launcher(name: str) -> Launcher:
    """Return the launcher with this name (config/launchers.py)."""
    return cast(Launcher, launchers()[DEFAULT if name == AUTO else name].load()())
