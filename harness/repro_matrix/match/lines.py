"""Read the lines of a log: plain or compressed, in any encoding, inside of JSON, or several on one
line."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from repro_matrix.errors import ReproError
from repro_matrix.grading.tracebacks import CHAINED, HEADER, Line
from repro_matrix.text import log

_CONTROL = re.compile(
    rb"[\x01-\x07\x0e-\x1a\x1c-\x1f]"
)  # bytes that no log has, unlike the zeros of a damaged one
MAX_LINE = 1 << 16  # characters of one line that are read


class LogError(ReproError):
    """A log that cannot be read as one."""


def read_lines(path: str, damaged: list[str] | None = None) -> Iterator[str]:
    """Yield the lines of a log, plain or gzip, UTF-8 or UTF-16; ``-`` is the standard input. Of a
    damaged gzip file those before the damage; ``damaged`` gets its path then. Raises LogError:
    there is none."""
    number = 0
    try:
        with open(path, "rb") if path != "-" else nullcontext(sys.stdin.buffer) as file:
            for text in _lines(file, path):
                number += 1
                yield text
    except (OSError, EOFError, zlib.error) as error:  # gzip.BadGzipFile is an OSError
        reason = getattr(error, "strerror", None) or error
        if not number:
            raise LogError(f"{path} cannot be read: {reason}") from None
        if damaged is not None:
            damaged.append(path)
        log(f"{path}: what follows line {number} cannot be read: {reason}")


def _lines(raw: Any, path: str) -> Iterator[str]:
    """A carriage return alone (a progress bar) ends a line as well. Of a long line only the
    beginning is kept, of one that is JSON the lines of its strings."""
    file: Any = io.BufferedReader(raw)
    if file.peek(2).startswith(b"\x1f\x8b"):
        file = _Gzip(fileobj=file)
    head = file.peek(4096)
    encoding = (
        "utf-16" if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    )
    if encoding != "utf-16" and b"\0" in head and len(_CONTROL.findall(head)) > len(head) / 100:
        raise LogError(f"{path}: binary, not the text of a log. Unpack it first.")
    text = io.TextIOWrapper(file, encoding, errors="replace", newline=None)
    rest, begins, long_json = "", True, False
    while part := text.readline(MAX_LINE):
        ends = part.endswith("\n")
        long_json = not ends and bool(_JSON.match(part)) if begins else long_json
        if long_json:
            rest += part
            cut = max((rest.rfind(end) + 2 for end in ("\\n", "},") if end in rest), default=0)
            cut = len(rest) if ends or len(rest) > 2 * MAX_LINE else cut
            yield from _strings(rest[:cut])
            rest = rest[cut:]
        elif begins:
            yield part.replace("\0", "")
        begins = ends
    yield from _strings(rest)
    if damage := getattr(file, "damage", None):
        raise damage


class _Gzip(gzip.GzipFile):
    """A file that ends where it is damaged: an exception would discard the text that has been read
    and not returned."""

    damage: Exception | None = None

    def read1(self, size: int = -1) -> bytes:
        try:
            return super().read1(size)
        except (OSError, EOFError, zlib.error) as error:
            self.damage = error
            return b""


# Records of JSON, as collectors of logs write them: the ends of a record's parts, and the keys of
# what a program printed. Each begins with a character that is searched for fast.
_JSON = re.compile(r'\s*(?:\[\s*)?\{\s*"[^"\n]{1,80}"\s*:')
_PART = re.compile(r'"(?<!\\"),\s*(?="[^"\s]{1,80}"\s*:)')
_RECORD = re.compile(r"\},\s*(?=\{)")
_FIELD = re.compile(r'[\s\[{,]*"[^"\s]{1,80}"\s*:')
_PRINTED = re.compile(
    r'"(?<![^\s\[{,]")'
    r"(?i:(?:\w+[._])?(?:message|msg|log|text|line|event|stack(?:_?trace)?|exc(?:_info)?|exception"
    r'|error|traceback))"\s*:\s*"'
)
_ENDS = re.compile(r'"(?<!\\")[\s\]}]*\Z')
_NEWLINE = re.compile(r"\\+n")


def _strings(text: str) -> Iterator[str]:
    """Yield the lines of the strings in a text of JSON, which may be cut anywhere. A field that is
    no output of a program stays as it is."""
    for part in (part for record in _RECORD.split(text) for part in _PART.split(record)):
        printed = _PRINTED.search(part)
        fields = part[: printed.start()] if printed else part
        if named := _FIELD.match(fields):
            yield "{" + fields.lstrip("{")
        if named and not printed:
            continue
        inner = _ENDS.sub("", part[printed.end() if printed else 0 :])
        try:
            inner = str(json.loads(f'"{inner}"', strict=False))
        except ValueError:
            inner = inner.replace('\\"', '"')
        yield from filter(None, _NEWLINE.sub("\n", inner).split("\n"))


# The lines of a printed string, or list of strings, with a traceback.
_BREAK = re.compile(r"""\\n(?:["'], *["'])?""")
_GLUED = re.compile(r"(?<=\.)(?=(?:\[rank\d+\]:)?\[E[\d ])")  # two ranks wrote one line
_ELEMENT = re.compile(r"""^\s*\[?(?P<quote>["'])(?P<text>.*?)(?:\\n)?(?:(?P=quote)[,\]]*)?$""")


def unescaped(raw: str) -> list[str]:
    """Return a line; of JSON the lines of its strings, and of a printed list or string with a
    traceback its lines."""
    text = raw.strip()
    if _JSON.match(text):
        return list(_strings(text))
    if "\\n" in raw and (HEADER in raw or '  File "' in raw.replace("\\", "")):
        parts = _BREAK.split(text.replace('\\"', '"'))
        return [element["text"] if (element := _ELEMENT.match(part)) else part for part in parts]
    element = _ELEMENT.match(text) if text[:1] in "['\"" and text[-1:] in ",]" else None
    if element:
        return [element["text"]]
    return _GLUED.split(raw) if raw.count("[E") > 1 else [raw]


# A traceback on one line: its frames, and the beginning of its error. A second rank's may follow
# without a space.
_FRAMES = re.compile(r'\s*(File "[^"]+", line \d+(?:, in (?:<\w+>|[\w.]+))?)\s*')
_HEADINGS = re.compile(rf"\s*({re.escape(HEADER)}:?|{'|'.join(CHAINED)})")
_ERRORS = re.compile(
    r"(?m)^(    .*?)((?:[a-z_]\w{0,40}\.){0,6}[A-Z]\w{0,60}?(?:Error|Exception): )(.*?)(?:\2.*)?$"
)


def separated(line: Line) -> list[Line]:
    """Return the lines of a traceback that stands on one line, or of those of several ranks; of
    another line itself."""
    text = line.text
    if text == f"{HEADER}:" or (HEADER not in text and text.count('", line ') < 2):
        return [line]
    text = _HEADINGS.sub(r"\n\1", _FRAMES.sub(r"\n  \1\n    ", text))
    texts = _ERRORS.sub(r"\1\n\2\3", text).split("\n")
    return [replace(line, text=text) for text in texts if text.strip()]
