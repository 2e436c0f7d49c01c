"""Published results, read and graded once by one worker: mark tests ``xdist_group("baseline")``.

Reading takes seconds, and grading as many again.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from repro_matrix.config import catalog
from repro_matrix.records.document import Document
from repro_matrix.results import summary
from repro_matrix.results.store import Store

grade_documents = summary.grade_documents  # unpatched


@cache
def published(folder: Path) -> list[Document]:
    store = Store(folder)
    found = list(store.documents())
    assert store.damaged == []
    for document in found:
        document["path"] = str(Path(document["path"]).relative_to(folder))
    return found


@cache
def graded(folder: Path) -> dict[str, Document]:
    found = {each["path"]: each for each in published(folder)}
    return grade_documents(folder, found, catalog.load().cases)
