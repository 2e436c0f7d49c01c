"""How long `repro match` takes for 100 MB, and how much memory: ``python -m bench.match``.

*healthy*: steps of eight ranks. *one failure*: the same with a traceback of each rank near the end. *nothing but
tracebacks*: the worst that a log can be. Seconds are CPU time of this process; memory is the most that it held.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from repro_matrix.config import catalog as catalogue
from repro_matrix.external.logs.match import Catalogue, recognise
from repro_matrix.external.logs.read import BLOCK
from repro_matrix.external.logs.scan import Texts, scan

from bench.machine import machine

HERE = Path(__file__).resolve().parent
SIZE = 100_000_000
STEP = "[2024-05-01 12:00:00,123] [INFO] train.py:120 rank {} step 12345 loss 2.3456 lr 1.0e-5 grad_norm 0.98\n"
TRACEBACK = (
    "[rank{0}]: Traceback (most recent call last):\n"
    '[rank{0}]:   File "/w/train.py", line 12, in <module>\n'
    "[rank{0}]:     main()\n"
    '[rank{0}]:   File "/v/lib/python3.11/site-packages/torch/distributed/fsdp/_flat_param.py", line 770, in _check\n'
    "[rank{0}]:     raise ValueError(\n"
    "[rank{0}]: ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32\n"
)


def log(kind: str) -> Iterator[bytes]:
    """Blocks of whole lines, SIZE bytes together."""
    text = "".join((TRACEBACK if kind == "nothing but tracebacks" else STEP).format(rank) for rank in range(8))
    block = (text * (BLOCK // len(text))).encode()
    end = "".join(TRACEBACK.format(rank) for rank in range(8)).encode() if kind == "one failure" else b""
    for _ in range(SIZE // len(block)):
        yield block
    yield end + block


def main() -> None:
    cases = catalogue.load().cases
    begun = time.process_time()
    texts, signatures = Texts(cases.values()), Catalogue(cases)
    prepared = time.process_time() - begun
    rows = []
    print("| 100 MB of | lines | CPU s | recognised | most memory MB |\n|---|---|---|---|---|")
    for kind in ("healthy", "one failure", "nothing but tracebacks"):
        begun = time.process_time()
        seen = scan(log(kind), texts)
        names = recognise(seen, signatures).names
        took = round(time.process_time() - begun, 2)
        peak = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        row = {"log": kind, "bytes": seen.bytes, "lines": seen.lines, "cpu_s": took, "names": names, "peak_mb": peak}
        rows.append(row)
        print(f"| {kind} | {seen.lines} | {took} | {', '.join(names) or 'nothing'} | {peak} |")
    result = {"machine": machine(), "prepare_cpu_s": round(prepared, 3), "rows": rows}
    (HERE / "match.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
