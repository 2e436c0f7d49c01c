"""A controller to be killed: register a run and launch one attempt. Arguments: launcher, state
folder, run id."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from launching import attempt_of
from repro_matrix.launch import open_launcher
from repro_matrix.runner.gpu_pool import GpuLocks, register_run

if __name__ == "__main__":
    launcher, state, run_id = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    attempt = attempt_of(
        state / "runs" / run_id / "a", "grandchild_and_stuck", run_id=run_id, deadline=300
    )
    with register_run(state, run_id), GpuLocks(state, run_id) as locks:
        assert locks.acquire([f"GPU-{run_id}"])
        open_launcher(launcher).launch(attempt, threading.Event())
