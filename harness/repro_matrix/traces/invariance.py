"""Explain why two configurations of one script need not compute the same, by design.

Pure: it reads no clock, file or network.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from repro_matrix.traces.alignment import Step
from repro_matrix.traces.comparison import steps_of
from repro_matrix.traces.location import Location
from repro_matrix.traces.pair import Pair
from repro_matrix.traces.reader import Trace

CLOSE = 1e-4  # weights that rounding makes different
SETTINGS = (
    "",
    "data",
    "initial weights",
    "loss weight",
    "optimizer setting",
    "stopped",
)  # no batch norm changes these


def by_design(found: Location, good: Trace, bad: Trace, noise: Sequence[Trace] = ()) -> str:
    """Return why a difference is no error of the script or its stack; empty if it is one."""
    module = found.place.partition(",")[0]
    split = any("TP" in wrapper for trace in (good, bad) for wrapper in trace.wrappers)
    if found.stage == "random draws" or (
        found.stage == "forward" and split and good.draws and bad.draws
    ):
        return (
            "it draws random numbers (dropout), which depend on ranks and micro-batches. Set the"
            " rates to 0"
        )
    if norm := _batch_norm(found, module, good, bad):
        return (
            f"batch norm ({norm}) computes over each rank's micro-batch. Use its eval mode, or"
            " another norm"
        )
    if found.stage == "stopped":
        text = found.relation.replace("the bad side", "it")
        text = text.replace("the good side", "the first one")
        return f"{text}; everything before agrees" if found.coverage.aligned else text
    if found.stage == "data" or (found.role == "step" and found.relation.startswith("no step;")):
        return _other_samples(found, good, bad, noise)
    if found.stage == "loss weight":
        return _own_averages(
            next(pair for pair, _ in steps_of(good, bad, noise) if pair.good.number == found.step)
        )
    return ""


def _batch_norm(found: Location, place: str, good: Trace, bad: Trace) -> str:
    """Return the batch norm that explains a difference.

    The sides divide the samples of the step into other micro-batches, and the norm is at the place
    or computes before it, in training mode.
    """
    if found.step is None or found.stage in SETTINGS:
        return ""
    batches = [
        sorted(batch.samples for batch in Step(trace, found.step).batches.values())
        for trace in (good, bad)
    ]
    if batches[0] == batches[1]:
        return ""
    modules = list(good.modules)
    parts = place.split(".")
    own = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    last = max((modules.index(name) for name in own if name in modules), default=len(modules))
    for at, (name, kind) in enumerate(good.modules.items()):
        beside = (
            name.rpartition(".")[0] == place.rpartition(".")[0]
        )  # modules need not be registered in their order
        before = found.stage != "forward" or found.step > 0 or at <= last or beside
        if "BatchNorm" in kind and (name in own or (before and _tracks(good, found.step, name))):
            return name
    return ""


def _tracks(trace: Trace, step: int, norm: str) -> bool:
    """Return True if a batch norm updated its statistics in the step, as in training mode only."""
    values: dict[str, set[bytes]] = {}
    for rank, event in trace.events(step):
        if (
            rank == 0
            and event["k"] == "buffer"
            and event["n"].startswith(f"{norm}.")
            and "rows" in event
        ):
            values.setdefault(event["n"], set()).add(event["rows"].tobytes())
    return any(len(each) > 1 for each in values.values())


def _other_samples(found: Location, good: Trace, bad: Trace, noise: Sequence[Trace]) -> str:
    """Return that the two need not train on the same samples.

    It is an error if one trains on some twice or has other labels.
    """
    advice = "Give what keeps the samples of a step the same, such as the batch size"
    numbers = [number for number in good.complete_steps if number in bad.complete_steps]
    sizes = [tuple(len(Step(trace, number).trained) for trace in (good, bad)) for number in numbers]
    if sizes and all(one != other for one, other in sizes):
        return f"their steps have {sizes[0][0]} and {sizes[0][1]} samples. {advice}"
    if found.stage != "data" or found.role == "labels" or _repeats(good, bad, found.step or 0):
        return ""
    beyond = found.beyond
    if (
        found.step == 0
        and beyond
        and beyond.verdict == "differs"
        and beyond.stage in ("initial weights", "forward")
    ):
        return by_design(beyond, good, bad, noise)
    return f"they train on other samples in step {found.step}. {advice}"


def _repeats(good: Trace, bad: Trace, number: int) -> bool:
    """Return True if one side trains again on earlier samples in the place of the other's."""
    sides = []
    for trace in (good, bad):
        before = {
            sample[:2]
            for step in trace.steps
            if step < number
            for sample in Step(trace, step).trained
        }
        sides.append((before, Step(trace, number).trained.keys()))
    for (before, ours), (_, theirs) in (sides, sides[::-1]):
        again = [sample[3] > 0 or sample[:2] in before for sample in ours - theirs]
        known = any(sample[3] > 0 or sample[:2] in before for sample in theirs - ours)
        if again and all(again) and not known:
            return True
    return False


def _own_averages(pair: Pair) -> str:
    """Return that each rank and micro-batch averages its own loss, if that explains the weights.

    The mean over n of N labels weighs each label N / n / K of what it weighs in the mean over all
    N, for K means. These weights are equal within each batch, and the mean of their reciprocals is
    1.
    """
    cells: dict[Hashable, list[float]] = {}
    for (sample, _), (scale, _, (ranks, micro)) in pair.weights.items():
        good = pair.good.samples.get(sample)  # type: ignore[call-overload]
        owners = good, (pair.other.group_of[ranks[0]], micro)
        cells.setdefault(owners, []).append(scale / pair.expected_weight)
    values = np.array([float(np.mean(each)) for each in cells.values()])
    off = CLOSE + float(np.median([rest for _, rest, _ in pair.weights.values()]))
    if (
        values.min() <= 0
        or np.ptp(values) < off
        or any(np.ptp(each) > 10 * off for each in cells.values())
    ):
        return ""
    one, other = (
        len({owners[side] for owners in cells}) == 1  # type: ignore[index]
        for side in (0, 1)
    )
    if (one or other) and abs(np.mean(1 / values if one else values) - 1) > off:
        return ""
    how = "averages" if one or other else "may average"
    advice = "" if one or other else ". To be sure, add one rank with one micro-batch"
    return (
        f"each rank or micro-batch {how} its own loss, and their numbers of labels differ{advice}"
    )
