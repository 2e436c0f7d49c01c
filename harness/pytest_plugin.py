"""pytest as a front door: `pytest --repro "case=qwen15-* repeat=1"` makes every cell a test item.

-k, -n and --junitxml work. A cell passes when every verdict is as expected (or has no expectation yet and nothing was
inconclusive), is skipped with its reason, and fails with what differs otherwise.
"""

from __future__ import annotations

import shlex
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from repro_matrix.planning.plan import CellPlan
    from repro_matrix.running.session import Session


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--repro", metavar="OVERRIDES", help="run the matrix's cells as tests: 'case=qwen15-* repeat=1'")


class CellItem(pytest.Item):
    """One cell, all its arms."""

    prepared: Session
    plan: CellPlan

    def runtest(self) -> None:
        from dataclasses import replace

        from repro_matrix.results import rows
        from repro_matrix.running import session

        if self.plan.skipped:
            pytest.skip(self.plan.skipped)
        settings = self.prepared.settings
        if settings.results is None:  # items of several workers must not share a folder: one writer at a time
            settings = replace(settings, results=tempfile.mkdtemp(prefix="repro-cell-"))
        one = replace(self.prepared, plans=[self.plan], settings=settings)
        summary = session.execute(one, lambda event: None, threading.Event())
        found = [row for document in summary.documents for row in rows.arm_rows(document)]
        self.user_properties.append(("documents", session.results_folder(settings).as_posix()))
        bad = [
            row
            for row in found
            if row["expected"] == "unexpected" or (row["verdict"] in ("INCONCLUSIVE", "UNHEALTHY") and row["attempts"])
        ]
        if bad or summary.problem:
            raise CellFailed([summary.problem or "", *(f"{r['arm']}: {r['verdict']}: {r['reason']}" for r in bad)])

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, CellFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.name


class CellFailed(Exception):
    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(line for line in lines if line))


class Matrix(pytest.Collector):
    def collect(self) -> Iterator[pytest.Item]:
        from repro_matrix.running import session

        prepared = session.prepare(shlex.split(self.config.getoption("--repro")))
        for plan in prepared.plans:
            item = CellItem.from_parent(self, name=plan.cell.key.replace("/", "[", 1) + "]")
            item.prepared, item.plan = prepared, plan
            yield item


def pytest_collection(session: pytest.Session) -> None:
    if session.config.getoption("--repro"):
        session.config.args = []  # only the cells: the project's own tests are `make test`


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--repro"):
        return
    from repro_matrix.conf.errors import ReproError

    matrix = Matrix.from_parent(session, name="matrix", nodeid="matrix")
    try:
        items[:] = list(matrix.collect())
    except ReproError as error:
        raise pytest.UsageError(str(error)) from None
