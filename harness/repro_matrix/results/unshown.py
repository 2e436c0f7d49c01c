"""What is expected and no published measurement shows, because a table was written by hand: it is not believed.

Looked at are the tables of a user's repository, and of what is shipped those that differ from the commit, and those of
the cases whose published measurements do: the others were looked at by a test (tests/project/test_baseline.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from repro_matrix.config import project
from repro_matrix.config.catalog import Catalogue
from repro_matrix.grading.regrade import regrade
from repro_matrix.paths import BASELINE, CHECKOUT, EXPECTED
from repro_matrix.records.paths import LINES
from repro_matrix.results import provenance
from repro_matrix.results.store import Store
from repro_matrix.results.supported import unbacked


def dropped(catalogue: Catalogue, cases: Iterable[str] | None = None) -> list[str]:
    """Takes such a case's expectations out of the catalogue, so that nothing is expected of it: why, for each file.

    ``cases``: look at these alone. It is no error: the way out is to measure the case and to accept that.
    """
    own = project.current()
    wanted = set(catalogue.cases if cases is None else cases)
    found = []
    for file in _tables():
        slug = file.stem
        case = catalogue.cases.get(slug)
        if case is None or slug not in wanted:
            continue
        if not file.exists():
            found.append(f"{file}: is gone since the commit: nothing is expected of {slug}")
        if not case.expect:
            continue
        store = Store(own.baseline)
        judged = regrade(store.documents(cases=[slug]), catalogue.cases).documents
        found += store.damaged
        missing = [f"{slug}: expected of every cell" for entry in case.expect if not entry.cells]
        missing += unbacked(case, judged)
        if missing:
            catalogue.cases[slug] = case.model_copy(update={"expect": []})
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            found.append(f"{file}: not believed: {missing[0]}{more}; `repro accept` writes it, with its measurement")
    return found


def files() -> list[Path]:
    """What it is decided by, beside the catalogue: the measurements that are published, where there are such tables."""
    own = project.current()
    if not _tables():
        return []
    return [path for path in sorted(own.baseline.rglob("*")) if path.name.endswith((".json", LINES))]


def _tables() -> list[Path]:
    """The tables that are looked at; of what is shipped also those that are gone."""
    own = project.current()
    if own.expected != EXPECTED:
        return sorted(own.expected.glob("*.yaml"))
    if not CHECKOUT:
        return []
    changed = provenance.changed(EXPECTED, BASELINE)
    tables = {path for path in changed if path.is_relative_to(EXPECTED) and path.suffix == ".yaml"}
    return sorted(tables)
