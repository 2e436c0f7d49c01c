"""An observation as the judges read it. Pure.

Its keys and their types are those of harness/cell: what is none was doubted where it came from (a record where
it arrives, a document where it is read). What ranks say in it is not trusted: ``number`` and the judges look at that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from repro_matrix.grading.checks import Judged, judged
from repro_matrix.grading.location import Place, dotted, is_own, lies_in, stack_places, within
from repro_matrix.records.observation import Observation, Settings
from repro_matrix.records.observation import Rank as RankLeft
from repro_matrix.records.rank import Exception_, Record


def text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def number(value: Any) -> float | None:
    """A finite number, or None; a bool is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond 1e308
        return None


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def items(value: Any) -> list[Mapping[str, Any]]:
    """The mappings in a list; anything else in it is dropped."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, (list, tuple)) else []


@dataclass(frozen=True)
class Raised:
    """An exception of a record."""

    type: str
    names: frozenset[str]  # the type, with and without its module, and its bases
    message: str
    places: tuple[Place, ...]  # outermost first

    @property
    def innermost(self) -> Place | None:
        """The innermost frame that lies somewhere: C code leaves no frame, generated code has no module."""
        return next((place for place in reversed(self.places) if place.named), None)


def raised_chain(exception: Exception_ | None) -> list[Raised]:
    """The raised exception, and what it wraps.

    What stands under ``cause`` may be anything that was being handled at the time, so it only counts as the failure
    when the one raised is a mere wrapper: when it repeats the other's message (a lazy import, a compiler, a pool).
    """
    chain: list[Raised] = []
    while exception is not None and len(chain) < 6:
        one = _raised(exception)
        if chain and (len(one.message.strip()) < 8 or one.message.strip() not in chain[-1].message):
            break
        chain.append(one)
        exception = exception["cause"]
    return chain


def _raised(data: Exception_) -> Raised:
    kind, module = data["type"], data.get("module", "")
    names = {kind, f"{module}.{kind}", *data.get("bases", ())}
    places = tuple(Place(f["module"], f["file"], f["function"], f.get("place"), f["line"]) for f in data["frames"])
    return Raised(kind, frozenset(names - {"", "."}), data["message"], places)


# What a rank that wrote no record has said.
NO_RECORD: Record = {
    "rank": -1, "phase": "", "done": False, "exception": None, "checks": [], "metrics": {}, "facts": {}, "warnings": [],
    "logs": [], "versions": {},
}  # fmt: skip


class Rank:
    """One rank of an attempt."""

    def __init__(self, data: RankLeft) -> None:
        self.rank = data["rank"]
        self.pid = data.get("pid")
        self.exit_code = data["exit_code"]
        self.signal = data["signal"] or ""
        self.ended_by = data["ended_by"]
        record = data["record"]
        self.foreign = _written_by_another(record, self.rank, self.pid) if record else ""
        self.doubt = data.get("doubt", "")  # why what it wrote is no record
        self.wrote = record is not None and not self.foreign
        self.record: Record = record if record is not None and self.wrote else NO_RECORD
        self.schema = 1 if self.record.get("schema", 1) == 1 else 2
        self.done = self.record["done"]
        self.log_tail = data["log_tail"]
        self.stack = data["stack"] or ""
        self.collectives = data.get("collectives") or {}  # what its witness answered last
        self.looks = data.get("looks")  # None: it was not looked at
        self.at = number(self.record.get("ended"))  # by the rank's own clock; None: it did not get that far

    @cached_property
    def chain(self) -> list[Raised]:
        return raised_chain(self.record["exception"])

    @property
    def raised(self) -> Raised | None:
        return self.chain[0] if self.chain else None

    @cached_property
    def checks(self) -> list[Judged]:
        """What the rank checked, judged. Of several of one name each is void, but for those that failed."""
        done_at = number(self.record.get("done_at"))
        found = [judged(check, self.schema, done_at) for check in self.record["checks"]]
        if self.schema == 1:
            return found
        count = Counter(one.name for one in found)
        return [
            replace(one, state="void", says=f"made {count[one.name]} times; {one.says}")
            if count[one.name] > 1 and not one.failed
            else one
            for one in found
        ]

    def asked(self, checks: list[str], settings: Settings) -> list[str]:
        """The checks that this rank owes: the case's; for a record of schema 1 those asked for when it was made."""
        return settings.get("proof", {}).get("checks", checks) if self.schema == 1 else checks

    @cached_property
    def notes(self) -> list[Note]:
        """Warnings and log records, each once."""
        seen: dict[Note, None] = {}
        for said in self.record["warnings"]:
            module = said.get("module", "")  # who called warnings.warn; ``file`` is whom it blames (stacklevel)
            seen[Note(said["category"], said["message"], said["file"], module, place=said.get("place"))] = None
        for log in self.record["logs"]:
            seen[Note(log["logger"], log["message"], log["file"], "", log["logger"], log.get("place"))] = None
        return list(seen)

    @cached_property
    def stuck(self) -> tuple[Place, ...]:
        return stack_places(self.stack, self.packages)

    @cached_property
    def packages(self) -> Mapping[str, str]:
        """Where the packages that this rank could import are installed; empty in older records."""
        return {name: root for name, root in self.record.get("packages", {}).items() if root}

    @cached_property
    def called(self) -> tuple[Place, ...]:
        """The frames of the calls whose collectives this rank waits in, by torch's flight recorder. On a GPU the host
        has gone on from there, to stand in a synchronize."""
        waiting = [item for item in items(self.collectives.get("collectives")) if item.get("waits") is True]
        frames = [frame for item in waiting for frame in item.get("frames") or () if isinstance(frame, (list, tuple))]
        known = self.packages
        places = [(text(frame[0]), text(frame[1])) for frame in frames if len(frame) == 2]
        return tuple(Place("", file, name, lies_in(file, known) if known else None) for file, name in places)


def _written_by_another(record: Record, rank: int, pid: int | None) -> str:
    """Why a record is not this rank's own; "" where it is. ``pid``: the process that was started as the rank."""
    if record["rank"] != rank:
        return f"its record says rank {record['rank']}"
    if pid is not None and record.get("pid") not in (pid, None):
        return f"its record was written by process {record.get('pid')}, the rank was process {pid}"
    return ""


class Note(NamedTuple):
    """A warning (``name``: its category) or a log record (``name``: its logger)."""

    name: str
    message: str
    file: str
    module: str
    logger: str = ""
    place: str | None = None  # where the code that spoke lies; None: an older record

    def comes_from(self, package: str) -> bool:
        """Whether it was the package that said so: by the place of the code that spoke (a logger's name is anybody's);
        in older records by the module, the file, or the logger's name.

        Never what the script itself says; but an upstream warning that blames its caller's line, the script's, counts.
        """
        if self.place is not None:
            return within(self.place, package)
        if is_own(self.module, "" if self.module else self.file):
            return False
        modules = dotted(self.file) if self.file and not self.file.startswith("<") else ()
        return any(within(name, package) for name in (*modules, self.module, self.logger))


class Attempt:
    """An observation, read once."""

    def __init__(self, observation: Observation) -> None:
        attempt = observation["attempt"]
        self.backend = attempt["backend"]
        self.timed_out = attempt["timed_out"]
        self.interrupted = attempt["interrupted"]
        self.started = number(attempt["started"])
        self.deadline = number(attempt["deadline_s"])
        self.hang = attempt.get("hang")  # how the launcher found the hang; an older one did not say
        self.settings = attempt["settings"]
        self.strategy = self.settings.get("strategy", {}).get("slug", "")
        self.planned = attempt.get("versions", {})  # the releases that it was planned with
        # Made by an engine of today: its strategy's settings hold promises.
        self.recent = "versions" in attempt or "fingerprint" in attempt
        self.accelerator = self.settings.get("device", "")
        self.infra = observation["infra"]
        self.ranks = sorted((Rank(each) for each in observation["ranks"]), key=lambda rank: rank.rank)
        self.world_size = attempt["world_size"]
        self.missing = sorted(set(range(min(self.world_size, 4096))) - {rank.rank for rank in self.ranks})
