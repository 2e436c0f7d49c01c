"""Software stacks: which package versions a cell runs with, and how they are installed.

``resolve(text)`` returns a stack that can be run; spec.py lists what ``text`` can be. The other functions are what
``repro stack`` and searches call: they return data and raise StackError.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from repro_matrix import paths
from repro_matrix.config.vocabulary import REPLACED
from repro_matrix.environment.stacks import build, integrity, spec
from repro_matrix.environment.stacks import lock as locks
from repro_matrix.environment.stacks.build import (
    RECENTLY_USED,
    CachedStack,
    DefinedStack,
    Log,
    cached_stacks,
    defined_stacks,
    prune,
    quiet,
)
from repro_matrix.environment.stacks.spec import Spec, Stack, StackError, canonical, differences, existing

__all__ = [
    "RECENTLY_USED", "CachedStack", "DefinedStack", "Stack", "StackError", "cached_stacks", "check", "defined_stacks",
    "differences", "is_existing", "make_lock", "prune", "resolve", "resolve_compatible", "with_release",
]  # fmt: skip


def resolve(text: str, *, conf: Path | None = None, say: Log = quiet) -> Stack:
    """Return the stack that ``text`` names; build it if it has to be. ``say`` receives a line about what takes time.

    A stack whose environment was changed since it was installed gets a key of its own. Raises StackError.
    """
    try:
        stack = integrity.with_changes(_resolve(spec.parse(text), conf, say))
    except StackError as error:
        if error.kind == "version":
            raise StackError("version", f"{error}{_suggestion(str(error))}") from None
        raise
    if stack.changed and not stack.path:  # for an overlay it was logged with its base
        say(f"note: {integrity.describe_changes(stack)}")
    return stack


def _resolve(requested: Spec, conf: Path | None, say: Log) -> Stack:
    if requested.file:
        path, lock = Path(requested.base), locks.lock_file(requested.file)
        return _from_lock(requested, lock, None, say) or build.build(
            requested.text, locks.lock_file_with_swaps(path, lock, requested.swaps), say
        )
    if requested.base == "current" or requested.python:
        return _overlay(requested, existing(requested.base, requested.python or sys.executable), say)
    definition = spec.find_definition(requested.base, conf)
    if definition.kind != "lock":
        base = "current" if definition.kind == "current" else f"python:{definition.python}"
        return _resolve(replace(requested, text=requested.text.replace(requested.base, base, 1), base=base), conf, say)
    if definition.floating:
        lock = locks.lock_floating(definition)
    else:
        lock = locks.committed(definition, spec.lock_path(definition.slug, conf))
    return _from_lock(requested, lock, definition, say) or build.build(
        requested.text, locks.lock_with_swaps(definition, requested.swaps, lock), say
    )


def _from_lock(requested: Spec, lock: locks.Lock, definition: spec.Definition | None, say: Log) -> Stack | None:
    """Return the locked stack, or an overlay on it; None: it needs a whole environment (another torch)."""
    if not requested.swaps:
        return build.build(requested.text, lock, say)
    if build.too_heavy(requested.swaps):
        return None
    return build.overlay(requested.text, build.build(requested.base, lock, say), requested.swaps, definition, say)


def _overlay(requested: Spec, base: Stack, say: Log) -> Stack:
    if not requested.swaps:
        return base
    stack = build.overlay(requested.text, base, requested.swaps, None, say)
    if stack is None:
        swaps = ", ".join(map(str, requested.swaps))
        raise StackError(
            "usage",
            f"stack={requested.text}: {swaps} needs another torch, which cannot be installed on top of an existing "
            "environment. Name a stack of conf/stack, or a requirements file with that release.",
        )
    return stack


def _suggestion(message: str) -> str:
    """Return the package that may be meant, or the releases near the one that does not exist."""
    misspelt = re.search(r"Because (\S+) was not found in the package registry", message)
    if misspelt:
        close = difflib.get_close_matches(misspelt[1], REPLACED, n=1)
        return f"\n  did you mean {close[0]!r}?" if close else ""
    missing = re.search(r"no version of ([A-Za-z0-9][\w.-]*)==([\w.+!]*\w)", message)
    if not missing:
        return ""
    from repro_matrix.environment.stacks import index  # asks the index: its library takes a while to import

    try:
        releases = index.releases(missing[1], yanked=True, pre=True)
        return f"\n  {missing[1]} has no release {missing[2]}; {index.nearest_releases(releases, missing[2])}"
    except StackError:
        return ""


def check(text: str) -> None:
    """Raise StackError where ``text`` cannot name a stack, whatever is built or can be."""
    requested = spec.parse(text)
    if requested.base != "current" and not requested.python and not requested.file:
        spec.find_definition(requested.base)


def is_existing(text: str) -> bool:
    """Return whether ``text`` names an existing environment, so that nothing has to be built for it."""
    requested = spec.parse(text)
    return requested.python is not None and not requested.swaps


def with_release(text: str, package: str, version: str) -> str:
    """Return the specification of a stack with one more package replaced, as a search names its probes."""
    requested, name = spec.parse(text), canonical(package)
    others = [swap for swap in requested.swaps if canonical(swap.name) != name]
    plain = [f"{swap.name}@{next(iter(swap.specifier)).version}" for swap in others if not swap.url]
    return "+".join(
        [requested.base, *sorted([*plain, *(str(swap) for swap in others if swap.url), f"{name}@{version}"])]
    )


def resolve_compatible(text: str, fixed: Collection[str], *, say: Log = quiet) -> Stack:
    """Resolve ``text``; where its replaced packages conflict, leave those that are not ``fixed`` to the installer.

    A release's companions (transformers' tokenizers) move with it. The stack's ``name`` shows what could be installed.
    """
    while True:
        try:
            return resolve(text, say=say)
        except StackError as error:
            requested, message = spec.parse(text), canonical(str(error).partition("\n")[2])
            names = [canonical(swap.name) for swap in requested.swaps if not swap.url]
            loose = {name for name in names if name not in fixed and re.search(rf"\b{re.escape(name)}==", message)}
            if not error.unavailable or not loose:
                raise
            remaining = [swap for swap in requested.swaps if canonical(swap.name) not in loose]
            swaps = (str(swap) if swap.url else str(swap).replace("==", "@") for swap in remaining)
            text = "+".join([requested.base, *swaps])


def make_lock(name: str, *, conf: Path | None = None) -> Path:
    """Resolve a stack's definition anew and write its lock: beside conf/stack, or into the cache where it floats."""
    requested = spec.parse(name)
    if requested.file:
        return locks.path_of_file_lock(requested.file, renew=True)
    definition = spec.find_definition(requested.base, conf)
    if definition.kind != "lock":
        python = definition.python or sys.executable
        raise StackError("usage", f"stack {name} has no lock: it is the environment at {python}")
    if definition.floating:
        return locks.renew_floating(definition)
    path = spec.lock_path(definition.slug, conf)
    if path.is_relative_to(paths.CONF) and not paths.CHECKOUT:
        raise StackError("usage", f"stack {name} is shipped with repro-matrix: its lock is made in a checkout of that")
    locks.write(path, locks.resolve_definition(definition).text)
    return path
