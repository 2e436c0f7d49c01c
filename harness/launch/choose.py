"""Which launcher a run uses."""

from __future__ import annotations

from harness.launch.attempt import Launcher


def open_launcher(name: str) -> Launcher:
    """``torchrun``: fresh interpreters through torch.distributed.elastic, the reference. ``warm``: forked from a server
    that has imported the stack's packages; ``auto`` takes it, since both give the same outcomes (`make bench`)."""
    if name == "torchrun":
        from harness.launch.cold import ColdLauncher

        return ColdLauncher()
    from harness.launch.warm import WarmLauncher

    return WarmLauncher()
