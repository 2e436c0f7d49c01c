"""What `repro accept` refuses to publish, and why. Pure.

What is published becomes what every later run is compared with, and what claims rest on: it comes from committed code,
from enough attempts to be more than chance, and from one machine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from repro_matrix.cell.types import Cell, Made
from repro_matrix.judge.comparable import machine
from repro_matrix.judge.verdict import NO_EVIDENCE

ATTEMPTS = 3  # of each arm that ran; with fewer, what came out once or twice may be chance
# Verdicts that may as well be a mistake of the case, or of the machine: published only when they are named.
SUSPICIOUS = ("CHANGED", "FIX_HARMFUL")


def refusals(documents: Iterable[Cell], named: Collection[str] = ()) -> list[str]:
    """One line per reason. ``named``: the suspicious verdicts that the user said are to be published."""
    documents = list(documents)
    found = [f"{_where(document)}: {why}" for document in documents for why in _of_one(document, named)]
    return found + _machines(documents)


def _of_one(document: Cell, named: Collection[str]) -> Iterable[str]:
    provenance = document["provenance"]
    if not provenance["git_commit"]:
        yield "measured outside a checkout: no commit says which code it was"
    elif provenance["git_dirty"] is not False:
        yield "measured on a tree with changes that are not committed"
    for name, arm in document["arms"].items():
        counts = [attempt for attempt in arm["attempts"] if attempt["outcome"]["outcome"] not in NO_EVIDENCE]
        counted = len({_identity(attempt, number) for number, attempt in enumerate(counts)})
        if counted < len(counts):
            yield f"arm {name}: an attempt is there more than once"
        if not arm["skipped"] and counted < ATTEMPTS:
            made = f"{counted} attempt that counts" if counted == 1 else f"{counted} attempts that count"
            yield f"arm {name}: {made}; {ATTEMPTS} are the floor (repeat={ATTEMPTS})"
    for name, verdict in document["verdicts"].items():
        said = verdict["name"]
        if said in SUSPICIOUS and said not in named:
            yield f"arm {name} is {said}: {verdict['reason']} (--take {said} if so)"


def _identity(attempt: Made, number: int) -> tuple[Any, ...]:
    """What two attempts cannot share: their name, and when they began."""
    made = attempt["observation"]["attempt"]
    return (made["id"], made["started"]) if made["id"] else (number,)


def _machines(documents: Iterable[Cell]) -> list[str]:
    """Under one profile's name, the measurements of one machine."""
    seen: dict[str, tuple[dict[str, Any], Cell]] = {}
    found = []
    for document in documents:
        profile, here = document["hardware"]["profile"], machine(document)
        first, where = seen.setdefault(profile, (here, document))
        differs = next((key for key in here if here[key] != first[key]), None)
        if differs:
            what = f"{differs} {here[differs]} against {first[differs]}"
            found.append(f"{_where(document)}: another machine than {_where(where)} under profile {profile}: {what}")
    return found


def _where(document: Cell) -> str:
    return f"{document.get('key') or document['case']} on {document['stack']['name']}"
