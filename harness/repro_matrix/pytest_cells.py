"""Collect the cells of a selection as pytest tests: every fix of every cell, and every control.

    repro::<case>::<model>/<strategy>::<variant>

-k, -m (failure, control, simulated), --lf, -x and --junitxml work as usual. -n is ignored, because
the run measures attempts in parallel itself. A test passes if its verdict is as expected, or, with
no expectation yet, if it was measured and no documented fix fails. It fails with the difference
otherwise, and is skipped with its reason. A fix that is expected to fail is a strict xfail: if it
works, the test fails. An invalid file of the selection is a test that fails. A run in which all
tests were skipped ends with exit code 5.
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
from repro_matrix.results.projection import rows_of
from repro_matrix.results.rows import Row
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
Result = tuple[Row, str]  # a variant, and why a run would not end with 0 despite its verdict


@dataclass
class Measurement:
    """Run all cells once, in a thread that the first test starts which needs a result."""

    prepared: Session
    texts: list[str]
    entries: Sequence[Quarantine]
    notes: list[str] = field(default_factory=list)
    wanted: dict[Place, list[str]] = field(default_factory=dict)  # the selected variants
    _results: dict[Place, Future[list[Result]]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def results(self, place: Place) -> list[Result]:
        """Wait for the results of a cell. Raise ReproError if the run ended without them."""
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
            if wanted := self.wanted.get(item_place(plan)):
                # The first variant of a failure is the unfixed one, which every verdict needs.
                chosen = {plan.variants[0].variant, *wanted}
                variants = tuple(each for each in plan.variants if each.variant in chosen)
                plans.append(replace(plan, variants=variants))
        try:
            run = replace(self.prepared, plans=plans, settings=self.prepared.settings.model_copy())
            with workspace.folder(run, self.texts) as finish:
                summary = workspace.execute(
                    run, self._take, self._stop, on_warning=self.notes.append
                )
                finish(summary)
            problem: BaseException = summary.problem or MeasureError("the run was ended")
        except BaseException as error:  # noqa: BLE001 - the tests would wait forever
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
    """Return the row of each variant of a cell, and why a run would still end with an error."""
    rows = quarantine.mark_rows(rows_of(document, cases), entries, today)
    found = []
    for row in rows:
        problems = quarantine.expired([row], entries, today)
        for each in (rows[0], row):
            if each.lost_attempts > 0:
                lost = counted(each.lost_attempts, "attempt")
                problems.append(f"{lost} of {each.variant} gave no answer")
        if row.unseen:
            problems.append(row.reason)
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
    left_out = ""  # the error of an invalid file, if this test is in place of its cells

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
        # Without the space, pytest -v would print the dots at the end of a node id (qwen1.5) as ::.
        return self.path, None, self.nodeid.partition("::")[2] + " "


class Cells:
    """Register the hooks of one run with --repro."""

    def __init__(self, config: pytest.Config, given: str) -> None:
        """Prepare the run. Raise pytest.UsageError for whatever is wrong with the selection."""
        for name, text in MARKS.items():
            config.addinivalue_line("markers", f"{name}: {text}")
        config.args = []  # only the cells: a project's own tests are another command
        if config.pluginmanager.hasplugin("xdist"):
            config.option.dist, config.option.tx, config.option.numprocesses = "no", [], None
        try:
            texts = shlex.split(given)
            if not texts:  # an unset variable would otherwise select the whole catalog
                raise pytest.UsageError(
                    "--repro: nothing is selected. To select every case, use --repro 'case=*'."
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
            # The name does not depend on what else is selected.
            name = cell.where
            if cell.stack != "current":
                name += f"@{cell.stack}"
            if cell.hardware != prepared.profile.name:
                name += f"#{cell.hardware}"
            group = Group.from_parent(parent, name=name)
            group.add_marker("repro")
            group.add_marker(known.kind)
            if known.simulated:
                group.add_marker("simulated")
            for variant in plan.variants[1:] if known.kind == "failure" else plan.variants:
                item = VariantItem.from_parent(group, name=variant.variant)
                item.measurement, item.place = self.measurement, item_place(plan)
                item.skipped = plan.skipped or variant.skipped
                items.append(item)
        for text in prepared.left_out:
            item = VariantItem.from_parent(top, name=text.partition(": ")[0])
            item.left_out = text
            items.append(item)
        # Count the cells as collected; otherwise the number that -k deselects exceeds the total.
        session.ihook.pytest_collectreport(
            report=pytest.CollectReport("repro", "passed", None, [*items])
        )

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note which variants to measure: those that are not deselected."""
        for item in session.items:
            if isinstance(item, VariantItem) and not (item.skipped or item.left_out):
                self.measurement.wanted.setdefault(item.place, []).append(item.name)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """End the run. If every test was skipped, exit as for a run without tests."""
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
