"""Where a run's documents go: a folder of its own, or that of the run which it goes on with (``--resume``)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from repro_matrix.config import selection as overrides
from repro_matrix.config.settings import compose_run
from repro_matrix.errors import ConfigError
from repro_matrix.results import local as own_results
from repro_matrix.results import runs, summary
from repro_matrix.runner import session
from repro_matrix.runner.shards import selection


def resumed(texts: Sequence[str]) -> tuple[list[str], Path | None]:
    """(the command line to go on with, the folder of its run; None: a new one, or what ``results=`` names).

    Without a selection that is the last interrupted run; with one the last run of that selection, or the last of all,
    for what it has recorded. Raises ConfigError: no run was interrupted.
    """
    line = overrides.parse(texts)
    named = compose_run(line.run).results
    root = Path(named).expanduser() if named else own_results.scratch()
    chosen = selection(line)
    runs.sound(root)
    if named and not (root.is_dir() and any(root.iterdir())):
        print(f"repro: --resume: {root} holds nothing to go on with: it begins from the start", file=sys.stderr)
    if chosen:
        known = runs.listed(root)
        alike = [one for one in known if _selection(one.texts) == chosen]
        if named or not known:
            return list(texts), None
        run = (alike or known)[-1]
        of = "" if alike else f", the last run (of {' '.join(run.texts) or 'everything'})"
        print(f"repro: going on in {run.folder}{of}: what it has recorded is not measured again", file=sys.stderr)
        return list(texts), run.folder
    found = runs.read(root) if named else runs.unfinished(root)
    if found is None and not named:
        last = runs.listed(root)
        why = f"the last run, {last[-1].folder}, was not interrupted" if last else f"{root} holds no run"
        raise ConfigError(f"--resume: {why}; with a selection (case=...) it goes on with what is recorded of that")
    if found is None:
        return list(texts), None
    print(f"repro: going on with {found.folder}: {' '.join(found.texts) or 'everything'}", file=sys.stderr)
    given = {key for key, _ in line.words}
    kept = [text for key, text in overrides.parse(found.texts).words if key not in given]
    return [*kept, *texts], None if named else found.folder


def _selection(texts: Sequence[str]) -> list[str] | None:
    """Of a run's stored command line; None where today's grammar does not take it."""
    try:
        return selection(overrides.parse(texts))
    except ConfigError:
        return None


@contextlib.contextmanager
def folder(
    prepared: session.Session, texts: Sequence[str], before: Path | None = None
) -> Iterator[Callable[[bool], None]]:
    """The run's folder, for as long as it is measured; what is yielded is told whether all of it was.

    ``before``: of the run that it goes on with. A new folder in which nothing was measured is taken back.
    """
    named = prepared.settings.results
    fresh = not named and before is None
    root = Path(named).expanduser() if named else before or runs.begin(own_results.scratch(), texts)
    prepared.settings.results = str(root)
    left = [" ".join((cell.hardware, cell.stack, cell.key)) for cell in prepared.left]

    def note(state: str) -> None:
        with contextlib.suppress(OSError):  # a folder that cannot be written to is said when documents are
            root.mkdir(parents=True, exist_ok=True)
            runs.note(root, texts, state, left)

    if not fresh:
        note(runs.UNFINISHED)
    if before is not None:
        runs.point(root)
    try:
        yield lambda whole: note(runs.ENDED if whole else runs.UNFINISHED)
        summary.rewrite(root, prepared.catalogue.cases)
    except BaseException:
        if fresh:
            runs.drop(root)
        raise
