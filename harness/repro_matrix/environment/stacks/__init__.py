"""Software stacks: which package versions a cell runs with, and how they come to be there.

``resolve(spec)`` gives a stack that can be run; see spec.py for what can be written. The rest of the functions here are
what ``repro stack`` does: they return data and raise StackError.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from packaging.requirements import Requirement

from repro_matrix.config.axes import Stack as Definition
from repro_matrix.config.packages import REPLACED
from repro_matrix.environment.stacks import build, files, overlay, spec
from repro_matrix.environment.stacks import lock as locks
from repro_matrix.environment.stacks.build import Say, quiet
from repro_matrix.environment.stacks.errors import StackError
from repro_matrix.environment.stacks.integrity import told, with_changes
from repro_matrix.environment.stacks.manage import NOT_DUE, Held, Listed, Pruned, prune, show, stacks
from repro_matrix.environment.stacks.stack import Stack, differences, existing
from repro_matrix.paths import CHECKOUT, CONF

__all__ = [
    "NOT_DUE", "Held", "Listed", "Pruned", "Stack", "StackError", "check", "differences", "make_lock", "near", "prune",
    "resolve", "show", "stacks", "swapped",
]  # fmt: skip


def resolve(text: str, *, conf: Path | None = None, say: Say = quiet) -> Stack:
    """The stack that ``text`` names, built when it has to be; another one where its environment was changed since.
    ``say`` is told what takes time."""
    try:
        stack = with_changes(_resolve(text, conf, say))
    except StackError as error:
        if error.kind == "version":
            raise StackError("version", f"{error}{_nearest(str(error))}") from None
        raise
    if stack.changed and not stack.path:  # of a layer's base it was said before
        say(f"note: {told(stack)}")
    return stack


def check(text: str) -> None:
    """Raise StackError where ``text`` cannot name a stack, whatever is built or can be."""
    wanted = spec.parse(text)
    if wanted.base != "current" and not wanted.python and not wanted.file:
        spec.definition(wanted.base)


def there(text: str) -> bool:
    """Whether ``text`` names an environment that is there already, so that nothing has to be built for it."""
    wanted = spec.parse(text)
    return wanted.python is not None and not wanted.swaps


def _nearest(said: str) -> str:
    """The package that may be meant, or the releases near the one that does not exist, where the index can be asked."""
    misspelt = re.search(r"Because (\S+) was not found in the package registry", said)
    if misspelt:
        near = difflib.get_close_matches(misspelt[1], REPLACED, n=1)
        return f"\n  did you mean {near[0]!r}?" if near else ""
    missing = re.search(r"no version of ([A-Za-z0-9][\w.-]*)==([\w.+!]*\w)", said)
    if not missing:
        return ""
    from repro_matrix.environment.stacks import (
        index as releases,  # asks the index: a library that takes a while to import
    )

    try:
        found = releases.releases(missing[1], yanked=True, pre=True)
        return f"\n  {missing[1]} has no release {missing[2]}; {releases.near(found, missing[2])}"
    except StackError:
        return ""


def _resolve(text: str, conf: Path | None, say: Say) -> Stack:
    wanted = spec.parse(text)
    if wanted.base == "current":
        base = existing(wanted.base, sys.executable)
        return _laid_over(wanted, base, say) if wanted.swaps else base
    if wanted.python:
        base = existing(wanted.base, wanted.python)
        return _laid_over(wanted, base, say) if wanted.swaps else base
    if wanted.file:
        lock = files.lock_of(wanted.file)
        return _built(wanted, lock, None, lambda: files.variant_of_file(Path(wanted.base), lock, wanted.swaps), say)

    found = spec.definition(wanted.base, conf)
    if found.kind == "current":
        return _resolve(text.replace(wanted.base, "current", 1), conf, say)
    if found.kind == "python":
        return _resolve(text.replace(wanted.base, f"python:{found.python}", 1), conf, say)
    lock = files.floating(found) if found.floating else locks.committed(found, spec.lock_path(found.slug, conf))
    return _built(wanted, lock, found, lambda: files.variant(found, wanted.swaps, lock), say)


def _built(
    wanted: spec.Spec, lock: locks.Lock, found: Definition | None, variant: Callable[[], locks.Lock], say: Say
) -> Stack:
    """From a lock: as it is, with a layer over it, or (another torch) as a whole environment of its own."""
    if not wanted.swaps:
        return build.make(wanted.text, lock, say)
    laid = None
    if not overlay.too_heavy(wanted.swaps):
        laid = overlay.layer(wanted.text, build.make(wanted.base, lock, say), wanted.swaps, found, say)
    return laid or build.make(wanted.text, variant(), say)


def _laid_over(wanted: spec.Spec, base: Stack, say: Say) -> Stack:
    laid = overlay.layer(wanted.text, base, wanted.swaps, None, say)
    if laid is None:
        swaps = ", ".join(map(str, wanted.swaps))
        raise StackError(
            "usage",
            f"stack={wanted.text}: {swaps} brings another torch, which cannot be laid over an environment that is "
            "already there; name a stack of conf/stack, or a requirements file with that release",
        )
    return laid


def swapped(text: str, package: str, version: str) -> str:
    """The specification of a stack with one more package replaced: how a search names its probes."""
    wanted = spec.parse(text)
    name = spec.canonical(package)
    kept = [f"{swap.name}@{next(iter(swap.specifier)).version}" for swap in wanted.swaps if _plain(swap, name)]
    kept += [str(swap) for swap in wanted.swaps if swap.url and spec.canonical(swap.name) != name]
    return "+".join([wanted.base, *sorted([*kept, f"{name}@{version}"])])


def near(text: str, held: Collection[str], *, say: Say = quiet) -> Stack:
    """As ``resolve``. Where what is replaced contradicts itself, replaced packages that are not ``held`` are left to
    the installer, as it names them: a release's companions (transformers' tokenizers) move with it. ``name`` of the
    stack says what could be had."""
    while True:
        try:
            return resolve(text, say=say)
        except StackError as error:
            names = [spec.canonical(swap.name) for swap in spec.parse(text).swaps if not swap.url]
            said = spec.canonical(str(error).partition("\n")[2])
            loose = [name for name in names if name not in held and re.search(rf"\b{re.escape(name)}==", said)]
            if not error.unavailable or not loose:
                raise
            text = _without(text, loose)


def _without(text: str, names: Collection[str]) -> str:
    wanted = spec.parse(text)
    kept = [swap for swap in wanted.swaps if spec.canonical(swap.name) not in names]
    return "+".join([wanted.base, *(str(swap).replace("==", "@") if not swap.url else str(swap) for swap in kept)])


def _plain(swap: Requirement, name: str) -> bool:
    return not swap.url and spec.canonical(swap.name) != name


def make_lock(name: str, *, conf: Path | None = None) -> Path:
    """Resolve a stack's definition anew and write its lock: beside conf/stack, or into the cache where it floats."""
    wanted = spec.parse(name)
    if wanted.file:
        return files.renew(wanted.file)
    found = spec.definition(wanted.base, conf)
    if found.kind != "lock":
        raise StackError(
            "usage", f"stack {name} has no lock: it is the environment at {found.python or sys.executable}"
        )
    if found.floating:
        return files.renew_floating(found)
    path = spec.lock_path(found.slug, conf)
    if path.is_relative_to(CONF) and not CHECKOUT:
        raise StackError("usage", f"stack {name} is shipped with repro-matrix: its lock is made in a checkout of that")
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, locks.make(found).text)
    return path
