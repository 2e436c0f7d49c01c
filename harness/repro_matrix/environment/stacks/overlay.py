"""Some packages of a stack at other releases: laid over it in a folder of their own, in a second or two.

What has to move with them (transformers 4.40 wants newer tokenizers than 4.39) is found by asking the installer what it
would change in the base, and goes into the same folder. Packages that carry torch's own libraries are not laid over
another build of it: then ``layer`` says so by returning None, and a whole environment is built instead.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from repro_matrix.config.axes import Stack as Definition
from repro_matrix.environment.stacks import build, disk
from repro_matrix.environment.stacks.build import Say, quiet
from repro_matrix.environment.stacks.compiled import take_over
from repro_matrix.environment.stacks.errors import StackError
from repro_matrix.environment.stacks.installer import run_uv, uv_cache
from repro_matrix.environment.stacks.lock import index_env
from repro_matrix.environment.stacks.spec import replaced
from repro_matrix.environment.stacks.stack import HEAVY, Stack, canonical, short_hash

NEIGHBOURS = 2  # overlays whose compiled files are looked through; each takes some 0.03 s
_CHANGE = re.compile(r"^ ([+-]) ([A-Za-z0-9][\w.-]*)(?:==([^\s]+)| @ (\S+)|(?= \())", re.M)


def too_heavy(swaps: Sequence[Requirement]) -> bool:
    return any(HEAVY.match(canonical(swap.name)) for swap in swaps)


def layer(
    name: str, base: Stack, swaps: Sequence[Requirement], found: Definition | None = None, say: Say = quiet
) -> Stack | None:
    """``base`` with ``swaps`` laid over it. None: this cannot be laid over, build a whole environment."""
    if too_heavy(swaps):
        return None
    wanted = [str(swap) for swap in swaps]
    key = short_hash("overlay", base.key, *wanted)
    if not (build.stacks_dir() / key / "done.json").exists():
        moved = plan(name, base, swaps, found)
        if any(HEAVY.match(package) for package in moved):
            return None
        if not moved:
            return replace(base, name=name)
    else:
        moved = {}

    def lay(folder: Path) -> dict[str, Any]:
        changes = moved or plan(name, base, swaps, found)
        over = folder / f"env-{uuid.uuid4().hex[:8]}"
        over.mkdir()
        given = {canonical(swap.name): str(swap) for swap in swaps}
        exact = [given.get(package, f"{package}=={version}") for package, (_, version) in changes.items()]
        if exact:
            disk.check(f"stack {name}", disk.estimate(changes), {uv_cache(), folder})
            run_uv(
                f"stack {name}",
                ["pip", "install", "--python", base.python, "--target", str(over), "--no-deps", *exact],
                env=_env(found),
            )
            take_over(over, _neighbours(base.python, swaps))
            for file in sorted(over.glob("*.pth")):
                say(f"stack {name}: {file.name} is not run: what is laid over comes by PYTHONPATH (docs/stacks.md)")
        versions = {**base.versions, **build.installed(over)}
        return {"python": base.python, "overlay": str(over), "versions": versions,
                "moved": {package: list(change) for package, change in changes.items()}}  # fmt: skip

    done = build.once(name, key, lay, say)
    changes = {package: (change[0], change[1]) for package, change in done["moved"].items()}
    # Extensions take minutes to compile and depend on who brings them, not on transformers.
    compiled = base.compiled or base.key if "deepspeed" not in changes else key
    return Stack(name, base.python, done["versions"], (done["overlay"], *base.path), key, changes, compiled)


def _neighbours(python: str, swaps: Sequence[Requirement]) -> list[Path]:
    """The folders of other overlays for this interpreter that are likely to have compiled what will be in this one: of
    the releases next to it, below and above; where there are none, those used last."""
    found = []
    for marker in build.stacks_dir().glob("*/done.json"):
        done = build.read_marker(marker.parent)
        if done and done.get("overlay") and done["python"] == python:
            used = marker.parent / "used"
            found.append((used.stat().st_mtime if used.exists() else 0.0, Path(done["overlay"]), done["versions"]))
    found.sort(key=lambda each: each[0], reverse=True)
    near = []
    for swap in swaps:
        wanted = _release(str(swap.specifier).removeprefix("=="))
        others = [(_release(versions.get(canonical(swap.name), "")), folder) for _, folder, versions in found]
        below = [(release, folder) for release, folder in others if wanted and release and release <= wanted]
        above = [(release, folder) for release, folder in others if wanted and release and release > wanted]
        near += [folder for _, folder in (*sorted(below)[-1:], *sorted(above)[:1])]
    return list(dict.fromkeys([*near, *(folder for _, folder, _ in found)]))[:NEIGHBOURS]


def _release(version: str) -> Version | None:
    try:
        return Version(version)
    except InvalidVersion:  # a commit, or an address
        return None


def plan(name: str, base: Stack, swaps: Sequence[Requirement], found: Definition | None) -> dict[str, tuple[str, str]]:
    """What the installer would change in the base: package -> (its version in the base or "", the new version)."""
    what = f"stack {name}"
    ask = ["pip", "install", "--dry-run", "--python", base.python]
    if found is None:
        changes = _changes(run_uv(what, [*ask, *map(str, swaps)]))
    else:
        # The stack's own pins stay in force: what replaces a package has to live with the rest.
        other = replaced(found, tuple(swaps))
        limits = "\n".join(other.constraints)
        changes = _changes(run_uv(what, [*ask, *other.pins, "-c", "-"], env=_env(found), stdin=limits))
        if other.no_deps:
            changes |= _changes(run_uv(what, [*ask, "--no-deps", *other.no_deps], env=_env(found)))
    moved = {}
    for package, version in changes.items():
        before = base.versions.get(package, "")
        if before != version:
            moved[package] = (before, version)
    for swap in swaps:
        package = canonical(swap.name)
        if swap.url and package not in moved:
            raise StackError("build", f"{what}: the installer does not say what {swap} would change")
    return moved


def _changes(output: str) -> dict[str, str]:
    return {canonical(found[2]): found[3] or found[4] or "" for found in _CHANGE.finditer(output) if found[1] == "+"}


def _env(found: Definition | None) -> dict[str, str]:
    return index_env(found) if found else {}
