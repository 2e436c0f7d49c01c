"""Read the lines of a log: plain text or gzip, and records of JSON with one record a line."""

from __future__ import annotations

import gzip
import io
import json
import re
import shlex
import sys
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from repro_matrix.errors import ReproError
from repro_matrix.grading.log_labels import HEADER

MAX_LINE = 1 << 16  # characters of a line that are read
MAX_RECORD = 1 << 24  # characters of a JSON record
# Control characters that no log contains. Zeros are not among them: a full disk leaves zeros.
_CONTROL = re.compile(rb"[\x01-\x07\x0e-\x1a\x1c-\x1f]")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_JSON = re.compile(r'[\s,\[]*(?P<record>\{\s*"[^"\n]{1,80}"\s*:)')
# The keys under which collectors of logs store what a program printed.
_PRINTED = re.compile(
    r"(?i)(?:\w+[._])?(?:message|msg|log|text|line|event|stack(?:_?trace)?|exc(?:_info)?|exception"
    r"|error|traceback)"
)
_ERROR = re.compile(r"Error\b|Exception\b|Traceback")
_PACKED_LINES = re.compile(rf'(?:{re.escape(HEADER)}|File \\*").*(?:File \\*"|\\n)')
_GLUED = re.compile(r"(?<=\.)(?=(?:\[rank\d+\]:)?\[E[\d ])")  # two ranks wrote one line
_DECODER = json.JSONDecoder(strict=False)
_BROKEN = "a record of JSON is cut or spans several lines. Write one record a line: jq -c ."
_PACKED = "a traceback is on one line. Put each of its lines on a line of its own."


class CutLine(str):
    """Hold the beginning of a line that is longer than ``MAX_LINE``."""


class LogError(ReproError):
    """Report a log that cannot be read."""


def read_lines(path: str) -> Iterator[str]:
    """Yield the lines of a log; ``-`` is the standard input.

    A carriage return alone (a progress bar) ends a line too. Of a long line only the beginning is
    read, as a ``CutLine``. Raises LogError.
    """
    number = 0
    if path == "-" and sys.stdin is None:
        raise LogError("the standard input is closed: name a file, or pipe a log into the command")
    try:
        with open(path, "rb") if path != "-" else nullcontext(sys.stdin.buffer) as file:
            for text in _decoded(file, path):
                number += 1
                yield text
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise LogError(
            f"{path}: the gzip file is damaged after line {number}: {error}. Unpack what is left:"
            f" gzip -dc {path} > part.log"
        ) from None
    except OSError as error:
        raise LogError(f"{path} cannot be read: {error.strerror or error}") from None


def _decoded(raw: Any, path: str) -> Iterator[str]:
    file: Any = io.BufferedReader(raw)
    if file.peek(2).startswith(b"\x1f\x8b"):
        file = gzip.GzipFile(fileobj=file)
    head = file.peek(4096)
    if head.startswith(_UTF16):
        command = shlex.join(["iconv", "-f", "UTF-16", "-t", "UTF-8", path])
        raise LogError(f"{path}: the text is UTF-16. Convert it first: {command} > converted.log")
    if b"\0" in head and len(_CONTROL.findall(head)) > len(head) / 100:
        raise LogError(f"{path}: the file is binary. Unpack it first.")
    text = io.TextIOWrapper(file, "utf-8-sig", errors="replace", newline=None)
    begins = True
    while part := text.readline(MAX_LINE + 1):
        if begins and not part.endswith("\n") and _JSON.match(part):
            part += text.readline(MAX_RECORD)
            if len(part) > MAX_RECORD:
                raise LogError(f"{path}: a line of JSON is too long. Write a record a line: jq -c")
        elif len(part) > MAX_LINE and not part.endswith("\n"):
            part = CutLine(part[:-1])
        if begins:
            yield type(part)(part.replace("\0", ""))
        begins = part.endswith("\n")


def unpack(raw: str) -> tuple[list[str], str]:
    """Return the lines that a line of a log contains, and why an error in it cannot be read.

    A record of JSON contains the strings that a program printed, and its other fields as one line;
    another line contains itself.
    """
    lines: list[str] = []
    end = 0
    while found := _JSON.match(raw, end):
        begin = found.start("record")
        try:
            record, end = _DECODER.raw_decode(raw, begin)
        except ValueError:
            return [*lines, raw[begin:]], _BROKEN if _ERROR.search(raw, begin) else ""
        lines += [
            CutLine(line[:MAX_LINE]) if len(line) > MAX_LINE else line for line in _texts(record)
        ]
    if lines:
        lines.append(raw[end:])
    else:
        lines = _GLUED.split(raw) if raw.count("[E") > 1 else [raw]
    packed = (_PACKED_LINES.search(line) for line in lines if line[:1] != "{")
    return lines, _PACKED if any(packed) else ""


def _texts(record: dict[str, Any]) -> Iterator[str]:
    fields = {}
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _texts(value)
        elif isinstance(value, str) and _PRINTED.fullmatch(key):
            yield from filter(None, value.split("\n"))
        else:
            fields[key] = value
    if fields:
        yield json.dumps(fields)
