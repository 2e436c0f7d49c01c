"""Read a log as blocks of whole lines, in constant memory: plain or gzip, UTF-8 or UTF-16, with progress bars."""

from __future__ import annotations

import codecs
import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from repro_matrix.errors import ReproError

BLOCK = 1 << 20  # bytes that are read at a time
LINE = 1 << 16  # bytes of one line that are kept
_OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


class LogError(ReproError):
    """A log that cannot be read as one."""


def blocks(path: str) -> Iterator[bytes]:
    """UTF-8 in blocks that end with the end of a line; ``-`` is the standard input. Raises LogError."""
    try:
        if path == "-":
            yield from _lines(_decoded(sys.stdin.buffer, path))
        elif Path(path).is_dir():
            raise LogError(f"{path}: a folder, not a log. Name the files in it.")
        else:
            with open(path, "rb") as file:
                yield from _lines(_decoded(file, path))
    except FileNotFoundError:
        raise LogError(f"{path}: there is no such file") from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise LogError(f"{path}: damaged gzip: {error}") from None
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror or error}") from None


def _decoded(raw: Any, path: str) -> Iterator[bytes]:
    """The log's bytes as UTF-8."""
    file: Any = io.BufferedReader(raw, BLOCK)
    head = file.peek(4096)[:4096]
    if head.startswith(b"\x1f\x8b"):
        file = io.BufferedReader(gzip.GzipFile(fileobj=file), BLOCK)
        head = file.peek(4096)[:4096]
    for mark, name in _OTHERS.items():
        if head.startswith(mark):
            raise LogError(f"{path}: {name}-compressed. Unpack it into the standard input: `repro match -`.")
    encoding = _encoding(head, path)
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    while block := file.read(BLOCK):
        yield block if encoding == "utf-8" else decoder.decode(block).encode("utf-8")


def _encoding(head: bytes, path: str) -> str:
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    if head.count(0) * 3 > len(head):  # UTF-16 without its mark: every other byte of English text is zero
        even, odd = head[::2].count(0), head[1::2].count(0)
        if max(even, odd) > 10 * (min(even, odd) + 1) or len(head) < 40:
            return "utf-16-be" if even > odd else "utf-16-le"
    control = sum(byte < 9 or 13 < byte < 27 or 27 < byte < 32 for byte in head)
    if control * 20 > len(head):
        raise LogError(f"{path}: binary, not the text of a log")
    return "utf-8"


def _lines(parts: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes, cut at line ends. A carriage return alone (a progress bar) ends a line as well. Of a line longer
    than LINE only the beginning is kept."""
    left, dropping = b"", False
    for part in parts:
        block = part.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in part else part
        if dropping:
            end = block.find(b"\n")
            if end < 0:
                continue
            block, dropping = block[end:], False
        whole, newline, left = (left + block).rpartition(b"\n")
        if newline:
            yield whole + newline
        if len(left) > LINE:
            left, dropping = left[:LINE], True
    if left:
        yield left + b"\n"
