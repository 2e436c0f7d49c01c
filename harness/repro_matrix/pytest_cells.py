"""The cells of a selection as tests of pytest: every fix of every cell, and every control
(pytest_plugin.py).

    repro::<case>::<model>/<strategy>::<variant>

-k, -m (failure, control, simulated), --lf, -x and --junitxml do what they say; -n is ignored,
because the run itself
measures attempts side by side. A test passes when its verdict is as expected (or nothing is
expected yet, it was measured, and no documented fix fails), fails with the difference otherwise,
and is skipped with its reason. A fix that is expected to fail is xfail, and strictly so: that it
works is a failure. An invalid file of the selection is a test that fails, and a run in which all
tests were skipped ends with 5.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from repro_matrix.baseline import quarantine
from repro_matrix.baseline.quarantine import Quarantine
from repro_matrix.config.schema import Case
from repro_matrix.errors import MeasureError, ReproError
from repro_matrix.planning.plan import CellPlan
from repro_matrix.records.document import Document
from repro_matrix.records.outcome import CONFIRMED, FAILING, NOT_GREEN
from repro_matrix.results.rows import Row, rows_of
from repro_matrix.runner import run as workspace
from repro_matrix.runner import session as sessions
from repro_matrix.runner.engine import Event
from repro_matrix.runner.prepared import Session
from repro_matrix.text import counted

MARKS = {
    "repro": "a cell of repro-matrix (pytest --repro)",
    "failure": "of a known failure",
    "control": "of training that must work",
    "simulated": "device placement without a GPU",
}
Place = tuple[str, str, str]  # of a plan: hardware, stack, cell
Result = tuple[
    Row, str
]  # a variant, and why the run does not end with 0 although its verdict is as expected


@dataclass
class Measurement:
    """One run for all tests: it begins with the first test that needs a result, in a thread, and
    ends with them."""

    prepared: Session
    texts: list[str]
    entries: Sequence[Quarantine]
    notes: list[str] = field(default_factory=list)
    wanted: dict[Place, list[str]] = field(default_factory=dict)  # the selected variants
    _results: dict[Place, Future[list[Result]]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def results(self, place: Place) -> list[Result]:
        """Return the results of a cell once it is measured. Raises ReproError: the run ended
        without it."""
        if self._thread is None:
            self._results = {each: Future() for each in self.wanted}
            self._thread = threading.Thread(target=self._run, name="repro", daemon=True)
            self._thread.start()
        return self._results[place].result()

    def close(self) -> None:
        """Stop what is running."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        plans = []
        for plan in self.prepared.plans:
            # Of a failure the first variant is the unfixed one, without which there is no verdict.
            chosen = {plan.variants[0].variant, *self.wanted.get(item_place(plan), ())}
            if item_place(plan) in self.wanted:
                plans.append(
                    replace(
                        plan,
                        variants=tuple(each for each in plan.variants if each.variant in chosen),
                    )
                )
        try:
            run = replace(self.prepared, plans=plans, settings=self.prepared.settings.model_copy())
            with workspace.folder(run, self.texts) as finish:
                summary = workspace.execute(
                    run, self._take, self._stop, on_warning=self.notes.append
                )
                finish(summary)
            problem: BaseException = summary.problem or MeasureError("the run was ended")
        except BaseException as error:  # noqa: BLE001 - the tests would wait for ever
            problem = error
        for results in self._results.values():
            if not results.done():
                results.set_exception(problem)

    def _take(self, event: Event) -> None:
        if event.kind == "cell" and event.plan and event.document is not None:
            today = datetime.now(timezone.utc).date()
            results = results_of(event.document, self.prepared.catalogue.cases, self.entries, today)
            self._results[item_place(event.plan)].set_result(results)


def item_place(plan: CellPlan) -> Place:
    return plan.cell.hardware, plan.cell.stack, plan.cell.key


def results_of(
    document: Document, cases: Mapping[str, Case], entries: Sequence[Quarantine], today: date
) -> list[Result]:
    """Return the row of each variant of a cell, and why a run would end with an error although the
    verdict is as expected ("" where there is nothing)."""
    rows = quarantine.mark_rows(rows_of(document, cases), entries, today)
    found = []
    for row in rows:
        problems = quarantine.expired([row], entries, today)
        lost = [each for each in (rows[0], row) if each.lost_attempts > 0]
        problems += [
            f"{counted(each.lost_attempts, 'attempt')} of {each.variant} gave no answer"
            for each in lost
        ]
        problems += [row.reason] if row.unseen else []
        found.append((row, "; ".join(dict.fromkeys(problems))))
    return found


class Group(pytest.Collector):
    """The root, a case or a cell."""

    def collect(self) -> Iterator[pytest.Item]:
        return iter(())


class VariantItem(pytest.Item):
    """One fix of one cell, or a control."""

    measurement: Measurement
    place: Place
    skipped: str | None = None  # why it is not measured
    left_out = ""  # the error of an invalid file, which stands for what the file would have added

    def runtest(self) -> None:
        if self.left_out:
            pytest.fail(f"left out, and not measured: {self.left_out}", pytrace=False)
        if self.skipped:
            pytest.skip(self.skipped)
        try:
            results = self.measurement.results(self.place)
        except ReproError as error:
            pytest.fail(str(error), pytrace=False)
        row, wrong = next(result for result in results if result[0].variant == self.name)
        self.user_properties += [("verdict", row.verdict), ("reproduce", str(row.torchrun))]
        text = f"{row.verdict}: {row.reason}"
        if not wrong and (row.verdict is None or not row.attempts):
            pytest.skip(row.reason)
        differs = wrong or row.state in NOT_GREEN or row.verdict == "INCONCLUSIVE"
        if not differs and row.state == "quarantined":
            pytest.xfail(f"{text} (quarantined: {row.quarantine})")
        if not differs and row.verdict in FAILING and row.state in CONFIRMED:
            pytest.xfail(text)
        if differs or row.verdict == "FAILED":
            expected = row.difference if row.expected_verdict or row.state in NOT_GREEN else ""
            manually = f"manually: {row.torchrun}" if row.torchrun else ""
            pytest.fail("\n".join(filter(None, (wrong, text, expected, manually))), pytrace=False)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        # The space: pytest would write the dots of what a node id ends with (qwen1.5) as ::, in
        # each line of -v.
        return self.path, None, self.nodeid.partition("::")[2] + " "


class Cells:
    """What pytest registers for one run with --repro."""

    def __init__(self, config: pytest.Config, given: str) -> None:
        """Prepare the run: everything that can be wrong with the selection is found here, as
        pytest.UsageError."""
        for name, text in MARKS.items():
            config.addinivalue_line("markers", f"{name}: {text}")
        config.args = []  # only the cells: a project's own tests are another command
        if config.pluginmanager.hasplugin("xdist"):
            config.option.dist, config.option.tx, config.option.numprocesses = "no", [], None
        try:
            texts = shlex.split(given)
            if not texts:  # a variable that is not set, which would be the whole catalogue
                raise pytest.UsageError(
                    "--repro: nothing is selected; --repro 'case=*' is every case"
                )
            prepared, entries = sessions.prepare(texts), quarantine.read_quarantine()
            quarantine.check_quarantine(entries, prepared.catalogue)
        except ValueError as error:  # an open quote
            raise pytest.UsageError(f"--repro {given}: {error}") from None
        except ReproError as error:
            raise pytest.UsageError(str(error)) from None
        self.measurement = Measurement(prepared, texts, entries)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, items: list[pytest.Item]
    ) -> None:
        prepared = self.measurement.prepared
        top = Group.from_parent(session, name="repro", nodeid="repro")
        cases: dict[str, Group] = {}
        for plan in prepared.plans:
            cell, known = plan.cell, prepared.catalogue.cases[plan.cell.case]
            parent = cases.setdefault(cell.case, Group.from_parent(top, name=cell.case))
            # Named alike whatever else is selected; what is usual (stack current, the first
            # profile) is left out.
            name = cell.where
            name += f"@{cell.stack}" if cell.stack != "current" else ""
            name += f"#{cell.hardware}" if cell.hardware != prepared.profile.name else ""
            group = Group.from_parent(parent, name=name)
            for mark in ("repro", known.kind, *(["simulated"] if known.simulated else [])):
                group.add_marker(mark)
            for variant in plan.variants[1:] if known.kind == "failure" else plan.variants:
                item = VariantItem.from_parent(group, name=variant.variant)
                item.measurement, item.place = self.measurement, item_place(plan)
                item.skipped = plan.skipped or variant.skipped
                items.append(item)
        for text in prepared.left_out:
            item = VariantItem.from_parent(top, name=text.partition(": ")[0])
            item.left_out = text
            items.append(item)
        # Counted as what pytest collects itself is: else what -k leaves out is taken from nothing.
        session.ihook.pytest_collectreport(
            report=pytest.CollectReport("repro", "passed", None, [*items])
        )

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Measure what is selected, and nothing that was deselected."""
        for item in session.items:
            if isinstance(item, VariantItem) and not (item.skipped or item.left_out):
                self.measurement.wanted.setdefault(item.place, []).append(item.name)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """End the run; tests that were all skipped are no green run: it ends as one without
        tests."""
        self.measurement.close()
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        if (
            terminal is None
            or session.exitstatus != pytest.ExitCode.OK
            or session.config.option.collectonly
        ):
            return
        if not any(terminal.stats.get(kind) for kind in ("passed", "xfailed")):
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
            self.measurement.notes.append(
                "nothing was measured: every test was skipped (exit code 5)"
            )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for text in dict.fromkeys(self.measurement.notes):
            terminalreporter.write_line(f"repro: note: {text}")
