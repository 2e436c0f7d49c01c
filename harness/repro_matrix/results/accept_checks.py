"""What `repro accept` refuses to publish, and why. Pure.

What is published becomes what every later run is compared with, and what claims rest on: it comes from committed code,
from enough attempts to be more than chance, and from one machine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from repro_matrix.grading.comparability import machine, same_release
from repro_matrix.grading.verdict import NO_EVIDENCE
from repro_matrix.records.document import Cell

ATTEMPTS = 3  # of each variant that ran; with fewer, what came out once or twice may be chance
# Verdicts that may as well be a mistake of the case, or of the machine: published only when they are named.
SUSPICIOUS = ("SIGNATURE_MISMATCH", "FIX_BREAKS")


class Refusal(NamedTuple):
    """``variant``: "" where it is the whole cell that is refused."""

    cell: str
    variant: str
    why: str

    def __str__(self) -> str:
        return f"{self.cell}: " + (f"variant {self.variant}: " if self.variant else "") + self.why


def refusals(documents: Iterable[Cell], named: Collection[str] = ()) -> list[Refusal]:
    """One per reason. ``named``: the suspicious verdicts that the user said are to be published."""
    documents = list(documents)
    found = [Refusal(_where(d), variant, why) for d in documents for variant, why in _of_one(d, named)]
    return found + list(_machines(documents))


def _of_one(document: Cell, named: Collection[str]) -> Iterable[tuple[str, str]]:
    provenance = document["provenance"]
    if not provenance["git_commit"]:
        yield "", "no commit says which code it was: measured outside a checkout, or git could not say what differs"
    elif provenance["git_dirty"] is not False:
        yield "", "measured on a tree with changes that are not committed (commit, then measure again)"
    for note in document["stack"].get("changed", ())[:1]:
        yield "", f"measured in an environment that was changed after it was installed: {note}"
    for name, variant in document["variants"].items():
        counts = [attempt for attempt in variant["attempts"] if attempt["outcome"]["outcome"] not in NO_EVIDENCE]
        counted = len(counts)
        if not variant["skipped"] and counted < ATTEMPTS:
            made = f"{counted} attempt that counts" if counted == 1 else f"{counted} attempts that count"
            yield name, f"{made}; {ATTEMPTS} are the floor (repeat={ATTEMPTS})"
    for name, verdict in document["verdicts"].items():
        said = verdict["name"]
        if said in SUSPICIOUS and said not in named:
            yield name, f"{said}: {verdict['reason']} (--allow {said} if so)"


def _machines(documents: Iterable[Cell]) -> Iterable[Refusal]:
    """Under one profile's name, the measurements of one machine."""
    seen: dict[str, tuple[dict[str, Any], Cell]] = {}
    for document in documents:
        profile, here = document["hardware"]["profile"], machine(document)
        first, where = seen.setdefault(profile, (here, document))
        differs = next((key for key in here if here[key] != first[key]), None)
        if differs:
            what = f"{differs} {here[differs]} against {first[differs]}"
            yield Refusal(_where(document), "", f"another machine than {_where(where)} under profile {profile}: {what}")


def _where(document: Cell) -> str:
    return f"{document.get('cell_id') or document['case']} on {document['stack']['name']}"


def inconsistencies(document: Cell) -> Iterable[str]:
    """Yield how a document's evidence contradicts itself: it was edited, or assembled from several measurements."""
    for name, variant in document["variants"].items():
        for index, made in enumerate(variant["attempts"]):
            observation = made["observation"]
            attempt, place = observation["attempt"], f"variant {name}, attempt {index}"
            launched = attempt.get("fingerprint")
            if launched and launched != variant.get("fingerprint"):
                yield f"{place}: launched under fingerprint {launched}, the variant has {variant.get('fingerprint')}"
            for rank in observation["ranks"]:
                record = rank["record"]
                if record is None:
                    continue
                pid, written_by = rank.get("pid"), record.get("pid")
                if record["rank"] != rank["rank"] or (pid is not None and written_by not in (None, pid)):
                    yield (
                        f"{place}: the record of rank {rank['rank']} (process {pid}) was written by rank "
                        f"{record['rank']} (process {written_by})"
                    )
                planned, had = attempt.get("versions", {}), record["versions"]
                for package in sorted(planned.keys() & had.keys()):
                    if had[package] != "unknown" and not same_release(had[package], planned[package]):
                        yield (
                            f"{place}: rank {rank['rank']} had {package} {had[package]}, planned was {planned[package]}"
                        )
