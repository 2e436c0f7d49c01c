"""What a user's repository expects of its own cases, and no measurement of its baseline shows: it is not believed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from repro_matrix.cell.place import LINES
from repro_matrix.conf import project
from repro_matrix.conf.catalogue import Catalogue
from repro_matrix.judge.again import judged_again
from repro_matrix.paths import EXPECTED
from repro_matrix.results.backed import unbacked
from repro_matrix.results.store import Store


def dropped(catalogue: Catalogue, cases: Iterable[str] | None = None) -> list[str]:
    """Takes such a case's expectations out of the catalogue, so that nothing is expected of it: why, for each file.

    ``cases``: look at these alone. It is no error: the way out is to measure the case and to accept that. What is
    shipped is looked at by a test (tests/test_baseline.py).
    """
    own = project.current()
    if own.expected == EXPECTED:
        return []
    wanted = set(catalogue.cases if cases is None else cases)
    found = []
    for file in sorted(own.expected.glob("*.yaml")):
        slug = file.stem
        case = catalogue.cases.get(slug)
        if case is None or slug not in wanted or not case.expect:
            continue
        store = Store(own.baseline)
        judged = judged_again(store.documents(cases=[slug]), catalogue.cases).documents
        found += store.damaged
        missing = [f"{slug}: expected of every cell" for entry in case.expect if not entry.cells]
        missing += unbacked(case, judged)
        if missing:
            catalogue.cases[slug] = case.model_copy(update={"expect": []})
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            found.append(f"{file}: not believed: {missing[0]}{more}; `repro accept` writes it, with its measurement")
    return found


def files() -> list[Path]:
    """What it is decided by, beside the catalogue: the user's own measurements, where there are such tables."""
    own = project.current()
    if own.expected == EXPECTED or not any(own.expected.glob("*.yaml")):
        return []
    return [path for path in sorted(own.baseline.rglob("*")) if path.suffix in (".json", LINES)]
