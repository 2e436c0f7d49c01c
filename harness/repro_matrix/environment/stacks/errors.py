"""What can go wrong with a stack, in words a user can act on."""

from __future__ import annotations

from typing import Literal

from repro_matrix.errors import ReproError

Kind = Literal[
    "usage",  # the specification itself is wrong: no such stack, no such file
    "version",  # no such package or version
    "wheel",  # the release exists, but has nothing for this Python or machine
    "conflict",  # the requirements contradict each other
    "python",  # no such interpreter, or it does not run
    "index",  # the index is out of reach
    "disk",  # not enough room
    "hash",  # what the index gives is not what was locked
    "build",  # anything else that the installer says
]


class StackError(ReproError):
    """``kind`` says what it was: an ``unavailable`` stack makes a probe Unknown, an ``infra`` trouble may pass."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.exit_code = 3 if self.infra else 2

    @property
    def infra(self) -> bool:
        return self.kind in ("index", "disk")

    @property
    def unavailable(self) -> bool:
        """This set of versions cannot be had here, now or later: a search skips over it."""
        return self.kind in ("version", "wheel", "conflict", "build", "hash")
