"""A pytest plugin that measures each test's CPU seconds, with its children's: `make test PYTEST_ARGS=--cpu=cpu.json`.

CPU seconds do not depend on the load of the machine. A session fixture counts for the first test that uses it.
``whole_s`` also includes start, collection and end.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

EVERY_S = 20.0  # between two writes of the file, so that a stopped run leaves one


def used() -> float:
    """CPU seconds of this process, of the children that it has waited for, and of those that live (warm servers)."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in both) + sum(map(of_living, children(os.getpid())))


def children(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has just ended
            found += [int(each) for each in path.read_text().split()]
    return found


def of_living(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants."""
    try:
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    except OSError:
        return 0.0
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK") + sum(map(of_living, children(pid)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", metavar="FILE", help="write the CPU seconds of each test, its children's included")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--cpu"):
        config.pluginmanager.register(Cpu(Path(path), config))


class Cpu:
    """Workers measure and send it with their reports; the process that has all reports writes the file."""

    def __init__(self, path: Path, config: pytest.Config) -> None:
        self.path, self.started, self.written = path, 0.0, 0.0
        self.worker = hasattr(config, "workerinput")
        self.tests: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self.started = used()
        yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        """Each of the three phases: what it took."""
        outcome: Any = yield
        now = used()
        outcome.get_result().cpu_s = now - self.started
        self.started = now

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.tests[report.nodeid.partition("@")[0]] += getattr(report, "cpu_s", 0.0)  # without its xdist_group
        if report.when == "teardown" and time.monotonic() > self.written + EVERY_S:
            self.write()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self.write()

    def write(self) -> None:
        if self.worker:
            return
        self.written = time.monotonic()
        files: dict[str, float] = defaultdict(float)
        for name, seconds in self.tests.items():
            files[name.partition("::")[0]] += seconds
        whole = {"whole_s": round(used(), 1), "tests_s": round(sum(files.values()), 1)}
        said = {**whole, "files": sorted_(files), "tests": sorted_(self.tests)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def sorted_(seconds: dict[str, float]) -> dict[str, float]:
    """Sort by cost, highest first."""
    return {name: round(seconds[name], 2) for name in sorted(seconds, key=lambda one: -seconds[one])}
