"""Compare a verdict with its expectation, and decide which measurements are comparable. Pure.

An expectation applies to cells, releases and capabilities of the machine. Two measurements are
comparable if they have the same settings, on machines with the same capabilities: otherwise a
failure that a smaller shape does not trigger would count as fixed upstream. The stack and the day
may differ, because they are what a comparison is about.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from repro_matrix.config.expectations import Expectation
from repro_matrix.config.schema import Case
from repro_matrix.grading.nearest import Basis, inside, nearest_expectation
from repro_matrix.records.attempt import Settings
from repro_matrix.records.document import CellRecord
from repro_matrix.records.outcome import FAILING, NOTHING_STORED, Compared, Verdict
from repro_matrix.text import list_some

UNSTABLE = ("FLAKY", "INCONCLUSIVE")  # nothing is expected of these
UNSTORED = "documented to help; no expectation is stored"
PREDICTING = "cpu"  # its measurements predict those of any hardware that has no expectation


class Situation(NamedTuple):
    """A cell on a machine, with the releases of a stack.

    ``where`` contains the cell's axes, ``model/strategy[/flag=value...]``; ``hardware`` is its kind
    ("sm_80"); ``facts`` are the machine's capabilities. If one of them that a variant depends on
    differs, or is unknown, nothing is expected.
    """

    where: str
    versions: Mapping[str, str]
    hardware: str
    facts: Mapping[str, Any] = {}


def expected(case: Case, variant: str, here: Situation) -> Expectation | None:
    """Return the expectation of a variant of a cell, with this variant's verdict only; or None.

    The most specific of several expectations wins: one with a list of cells, then the one with more
    version bounds, then the later in the file.
    """
    best: tuple[tuple[int, int], Expectation] | None = None
    for cells, entry in _of_variant(case, variant, here):
        bounds = _bounds(entry.versions, here.versions)
        if bounds is not None and (best is None or (cells, bounds) >= best[0]):
            best = (cells, bounds), entry
    return best[1] if best else None


def _of_variant(case: Case, variant: str, here: Situation) -> Iterator[tuple[int, Expectation]]:
    """Yield the expectations of a variant on any release, with its verdict only.

    Each with 1 if the entry lists the cell, else 0.
    """
    cell, needed = _split(case, here.where), depends_on_capabilities(case, variant)
    for entry in case.expect:
        if variant not in entry.verdicts or here.hardware != entry.hardware:
            continue
        cells = _cell_rank(case, entry.cells, cell)
        if cells is not None and not capability_difference(needed, here.facts, entry.capabilities):
            ids = {variant: entry.failure_ids[variant]} if variant in entry.failure_ids else {}
            only = {"verdicts": {variant: entry.verdicts[variant]}, "failure_ids": ids}
            yield cells, entry.model_copy(update=only)


def basis(case: Case, variant: str, here: Situation) -> Basis | None:
    """Return the expectation with which a verdict is compared.

    That is the one of these releases on this hardware, else of the nearest releases, else of a CPU.
    A variant with a stack of its own depends on other releases too: it has no nearest ones.
    """
    own_stack = variant in case.variants and case.variants[variant].stack
    for kind in dict.fromkeys((here.hardware, PREDICTING)):
        there = here._replace(hardware=kind)
        same = expected(case, variant, there)
        entries = () if own_stack else (each for _, each in _of_variant(case, variant, there))
        if found := Basis((same,)) if same else nearest_expectation(entries, here.versions):
            return replace(found, on_cpu=kind != here.hardware)
    return None


def as_expected(name: str) -> str:
    """Return a verdict as an expectation writes it.

    Stored results of other stacks make NOT_REPRODUCED a FIXED_UPSTREAM.
    """
    return "NOT_REPRODUCED" if name == "FIXED_UPSTREAM" else name


def compare_verdict(
    verdict: Verdict, known: Basis | None, role: str = "probe", control: bool = False
) -> Compared:
    """Compare a verdict of a variant with what is known of it.

    Return ``no_expectation`` when that is nothing, when nothing was measured, and when other
    releases are known, and nothing stable was measured here; but then
    ``differs_from_documentation`` of a documented fix with an attempt that did not pass;
    ``possible`` when the nearest releases disagree and one of them agrees with it. But a control
    must train: another verdict is unexpected, unless all agree. A verdict of a failure must have
    one of the expected failure ids; where the file lists none, the verdict alone is compared. What
    differs from a prediction is news only, but for a documented fix that worked with the older
    releases.
    """
    if not verdict.measured:
        return "no_expectation"
    agreeing = [entry for entry in known.entries if _agrees(verdict, entry)] if known else []
    if known and len(agreeing) == len(known.entries):
        if known.on_cpu or not known.releases:
            return "matches_cpu" if known.on_cpu else "expected"
        return "predicted" if known.beyond else "interpolated"
    if control and verdict.name != "PASSED":
        return "unexpected"
    fails = role == "fix" and verdict.name in ("NOT_FIXED", "DIFFERENT_FAILURE")
    if known is None or (known.releases and verdict.name in UNSTABLE):
        documented = role == "fix" and verdict.fix_k < verdict.fix_n
        return "differs_from_documentation" if documented else "no_expectation"
    if agreeing:
        return "possible"
    if known.on_cpu:
        return "differs_from_cpu"
    worked = {"FIXED"} == set(known.verdicts[: known.older])
    return "differs_from_prediction" if known.beyond and not (worked and fails) else "unexpected"


def comparison(case: Case, variant: str, here: Situation, verdict: Verdict) -> dict[str, Any]:
    """Return how a verdict compares with its expectation, as a document stores it.

    With the expected verdict, and the place of its measurement if that is not here.
    """
    known = basis(case, variant, here)
    role = case.variants[variant].role if variant in case.variants else "probe"
    state = compare_verdict(verdict, known, role, case.kind == "control")
    known = None if state in NOTHING_STORED else known
    return {
        "expected": state,
        "expectation": known.verdicts[0] if known else None,
        "nearest": known.releases if known else (),
        "beyond": bool(known and known.beyond),
        "failure_note": (
            UNSTORED if state == "differs_from_documentation" else failure_note(verdict, known)
        ),
    }


def _agrees(verdict: Verdict, expectation: Expectation) -> bool:
    ((variant, wanted),) = expectation.verdicts.items()
    listed = expectation.failure_ids_of(variant)
    any_failure = listed is None or verdict.name not in FAILING
    same = any_failure or set(map(str, verdict.failure_ids)) <= set(listed or ())
    return same and as_expected(verdict.name) == as_expected(wanted)


def failure_note(verdict: Verdict, known: Basis | None) -> str:
    """Return the difference that verdicts of the same name hide.

    That is another failure than expected, or a failure that is not written down. The note also
    lists the nearest releases of the comparison.
    """
    if known is None:
        return ""
    sides = [f"{name} with {release}" for name, release in zip(known.verdicts, known.releases)]
    how = "predicted from" if known.beyond else "nearest measured releases:"
    notes = []
    if sides:
        where = ", on a CPU" if known.on_cpu else ""
        notes.append(f"{how} {list_some(list(dict.fromkeys(sides)))}{where}")
    differing = [entry for entry in known.entries if not _agrees(verdict, entry)]
    entry = (differing or known.entries)[0]
    if verdict.name in FAILING and verdict.name in entry.verdicts.values():
        (listed,) = map(entry.failure_ids_of, entry.verdicts)
        if not listed:
            notes.append("the expectation lists no failure")
        elif differing:
            here = ", ".join(map(str, verdict.failure_ids))
            notes.append(f"expected failure: {' or '.join(listed)}; this one: {here}")
    return "; ".join(notes)


def _cell_rank(case: Case, listed: list[str], cell: tuple[str, dict[str, str]]) -> int | None:
    """Return 1 if the list contains the cell, 0 if an empty list means all cells, else None.

    A cell with other ranks or sizes than its case's is not among all.
    """
    if not listed:
        return 0 if cell[1].keys() <= case.flags.keys() else None
    return 1 if cell in (_split(case, item) for item in listed) else None


def _split(case: Case, where: str) -> tuple[str, dict[str, str]]:
    """Split off what differs from the case's file; a flag at its default is the same cell."""
    axes, values = _assignments(where)
    defaults = {
        name: json.dumps(flag.default) for name, flag in case.flags.items() if name in values
    }
    return axes, {name: value for name, value in values.items() if value != defaults.get(name)}


@functools.lru_cache(maxsize=4096)
def _assignments(where: str) -> tuple[str, dict[str, str]]:
    axes, *assignments = re.split(r"/(?=\w+=)", where)
    return axes, dict(item.split("=", 1) for item in assignments)


def _bounds(ranges: Mapping[str, str], versions: Mapping[str, str]) -> int | None:
    """Return the number of version bounds if all versions are within them, else None."""
    counts = [inside(specifier, versions.get(package)) for package, specifier in ranges.items()]
    return None if None in counts else sum(count or 0 for count in counts)


# -- which measurements may be compared

_SCALARS = ("world_size", "tp_size", "steps", "seed", "device", "backend")


def settings_difference(one: Settings, other: Settings) -> str | None:
    """Return the first difference between two variants' settings; None where they may be compared.

    A flag or an option that only one of them has did not exist for the other, and was at its
    default there; of the model's configuration every key counts. Empty settings are comparable with
    all.
    """
    for (before, strict), (after, _) in (
        zip(_deciding(one), _deciding(other)) if one and other else ()
    ):
        for key in sorted(before.keys() | after.keys() if strict else before.keys() & after.keys()):
            if before.get(key) != after.get(key):
                return _differ(key, before.get(key), after.get(key))
    return None


def _deciding(settings: Settings) -> list[tuple[dict[str, Any], bool]]:
    """Return what must be the same, and whether a key counts that only one of two settings has."""
    model, strategy = settings.get("model", {}), settings.get("strategy", {})
    named = {
        "model": model.get("slug"),
        "scale": model.get("scale"),
        "weights": model.get("weights"),
    }
    return [
        (named, True),
        (model.get("config") or {}, True),
        (settings.get("flags", {}), False),
        ({"strategy": strategy.get("slug")}, False),
        (strategy.get("options") or {}, False),
        ({key: value for key, value in settings.items() if key in _SCALARS}, False),
    ]


def machine(document: CellRecord) -> dict[str, Any]:
    """Return what identifies the machine of a measurement, without what changes from day to day."""
    hardware = document["hardware"]
    identity = {key: hardware.get(key) for key in ("accelerator", "cpu", "cores", "driver")}
    return {**identity, "gpus": sorted(gpu["name"] for gpu in hardware["gpus"])}


# -- capabilities: a profile's name is too coarse. For example, some fixes need a CPU that computes
# fp16.


def recorded_capabilities(document: CellRecord) -> dict[str, str | bool]:
    """Return each capability that all ranks of the document's attempts recorded alike."""
    values: dict[str, set[str | bool]] = {}
    for variant in document["variants"].values():
        for attempt in variant["attempts"]:
            for record in (rank["record"] for rank in attempt["observation"]["ranks"]):
                for name, value in record["facts"].get("machine", {}).items() if record else ():
                    values.setdefault(name, set()).add(value)
    return {name: next(iter(each)) for name, each in sorted(values.items()) if len(each) == 1}


def depends_on_capabilities(case: Case, variant: str) -> list[str]:
    """Return the capabilities on which this variant's answer depends."""
    also = case.variants[variant].depends_on_capabilities if variant in case.variants else ()
    return list(dict.fromkeys([*case.depends_on_capabilities, *also]))


def capability_difference(
    wanted: Iterable[str], here: Mapping[str, Any], there: Mapping[str, Any]
) -> str | None:
    """Return the first capability that is not known to be the same on both sides, or None."""
    for fact in wanted:
        one, other = here.get(fact), there.get(fact)
        if one is None or one != other:
            return _differ(fact, *("unknown" if value is None else value for value in (one, other)))
    return None


def same_release(one: str, other: str) -> bool:
    """Return whether two versions are one release.

    A build (+cu121) that only one of them contains is ignored: metadata may omit it.
    """
    if "+" in one and "+" in other:
        return one == other
    return one.partition("+")[0] == other.partition("+")[0]


def _differ(what: str, one: Any, other: Any) -> str:
    return f"{what} {one} against {other}"
