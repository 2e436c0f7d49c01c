"""What the variants of a case set, checked when the catalogue is loaded: a change that changes nothing is no variant.
Pure.

A mistyped option would otherwise be a variant that runs just as the broken one does, and is judged as if it were a fix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from repro_matrix.config.axes import Strategy
from repro_matrix.config.schema import Case, Variant
from repro_matrix.errors import ConfigError, unknown

# What a variant says about itself without changing how it runs.
WORDS = {"help", "requires", "invariants"}


def check_variants(case: Case, strategies: Mapping[str, Strategy], path: str, patched: bool = False) -> None:
    """Raises ConfigError: an option that no strategy of the case has, a value it does not take, or two equal variants.

    ``patched``: by the command line, which may well make the unfixed variant what a variant makes of it (the plan says
    so)."""
    _check_options(case.options, case.axes.strategy, strategies, f"{path}: options")
    for name, variant in case.variants.items():
        own = [variant.strategy] if variant.strategy else case.axes.strategy
        _check_options(variant.options, own, strategies, f"{path}: variants.{name}.options")
        inherited = {option: value for option, value in case.options.items() if option not in variant.options}
        if variant.strategy:  # what the case says for its own strategies may mean nothing to another
            taken = {
                option: value for option, value in inherited.items() if option in strategies[variant.strategy].options
            }
            _check_options(taken, own, strategies, f"{path}: variants.{name} inherits options")
    if patched:
        return
    seen: dict[str, str] = {}
    for name, variant in case.variants.items():
        key = json.dumps(changes(case, variant), sort_keys=True, default=str)
        if key in seen:
            raise ConfigError(f"{path}: variants.{name}: its settings are those of {seen[key]!r}: it changes nothing")
        seen[key] = name


def changes(case: Case, variant: Variant) -> dict[str, Any]:
    """What a variant sets that is not as the case has it anyway."""
    found = variant.model_dump(exclude=WORDS, exclude_defaults=True)
    flags = {name: value for name, value in variant.flags.items() if not _same(value, case.flags[name].default)}
    options = {name: value for name, value in variant.options.items() if not _same(value, case.options.get(name))}
    usual: dict[str, Any] = {"tp_size": case.launch.tp_size}  # a number of ranks is a change where the cell has others
    for axis in ("model", "strategy"):
        listed = getattr(case.axes, axis)
        usual[axis] = listed[0] if len(listed) == 1 else None
    usual["env"] = {name: value for name, value in variant.env.items() if case.launch.env.get(name) == value}
    rest = {key: value for key, value in found.items() if key not in ("flags", "options") and value != usual.get(key)}
    return {**rest, **({"flags": flags} if flags else {}), **({"options": options} if options else {})}


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def _check_options(options: Mapping[str, Any], names: list[str], strategies: Mapping[str, Strategy], path: str) -> None:
    for option, value in options.items():
        having = [strategies[name] for name in names if option in strategies[name].options]
        if not having:
            known = {known for name in names for known in strategies[name].options}
            raise unknown(f"option of {', '.join(dict.fromkeys(names))}", option, known, path)
        problems = [strategy.refuses(option, value) for strategy in having]
        if all(problems):
            raise ConfigError(f"{path}.{option}: {problems[0]}")
