"""One run for many who ask, cell by cell: its engine, the cards it leases and its servers serve them all.

Who asks may be another process (a worker of pytest): ``serve`` gives the address of a socket, ``Asker`` is the other
end.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import date, datetime, timezone
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from repro_matrix.errors import MeasureError, ReproError
from repro_matrix.planning.plan import CellPlan
from repro_matrix.records.document import Document
from repro_matrix.results import local as own_results
from repro_matrix.results import quarantine as muted
from repro_matrix.results import rows, runs
from repro_matrix.results.exit_code import missed
from repro_matrix.results.quarantine import Mute
from repro_matrix.runner import workspace as workplace
from repro_matrix.runner.events import Event
from repro_matrix.runner.session import Session
from repro_matrix.text import counted

Row = dict[str, Any]
Asked = tuple[int, tuple[str, ...]]  # the cell's number among the run's plans, and the arms that are wanted of it


class Desk:
    """The run begins with the first question, in a folder of its own unless one is given. Thread-safe."""

    def __init__(self, prepared: Session, texts: Sequence[str] = ()) -> None:
        """``texts``: the overrides that it was prepared from. Raises ConfigError: a mute of no known cell."""
        self.prepared = prepared
        self._texts = list(texts)
        self._mutes = muted.read()
        muted.check(self._mutes, prepared.catalogue)
        self.notes: list[str] = []
        self._stop = threading.Event()
        self._waiting: queue.Queue[CellPlan] = queue.Queue()
        self._answers: dict[Asked, Future[list[Row]]] = {}
        self._of_plan: dict[int, Future[list[Row]]] = {}
        self._mutex = threading.RLock()
        self._over: BaseException | None = None  # why nothing more is answered
        self._thread: threading.Thread | None = None
        self._listener: Listener | None = None

    def measure(self, number: int, arms: Sequence[str]) -> list[Row]:
        """The rows of a cell's arms, once they are measured; whoever asks for the same again waits for the same.

        Raises ReproError: the run ended without an answer.
        """
        asked = number, tuple(sorted(arms))
        with self._mutex:
            if self._over is not None:
                raise self._over
            answer = self._answers.get(asked)
            if answer is None:
                answer = self._answers[asked] = Future()
                plan = self.prepared.plans[number]
                first = plan.arms[0].arm  # of a failure the broken arm, without which there is no verdict
                plan = replace(plan, arms=tuple(arm for arm in plan.arms if arm.arm in (first, *arms)))
                self._of_plan[id(plan)] = answer
                self._waiting.put(plan)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="repro", daemon=True)
                    self._thread.start()
        return answer.result()

    def close(self) -> None:
        """End what is at work; whoever waits is told."""
        self._stop.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.close()
        if self._thread is not None:
            self._thread.join()

    def _more(self, seconds: float) -> list[CellPlan]:
        """What was asked for meanwhile, after at most so many seconds."""
        try:
            return [self._waiting.get(timeout=seconds) if seconds else self._waiting.get_nowait()]
        except queue.Empty:
            return []

    def _work(self) -> None:
        try:
            settings, folder = self.prepared.settings, None
            if settings.results is None:
                folder = runs.begin(own_results.scratch(), self._texts)
                settings = replace(settings, results=str(folder))
            summary = workplace.execute(
                replace(self.prepared, settings=settings),
                self._tell,
                self._stop,
                on_warning=self.notes.append,
                more=self._more,
            )
            if folder is not None:
                runs.note(folder, self._texts, runs.ENDED)
            self._end(MeasureError(summary.problem or "the run was ended"))
        except BaseException as error:  # noqa: BLE001 - whoever waits would wait for ever
            self._end(error)

    def _tell(self, event: Event) -> None:
        if event.kind == "cell" and event.document is not None:
            with self._mutex:
                answer = self._of_plan.pop(id(event.plan))
            answer.set_result(told(event.document, self._mutes, datetime.now(timezone.utc).date()))

    def _end(self, error: BaseException) -> None:
        with self._mutex:
            self._over = error
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(error)

    def serve(self) -> tuple[str, bytes]:
        """(address, key) for ``Asker``, in other processes of this user's on this machine."""
        key = os.urandom(24)
        self._listener = listener = Listener(family="AF_UNIX", backlog=64, authkey=key)
        threading.Thread(target=self._accept, args=(listener,), name="repro-desk", daemon=True).start()
        return str(listener.address), key

    def _accept(self, listener: Listener) -> None:
        while not self._stop.is_set():
            try:
                connection = listener.accept()
            except OSError:  # closed
                return
            except Exception:  # noqa: BLE001 - somebody without the key, or who went away meanwhile
                continue
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        with connection, contextlib.suppress(EOFError, OSError):
            while True:
                number, arms = connection.recv()
                try:
                    connection.send((self.measure(number, arms), None))
                except OSError:
                    raise
                except BaseException as error:  # noqa: BLE001 - it is the asker's answer
                    connection.send((None, str(error) or type(error).__name__))


def told(document: Document, mutes: Sequence[Mute], today: date) -> list[Row]:
    """The rows of a cell's arms, muted ones as such; and of each ``wrong``: what a run would not be green for, though
    the arm's verdict is as expected ("" where there is nothing)."""
    applied = muted.applied([document], mutes, today)
    (shown,) = applied.documents
    first = next(iter(document["arms"]))
    found = []
    for row in rows.arm_rows(shown):
        arm = str(row["arm"])
        lost = {name: missed(document["arms"][name]["attempts"]) for name in dict.fromkeys((first, arm))}
        over = [mute for mute in applied.expired if mute.covers(mute.cell, arm)]
        wrong = [f"{muted.file()}: its day is over: {mute.told()}" for mute in over]
        wrong += [f"{counted(count, 'attempt')} of {name} gave no answer" for name, count in lost.items() if count > 0]
        if arm in document["verdicts"] and document["verdicts"][arm].get("unseen"):
            wrong.append(str(row["reason"]))
        found.append({**row, "wrong": "; ".join(wrong)})
    return found


class Asker:
    """The other end, in another process."""

    def __init__(self, address: str, key: bytes) -> None:
        self._connection = Client(address, authkey=key)

    def measure(self, number: int, arms: Sequence[str]) -> list[Row]:
        """As Desk.measure."""
        try:
            self._connection.send((number, tuple(arms)))
            found, error = self._connection.recv()
        except (EOFError, OSError):
            raise MeasureError("the run has ended") from None
        if error is not None:
            raise ReproError(error)
        return list(found)
