"""Split a selection over several machines (``shard=2/8``). Pure.

Every machine computes the same shards independently of the others: from the selection and from durations that the
commit itself holds (the published baseline), never from what a machine has measured. The longest cell goes to the shard
that has least so far (Graham 1969), so that no shard is longer than the shortest by more than its longest cell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from repro_matrix.errors import ConfigError
from repro_matrix.planning.cells import Cell

Shard = tuple[int, int]  # its number, from 1, and how many there are


def parse(text: str | None) -> Shard | None:
    """``2/8`` -> (2, 8). Raises ConfigError."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", str(text))
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= count:
        raise ConfigError(f"shard={text}: not PART/PARTS. Write shard=2/8 (from 1/8 to 8/8).")
    return number, count


def select(cells: Sequence[Cell], shard: Shard, seconds: Mapping[Cell, float]) -> list[Cell]:
    """Return this shard's cells, in their order. Raises ConfigError where there are more shards than cells."""
    number, count = shard
    if count > len(cells):
        raise ConfigError(f"shard={number}/{count}: the selection has only {len(cells)} cells. Use fewer shards.")
    loads = [0.0] * count
    selected = set()
    for cell in sorted(cells, key=lambda cell: (-seconds[cell], cell.key, cell.stack, cell.hardware)):
        least = loads.index(min(loads))
        loads[least] += seconds[cell]
        if least == number - 1:
            selected.add(cell)
    return [cell for cell in cells if cell in selected]
