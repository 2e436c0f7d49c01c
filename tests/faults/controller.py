"""A controller to be killed: registers a run and launches one attempt. Arguments: state folder, run id, fault."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from launching import attempt_of
from repro_matrix.launch import ColdLauncher
from repro_matrix.runner.gpu_locks import Leases, register_run

if __name__ == "__main__":
    state, run_id, fault = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    attempt = attempt_of(state / "runs" / run_id / "a", fault, run_id=run_id, deadline=300)
    with register_run(state, run_id), Leases(state, run_id) as leases:
        assert leases.take(["GPU-test"])
        ColdLauncher().launch(attempt, threading.Event())
