"""Messages that are nobody's signature: what a pattern that matches too much would take for the known failure. Pure.

``unrelated_messages.txt`` holds real error messages of the packages under test and of Python, one a line (collected by
tests/data/collect_foreign_messages.py). A line that *is* a known failure's own text is listed in ``OWN``: by hand, so
that a pattern cannot make itself at home.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from repro_matrix.config.schema import Case
from repro_matrix.config.signatures import Signature

_FILE = Path(__file__).with_name("unrelated_messages.txt")
_ESCAPES = {"n": "\n", "t": "\t"}
# case/signature -> the beginnings of listed messages that it is there to recognise.
OWN: dict[str, tuple[str, ...]] = {
    "device-map-distributed/refused": ("You can't train a model that has been loaded with `device_map='auto'` in any",),
}


class Foreign(NamedTuple):
    type: str
    message: str


@cache
def foreign_messages() -> tuple[Foreign, ...]:
    """The list, and the empty message."""
    found = [Foreign("RuntimeError", "")]
    for line in _FILE.read_text(encoding="utf-8").splitlines():
        kind, _, text = line.partition(": ")
        found.append(Foreign(kind, re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), text)))
    return tuple(found)


def patterns(signature: Signature) -> list[str]:
    return [text for text in (signature.message, *signature.variants.values()) if text]


def matched(case: str, signature: Signature) -> list[str]:
    """The foreign messages that a signature's patterns match."""
    own = OWN.get(f"{case}/{signature.name}", ())
    compiled = [re.compile(text) for text in patterns(signature)]
    return [
        item.message
        for item in foreign_messages()
        if any(each.search(item.message) for each in compiled) and not item.message.startswith(own)
    ]


def too_wide(case: Case) -> str | None:
    """Which signature of a case would take foreign messages for its own, in words; None where none would."""
    for signature in case.signatures:
        found = matched(case.slug, signature)
        if found:
            shown = found[0].partition("\n")[0][:100]
            return f"signature {signature.name} matches {len(found)} messages that are not its failure: {shown!r}"
    return None
