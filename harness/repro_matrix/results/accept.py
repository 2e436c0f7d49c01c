"""What `repro accept` publishes: which documents it writes, leaves and drops, and the tables of expectations. Pure.

What is published backs something. An expectation: of a version map's releases that agree the first and the last are
kept, and what lies between says the same. A range: what shows nothing stable ends its neighbours'. The signature, and
``stack=reproducing``: a stack that has a name, on which the first variant reproduces, is kept between two releases that
say so, too, since it is what a run means by that name. A control that fails, of which nothing can be expected, is what
says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from repro_matrix.config import expectations as expected
from repro_matrix.config.schema import Case
from repro_matrix.grading.comparability import machine
from repro_matrix.grading.expectations import as_expected
from repro_matrix.grading.expectations import expected as expectation
from repro_matrix.records.document import Document
from repro_matrix.records.outcome import FailureId, StoredOutcome, StoredVerdict
from repro_matrix.results.version_ranges import expectations, measured, runs, upstream


@dataclass(frozen=True, order=True)
class Change:
    """A variant whose verdict, or what it met, is not what was expected of it; ``old`` is empty where nothing was."""

    case: str
    where: str
    stack: str
    variant: str
    old: str
    new: str


@dataclass
class Publication:
    """Documents by their place: hardware, stack and cell."""

    written: dict[str, Document] = field(default_factory=dict)  # place -> the document
    same: list[str] = field(default_factory=list)  # published already, and what was measured says no more
    inner: list[str] = field(default_factory=list)  # measured, between two releases that say the same
    nothing: list[str] = field(default_factory=list)  # measured, and backs nothing
    dropped: list[str] = field(default_factory=list)  # published once, and one of these two, or replaced, now
    tables: dict[str, str | None] = field(default_factory=dict)  # case -> its table; None: nothing is expected of it
    changes: list[Change] = field(default_factory=list)


def publication(
    cases: Mapping[str, Case], held: Iterable[Document], given: Iterable[Document], reason: str
) -> Publication:
    """``held``: all that is published of the cases that ``given``, what was measured, is of; all judged anew."""
    found = Publication()
    held, given = list(held), list(given)
    for slug in sorted({document["case"] for document in given}):
        _case(
            found, cases[slug], [d for d in held if d["case"] == slug], [d for d in given if d["case"] == slug], reason
        )
    return found


def place(document: Document) -> str:
    """Of which hardware, stack and cell a document is: there is one of each."""
    return f"{document['hardware']['profile']}/{document['stack']['label']}/{document['cell_id']}"


def _replaced(now: Document, old: Document) -> bool:
    """The same cell of the same stack and releases, under another label: something else in it was built anew."""
    alike = [(d["cell_id"], d["hardware"]["profile"], d["stack"]["name"], upstream(d)) for d in (now, old)]
    return alike[0] == alike[1] and place(now) != place(old) and old["variants"].keys() <= now["variants"].keys()


def _case(found: Publication, case: Case, held: list[Document], given: list[Document], reason: str) -> None:
    before: dict[str, Document] = {}
    for document in held:  # a cell's file of its own and its line, where `accept` was killed between the two
        also = before.get(place(document))
        if also is None or also["provenance"]["started"] <= document["provenance"]["started"]:
            before[place(document)] = document
    now = {place(document): document for document in given}
    for key in now.keys() & before.keys():
        if (
            now[key]["variants"].keys() < before[key]["variants"].keys()
        ):  # a version map leaves out variants on another stack
            del now[key]
    found.changes += sorted(change for document in now.values() for change in _changes(case, document))
    for key in sorted(now):
        if key in before and _says_no_more(now[key], before[key]):
            found.same.append(key)
            del now[key]
    gone = {key for key, old in before.items() if any(_replaced(new, old) for new in now.values())}
    found.dropped += sorted(gone)
    before = {key: document for key, document in before.items() if key not in gone}
    every = {**before, **now}
    all_of_it = [item for key in sorted(every, key=_in_order) for item in measured(case, every[key], key)]
    line = runs(all_of_it)
    inner = {key for run in line for key in run.inner} - {key for run in line for key in run.kept}
    inner -= {key for key in inner if "+" not in every[key]["stack"]["name"] and _shows_it(every[key])}
    telling = {key for run in line if run.members[0].verdicts or not run.alone for key in (*run.kept, *run.inner)}
    nothing = {key for key in every.keys() - telling if not _shows_it(every[key])}
    found.inner += sorted(inner & now.keys())
    found.nothing += sorted(nothing & now.keys())
    found.dropped += sorted((inner | nothing) & before.keys())
    found.written |= {key: document for key, document in now.items() if key not in inner | nothing}
    entries = expectations(all_of_it, reason, case.expect)
    found.tables[case.slug] = expected.text(case.slug, entries) if entries else None


def _shows_it(document: Document) -> bool:
    """Whether the known failure reproduces in it, or a control fails."""
    first = next(iter(document["variants"].values()))
    reproduced = any(attempt["outcome"]["outcome"] == "reproduced" for attempt in first["attempts"])
    return reproduced or any(verdict["name"] == "FAILED" for verdict in document["verdicts"].values())


def _in_order(at: str) -> list[str]:
    """The order of a table's cells: that of the files that there was one a cell of, so that none moves in it."""
    return f"{at}.json".split("/")


def _says_no_more(new: Document, old: Document) -> bool:
    """The same variants, launched alike on the same machine, with the same outcomes: measuring again has told
    nothing."""
    return machine(new) == machine(old) and _evidence(new) == _evidence(old)


def _evidence(document: Document) -> Any:
    variants = {}
    for name, variant in document["variants"].items():
        seen = [attempt["outcome"] for attempt in variant["attempts"]]
        told = sorted(str((o["outcome"], _recognised(o), o.get("failed"))) for o in seen)
        variants[name] = (variant.get("fingerprint"), bool(variant["skipped"]), told)
    return (
        variants,
        document["hardware"].get("capabilities"),
        {variant: _said(v) for variant, v in document["verdicts"].items()},
    )


def _recognised(outcome: StoredOutcome) -> list[tuple[str, str]]:
    return sorted((item["case"], item["signature"]) for item in outcome["recognized"])


def _changes(case: Case, document: Document) -> Iterable[Change]:
    hardware, versions = document["hardware"], document["stack"]["versions"]
    for variant, verdict in document["verdicts"].items():
        if verdict["name"] == "INCONCLUSIVE":
            continue
        entry = expectation(
            case, document["params"], variant, versions, hardware["profile"], hardware.get("capabilities", {})
        )
        old = _worded(entry.verdicts[variant], entry.failure_ids_of(variant) or ()) if entry else ""
        new = _said(verdict)
        if old != new:
            yield Change(case.slug, document["params"], document["stack"]["name"], variant, old, new)


def _said(verdict: StoredVerdict) -> str:
    return _worded(verdict["name"], [str(FailureId(**item)) for item in verdict.get("failure_ids", ())])


def _worded(name: str, failure_ids: Iterable[str]) -> str:
    told = ", ".join(sorted(failure_ids))
    return as_expected(name) + (f" ({told})" if told else "")
