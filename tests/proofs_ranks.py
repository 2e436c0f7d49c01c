"""Not a test: what tests/test_proofs.py runs under torchrun. Each strategy named in the environment trains three times,
honestly and with both sabotages; the record's facts say which checks passed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "repros"))

from kit import Run, main  # noqa: E402 - a script of repros/ that lives elsewhere
from kit.record import Record  # noqa: E402

import train_step  # noqa: E402
import yaml  # noqa: E402


def body(run: Run) -> None:
    for slug in os.environ["PROOF_STRATEGIES"].split(","):
        strategy = yaml.safe_load((ROOT / "conf" / "strategy" / f"{slug}.yaml").read_text(encoding="utf-8"))
        for sabotage in ("none", "skip_all_reduce", "scale_gradient"):
            settings = {**run.settings, "strategy": strategy, "flags": {**run.flags, "sabotage": sabotage}}
            record = Record(None, run.rank, run.world_size)
            train_step.body(Run(settings, record))
            passed = {check["name"]: check["passed"] for check in record.data["checks"]}
            run.fact(f"{slug}/{sabotage}", {**passed, **record.data["metrics"], **record.data["facts"]})


main(body)
