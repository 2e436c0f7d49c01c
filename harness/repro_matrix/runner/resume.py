"""Where a run's documents go: a folder of its own, or that of the run which it continues (``--resume``)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from repro_matrix.config import selection as overrides
from repro_matrix.config.settings import compose_run
from repro_matrix.errors import ConfigError
from repro_matrix.results import local, runs
from repro_matrix.runner.engine import Summary
from repro_matrix.runner.session import Session
from repro_matrix.runner.shards import selection


def resumed(texts: Sequence[str]) -> tuple[list[str], Path | None]:
    """Return the overrides to continue with and the folder of that run (None: a new one, or what ``results=`` names).

    Without a selection it is the last interrupted run; with one the last run of that selection, or the last of all,
    for what it has recorded. Raises ConfigError: no run was interrupted.
    """
    line = overrides.parse(texts)
    named = compose_run(line.run).results
    root = Path(named).expanduser() if named else local.scratch()
    chosen = selection(line)
    runs.sound(root)
    if named and not (root.is_dir() and any(root.iterdir())):
        _say(f"--resume: {root} holds no results: the run begins from the start")
    if chosen:
        known = runs.listed(root)
        matching = [run for run in known if _selection(run.texts) == chosen]
        if named or not known:
            return list(texts), None
        run = (matching or known)[-1]
        of = "" if matching else f", the last run (of {' '.join(run.texts) or 'everything'})"
        _say(f"continuing in {run.folder}{of}: what it has recorded is not measured again")
        return list(texts), run.folder
    last = runs.read(root) if named else runs.unfinished(root)
    if last is None and not named:
        known = runs.listed(root)
        why = f"the last run, {known[-1].folder}, was not interrupted" if known else f"{root} holds no run"
        raise ConfigError(f"--resume: {why}. With a selection (case=...) it continues what is recorded of that.")
    if last is None:
        return list(texts), None
    _say(f"continuing {last.folder}: {' '.join(last.texts) or 'everything'}")
    given = {key for key, _ in line.words}
    kept = [text for key, text in overrides.parse(last.texts).words if key not in given]
    return [*kept, *texts], None if named else last.folder


def _say(text: str) -> None:
    print(f"repro: {text}", file=sys.stderr)


def _selection(texts: Sequence[str]) -> list[str] | None:
    """Parse a run's stored overrides; None where today's grammar does not accept them."""
    try:
        return selection(overrides.parse(texts))
    except ConfigError:
        return None


@contextlib.contextmanager
def folder(prepared: Session, texts: Sequence[str], before: Path | None = None) -> Iterator[Callable[[Summary], None]]:
    """Open the run's folder for as long as it is measured; call what is yielded with the summary at the end.

    ``before``: the folder of the run that it continues. A new folder in which nothing was measured is removed.
    """
    named = prepared.settings.results
    fresh = not named and before is None
    root = Path(named).expanduser() if named else before or runs.begin(local.scratch(), texts)
    prepared.settings.results = str(root)

    def note(state: str, left: Sequence[str] = ()) -> None:
        with contextlib.suppress(OSError):  # a folder that cannot be written to is reported with the first document
            root.mkdir(parents=True, exist_ok=True)
            runs.note(root, texts, state, left)

    def finish(ended: Summary) -> None:
        left = [" ".join((cell.hardware, cell.stack, cell.key)) for cell in ended.not_started]
        note(runs.UNFINISHED if ended.interrupted or ended.problem else runs.ENDED, left)

    if not fresh:
        note(runs.UNFINISHED)
    if before is not None:
        runs.point(root)
    try:
        yield finish
    except BaseException:
        if fresh:
            runs.drop(root)
        raise
