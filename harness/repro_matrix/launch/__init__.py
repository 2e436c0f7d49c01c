"""Launching: attempts started, watched, and ended as a whole."""

from __future__ import annotations

from repro_matrix.launch.attempt import Attempt, Launcher
from repro_matrix.launch.torchrun import ColdLauncher

__all__ = ["Attempt", "ColdLauncher", "Launcher", "open_launcher"]


def open_launcher(name: str) -> Launcher:
    """``torchrun`` (cold: the reference), ``warm`` (forked from a server), or ``auto``: warm, and the servers of stacks
    with overlays are forked from one that has imported what they have in common.

    The warm launcher hands what must start from cold to the reference launcher, and says so in the observation.
    """
    if name == "torchrun":
        return ColdLauncher()
    from repro_matrix.launch.forkserver import WarmLauncher

    return WarmLauncher(share=name == "auto")
