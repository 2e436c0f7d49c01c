"""Rank 0 fails while the other ranks are stuck and ignore SIGTERM."""

from __future__ import annotations

import time

from misbehave import Run, ignores_term, main


def body(run: Run) -> None:
    if run.rank:
        ignores_term(run)
    while not (run.work_dir / "stuck-1").exists():
        time.sleep(0.02)
    raise RuntimeError("rank 0")


if __name__ == "__main__":
    main(body)
