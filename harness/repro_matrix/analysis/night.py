"""A night: what each arm of each cell answered in one run, without its evidence. Pure.

A thousandth of the documents, and all that a later night is compared with: verdicts, how often what, what was met in
its own words. What is left out is time, memory and settings: two nights in brief differ in answers only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

from repro_matrix.analysis.brief import ArmBrief, Brief, latest
from repro_matrix.config.vocabulary import OutcomeName, VerdictName

SCHEMA = 2  # 1: a cell was said in a sentence, where, and not by its axes
_ARM = ("verdict", "kinds", "met", "text", "skipped", "expected")  # of an ArmBrief, in this order


class Evidence(NamedTuple):
    """``error_at``: arm -> file:line of its failure."""

    document: str
    error_at: Mapping[str, str | None]


@dataclass(frozen=True)
class Night:
    """``stacks``: name -> versions. ``cells``: "hardware stack key" -> case, axes, control and arms. ``code``: the
    exit code of its run, where that is known: 0 is green. ``evidence``: of these cells, while their documents are
    there; it is not kept with the night."""

    name: str
    started: float
    commit: str | None = None
    code: int | None = None
    stacks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    cells: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    evidence: Mapping[str, Evidence] = field(default_factory=dict, compare=False)

    @property
    def green(self) -> bool:
        return self.code == 0

    @property
    def cases(self) -> set[str]:
        return {str(cell["case"]) for cell in self.cells.values()}


def of_briefs(name: str, briefs: Iterable[Brief], code: int | None = None) -> Night:
    """Of each cell its newest measurement."""
    found = latest(briefs).values()
    cells = {
        f"{b.hardware} {b.stack} {b.key}": {
            "case": b.case, "axes": list(b.axes), "hardware": b.hardware, "stack": b.stack, "key": b.key,
            "control": b.control, "arms": {name: _told(arm) for name, arm in b.arms.items()},
        }
        for b in sorted(found, key=lambda b: (b.key, b.hardware, b.stack))
    }  # fmt: skip
    stacks = {b.stack: dict(b.versions) for b in found}
    commits = {b.commit for b in found}
    started = max((b.started for b in found), default=0.0)
    evidence = {
        f"{b.hardware} {b.stack} {b.key}": Evidence(b.path, {name: arm.error_at for name, arm in b.arms.items()})
        for b in found
    }
    return Night(name, started, commits.pop() if len(commits) == 1 else None, code, stacks, cells, evidence)


def _told(arm: ArmBrief) -> list[Any]:
    return [arm.verdict, dict(arm.kinds), list(arm.met), arm.text, arm.skipped, arm.expected]


def _wrong(told: Any) -> str:
    """Why this is nothing that an arm answered; "" where it is."""
    if not isinstance(told, list) or len(told) != len(_ARM):
        return "does not say what an arm says"
    verdict, kinds, met, text, skipped, expected = told
    if verdict is not None and verdict not in get_args(VerdictName):
        return f"verdict {verdict!r} is none"
    if not isinstance(kinds, Mapping) or kinds.keys() - set(get_args(OutcomeName)):
        return f"outcomes {kinds!r} are none"
    if any(not isinstance(count, int) or isinstance(count, bool) or count < 1 for count in kinds.values()):
        return f"outcomes {dict(kinds)}: are counted from 1 on"
    if not isinstance(met, list) or not all(isinstance(each, str) for each in met):
        return f"met {met!r} is no list of names"
    if not isinstance(text, str) or not all(each is None or isinstance(each, str) for each in (skipped, expected)):
        return "its words are no texts"
    return ""


def arm_of(told: list[Any]) -> ArmBrief:
    said = dict(zip(_ARM, told))
    return ArmBrief(
        said["verdict"], said["kinds"], said["met"], said["text"], (), (), (), said["skipped"], said["expected"]
    )


def briefs_of(night: Night) -> list[Brief]:
    """The night as ``repro_matrix.analysis`` compares it; of time and memory it says nothing."""
    return [
        Brief(
            cell["case"], cell["key"], tuple(cell["axes"]), cell["hardware"], cell["stack"],
            night.stacks.get(cell["stack"], {}), night.started, night.commit, cell["control"],
            {name: arm_of(told) for name, told in cell["arms"].items()},
        )
        for cell in night.cells.values()
    ]  # fmt: skip


def to_json(night: Night) -> dict[str, Any]:
    return {"schema": SCHEMA, **{key: value for key, value in vars(night).items() if key != "evidence"}}


def _first(said: Mapping[str, Any]) -> dict[str, Any]:
    """A night of schema 1 as one of today."""
    cells = {}
    for at, cell in said["cells"].items():
        kept = {key: value for key, value in cell.items() if key != "where"}
        words = cell["where"].removeprefix(f"case={cell['case']} ")
        cells[at] = {**kept, "axes": re.split(r" (?=[\w.~+-]+=)", words)}
    return {**said, "cells": cells}


def from_json(data: Mapping[str, Any]) -> Night:
    """Raises ValueError: not a night, or of a newer schema."""
    if not isinstance(data, Mapping) or not isinstance(data.get("schema"), int):
        raise ValueError("not a night")
    if data["schema"] > SCHEMA:
        raise ValueError(f"schema {data['schema']}: a newer repro-matrix wrote it; this one reads up to {SCHEMA}")
    try:
        said = {key: value for key, value in data.items() if key != "schema"}
        if "evidence" in said:
            raise ValueError("evidence: lies in a night's own folder, and nowhere else")
        made = Night(**(_first(said) if data["schema"] == 1 else said))
        for at, cell in made.cells.items():
            for name, told in cell["arms"].items():
                wrong = _wrong(told)
                if wrong:
                    raise ValueError(f"{at}, arm {name}: {wrong}")
            " ".join([cell["case"], *cell["axes"], cell["hardware"], cell["stack"], cell["key"]])
        if not math.isfinite(float(made.started)) or isinstance(made.code, bool) or not isinstance(made.code or 0, int):
            raise ValueError(f"started {made.started!r} or code {made.code!r}: no time, no exit code")
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a night: {type(error).__name__}: {error}") from None
    return made
