"""Compare two trainings step by step, stage by stage in causal order, until something is off.

Pure. If the reduced gradients agree, local gradients and loss weights are right however they were
divided. A module whose output agrees is right however it computes inside. Nothing agrees if too
little of it was compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from repro_matrix.text import counted, list_ranks
from repro_matrix.traces.alignment import ACTIVATIONS, ROOT, Owner, Sample, Step, replaced_models
from repro_matrix.traces.coverage import Total
from repro_matrix.traces.location import Coverage, Location
from repro_matrix.traces.names import renamed
from repro_matrix.traces.pair import ROLES, STAGES, Difference, Pair
from repro_matrix.traces.reader import Trace
from repro_matrix.traces.relations import affected, describe_relation, proportion
from repro_matrix.traces.settings import different_setting

# Kinds of events after the backward pass.
LATE = ("rgrad", "clip", "ograd", "param", "buffer after", "saved")
OPTIMIZER = "the optimizer"  # the place of a step that was not made
ALSO = 20  # other places that are listed
# A difference in the first forward pass that rounding never causes; in low precision.
ANOTHER_RUN = (0.02, 0.5)
# The rest of a difference in the output of a module that computes the same in another way.
ABSORBED = 0.01
MORE_THAN_CLIPPING = 4  # times the clipping's difference: that of a gradient that was changed
# Stages that can be compared although the data differ.
ON_SHARED = ("initial weights", "buffer", "forward", "backward")


def locate(good: Trace, bad: Trace, noise: Sequence[Trace] = ()) -> Location:
    """Return the first event of the bad side outside the tolerance that the noise runs give."""
    for side, trace in (("the good side", good), ("the bad side", bad)):
        if not trace.ranks:
            return Location("inconclusive", reason=f"{side} left no trace in {trace.folder.name}")
        if not trace.steps:
            return Location(
                "inconclusive",
                stage="stopped",
                reason=f"{side} ended before its first forward pass",
            )
    total = Total(good, bad, noise)
    for pair, runs in steps_of(good, bad, noise):
        found = _unlike_runs(runs) or _data(pair, total) or _first(pair)
        agreed = total.found.aligned
        last = total.last
        total.add(pair)
        if found:
            last = found.last_agreeing or last
            return replace(
                found, agreed=agreed + found.agreed, last_agreeing=last, coverage=total.coverage()
            )
    reason = total.too_little()
    found = _stopped(good, bad) or (
        Location("inconclusive", reason=reason)
        if reason
        else Location("agrees", largest=total.largest)
    )
    return replace(
        found, agreed=total.found.aligned, last_agreeing=total.last, coverage=total.coverage()
    )


def grid(good: Trace, bad: Trace, noise: Sequence[Trace] = ()) -> dict[str, Any]:
    """Return the largest difference of each module in each step, in units of its tolerance.

    As ``{"steps": [0, ...], "rows": [{"module": name, "cells": [number or None, ...]}, ...]}``;
    modules in the order of the good side.
    """
    steps: list[int] = []
    cells: dict[str, dict[int, float]] = {}
    for pair, _ in steps_of(good, bad, noise):
        steps.append(pair.good.number)
        wrong = set(_wrong(pair))
        for each in pair.differences:
            if each.missing or (each.wrong and each not in wrong):  # the answer passes it over
                continue
            name = (
                each.key.name if each.key.kind in ACTIVATIONS else each.key.name.rpartition(".")[0]
            )
            row = cells.setdefault(
                each.stage if each.stage in ("loss weight", "clipping") else name, {}
            )
            row[steps[-1]] = max(row.get(steps[-1], 0.0), min(each.size / each.tolerance, 1e9))
    order = {name: place for place, name in enumerate(good.modules)}
    modules = sorted(cells, key=lambda name: order.get(name, len(order)))
    return {
        "steps": steps,
        "rows": [{"module": m, "cells": [cells[m].get(step) for step in steps]} for m in modules],
    }


def steps_of(good: Trace, bad: Trace, noise: Sequence[Trace]) -> Iterator[tuple[Pair, list[Pair]]]:
    """Yield each step that both sides have, and the same step of the runs with noise."""
    names: dict[str, str] = {}
    shown: frozenset[str] = frozenset()
    for number in sorted({*good.steps} & {*bad.steps}):
        main = Step(good, number)
        other = Step(bad, number, names)
        if not names and (names := renamed(main, other)):
            other = Step(bad, number, names)
        if roots := replaced_models(main, other):
            other = Step(bad, number, names, roots)
        pair = Pair(main, other, shown)
        runs = [Pair(main, Step(run, number), shown) for run in noise if number in run.steps]
        pair.judge(runs)
        yield pair, runs
        shown |= other.kinds


def _unlike_runs(runs: Sequence[Pair]) -> Location | None:
    """Two runs of the good side that are not one training with other rounding give no tolerance."""
    for pair in runs:
        reason = ""
        if set(pair.good.samples) != set(pair.other.samples):
            reason = "data on each run: two runs of the good side saw other samples"
        for stage in ("initial weights", "forward"):
            sizes = [each for each in pair.differences if each.stage == stage]
            # Over all rows: an output that is nearly zero for one sample has a large rounding error
            # there.
            unlike = [each for each in sizes if ANOTHER_RUN[pair.low] < each.overall < np.inf]
            if len(unlike) > len(sizes) / 10 and not reason:
                reason = (
                    "random draws on each run: two runs of the good side differ by"
                    f" {unlike[0].overall:.2g}"
                )
                reason += f" in the {stage} of {unlike[0].name}"
        if reason:
            reason = f"other {reason}. Set all seeds (PYTHONHASHSEED, too: the order of sets)"
            reason += ", and let no run read files that an earlier one wrote."
            step = pair.good.number
            return Location("inconclusive", stage="random draws", step=step, reason=reason)
    return None


def _data(pair: Pair, total: Total) -> Location | None:
    """Compare which samples each side saw, and their labels."""
    good = pair.good.trained
    bad = pair.other.trained
    labels = (pair.good.labels, pair.other.labels)
    missing = [each for each in good if each not in bad]
    # A part of the model that is called by itself sees the samples of the rest once more.
    models, seen_ids = {each[0] for each in good}, {each[1:] for each in good}
    parts_again = {each for each in bad if each[0] not in models and each[1:] in seen_ids}
    extra = [each for each in bad if each not in good and each not in parts_again]
    relabelled = [
        s
        for s in bad
        if s in good and labels[0][s] and labels[1][s] and labels[0][s] != labels[1][s]
    ]
    if not extra and not relabelled and (not missing or pair.other.stopped or pair.good.stopped):
        return None
    ranks, micro = affected(pair.other, [bad[each] for each in extra or relabelled])
    found = Location("differs", stage="data", step=pair.good.number, ranks=ranks, micro=micro)
    trace = pair.good.trace
    number = pair.good.number + 1
    following = (
        {sample[:2] for sample in Step(trace, number).trained} if number in trace.steps else set()
    )
    if extra and not missing and {sample[:2] for sample in extra} <= following:
        relation = "no step; the next samples of the good side are in the same step"
        return replace(
            found, stage="update", micro=(), place=OPTIMIZER, role="step", relation=relation
        )
    seen = sum(sample[:2] in total.samples for sample in extra)
    parts = (
        [f"{len(extra)} of {counted(len(bad), 'sample')} are not in the good side's step"]
        if extra
        else []
    )
    parts += _taken_from(pair.other, extra)
    parts += [f"{seen} of them are from an earlier step"] if seen else []
    parts += [f"{len(missing)} of the good side's {len(good)} are missing"] if missing else []
    parts += (
        [f"{len(relabelled)} of {counted(len(bad), 'sample')} have other labels"]
        if relabelled
        else []
    )
    ratios = [each.size / each.tolerance for each in pair.differences if each.stage in ON_SHARED]
    agrees = Location(
        "agrees", coverage=Coverage(aligned=len(ratios), steps=1), largest=max(ratios, default=0.0)
    )
    role = "samples" if extra or missing else "labels"
    beyond = _first(pair, ON_SHARED) or agrees
    return replace(found, role=role, relation=", ".join(parts), beyond=beyond)


def _taken_from(step: Step, extra: Sequence[Sample]) -> list[str]:
    """List the ranks that train on other ranks' samples, if all of their extra samples are such."""
    # Ranks -> whose samples they have.
    taken: dict[tuple[int, ...], set[tuple[int, ...] | None]] = {}
    first = {sample[:3]: ranks for sample, (ranks, _) in step.trained.items() if not sample[3]}
    for sample in extra:
        ranks = step.trained[sample][0]
        owner = first[sample[:3]] if sample[3] else None
        taken.setdefault(ranks, set()).add(owner if owner != ranks else None)
    found: dict[tuple[int, ...], list[int]] = {}
    for ranks, owners in taken.items():
        if None not in owners:
            whose = tuple(sorted({rank for owner in owners for rank in owner or ()}))
            found.setdefault(whose, []).extend(ranks)
    return [
        f"{list_ranks(ranks)} train{'s' if len(ranks) == 1 else ''} on {list_ranks(whose)}'s"
        " samples"
        for whose, ranks in found.items()
    ]


def _first(pair: Pair, stages: Sequence[str] = ()) -> Location | None:
    """Return the first difference of a step, of these stages if any are given."""
    wrong = [each for each in _wrong(pair) if not stages or each.stage in stages]
    first = wrong[0] if wrong else None
    before = pair.differences[: pair.differences.index(first)] if first else pair.differences
    right = [each for each in before if not each.wrong]
    found = Location("differs", step=pair.good.number, agreed=len(right))
    if first is None or first.stage in ("update", "saved") or first.key.kind == "buffer after":
        setting = different_setting(pair.good, pair.other)
        if setting:
            place, text, ranks = setting
            return replace(
                found,
                stage="optimizer setting",
                place=place,
                role="setting",
                relation=text,
                ranks=ranks,
            )
    if first is None:
        return None
    same = [each for each in wrong if each.stage == first.stage]
    relation, sources = describe_relation(pair, same)
    ranks, micro = affected(pair.other, sources)
    last = [each for each in right if each.stage == first.stage] or right
    role = ROLES.get(first.key.kind, "gradient")
    stage = first.stage
    if stage == "initial weights" and "param" in pair.shown:
        stage = "update"
    if stage == "forward" and _draws_differ(pair, sources):
        stage = "random draws"
        relation = relation or "both sides draw random numbers here, and not the same ones"
    found = replace(
        found,
        stage=stage,
        ranks=ranks,
        micro=micro,
        place=first.name,
        role=role,
        relation=relation,
        last_agreeing=last[-1].place if last else "",
    )
    if first.stage == "update" and pair.no_step:
        return replace(found, place=OPTIMIZER, role="step")
    if np.isfinite(first.size):
        off = first.sizes > first.tolerance
        found = replace(found, size=first.size, factor=proportion(first.good[off], first.bad[off]))
    return replace(
        found,
        tolerance=first.tolerance,
        rounding=first.rounding,
        also=tuple(dict.fromkeys(each.place for each in same[1:]))[:ALSO],
    )


def _wrong(pair: Pair) -> list[Difference]:
    """Return what is wrong, in causal order."""
    shares: dict[str, float] = {}  # of each stage that is right
    for stage in STAGES:
        wrong = [each.wrong for each in pair.differences if each.stage == stage]
        shares |= {stage: 1 - sum(wrong) / len(wrong)} if wrong else {}
    received = shares.get("gradient before the optimizer", 0.0)
    harmless = {
        "loss weight": shares.get("reduction", received) > 0.5,
        "local gradient": shares.get("reduction") == 1,
        "reduction": (received == 1 and shares.get("clipping", 1) == 1) or pair.reduced_later,
        "clipping": received == 1 or bool(pair.no_step),
        "gradient before the optimizer": bool(pair.no_step),
    }
    inner = {*_absorbed(pair), *_follow_from_an_edit(pair)}
    every = [
        each
        for each in pair.differences
        if each.wrong
        and not harmless.get(each.stage)
        and each not in inner
        and (not each.missing or _confirmed(pair, each))
    ]
    # A parameter that the optimizer does not have comes first: the rest may be reduced and clipped
    # without it.
    first = {each for each in every if each.stage == "update" and pair.left_out(each.key.name)}
    return sorted(every, key=lambda each: (each.key.kind in LATE) * (1 if each in first else 2))


def _absorbed(pair: Pair) -> list[Difference]:
    """Return differences inside of modules whose output agrees: another way to compute the same."""
    outputs: dict[str, list[Difference]] = {}
    for each in pair.differences:
        if each.key.kind == "fwd":
            outputs.setdefault(each.key.name, []).append(each)
    found: list[Difference] = []
    for each in pair.differences:
        if not each.wrong or each.stage != "forward":
            continue
        of_model = ROOT.match(each.key.name)  # None: of the first one
        root = of_model.group() if of_model else ""
        name = each.key.name[len(root) :]
        inside = name.split(".")[: None if each.key.kind == "in" else -1] if name else []
        around = [
            outputs.get(root + ".".join(inside[:depth]), []) for depth in range(len(inside) + 1)
        ]
        if any(
            parts and all(not part.wrong and part.size <= ABSORBED * each.size for part in parts)
            for parts in around
        ):
            found.append(each)
    keys = {each.key[1:] for each in found if each.key.kind == "fwd"}
    return [
        *found,
        *(each for each in pair.differences if each.stage == "backward" and each.key[1:] in keys),
    ]


def _follow_from_an_edit(pair: Pair) -> list[Difference]:
    """Return what follows from a gradient that was changed before the clipping.

    Such a gradient is further off than the clipping; the norm and other gradients follow from it.
    """
    clipping = [each for each in pair.differences if each.stage == "clipping" and each.wrong]
    received = [
        each
        for each in pair.differences
        if each.stage == "gradient before the optimizer" and each.wrong
    ]
    explained = MORE_THAN_CLIPPING * max((each.size for each in clipping), default=np.inf)
    rest = [each for each in received if each.size <= explained]
    return [*clipping, *rest] if len(rest) < len(received) else []


def _confirmed(pair: Pair, missing: Difference) -> bool:
    """Return True if what follows from a missing gradient is wrong too.

    A hook may see less on one side.
    """
    name = missing.key.name
    later = list(STAGES)[list(STAGES).index(missing.stage) + 1 :]
    follows = [
        each.wrong
        for each in pair.differences
        if each.stage in later
        and not each.missing
        and f"{each.key.name}.".startswith(f"{name}." if name else "")
    ]
    return bool(pair.no_step) or (bool(follows) and all(follows))


def _draws_differ(pair: Pair, owners: Sequence[Owner]) -> bool:
    """Return True if both sides draw random numbers in each forward pass, and not the same ones."""
    good = pair.good.trace
    other = pair.other.trace
    if not (good.draws and other.draws):
        return False
    calls = [(pair.good.number, micro) for _, micro in owners]
    ours = [good.first.random.get(call) for call in calls]
    theirs = [other.ranks[ranks[0]].random.get(call) for (ranks, _), call in zip(owners, calls)]
    samples, others = (set(map(tuple, step.ids.values())) for step in (pair.good, pair.other))
    return ours != theirs or samples != others


def _stopped(good: Trace, bad: Trace) -> Location | None:
    """Report a side that ended early, by itself or because its trace was cut."""
    for name, trace, other in (("bad side", bad, good), ("good side", good, bad)):
        lacking = [step for step in other.complete_steps if step not in trace.complete_steps]
        ranks = tuple(trace.stopped_in(lacking[0])) if lacking else ()
        ends = {rank: trace.ranks[rank].end if rank in trace.ranks else "" for rank in ranks}
        cut = tuple(rank for rank in ranks if not ends[rank])
        if cut:
            reason = (
                f"the trace of the {name} has no last line on {list_ranks(cut)} and ends in step"
                f" {lacking[0]}"
            )
            reason += " (killed, or the disk was full); everything until there agrees"
            return Location(
                "inconclusive", stage="stopped", step=lacking[0], ranks=cut, reason=reason
            )
        if ranks:
            relation = (
                f"the {name} ended ({', '.join(sorted(set(ends.values())))}), the other goes on"
            )
            ranks = ranks if len(ranks) < trace.world else ()
            return Location(
                "differs", stage="stopped", step=lacking[0], ranks=ranks, relation=relation
            )
    return None
