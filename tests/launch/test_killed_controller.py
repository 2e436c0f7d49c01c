"""`repro` killed with -9 at any moment, and two runs at once: every recorded result stays, nothing
else does."""

from __future__ import annotations

import json
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from launching import wait_for
from repro_matrix.results.store import Store
from test_end_to_end import CASE, ours, start

pytestmark = [pytest.mark.ranks, pytest.mark.slow]  # the gate kills launchers: test_launcher
WORDS = (
    "matrix",
    f"case={CASE}",
    "variants=[summon,ddp]",
    "repeat=2",
    "launcher=forkserver",
    "order=declared",
)
KILLS = 4


def run(tmp_path: Path, results: str, *words: str) -> subprocess.Popen[str]:
    """All runs share a cache (and so the state of the machine); each may have results of its
    own."""
    (tmp_path / results).mkdir(exist_ok=True)
    (tmp_path / "cache").mkdir(exist_ok=True)
    if not (tmp_path / results / "cache").exists():
        (tmp_path / results / "cache").symlink_to(tmp_path / "cache")
    return start(tmp_path / results, *WORDS, *words)


def recorded(tmp_path: Path, results: str) -> dict[tuple[str, str, int], Any]:
    """Every recorded attempt, by cell, variant and place."""
    return {
        (document["cell_id"], variant, index): attempt["observation"]
        for document in Store(tmp_path / results / "results").documents()
        for variant, entry in document["variants"].items()
        for index, attempt in enumerate(entry["attempts"])
    }


def test_killed_run_resumes_to_the_result_of_an_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    moments = random.Random(1)
    undisturbed = run(tmp_path, "a", "--json")
    before: dict[tuple[str, str, int], Any] = {}
    for _ in range(KILLS):
        victim = run(tmp_path, "b", "--resume")
        time.sleep(moments.uniform(0.5, 9))
        victim.kill()
        victim.communicate(timeout=600)
        now = recorded(tmp_path, "b")
        assert {name: now.get(name) for name in before} == before
        before = now
    whole = run(tmp_path, "b", "--resume", "--json")
    out, err = whole.communicate(timeout=600)
    assert whole.returncode == 0, err
    now = recorded(tmp_path, "b")
    assert {name: now.get(name) for name in before} == before and len(now) == 6
    assert json.loads(out)["summary"]["reused"] == len(before)
    expected, err = undisturbed.communicate(timeout=600)
    assert undisturbed.returncode == 0, err
    rows, others = (
        sorted(
            (row["case"], row["variant"], row["outcome"], row["verdict"])
            for row in json.loads(text)["rows"]
        )
        for text in (out, expected)
    )
    assert rows == others
    wait_for(lambda: not ours(tmp_path))
    state = tmp_path / "cache" / "state"
    left = [
        path
        for pattern in ("runs/*", "nodes/*/runs/*", "nodes/*/leases/*.json")
        for path in state.glob(pattern)
    ]
    assert not [*left, *(tmp_path / "temporary").iterdir()]
