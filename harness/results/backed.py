"""Is every expectation backed: each cell and release end it speaks for is stored, and says the same. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from packaging.version import Version

from repro_matrix.conf.schema import Case
from repro_matrix.judge.expect import as_expected


def unbacked(case: Case, documents: Iterable[Mapping[str, Any]]) -> list[str]:
    """What an expectation says and no stored measurement shows: one line for each cell and end of its releases.

    ``documents``: of this case, as published, judged anew (judge.again).
    """
    of_cell: dict[str, list[Mapping[str, Any]]] = {}
    for document in documents:
        of_cell.setdefault(str(document.get("where")), []).append(document)
    found = []
    for entry in case.expect:
        for where, end in ((where, end) for where in entry.cells for end in entry.measured):
            shown = f"{case.slug}: {where} on {entry.hardware} with {', '.join(f'{n} {v}' for n, v in end.items())}"
            alike = [d for d in of_cell.get(where, []) if _is_of(d, entry.hardware, end)]
            if not alike:
                found.append(f"{shown}: expected, and no measurement of it is stored")
            for arm, wanted in entry.verdicts.items():
                said = {_said(document, arm) for document in alike}
                if alike and as_expected(wanted) not in said:
                    seen = ", ".join(sorted(said))
                    found.append(f"{shown}: {arm} is expected to be {wanted}, and was measured as {seen}")
    return found


def _said(document: Mapping[str, Any], arm: str) -> str:
    return as_expected(str((document["verdicts"].get(arm) or {}).get("name", "nothing")))


def _is_of(document: Mapping[str, Any], hardware: str, end: Mapping[str, str]) -> bool:
    have = document["stack"]["versions"]
    same = document["hardware"]["profile"] == hardware
    return same and all(have.get(name) is not None and str(Version(have[name])) == v for name, v in end.items())
