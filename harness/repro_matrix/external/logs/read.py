"""A log as blocks of whole lines: gzip, UTF-16 and progress bars included, in constant memory."""

from __future__ import annotations

import codecs
import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from repro_matrix.errors import ReproError

BLOCK = 1 << 20  # bytes that are read at a time
LINE = 1 << 16  # bytes of one line that are kept
_GZIP = b"\x1f\x8b"
_OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


class LogError(ReproError):
    """A log that cannot be read as one. Names the file, and what to do."""


def blocks(path: str) -> Iterator[bytes]:
    """UTF-8 in blocks that end with a line's end; ``-`` is the standard input. Raises LogError."""
    try:
        if path == "-":
            yield from _lines(_plain(sys.stdin.buffer, path), path)
            return
        if Path(path).is_dir():
            found = sorted(p.name for p in Path(path).iterdir() if p.is_file())
            hint = f"; it holds {', '.join(found[:4])}" if found else ""
            raise LogError(f"{path}: a folder, not a log: name the files in it{hint}")
        with open(path, "rb") as file:
            yield from _lines(_plain(file, path), path)
    except FileNotFoundError:
        raise LogError(f"{path}: there is no such file") from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise LogError(f"{path}: damaged gzip: {error}") from None
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror or error}") from None


def _plain(file: BinaryIO, path: str) -> Iterator[bytes]:
    """UTF-8 as it comes."""
    buffered = io.BufferedReader(file, BLOCK) if isinstance(file, io.RawIOBase) else file
    head = buffered.read(4096)
    if head.startswith(_GZIP):
        with gzip.GzipFile(fileobj=_Again(head, buffered)) as inner:
            yield from _decoded(inner.read(4096), inner, path)
        return
    for mark, name in _OTHERS.items():
        if head.startswith(mark):
            raise LogError(f"{path}: {name}-compressed: unpack it, and give it on the standard input (`repro match -`)")
    yield from _decoded(head, buffered, path)


def _decoded(head: bytes, file: BinaryIO | gzip.GzipFile, path: str) -> Iterator[bytes]:
    encoding = _encoding(head, path)
    if encoding == "utf-8":
        yield head.removeprefix(codecs.BOM_UTF8)
        while block := file.read(BLOCK):
            yield block
        return
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    block = head.removeprefix(codecs.BOM_UTF16_LE).removeprefix(codecs.BOM_UTF16_BE)
    while block:
        yield decoder.decode(block).encode("utf-8")
        block = file.read(BLOCK)


def _encoding(head: bytes, path: str) -> str:
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    zeros = head.count(0)
    if zeros * 3 > len(head):  # text in UTF-16 without its mark: every other byte of English is zero
        even, odd = head[::2].count(0), head[1::2].count(0)
        if max(even, odd) > 10 * (min(even, odd) + 1) or len(head) < 40:
            return "utf-16-be" if even > odd else "utf-16-le"
    odd_ones = sum(byte < 9 or 13 < byte < 27 or 27 < byte < 32 for byte in head)
    if odd_ones * 20 > len(head):
        raise LogError(f"{path}: binary, not the text of a log")
    return "utf-8"


def _lines(parts: Iterator[bytes], path: str) -> Iterator[bytes]:
    """The same bytes, cut at line ends. A carriage return alone (a progress bar) ends a line as well; of a line that
    never ends only its beginning is kept."""
    left, dropping = b"", False
    for part in parts:
        block = part.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in part else part
        if dropping:
            end = block.find(b"\n")
            if end < 0:
                continue
            block, dropping = block[end:], False
        whole, newline, rest = (left + block).rpartition(b"\n")
        if newline:
            yield whole + newline
        left = rest
        if len(left) > LINE:
            left, dropping = left[:LINE], True
    if left:
        yield left + b"\n"


class _Again(io.RawIOBase):
    """What was read already, and then the rest."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if not self._head:
            return self._rest.read(size)
        cut = len(self._head) if size < 0 else size
        found, self._head = self._head[:cut], self._head[cut:]
        return found
