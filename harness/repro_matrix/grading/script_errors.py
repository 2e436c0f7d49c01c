"""A case's own mistakes: an error of the script or the kit itself. Pure.

An exception is the script's own when the innermost frame is the script's or the kit's, by place; Python's own library
and generated code (``<string>``) stand for who called them. What upstream raised is never the script's, whatever it was
called with. Records without places cannot tell, and are judged as they were.
"""

from __future__ import annotations

import sys

from repro_matrix.grading.location import Place
from repro_matrix.grading.observation import Attempt, Raised
from repro_matrix.grading.root_cause import Failures

SHOWN = 160  # characters of a message


def script_fails(attempt: Attempt, failures: Failures) -> str | None:
    """Where and how the script itself failed, if that came before everything else; in words."""
    first = failures.first
    if first is None or first.kind != "exception" or first.secondary:
        return None
    rank = next(rank for rank in attempt.ranks if rank.rank == first.rank)
    raised = rank.raised
    place = _by(raised) if raised else None
    if raised is None or place is None:
        return None
    where = f"{shown(place.file)}:{place.line}"
    said = f"{raised.type}: {raised.message}".strip().splitlines()[0][:SHOWN]
    if place.own:
        return f"the script itself fails: {where} {said}"
    return f"raised by code that is not what {where} holds: {said}"


def shown(file: str) -> str:
    """A script's path from the root of the checkout, an installed file's from the packages' folder."""
    path = file.replace("\\", "/")
    if "-packages/" in path:
        return path.rpartition("-packages/")[2]
    return path[path.rindex("/repros/") + 1 :] if "/repros/" in path else path.rpartition("/")[2]


def _by(raised: Raised) -> Place | None:
    """The frame that is to blame, when it is the script's own or pretends to be an installed file's; else None."""
    for place in reversed(raised.places):
        if place.place is None:
            return None  # an older record
        if place.own or (not place.place and "-packages/" in place.file):
            return place
        if place.place and place.place.partition(".")[0] not in sys.stdlib_module_names:
            return None  # upstream raised it
    return None
