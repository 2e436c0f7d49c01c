"""A traceback that is only there as text (in a log, in the message of an error of another process) as a record's
exception. Pure."""

from __future__ import annotations

import re

from repro_matrix.external.logs.lines import ANSI
from repro_matrix.records.rank import Exception_, Frame

_PREFIX = re.compile(r"^(?:\[?(?:rank|default)?\s*\d+\]?:\s?)+")  # torchrun's [rank0]: and [default0]:
_BEGIN = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')
_INSTALLED = re.compile(r"/(?:(?:site|dist)-packages|lib(?:64)?/python3[\d.]*)/")
_RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")


def tracebacks(text: str) -> list[Exception_]:
    """Every whole traceback, in the order of the text, in the shape of repro_kit/record.py's ``describe_exception``."""
    lines = [_PREFIX.sub("", ANSI.sub("", line)) for line in text.splitlines()]
    found = []
    for number, line in enumerate(lines):
        if line.strip() == _BEGIN:
            one = _read(lines[number + 1 :])
            if one is not None:
                found.append(one)
    return found


def _read(lines: list[str]) -> Exception_ | None:
    frames: list[Frame] = []
    for number, line in enumerate(lines):
        place = _FRAME.match(line)
        if place:
            code = "".join(lines[number + 1 : number + 2]).strip()
            frame: Frame = {"file": place["file"], "line": int(place["line"]), "function": place["function"] or "",
                     "module": "", "code": code}  # fmt: skip
            # An installed file is placed by its path; any other is the user's own, which is no package's.
            frames.append(frame if _INSTALLED.search(place["file"]) else {**frame, "place": ""})
        elif line and not line[0].isspace():
            said = _RAISED.match(line)
            if said is None or not frames:
                return None
            module, _, name = said["type"].rpartition(".")
            message = "\n".join([said["message"] or "", *_more(lines[number + 1 :])]).rstrip()
            return {"type": name, "module": module, "bases": [], "message": message, "frames": frames, "cause": None}
    return None


def _more(lines: list[str]) -> list[str]:
    """The further lines of a message: until an empty one, or one that begins something else."""
    found: list[str] = []
    for line in lines[:20]:
        if not line.strip() or line.strip() == _BEGIN or re.match(r"^[\[\d]|^[WIE]\d{4} ", line):
            break
        found.append(line)
    return found
