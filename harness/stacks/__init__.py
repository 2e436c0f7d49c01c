"""Software stacks: which package versions a cell runs with, and how they come to be there."""

from __future__ import annotations

import sys

from harness.stacks.errors import StackError
from harness.stacks.stack import Stack, existing

__all__ = ["Stack", "StackError", "resolve"]


def resolve(spec: str, *, build: bool = True) -> Stack:
    """The stack that ``spec`` names, built when it has to be: ``current``, ``python:/path/to/python``, ..."""
    if spec == "current":
        return existing(spec, sys.executable)
    if spec.startswith("python:"):
        return existing(spec, spec.removeprefix("python:"))
    raise StackError("usage", f"no stack named {spec!r}")
