"""What `repro gpu-proof` says at its end: a line for each step, and why the exit code is what it is. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from repro_matrix.results.exit_code import DIFFERS, TOO_LITTLE
from repro_matrix.text import counted

Json = Mapping[str, Any]


def of_step(found: Json) -> str:
    """What came of one step."""
    if "problem" in found:
        return f"PROBLEM: {found['problem']}"
    if "skipped" in found and "measured" not in found:
        return f"skipped: {'; '.join(map(str, found['skipped']))}"
    return ", ".join(_parts(found))


def _parts(found: Json) -> Iterator[str]:
    if "cards" in found:
        yield f"{counted(len(found['cards']), 'card')}; " + "; ".join(found["notes"] or ["nothing unusual"])
    if "measured" in found:
        yield f"{found['measured']} of {found['cells']} cells{', cut by the time' if found['cut'] else ''}"
        yield from (f"{name} {count}" for name, count in found["verdicts"].items())
        cold = found.get("started_cold") or {}
        yield from (f"{count} STARTED FROM COLD: {why}" for why, count in cold.items())
    if "compared" in found:
        yield f"{found['compared']} compared, {len(found['differ'])} differ"
    for attempt in found.get("known") or ():
        yield (
            f"{attempt['outcome']} ({attempt['reason']}) after {attempt['wall_s']:g} s, of {attempt['ranks']} ranks "
            f"{attempt['backtraces']} backtraces and {attempt['collectives']} lists of collectives"
        )
    if "most_mb" in found:
        yield f"peak {found['most_mb']:g} MiB of a rank on a card"
        worst = found.get("worst")
        yield (
            f"planned for {found['planned']} of {found['attempts']}, at worst {worst['off']:+.0%} ({worst['cell']} "
            f"{worst['arm']}: {worst['planned_mb']:g} planned, {worst['peak_mb']:g} measured)"
            if worst
            else f"NO PLAN to lay beside it{': ' + '; '.join(found['unplanned']) if found.get('unplanned') else ''}"
        )


def ending(code: int, steps: Mapping[str, Json]) -> str:
    """The exit code and what it is for."""
    whys = [f"{name}: {why}" for name, found in steps.items() for why in _whys(found)]
    return f"exit code {code}: {'; '.join(whys) or 'every step went to its end, nothing unexpected'}"


def _whys(found: Json) -> Iterator[str]:
    if "problem" in found:
        yield "PROBLEM"
    elif found.get("differ"):
        yield f"{len(found['differ'])} attempts come out otherwise from cold"
    elif found.get("exit_code") == DIFFERS:
        yield "arms differ from what is expected"
    elif found.get("cut"):
        yield "cut by the time (--minutes)"
    elif found.get("exit_code") == TOO_LITTLE:
        yield "less could be measured than was asked for, or nothing is expected of most of it"
