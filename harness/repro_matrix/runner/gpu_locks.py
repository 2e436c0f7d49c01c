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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil
from filelock import FileLock, Timeout

from repro_matrix.environment.gpus import RUN_TOKEN, Seen, unseen
from repro_matrix.launch import processes, shm
from repro_matrix.launch.attempt import clear_directory
from repro_matrix.launch.attempt_logs import read_launch
from repro_matrix.runner.scheduler import Kept

EMPTY_S = 10.0  # how long a device may take to let go of a process that has ended
LEFT_MB = 256  # a context alone takes more; the driver's own use goes up and down by less


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


@dataclass(frozen=True)
class Trouble:
    """Why a card cannot be given on. ``lost``: it failed, and what ran on it is no evidence. ``left``: an ended attempt
    of ours is still on it. ``stranger``: somebody else came meanwhile (or nobody can tell whose process it is)."""

    kind: Literal["lost", "left", "stranger"]
    why: str


class Leases:
    """The GPUs that this run holds. A device is held by one attempt of one run at a time. Thread-safe."""

    def __init__(self, state: Path, run_id: str, look: Callable[[str], Seen] = unseen) -> None:
        """``look``: what is on a device (nvml.py); by default no device can be looked at."""
        self.state = state
        self.run_id = run_id
        self.folder = _node(state) / "leases"
        self._look = look
        self._held: dict[str, FileLock] = {}  # leased now, or not let go of because a process of ours sits on it
        self._before: dict[str, Seen] = {}
        self._keeping: FileLock | None = None
        self._mutex = threading.Lock()

    def __enter__(self) -> Leases:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.unkeep()
        for uuid in list(self._held):
            self._let_go(uuid)

    def take(self, cards: Sequence[str], ends: float = 0.0) -> bool:
        """All of ``cards`` are ours from now on, or none of them is: nobody holds some while he waits for others.

        ``ends``: when we expect to give them back, for the other runs' planning; by the monotonic clock, which
        all processes of the machine read alike.
        """
        with self._mutex:
            taken: list[str] = []
            for uuid in cards:
                if uuid in self._held or not self._lock(uuid, ends):
                    for each in taken:
                        self._let_go(each)
                    return False
                taken.append(uuid)
        return True

    def give_back(self, cards: Sequence[str]) -> dict[str, Trouble]:
        """Let go of devices as soon as they are empty of what we left there; says which this run must not use again.

        One that is not empty stays locked, unless it is a stranger who is on it: he is seen again by whoever looks.
        """
        limit = time.monotonic() + EMPTY_S
        troubles = {}
        for uuid in cards:
            while (trouble := self._trouble(uuid)) and trouble.kind != "lost" and time.monotonic() < limit:
                time.sleep(0.1)
            if trouble and trouble.kind != "stranger":
                troubles[uuid] = trouble
            if not trouble or trouble.kind != "left":
                self._let_go(uuid)
        return troubles

    def available(self, among: Sequence[str]) -> list[str]:
        """Those of ``among`` that nobody holds at this moment."""
        return [uuid for uuid in among if uuid not in self._held and self._unlocked(uuid)]

    def ends(self, cards: Sequence[str]) -> dict[str, float]:
        """When other runs expect to give back those that they hold."""
        notes = {uuid: _read(self._note(uuid)) for uuid in cards if uuid not in self._held}
        return {uuid: float(note["ends"]) for uuid, note in notes.items() if "ends" in note}

    def keep(self, cards: Sequence[str], due: float) -> bool:
        """Until we have these cards, which may be at ``due``, nobody starts on them what takes longer than that. One
        run at a time keeps cards: two would wait for each other."""
        lock = _lock(self.folder / "kept.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return False
        _write(self.folder / "kept.json", {"run": self.run_id, "cards": list(cards), "due": due})
        self._keeping = lock
        return True

    def unkeep(self) -> None:
        if self._keeping is not None:
            (self.folder / "kept.json").unlink(missing_ok=True)
            self._keeping.release()
            self._keeping = None

    def kept(self) -> Kept | None:
        """What another living run keeps."""
        note = {} if self._keeping else _read(self.folder / "kept.json")
        if "due" not in note or _free(self.folder / "kept.lock"):
            return None
        return Kept(frozenset(map(str, note["cards"])), float(note["due"]))

    def _unlocked(self, uuid: str) -> bool:
        return _free(self.folder / f"{_name(uuid)}.lock")

    def _lock(self, uuid: str, ends: float) -> bool:
        lock = _lock(self.folder / f"{_name(uuid)}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return False
        self._held[uuid] = lock
        holder = str(_read(self._note(uuid)).get("run") or "")
        if holder and holder != self.run_id:
            # Its controller died with the lease in its hand: what it started may still be on the device.
            run_lock = _node(self.state) / "runs" / f"{holder}.lock"
            if run_lock.exists():
                _clear_if_dead(self.state, run_lock)
            else:
                _clear_run(self.state, holder)
        _write(self._note(uuid), {"run": self.run_id, "pid": os.getpid(), "ends": ends})
        self._before[uuid] = self._look(uuid)
        return True

    def _trouble(self, uuid: str) -> Trouble | None:
        """What is wrong with a device of ours now that its attempt has ended."""
        before, seen = self._before[uuid], self._look(uuid)
        if seen.problem:
            return Trouble("lost", seen.problem)
        for pid in sorted(self._ours(seen)):
            return Trouble("left", f"process {pid} of an ended attempt is still on it ({seen.size(pid)})")
        for pid in sorted(seen.users.keys() - before.users.keys()):
            return Trouble("stranger", f"process {pid} is on it ({seen.size(pid)})")
        more = seen.used_mb - before.used_mb
        return Trouble("left", f"{more} MiB of an ended attempt are still in use on it") if more > LEFT_MB else None

    def _let_go(self, uuid: str) -> None:
        self._before.pop(uuid, None)
        if not self._ours(self._look(uuid)):
            self._note(uuid).unlink(missing_ok=True)  # else the next holder learns from it whom to clear
        lock = self._held.pop(uuid, None)
        if lock is not None:
            lock.release()

    def _ours(self, seen: Seen) -> set[int]:
        """Processes of this run among those on the device."""
        users = set(seen.users)
        return users & {process.pid for process in processes.with_token(RUN_TOKEN, self.run_id)} if users else set()

    def _note(self, uuid: str) -> Path:
        return self.folder / f"{_name(uuid)}.json"


def _free(path: Path) -> bool:
    lock = _lock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    lock.release()
    return True


def _write(path: Path, note: Mapping[str, Any]) -> None:
    """Whole or not at all: others read it at any moment."""
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(note), encoding="utf-8")
    draft.replace(path)


def _read(path: Path) -> dict[str, Any]:
    """A note, or nothing where there is none (any more) or it is damaged."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _name(uuid: str) -> str:
    return re.sub(r"[^\w.-]", "_", uuid)
