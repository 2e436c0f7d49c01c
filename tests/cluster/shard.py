"""A shard in place of `repro matrix`: one cell, and what the test needs to go wrong.

Arguments: its results folder, and one of: ends, ends:CODE, fails:CODE, sleeps, dies-once,
sleeps-once, unusable (the first node), waits (for a file `go`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import observations
from repro_matrix.results import runs
from repro_matrix.results.store import Store, provenance

folder, behavior = Path(sys.argv[1]), sys.argv[2]
kind, _, code = behavior.partition(":")
folder.mkdir(parents=True, exist_ok=True)
again = folder / "again"
if kind == "fails":
    print("repro: there is no such case", flush=True)
    sys.exit(int(code))
if kind == "unusable" and not again.exists():
    again.touch()
    print("repro: torch does not import here", flush=True)
    sys.exit(3)
if kind == "dies-once" and not again.exists():
    again.touch()
    os.killpg(0, signal.SIGKILL)  # as a node that is lost: no result, no word
store = Store(folder)
seen = observations.observation(observations.ok(0))
document = observations.document({"unfixed": [("passed", seen)]}, case=folder.name)
document["provenance"] |= provenance(0)
store.save(store.path_of("cpu", "torch2", f"{folder.name}/cell"), document)  # type: ignore[arg-type]
if kind == "sleeps" or (kind == "sleeps-once" and not again.exists()):
    again.touch()
    runs.note(folder, [], runs.UNFINISHED)
    time.sleep(600)
while kind == "waits" and not (folder / "go").exists():
    time.sleep(0.1)
runs.note(folder, [], runs.ENDED)
runs.store_exit_code(folder, int(code or 0))
sys.exit(int(code or 0))
