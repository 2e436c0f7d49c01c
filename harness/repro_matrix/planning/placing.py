"""cells x this machine's profiles -> where each cell is measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from repro_kit.settings import first

from repro_matrix.config.catalog import Catalogue
from repro_matrix.environment.profiles import Profile
from repro_matrix.planning.cells import Cell
from repro_matrix.planning.plan import wrong_hardware


@dataclass(frozen=True)
class Placed:
    """``elsewhere``: cells that are measured on another profile than the first, by the reason."""

    cells: list[Cell]
    elsewhere: Mapping[str, list[Cell]]


def place(catalogue: Catalogue, cells: Iterable[Cell], profiles: Sequence[Profile], auto: bool) -> Placed:
    """Each cell on the first profile that can show it (``auto``), else on every profile that was named."""
    placed: list[Cell] = []
    elsewhere: dict[str, list[Cell]] = {}
    for cell in cells:
        if not auto:
            placed += [replace(cell, hardware=profile.name) for profile in profiles]
            continue
        whys = [_why_not(catalogue, cell, profile) for profile in profiles]
        index = next((number for number, why in enumerate(whys) if why is None), len(profiles) - 1)
        at = replace(cell, hardware=profiles[index].name)
        placed.append(at)
        if index:
            elsewhere.setdefault(str(whys[0]), []).append(at)
    return Placed(placed, elsewhere)


def _why_not(catalogue: Catalogue, cell: Cell, profile: Profile) -> str | None:
    """Why the cell's first arm, without which the others prove nothing, cannot be shown on the profile."""
    case = catalogue.cases[cell.case]
    arm = next(iter(case.arms.values()))
    strategy = catalogue.strategies[arm.strategy or cell.strategy]
    ranks = arm.world_size or cell.ranks
    devices = 1 if profile.shared else first(arm.devices, case.launch.devices, ranks)
    wrong = wrong_hardware(case, {"devices": devices, "world_size": ranks}, strategy, profile)
    return wrong.reason if wrong else None
