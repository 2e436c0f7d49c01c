"""Resolve software stacks: the package versions that a cell runs with.

``resolve(text)`` returns a stack that can be run; spec.py lists what ``text`` can be. The other
functions are what
``repro stack`` and searches call: they return data and raise StackError.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from repro_matrix import paths
from repro_matrix.environment.stacks import build, integrity, spec
from repro_matrix.environment.stacks import lock as locks
from repro_matrix.environment.stacks.build import (
    Log,
    cached_stacks,
    defined_stacks,
    prune_stacks,
    quiet,
)
from repro_matrix.environment.stacks.spec import (
    Spec,
    Stack,
    StackError,
    canonical,
    existing,
    version_differences,
)

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = [
    "Stack",
    "StackError",
    "cached_stacks",
    "check_stack",
    "defined_stacks",
    "described",
    "make_lock",
    "prune_stacks",
    "resolve",
    "resolve_compatible",
    "version_differences",
    "with_release",
]


def resolve(text: str, *, say: Log = quiet) -> Stack:
    """Return the stack ``text``; build it if necessary.

    ``say`` receives a line about what takes time.

    A stack whose environment was changed since it was installed gets a key of its own. Raises
    StackError.
    """
    stack = integrity.with_changes(_resolve(spec.parse_stack(text), say))
    if stack.changed and not stack.path:  # for an overlay it was logged with its base
        say(f"note: {integrity.describe_changes(stack)}")
    return stack


def _resolve(requested: Spec, say: Log) -> Stack:
    text, swaps = requested.text, requested.swaps
    if requested.python:
        stack: Stack | None = existing(requested.base, requested.python)
        if stack and swaps:
            stack = build.overlay(text, stack, swaps, None, say)
        if stack is None:
            raise StackError(
                f"stack={text}: it needs another torch, which cannot be installed on top of an"
                " existing environment. Name a stack of conf/stack, or a requirements file with"
                " that release."
            )
        return stack
    definition = None if requested.file else spec.find_definition(requested.base)
    if requested.file:
        lock = locks.lock_file(requested.file)
    elif definition and definition.floating:
        lock = locks.lock_floating(definition)
    elif definition:
        lock = locks.stored_lock(definition)
    if swaps and not build.too_heavy(swaps):
        base = build.build(requested.base, lock, say)
        stack = build.overlay(text, base, swaps, definition, say)
        if stack:
            return stack
    if swaps and definition:
        lock = locks.lock_with_swaps(definition, swaps, lock)
    elif swaps:
        lock = locks.lock_file_with_swaps(Path(requested.base), lock, swaps)
    return build.build(text, lock, say)


def check_stack(text: str) -> None:
    """Raise StackError where ``text`` cannot name a stack, whatever is built or can be."""
    requested = spec.parse_stack(text)
    if not requested.python and not requested.file:
        spec.find_definition(requested.base)


def described(text: str) -> Stack | None:
    """Return a stack as its files describe it; nothing is resolved, downloaded or built.

    None if only resolving it shows its versions. Raises StackError.
    """
    requested = spec.parse_stack(text)
    if requested.file:
        versions: Mapping[str, str] = locks.pinned(requested.file)
    elif requested.python:
        versions = existing(requested.base, requested.python).versions
    else:
        definition = spec.find_definition(requested.base)
        if not locks.definition_lock_path(definition).exists():
            return None
        lock = locks.stored_lock(definition)
        versions = {**lock.pins, "python": lock.python}
    replaced = {
        canonical(swap.name): swap.url or str(swap.specifier).removeprefix("==")
        for swap in requested.swaps
    }
    return Stack(text, "", {**versions, **replaced}) if versions else None


def with_release(text: str, package: str, version: str) -> str:
    """Return a stack's specification with one more package replaced.

    ``version``: a release, or an address (``git+file:///clone@commit``).
    """
    requested, name = spec.parse_stack(text), canonical(package)
    others = [_as_text(swap) for swap in requested.swaps if canonical(swap.name) != name]
    replaced = f"{name} @ {version}" if "://" in version else f"{name}@{version}"
    return "+".join([requested.base, *sorted([*others, replaced])])


def _as_text(swap: Requirement) -> str:
    return str(swap) if swap.url else str(swap).replace("==", "@")


def resolve_compatible(text: str, fixed: Collection[str], *, say: Log = quiet) -> Stack:
    """Resolve ``text``; drop replacements that conflict, except those in ``fixed``.

    A release's companions (transformers' tokenizers) move with it. The stack's ``name`` shows what
    could be installed.
    """
    while True:
        try:
            return resolve(text, say=say)
        except StackError as error:
            requested, message = spec.parse_stack(text), canonical(str(error).partition("\n")[2])
            names = [canonical(swap.name) for swap in requested.swaps if not swap.url]
            loose = {
                name
                for name in names
                if name not in fixed and re.search(rf"\b{re.escape(name)}==", message)
            }
            if error.kind != "unavailable" or not loose:
                raise
            remaining = [
                _as_text(swap) for swap in requested.swaps if canonical(swap.name) not in loose
            ]
            text = "+".join([requested.base, *remaining])


def make_lock(name: str) -> Path:
    """Resolve a stack's definition anew and write its lock.

    Beside conf/stack, or into the cache if the stack floats.
    """
    requested = spec.parse_stack(name)
    if requested.file:
        path = locks.file_lock_path(requested.file)
        paths.write_text(path, locks.resolve_file(requested.file))
        return path
    definition = spec.find_definition(requested.base)
    if definition.slug == "current":
        raise StackError(f"stack {name} has no lock: it is the environment at {sys.executable}")
    path = locks.definition_lock_path(definition)
    if path.is_relative_to(paths.CONF) and not paths.CHECKOUT:
        raise StackError(
            f"stack {name} is shipped with repro-matrix: its lock is made in a checkout of that"
        )
    paths.write_text(path, locks.resolve_definition(definition))
    return path
