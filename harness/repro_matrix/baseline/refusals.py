"""Decide which stored results `repro accept` refuses.

They come from committed code, from enough attempts to be more than chance, from one machine, and
from evidence that does not contradict itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from repro_matrix.config.schema import Case
from repro_matrix.grading.expected import machine
from repro_matrix.grading.signature import overbroad_signature
from repro_matrix.grading.verdict import NO_EVIDENCE
from repro_matrix.records.document import Document
from repro_matrix.results.inconsistencies import inconsistencies
from repro_matrix.text import counted

ATTEMPTS = 3  # of each variant that ran; fewer may be chance
# May be an error of the case or of the machine: published only on request.
SUSPICIOUS = ("SIGNATURE_MISMATCH", "FIX_BREAKS")


class Refusal(NamedTuple):
    """``variant``: "" for a whole cell."""

    cell: str
    variant: str
    reason: str


def refusals(documents: Sequence[Document], allowed: Collection[str] = ()) -> list[Refusal]:
    """Return why documents are not published. ``allowed``: suspicious verdicts to publish."""
    found = []
    machines: dict[str, dict[str, Any]] = {}
    for document in documents:
        name = f"{document.get('cell_id') or document['case']} on {document['stack']['name']}"
        found += [
            Refusal(name, variant, reason) for variant, reason in _refusals(document, allowed)
        ]
        profile = document["hardware"]["profile"]
        here = machine(document)
        first = machines.setdefault(profile, here)
        differing = [key for key in here if here[key] != first[key]]
        if differing:
            key = differing[0]
            differs = f"{key} {here[key]} against {first[key]}"
            reason = f"measured on another machine of profile {profile}: {differs}"
            found.append(Refusal(name, "", reason))
    return found


def _refusals(document: Document, allowed: Collection[str]) -> Iterator[tuple[str, str]]:
    if not document["provenance"]["git_commit"]:
        yield "", "its commit is unknown: measured outside a checkout, or git failed"
    elif document["provenance"]["git_dirty"] is not False:
        yield "", "measured with uncommitted changes. Commit, then measure again."
    if document["hardware"].get("shares_gpu") and document["hardware"]["backend"] == "nccl":
        yield "", "its ranks shared one GPU over NCCL: a test of the harness"
    for note in document["stack"].get("changed", ())[:1]:
        yield "", f"measured in an environment that was changed after its installation: {note}"
    for name, variant in document["variants"].items():
        count = sum(
            attempt["outcome"]["outcome"] not in NO_EVIDENCE for attempt in variant["attempts"]
        )
        if not variant["skipped"] and count < ATTEMPTS:
            needed = f"at least {ATTEMPTS} are needed: repeat={ATTEMPTS}"
            yield name, f"{counted(count, 'attempt')} with evidence, {needed}"
    for name, verdict in document["verdicts"].items():
        if verdict["name"] in SUSPICIOUS and verdict["name"] not in allowed:
            hint = f"--allow {verdict['name']} publishes it"
            yield name, f"{verdict['name']}: {verdict['reason']} ({hint})"
    for reason in inconsistencies(document):
        yield "", f"edited: {reason}"


def never_reproduced(case: Case, documents: Iterable[Document]) -> str:
    """Return why a failure cannot be published, or ""."""
    if case.kind != "failure":
        return ""
    attempts = [
        a
        for d in documents
        if "unfixed" in d["variants"]
        for a in d["variants"]["unfixed"]["attempts"]
    ]
    if any(attempt["outcome"]["outcome"] == "reproduced" for attempt in attempts):
        return overbroad_signature(case) or ""
    return (
        f"its unfixed variant reproduced in none of {counted(len(attempts), 'attempt')}, here and"
        " in the baseline"
    )
