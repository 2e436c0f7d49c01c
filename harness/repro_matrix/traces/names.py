"""Recognize renamed modules and parameters by class, order, shape and initial value.

Pure: it reads no clock, file or network.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from repro_matrix.traces.alignment import Key, Step


def renamed(good: Step, bad: Step) -> dict[str, str]:
    """Return the good side's names for modules and parameters that the bad side renamed."""
    theirs = bad.trace.modules
    ours = good.trace.modules
    names: dict[str, str] = {}
    listed = _parameters(good)
    known = _parameters(bad)
    free = {name: content for name, content in listed.items() if name not in known}
    for name in (each for each in known if each not in listed):
        same = sorted(
            (each for each in free if free[each] == known[name]),
            key=lambda each: _leaf(each) != _leaf(name),
        )
        if same:
            names[name], module, counterpart = same[0], _parent(name), _parent(same[0])
            del free[same[0]]
            while (
                module not in ours
                and counterpart not in theirs
                and module in theirs
                and counterpart in ours
            ):
                names.setdefault(module, counterpart)
                module = _parent(module)
                counterpart = _parent(counterpart)
    for module, kind in theirs.items():  # without parameters: by the module that they are in
        parent = names.get(_parent(module), _parent(module))
        if module in ours or module in names or parent not in ours:
            continue
        taken = {*theirs, *names.values()}
        beside = [each for each in ours if _parent(each) == parent and each not in taken]
        same = [each for each in beside if _leaf(each) == _leaf(module)] or [
            b for b in beside if ours[b] == kind
        ]
        names |= {module: same[0]} if same else {}
    return names


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _parameters(step: Step) -> dict[str, Hashable]:
    """Name -> shape and initial value, to four digits; in order of registration."""
    found: dict[str, Hashable] = {}
    for name in step.parameters:
        key = Key("state", name)
        if key in step.events:
            rows = step.rows(key)
            scale = float(rows.norms[0]) or 1.0
            values = (
                np.round(rows.values[0] / scale, 4) + 0.0
                if np.isfinite(rows.values[0]).all()
                else ()
            )
            found[name] = (rows.shape, f"{scale:.5g}", tuple(values))
    return found
