"""Shared by the project's tests. Real ranks are marked `ranks`; property tests are deterministic,
so that CI is."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings
from published import grade_documents, graded
from repro_matrix.config.schema import Case
from repro_matrix.launch.attempt import Attempt
from repro_matrix.launch.forkserver import ForkserverLauncher, Server
from repro_matrix.paths import CONF, REPROS, RESULTS
from repro_matrix.records.document import Document
from repro_matrix.results import summary
from repro_matrix.results.rows import Row

# Examples of a property test in the gate and in `make test-slow`. Fifteen are enough to see a
# changed grader.
for profile, examples in (("gate", 25), ("many", 200)):
    settings.register_profile(
        profile,
        max_examples=examples,
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gate"))
gc.set_threshold(100_000)  # as `repro` does: a worker holds millions of objects of stored results


@pytest.hookimpl(optionalhook=True)  # mutmut runs without xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores, because tests that launch ranks wait for a sixth of their
    time."""
    return (
        len(os.sched_getaffinity(0)) + 1
        if hasattr(os, "sched_getaffinity")
        else (os.cpu_count() or 1) + 1
    )


# Fixtures that launch ranks: their tests are marked `ranks` here.
LAUNCHING = {"warm", "launcher", "runs_are_warm"}


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that launch ranks first: one of them at the end would leave the other cores
    idle."""
    for item in items:
        if LAUNCHING.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("ranks")
    items.sort(key=lambda item: item.get_closest_marker("ranks") is None)


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A private copy of conf/, to break."""
    return Path(shutil.copytree(CONF, tmp_path / "conf"))


@pytest.fixture(autouse=True)
def gpu_locks_of_a_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that run side by side have made-up GPUs with the same UUIDs."""
    monkeypatch.setattr("repro_matrix.runner.gpu_pool.LOCKS", tmp_path / "gpu-locks")


@pytest.fixture
def published_grades(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], dict[str, Document]]:
    """Grade published results once for all tests: mark them ``xdist_group("baseline")``."""

    def once(
        folder: Path, documents: Mapping[str, Document], cases: Mapping[str, Case]
    ) -> dict[str, Document]:
        if not folder.is_relative_to(RESULTS):
            return grade_documents(folder, documents, cases)
        return {path: graded(folder)[path] for path in documents}

    monkeypatch.setattr(summary, "grade_documents", once)
    return graded


stored_rows = summary.stored_rows


@cache
def rows_by_evidence(folder: Path) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in summary.load_rows(folder):
        rows[row.evidence].append(row)
    return dict(rows)


@pytest.fixture
def published_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read published results as if their summaries were of the grader of today.

    A summary is out of date after each change of the grader, and grading takes each reader seconds.
    """

    def fresh(
        folder: Path, notes: list[str], wanted: Callable[[bytes], bool] | None = None
    ) -> dict[str, list[Row]]:
        if not folder.is_relative_to(RESULTS) or wanted:
            return stored_rows(folder, notes, wanted)
        monkeypatch.setattr(summary, "stored_rows", stored_rows)
        found = rows_by_evidence(folder)
        monkeypatch.setattr(summary, "stored_rows", fresh)
        return dict(found)

    monkeypatch.setattr(summary, "stored_rows", fresh)


@pytest.fixture
def repros() -> Path:
    return REPROS


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkserverLauncher]:
    """One launcher for all tests of a worker: a server imports its stack once, which costs more
    than most tests."""
    folder = tmp_path_factory.mktemp("forkserver")

    class Shared(ForkserverLauncher):
        """Its servers outlive the run or test whose attempt started them."""

        def _server(
            self, attempt: Attempt, stop: threading.Event
        ) -> AbstractContextManager[Server]:
            return super()._server(dataclasses.replace(attempt, directory=folder / "attempt"), stop)

    launcher = Shared()
    yield launcher
    servers = [server for server in launcher._servers.values() if server.process]
    launcher.close()
    for server in servers:
        try:
            state = (
                Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            )
        except OSError:
            state = "X"
        assert state in "ZX" and not server.folder.exists(), f"server {server.process.pid} was left"


@pytest.fixture
def runs_are_warm(warm: ForkserverLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process launch with it as well, and leave it open."""

    def launch(attempt: Attempt, stop: threading.Event) -> dict[str, Any]:
        return warm.launch(
            dataclasses.replace(attempt, run_id="test-run"), stop
        )  # a server is of one run

    launcher = SimpleNamespace(name=warm.name, launch=launch, close=lambda: None)
    monkeypatch.setattr("repro_matrix.runner.run.open_launcher", lambda name: launcher)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], Any]], Any]:
    """``once(name, make)``: the JSON that ``make`` returned in the first worker that called it. For
    slow launches from cold whose result several tests read."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers

    def made(name: str, make: Callable[[], Any]) -> Any:
        path = folder / f"once-{name}.json"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                path.write_text(json.dumps(make()), encoding="utf-8")
            return json.loads(path.read_text(encoding="utf-8"))

    return made
