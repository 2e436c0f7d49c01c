"""Where what comes from outside is compared with its type: once, and named by its place. Pure."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from repro_matrix.records.document import Cell, Document
from repro_matrix.records.rank import Record

T = TypeVar("T")
SHOWN = 3  # of what is wrong with one value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)  # built when it is first needed: `repro --help` reads no document


def cell(value: Any) -> Document:
    """The same value, known to be a cell's document. Raises ValueError, which names what is wrong by its place."""
    known(Cell, value)
    _consistent(value)
    return cast(Document, value)


def record(value: Any) -> Record:
    """The same value, known to be a rank's record. Raises ValueError likewise."""
    return known(Record, value)


def known(kind: type[T], value: Any) -> T:
    """The same value, known to be of this type. Raises ValueError likewise."""
    wrong = _wrong(kind, value)
    if wrong:
        raise ValueError(wrong)
    return cast(T, value)


def _wrong(kind: Any, value: Any) -> str:
    """What is wrong, "" where nothing is. Nothing is converted: what was stored stays what it is."""
    try:
        _adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        found = [
            f"{code_location(each['loc'])}: {each['msg']}"
            for each in error.errors(include_url=False, include_input=False)
        ]
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        return "; ".join(found[:SHOWN]) + more
    return ""


def code_location(parts: tuple[int | str, ...]) -> str:
    """``variants.unfixed.attempts[0].outcome``; a key that is no word is quoted."""
    found = ""
    for part in parts:
        if isinstance(part, int):
            found += f"[{part}]"
        else:
            found += ("." if found else "") + (part if re.fullmatch(r"[\w+-]+", part) else repr(part))
    return found or "it"


def _consistent(document: Cell) -> None:
    """What a type cannot say; in the JSON Schema: if, then, else (harness/repro_matrix/records/json_schema.py)."""
    variants, verdicts = document["variants"], document["verdicts"]
    if document["kind"] == "control":
        wrong = [f"{key}.{name}" for key, names in (("variants", variants), ("verdicts", verdicts)) for name in names
                 if name != "control"]  # fmt: skip
        if wrong:
            raise ValueError(f"{wrong[0]}: a control has the one variant control")
    elif "unfixed" not in variants:
        raise ValueError("variants: a failure has the variant unfixed")
    elif "unfixed" in verdicts:
        raise ValueError("verdicts.unfixed: verdicts are of the other variants")
    for name, variant in variants.items():
        if variant["skipped"] is not None and variant["attempts"]:
            raise ValueError(f"variants.{name}: a variant that was skipped has no attempts")
