"""Describe an error of a log: for grading, where it was raised, and a GPU's memory. Pure."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable, Mapping
from itertools import count, groupby, takewhile
from operator import itemgetter
from typing import Any

from repro_matrix.config.vocabulary import UPSTREAM
from repro_matrix.grading.observation import (
    NO_RECORD,
    Evidence,
    in_package,
    module_names,
    origin_of,
)
from repro_matrix.grading.tracebacks import Error
from repro_matrix.records.attempt import AttemptRecord as AttemptLeft
from repro_matrix.records.attempt import Exception_, Frame, Record
from repro_matrix.records.attempt import RankRecord as RankLeft
from repro_matrix.text import list_some

_ONLOOKER = re.compile(r"(^|/)repros/(kit/effects|repro_kit/instrumentation)\.py$")
# Bases of torch's own exceptions, which a log does not show. Those of Python are looked up.
_BASES = {
    "OutOfMemoryError": ["RuntimeError"],
    "FakeTensorDeviceMismatchError": ["RuntimeError"],
    "AcceleratorError": ["RuntimeError"],
    "DistError": ["RuntimeError"],
    "DistBackendError": ["DistError", "RuntimeError"],
    "DistNetworkError": ["DistError", "RuntimeError"],
    "DistStoreError": ["DistError", "RuntimeError"],
}


def as_attempt(errors: Iterable[Error]) -> Evidence:
    """Return an attempt in which each error is what a rank raised."""
    about: AttemptLeft = {
        "id": "log",
        "launcher": "",
        "command": [],
        "backend": "",
        "world_size": 1,
        "started": 0.0,
        "ended": 0.0,
        "wall_s": 0.0,
        "cpu_s": None,
        "deadline_s": 1.0,
        "timed_out": False,
        "interrupted": False,
        "leaked_processes": [],
        "seed": 0,
        "settings": {},
    }
    return Evidence(
        {
            "schema": 1,
            "attempt": about,
            "infra_error": None,
            "ranks": list(map(_as_rank, count(), errors)),
        }
    )


def _as_rank(index: int, error: Error) -> RankLeft:
    exception = completed(error.record) if error.record else None
    record: Record = {
        **NO_RECORD,
        "rank": index,
        "ended": float(error.line),
        "exception": exception,
    }
    return {
        "rank": index,
        "exit_code": None if error.signal else 1,
        "signal": error.signal or None,
        "terminated_by": "self",
        "record": record,
        "log_tail": "",
        "stack": error.stack or None,
    }


def completed(record: Mapping[str, Any]) -> Exception_:
    """Return an exception with the bases of its type, and without the kit's frames.

    Records do not contain the kit's frames either. A message of several lines is repeated as one
    line, because a terminal may have wrapped it.
    """
    kind = str(record["type"])
    module = str(record["module"])
    message = str(record["message"])
    if "\n" in message:
        message += "\n" + " ".join(message.split())
    python = getattr(builtins, kind, None)
    bases = _BASES.get(kind, [])
    if isinstance(python, type) and issubclass(python, BaseException):
        bases = [base.__name__ for base in python.__mro__[1:-1]]
    if bases and module and module.partition(".")[0] not in ("builtins", *UPSTREAM):
        # mylib.ValueError only has the name of Python's
        kind = f"{module}.{kind}"
        module = ""
        bases = []
    frames: list[Frame] = [
        frame for frame in record["frames"] if not _ONLOOKER.search(frame["file"])
    ]
    return {
        "type": kind,
        "module": module,
        "bases": bases,
        "message": message,
        "cause": None,
        "frames": frames,
    }


def with_installed_frames(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return an exception in which only installed files belong to a package."""
    frames = [
        (
            frame
            if frame["file"].startswith("<") or "/modules/transformers_modules/" in frame["file"]
            else {**frame, "code_location": origin_of(frame["file"], {})}
        )
        for frame in record["frames"]
    ]
    return {**record, "frames": frames}


def module_of(error: Error) -> str:
    """Return the module that raised an error, else its file."""
    names = module_names(error.places[-1]["file"])
    return names[0] if len(names) == 1 else str(error.places[-1]["file"])


def raised_by(error: Error, packages: Iterable[str]) -> bool:
    """Return whether code of these packages raised an error.

    Only the innermost frames of one installed package count, without those of Python; of mixed
    tracebacks any frame counts. An error without frames counts too.
    """
    files = [place["file"] for place in reversed(error.places)]
    files = [file for file in files if not (file.startswith("<frozen") or _package(file) is None)]
    if files and not error.mixed:
        package = _package(files[0])
        files = (
            list(takewhile(lambda file: _package(file) == package, files)) if package else files[:1]
        )
    names = [name for file in files for name in module_names(file)]
    return not files or any(in_package(name, package) for name in names for package in packages)


def where(error: Error) -> str:
    """Return what raised an error: module, function, file and line."""
    return _place_text(error.places[-1]) if error.places else ""


def _place_text(place: Mapping[str, Any]) -> str:
    names = module_names(place["file"])
    module = f"{names[0]}." if len(names) == 1 else ""
    line = f":{place['line']}" if place["line"] else ""
    return f"{module}{place['function']} ({place['file']}{line})"


def callers(error: Error) -> list[str]:
    """Return the calls that led to an error, without those of torch and Python.

    Of consecutive frames of the script, or of one package, only the last one.
    """
    found = [(_package(place["file"]), place) for place in error.places[:-1]]
    runs = groupby((each for each in found if each[0] not in ("torch", None)), itemgetter(0))
    return [_place_text(list(run)[-1][1]) for _, run in runs]


def _package(file: str) -> str | None:
    """Return the installed package of a file; "" of a script, None of Python itself."""
    names = module_names(file)
    installed = names[0].partition(".")[0] if "-packages/" in file.replace("\\", "/") else None
    return installed if len(names) == 1 and "/" in file else ""


_UNITS = {"bytes": 1 / 1024**3, "KiB": 1 / 1024**2, "MiB": 1 / 1024, "GiB": 1.0}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_MEMORY = {  # what torch writes of it, today and until torch 2.0
    "wanted": rf"Tried to allocate {_SIZE}",
    "free": rf"(?:which )?{_SIZE} (?:is )?free",
    "total": rf"capaci?ty of {_SIZE}|{_SIZE} total capacity",
    "held": rf"{_SIZE} (?:is|already) allocated",
    "process": rf"this process has {_SIZE} memory in use",
    "reserved": rf"{_SIZE} reserved in total",
    "unused": rf"{_SIZE} is reserved by PyTorch but unallocated",
}


_OTHER = rf"Process (\d+) has {_SIZE} memory in use"


def memory_of(message: str) -> str:
    """Describe an out-of-memory error of a GPU: the sizes that were requested and free.

    Also whether other processes or fragmentation are the cause.
    """
    found = {name: re.search(pattern, message) for name, pattern in _MEMORY.items()}
    sizes = {
        name: [each for each in match.groups() if each] for name, match in found.items() if match
    }
    gib = {name: float(number) * _UNITS[unit] for name, (number, unit) in sizes.items()}
    if not {"wanted", "free", "total", "held"} <= gib.keys():
        return ""
    unused = max(0.0, gib.get("unused", gib.get("reserved", 0.0) - gib["held"]))
    others = gib["total"] - gib["free"] - gib.get("process", gib["held"] + unused)
    text = (
        f"It wanted {gib['wanted']:.2f} GiB; {gib['free']:.2f} of {gib['total']:.2f} GiB were free"
    )
    if others > 0.2 * gib["total"]:
        named = [f"process {pid}: {size} {unit}" for pid, size, unit in re.findall(_OTHER, message)]
        which = f" ({list_some(named)})" if named else ""
        return (
            f"{text}. About {others:.1f} GiB belong to other processes{which}: end them, or use"
            " another GPU."
        )
    if unused + gib["free"] >= gib["wanted"]:
        text += f", {unused:.2f} reserved but unused: fragmentation"
        return f"{text}. Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
    return f"{text}, {unused:.2f} reserved but unused: no fragmentation."
