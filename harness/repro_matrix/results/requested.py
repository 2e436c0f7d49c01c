"""What the run of a results folder was asked for, from the words that it has left there (results/runs.py)."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from repro_matrix.analysis.brief import Brief
from repro_matrix.analysis.missing import Asked
from repro_matrix.config import catalog as catalogues
from repro_matrix.errors import ConfigError, ResultsError
from repro_matrix.planning.cells import arms_of
from repro_matrix.results import runs
from repro_matrix.runner import request, shards


def of(folder: Path, measured: Iterable[Brief]) -> Asked:
    """By today's catalogue: what it has no more is not asked for. Of results without words (put together by `repro
    merge`), or with words that nobody understands any more, all of the catalogue is."""
    run = runs.read(folder)
    try:
        asked = request.ask(run.texts) if run else None
        cells = asked.cells if asked else []
        hardware = asked.hardware if asked else []
    except ConfigError:
        asked = None
    if run is None or asked is None:
        return Asked({slug: set(case.arms) for slug, case in catalogues.load().cases.items()})
    stacks: dict[str, set[str]] = {}
    for cell in cells:
        stacks.setdefault(cell.key, set()).add(cell.stack)
    patterns = asked.settings.arms
    arms = {}
    for slug in {cell.case for cell in cells}:
        case = asked.catalogue.cases[slug]
        named = [arm for arm in case.arms if any(fnmatchcase(arm, one) for one in patterns or ())]
        arms[slug] = set(arms_of(case, named) if patterns else case.arms)
    left = None if run.left is None and asked.settings.time_limit else run.left or ()
    own = {brief.stack for brief in measured}
    return Asked(arms, stacks, tuple(hardware), left, _part(folder, asked.settings.shard), own)


def _part(folder: Path, shard: str | None) -> set[str] | None:
    """The keys of a shard's cells; None where it is the whole selection, or the shard does not say."""
    try:
        return {key for _, _, key in shards.read(folder)["cells"]} if shard else None
    except ResultsError:
        return None
