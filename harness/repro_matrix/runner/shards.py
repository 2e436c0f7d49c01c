"""A run in several parts on several machines: ``shard=2/8``, and what `repro merge` needs to know of each. Pure but for
reading the baseline and writing the part's own file.

Every machine works out the same parts without asking the others: from the selection and from durations that the commit
itself holds (the published baseline), never from what a machine happens to have measured. The longest cell goes to the
part that has least so far (Graham 1969), so that no part is longer than the shortest by more than its longest cell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from repro_matrix.config import project
from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.selection import Selection
from repro_matrix.config.settings import RunSettings
from repro_matrix.errors import ConfigError, ResultsError
from repro_matrix.planning.cells import Cell, variants_of
from repro_matrix.results.store import Document, Store, document_of, write_text
from repro_matrix.runner.schedule import UNKNOWN_S, Recorded, recorded

# What may differ between the parts of one run: where the results go, and how a machine works.
OF_THE_MACHINE = ("shard", "results", "jobs", "keep", "launcher", "order", "min_cells")
KEYS = ("shard", "of", "selection", "repeat", "cells", "commit", "changed", "stacks")  # of a part's file
SUFFIX = ".manifest"  # of a part's file in its results folder


def of(text: str | None) -> tuple[int, int] | None:
    """``2/8`` -> (2, 8). Raises ConfigError."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", str(text))
    number, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= count:
        raise ConfigError(f"shard={text}: PART/PARTS, as shard=2/8 (from 1/8 to 8/8)")
    return number, count


def weights(catalogue: Catalogue, cells: Sequence[Cell], settings: RunSettings) -> dict[Cell, float]:
    """Seconds of each cell's attempts, as published."""
    return seconds_of(catalogue, cells, settings, published({c.case for c in cells}))


def published(cases: set[str]) -> Recorded:
    """What attempts of these cases took, as the repository itself and what is shipped say."""
    return recorded(document for folder in project.published() for document in Store(folder).documents(cases=cases))


def seconds_of(catalogue: Catalogue, cells: Iterable[Cell], settings: RunSettings, took: Recorded) -> dict[Cell, float]:
    found = {}
    for cell in cells:
        case = catalogue.cases[cell.case]
        variants = [took.get((cell.key, variant)) for variant in variants_of(case, settings.variants)]
        seconds = sum(variant.seconds if variant else UNKNOWN_S for variant in variants)
        found[cell] = seconds * (settings.repeat or case.repeat)
    return found


def part(cells: Sequence[Cell], shard: tuple[int, int], seconds: Mapping[Cell, float]) -> list[Cell]:
    """This part's cells, in their order. Raises ConfigError where there are more parts than cells."""
    number, count = shard
    if count > len(cells):
        raise ConfigError(f"shard={number}/{count}: the selection has only {len(cells)} cells")
    loads = [0.0] * count
    mine = set()
    for cell in sorted(cells, key=lambda cell: (-seconds[cell], cell.key, cell.stack, cell.hardware)):
        least = loads.index(min(loads))
        loads[least] += seconds[cell]
        if least == number - 1:
            mine.add(cell)
    return [cell for cell in cells if cell in mine]


def selection(line: Selection) -> list[str]:
    """Of a command line what says what is measured, and not where or how: as it was written, to be pasted."""
    return sorted(text for key, text in line.words if key not in OF_THE_MACHINE)


def manifest(
    shard: tuple[int, int], line: Selection, repeat: Mapping[str, int], cells: Iterable[Cell]
) -> dict[str, Any]:
    """What a part says of itself: which it is, of what, and its cells. ``repeat``: case -> attempts of a variant."""
    names = sorted([cell.hardware, cell.stack, cell.key] for cell in cells)
    return {
        "schema": 1, "shard": shard[0], "of": shard[1], "selection": selection(line), "repeat": dict(repeat),
        "cells": names,
    }  # fmt: skip


def write(root: Path, found: Mapping[str, Any], stacks: Mapping[str, Any], commit: tuple[str | None, bool]) -> None:
    """Leave a part's file in its results folder."""
    used = {name: dict(stacks[name].versions) for name in sorted({cell[1] for cell in found["cells"]} & stacks.keys())}
    written = {**found, "commit": commit[0], "changed": commit[1], "stacks": used}
    root.mkdir(parents=True, exist_ok=True)
    write_text(root / f"shard-{found['shard']}-of-{found['of']}{SUFFIX}", json.dumps(written, indent=1) + "\n")


def read(root: Path) -> dict[str, Any]:
    """The part whose results a folder holds. Raises ResultsError: none, several, or its file is damaged."""
    files = sorted(root.glob(f"shard-*{SUFFIX}")) if root.is_dir() else []
    if len(files) != 1:
        names = ", ".join(path.name for path in files)
        what = (
            f"holds {len(files)} shards ({names}): one folder each" if files else "holds no shard of a run (shard=2/8)"
        )
        raise ResultsError(f"{root}: {what}")
    try:
        found = json.loads(files[0].read_text(encoding="utf-8"))
        if found["schema"] != 1:
            raise ValueError(f"schema {found['schema']}: a newer repro-matrix wrote it")
        found["cells"] = [tuple(map(str, cell)) for cell in found["cells"]]
        found["shard"], found["of"] = int(found["shard"]), int(found["of"])
        if any(len(cell) != 3 for cell in found["cells"]):
            raise ValueError("a cell is no hardware, stack and key")
        found["repeat"] = {str(case): int(count) for case, count in found["repeat"].items()}
        return {key: found[key] for key in KEYS}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(f"{files[0]}: damaged: {type(error).__name__}: {error}") from None


def missing(parts: Mapping[str, Mapping[str, Any]]) -> list[int]:
    """The shards that are not there. ``parts``: by the folder's name. Pure.

    Raises ResultsError where they are not parts of one run: another number of parts, selection, commit or stack; the
    same shard twice; a cell in two of them.
    """
    (first, one), *others = parts.items()
    for name, other in others:
        for key, what in (
            ("of", "number of shards"), ("selection", "selection"), ("commit", "commit"), ("changed", "changed tree"),
        ):  # fmt: skip
            if one[key] != other[key]:
                told = f"{_shown(one[key])} in {first}, {_shown(other[key])} in {name}"
                raise ResultsError(f"not shards of one run: the {what} differs: {told}")
        for stack in one["stacks"].keys() & other["stacks"].keys():
            _same_stack(stack, (first, one["stacks"][stack]), (name, other["stacks"][stack]))
    seen: dict[int, str] = {}
    owner: dict[tuple[str, ...], str] = {}
    for name, each in parts.items():
        if each["shard"] in seen:
            raise ResultsError(f"shard {each['shard']}/{each['of']} is given twice: {seen[each['shard']]} and {name}")
        seen[each["shard"]] = name
        for cell in each["cells"]:
            if cell in owner:
                raise ResultsError(f"cell {' '.join(cell)} is in two shards: {owner[cell]} and {name}")
            owner[cell] = name
    return [number for number in range(1, one["of"] + 1) if number not in seen]


def _same_stack(stack: str, one: tuple[str, Mapping[str, str]], other: tuple[str, Mapping[str, str]]) -> None:
    (here, mine), (there, theirs) = one, other
    for package in sorted(mine.keys() | theirs.keys()):
        if mine.get(package) != theirs.get(package):
            have, has = mine.get(package, "none"), theirs.get(package, "none")
            told = f"{package} {have} in {here}, {has} in {there}"
            raise ResultsError(f"not shards of one run: stack {stack} differs: {told}")


def _shown(value: Any) -> str:
    return " ".join(value) or "(everything)" if isinstance(value, list) else str(value)


def documents(root: Path, part: Mapping[str, Any]) -> tuple[dict[Path, Document], list[str]]:
    """(path below the folder -> a part's complete documents, its cells that have none, in words).

    A document counts where it is of the part's commit and stack, and each variant that was not skipped has as many
    attempts as the selection asks for: what an earlier run left in the folder is not this one's.
    """
    wanted = set(part["cells"])
    found: dict[Path, Document] = {}
    why: dict[tuple[str, ...], str] = {}
    for path in sorted(root.rglob("*.json")):
        if "history" in path.relative_to(root).parts:
            continue
        try:
            document = document_of(path.read_text(encoding="utf-8"))
            at = (document["hardware"]["profile"], document["stack"]["name"], document["cell_id"])
            wrong = _not_of(document, part)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # what it should have been is named as missing
        if at in wanted and not wrong:
            found[path.relative_to(root)] = document
            wanted.discard(at)
        elif at in wanted:
            why[at] = f" ({wrong})"
    return found, [" ".join(cell) + why.get(cell, "") for cell in sorted(wanted)]


def _not_of(document: Document, part: Mapping[str, Any]) -> str:
    """Why a document is not what this part measured; "" where it is."""
    made = document["provenance"]
    if made["git_commit"] != part["commit"]:
        return f"measured at another commit: {made['git_commit']}"
    if made["git_dirty"] != part["changed"]:
        return f"measured on {'a changed' if made['git_dirty'] else 'an unchanged'} tree, and the shard was not"
    had = part["stacks"].get(document["stack"]["name"], {})  # every package, and a document's the relevant ones
    if not had or any(had.get(package) != version for package, version in document["stack"]["versions"].items()):
        return "measured with other versions"
    least = part["repeat"].get(document["case"], 1)
    variants = document["variants"].values()
    if not document["complete"] or any(
        not variant["skipped"] and len(variant["attempts"]) < least for variant in variants
    ):
        return "not complete"
    return ""
