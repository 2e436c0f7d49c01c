"""Which of the machine's cards this run may use now, and why not the others.

A card is *out* for the rest of the run when it fails (Xid, ECC, NVML has lost it) or an ended attempt does not leave
it. It is *taken* for as long as a process is on it that is nobody's of ours: somebody else's work is neither disturbed
nor measured beside. What another run of this project holds is neither: it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from repro_matrix.environment.gpus import Gpu, Seen, stranger
from repro_matrix.runner.gpu_locks import Trouble
from repro_matrix.runner.scheduler import Node

LOOK_S = 1.0  # between two looks at the free cards


class Driver(Protocol):
    """nvml.Nvml, or a pretended one."""

    def look(self, uuid: str) -> Seen: ...
    def broken(self) -> dict[str, str]: ...


class Cards:
    def __init__(
        self, gpus: Sequence[Gpu], node: Node, driver: Driver, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self.all = [gpu.uuid for gpu in gpus]
        self.names = {gpu.uuid: f"gpu{gpu.index}" for gpu in gpus}
        self.out: dict[str, Trouble] = {}
        self.taken: dict[str, str] = {}
        self.notes: list[str] = []  # whatever the summary says of cards
        self._node = node
        self._driver = driver
        self._say = say
        self._looked = float("-inf")
        self._known: set[str] = set()  # free at the last look

    def usable(self) -> list[str]:
        """Those that this run can have, sooner or later."""
        return [uuid for uuid in self.all if uuid not in self.out and uuid not in self.taken]

    def whole(self) -> int:
        """How many are not out for good."""
        return len(self.all) - len(self.out)

    def ready(self, held: Collection[str]) -> list[str]:
        """Those that an attempt can be started on now. ``held``: by this run's own attempts."""
        return self._node.available([uuid for uuid in self.usable() if uuid not in held])

    def look(self, held: Collection[str], now: float) -> set[str]:
        """See what has changed, once in a while; returns cards that have just failed, ``held`` ones too."""
        free = [uuid for uuid in self.all if uuid not in held and uuid not in self.out]
        due = now - self._looked >= LOOK_S
        fresh = free if due else [uuid for uuid in free if uuid not in self._known]  # just given back
        self._known = set(free)
        if not due and not fresh:
            return set()
        self._looked = now if due else self._looked
        failed = {uuid: why for uuid, why in self._driver.broken().items() if uuid in self.names}
        for uuid in self._node.available(fresh):
            seen = self._driver.look(uuid)
            if seen.problem:
                failed.setdefault(uuid, seen.problem)
            self._strangers(uuid, stranger(seen))
        new = failed.keys() - self.out.keys()
        self.lose({uuid: Trouble("lost", failed[uuid]) for uuid in new})
        return set(new)

    def lose(self, troubles: Mapping[str, Trouble]) -> None:
        """These cards are out from now on."""
        for uuid, trouble in troubles.items():
            if uuid not in self.out:
                self.out[uuid] = trouble
                self.taken.pop(uuid, None)
                self._note(f"{self.names[uuid]} ({uuid}) is not used any more: {trouble.why}")

    def _strangers(self, uuid: str, who: str | None) -> None:
        before = self.taken.get(uuid)
        if who is None:
            self.taken.pop(uuid, None)
            if before:
                self._say(f"{self.names[uuid]} is free again")
            return
        self.taken[uuid] = who
        if before is None:
            self._note(f"{self.names[uuid]} ({uuid}) is left out while it is in use: {who}")

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._say(text)

    def blame(self, width: int) -> str:
        """Why there are not ``width`` cards, in words."""
        why = [f"{self.names[uuid]}: {trouble.why}" for uuid, trouble in self.out.items()]
        why += [f"{self.names[uuid]} is in use: {who}" for uuid, who in self.taken.items()]
        return f"needs {width} GPU{'s' if width > 1 else ''}; {len(self.usable())} can be used ({'; '.join(why)})"
