"""Stored documents judged anew: outcomes from observations, verdicts from outcomes. Pure.

What a document says of itself is derived, and may be of an older judge, or edited: it is never taken over. Whoever
reads stored documents reads them through here, and a document that says otherwise is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Any, cast

from repro_matrix.cell import types as cell
from repro_matrix.conf.schema import Case
from repro_matrix.judge import facts, genuine, grade, verdict
from repro_matrix.judge.evidence import items, mapping, text
from repro_matrix.judge.expect import as_expected, told
from repro_matrix.judge.grade import Outcome
from repro_matrix.judge.met import Met

Document = dict[str, Any]


@dataclass
class Judged:
    """``documents`` as they are to be read, and ``notes``: which of them said something else, or were left out."""

    documents: list[Document] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def judged_again(documents: Iterable[Mapping[str, Any]], cases: Mapping[str, Case]) -> Judged:
    """Every document of a case of the catalogue, judged by that case as it is now.

    The documents are each other's history: an older stack that fired makes a newer one's NOT_FIRING an UPSTREAM_FIXED.
    A document that contradicts itself (in its versions, or in the name of its folder) is left out.
    """
    found = Judged()
    groups: dict[tuple[str, str], list[Document]] = {}
    for document in documents:
        if document.get("case") not in cases:
            continue
        where = str(document.get("path") or document.get("key"))
        wrong = contradiction(document) or genuine.contradiction(cast(cell.Document, document), cases[document["case"]])
        if wrong:
            found.notes.append(f"{where}: left out: {wrong}")
            continue
        case = cases[document["case"]]
        outcomes = outcomes_of(document, case, cases)
        again = with_outcomes(document, outcomes)
        found.notes += [f"{where}: {text}" for text in _other_outcomes(document, outcomes)]
        found.documents.append(again)
        groups.setdefault((again["case"], str(again.get("key"))), []).append(again)
    for document in found.documents:
        older = [d for d in groups[document["case"], str(document.get("key"))] if _other_stack(d, document)]
        said = mapping(document.get("verdicts"))
        document["verdicts"] = verdicts_of(document, cases[document["case"]], older)
        where = str(document.get("path") or document.get("key"))
        found.notes += [f"{where}: {text}" for text in _other_verdicts(said, document["verdicts"])]
    return found


def with_expectations(document: Document, case: Case) -> Document:
    """A document judged again, whose verdicts also say how they compare with what is expected now."""
    stack, hardware = mapping(document.get("stack")), mapping(document.get("hardware"))
    versions, profile = mapping(stack.get("versions")), text(hardware.get("profile"))
    where = text(document.get("where")) or f"{text(document.get('model'))}/{text(document.get('strategy'))}"
    verdicts = {}
    for name, said in mapping(document.get("verdicts")).items():
        found = verdict.Verdict(**{**said, "met": tuple(Met(**met) for met in said["met"])})
        verdicts[name] = {**said, **told(case, where, name, found, versions, profile, mapping(hardware.get("facts")))}
    return {**document, "verdicts": verdicts}


def outcomes_of(document: Mapping[str, Any], case: Case, cases: Mapping[str, Case]) -> dict[str, list[Outcome]]:
    """Arm -> its attempts, graded by the case as it is now. Arms that the case has no longer are left out."""
    planned = mapping(mapping(document.get("stack")).get("versions"))
    found = {}
    for name, arm in mapping(document.get("arms")).items():
        if name not in case.arms:
            continue
        # An arm on a stack of its own: its versions are those that its own attempts were planned with.
        follows = arm.get("stack") in (None, mapping(document.get("stack")).get("name"))
        versions = planned if follows else None
        found[name] = [
            grade.grade(case, name, cast(cell.Observation, attempt["observation"]), cases, versions)
            for attempt in items(arm.get("attempts"))
        ]
    return found


def with_outcomes(document: Mapping[str, Any], outcomes: Mapping[str, list[Outcome]]) -> Document:
    """The document with these outcomes instead of its own; arms that have none here are gone."""
    arms = {}
    for name, graded in outcomes.items():
        arm = document["arms"][name]
        attempts = [{**a, "outcome": asdict(o)} for a, o in zip(items(arm.get("attempts")), graded)]
        arms[name] = {**arm, "attempts": attempts}
    found = {**document, "arms": arms}
    return {**found, "hardware": {**mapping(document.get("hardware")), "facts": facts.seen(found)}}


def verdicts_of(document: Mapping[str, Any], case: Case, older: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The verdicts that follow from the document's outcomes. ``older``: the same cell on other stacks, judged anew."""
    outcomes = {}
    for name, arm in document["arms"].items():
        if arm.get("skipped"):
            outcomes[name] = [grade.skipped(str(arm["skipped"]))]
        else:
            outcomes[name] = [Outcome.from_json(attempt["outcome"]) for attempt in arm["attempts"]]
    settings = mapping(mapping(document["arms"].get("broken")).get("settings"))
    judged = verdict.judge(
        case, outcomes, older, document["stack"]["versions"], settings, document["hardware"]["facts"]
    )
    return {name: asdict(found) for name, found in judged.items()}


def contradiction(document: Mapping[str, Any]) -> str | None:
    """Where a document's versions and the folder that it lies in, or an arm's fingerprint and those of its attempts, do
    not agree, in words; else None."""
    for name, arm in mapping(document.get("arms")).items():
        for attempt in items(arm.get("attempts")):
            made = mapping(mapping(attempt.get("observation")).get("attempt")).get("fingerprint")
            if made is not None and made != arm.get("fingerprint"):
                return f"arm {name} has the fingerprint {arm.get('fingerprint')}, and an attempt was made under {made}"
    stack = mapping(document.get("stack"))
    versions, label = mapping(stack.get("versions")), text(stack.get("label"))
    path = text(document.get("path"))
    folder = PurePath(path).parent.parent.name if path else label
    for name, what in ((label, "its label"), (folder, "its folder")):
        said = _said(name)
        for package, version in said.items():
            if versions.get(package) is not None and _plain(versions[package]) != version:
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


def _plain(version: Any) -> str:
    """A version as a folder's name has it."""
    return re.sub(r"[^A-Za-z0-9.+-]", "_", str(version))


def _other_stack(other: Mapping[str, Any], document: Mapping[str, Any]) -> bool:
    machine = mapping(other.get("hardware")).get("accelerator") == mapping(document.get("hardware")).get("accelerator")
    return machine and mapping(other.get("stack")).get("versions") != mapping(document.get("stack")).get("versions")


def _other_outcomes(document: Mapping[str, Any], outcomes: Mapping[str, list[Outcome]]) -> Iterable[str]:
    for name, graded in outcomes.items():
        for index, (attempt, again) in enumerate(zip(items(document["arms"][name].get("attempts")), graded)):
            stored = text(mapping(attempt.get("outcome")).get("outcome"))
            if stored != again.outcome:
                yield f"arm {name}, attempt {index}: it says {stored}, its observation {again.outcome}: {again.reason}"


def _other_verdicts(stored: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[str]:
    """Which of NOT_FIRING and UPSTREAM_FIXED it is depends on what else is stored: that is no contradiction."""
    for name, found in now.items():
        said = text(mapping(stored.get(name)).get("name"))
        if said and as_expected(said) != as_expected(found["name"]):
            yield f"arm {name}: it says {said}, its outcomes {found['name']}"
