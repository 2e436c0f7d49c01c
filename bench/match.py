"""Measure the time and memory of `repro match` for 100 MB: ``python -m bench.match``.

*healthy*: steps of eight ranks. *failure words*: the same with words of failures in each line. *one
failure*: healthy,
with a traceback of each rank near the end. *only tracebacks*: the worst log possible. Seconds are
CPU time of this process; memory is its peak so far.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from repro_matrix.config import catalog
from repro_matrix.match.keywords import SignatureIndex
from repro_matrix.match.known_failures import recognize
from repro_matrix.match.scan import scan

from bench.machine import HERE, write

KINDS = ("healthy", "failure words", "one failure", "only tracebacks")
STEP = (
    "[2024-05-01 12:00:00,123] [INFO] train.py:120 rank {} step 12345 loss 2.3456 lr 1.0e-5"
    " grad_norm 0.98\n"
)
WORDS = (
    "step 12345 loss 2.3456 rank {} error=0.1234 done, nccl ok, 0 failed batches, 2 timeouts,"
    " signal to noise 3.2\n"
)
TRACEBACK = (
    '[rank{0}]: Traceback (most recent call last):\n[rank{0}]:   File "/w/train.py", line 12, in'
    " <module>\n[rank{0}]:     main()\n[rank{0}]:   File"
    ' "/v/lib/python3.11/site-packages/torch/distributed/fsdp/_flat_param.py", line 770, in'
    " _check\n[rank{0}]:     raise ValueError(\n[rank{0}]: ValueError: Must flatten tensors with"
    " uniform dtype but got torch.bfloat16 and torch.float32\n"
)


def log(kind: str, size: int) -> Iterator[str]:
    """Yield lines, ``size`` bytes together."""
    tracebacks = "".join(TRACEBACK.format(rank) for rank in range(8)).splitlines(keepends=True)
    steps = [(WORDS if kind == "failure words" else STEP).format(rank) for rank in range(8)]
    block = tracebacks if kind == "only tracebacks" else steps
    for _ in range(size // sum(map(len, block))):
        yield from block
    yield from tracebacks if kind == "one failure" else ()
    yield from block


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=100_000_000)
    parser.add_argument("--out", type=Path, default=HERE / "match.json")
    arguments = parser.parse_args(words)
    catalogue = catalog.load()
    began = time.process_time()
    known = SignatureIndex(catalogue.cases, catalogue.strategies)
    prepare_s = time.process_time() - began
    rows: list[dict[str, Any]] = []
    print("| log | lines | CPU s | recognized | peak MB |\n|---|---|---|---|---|")
    for kind in KINDS:
        began = time.process_time()
        scanned = scan(log(kind, arguments.bytes), known)
        names = recognize(scanned, known).names
        cpu_s = time.process_time() - began
        peak = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        rows.append(
            {
                "log": kind,
                "bytes": arguments.bytes,
                "lines": scanned.lines,
                "cpu_s": cpu_s,
                "names": names,
                "peak_mb": peak,
            }
        )
        print(
            f"| {kind} | {scanned.lines} | {cpu_s:.2f} | {', '.join(names) or 'nothing'} | {peak} |"
        )
    write(arguments.out, prepare_cpu_s=prepare_s, rows=rows)


if __name__ == "__main__":
    main()
