"""Derive expectations from stored measurements, each with its range of releases. Pure.

Measurements of one cell that differ in the release of only one package form a line, for example a
version map. Neighbors on it with the same verdicts and failures make one expectation, with the
releases of the first and the last. It is valid for whole minor releases, unless the line shows
another result within one.

The exit code of a run says whether its results are the expected ones.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

from packaging.version import Version

from repro_matrix.config.expectations import Expectation
from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import UPSTREAM
from repro_matrix.errors import ExitCode
from repro_matrix.grading.expected import UNSTABLE, as_expected, depends_on_capabilities
from repro_matrix.grading.root_cause import all_failure_ids
from repro_matrix.records.document import CellRecord, kind_of
from repro_matrix.records.outcome import CONFIRMED, DIFFERS_FROM_PREDICTION, FailureId, Outcome
from repro_matrix.results.rows import Row

release = lru_cache(maxsize=4096)(Version)  # a few hundred in all that is published


@dataclass(frozen=True)
class Measured:
    """The stable results of one document.

    Without verdicts (nothing stable) it ends a range and begins none. ``place``: hardware, stack
    and cell. ``where``: the cell's axes. ``versions``: of the ranged packages. ``own_stack``: these
    are the variants that name a stack. ``capabilities``: those that these variants depend on.
    """

    place: str
    where: str
    hardware: str
    versions: Mapping[str, Version]
    verdicts: Mapping[str, str]
    own_stack: bool
    failure_ids: Mapping[str, tuple[str, ...]]
    capabilities: Mapping[str, Any]

    @property
    def answer(self) -> Any:
        return (
            sorted(self.verdicts.items()),
            sorted(self.failure_ids.items()),
            sorted(self.capabilities.items()),
        )


def measured(case: Case, document: CellRecord, place: str) -> list[Measured]:
    """Return what a document shows.

    Variants that name a stack of their own are separate: a version map does not measure them.
    """
    stored = {
        name: verdict for name, verdict in document["verdicts"].items() if _is_stable(verdict)
    }
    known = document["hardware"].get("capabilities", {})
    found = []
    for own_stack in (False, True):
        names = [
            name
            for name in stored
            if bool(name in case.variants and case.variants[name].stack) == own_stack
        ]
        if own_stack and not names:
            continue
        failures = {
            name: tuple(str(FailureId(**each)) for each in stored[name].get("failure_ids", ()))
            for name in names
        }
        if names and not own_stack and (unfixed := document["variants"].get("unfixed")):
            outcomes = [Outcome.from_json(attempt["outcome"]) for attempt in unfixed["attempts"]]
            failures["unfixed"] = tuple(map(str, all_failure_ids(case.slug, outcomes)))
        needed = {fact for name in names for fact in depends_on_capabilities(case, name)}
        found.append(
            Measured(
                place,
                document["params"],
                kind_of(document["hardware"]),
                upstream(document),
                {name: as_expected(stored[name]["name"]) for name in names},
                own_stack,
                {name: listed for name, listed in failures.items() if listed},
                {fact: value for fact, value in known.items() if fact in needed},
            )
        )
    return found


def _is_stable(verdict: Mapping[str, Any]) -> bool:
    """Return whether a verdict can be expected; a control may fail only by known failures."""
    causes = [each.get("case") for each in verdict.get("failure_ids", ())]
    return verdict["name"] not in UNSTABLE and (
        verdict["name"] != "FAILED" or bool(causes and all(causes))
    )


def upstream(document: CellRecord) -> dict[str, Version]:
    """Return the releases of the packages that expectations are ranged over."""
    versions = document["stack"]["versions"]
    return {package: release(versions[package]) for package in UPSTREAM if package in versions}


def is_whole(case: Case, document: CellRecord) -> bool:
    """Return whether all variants that follow the stack were measured, or skipped with a reason.

    A search measures only one.
    """
    return all(
        name in document["variants"] for name, variant in case.variants.items() if not variant.stack
    )


@dataclass(frozen=True)
class Range:
    """Neighbors on a line with the same verdicts, and the releases that they represent.

    ``alone``: it has no neighbor whose range it could end.
    """

    members: tuple[Measured, ...]
    versions: Mapping[str, str]
    alone: bool

    @property
    def ends(self) -> list[dict[str, str]]:
        """Return the releases with which the first and the last were measured."""
        ends = [
            {name: str(version) for name, version in sorted(end.versions.items())}
            for end in (self.members[0], self.members[-1])
        ]
        return ends[:1] if ends[0] == ends[1] else ends


def ranges(found: Iterable[Measured]) -> list[Range]:
    out = []
    for package, line in _lines(list(found)):
        groups = [list(group) for _, group in groupby(line, key=lambda item: item.answer)]
        for index, group in enumerate(groups):
            below = groups[index - 1][-1].versions.get(package) if index else None
            above = groups[index + 1][0].versions.get(package) if index + 1 < len(groups) else None
            last = group[-1].versions
            beside = {package: (below, above)}
            versions = {
                name: _range(version, last[name], *beside.get(name, (None, None)))
                for name, version in group[0].versions.items()
            }
            out.append(Range(tuple(group), versions, alone=len(groups) == 1))
    return out


def expectations(
    found: Iterable[Measured], reason: str, old: Sequence[Expectation] = ()
) -> list[Expectation]:
    """Return one entry for cells with the same verdicts, ranges and measured releases.

    An entry that has not changed keeps its old reason.
    """
    grouped: dict[str, dict[str, Any]] = {}
    for each in ranges(found):
        first = each.members[0]
        if first.verdicts:
            key = repr((first.answer, sorted(each.versions.items()), each.ends, first.hardware))
            ids = {
                name: list(listed) if len(listed) > 1 else listed[0]
                for name, listed in first.failure_ids.items()
            }
            entry = {
                "verdicts": dict(first.verdicts),
                "failure_ids": ids,
                "cells": [],
                "hardware": first.hardware,
                "capabilities": dict(first.capabilities),
                "versions": dict(each.versions),
                "measured_at": each.ends,
                "reason": reason,
            }
            grouped.setdefault(key, entry)["cells"].append(first.where)
    entries = [Expectation(**entry) for entry in grouped.values()]
    reasons = {_without_reason(entry): entry.reason for entry in old}
    return [
        entry.model_copy(update={"reason": reasons.get(_without_reason(entry), reason)})
        for entry in entries
    ]


def unsupported(case: Case, documents: Mapping[str, CellRecord]) -> list[str]:
    """List the expectations that the stored results do not show.

    ``documents``: all that are published of this case, by their place, graded anew.
    """
    shown = set(map(_without_reason, expectations(measured_in_order(case, documents), "")))
    return [
        f"{case.slug}: {', '.join(entry.cells)} on {entry.hardware}, measured at"
        f" {entry.measured_at}: no stored results show {dict(entry.verdicts)}"
        for entry in case.expect
        if _without_reason(entry) not in shown
    ]


def measured_in_order(case: Case, documents: Mapping[str, CellRecord]) -> list[Measured]:
    """Return what documents show, in the order of a table's cells."""
    order = sorted(documents, key=lambda place: f"{place}.json".split("/"))
    return [item for place in order for item in measured(case, documents[place], place)]


def _without_reason(entry: Expectation) -> str:
    plain = entry.model_dump(exclude={"reason"}) | {"cells": sorted(entry.cells)}
    return json.dumps(plain, sort_keys=True, default=str)


def _lines(found: Sequence[Measured]) -> Iterator[tuple[str, list[Measured]]]:
    """Yield the package whose release differs, and the measurements by that release.

    Each measurement is on its longest line.
    """
    lines: dict[tuple[str, str], list[Measured]] = {}
    for item in found:
        for package in item.versions:
            others = sorted(
                (name, str(version)) for name, version in item.versions.items() if name != package
            )
            key = package, f"{item.where} {item.hardware} {item.own_stack} {others}"
            lines.setdefault(key, []).append(item)
    left = {(item.place, item.own_stack): item for item in found}
    for key in sorted(lines, key=lambda key: -len({str(item.versions) for item in lines[key]})):
        members = [item for item in lines[key] if left.pop((item.place, item.own_stack), None)]
        if members:
            yield key[0], sorted(members, key=lambda item: item.versions[key[0]])
    yield from (("", [item]) for item in left.values())


def _range(first: Version, last: Version, below: Version | None, above: Version | None) -> str:
    """Return the releases from the first to the last.

    They are whole minor ones if the line's neighbors are in others.
    """
    low = f">={_minor(first)}"
    high = f"<{_minor(last, 1)}"
    if below is not None and _minor(below) == _minor(first):
        low = f">={first.public}"
    if above is not None and _minor(above) == _minor(last):
        high = f"<={last.public}"
    return f"{low},{high}"


def _minor(version: Version, plus: int = 0) -> str:
    return f"{version.major}.{version.minor + plus}"


# The exit code of a run


def exit_code(rows: Sequence[Row], min_cells: int, stopped_early: bool = False) -> ExitCode:
    """Return the exit code of a run.

    DIFFERS: a result differs from its expectation. INCOMPLETE: less was measured than requested, a
    cell has no comparison, or too much is not confirmed.
    """
    if any(row.state == "unexpected" for row in rows):
        return ExitCode.DIFFERS
    measured = {row.cell for row in rows if row.attempts and row.complete}
    few = stopped_early or len(measured) < min_cells
    return ExitCode.INCOMPLETE if few or lacking(rows) else ExitCode.OK


def lacking(rows: Sequence[Row]) -> list[Row]:
    """Return the variants that make a run incomplete.

    These have attempts without evidence, are of cells without an end or a comparison, or differ
    from a prediction. Unconfirmed results of GPUs count if they are more than half.
    """
    on_gpus = [
        row for row in rows if row.verdict and row.measured and row.hardware.accelerator != "cpu"
    ]
    unconfirmed = [
        row for row in on_gpus if row.state not in (*CONFIRMED, "unexpected", "quarantined")
    ]
    differs = [row for row in rows if row.state in DIFFERS_FROM_PREDICTION]
    return (
        not_whole(rows)
        + uncompared_failures(rows)
        + differs
        + (unconfirmed if 2 * len(unconfirmed) > len(on_gpus) else [])
    )


def not_whole(rows: Iterable[Row]) -> list[Row]:
    """Return the variants with attempts without evidence, or of cells without an end."""
    # A failed build says nothing about the stack: another try, or a compiler, may succeed.
    return [
        row
        for row in rows
        if row.lost_attempts > 0 or row.skip_kind == "build" or row.unseen or not row.complete
    ]


def is_unanswered(row: Row) -> bool:
    """Return whether a variant ran and gave no evidence or no verdict, and nothing expects that."""
    no_answer = row.no_evidence or row.verdict == "INCONCLUSIVE"
    return bool(row.attempts) and no_answer and row.state in (None, "no_expectation")


def bisect_exit(rows: Iterable[Row]) -> int:
    """Return the exit code for `git bisect run`.

    1: the known failure reproduces. 0: it does not. 125: unknown.
    """
    outcomes = {attempt.outcome for row in rows if row.first for attempt in row.attempts}
    return 1 if "reproduced" in outcomes else 0 if outcomes == {"passed"} else 125


def uncompared_failures(rows: Iterable[Row]) -> list[Row]:
    """Return unfixed variants that failed with another error than the known one, and show no more.

    Either no other variant gave an answer, or all attempts of all variants failed with the same
    error, which is not expected: the settings made no difference, so the cell shows nothing about
    the failure or its fixes.
    """
    found = []
    cells = defaultdict(list)
    for row in rows:
        if row.attempts:
            cells[row.cell].append(row)
    for cell in cells.values():
        answers = [row for row in cell if row.evidence_attempts]
        errors = {
            each.failures if each.outcome == "other_failure" else ()
            for row in answers
            for each in row.evidence_attempts
        }
        same = len(answers) > 1 and len(errors) == 1 and errors != {()}
        expected = {str(row.state) for row in answers if row.verdict} <= CONFIRMED
        if (same and not expected) or not any(row.verdict and row.measured for row in cell):
            unfixed = (row for row in cell if row.variant == "unfixed")
            found += [
                row
                for row in unfixed
                if row.counts.keys() - {"reproduced", "passed", "infra_error"}
            ]
    return found


def published_place(document: CellRecord) -> str:
    """Return the kind of hardware, stack and cell of a document: one document has this place."""
    return f"{kind_of(document['hardware'])}/{document['stack']['label']}/{document['cell_id']}"
