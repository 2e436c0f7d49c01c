"""What the lines of a published file say more than once, said once: in a line of its own, by a name made of it. Pure.

Attempts meet the same warnings, frames and logs: a third of the bytes. Such a value is ``{"said":NAME,"is":value}``
in a line of its own, and ``{"see":NAME}`` where it stood; its parts may be said likewise. As the name is made of the
value, a cell that is measured again changes its own line, and adds what nobody had said.

It is put back in the text (a walk through the values made reading half as slow again): ``{"see":`` is nothing else
there, for within a text quotes are escaped, and a key that happens to be ``see`` is written with its letter escaped.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

LEAST = 80  # characters of a value, as it is written: naming it costs twenty
_LINE = re.compile(rb'\{"said":"([0-9a-f]+)","is":(.*)\}', re.DOTALL)
_NAMED = re.compile(rb'\{"see":"([0-9a-f]+)"\}')
_ESCAPED = b'"\\u0073ee"'  # a key that happens to be ``see``; nothing else is written so
Json = Any


def in_line(line: bytes) -> tuple[str, bytes] | None:
    """(name, the text of what it stands for) of a line that says something; None of any other."""
    found = _LINE.fullmatch(line)
    return (found[1].decode(), found[2]) if found else None


def line(name: str, text: bytes) -> bytes:
    return b'{"said":"%s","is":%s}' % (name.encode(), text)


def see(name: str) -> bytes:
    return b'{"see":"%s"}' % name.encode()


def whole(text: bytes, said: Mapping[str, bytes], known: dict[str, bytes]) -> bytes:
    """A text with what its names stand for. ``known``: what was made whole before, added to. Raises ValueError: nobody
    says one of them, or what is said is not what its name was made of."""

    def of(found: re.Match[bytes]) -> bytes:
        name = found[1].decode()
        if name not in known:
            if name not in said:
                raise ValueError(f"no line says {name}")
            text = whole(said[name], said, known)
            if _name(text.replace(_ESCAPED, b'"see"').decode()) != name:
                raise ValueError(f"what the line of {name} says was edited")
            known[name] = text
        return known[name]

    return _NAMED.sub(of, text)


def needed(texts: Iterable[bytes], said: Mapping[str, bytes]) -> dict[str, bytes]:
    """Of what is said, what these texts name, and what that names; sorted. Raises ValueError: nobody says it."""
    found: dict[str, bytes] = {}
    left = [name.decode() for text in texts for name in _NAMED.findall(text)]
    while left:
        name = left.pop()
        if name not in found:
            if name not in said:
                raise ValueError(f"no line says {name}")
            found[name] = said[name]
            left += [inner.decode() for inner in _NAMED.findall(said[name])]
    return dict(sorted(found.items()))


def told(values: Sequence[Json], known: Collection[str]) -> tuple[list[bytes], dict[str, bytes]]:
    """The texts of values, with names in place of what they say twice, or what is ``known`` by its name; and what is
    new among that, name -> text. No value is replaced whole."""
    times: Counter[str] = Counter()
    said: dict[str, bytes] = {}

    def count(value: Json) -> None:
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            text = _dump(part)
            if len(text) >= LEAST:
                times[text] += 1
                if times[text] == 1:  # else its parts were counted where it stood first, and are said there only
                    count(part)

    def put(value: Json) -> str:
        text = _dump(value)
        if len(text) < LEAST:
            return inside(value) if '"see":' in text else text
        if times[text] > 1 or known:
            name = _name(text)
            if times[text] > 1 and name not in known and name not in said:
                said[name] = inside(value).encode()
            if name in known or name in said:
                return see(name).decode()
        return inside(value)

    def inside(value: Json) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{_key(key)}:{put(part)}" for key, part in value.items()) + "}"
        return "[" + ",".join(map(put, value)) + "]" if isinstance(value, list) else _dump(value)

    for value in values:
        count(value)
    return [inside(value).encode() for value in values], said


def _name(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _key(key: str) -> str:
    return _ESCAPED.decode() if key == "see" else _dump(key)


def _dump(value: Json) -> str:
    return json.dumps(value, separators=(",", ":"))
