"""Searches of docs/examples run again from the command that their report begins with: they end
where it says."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
ENDS = re.compile(r"transformers \S+ is the first bad release, transformers \S+ the last good one")


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "example", ["trainer-own-loss", "llava-accumulation"]
)  # two freezes; a metric that drifts
def test_documented_bisection_ends_at_the_documented_release(example: str, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / example, tmp_path / example)
    report = (EXAMPLES / example / "report.md").read_text(encoding="utf-8")
    command = next(
        line.strip() for line in report.splitlines() if line.startswith("    repro bisect")
    )
    words = [*shlex.split(command)[1:], f"results={tmp_path / 'results'}"]
    done = subprocess.run(
        [sys.executable, "-m", "repro_matrix", *words],
        cwd=tmp_path / example,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    stored = ENDS.search(report)
    assert stored and done.returncode == 0, done.stdout + done.stderr
    assert stored[0] in " ".join(done.stdout.split()), done.stdout
