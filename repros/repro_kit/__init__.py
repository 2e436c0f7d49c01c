"""Code that the repro scripts share. It runs inside the stack: only the standard library and torch's ecosystem."""

from repro_kit.run import Run, main

__all__ = ["Run", "main"]
