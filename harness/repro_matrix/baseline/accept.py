"""Check stored results, and decide what `repro accept` publishes.

Every later run is compared with the published results. They come from committed code, from enough
attempts to be more than chance, from one machine, and from evidence that does not contradict
itself. If several releases of a version map agree, the first and the last are published; a result
that shows nothing stable is published only if it ends the range of a neighbor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from repro_matrix import git
from repro_matrix.baseline.derivation import (
    expectations,
    is_whole,
    measured_in_order,
    ranges,
    unsupported,
    upstream,
)
from repro_matrix.config import expectations as tables
from repro_matrix.config import project
from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.project import Project
from repro_matrix.config.schema import Case
from repro_matrix.errors import ResultsError
from repro_matrix.grading.expected import as_expected, expected, machine, same_release
from repro_matrix.grading.regrade import regrade as grade_documents
from repro_matrix.grading.signature import overbroad_signature
from repro_matrix.grading.verdict import NO_EVIDENCE
from repro_matrix.paths import ROOT, write_text
from repro_matrix.records.document import Document, kind_of
from repro_matrix.records.outcome import FailureId
from repro_matrix.results import store, summary
from repro_matrix.results.rows import Row, rows_of
from repro_matrix.results.store import Store
from repro_matrix.text import counted

ATTEMPTS = 3  # of each variant that ran; fewer may be chance
# May be an error of the case or of the machine: published only on request.
SUSPICIOUS = ("SIGNATURE_MISMATCH", "FIX_BREAKS")
# Of stored rows, by `repro regrade`.
COMPARED = ("outcome", "verdict", "failures", "skipped", "measured", "unseen")


# Checks


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
        profile, here = document["hardware"]["profile"], machine(document)
        first = machines.setdefault(profile, here)
        differs = next(
            (f"{key} {here[key]} against {first[key]}" for key in here if here[key] != first[key]),
            None,
        )
        if differs:
            found.append(
                Refusal(name, "", f"measured on another machine of profile {profile}: {differs}")
            )
    return found


def _refusals(document: Document, allowed: Collection[str]) -> Iterator[tuple[str, str]]:
    if not document["provenance"]["git_commit"]:
        yield (
            "",
            (
                "its commit is unknown: measured outside a checkout, or git could not compare the"
                " files"
            ),
        )
    elif document["provenance"]["git_dirty"] is not False:
        yield "", "measured with uncommitted changes. Commit, then measure again."
    if document["hardware"].get("shares_gpu") and document["hardware"]["backend"] == "nccl":
        yield (
            "",
            "its ranks shared one GPU over NCCL, each as a host of its own: a test of the harness",
        )
    for note in document["stack"].get("changed", ())[:1]:
        yield "", f"measured in an environment that was changed after its installation: {note}"
    for name, variant in document["variants"].items():
        count = sum(
            attempt["outcome"]["outcome"] not in NO_EVIDENCE for attempt in variant["attempts"]
        )
        if not variant["skipped"] and count < ATTEMPTS:
            yield (
                name,
                (
                    f"{counted(count, 'attempt')} with evidence, at least {ATTEMPTS} are needed:"
                    f" repeat={ATTEMPTS}"
                ),
            )
    for name, verdict in document["verdicts"].items():
        if verdict["name"] in SUSPICIOUS and verdict["name"] not in allowed:
            yield (
                name,
                f"{verdict['name']}: {verdict['reason']} (--allow {verdict['name']} publishes it)",
            )
    for reason in inconsistencies(document):
        yield "", f"edited: {reason}"


def inconsistencies(document: Document) -> Iterator[str]:
    """Yield how a document's evidence contradicts itself.

    It was edited, or assembled from several measurements.
    """
    seen: set[str] = set()
    for name, variant in document["variants"].items():
        settings = variant.get("settings") or {}
        if (
            settings.get("variant", name) != name
            or settings.get("case", document["case"]) != document["case"]
        ):
            yield (
                f"variant {name}: its settings are those of {settings['case']}, variant"
                f" {settings['variant']}"
            )
        for index, made in enumerate(variant["attempts"]):
            attempt, place = made["observation"]["attempt"], f"variant {name}, attempt {index}"
            if attempt["id"] in seen:
                yield f"{place}: a copy of another attempt ({attempt['id']})"
            seen.add(attempt["id"])
            launched, planned = attempt.get("fingerprint"), attempt.get("versions", {})
            if launched and launched != variant.get("fingerprint"):
                yield (
                    f"{place}: launched under fingerprint {launched}, the variant has"
                    f" {variant.get('fingerprint')}"
                )
            for rank in made["observation"]["ranks"]:
                record, pid = rank["record"], rank.get("pid")
                if record is None:
                    continue
                if record["rank"] != rank["rank"] or (
                    pid is not None and record.get("pid") not in (None, pid)
                ):
                    yield (
                        f"{place}: the record of rank {rank['rank']} was written by another process"
                    )
                for package, version in record["versions"].items():
                    if version != "unknown" and not same_release(
                        version, planned.get(package, version)
                    ):
                        yield (
                            f"{place}: rank {rank['rank']} had {package} {version}, planned was"
                            f" {planned[package]}"
                        )


def _never_reproduced(case: Case, documents: Iterable[Document]) -> str:
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


# Regrade

Findings = dict[str, list[str]]  # by their kind


def regrade_folder(
    folder: Path, cases: Mapping[str, Case], with_expectations: bool = False
) -> tuple[list[Row], Findings]:
    """Grade every cell of a folder anew; return the rows and the problems.

    Problems by kind: ``damaged`` evidence, that cannot be read; ``edited`` evidence, that
    contradicts itself; ``differences`` of stored rows; ``unsupported`` expectations, which no
    stored result shows (``with_expectations``).
    """
    rows: list[Row] = []
    found: Findings = {kind: [] for kind in ("damaged", "edited", "differences", "unsupported")}
    stored, results = summary.stored_rows(folder, found["damaged"]), Store(folder)
    states = summary.evidence_states(folder)
    documents = {str(Path(each["path"]).relative_to(folder)): each for each in results.documents()}
    found["damaged"] += results.damaged
    now = summary.grade_documents(folder, documents, cases)
    cells = summary.rows_of_cells(now, cases, states)
    for path in stored.keys() - cells.keys():
        found["differences"].append(f"{folder / path}: in the summary, and its evidence is missing")
    for path, graded in cells.items():
        document, variants = documents[path], {row.variant for row in graded}
        rows += graded
        own = [row for row in rows_of(document, cases) if row.variant in variants]
        other = _differences(
            own, graded, ("outcome", "verdict") if document["complete"] else ("outcome",)
        )
        found["edited"] += [
            f"{folder / path}: {text}" for text in (*inconsistencies(document), *other)
        ]
        compared = _differences(stored.get(path, ()), graded, COMPARED) if stored else ()
        found["differences"] += [f"{folder / path}: {text}" for text in compared]
    for slug, case in cases.items() if with_expectations else ():
        found["unsupported"] += unsupported(
            case, {published_place(d): d for d in now.values() if d["case"] == slug}
        )
    return rows, found


def _differences(
    stored: Iterable[Row], graded: Iterable[Row], names: Iterable[str]
) -> Iterator[str]:
    before = {row.variant: row for row in stored}
    for row in graded:
        old = before.pop(row.variant, None)
        if old is None:
            yield f"variant {row.variant}: not in the summary"
        for name in names if old else ():
            one, now = (
                ", ".join(map(str, v)) if isinstance(v := getattr(each, name), tuple) else v
                for each in (old, row)
            )
            if one != now:
                yield f"variant {row.variant}: {name} stored as {one}, graded as {now}"
    yield from (
        f"variant {variant}: in the summary, and its evidence is missing" for variant in before
    )


# Publication


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
    baseline, damaged = Store(own.baseline), list[str]()
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
    for name in sorted(
        {d["case"] for d in whole if any(variant["attempts"] for variant in d["variants"].values())}
    ):
        why = _never_reproduced(
            catalogue.cases[name], (d for d in (*held, *whole) if d["case"] == name)
        )
        found.refused += [Refusal(name, "", why)] if why else []
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
    variants, name = document["variants"].values(), document["stack"]["name"]
    ran = any(
        a["outcome"]["outcome"] != "infra_error"
        for variant in variants
        for a in variant["attempts"]
    )
    skips = [variant.get("skip") for variant in variants]
    skipped = "+" not in name and all(skip and skip["kind"] != "build" for skip in skips)
    return document["complete"] and (ran or skipped) and "#" not in name


def _of_other_code(
    documents: Iterable[Document], catalogue: Catalogue, own: Project
) -> Iterator[Refusal]:
    """Yield the cases that were measured with another script or kit than the checkout has."""
    root = own.folder if own.file else ROOT
    for slug, commit in sorted(
        {(d["case"], d["provenance"]["git_commit"] or "") for d in documents}
    ):
        paths = [catalogue.script(catalogue.cases[slug]), *store.shared_code(catalogue)]
        reason = (
            git.since(commit, root, [path for path in paths if path.is_relative_to(root)])
            if commit
            else None
        )
        if reason:
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


def published_place(document: Document) -> str:
    """Return the kind of hardware, stack and cell of a document: one document has this place."""
    return f"{kind_of(document['hardware'])}/{document['stack']['label']}/{document['cell_id']}"


def _publish_case(
    found: Publication,
    case: Case,
    before: dict[str, Document],
    now: dict[str, Document],
    reason: str,
) -> None:
    for key in now.keys() & before.keys():
        if (
            now[key]["variants"].keys() < before[key]["variants"].keys()
        ):  # of a version map, without own stacks
            del now[key]
    found.changes += sorted(
        change for document in now.values() for change in _changes(case, document)
    )
    same = {
        key for key in now.keys() & before.keys() if _results(now[key]) == _results(before[key])
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
    named = {key for key, document in every.items() if "+" not in document["stack"]["name"]}
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
    hardware, versions = document["hardware"], document["stack"]["versions"]
    for name, verdict in document["verdicts"].items():
        facts = hardware.get("capabilities", {})
        entry = expected(case, document["params"], name, versions, kind_of(hardware), facts)
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
