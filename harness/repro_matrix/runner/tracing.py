"""Keep the traces of attempts (launch/worker/tracer).

The trace of a user's script is kept with its result and compared later. Of a case whose check
failed, only the place is kept at which its training begins to differ from the single process.

A failed check is repeated with a trace if it is of a training's numbers and not expected: once for
each variant, in tiny models. An expected failure has been explained, and tracing it would slow
every run down.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro_matrix.config.schema import VARIANT, AdhocCase, Case
from repro_matrix.launch.attempt import TRACE, Attempt
from repro_matrix.launch.torchrun import WORKER
from repro_matrix.records.attempt import Observation
from repro_matrix.records.document import Document
from repro_matrix.records.outcome import CONFIRMED

if TYPE_CHECKING:
    from repro_matrix.traces.reader import Trace

TRACES = "traces"  # in a run's folder, and in the results folder of users' scripts
# The checks of a training's numbers (repros/repro_kit/reference_checks.py).
NUMBERS = frozenset({"steps", "loss", "gradient", "updates", "batches", "start"})
NOISE = 2  # runs with one unit of rounding noise: repros/repro_kit/reference.py


def variables(folder: Path, options: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a traced attempt.

    Code that torch.compile compiles would not call the hooks of modules.
    """
    return {
        TRACE: str(folder),
        "REPRO_WORKER": str(WORKER.parent),
        "TORCH_COMPILE_DISABLE": "1",
        **options,
    }


def keep(attempt: Attempt, observation: Observation, results: Path) -> None:
    """Keep what the attempt's trace shows, in the observation or beside the results."""
    folder = Path(attempt.trace[TRACE])
    if attempt.command is None:
        observation["place"] = locate_difference(folder)
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.is_dir():
        size = sum(path.stat().st_size for path in folder.iterdir())
        target = results / TRACES / attempt.id
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(folder, target)
        observation["trace"] = {"folder": f"{TRACES}/{attempt.id}", "bytes": size}


def stored_trace(document: Document, results: Path) -> Trace | None:
    """Return the trace of a user's script; None if it was skipped or not traced."""
    from repro_matrix.traces.reader import read_trace

    variant = document["variants"].get(VARIANT)
    made = variant["attempts"] if variant else []
    stored = made and made[0]["observation"].get("trace")
    return read_trace(results / stored["folder"]) if stored else None


def locate_difference(folder: Path) -> dict[str, Any]:
    """Return where the training differs from the reference that its first rank made, as JSON."""
    from repro_matrix.traces.comparison import locate  # numpy, which most runs do not need
    from repro_matrix.traces.reader import read_trace

    try:
        noise = [read_trace(folder, side=f"noise{number}") for number in range(1, NOISE + 1)]
        found = locate(read_trace(folder, side="trusted"), read_trace(folder), noise)
    except (OSError, ValueError) as error:
        return {"verdict": "inconclusive", "sentence": f"the trace cannot be read: {error}"}
    return {**found.to_json(), "sentence": found.sentence()}


def unexplained(document: Document, case: Case) -> dict[str, int]:
    """Return the variants to repeat with a trace, each with its first failed attempt."""
    if (
        isinstance(case, AdhocCase)
        or case.pass_criteria.kind != "training"
        or document["scale"] != "tiny"
    ):
        return {}
    compared = {
        name: verdict["expected"] in CONFIRMED for name, verdict in document["verdicts"].items()
    }
    found = {}
    for name, variant in document["variants"].items():
        made = variant["attempts"]
        failed = [index for index, each in enumerate(made) if _is_silent(each["outcome"])]
        known = compared.get(
            name, bool(compared) and all(compared.values())
        )  # unfixed has no verdict
        if failed and not known and not any("place" in each["observation"] for each in made):
            found[name] = failed[0]
    return found


def _is_silent(outcome: Mapping[str, Any]) -> bool:
    return outcome["outcome"] == "other_failure" and not NUMBERS.isdisjoint(outcome["failed"])
