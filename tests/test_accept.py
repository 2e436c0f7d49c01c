"""What `repro accept` publishes names no machine's own folders."""

from __future__ import annotations

import json

from repro_matrix.paths import ROOT, cache_dir
from repro_matrix.verbs.accept import _portable, _usable


def test_own_folders_are_not_published_and_all_else_is() -> None:
    attempt = cache_dir() / "state" / "runs" / "20261121-1-2-ab" / "20261121-1-2-ab-cd"
    saved, log, kit = (
        attempt / "work" / "checkpoint",
        attempt / "logs" / "rank-0.log",
        ROOT / "repros" / "kit" / "run.py",
    )
    text = f"saved in {saved}, log {log}, kit {kit}"
    shown = _portable({"message": text, "number": 3})
    assert shown == {
        "message": "saved in /attempt/checkpoint, log /attempt/logs/rank-0.log, kit /checkout/repros/kit/run.py",
        "number": 3,
    }
    assert str(ROOT) not in json.dumps(shown)


def test_what_only_infrastructure_answered_is_not_published() -> None:
    def document(*outcomes: str) -> dict[str, object]:
        attempts = [{"outcome": {"outcome": outcome}} for outcome in outcomes]
        return {"complete": True, "stack": {"name": "current"}, "arms": {"broken": {"attempts": attempts}}}

    assert _usable(document("infra", "fires"))
    assert not _usable(document("infra", "infra")) and not _usable(document())


def test_a_measurement_of_another_checkout_says_as_little_of_whose_disk_it_was() -> None:
    document = {"command": ["python", "/disk/a/harness/worker/warm_server.py"], "file": "/disk/a/repros/kit/run.py"}
    shown = {"command": ["python", "/checkout/harness/worker/warm_server.py"], "file": "/checkout/repros/kit/run.py"}
    assert _portable(document) == shown
