"""What the machine is said to have."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.hardware import cgroup_limits, detect


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        ({}, float("inf"), float("inf")),
        ({"memory.max": "max", "cpu.max": "max 100000"}, float("inf"), float("inf")),
        ({"job/step/memory.max": "1000", "job/memory.max": "500", "memory.max": "max"}, float("inf"), 500),
        ({"job/cpu.max": "150000 100000", "job/step/cpu.max": "400000 100000"}, 1.5, float("inf")),
        ({"job/cpu.max": "damaged"}, float("inf"), float("inf")),
        ({"other/memory.max": "7"}, float("inf"), float("inf")),
    ],
)
def test_the_tightest_limit_of_a_container_counts(
    tmp_path: Path, files: dict[str, str], cores: float, memory: float
) -> None:
    own = tmp_path / "own"
    own.write_text("1:name=systemd:/x\n0::/job/step\n", encoding="utf-8")
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    assert cgroup_limits(tmp_path / "root", own) == (cores, memory)


def test_a_machine_has_at_least_a_core_and_some_memory() -> None:
    machine = detect()
    assert machine.cores >= 1 and machine.memory_gb > 0
