"""`make lies`: plant every lie and print the table; exit 1 when one is not caught, 3 when one could not be tried."""

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
        missed = "NOT CAUGHT" + (f" (open: {row.lie.open})" if row.lie.open else "")
        result = "caught" if row.caught else missed if row.tried else "not tried"
        said = " ".join(row.said.split())
        table.add_row(row.lie.name, row.lie.point, row.how, said[:SHOWN], result)
    Console(width=None if sys.stdout.isatty() else 220, markup=False, highlight=False).print(table)
    caught, untried = sum(row.caught for row in rows), sum(not row.tried for row in rows)
    took = time.monotonic() - started
    print(f"{len(rows)} lies, {caught} caught, {untried} not tried, {took:.0f} s")
    if caught + untried < len(rows):
        return 1
    return 3 if untried or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
