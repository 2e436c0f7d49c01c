"""Stored measurements -> expectations, each with the range of releases over which it was measured. Pure.

Measurements of one cell that differ in the release of one package only form a line (a version map leaves such a line).
Neighbours on it with the same verdicts, that met the same failures, make one expectation, from the first to the last of
them, and it names these two. An expectation holds for whole minor releases, unless the line says otherwise within one:
what no measurement reaches is for measuring, not for assuming.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any

from packaging.version import Version

from repro_matrix.config.expectations import Expectation
from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import UPSTREAM
from repro_matrix.grading.comparability import depends_on_capabilities
from repro_matrix.grading.expectations import as_expected
from repro_matrix.records.document import Cell
from repro_matrix.records.outcome import FailureId

release = lru_cache(maxsize=4096)(Version)  # of all that is published there are a few hundred
STABLE = (
    "FIXED",
    "NOT_FIXED",
    "DIFFERENT_FAILURE",
    "NOT_REPRODUCED",
    "FIXED_UPSTREAM",
    "FIX_BREAKS",
    "SIGNATURE_MISMATCH",
    "PASSED",
)


@dataclass(frozen=True)
class Measured:
    """What one document shows. Without verdicts (nothing stable) it ends a range and begins none."""

    path: str  # relative to results/
    where: str  # the cell's axes
    hardware: str
    versions: Mapping[str, Version] = field(hash=False)  # of the ranged packages
    verdicts: Mapping[str, str] = field(hash=False)  # the stable ones
    own_stack: bool = False  # of variants that name a stack of their own
    failure_ids: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict, hash=False
    )  # of the verdicts that say it failed
    capabilities: Mapping[str, Any] = field(
        default_factory=dict, hash=False
    )  # of the machine, that these variants depend on

    @property
    def answer(self) -> Any:
        return sorted(self.verdicts.items()), sorted(self.failure_ids.items()), sorted(self.capabilities.items())


def measured(case: Case, document: Cell, path: str) -> list[Measured]:
    """What a document shows: of the variants that follow the stack, and apart from them of those that name their own,
    which a version map leaves out."""
    versions = upstream(document)
    verdicts = {variant: as_expected(v["name"]) for variant, v in document["verdicts"].items() if v["name"] in STABLE}
    own = {
        variant: name for variant, name in verdicts.items() if variant in case.variants and case.variants[variant].stack
    }
    following = {variant: name for variant, name in verdicts.items() if variant not in own}
    failure_ids = {
        variant: tuple(str(FailureId(**item)) for item in document["verdicts"][variant].get("failure_ids", ()))
        for variant in verdicts
    }
    where, hardware = document["params"], document["hardware"]["profile"]
    said = document["hardware"].get("capabilities", {})

    def item(of: Mapping[str, str], own_stack: bool) -> Measured:
        seen = {variant: failure_ids[variant] for variant in of if failure_ids[variant]}
        decide = {fact for variant in of for fact in depends_on_capabilities(case, variant)}
        facts = {fact: value for fact, value in said.items() if fact in decide}
        return Measured(path, where, hardware, versions, of, own_stack, seen, facts)

    return [item(following, False), *([item(own, True)] if own else [])]


def upstream(document: Cell) -> dict[str, Version]:
    """The releases of the packages that answers are ranged over."""
    have = document["stack"]["versions"]
    return {package: release(have[package]) for package in UPSTREAM if package in have}


def whole(case: Case, document: Cell) -> bool:
    """All variants that follow the stack were measured, or skipped with a reason: not a search for one variant's
    answer."""
    return all(variant in document["variants"] for variant, found in case.variants.items() if not found.stack)


@dataclass(frozen=True)
class Run:
    """Neighbours on a line with the same verdicts; ``versions`` is the range they stand for."""

    members: tuple[Measured, ...]
    versions: Mapping[str, str] = field(hash=False)
    alone: bool = False  # it has no neighbour whose range it could end

    @property
    def ends(self) -> list[dict[str, str]]:
        """The releases with which the first and the last were measured."""
        ends = [{name: str(version) for name, version in sorted(end.versions.items())} for end in self.members]
        return [ends[0]] if ends[0] == ends[-1] else [ends[0], ends[-1]]

    @property
    def kept(self) -> list[str]:
        """Their documents."""
        return [self.members[0].path, self.members[-1].path]

    @property
    def inner(self) -> list[str]:
        """Measurements that the range does not need: they say what its ends say."""
        return [item.path for item in self.members[1:-1]]


def runs(found: Iterable[Measured]) -> list[Run]:
    out = []
    for package, line in _lines(list(found)):
        groups = [list(group) for _, group in groupby(line, key=lambda item: item.answer)]
        for index, group in enumerate(groups):
            below = groups[index - 1][-1] if index else None
            above = groups[index + 1][0] if index + 1 < len(groups) else None
            first, last = group[0].versions, group[-1].versions
            versions = {
                name: _range(first[name], last[name], *(end.versions[name] if end else None for end in (below, above)))
                if name == package
                else _range(version, version, None, None)
                for name, version in first.items()
            }
            out.append(Run(tuple(group), versions, alone=len(groups) == 1))
    return out


def expectations(found: Iterable[Measured], reason: str, old: Sequence[Expectation] = ()) -> list[Expectation]:
    """One entry for cells that agree in verdicts and ranges and were measured with the same releases. An entry that
    says what it said keeps its old reason."""
    grouped: dict[str, dict[str, Any]] = {}
    for run in runs(found):
        first = run.members[0]
        if not first.verdicts:
            continue
        alike = repr((first.answer, sorted(run.versions.items()), run.ends, first.hardware))
        entry = grouped.setdefault(
            alike,
            {"verdicts": dict(first.verdicts), "failure_ids": _written(first.failure_ids), "cells": [],
             "hardware": first.hardware, "capabilities": dict(first.capabilities), "versions": dict(run.versions),
             "measured_at": run.ends, "reason": reason},
        )  # fmt: skip
        entry["cells"].append(first.where)
    entries = [Expectation(**entry) for entry in grouped.values()]
    reasons = {_without_reason(entry): entry.reason for entry in old}
    return [entry.model_copy(update={"reason": reasons.get(_without_reason(entry), reason)}) for entry in entries]


def _written(failure_ids: Mapping[str, tuple[str, ...]]) -> dict[str, str | list[str]]:
    return {variant: list(listed) if len(listed) > 1 else listed[0] for variant, listed in failure_ids.items()}


def _without_reason(entry: Expectation) -> str:
    """What an entry says of which measurements. What was met, and facts of the
    machine, came later than the verdicts, and are no other reason."""
    plain = entry.model_dump(exclude={"reason", "failure_ids", "capabilities"})
    plain["measured_at"] = [sorted(end.items()) for end in plain["measured_at"]]
    return repr([sorted(value.items()) if isinstance(value, dict) else value for value in plain.values()])


def _lines(found: Sequence[Measured]) -> Iterable[tuple[str | None, list[Measured]]]:
    """(the package whose release differs, measurements by that release). Each measurement is on its longest line."""
    lines: dict[str, list[Measured]] = {}
    for item in found:
        for package in item.versions:
            lines.setdefault(_line(item, package), []).append(item)
    longest = sorted(lines, key=lambda key: -len({str(item.versions) for item in lines[key]}))
    left = {(item.path, item.own_stack): item for item in found}
    for key in longest:
        package = key.partition(" ")[0]
        members = [item for item in lines[key] if left.pop((item.path, item.own_stack), None)]
        if members:
            yield package, sorted(members, key=lambda item: item.versions[package])
    for item in left.values():
        yield None, [item]


def _line(item: Measured, package: str) -> str:
    others = sorted((name, str(version)) for name, version in item.versions.items() if name != package)
    return f"{package} {item.where} {item.hardware} {item.own_stack} {others}"


def _range(first: Version, last: Version, below: Version | None, above: Version | None) -> str:
    """From the first to the last, in whole minor releases where the line's neighbours lie in others."""
    low = f">={first.public}" if below is not None and _minor(below) == _minor(first) else f">={_minor(first)}"
    major, minor = last.release[0], last.release[1] if len(last.release) > 1 else 0
    high = f"<={last.public}" if above is not None and _minor(above) == _minor(last) else f"<{major}.{minor + 1}"
    return f"{low},{high}"


def _minor(version: Version) -> str:
    return ".".join(map(str, [*version.release, 0][:2]))
