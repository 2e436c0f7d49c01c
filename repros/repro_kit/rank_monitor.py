"""Report the progress of a running rank to its launcher: its phase, and the collectives that it has entered.

The launcher asks through a pipe (records/ask-N, a FIFO), and a thread of the rank answers in
records/collectives-N.json: the main thread may be stuck inside a collective, which releases the GIL while it waits. The
stack's own torch makes the answer, because older releases keep the flight recorder as a pickle, which only its own
process should load. Standard library only, Python 3.9; this module looks torch up and never imports it.

On a GPU a rank may wait for its device with the GIL held (torch.save of a CUDA tensor), so that no thread of it
answers. torch's own server does, on a socket (records/recorder-N): it is C++ and needs no GIL. The recorder's pipe
(TORCH_NCCL_DEBUG_INFO_PIPE_FILE) is no help: its dump has Python frames, for which torch takes the GIL.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Release = tuple[int, ...]

FRAMES_TOO = b"f"  # also asks for the frames of calls, for which torch may import modules for seconds
KEPT = 16  # completed collectives that are reported, the newest ones
FRAMES = 40  # frames of the call of a waiting collective, innermost first
RECORDED = "2000"  # collectives that torch remembers per rank (the value of its tutorial)
MARGIN_S = 120.0  # seconds by which NCCL's own time limits exceed the launcher's, so that the launcher detects the hang

# Variables of torch's NCCL process groups: (name, first release, first release without it, value).
# ``limit`` is the launcher's limit plus MARGIN_S in seconds, ``file`` a prefix in the records folder.
# Sources: ProcessGroupNCCL.hpp and FlightRecorder.hpp. The wheel of torch 2.7.1 has no TORCH_FR_* names; those of 2.8.0
# and 2.9.0 prefer them (pytorch#152563), and warn of the older ones.
NCCL_SETTINGS: list[tuple[str, Release, Release, str]] = [
    ("TORCH_NCCL_TRACE_BUFFER_SIZE", (2, 2), (2, 8), RECORDED),
    ("TORCH_FR_BUFFER_SIZE", (2, 8), (99,), RECORDED),
    ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", (2, 2), (2, 8), "file"),
    ("TORCH_FR_DUMP_TEMP_FILE", (2, 8), (99,), "file"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", (2, 2), (99,), "1"),
    # End the process on an error or timeout of a collective without aborting the communicator first: the abort can
    # hang, and comes before the dump (pytorch#121055). This is torch's default; torchrun sets 1.
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", (2, 2), (99,), "3"),
    ("TORCH_NCCL_ENABLE_MONITORING", (2, 2), (99,), "1"),
    ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", (2, 2), (99,), "limit"),
]
OURS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING"}  # set although torchrun sets it, too


def nccl_environment(release: Release, limit_s: float, records: Path) -> dict[str, str]:
    """Return the variables of NCCL process groups that this torch release knows. ``limit_s``: the launcher's own
    limit."""
    values = {"limit": str(int(limit_s + MARGIN_S)), "file": f"{records}/nccl-"}
    return {name: values.get(value, value) for name, since, until, value in NCCL_SETTINGS if since <= release < until}


class Witness:
    """The rank's side of the monitor. ``start`` opens the pipe before anything can hang; the thread ends with the
    process."""

    def __init__(self, records: Path, rank: int) -> None:
        self.pipe = records / f"ask-{rank}"
        self.answer_file = records / f"collectives-{rank}.json"
        self.phases = os.open(records / f"phases-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def phase(self, name: str) -> None:
        """Append the phase to an open file in one write; the launcher reads the last line."""
        os.write(self.phases, f"{time.time():.3f} {name}\n".encode())

    def start(self) -> None:
        try:
            os.mkfifo(self.pipe, 0o600)
            asked = os.open(self.pipe, os.O_RDWR)  # opened for writing, too, so that reading never ends
        except OSError:
            return  # a file system without pipes: the launcher uses the backtraces
        threading.Thread(target=self._serve, args=(asked,), name="kit-witness", daemon=True).start()

    def start_server(self) -> None:
        """Start torch's control-plane server (torch 2.4 and later), which answers while the GIL is held."""
        server = getattr(sys.modules.get("torch._C._distributed_c10d"), "_WorkerServer", None)
        if server is not None:
            # A socket's path may have 107 characters, and this folder's may be longer.
            folder = os.open(self.pipe.parent, os.O_RDONLY)
            self.server = server(f"/proc/self/fd/{folder}/recorder-{self.pipe.name.rpartition('-')[2]}")

    def _serve(self, asked: int) -> None:
        while True:
            question = os.read(asked, 512)
            try:
                answer = collectives(with_frames=FRAMES_TOO in question)
            except Exception as error:  # monitoring never makes a rank fail
                answer = {"error": f"{type(error).__name__}: {error}"}
            temporary = f"{self.answer_file}.tmp"
            with open(temporary, "w", encoding="utf-8") as out:
                json.dump({"at": time.time(), **answer}, out, default=str)
            os.replace(temporary, self.answer_file)


def collectives(with_frames: bool = False) -> Json:
    """Return this rank's process groups, and the collectives that it has entered and that torch remembers."""
    return summarize(recorded(with_frames))


def summarize(dump: Json | None) -> Json:
    """Return the process groups and collectives of a flight recorder's dump; None: it has none."""
    if dump is None:
        return {"groups": {}, "collectives": None, "complete": False}
    entries = dump["entries"]
    complete = entries[0].get("record_id", entries[0].get("id")) == 0  # nothing was overwritten
    return {"groups": groups(dump.get("pg_config") or {}), "collectives": trimmed(entries), "complete": complete}


def recorded(with_frames: bool) -> Json | None:
    """Return the flight recorder's dump; None where torch has none, or it is switched off or empty.

    A CUDA build has two recorders: NCCL's, whose dump contains more, and the one that gloo writes to.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")
    for name in ("nccl", "fr"):
        as_json = getattr(c10d, f"_dump_{name}_trace_json", None)
        as_pickle = getattr(c10d, f"_dump_{name}_trace", None)
        found = as_json or as_pickle
        dump = parse_dump(found()) if found else None
        if dump is None:
            continue
        if as_json and as_pickle and with_frames:  # only the pickle contains frames
            active = parse_dump(as_pickle(onlyActive=True)) or {"entries": []}
            frames = {entry.get("record_id"): entry.get("frames") for entry in active["entries"]}
            for entry in dump["entries"]:
                entry["frames"] = frames.get(entry.get("record_id"))
        return dump
    return None


def parse_dump(dump: Any) -> Json | None:
    """Return a dump as a dictionary; None for one without entries."""
    if isinstance(dump, bytes) and dump[:1] != b"{":
        dump = pickle.loads(dump)  # made by this process a moment ago
    elif isinstance(dump, (bytes, str)):
        dump = json.loads(dump)
    if isinstance(dump, list):  # torch 2.2: only the entries
        dump = {"entries": dump}
    return dump if isinstance(dump, dict) and dump.get("entries") else None


def groups(config: Json) -> dict[str, list[int]]:
    """Return process group -> global ranks, from torch.distributed or else from the dump."""
    found = {name: sorted(json.loads(str(each["ranks"]))) for name, each in config.items() if name and "ranks" in each}
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    for group, ranks in dict(getattr(world, "pg_group_ranks", None) or {}).items():
        name = dict(world.pg_names).get(group)
        if name is not None:
            found[str(name)] = sorted(int(rank) for rank in ranks)
    return found


def trimmed(entries: list[Json]) -> list[Json]:
    """Return the newest entries, the last one of each group, and all that still wait."""
    last = {_group(entry): index for index, entry in enumerate(entries)}
    keep = set(last.values()) | set(range(max(0, len(entries) - KEPT), len(entries)))
    return [_entry(entry) for index, entry in enumerate(entries) if index in keep or waits(entry)]


def waits(entry: Json) -> bool:
    return not entry.get("retired") and entry.get("state") != "completed"


def _group(entry: Json) -> str:
    return str((entry.get("process_group") or [entry.get("pg_id", "")])[0])


def _entry(entry: Json) -> Json:
    p2p = bool(entry.get("is_p2p"))
    frames = [[str(each.get("filename")), str(each.get("name"))] for each in entry.get("frames") or []]
    return {
        "group": _group(entry),
        "sequence": entry.get("p2p_seq_id" if p2p else "collective_seq_id", entry.get("seq_id")),
        "op": str(entry.get("profiling_name", "")).rpartition(":")[2],
        "p2p": p2p,
        "sizes": [entry.get("input_sizes"), entry.get("output_sizes")],
        "state": entry.get("state"),
        "waits": waits(entry),
        "frames": frames[:FRAMES] if waits(entry) else [],
    }
