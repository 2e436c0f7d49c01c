"""Decide what `repro accept` publishes: every later run is compared with it.

If several releases of a version map agree, the first and the last are published; a result
that shows nothing stable is published only if it ends the range of a neighbor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro_matrix import git
from repro_matrix.baseline.audit import COMPARED
from repro_matrix.baseline.derivation import (
    expectations,
    is_whole,
    measured_in_order,
    published_place,
    ranges,
    upstream,
)
from repro_matrix.baseline.refusals import Refusal, never_reproduced, refusals
from repro_matrix.config import expectations as tables
from repro_matrix.config import project
from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.project import Project
from repro_matrix.config.schema import Case
from repro_matrix.errors import ResultsError
from repro_matrix.grading.expected import Situation, as_expected, expected, machine
from repro_matrix.grading.regrade import regrade as grade_documents
from repro_matrix.paths import ROOT, write_text
from repro_matrix.records.document import Document, kind_of
from repro_matrix.records.outcome import FailureId
from repro_matrix.results import store, summary
from repro_matrix.results.projection import rows_of
from repro_matrix.results.store import Store
from repro_matrix.text import counted


@dataclass(frozen=True, order=True)
class BaselineChange:
    """A variant whose verdict or failure is not the expected one.

    ``old`` is empty if nothing was expected.
    """

    case: str
    where: str
    stack: str
    variant: str
    old: str
    new: str


@dataclass
class Publication:
    """The documents to publish, by their place: hardware, stack and cell.

    ``same``: published already, and measured again with the same results. ``left_out``: measured,
    but no expectation depends on it. ``dropped``: published, and not needed any more, or replaced.
    ``tables``: case -> its table of expectations; None: nothing is expected.
    """

    written: dict[str, Document] = field(default_factory=dict)
    same: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    tables: dict[str, str | None] = field(default_factory=dict)
    changes: list[BaselineChange] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def propose(
    sources: Sequence[Path],
    catalogue: Catalogue,
    names: set[str],
    reason: str,
    allowed: Collection[str],
) -> Publication:
    """Return what accepting the results of some cases would publish.

    Raises ResultsError: no result can be used, a cell is in two folders, or the baseline is
    damaged.
    """
    own = project.current()
    baseline = Store(own.baseline)
    damaged = list[str]()
    given: list[Document] = []
    places: dict[str, Path] = {}
    for source in sources:
        results = Store(source)
        usable = [d for d in results.documents(cases=names) if d["case"] in names and _is_usable(d)]
        for place in map(published_place, usable):
            if places.setdefault(place, source) != source:
                raise ResultsError(
                    f"{place}: is in two folders, {places[place]} and {source}. Name one of them."
                )
        given += usable
        damaged += results.damaged
    if not any(is_whole(catalogue.cases[d["case"]], d) for d in given):
        raise ResultsError(
            f"{', '.join(map(str, sources))}: no complete measurement of the selected cases. Run"
            " `repro matrix` first."
        )
    held = [d for d in baseline.documents(cases=names) if d["case"] in names and _is_usable(d)]
    if baseline.damaged:
        raise ResultsError(
            "\n  ".join(["the baseline is damaged. Restore it first.", *baseline.damaged])
        )
    graded = grade_documents([*held, *given], catalogue.cases)
    held, given = graded[: len(held)], graded[len(held) :]
    whole = [d for d in given if is_whole(catalogue.cases[d["case"]], d)]
    found = publication(catalogue.cases, held, whole, reason)
    found.refused = [*refusals(whole, allowed), *_of_other_code(whole, catalogue, own)]
    ran = (d for d in whole if any(variant["attempts"] for variant in d["variants"].values()))
    for name in sorted({d["case"] for d in ran}):
        documents = (d for d in (*held, *whole) if d["case"] == name)
        if why := never_reproduced(catalogue.cases[name], documents):
            found.refused.append(Refusal(name, "", why))
    found.notes = damaged
    if partial := len(given) - len(whole):
        found.notes.append(
            f"left out: {counted(partial, 'cell')} of which only some variants were measured"
        )
    return found


def publish(found: Publication, catalogue: Catalogue) -> None:
    """Write documents, their summary and the tables of expectations."""
    own = project.current()
    store.write_baseline(own.baseline, found.written, found.dropped)
    summary.write_baseline_summaries(own.baseline, summary.load_rows(own.baseline, catalogue.cases))
    own.expected.mkdir(parents=True, exist_ok=True)
    for slug, table in found.tables.items():
        path = own.expected / f"{slug}.yaml"
        if table is None:
            path.unlink(missing_ok=True)
        elif not path.is_file() or path.read_text(encoding="utf-8") != table:
            write_text(path, table)


def _is_usable(document: Document) -> bool:
    """Return whether a document is complete, of released versions, and answers something.

    It has evidence or, on a named stack, the reasons why all of it was skipped. A commit belongs to
    no range of releases.
    """
    variants = document["variants"].values()
    name = document["stack"]["name"]
    outcomes = {a["outcome"]["outcome"] for variant in variants for a in variant["attempts"]}
    ran = bool(outcomes - {"infra_error"})
    skips = [variant.get("skip") for variant in variants]
    skipped = _is_named(document) and all(skip and skip["kind"] != "build" for skip in skips)
    return document["complete"] and (ran or skipped) and "#" not in name


def _is_named(document: Document) -> bool:
    """Return whether a named stack was measured as it is, without another release of a package."""
    return "+" not in document["stack"]["name"]


def _of_other_code(
    documents: Iterable[Document], catalogue: Catalogue, own: Project
) -> Iterator[Refusal]:
    """Yield the cases that were measured with another script or kit than the checkout has."""
    root = own.folder if own.file else ROOT
    for slug, commit in sorted(
        {(d["case"], d["provenance"]["git_commit"] or "") for d in documents}
    ):
        paths = [catalogue.script(catalogue.cases[slug]), *store.shared_code(catalogue)]
        inside = [path for path in paths if path.is_relative_to(root)]
        if commit and (reason := git.since(commit, root, inside)):
            yield Refusal(slug, "", f"measured with other code: {reason}")


def publication(
    cases: Mapping[str, Case], held: list[Document], given: list[Document], reason: str
) -> Publication:
    """Decide what is published.

    ``held``: the published documents of these cases. ``given``: the measured ones. All are graded
    anew.
    """
    found = Publication()
    for slug in sorted({document["case"] for document in given}):
        before, now = (
            {published_place(d): d for d in documents if d["case"] == slug}
            for documents in (held, given)
        )
        _publish_case(found, cases[slug], before, now, reason)
    return found


def _publish_case(
    found: Publication,
    case: Case,
    before: dict[str, Document],
    now: dict[str, Document],
    reason: str,
) -> None:
    for key in now.keys() & before.keys():
        new = now[key]
        old = before[key]
        # Of a version map: without own stacks, or with the releases that a named stack has anyway.
        fewer = new["variants"].keys() < old["variants"].keys()
        if fewer or (_is_named(old) and not _is_named(new)):
            del now[key]
    found.changes += sorted(
        change for document in now.values() for change in _changes(case, document)
    )
    same = {
        key
        for key in now.keys() & before.keys()
        if _results(now[key]) == _results(before[key])
        and _is_named(now[key]) == _is_named(before[key])
    }
    now = {key: document for key, document in now.items() if key not in same}
    replaced = {
        key for key, old in before.items() if any(_replaces(new, old) for new in now.values())
    }
    before = {key: document for key, document in before.items() if key not in replaced}
    every = {**before, **now}
    measured = measured_in_order(case, every)
    line = ranges(measured)
    # A named stack is published whole: stacks are compared, and stack=reproducing means those where
    # a failure occurs.
    named = {key for key, document in every.items() if _is_named(document)}
    shown = {key for key, document in every.items() if _shows_failure(document)}
    inner = {item.place for each in line for item in each.members[1:-1]}
    inner -= {item.place for each in line for item in (each.members[0], each.members[-1])}
    used = {
        item.place
        for each in line
        if each.members[0].verdicts or not each.alone
        for item in each.members
    }
    unneeded = (inner | (every.keys() - shown - used)) - named
    found.same += sorted(same)
    found.left_out += sorted(unneeded & now.keys())
    found.dropped += sorted(replaced | (unneeded & before.keys()))
    found.written |= {key: now[key] for key in sorted(now.keys() - unneeded)}
    entries = expectations(measured, reason, case.expect)
    found.tables[case.slug] = tables.text(case.slug, entries) if entries else None


def _replaces(new: Document, old: Document) -> bool:
    """Return whether both are the same cell, stack and releases, and only the label differs.

    The stack was built again.
    """
    one, other = (
        (d["cell_id"], kind_of(d["hardware"]), d["stack"]["name"], upstream(d)) for d in (new, old)
    )
    return (
        one == other
        and published_place(new) != published_place(old)
        and old["variants"].keys() <= new["variants"].keys()
    )


def _shows_failure(document: Document) -> bool:
    """Return whether the known failure reproduces in a document, or a control fails."""
    first = next(iter(document["variants"].values()))
    reproduced = any(attempt["outcome"]["outcome"] == "reproduced" for attempt in first["attempts"])
    return reproduced or any(
        verdict["name"] == "FAILED" for verdict in document["verdicts"].values()
    )


def _results(document: Document) -> Any:
    """Return what a measurement shows; equal results on one machine are not published again."""
    rows = rows_of(document, {})
    shown = [
        (
            document["variants"][row.variant].get("fingerprint"),
            *(getattr(row, name) for name in COMPARED),
            sorted(each.failures for each in row.attempts),
        )
        for row in rows
    ]
    return machine(document), rows[0].hardware.capabilities, shown


def _changes(case: Case, document: Document) -> Iterator[BaselineChange]:
    hardware = document["hardware"]
    versions = document["stack"]["versions"]
    facts = hardware.get("capabilities", {})
    here = Situation(document["params"], versions, kind_of(hardware), facts)
    for name, verdict in document["verdicts"].items():
        entry = expected(case, name, here)
        old = _describe(entry.verdicts[name], entry.failure_ids_of(name) or ()) if entry else ""
        new = _describe(
            verdict["name"], [str(FailureId(**each)) for each in verdict.get("failure_ids", ())]
        )
        if old != new and verdict["name"] != "INCONCLUSIVE":
            yield BaselineChange(
                case.slug, document["params"], document["stack"]["name"], name, old, new
            )


def _describe(name: str, failure_ids: Iterable[str]) -> str:
    listed = ", ".join(sorted(failure_ids))
    return as_expected(name) + (f" ({listed})" if listed else "")
