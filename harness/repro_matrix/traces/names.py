"""Modules and parameters that another release renamed: known by class, order, shape and initial value. Pure."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from repro_matrix.traces.alignment import Key, Step
from repro_matrix.traces.reader import Event


def renamed(trusted: Step, suspect: Step) -> dict[str, str]:
    """Return the names of the suspect's modules and parameters that are called differently on the trusted side."""
    theirs, ours = _modules(suspect), _modules(trusted)
    if not theirs or not ours:
        return {}
    names: dict[str, str] = {}
    free: dict[Hashable, list[str]] = {}
    listed, known = _parameters(trusted), _parameters(suspect)
    for name, content in listed.items():
        if name not in known:
            free.setdefault(content, []).append(name)
    for name, content in known.items():
        if name in listed or not free.get(content):
            continue
        same_leaf = [each for each in free[content] if _leaf(each) == _leaf(name)]
        match = (same_leaf or free[content])[0]
        free[content].remove(match)
        names[name] = match
        module, counterpart = _parent(name), _parent(match)
        while module not in ours and counterpart not in theirs and module in theirs and counterpart in ours:
            names.setdefault(module, counterpart)
            module, counterpart = _parent(module), _parent(counterpart)
    for module, kind in theirs.items():  # without parameters: by the module that they are in
        parent = names.get(_parent(module), _parent(module))
        if module in ours or module in names or parent not in ours:
            continue
        taken = set(names.values())
        free_here = [each for each in ours if _parent(each) == parent and each not in theirs and each not in taken]
        same = [each for each in free_here if _leaf(each) == _leaf(module)]
        same += [each for each in free_here if ours[each] == kind]
        if same:
            names[module] = same[0]
    return names


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _modules(step: Step) -> dict[str, str]:
    """Name -> class, without what FSDP2 puts before it."""
    models: list[Event] = step.trace.models
    pairs = [each for model in models for each in model["names"] if len(each) == 2]
    return {str(name): str(kind).removeprefix("FSDP") for name, kind in pairs}


def _parameters(step: Step) -> dict[str, Hashable]:
    """Name -> shape and initial value, to six digits; in order of registration."""
    found: dict[str, Hashable] = {}
    for name in step.parameters:
        key = Key("state", name)
        if key in step.events:
            rows = step.whole(key)
            scale = float(rows.norms[0]) or 1.0
            values = np.round(rows.values[0] / scale, 4) + 0.0 if np.isfinite(rows.values[0]).all() else ()
            found[name] = (rows.shape, f"{scale:.5g}", tuple(values))
    return found
