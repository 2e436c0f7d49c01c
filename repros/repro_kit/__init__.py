"""What the scripts share. It runs inside the stack's environment: standard library and torch's own family only."""

from repro_kit.run import Run, main

__all__ = ["Run", "main"]
