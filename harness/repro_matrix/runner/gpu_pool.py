"""The GPUs of this machine: one lock per GPU across all runs, their health, and what dead runs left behind.

A file lock is held for as long as its process lives, however that ends, and works across containers that share the
folder. Whoever gets the lock of a run or of a GPU therefore knows that its previous holder is gone. Ranks on the CPU
need no lock.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol

import psutil
from filelock import FileLock, Timeout

from repro_matrix.environment.gpus import RUN_TOKEN, Gpu, Seen, stranger, unseen
from repro_matrix.launch import processes
from repro_matrix.launch.attempt import clear_directory, read_launch

RELEASE_S = 10.0  # how long a device may take to free the memory of a process that has ended
LEFTOVER_MB = 256  # a context alone takes more; the driver's part varies by less
CHECK_S = 1.0  # between two checks of the free GPUs


def _node(state: Path) -> Path:
    """Return the folder for the locks of this machine; several machines may share the file system of ``state``."""
    return state / "nodes" / re.sub(r"[^\w.-]", "_", socket.gethostname())


def _acquire(path: Path) -> FileLock | None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return lock


@contextlib.contextmanager
def register_run(state: Path, run_id: str) -> Iterator[None]:
    """Mark the run as alive for as long as this lasts or the process lives."""
    path = _node(state) / "runs" / f"{run_id}.lock"
    lock = _acquire(path)
    assert lock is not None, "run ids are unique"
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def clear_leftovers(state: Path) -> list[str]:
    """End the processes and remove the files of runs whose controller is dead; return a line for each."""
    return [line for path in sorted((_node(state) / "runs").glob("*.lock")) for line in _clear_if_dead(state, path)]


def _clear_if_dead(state: Path, path: Path) -> list[str]:
    lock = _acquire(path)
    if lock is None:
        return []
    try:
        lines = _clear_run(state, path.stem)
        path.unlink(missing_ok=True)
        return lines
    finally:
        lock.release()


def _clear_run(state: Path, run_id: str) -> list[str]:
    known: set[psutil.Process] = set()

    def find() -> set[psutil.Process]:
        known.update(processes.tree(known | processes.with_token(RUN_TOKEN, run_id)))
        return {process for process in known if processes.alive(process)}

    lines = processes.end(find, term_s=1.0)
    folder = state / "runs" / run_id
    for directory in sorted(path for path in folder.glob("*") if path.is_dir()):
        answer = read_launch(directory / "launch.json")
        numbers = {int(entry.get("pid") or 0) for entry in answer["ranks"]} | {int(answer.get("port") or 0)}
        with contextlib.suppress(OSError):
            since = (directory / "spec.json").stat().st_mtime
            lines += [f"/dev/shm/{name} removed" for name in processes.clear_shared_memory(set(), numbers - {0}, since)]
        clear_directory(directory)
        lines.append(f"files of attempt {directory.name} removed")
    with contextlib.suppress(OSError):
        folder.rmdir()  # it stays where the user wants to keep the files
    return lines


@dataclass(frozen=True)
class GpuProblem:
    """Why a GPU cannot be used any more. ``lost``: it failed, and what ran on it is no evidence. ``left``: an ended
    attempt of this run still uses it."""

    kind: Literal["lost", "left"]
    why: str


class GpuLocks:
    """The GPUs that this run holds, each for one attempt at a time. Thread-safe."""

    def __init__(self, state: Path, run_id: str, inspect: Callable[[str], Seen] = unseen) -> None:
        """``inspect``: returns what is on a GPU (``gpus.Nvml.look``); by default nothing is known."""
        self.state = state
        self.run_id = run_id
        self.folder = _node(state) / "gpus"
        self._inspect = inspect
        self._held: dict[str, FileLock] = {}  # in use, or not released because a process of ours is still on it
        self._before: dict[str, Seen] = {}
        self._mutex = threading.Lock()

    def __enter__(self) -> GpuLocks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for uuid in list(self._held):
            self._unlock(uuid)

    def acquire(self, gpus: Sequence[str]) -> bool:
        """Lock all of ``gpus`` or none of them, so that no run holds some while it waits for others."""
        with self._mutex:
            for count, uuid in enumerate(gpus):
                if uuid in self._held or not self._lock(uuid):
                    for each in gpus[:count]:
                        self._unlock(each)
                    return False
        return True

    def release(self, gpus: Sequence[str]) -> dict[str, GpuProblem]:
        """Unlock GPUs as soon as their memory is free; return those that this run must not use again.

        A GPU on which a process of this run remains stays locked.
        """
        limit = time.monotonic() + RELEASE_S
        problems = {}
        for uuid in gpus:
            while (problem := self._problem(uuid)) and problem.kind != "lost" and time.monotonic() < limit:
                time.sleep(0.1)
            if problem:
                problems[uuid] = problem
            if not problem or problem.kind != "left":
                self._unlock(uuid)
        return problems

    def free(self, among: Sequence[str]) -> list[str]:
        """Return those of ``among`` that no run holds at this moment."""
        return [uuid for uuid in among if uuid not in self._held and self._unlocked(uuid)]

    def _unlocked(self, uuid: str) -> bool:
        lock = _acquire(self._path(uuid, ".lock"))
        if lock:
            lock.release()
        return lock is not None

    def _lock(self, uuid: str) -> bool:
        lock = _acquire(self._path(uuid, ".lock"))
        if lock is None:
            return False
        self._held[uuid] = lock
        note = self._path(uuid, ".holder")
        holder = note.read_text(encoding="utf-8", errors="replace").strip() if note.exists() else ""
        if holder != self.run_id and re.fullmatch(r"[\w.-]+", holder):
            # The previous holder died without releasing the GPU: its processes may still be on it.
            run_lock = _node(self.state) / "runs" / f"{holder}.lock"
            if run_lock.exists():
                _clear_if_dead(self.state, run_lock)
            else:
                _clear_run(self.state, holder)
        note.write_text(self.run_id, encoding="utf-8")
        self._before[uuid] = self._inspect(uuid)
        return True

    def _problem(self, uuid: str) -> GpuProblem | None:
        """Return what is wrong with a GPU of ours now that its attempt has ended."""
        before, now = self._before[uuid], self._inspect(uuid)
        if now.problem:
            return GpuProblem("lost", now.problem)
        for pid in sorted(self._ours(now)):
            return GpuProblem("left", f"process {pid} of an ended attempt is still on it ({now.size(pid)})")
        if now.users.keys() - before.users.keys():
            return None  # another user's process: the next check of the free GPUs finds it
        more = now.used_mb - before.used_mb
        return (
            GpuProblem("left", f"{more} MiB of an ended attempt are still in use on it") if more > LEFTOVER_MB else None
        )

    def _unlock(self, uuid: str) -> None:
        self._before.pop(uuid, None)
        if not self._ours(self._inspect(uuid)):
            self._path(uuid, ".holder").unlink(missing_ok=True)  # else it tells the next holder whom to clear
        lock = self._held.pop(uuid, None)
        if lock is not None:
            lock.release()

    def _ours(self, state: Seen) -> set[int]:
        """Return the processes of this run among those on the GPU."""
        users = set(state.users)
        return users & {process.pid for process in processes.with_token(RUN_TOKEN, self.run_id)} if users else set()

    def _path(self, uuid: str, suffix: str) -> Path:
        return self.folder / (re.sub(r"[^\w.-]", "_", uuid) + suffix)


class Driver(Protocol):
    """``gpus.Nvml``, or a fake."""

    def look(self, uuid: str) -> Seen: ...
    def failed_gpus(self) -> dict[str, str]: ...


class GpuPool:
    """Which of the machine's GPUs this run may use now, and why not the others.

    A GPU is *out* for the rest of the run when it fails (Xid, ECC, NVML has lost it) or an ended attempt stays on it.
    It is *taken* while another user's process is on it. What another run of this project holds is waited for.
    """

    def __init__(
        self, gpus: Sequence[Gpu], locks: GpuLocks, driver: Driver, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self.all = [gpu.uuid for gpu in gpus]
        self.names = {gpu.uuid: f"gpu{gpu.index}" for gpu in gpus}
        self.models = {gpu.uuid: gpu.name for gpu in gpus}
        self.out: dict[str, GpuProblem] = {}
        self.taken: dict[str, str] = {}
        self.notes: list[str] = []  # for the summary of the run
        self.locks = locks
        self._driver = driver
        self._say = say
        self._checked = float("-inf")
        self._idle: set[str] = set()  # at the last check

    def usable(self) -> list[str]:
        """Return the GPUs that this run can have, sooner or later."""
        return [uuid for uuid in self.all if uuid not in self.out and uuid not in self.taken]

    def ready(self, held: Collection[str]) -> list[str]:
        """Return the GPUs that an attempt can start on now. ``held``: by this run's own attempts."""
        return self.locks.free([uuid for uuid in self.usable() if uuid not in held])

    def check(self, held: Collection[str], now: float) -> set[str]:
        """Check the health of all GPUs and the users of the free ones, every ``CHECK_S``; return those, held ones too,
        that have just failed."""
        idle = [uuid for uuid in self.all if uuid not in held and uuid not in self.out]
        due = now - self._checked >= CHECK_S
        fresh = idle if due else [uuid for uuid in idle if uuid not in self._idle]  # just released
        self._idle = set(idle)
        if not due and not fresh:
            return set()
        self._checked = now if due else self._checked
        failed = {uuid: why for uuid, why in self._driver.failed_gpus().items() if uuid in self.names}
        for uuid in self.locks.free(fresh):
            state = self._driver.look(uuid)
            if state.problem:
                failed.setdefault(uuid, state.problem)
            self._set_user(uuid, stranger(state))
        new = failed.keys() - self.out.keys()
        self.exclude({uuid: GpuProblem("lost", failed[uuid]) for uuid in new})
        return set(new)

    def exclude(self, problems: Mapping[str, GpuProblem]) -> None:
        """Do not use these GPUs again in this run."""
        for uuid, problem in problems.items():
            if uuid not in self.out:
                self.out[uuid] = problem
                self.taken.pop(uuid, None)
                self._note(f"{self.names[uuid]} ({uuid}) is not used any more: {problem.why}")

    def _set_user(self, uuid: str, user: str | None) -> None:
        before = self.taken.pop(uuid, None)
        if user is not None:
            self.taken[uuid] = user
        if user is None and before:
            self._say(f"{self.names[uuid]} is free again")
        elif user is not None and before is None:
            self._note(f"{self.names[uuid]} ({uuid}) is left out while it is in use: {user}")

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._say(text)

    def shortage(self, width: int) -> str:
        """Explain why there are fewer than ``width`` usable GPUs."""
        why = [f"{self.names[uuid]}: {problem.why}" for uuid, problem in self.out.items()]
        why += [f"{self.names[uuid]} is in use: {user}" for uuid, user in self.taken.items()]
        return f"needs {width} GPU{'s' if width > 1 else ''}; {len(self.usable())} can be used ({'; '.join(why)})"
