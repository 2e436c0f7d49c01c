"""The type of a script's document: a cell's attempts, of a command.

A measurement that was stored is compared with it where it is read (``read``); who is given one need not doubt it.
"""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict

from repro_matrix.records import validate as doubt
from repro_matrix.records.document import Made


class Document(TypedDict):
    """All attempts of one command on one stack."""

    schema: Literal[1]
    kind: Literal["script"]
    script: str
    command: str
    failure: dict[str, Any]  # the definition, as it was written (Failure.to_json)
    env: dict[str, str]
    nproc: int
    stack: dict[str, Any]
    hardware: dict[str, Any]
    provenance: dict[str, Any]
    attempts: list[Made]
    text: NotRequired[str]  # the script's, where its file will not stay


def read(value: Any) -> Document:
    """The same value, known to be one. Raises ValueError, which names what is wrong by its place."""
    return doubt.known(Document, value)
