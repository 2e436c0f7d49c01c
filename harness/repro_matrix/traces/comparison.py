"""Compare two trainings step by step, stage by stage in causal order, until something is off. Pure.

Where the reduced gradients agree, local gradients and loss weights are right however they were divided. Nothing agrees
of which too little was compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from repro_matrix.text import counted, list_ranks
from repro_matrix.traces.alignment import Owner, Rows, Sample, Step
from repro_matrix.traces.coverage import Total
from repro_matrix.traces.location import Coverage, Location, Stage
from repro_matrix.traces.names import renamed
from repro_matrix.traces.pair import ROLES, STAGES, Difference, Pair
from repro_matrix.traces.reader import Trace
from repro_matrix.traces.relations import describe_factor, describe_reduction, deviating, times
from repro_matrix.traces.settings import different_setting
from repro_matrix.traces.tolerance import LOW, Tolerance

ALSO = 20  # other places that are listed
ANOTHER_RUN = (0.02, 0.5)  # what rounding never does to a forward pass in the first step; in low precision
ON_SHARED = ("initial weights", "buffer", "forward", "backward")  # stages that can be compared where data differ


@dataclass
class _Compared:
    """One step: what differs, with the tolerance of each tensor."""

    pair: Pair
    noise: list[Pair]
    judged: list[tuple[Difference, float, float]] = field(default_factory=list)  # rounding, tolerance

    def __post_init__(self) -> None:
        measured = [(each.stage, each.key, each.size) for pair in self.noise for each in pair.differences]
        tolerance = Tolerance(measured, self.low, len(self.noise))
        self.judged = [
            (each, *tolerance.of(each.stage, each.key, each.dtype, each.floor)) for each in self.pair.differences
        ]

    @property
    def low(self) -> bool:
        return self.pair.trusted.coarsest.removeprefix("torch.") in LOW

    @property
    def number(self) -> int:
        return self.pair.trusted.number

    def share(self, stage: Stage) -> float | None:
        """Return the share of a stage's tensors that agree; None where there are none."""
        agree = [each.size <= tolerance for each, _, tolerance in self.judged if each.stage == stage]
        return sum(agree) / len(agree) if agree else None

    def wrong(self) -> list[int]:
        """Return the places in ``judged`` of what is wrong, in causal order."""
        received, reduced = self.share("gradient before the optimizer"), self.share("reduction")
        final = received if reduced is None else reduced
        harmless: set[str] = {"loss weight"} if final and final > 0.5 else set()
        harmless |= {"local gradient"} if reduced == 1 else set()
        harmless |= {"clipping"} if received == 1 else set()
        return [
            place
            for place, (each, _, tolerance) in enumerate(self.judged)
            if each.size > tolerance and each.stage not in harmless and (not each.missing or self._confirmed(each))
        ]

    def _confirmed(self, missing: Difference) -> bool:
        """A hook may see less on one side. Where a gradient is not there, what follows from it is wrong too."""
        name, later = missing.key.name, list(STAGES)[list(STAGES).index(missing.stage) + 1 :]
        follows = [
            each.size > tolerance
            for each, _, tolerance in self.judged
            if each.stage in later and not each.missing and f"{each.key.name}.".startswith(f"{name}." if name else "")
        ]
        return missing.certain or (bool(follows) and all(follows))


def locate(trusted: Trace, suspect: Trace, noise: Sequence[Trace] = ()) -> Location:
    """Return the first event of the suspect that is outside the tolerance that the noise runs give."""
    for side, trace in (("the trusted side", trusted), ("the suspect", suspect)):
        if not trace.ranks:
            return Location("inconclusive", reason=f"{side} left no trace in {trace.folder.name}")
        if not trace.steps:
            return Location("inconclusive", stage="stopped", reason=f"{side} ended before its first forward pass")
    total = Total(trusted, suspect, noise)
    for compared in _steps(trusted, suspect, noise):
        found = _unlike_runs(compared) or _data(compared, total) or _first(compared, total)
        kept = [(each, tolerance) for each, _, tolerance in compared.judged if not each.missing]
        total.add(
            compared.pair, (each.size / tolerance for each, tolerance in kept), _place(kept[-1][0]) if kept else ""
        )
        if found:
            return replace(found, coverage=total.coverage())
    reason = total.too_little()
    found = _stopped(trusted, suspect) or (
        Location("inconclusive", reason=reason) if reason else Location("agrees", largest=total.largest)
    )
    return replace(found, agreed=total.agreed, last_agreeing=total.last, coverage=total.coverage())


def grid(trusted: Trace, suspect: Trace, noise: Sequence[Trace] = ()) -> dict[str, Any]:
    """Return ``{"steps": [0, ...], "rows": [{"module": name, "cells": [largest size/tolerance or None, ...]}, ...]}``;
    modules in the order of the trusted side."""
    steps: list[int] = []
    cells: dict[str, dict[int, float]] = {}
    for compared in _steps(trusted, suspect, noise):
        steps.append(compared.number)
        for each, _, tolerance in compared.judged:
            module = each.key.name if each.key.kind in ("in", "fwd", "bwd") else each.key.name.rpartition(".")[0]
            if each.stage not in ("loss weight", "clipping") and not (each.missing and each.stage == "backward"):
                row = cells.setdefault(module, {})
                row[compared.number] = max(row.get(compared.number, 0.0), min(each.size / tolerance, 1e9))
    order = {str(pair[0]): place for model in trusted.models for place, pair in enumerate(model["names"]) if pair}
    modules = sorted(cells, key=lambda name: order.get(name, len(order)))
    return {"steps": steps, "rows": [{"module": m, "cells": [cells[m].get(step) for step in steps]} for m in modules]}


def _steps(trusted: Trace, suspect: Trace, noise: Sequence[Trace]) -> Iterator[_Compared]:
    names: dict[str, str] | None = None
    before: dict[str, dict[str, Rows]] = {}
    shown: set[str] = set()
    for number in trusted.steps:
        if number not in suspect.steps:
            continue
        main, other = Step(trusted, number), Step(suspect, number, names)
        if names is None:
            names = renamed(main, other)
            other = Step(suspect, number, names) if names else other
        runs = {str(place): Step(run, number) for place, run in enumerate(noise) if number in run.steps}
        sides = {"trusted": main, "suspect": other, **runs}
        before = before or {side: _parameters(step, "state") for side, step in sides.items()}
        pairs = {
            side: Pair(main, step, (before["trusted"], before.get(side, {})), frozenset(shown))
            for side, step in sides.items()
            if step is not main
        }
        yield _Compared(pairs.pop("suspect"), list(pairs.values()))
        shown |= {key.kind for key in other.events}
        before = {side: _parameters(step, "param") for side, step in sides.items()}


def _parameters(step: Step, kind: str) -> dict[str, Rows]:
    return {key.name: step.whole(key) for key in step.events if key.kind == kind}


def _unlike_runs(compared: _Compared) -> Location | None:
    """Two runs of the trusted side that are not one training with other rounding give no tolerance."""
    for pair in compared.noise:
        if set(pair.trusted.samples) != set(pair.other.samples):
            return _other_draws(compared, "other data on each run: two runs of the trusted side saw other samples")
        limit = ANOTHER_RUN[compared.low]
        for stage in ("initial weights", "forward"):
            sizes = [each for each in pair.differences if each.stage == stage]
            unlike = [each for each in sizes if each.size > limit]
            if len(unlike) > len(sizes) / 10 and np.isfinite(unlike[0].size):
                what = f"other random draws on each run: two runs of the trusted side differ by {unlike[0].size:.2g}"
                return _other_draws(compared, f"{what} in the {stage} of {unlike[0].key.name or 'the model'}")
    return None


def _other_draws(compared: _Compared, reason: str) -> Location:
    return Location("inconclusive", stage="random draws", step=compared.number, reason=f"{reason}. Set all seeds.")


def _data(compared: _Compared, total: Total) -> Location | None:
    """Compare which samples each side saw, and their labels."""
    pair = compared.pair
    trusted, suspect = pair.trusted.samples, pair.other.samples
    missing, extra = (
        [each for each in trusted if each not in suspect],
        [each for each in suspect if each not in trusted],
    )
    labels = pair.trusted.labels, pair.other.labels
    relabelled = [s for s in suspect if s in trusted and labels[0][s] and labels[1][s] and labels[0][s] != labels[1][s]]
    if not extra and not relabelled and (not missing or pair.other.stopped or pair.trusted.stopped):
        return None
    seen = sum(sample[:2] in total.samples for sample in extra)
    if extra and not missing and _in_next_step(pair, extra):
        return Location(
            "differs", stage="update", step=compared.number, place="the optimizer", role="step", agreed=total.agreed,
            relation="no step; the next samples of the trusted side are in the same step", last_agreeing=total.last,
        )  # fmt: skip
    parts = [f"{len(extra)} of {counted(len(suspect), 'sample')} are not in the trusted side's step"] if extra else []
    parts += [f"{seen} of them are from an earlier step"] if seen else []
    parts += [f"{len(missing)} of the trusted side's {len(trusted)} are missing"] if missing else []
    parts += [f"{len(relabelled)} of {counted(len(suspect), 'sample')} have other labels"] if relabelled else []
    ranks, micro = _owners(pair.other, [suspect[each] for each in extra or relabelled])
    beyond = _first(compared, total, shared=True)
    if beyond is None:
        ratios = [each.size / tolerance for each, _, tolerance in compared.judged if each.stage in ON_SHARED]
        beyond = Location("agrees", coverage=Coverage(aligned=len(ratios)), largest=max(ratios, default=0.0))
    return Location(
        "differs", stage="data", step=compared.number, ranks=ranks, micro=micro, relation=", ".join(parts),
        role="samples" if extra or missing else "labels", agreed=total.agreed, last_agreeing=total.last, beyond=beyond,
    )  # fmt: skip


def _in_next_step(pair: Pair, samples: Sequence[Sample]) -> bool:
    """Return whether the trusted side sees these samples after its next step of the optimizer."""
    trace, number = pair.trusted.trace, pair.trusted.number + 1
    later = {sample[:2] for sample in Step(trace, number).samples} if number in trace.steps else set()
    return all(sample[:2] in later for sample in samples)


def _first(compared: _Compared, total: Total, shared: bool = False) -> Location | None:
    """Return the first difference of a step; ``shared``: on the samples that both sides saw."""
    wrong = [place for place in compared.wrong() if not shared or compared.judged[place][0].stage in ON_SHARED]
    first = compared.judged[wrong[0]][0] if wrong else None
    if first is None or first.stage == "update" or first.key.kind == "buffer end":
        setting = different_setting(compared.pair.trusted, compared.pair.other)
        if setting:
            name, relation, ranks = setting
            return Location(
                "differs", stage="optimizer setting", step=compared.number, ranks=ranks, place=name, role="setting",
                relation=relation, agreed=total.agreed + (wrong[0] if wrong else len(compared.judged)),
                last_agreeing=total.last,
            )  # fmt: skip
        if first is None:
            return None
    each, rounding, tolerance = compared.judged[wrong[0]]
    before = [item for item in compared.judged[: wrong[0]] if item[0].size <= item[2]]
    same = [compared.judged[place] for place in wrong if compared.judged[place][0].stage == each.stage]
    bad = each.sizes > tolerance
    owners = [owner for owner, wrong_row in zip(each.owners, bad) if wrong_row] if not each.missing else each.owners
    relation, sources = _relation(compared, [item for item, _, _ in same], bad, owners)
    ranks, micro = _owners(compared.pair.other, sources or owners)
    stage = each.stage
    if stage == "forward" and _draws_differ(compared.pair, owners):
        stage, relation = "random draws", relation or "both sides draw random numbers here, and not the same ones"
    last = next((_place(item) for item, _, _ in reversed(before) if item.stage == each.stage), "")
    return Location(
        "differs", stage=stage, step=compared.number, ranks=ranks, micro=micro, place=_place_name(each),
        role=ROLES.get(each.key.kind, "gradient"), size=each.size if np.isfinite(each.size) else None,
        tolerance=tolerance, rounding=rounding, relation=relation, agreed=total.agreed + len(before),
        last_agreeing=last or (_place(before[-1][0]) if before else total.last),
        also=tuple(dict.fromkeys(_place(item) for item, _, _ in same[1:]))[:ALSO],
    )  # fmt: skip


def _owners(step: Step, owners: Sequence[Owner]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return ranks and micro-batches; none where they are all."""
    ranks, micros = {rank for ranks, _ in owners for rank in ranks}, {micro for _, micro in owners} - {-1}
    return (
        () if ranks == set(step.trace.ranks) else tuple(sorted(ranks)),
        () if micros == {micro for _, micro in step.batches} else tuple(sorted(micros)),
    )


def _place_name(each: Difference) -> str:
    name = each.key.name or "the model"
    return f"{name}, call {each.key.call}" if each.key.call else name


def _place(each: Difference) -> str:
    role = "gradient" if each.stage == "backward" else ROLES.get(each.key.kind, each.stage)
    return f"{_place_name(each)}: {role}"


def _relation(
    compared: _Compared, wrong: Sequence[Difference], bad: Any, owners: Sequence[Owner]
) -> tuple[str, list[Owner]]:
    """Say what holds instead, and which ranks and micro-batches that blames."""
    first, pair = wrong[0], compared.pair
    if first.missing and first.stage == "update":
        return "the suspect's optimizer does not have this parameter", []
    if first.certain:
        return "the suspect does not train this parameter (requires_grad is False)", []
    if first.missing:
        return "no gradient arrives" if first.stage in ("backward", "local gradient") else "there is none", []
    trusted, suspect = first.trusted[bad], first.suspect[bad]
    if first.stage == "loss weight":
        low, high = float(suspect.min()), float(suspect.max())
        weights = times(low) if high - low <= 1e-3 * abs(high) else f"{low:.3g} to {high:.3g}"
        return f"{counted(len(suspect), 'sample')} weigh {weights} times what they should", []
    if first.stage == "clipping":
        values = ", ".join(f"rank {ranks[0]}: {value[0]:.4g}" for (ranks, _), value in zip(owners, suspect))
        return f"{first.key.name} {values}; on the trusted side {trusted[0, 0]:.4g}", []
    share = 1 / len(pair.other.groups)
    if first.stage == "local gradient" and first.owners[0][1] < 0:
        local = pair.local(first.key.name, owners[0][0][0])
        odd = deviating(trusted[0] * pair.common_weight, local, share) if local else None
        if odd:
            ranks, micros = _owners(pair.other, odd[0])
            names = [list_ranks(ranks)] if ranks else []
            names += [f"micro-batch {', '.join(map(str, micros))}"] if micros else []
            return f"{', '.join(names) or 'all'}: {times(odd[1])} times what it should be", odd[0]
    if first.stage == "reduction":
        rank, alike = owners[0][0][0], len(owners) == len(first.sizes) and np.allclose(suspect, suspect[0], rtol=1e-5)
        reduced, locals_ = [], []
        for each in wrong:
            local = pair.local(each.key.name, rank)
            row = next((row for row, (ranks, _) in enumerate(each.owners) if rank in ranks), None)
            if local and row is not None and not each.missing:
                reduced.append(each.suspect[row])
                locals_.append(local)
        words, odd_ones = describe_reduction(reduced, locals_, share, rank, alike)
        odd_ones = [(pair.other.group_of[ranks[0]], micro) for ranks, micro in odd_ones]
        return words or describe_factor(trusted, suspect), odd_ones
    return describe_factor(trusted, suspect), []


def _draws_differ(pair: Pair, owners: Sequence[Owner]) -> bool:
    """Both sides draw random numbers in each forward pass, and from another state or for other batches."""
    trusted, other = ([rank.random for _, rank in sorted(s.trace.ranks.items())] for s in (pair.trusted, pair.other))
    if not all(len(set(map(str, side[0].values()))) == len(side[0]) > 1 for side in (trusted, other)):
        return False
    number = pair.trusted.number
    states = [pair.other.trace.ranks[rank].random.get((number, micro)) for ranks, micro in owners for rank in ranks]
    same_state = all(state == trusted[0].get((number, micro)) for state, (_, micro) in zip(states, owners))
    return not same_state or set(map(tuple, pair.trusted.ids.values())) != set(map(tuple, pair.other.ids.values()))


def _stopped(trusted: Trace, suspect: Trace) -> Location | None:
    """Say that a side ended early; whether it ended by itself or its trace was cut."""
    for name, trace, other in (("suspect", suspect, trusted), ("trusted side", trusted, suspect)):
        lacking = [step for step in other.complete_steps if step not in trace.complete_steps]
        if not lacking:
            continue
        ranks = trace.stopped_in(lacking[0])
        ends = {rank: trace.ranks[rank].end if rank in trace.ranks else "" for rank in ranks}
        cut = [rank for rank, end in ends.items() if not end]
        if cut:
            reason = f"the trace of the {name} has no last line on {list_ranks(cut)} and ends in step {lacking[0]}"
            reason += " (killed, or the disk was full); everything until there agrees"
            return Location("inconclusive", stage="stopped", step=lacking[0], ranks=tuple(cut), reason=reason)
        relation = f"the {name} ended ({', '.join(sorted(set(ends.values())))}), the other goes on"
        affected = tuple(ranks) if len(ranks) < trace.world else ()
        return Location("differs", stage="stopped", step=lacking[0], ranks=affected, relation=relation)
    return None
