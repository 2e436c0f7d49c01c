"""How busy the machine is now, which decides whether one more attempt is started beside the others."""

from __future__ import annotations

import time

import psutil

LOOK_S = 0.15  # between two looks: an attempt that was just started needs that long to show
IDLE_PERCENT = 6.25  # of the machine's cores: that much is left over when one more attempt is started


class Idle:
    """Whether the machine's cores have time left, by measurement."""

    def __init__(self) -> None:
        psutil.cpu_percent()  # the first answer is about nothing
        self._looked, self._idle = time.monotonic(), False

    def now(self) -> bool:
        if time.monotonic() - self._looked >= LOOK_S:
            self._looked, self._idle = time.monotonic(), 100.0 - psutil.cpu_percent() >= IDLE_PERCENT
        return self._idle

    def started(self) -> None:
        """What was just started is not seen yet: look again before the next one."""
        psutil.cpu_percent()
        self._looked, self._idle = time.monotonic(), False
