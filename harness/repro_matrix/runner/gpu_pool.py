"""Lock the GPUs that attempts run on, watch their health, and clean up after dead runs.

The system releases a file lock when its process ends, however it ends. A process that gets the lock
of a run therefore knows that this run's controller has ended. There is one lock per GPU and user;
NVML shows the processes of other users and containers. Ranks on the CPU need no lock.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from filelock import FileLock, Timeout

from repro_matrix.environment.gpus import RUN_TOKEN, Gpu, GpuProcess, GpuState, Nvml, stranger
from repro_matrix.launch import processes
from repro_matrix.launch.attempt import read_launch, remove
from repro_matrix.paths import has_locks
from repro_matrix.text import counted

RELEASE_S = 10.0  # how long a device may take to free the memory of a process that has ended
LEFTOVER_MB = 256  # a context alone takes more; the driver's part varies by less
CHECK_S = 1.0  # between two checks of the free GPUs
# A file for each GPU that this user's runs have locked, whatever their TMPDIR and their cache.
LOCKS = Path(f"/tmp/repro-matrix-gpus-{os.getuid()}")


def _node(state: Path) -> Path:
    """Return the folder for the locks of this machine.

    Several machines may share the file system of ``state``, which may have no locks.
    """
    state.mkdir(parents=True, exist_ok=True)
    folder = state if has_locks(state) else LOCKS
    return folder / "nodes" / re.sub(r"[^\w.-]", "_", socket.gethostname())


def _acquire(path: Path) -> FileLock | None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return lock


def _acquire_gpu(uuid: str) -> FileLock | None:
    return _acquire(LOCKS / f"{uuid}.lock")


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
    """End the processes and remove the files of dead runs; return a line for each."""
    lines = []
    for path in sorted((_node(state) / "runs").glob("*.lock")):
        lock = _acquire(path)
        if lock is None:
            continue
        try:
            lines += _clear_run(state, path.stem)
            path.unlink(missing_ok=True)
        finally:
            lock.release()
    return lines


def _clear_run(state: Path, run_id: str) -> list[str]:
    known: set[psutil.Process] = set()

    def find() -> set[psutil.Process]:
        known.update(processes.tree(known | processes.with_token(RUN_TOKEN, run_id)))
        return {process for process in known if processes.alive(process)}

    lines = processes.end(find, term_s=1.0)
    folder = state / "runs" / run_id
    for directory in sorted(path for path in folder.glob("*") if path.is_dir()):
        answer = read_launch(directory / "launch.json")
        numbers = {int(entry.get("pid") or 0) for entry in answer["ranks"]} | {
            int(answer.get("port") or 0)
        }
        with contextlib.suppress(OSError):
            since = (directory / "spec.json").stat().st_mtime
            lines += [
                f"/dev/shm/{name} removed"
                for name in processes.clear_shared_memory(set(), numbers - {0}, since)
            ]
        remove(directory)
        lines.append(f"files of attempt {directory.name} removed")
    shutil.rmtree(folder, ignore_errors=True)
    return lines


@dataclass(frozen=True)
class GpuProblem:
    """Why a GPU cannot be used any more.

    ``lost``: it failed, and what ran on it is no evidence. ``left``: an ended attempt of this run
    still uses it.
    """

    kind: Literal["lost", "left"]
    why: str


@dataclass(frozen=True)
class GpuLease:
    """A GPU that this run has locked. ``shares``: MiB that each attempt on it may take; 0: all."""

    lock: FileLock
    before: GpuState
    shares: list[int]


class GpuLocks:
    """The GPUs that this run has locked, each for one attempt or for several that share it.

    A file lock per GPU. Thread-safe.
    """

    def __init__(self, state: Path, run_id: str, nvml: Nvml | None = None) -> None:
        """Lock nothing yet. ``nvml``: reports what is on a GPU; by default nothing is known."""
        self.state = state
        self.run_id = run_id
        self._nvml = nvml or Nvml([])
        # In use, or not released because a process of this run is still on it.
        self._held: dict[str, GpuLease] = {}
        self._mutex = threading.Lock()

    def __enter__(self) -> GpuLocks:
        return self

    def __exit__(self, *_: object) -> None:
        for uuid in list(self._held):
            self._unlock(uuid)

    def acquire(self, gpus: Sequence[str], share_mb: int = 0) -> bool:
        """Lock all of ``gpus`` or none, so that no run keeps some while it waits for others.

        A GPU with another user's process is not free. ``share_mb``: MiB of each GPU that an attempt
        takes if it may join others of this run; 0: it needs its GPUs alone.
        """
        with self._mutex:
            if share_mb and all(share_mb <= self._left(uuid) for uuid in gpus):
                for uuid in gpus:
                    self._held[uuid].shares.append(share_mb)
                return True
            leases: dict[str, GpuLease] = {}
            locks = {uuid: _acquire_gpu(uuid) for uuid in gpus if uuid not in self._held}
            if gpus and len(locks) == len(gpus) and None not in locks.values():
                # The previous holder may have been killed while its ranks were at work.
                clear_leftovers(self.state)
                for uuid, lock in locks.items():
                    if lock and not stranger(before := self._nvml.look(uuid)):
                        leases[uuid] = GpuLease(lock, before, [share_mb])
            if len(leases) < len(gpus):
                for lock in filter(None, locks.values()):
                    lock.release()
                return False
            self._held |= leases
        return True

    def room(self) -> dict[str, int]:
        """Return how many MiB further attempts may take on each shared GPU."""
        with self._mutex:
            return {uuid: left for uuid in self._held if (left := self._left(uuid)) > 0}

    def _left(self, uuid: str) -> int:
        """Return the MiB that are neither planned for an attempt nor in use.

        Attempts have not yet allocated all they will, and others may have come since the first one
        began.
        """
        lease = self._held.get(uuid)
        if not lease or not all(lease.shares or [0]):
            return 0
        planned = (lease.before.free_mb or 0) - sum(lease.shares)
        return min(planned, self._nvml.look(uuid).free_mb or 0)

    def release(self, gpus: Sequence[str], share_mb: int = 0) -> dict[str, GpuProblem]:
        """Unlock GPUs as soon as their memory is free; return those that must not be used again.

        A GPU on which a process of this run remains stays locked. ``share_mb``: as they were
        acquired.
        """
        limit = time.monotonic() + RELEASE_S
        problems = {}
        for uuid in gpus:
            with self._mutex:
                self._held[uuid].shares.remove(share_mb)
                others = bool(self._held[uuid].shares)
            if others:  # what they have on it is checked when the last one ends
                if why := self._nvml.look(uuid).problem:
                    problems[uuid] = GpuProblem("lost", why)
                continue
            problem = self._problem(uuid)
            while problem and problem.kind == "left" and time.monotonic() < limit:
                time.sleep(0.1)
                problem = self._problem(uuid)
            if problem:
                problems[uuid] = problem
            if not problem or problem.kind != "left":
                self._unlock(uuid)
        return problems

    def free(self, among: Sequence[str]) -> list[str]:
        """Return the GPUs of ``among`` that no run has locked now."""
        free = []
        for uuid in among:
            if uuid not in self._held and (lock := _acquire_gpu(uuid)):
                lock.release()
                free.append(uuid)
        return free

    def _unlock(self, uuid: str) -> None:
        self._held.pop(uuid).lock.release()

    def _problem(self, uuid: str) -> GpuProblem | None:
        """Return what is wrong with a GPU of this run now that its attempt has ended."""
        before, now = self._held[uuid].before, self._nvml.look(uuid)
        if now.problem:
            return GpuProblem("lost", now.problem)
        for process in self._remaining(now):
            return GpuProblem("left", f"{process} of an ended attempt is still on it")
        more = now.used_mb - before.used_mb
        new = {each.pid for each in now.processes} - {each.pid for each in before.processes}
        # The next check of the free GPUs finds another user's process.
        if new or more <= LEFTOVER_MB:
            return None
        return GpuProblem("left", f"{more} MiB of an ended attempt are still in use on it")

    def _remaining(self, state: GpuState) -> list[GpuProcess]:
        """Return the processes of this run among those on the GPU."""
        ours = processes.with_token(RUN_TOKEN, self.run_id) if state.processes else set()
        return [each for each in state.processes if each.pid in {process.pid for process in ours}]


class GpuPool:
    """The machine's GPUs that this run may use now, and why it may not use the others.

    A GPU is *out* for the rest of the run when it fails (Xid, ECC, NVML has lost it) or an ended
    attempt stays on it. It is *taken* while another user's process is on it. This run waits for
    a GPU that another run of this user has locked.
    """

    def __init__(
        self,
        gpus: Sequence[Gpu],
        locks: GpuLocks,
        nvml: Nvml,
        say: Callable[[str], None],
    ) -> None:
        self.all = [gpu.uuid for gpu in gpus]
        self.names = {gpu.uuid: f"gpu{gpu.index}" for gpu in gpus}
        self.out: dict[str, GpuProblem] = {}
        self.taken: dict[str, str] = {}
        self.notes: list[str] = []  # for the summary of the run
        self.locks = locks
        self._nvml = nvml
        self._say = say
        self._checked = float("-inf")

    def usable(self) -> list[str]:
        """Return the GPUs that this run can have, sooner or later."""
        return [uuid for uuid in self.all if uuid not in self.out and uuid not in self.taken]

    def ready(self, held: Collection[str]) -> list[str]:
        """Return the GPUs that an attempt can start on now.

        ``held``: by this run's own attempts.
        """
        return self.locks.free([uuid for uuid in self.usable() if uuid not in held])

    def check(self, held: Collection[str], now: float) -> set[str]:
        """Check all GPUs every ``CHECK_S``; return those that have just failed, also locked ones.

        Check the health of all and the users of the free ones.
        """
        if now - self._checked < CHECK_S:
            return set()
        self._checked = now
        failed = {uuid: why for uuid, why in self._nvml.failed_gpus().items() if uuid in self.names}
        for uuid in self.locks.free(
            [uuid for uuid in self.all if uuid not in held and uuid not in self.out]
        ):
            state = self._nvml.look(uuid)
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
                self.note(f"{self.names[uuid]} ({uuid}) is not used any more: {problem.why}")

    def _set_user(self, uuid: str, user: str | None) -> None:
        if user is None:
            if self.taken.pop(uuid, None):
                self._say(f"{self.names[uuid]} is free again")
            return
        if uuid not in self.taken:
            self.note(f"{self.names[uuid]} ({uuid}) is left out while it is in use: {user}")
        self.taken[uuid] = user

    def note(self, text: str) -> None:
        self.notes.append(text)
        self._say(text)

    def shortage(self, width: int) -> str:
        """Explain why there are fewer than ``width`` usable GPUs."""
        why = [f"{self.names[uuid]}: {problem.why}" for uuid, problem in self.out.items()]
        why += [f"{self.names[uuid]} is in use: {user}" for uuid, user in self.taken.items()]
        return f"needs {counted(width, 'GPU')}; {len(self.usable())} can be used ({'; '.join(why)})"
