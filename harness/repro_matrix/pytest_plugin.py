"""pytest as a front door: `pytest --repro "case=qwen15-* repeat=1"` makes every fix of every cell a test.

    repro::<case>::<model>/<strategy>::<arm>

-k, -m (failure, control, simulated), -n, --lf, -x and --junitxml do what they say. A test passes when its verdict is as
expected (or nothing is expected yet, and it was measured), fails with what differs otherwise, and is skipped with its
reason. A fix that is expected to fail is xfail, and strictly so: that it holds is a failure. A file of what was asked
for that has an error is a test that fails, and a run in which all was skipped ends with 5. With -n one run, that of
the process that was started, measures for all workers (running/desk.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from repro_matrix.runner.session import Session

MARKS = {
    "repro": "a cell of repro-matrix (pytest --repro)",
    "failure": "of a known failure",
    "control": "of training that must work",
    "simulated": "device placement without a GPU",
}
FAILS = {"FIX_BROKEN", "FIX_UNMASKS", "FIX_HARMFUL", "CHANGED", "UNHEALTHY"}  # verdicts that say that something failed


@dataclass(frozen=True)
class Cell:
    """What a worker knows of a cell. ``number``: in the run of the process that was started."""

    number: int
    case: str
    name: str
    marks: tuple[str, ...]
    arms: tuple[tuple[str, str | None], ...]  # (name, why it is skipped)


DESK = pytest.StashKey[Any]()  # a Desk, in a worker an Asker
CELLS = pytest.StashKey[list[Cell]]()
LEFT_OUT = pytest.StashKey[list[str]]()  # what is wrong with each file of what was asked for


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--repro", metavar="OVERRIDES", help="run the matrix's cells as tests: 'case=qwen15-* repeat=1'")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--repro") is None:
        return
    for name, text in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {text}")
    config.args = []  # only the cells: a project's own tests are another command
    given = getattr(config, "workerinput", {}).get("repro")
    if given:
        from repro_matrix.runner.shared_session import Asker

        config.stash[DESK] = Asker(given["address"], bytes.fromhex(given["key"]))
        config.stash[CELLS] = [
            Cell(number, case, name, tuple(marks), tuple((arm, why) for arm, why in arms))
            for number, case, name, marks, arms in given["cells"]
        ]
        config.stash[LEFT_OUT] = list(given["left_out"])


def pytest_sessionstart(session: pytest.Session) -> None:
    """Everything that can be wrong with what was asked is found here, by the process that was started."""
    config = session.config
    if config.getoption("--repro") is None or DESK in config.stash:
        return
    from repro_matrix.errors import ReproError
    from repro_matrix.runner.session import prepare
    from repro_matrix.runner.shared_session import Desk

    try:
        texts = _words(config.getoption("--repro"))
        prepared = prepare(texts)
        config.stash[DESK], config.stash[CELLS] = Desk(prepared, texts), cells_of(prepared)
    except ReproError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[LEFT_OUT] = prepared.left_out


def _words(text: str) -> list[str]:
    """As a shell splits them. Raises ConfigError for a quote that is left open, and for none at all: that is a variable
    that is not set, and would be the whole catalogue."""
    from repro_matrix.errors import ConfigError

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--repro {text}: {error}") from None
    if not words:
        raise ConfigError("--repro: nothing is selected; --repro 'case=*' is every case")
    return words


def cells_of(prepared: Session) -> list[Cell]:
    """Named alike whatever else is selected; what is usual (stack current, the first profile) is not said."""
    found = []
    for number, plan in enumerate(prepared.plans):
        cell, case = plan.cell, prepared.catalogue.cases[plan.cell.case]
        name = cell.where
        name += f"@{cell.stack}" if cell.stack != "current" else ""
        name += f"#{cell.hardware}" if cell.hardware != prepared.profile.name else ""
        marks = ["repro", case.kind, *(["simulated"] if case.simulated else [])]
        first = plan.arms[0].arm
        judged = [
            (arm.arm, plan.skipped or arm.skipped) for arm in plan.arms if case.kind != "failure" or arm.arm != first
        ]
        found.append(Cell(number, cell.case, name, tuple(marks), tuple(judged)))
    return found


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """xdist: what a worker is told."""
    config = node.config
    if config.getoption("--repro") is None:
        return
    desk = config.stash[DESK]
    if not hasattr(desk, "served"):
        desk.served = desk.serve()
    address, key = desk.served
    told = [(c.number, c.case, c.name, list(c.marks), [list(arm) for arm in c.arms]) for c in config.stash[CELLS]]
    left_out = config.stash[LEFT_OUT]
    node.workerinput["repro"] = {"address": address, "key": key.hex(), "cells": told, "left_out": left_out}


class Group(pytest.Collector):
    """repro, a case, a cell."""

    def collect(self) -> Iterator[pytest.Item]:
        return iter(())


class ArmItem(pytest.Item):
    """One fix of one cell, or a control."""

    cell: Cell
    skipped: str | None
    wanted: tuple[str, ...] = ()  # the arms of the cell that are selected: they are measured together

    def runtest(self) -> None:
        if self.skipped:
            pytest.skip(self.skipped)
        rows = self.config.stash[DESK].measure(self.cell.number, self.wanted)
        row = next(row for row in rows if row["arm"] == self.name)
        self.user_properties.append(("verdict", row["verdict"]))
        self.user_properties.append(("reproduce", str(row["torchrun"])))
        said = f"{row['verdict']}: {row['reason']}"
        wrong = row.get("wrong")
        if not wrong and (row["verdict"] is None or not row["attempts"]):
            pytest.skip(str(row["reason"]))
        if wrong or row["expected"] == "unexpected" or row["verdict"] == "INCONCLUSIVE":
            raise Differs("\n".join(filter(None, (wrong, said))), row["expectation"], row["torchrun"])
        if row["expected"] == "muted":
            by = row["muted"]
            pytest.xfail(f"{said} (muted by {by['owner']} until {by['until']}: {by['reason']})")
        if row["verdict"] in FAILS and row["expected"] == "expected":
            pytest.xfail(said)
        if row["verdict"] == "UNHEALTHY":
            raise Differs(said, None, row["torchrun"])

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from repro_matrix.errors import ReproError

        if isinstance(excinfo.value, (Differs, ReproError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        # The space: pytest would write the dots of what a node id ends with (qwen1.5) as ::, in each line of -v.
        return self.path, None, self.nodeid.partition("::")[2] + " "


class LeftOutItem(pytest.Item):
    """A file with an error: what it would have added was asked for, and is not measured."""

    text: str

    def runtest(self) -> None:
        raise Differs(f"left out, and not measured: {self.text}", None, None)

    repr_failure = ArmItem.repr_failure
    reportinfo = ArmItem.reportinfo


class Differs(Exception):
    def __init__(self, said: str, expectation: Any, torchrun: str | None) -> None:
        lines = [said, f"expected: {expectation}" if expectation else "", f"by hand: {torchrun}" if torchrun else ""]
        super().__init__("\n".join(line for line in lines if line))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--repro") is None:
        return
    before = len(items)
    top = Group.from_parent(session, name="repro", nodeid="repro")
    cases: dict[str, Group] = {}
    for cell in config.stash[CELLS]:
        case = cases.setdefault(cell.case, Group.from_parent(top, name=cell.case))
        group = Group.from_parent(case, name=cell.name)
        for mark in cell.marks:
            group.add_marker(mark)
        for arm, skipped in cell.arms:
            item = ArmItem.from_parent(group, name=arm)
            item.cell, item.skipped = cell, skipped
            items.append(item)
    wrong = Group.from_parent(top, name="left out")
    for text in config.stash[LEFT_OUT]:
        left: LeftOutItem = LeftOutItem.from_parent(wrong, name=text.partition(": ")[0])
        left.text = text
        items.append(left)
    # Counted as what pytest collects itself is: else what -k leaves out is taken from nothing.
    made: list[pytest.Item | pytest.Collector] = [*items[before:]]
    session.ihook.pytest_collectreport(report=pytest.CollectReport("repro", "passed", None, made))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was deselected is not measured."""
    chosen: dict[int, list[ArmItem]] = {}
    for item in session.items:
        if isinstance(item, ArmItem):
            chosen.setdefault(item.cell.number, []).append(item)
    for together in chosen.values():
        for item in together:
            item.wanted = tuple(other.name for other in together if not other.skipped)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    desk = session.config.stash.get(DESK, None)
    if desk is not None and hasattr(desk, "close"):
        desk.close()
    if desk is not None and not hasattr(session.config, "workerinput"):
        _nothing_measured(session, desk)


def _nothing_measured(session: pytest.Session, desk: Any) -> None:
    """Tests that were all skipped are no green run: it ends as one in which there was no test."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is None or session.exitstatus != pytest.ExitCode.OK or session.config.option.collectonly:
        return
    if not any(terminal.stats.get(kind) for kind in ("passed", "xfailed")):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        desk.notes.append("nothing was measured: every test was skipped, which is no pass (exit code 5)")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    notes: Sequence[str] = getattr(config.stash.get(DESK, None), "notes", ())
    for text in dict.fromkeys(notes):
        terminalreporter.write_line(f"repro: note: {text}")
