"""`make lies`: plant every lie, print the table, exit 1 when one is not caught. A word selects by name; ``--pure``
leaves out those that launch something."""

from __future__ import annotations

import argparse
import sys
import time

from rich.console import Console
from rich.table import Table

from lies import PURE
from lies.lie import Row, tried

SHOWN = 160  # characters of what was said


def main() -> int:
    parser = argparse.ArgumentParser(prog="make lies", description=__doc__)
    parser.add_argument("name", nargs="?", default="", help="only lies whose name contains this")
    parser.add_argument("--pure", action="store_true", help="only those that launch nothing")
    args = parser.parse_args()
    benches = [*PURE]
    if not args.pure:
        from lies.launched import LAUNCHED

        benches += LAUNCHED
    started = time.monotonic()
    rows: list[Row] = []
    for bench in benches:
        print(f"lies: {bench.name}: {len(bench.lies)}, {bench.how}", file=sys.stderr, flush=True)
        rows += tried(bench, args.name)
    table = Table(
        "lie", "point", "how it was tried", "what was said", "", title="What was planted, and what came of it"
    )
    for row in rows:
        result = "caught" if row.caught else f"NOT CAUGHT{f' (open: {row.lie.open})' if row.lie.open else ''}"
        said = " ".join(row.said.split())
        table.add_row(row.lie.name, row.lie.point, row.how, said[:SHOWN], result)
    Console(width=None if sys.stdout.isatty() else 220, markup=False, highlight=False).print(table)
    missed = [row for row in rows if not row.caught]
    print(f"{len(rows)} lies, {len(rows) - len(missed)} caught, {time.monotonic() - started:.0f} s")
    return 1 if missed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
