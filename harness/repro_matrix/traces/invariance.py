"""Say why two configurations of one script need not compute the same: what is not invariant by design. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from repro_matrix.traces.alignment import Step
from repro_matrix.traces.comparison import steps_of
from repro_matrix.traces.location import Location
from repro_matrix.traces.reader import Trace

CLOSE = 1e-4  # relative


def by_design(found: Location, good: Trace, bad: Trace, noise: Sequence[Trace] = ()) -> str:
    """Return why a difference between two configurations is no error of the script or its stack; empty where it is."""
    module = found.place.partition(",")[0]
    if found.stage == "random draws":
        return "it draws random numbers (dropout), which depend on ranks and micro-batches. Set the rates to 0"
    if found.stage in ("forward", "buffer") and _in_batch_norm(module, good):
        return f"batch norm ({module}) computes over each rank's micro-batch. Use its eval mode, or another norm"
    if found.stage == "stopped":
        return found.relation
    if found.stage == "data" or (found.role == "step" and found.relation.startswith("no step;")):
        return _other_samples(found, good, bad, noise)
    if found.stage == "loss weight" and _averages_by_itself(good, bad, noise, found.step):
        return "each rank or micro-batch averages its own loss, and they have different numbers of labels"
    return ""


def _in_batch_norm(place: str, trace: Trace) -> bool:
    parts = place.split(".")
    kinds = [trace.modules.get(".".join(parts[:end]), "") for end in range(1, len(parts) + 1)]
    return any("BatchNorm" in kind for kind in kinds)


def _other_samples(found: Location, good: Trace, bad: Trace, noise: Sequence[Trace]) -> str:
    """Return that the two need not train on the same samples, unless one trains on some twice or has other labels."""
    advice = "Give what keeps the samples of a step the same, such as the batch size"
    numbers = [number for number in good.complete_steps if number in bad.complete_steps]
    sizes = [tuple(len(Step(trace, number).trained) for trace in (good, bad)) for number in numbers]
    if sizes and all(one != other for one, other in sizes):
        return f"their steps have {sizes[0][0]} and {sizes[0][1]} samples. {advice}"
    if found.stage != "data" or found.role == "labels" or _repeats(good, bad, found.step or 0):
        return ""
    beyond = found.beyond
    if found.step == 0 and beyond and beyond.verdict == "differs" and beyond.stage in ("initial weights", "forward"):
        return by_design(beyond, good, bad, noise)
    return f"they train on other samples in step {found.step}. {advice}"


def _repeats(good: Trace, bad: Trace, number: int) -> bool:
    """Return whether one side trains again on samples of this or an earlier step in the place of the other's."""
    sides = []
    for trace in (good, bad):
        before = {sample[:2] for step in trace.steps if step < number for sample in Step(trace, step).trained}
        sides.append((before, Step(trace, number).trained.keys()))
    for (before, ours), (_, theirs) in (sides, sides[::-1]):
        again = [sample[3] > 0 or sample[:2] in before for sample in ours - theirs]
        known = any(sample[3] > 0 or sample[:2] in before for sample in theirs - ours)
        if again and all(again) and not known:
            return True
    return False


def _averages_by_itself(good: Trace, bad: Trace, noise: Sequence[Trace], number: int | None) -> bool:
    """Return whether the samples of each rank and micro-batch have one weight, and the reciprocals' mean is 1.

    The mean over n of N labels weighs each N / n / K, for K means: the reciprocals K n / N have the mean 1."""
    pair = next(pair for pair, _ in steps_of(good, bad, noise) if pair.good.number == number)
    weights: dict[Hashable, list[float]] = {}
    for scale, _, (ranks, micro) in pair.weights.values():
        weights.setdefault((pair.other.group_of[ranks[0]], micro), []).append(scale / pair.expected_weight)
    values = [np.array(each) for each in weights.values()]
    if len(values) < 2 or any(each.min() <= 0 or np.ptp(each) > 10 * CLOSE * each.max() for each in values):
        return False
    return bool(abs(np.mean([1 / each.mean() for each in values]) - 1) < 10 * CLOSE)
