"""Stored documents judged anew: outcomes from observations, verdicts from outcomes. Pure.

What a document says of itself is derived, and may be of an older judge, or edited: it is never taken over. Whoever
reads stored documents reads them through here, and a document that says otherwise is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from repro_matrix.config.schema import Case
from repro_matrix.grading import capabilities as facts
from repro_matrix.grading import consistency as genuine
from repro_matrix.grading import grade, outcome, verdict
from repro_matrix.grading.expectations import as_expected, told
from repro_matrix.grading.failure_id import Met
from repro_matrix.grading.outcome import Outcome
from repro_matrix.records import paths as place
from repro_matrix.records.document import Arm, Cell, Document
from repro_matrix.records.observation import Settings
from repro_matrix.records.outcome import Verdict as Stored


@dataclass
class Judged:
    """``documents`` as they are to be read, ``left_out`` with why, and ``remarks``: which said something else, or were
    left out."""

    documents: list[Document] = field(default_factory=list)
    left_out: list[tuple[Document, str]] = field(default_factory=list)
    remarks: list[tuple[str, str]] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        return [f"{document}: {remark}" for document, remark in self.remarks]


# Documents by their id, with the outcomes that were found in them: every probe of a search looks at the same ones.
Graded = dict[int, tuple[Document, "dict[str, list[Outcome]] | None"]]


def judged_again(
    documents: Iterable[Document], cases: Mapping[str, Case], graded: bool = False, kept: Graded | None = None
) -> Judged:
    """Every document of a case of the catalogue, judged by that case as it is now. ``graded``: its outcomes are those
    of this very judge (a run that has just ended), and only its verdicts are found anew. ``kept``: the documents in it
    are graded once.

    The documents are each other's history: an older stack that fired makes a newer one's NOT_FIRING an UPSTREAM_FIXED.
    A document that contradicts itself (in its versions, or in the name of its folder) is left out.
    """
    found = Judged()
    groups: dict[tuple[str, str], list[Document]] = {}
    for document in documents:
        if document["case"] not in cases:
            continue
        case, where = cases[document["case"]], named(document)
        wrong = contradiction(document) or genuine.contradiction(document, case)
        if wrong:
            found.left_out.append((document, wrong))
            found.remarks.append((where, f"left out: {wrong}"))
            continue
        if graded:
            again: Document = {**document}
        else:
            outcomes = _once(document, case, cases, kept or {})
            again = with_outcomes(document, outcomes)
            found.remarks += [(where, text) for text in _other_outcomes(document, outcomes)]
        found.documents.append(again)
        groups.setdefault((again["case"], again.get("key", "")), []).append(again)
    for document in found.documents:  # copies: what was given is not changed
        older = [d for d in groups[document["case"], document.get("key", "")] if _other_stack(d, document)]
        said = document["verdicts"]
        document["verdicts"] = verdicts_of(document, cases[document["case"]], older)
        found.remarks += [(named(document), text) for text in _other_verdicts(said, document["verdicts"])]
    return found


def _once(document: Document, case: Case, cases: Mapping[str, Case], kept: Graded) -> dict[str, list[Outcome]]:
    before = kept.get(id(document))
    if before is None or before[0] is not document:
        return outcomes_of(document, case, cases)
    found = before[1] or outcomes_of(document, case, cases)
    kept[id(document)] = (document, found)
    return found


def named(document: Document) -> str:
    """A document, in a note of it."""
    return document.get("path") or document.get("key") or document["case"]


def with_expectations(document: Document, case: Case) -> Document:
    """A document judged again, whose verdicts also say how they compare with what is expected now."""
    hardware = document["hardware"]
    versions, profile, known = document["stack"]["versions"], hardware["profile"], hardware.get("facts", {})
    where = document.get("where") or f"{document['model']}/{document['strategy']}"
    verdicts = {}
    for name, said in document["verdicts"].items():
        more = told(case, where, name, read_verdict(said), versions, profile, known)
        verdicts[name] = cast(Stored, {**said, **more})
    return {**document, "verdicts": verdicts}


def read_verdict(said: Stored) -> verdict.Verdict:
    """A verdict that was made here, from its JSON."""
    plain: dict[str, Any] = {key: value for key, value in said.items() if key in verdict.KEYS}
    return verdict.Verdict(**{**plain, "met": tuple(Met(**met) for met in said.get("met", ()))})


def outcomes_of(document: Document, case: Case, cases: Mapping[str, Case]) -> dict[str, list[Outcome]]:
    """Arm -> its attempts, graded by the case as it is now. Arms that the case has no longer are left out."""
    stack = document["stack"]
    found = {}
    for name, arm in document["arms"].items():
        if name not in case.arms:
            continue
        # An arm on a stack of its own: its versions are those that its own attempts were planned with.
        planned = stack["versions"] if arm.get("stack") in (None, stack["name"]) else None
        found[name] = [grade.grade(case, name, made["observation"], cases, planned) for made in arm["attempts"]]
    return found


def with_outcomes(document: Document, outcomes: Mapping[str, list[Outcome]]) -> Document:
    """The document with these outcomes instead of its own; arms that have none here are gone."""
    arms: dict[str, Arm] = {}
    for name, graded in outcomes.items():
        arm = document["arms"][name]
        arms[name] = {**arm, "attempts": [{**made, "outcome": o.to_json()} for made, o in zip(arm["attempts"], graded)]}
    found: Document = {**document, "arms": arms}
    return {**found, "hardware": {**found["hardware"], "facts": facts.seen(found)}}


def verdicts_of(document: Cell, case: Case, older: Iterable[Cell]) -> dict[str, Stored]:
    """The verdicts that follow from the document's outcomes. ``older``: the same cell on other stacks, judged anew."""
    outcomes = {
        name: [outcome.skipped(arm["skipped"])]
        if arm["skipped"]
        else [Outcome.from_json(attempt["outcome"]) for attempt in arm["attempts"]]
        for name, arm in document["arms"].items()
    }
    broken = document["arms"].get("broken")
    settings: Settings = broken["settings"] if broken else {}
    known = document["hardware"].get("facts", {})
    stack = document["stack"]
    changed = stack.get("changed", ())
    judged = verdict.judge(case, outcomes, older, stack["versions"], settings, known, changed)
    return {name: cast(Stored, found.to_json()) for name, found in judged.items()}


def contradiction(document: Document) -> str | None:
    """Where a document's versions and the folder that it lies in, or an arm's fingerprint and those of its attempts, do
    not agree, in words; else None."""
    for name, arm in document["arms"].items():
        for attempt in arm["attempts"]:
            made = attempt["observation"]["attempt"].get("fingerprint")
            if made is not None and made != arm.get("fingerprint"):
                return f"arm {name} has the fingerprint {arm.get('fingerprint')}, and an attempt was made under {made}"
    versions, label = document["stack"]["versions"], document["stack"].get("label", "")
    path = document.get("path", "")
    stored = place.read(path).stack if path else label
    for name, what in ((label, "its label"), (stored, "its file" if place.read(path).line else "its folder")):
        said = _said(name)
        for package, version in said.items():
            if package in versions and _plain(versions[package]) != version:
                return f"{what} {name} says {package} {version}, and its versions {versions[package]}"
    return None


def _said(label: str) -> dict[str, str]:
    """The releases that a stack's folder names: ``torch2.13.0+cpu-tf5.23.0-36bb27``."""
    found = {}
    for part in label.split("-")[:-1]:
        for prefix, package in (("torch", "torch"), ("tf", "transformers")):
            if part.startswith(prefix) and part[len(prefix) : len(prefix) + 1].isdigit():
                found[package] = part[len(prefix) :]
    return found


def _plain(version: str) -> str:
    """A version as a folder's name has it."""
    return re.sub(r"[^A-Za-z0-9.+-]", "_", version)


def _other_stack(other: Cell, document: Cell) -> bool:
    machine = other["hardware"]["accelerator"] == document["hardware"]["accelerator"]
    return machine and other["stack"]["versions"] != document["stack"]["versions"]


def _other_outcomes(document: Cell, outcomes: Mapping[str, list[Outcome]]) -> Iterable[str]:
    for name, graded in outcomes.items():
        for index, (attempt, again) in enumerate(zip(document["arms"][name]["attempts"], graded)):
            stored = attempt["outcome"]["outcome"]
            if stored != again.outcome:
                yield f"arm {name}, attempt {index}: it says {stored}, its observation {again.outcome}: {again.reason}"


def _other_verdicts(stored: Mapping[str, Stored], now: Mapping[str, Stored]) -> Iterable[str]:
    """Which of NOT_FIRING and UPSTREAM_FIXED it is depends on what else is stored: that is no contradiction."""
    for name, found in now.items():
        said = stored[name]["name"] if name in stored else ""
        if said and as_expected(said) != as_expected(found["name"]):
            yield f"arm {name}: it says {said}, its outcomes {found['name']}"
