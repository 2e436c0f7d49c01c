"""Read what an attempt wrote (logs, records, launch.json), and cut a log that grows too long."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from repro_matrix.records import validate
from repro_matrix.records.rank import Record

MAX_LOG = 64 << 20  # bytes; a rank that prints without limit must not fill the disk
KEPT_TAIL = 64 << 10
CUT = b"\n[log cut here: the rank printed more than 64 MiB]\n"
TAIL_LINES, TAIL_BYTES = 60, 8192
_CONTROL = re.compile(r"[^\x20-\x7e\n\t\x85\xa0-\U0010ffff]")  # characters that break a terminal or an XML report


def cut(path: Path, limit: int = MAX_LOG) -> None:
    """Cut a log that has grown too long down to its tail. The ranks append, so that they go on at its new end."""
    try:
        if path.stat().st_size > limit:
            with open(path, "rb") as log:
                log.seek(-KEPT_TAIL, os.SEEK_END)
                end = log.read()
            os.truncate(path, 0)
            with open(path, "ab") as log:
                log.write(CUT + end)
    except OSError:
        pass


def tail(path: Path, lines: int = TAIL_LINES, size: int = TAIL_BYTES) -> str:
    """Return the last lines of a log as clean text, whatever it contains and however long it is."""
    try:
        with open(path, "rb") as source:
            source.seek(max(0, source.seek(0, 2) - size))
            data = source.read(size)
    except OSError:
        return ""
    text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", data.decode("utf-8", errors="replace").replace("\r\n", "\n"))
    return "\n".join(text.split("\n")[-lines - 1 :]).rstrip("\n")


def read_launch(path: Path) -> dict[str, Any]:
    """Return launch.json, or an empty answer where it is missing or damaged."""
    try:
        answer = json.loads(path.read_text(encoding="utf-8"))
        answer["ranks"] = [entry for entry in answer["ranks"] if isinstance(entry["rank"], int)]
        return dict(answer)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {"ranks": []}


def read_record(path: Path) -> tuple[Record | None, str]:
    """Return a rank's record, and the validation error of one that is invalid: graders rely on its type.

    A missing or damaged file is no record.
    """
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None, ""
    if not (isinstance(data, dict) and "done" in data and "exception" in data):
        return None, ""
    try:
        return validate.record(data), ""
    except ValueError as error:
        return None, str(error)
