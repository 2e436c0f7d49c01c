"""What `repro accept` refuses to publish, and why. Pure.

What is published becomes what every later run is compared with, and what claims rest on: it comes from committed code,
from enough attempts to be more than chance, and from one machine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from repro_matrix.judge.comparable import machine
from repro_matrix.judge.evidence import items, mapping, text
from repro_matrix.judge.verdict import NO_EVIDENCE

Document = Mapping[str, Any]
ATTEMPTS = 3  # of each arm that ran; with fewer, what came out once or twice may be chance
# Verdicts that may as well be a mistake of the case, or of the machine: published only when they are named.
SUSPICIOUS = ("CHANGED", "FIX_HARMFUL")


def refusals(documents: Iterable[Document], named: Collection[str] = ()) -> list[str]:
    """One line per reason. ``named``: the suspicious verdicts that the user said are to be published."""
    documents = list(documents)
    found = [f"{_where(document)}: {why}" for document in documents for why in _of_one(document, named)]
    return found + _machines(documents)


def _of_one(document: Document, named: Collection[str]) -> Iterable[str]:
    provenance = mapping(document.get("provenance"))
    if not provenance.get("git_commit"):
        yield "measured outside a checkout: no commit says which code it was"
    elif provenance.get("git_dirty") is not False:
        yield "measured on a tree with changes that are not committed"
    for name, arm in mapping(document.get("arms")).items():
        attempts = items(arm.get("attempts"))
        counts = [a for a in attempts if text(mapping(a.get("outcome")).get("outcome")) not in NO_EVIDENCE]
        counted = len({_identity(attempt, number) for number, attempt in enumerate(counts)})
        if counted < len(counts):
            yield f"arm {name}: an attempt is there more than once"
        if not arm.get("skipped") and counted < ATTEMPTS:
            made = f"{counted} attempt that counts" if counted == 1 else f"{counted} attempts that count"
            yield f"arm {name}: {made}; {ATTEMPTS} are the floor (repeat={ATTEMPTS})"
    for name, verdict in mapping(document.get("verdicts")).items():
        verdict_name = text(mapping(verdict).get("name"))
        if verdict_name in SUSPICIOUS and verdict_name not in named:
            yield f"arm {name} is {verdict_name}: {text(mapping(verdict).get('reason'))} (--take {verdict_name} if so)"


def _identity(attempt: Mapping[str, Any], number: int) -> tuple[Any, ...]:
    """What two attempts cannot share: their name, and when they began."""
    made = mapping(mapping(attempt.get("observation")).get("attempt"))
    return (made["id"], made.get("started")) if made.get("id") else (number,)


def _machines(documents: Iterable[Document]) -> list[str]:
    """Under one profile's name, the measurements of one machine."""
    seen: dict[str, tuple[dict[str, Any], Document]] = {}
    found = []
    for document in documents:
        profile, here = text(mapping(document.get("hardware")).get("profile")), machine(document)
        first, where = seen.setdefault(profile, (here, document))
        differs = next((key for key in here if here[key] != first[key]), None)
        if differs:
            what = f"{differs} {here[differs]} against {first[differs]}"
            found.append(f"{_where(document)}: another machine than {_where(where)} under profile {profile}: {what}")
    return found


def _where(document: Document) -> str:
    cell = text(document.get("key")) or text(document.get("case"))
    return f"{cell} on {text(mapping(document.get('stack')).get('name'))}"
