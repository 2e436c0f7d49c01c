"""List the launchers: those of this project and those of installed packages.

A package adds one as an entry point of the group ``repro_matrix.launchers``: an importable class
with the methods of ``repro_matrix.launch.attempt.Launcher``.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

GROUP = "repro_matrix.launchers"
DEFAULT = "forkserver"
SHIPPED = {
    DEFAULT: "repro_matrix.launch.forkserver:ForkserverLauncher",
    "torchrun": "repro_matrix.launch.torchrun:TorchrunLauncher",
}
AUTO = "auto"  # the default launcher


def launchers() -> dict[str, EntryPoint]:
    """Return the launchers by name."""
    shipped = [EntryPoint(name, value, GROUP) for name, value in SHIPPED.items()]
    return {point.name: point for point in [*entry_points(group=GROUP), *shipped]}
