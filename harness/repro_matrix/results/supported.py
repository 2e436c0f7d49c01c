"""Is every expectation backed: each cell and release end it speaks for is stored, and says the same. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from repro_matrix.config.expectations import Expectation
from repro_matrix.config.schema import Case
from repro_matrix.grading.expectations import as_expected
from repro_matrix.records.document import Document
from repro_matrix.records.outcome import FailureId
from repro_matrix.results.version_ranges import release, upstream


def unbacked(case: Case, documents: Iterable[Document]) -> list[str]:
    """What an expectation says and no stored measurement shows: one line for each cell and end of its releases, and for
    each package of which it speaks for more releases than lie between its ends (in whole minor ones).

    ``documents``: of this case, as published, judged anew (judge.again).
    """
    of_cell: dict[str, list[Document]] = {}
    for document in documents:
        of_cell.setdefault(document.get("params", ""), []).append(document)
    found = []
    for entry in case.expect:
        seen: dict[str, list[Version]] = {}
        for where, end in ((where, end) for where in entry.cells for end in entry.measured_at):
            shown = f"{case.slug}: {where} on {entry.hardware} with {', '.join(f'{n} {v}' for n, v in end.items())}"
            alike = [d for d in of_cell.get(where, []) if _is_of(d, entry, end)]
            if not alike:
                found.append(f"{shown}: expected, and no measurement of it is stored")
            for document in alike:
                for package, version in upstream(document).items():
                    seen.setdefault(package, []).append(version)
            for variant, wanted in entry.verdicts.items():
                listed = entry.failure_ids_of(variant)
                said = {_said(document, variant, listed is not None) for document in alike}
                if alike and (as_expected(wanted), tuple(sorted(listed or ()))) not in said:
                    what, was = (
                        _told(as_expected(wanted), listed or ()),
                        " or ".join(_told(*one) for one in sorted(said)),
                    )
                    found.append(f"{shown}: {variant} is expected to be {what}, and was measured as {was}")
        for package, versions in seen.items():
            low, high = min(versions), max(versions)
            if _beyond(entry.versions.get(package), low, high):
                said_of = f"{package} {entry.versions[package]}" if package in entry.versions else f"any {package}"
                ends = f"{low} to {high}" if low != high else f"{low}"
                found.append(f"{case.slug}: {entry.cells[0]} on {entry.hardware}: of {said_of}, measured with {ends}")
    return found


@lru_cache(maxsize=4096)
def _beyond(specifier: str | None, low: Version, high: Version) -> bool:
    """Whether a range holds releases outside the minor ones of its two ends. ``repro accept`` writes a lower bound and
    an upper one; what is written otherwise counts as wider."""
    bounds = {each.operator: each.version for each in SpecifierSet(specifier or "")}
    upper = bounds.keys() & {"<", "<="}
    if ">=" not in bounds or len(bounds) != 2 or not upper:
        return True
    first = Version(".".join(map(str, [*low.release, 0][:2])))
    beyond = Version(f"{high.release[0]}.{[*high.release, 0][1] + 1}")
    (operator,) = upper
    top = Version(bounds[operator])
    return Version(bounds[">="]) < first or top > beyond or (top == beyond and operator == "<=")


def _said(document: Document, variant: str, failure_ids: bool) -> tuple[str, tuple[str, ...]]:
    """A variant's verdict, and what it met, where that is asked for."""
    verdict = document["verdicts"].get(variant)
    items = (
        tuple(sorted(str(FailureId(**item)) for item in verdict.get("failure_ids", ())))
        if verdict and failure_ids
        else ()
    )
    return as_expected(verdict["name"]) if verdict else "nothing", items


def _told(name: str, failure_ids: Iterable[str]) -> str:
    return f"{name} ({', '.join(failure_ids)})" if failure_ids else name


def _is_of(document: Document, entry: Expectation, end: Mapping[str, str]) -> bool:
    have, hardware = document["stack"]["versions"], document["hardware"]
    facts = hardware.get("capabilities", {})
    same = hardware["profile"] == entry.hardware and all(
        facts.get(name) == value for name, value in entry.capabilities.items()
    )
    return same and all(have.get(name) is not None and _normal(have[name]) == v for name, v in end.items())


@lru_cache(maxsize=4096)
def _normal(version: str) -> str:
    return str(release(version))
