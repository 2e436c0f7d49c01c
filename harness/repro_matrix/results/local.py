"""Where the user's own measurements lie, and what is stored of a case: of runs, of searches, and published."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from repro_matrix.config import project
from repro_matrix.config.settings import RunSettings
from repro_matrix.results import runs
from repro_matrix.results.store import Document, Store


def results_folder(settings: RunSettings) -> Path:
    """Where documents go. A run of the matrix takes a folder of its own first (``runs.begin``); what is left are
    searches, which go on with what they have."""
    return Path(settings.results).expanduser() if settings.results else scratch() / runs.SEARCHES


def scratch() -> Path:
    """The folder of runs."""
    return project.current().results / "scratch"


LOOK_BACK = 5  # runs


def own_stores(settings: RunSettings) -> list[Store]:
    """Where the user's own measurements lie: this run's folder, and where it is one of scratch/, those of the last runs
    and of searches."""
    folders = [results_folder(settings)]
    if folders[0].parent.resolve() == scratch().resolve():
        folders += [scratch() / runs.SEARCHES, *(run.folder for run in runs.listed(scratch())[-LOOK_BACK:])]
    return [Store(folder) for folder in dict.fromkeys(folder.resolve() for folder in folders)]


def history(
    stores: Iterable[Store],
    cases: Collection[str],
    say: Callable[[str], None] = lambda text: None,
    published: Iterable[Document] | None = None,
) -> dict[str, list[Document]]:
    """Stored older measurements of these cases by cell key: the published baseline, and these. ``say`` is told of the
    files that are no documents. ``published``: the baseline's, where they were read before."""
    found: dict[str, list[Document]] = {}
    for document in published or ():
        found.setdefault(document.get("cell_id", ""), []).append(document)
    for source in (*(map(Store, project.published()) if published is None else ()), *stores):
        for document in source.documents(history=True, cases=cases):
            found.setdefault(document.get("cell_id", ""), []).append(document)
        for text in source.damaged:
            say(text)
    return found
