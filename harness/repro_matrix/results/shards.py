"""The manifest of a shard (``shard=2/8``) in its results folder, and the checks of `repro merge`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from repro_matrix.errors import ResultsError
from repro_matrix.results.store import Document, Store, write_text

SUFFIX = ".manifest"


@dataclass(frozen=True)
class Manifest:
    """``selection``: the overrides that say what is measured. ``repeat``: case -> attempts of a variant. ``cells``:
    (hardware, stack, cell id). ``changed``: whether files differed from the commit. ``stacks``: their versions."""

    shard: int
    of: int
    selection: tuple[str, ...]
    repeat: Mapping[str, int]
    cells: tuple[tuple[str, str, str], ...]
    commit: str | None
    changed: bool
    stacks: Mapping[str, Mapping[str, str]]


def write(root: Path, manifest: Manifest) -> None:
    root.mkdir(parents=True, exist_ok=True)
    text = TypeAdapter(Manifest).dump_json(manifest, indent=1).decode()
    write_text(root / f"shard-{manifest.shard}-of-{manifest.of}{SUFFIX}", text + "\n")


def read(root: Path) -> Manifest:
    """Return the manifest of a results folder. Raises ResultsError: none, several, or it is damaged."""
    files = sorted(root.glob(f"shard-*{SUFFIX}")) if root.is_dir() else []
    if len(files) != 1:
        names = ", ".join(path.name for path in files) or "none"
        raise ResultsError(f"{root}: not the results of one shard: found {names}. Pass a folder for each shard.")
    try:
        return TypeAdapter(Manifest).validate_json(files[0].read_bytes())
    except (OSError, ValidationError) as error:
        raise ResultsError(f"{files[0]}: damaged: {error}") from None


def missing(manifests: Mapping[str, Manifest]) -> list[int]:
    """Return the numbers of the absent shards. ``manifests``: by the folder's name.

    Raises ResultsError where they are not shards of one run: another number of shards, selection, commit or stack; the
    same shard twice; a cell in two of them.
    """
    (first, one), *others = manifests.items()
    for name, other in others:
        for key in ("of", "selection", "commit", "changed"):
            _refuse_different(key, first, getattr(one, key), name, getattr(other, key))
        for stack in one.stacks.keys() & other.stacks.keys():
            before, after = one.stacks[stack], other.stacks[stack]
            for package in sorted(before.keys() | after.keys()):
                what = f"stack {stack}: {package}"
                _refuse_different(what, first, before.get(package), name, after.get(package))
    owners: dict[object, str] = {}
    for name, each in manifests.items():
        for item in (f"shard {each.shard}/{each.of}", *(f"cell {' '.join(cell)}" for cell in each.cells)):
            if item in owners:
                raise ResultsError(f"{item} is in two folders: {owners[item]} and {name}")
            owners[item] = name
    return sorted(set(range(1, one.of + 1)) - {each.shard for each in manifests.values()})


def _refuse_different(what: str, first: str, before: object, second: str, after: object) -> None:
    if before != after:
        raise ResultsError(f"not shards of one run: {what} is {before} in {first} and {after} in {second}")


def documents(root: Path, manifest: Manifest) -> tuple[dict[Path, Document], list[str]]:
    """Return the shard's complete documents by their path below the folder, and its cells that have none, in words.

    A document counts where it has the shard's commit and versions, and each variant that was not skipped has as many
    attempts as the selection requires: the folder may also hold what an earlier run left there.
    """
    found: dict[Path, Document] = {}
    lacking: dict[tuple[str, str, str], str] = dict.fromkeys(manifest.cells, "")
    for document in Store(root).documents():
        cell = (document["hardware"]["profile"], document["stack"]["name"], document["cell_id"])
        if cell not in lacking:
            continue
        lacking[cell] = _difference(document, manifest)
        if not lacking[cell]:
            del lacking[cell]
            found[Path(document["path"]).relative_to(root)] = document
    return found, [" ".join(cell) + (f" ({why})" if why else "") for cell, why in sorted(lacking.items())]


def _difference(document: Document, manifest: Manifest) -> str:
    """Return why a document is not what this shard measured; "" where it is."""
    made: Any = document["provenance"]
    if (made["git_commit"], made["git_dirty"]) != (manifest.commit, manifest.changed):
        changed = " with changed files" if made["git_dirty"] else ""
        return f"measured at another commit: {made['git_commit']}{changed}"
    versions = manifest.stacks.get(
        document["stack"]["name"], {}
    )  # of every package; a document's are the relevant ones
    if not versions or any(versions.get(name) != version for name, version in document["stack"]["versions"].items()):
        return "measured with other versions"
    variants = [variant for variant in document["variants"].values() if not variant["skipped"]]
    least = manifest.repeat.get(document["case"], 1)
    if not document["complete"] or any(len(variant["attempts"]) < least for variant in variants):
        return "not complete"
    return ""
