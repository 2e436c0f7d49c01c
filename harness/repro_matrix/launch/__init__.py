"""Launch attempts, watch them, and end each one as a whole."""

from __future__ import annotations

from repro_matrix.launch.attempt import Launcher


def open_launcher(name: str) -> Launcher:
    """Return the launcher: ``torchrun`` (the reference), or ``forkserver`` or ``auto``.

    The forkserver hands an attempt that it cannot fork to torchrun and records the reason in the
    observation.
    """
    if name == "torchrun":
        from repro_matrix.launch.torchrun import TorchrunLauncher

        return TorchrunLauncher()
    from repro_matrix.launch.forkserver import ForkserverLauncher

    return ForkserverLauncher()
