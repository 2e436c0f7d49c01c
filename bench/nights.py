"""Count the false alarms of `repro nightly`: ``python -m bench.nights RESULTS...``.

RESULTS: runs of the same commit and stacks with many attempts, `repro matrix repeat=30`. Their
attempts are cut into nights of ``--attempts`` attempts of each variant, in the order in which they
ran, and each night is finished as `repro nightly` does it: graded from its evidence, compared with
the nights before it, and stored. Nothing changed between them, so that every change is a false
alarm. ``--shuffles``: the same nights again in this many random orders.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from repro_matrix.changes.history import make_run
from repro_matrix.changes.nightly import Night, finish_night
from repro_matrix.changes.regressions import compare_to_last_passing
from repro_matrix.changes.sides import Side
from repro_matrix.config import catalog
from repro_matrix.grading.regrade import regrade
from repro_matrix.records.document import Document
from repro_matrix.results.projection import rows_of
from repro_matrix.results.store import Store

from bench.machine import HERE, write

Json = dict[str, Any]


def cut(folder: Path, attempts: int) -> Iterator[Side]:
    """Yield the nights of a run's results, as far as every variant has attempts for them."""
    cases, documents = (
        catalog.load().cases,
        [each for each in Store(folder).documents() if _attempts(each)],
    )
    for night in range(min(map(_attempts, documents)) // attempts):
        part = slice(night * attempts, (night + 1) * attempts)
        cells: list[Any] = [
            {
                **each,
                "variants": {
                    name: {**one, "attempts": one["attempts"][part]}
                    for name, one in each["variants"].items()
                },
            }
            for each in documents
        ]
        graded = regrade(cells, cases)
        rows = [row for each in graded for row in rows_of(each, cases)]
        yield Side(
            f"{folder.name}-{night}", [replace(row, started=row.started + night) for row in rows]
        )


def _attempts(document: Document) -> int:
    """Return how many attempts every variant of a document has."""
    return min(
        len(each["attempts"]) for each in document["variants"].values() if not each["skipped"]
    )


def replay_nights(nights: Sequence[Side], folder: Path) -> Json:
    """Finish the nights one after the other; return their exit codes and the changes."""
    codes, changes, variants = Counter[int](), list[str](), set[tuple[str, ...]]()
    for number, side in enumerate(nights):
        run_id, today = f"{number:04}", datetime.now(timezone.utc).date()
        report = finish_night(Night(run_id, side, today), folder)
        codes[report.exit_code] += 1
        changes += [
            f"{run_id}: {c.row.cell_id} {c.variant}: {c.kind}"
            for each in report.changed.values()
            for one in each
            for c in one.changes
        ]
        changes += [f"{run_id}: {report.reason}"] if report.exit_code and not report.changed else []
        variants |= {(row.cell_id, row.stack.name, row.variant) for row in side.rows if row.kinds}
    return {
        "nights": len(nights),
        "variants": len(variants),
        "exit_codes": dict(codes),
        "changes": changes,
    }


def shuffled(nights: Sequence[Side], times: int) -> Json:
    """Compare the nights in random orders; return how many have a change."""
    chance, compared, changed = random.Random(1), 0, 0
    for _ in range(times):
        passing = []
        for side in chance.sample(nights, len(nights)):
            found = compare_to_last_passing(side.rows, passing)
            compared, changed = compared + len(found.references), changed + bool(found.changed)
            passing += [] if found.changed else [make_run(side.name, side.rows, 0)]
    return {"orders": times, "results_compared": compared, "nights_with_a_change": changed}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--attempts", type=int, default=1)
    parser.add_argument("--shuffles", type=int, default=20)
    parser.add_argument("--out", type=Path, default=HERE / "nights.json")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as name:
        nights = [side for each in arguments.results for side in cut(each, arguments.attempts)]
        found = replay_nights(nights, Path(name)) | shuffled(nights, arguments.shuffles)
    launchers = Counter(
        made["observation"]["attempt"]["launcher"]
        for each in arguments.results
        for document in Store(each).documents()
        for variant in document["variants"].values()
        for made in variant["attempts"]
    )
    found = {"attempts_a_night": arguments.attempts, "attempts": dict(launchers), **found}
    print(json.dumps(found, indent=1))
    old = (
        json.loads(arguments.out.read_text(encoding="utf-8"))["rows"]
        if arguments.out.exists()
        else []
    )
    write(arguments.out, rows=[*old, found])


if __name__ == "__main__":
    main()
