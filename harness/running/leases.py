"""Who holds what on this node: the runs that live, the GPUs they lease, and what dead runs left behind.

A file lock is held for as long as its process lives, however that ends, and is seen across containers that share the
folder; so whoever gets the lock of a run or of a GPU knows that its former holder is gone. CPU ranks are not leased.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import psutil
from filelock import FileLock, Timeout

from harness.launch import processes, shm
from harness.launch.attempt import RUN_TOKEN, clear_directory
from harness.launch.watch import read_launch

EMPTY_S = 10.0  # how long a device may take to let go of a process that has ended


def _node(state: Path) -> Path:
    """Locks and leases of this machine: the state folder may be on a file system that several machines share."""
    return state / "nodes" / re.sub(r"[^\w.-]", "_", socket.gethostname())


def _lock(path: Path) -> FileLock:
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path, thread_local=False)


@contextlib.contextmanager
def register_run(state: Path, run_id: str) -> Iterator[None]:
    """For as long as this lasts (or the process lives) the run counts as living."""
    path = _node(state) / "runs" / f"{run_id}.lock"
    lock = _lock(path)
    lock.acquire(timeout=0)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def clear_leftovers(state: Path) -> list[str]:
    """End the processes and remove the files of runs whose controller is dead; says what there was."""
    said = []
    for path in sorted((_node(state) / "runs").glob("*.lock")):
        said += _clear_if_dead(state, path)
    return said


def _clear_if_dead(state: Path, path: Path) -> list[str]:
    lock = _lock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return []
    try:
        said = _clear_run(state, path.stem)
        path.unlink(missing_ok=True)
        return said
    finally:
        lock.release()


def _clear_run(state: Path, run_id: str) -> list[str]:
    known: set[psutil.Process] = set()

    def find() -> set[psutil.Process]:
        known.update(processes.tree(known | processes.with_token(RUN_TOKEN, run_id)))
        return {process for process in known if processes.alive(process)}

    said = processes.end(find, term_s=1.0)
    folder = state / "runs" / run_id
    for directory in sorted(path for path in folder.glob("*") if path.is_dir()):
        answer = read_launch(directory / "launch.json")
        numbers = {int(entry.get("pid") or 0) for entry in answer["ranks"]} | {int(answer.get("port") or 0)}
        with contextlib.suppress(OSError):
            since = (directory / "spec.json").stat().st_mtime
            said += [f"/dev/shm/{name} removed" for name in shm.clear(set(), numbers - {0}, since)]
        clear_directory(directory)
        said.append(f"files of attempt {directory.name} removed")
    with contextlib.suppress(OSError):
        folder.rmdir()  # stays where something was to be kept
    return said


class Leases:
    """The GPUs that this run holds. A device is held by one attempt of one run at a time."""

    def __init__(self, state: Path, run_id: str, users: Callable[[str], set[int]] | None = None) -> None:
        self.state = state
        self.run_id = run_id
        self.folder = _node(state) / "leases"
        self._users = users or compute_pids
        self._held: dict[str, FileLock] = {}  # leased now, or not let go of because a process still sits on it
        self._busy: set[str] = set()
        self._mutex = threading.Lock()

    def __enter__(self) -> Leases:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for uuid in list(self._held):
            self._let_go(uuid)

    @contextlib.contextmanager
    def hold(self, gpus: Sequence[str], stop: threading.Event) -> Iterator[bool]:
        """Wait until all of ``gpus`` are ours; False when ``stop`` was set first: then nothing may be launched."""
        mine: list[str] = []
        before: dict[str, set[int]] = {}
        try:
            for uuid in sorted(gpus):  # everybody takes them in the same order: nobody waits in a circle
                while not self._take(uuid):
                    if stop.wait(0.2):
                        break
                else:
                    mine.append(uuid)
                    before[uuid] = self._users(uuid)
                    continue
                break
            yield len(mine) == len(gpus)
        finally:
            for uuid in mine:
                self._give_back(uuid, before.get(uuid, set()))

    def available(self, among: Sequence[str]) -> list[str]:
        """Those of ``among`` that no other run holds at this moment."""
        return [uuid for uuid in among if uuid in self._held or self._unlocked(uuid)]

    def _unlocked(self, uuid: str) -> bool:
        lock = _lock(self.folder / f"{_name(uuid)}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return False
        lock.release()
        return True

    def _take(self, uuid: str) -> bool:
        with self._mutex:
            if uuid in self._busy:
                return False
            if uuid in self._held:  # we did not let go of it: is it free by now?
                if self._ours(uuid):
                    return False
                self._busy.add(uuid)
                return True
            lock = _lock(self.folder / f"{_name(uuid)}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                return False
            self._held[uuid] = lock
            self._busy.add(uuid)
        holder = self._holder(uuid)
        if holder and holder != self.run_id:
            # Its controller died with the lease in its hand: what it started may still be on the device.
            run_lock = _node(self.state) / "runs" / f"{holder}.lock"
            if run_lock.exists():
                _clear_if_dead(self.state, run_lock)
            else:
                _clear_run(self.state, holder)
        note = {"run": self.run_id, "pid": os.getpid()}
        self._note(uuid).write_text(json.dumps(note), encoding="utf-8")
        return True

    def _give_back(self, uuid: str, before: set[int]) -> None:
        """Let go of a device once it is empty of our processes; else keep it from everybody, ourselves included."""
        limit = time.monotonic() + EMPTY_S
        while self._users(uuid) - before and time.monotonic() < limit:
            time.sleep(0.1)
        ours = self._ours(uuid)
        with self._mutex:
            if not ours:
                self._let_go(uuid)
            self._busy.discard(uuid)

    def _let_go(self, uuid: str) -> None:
        if not self._ours(uuid):
            self._note(uuid).unlink(missing_ok=True)  # else the next holder learns from it whom to clear
        lock = self._held.pop(uuid, None)
        if lock is not None:
            lock.release()

    def _ours(self, uuid: str) -> set[int]:
        """Processes of this run on the device."""
        users = self._users(uuid)
        return users & {process.pid for process in processes.with_token(RUN_TOKEN, self.run_id)} if users else set()

    def _note(self, uuid: str) -> Path:
        return self.folder / f"{_name(uuid)}.json"

    def _holder(self, uuid: str) -> str | None:
        try:
            return str(json.loads(self._note(uuid).read_text(encoding="utf-8"))["run"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _name(uuid: str) -> str:
    return re.sub(r"[^\w.-]", "_", uuid)


def compute_pids(uuid: str) -> set[int]:
    """Processes that compute on the device, as NVML sees them (inside a container: numbers of the host)."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            return {int(entry.pid) for entry in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # noqa: BLE001 - no driver, or one that does not tell: then nobody can be seen on it
        return set()
