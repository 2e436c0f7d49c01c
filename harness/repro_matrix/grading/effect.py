"""Check that what a variant names took effect, from what every rank measured of it. Pure.

Libraries fall back silently: accelerate to DDP, ZeRO to stage 0, adapters that match no module.
Such an attempt is no evidence about the option that it names. Four questions are asked of an
attempt that would pass otherwise:

- the strategy: do the elements held, reduced and updated, and the collectives, match its promises
  (conf/strategy)?
- the GPUs: did every rank of an attempt that computes on GPUs use memory of one, and was the model
  split where it was
  given more GPUs than ranks?
- whatever else the pass criteria list (``effects``), a changed flag promises (``effect: true``),
  or a rank measured: is the number within its bounds?
- the flags and options that the variant changes: did some rank read them?
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from repro_matrix.config.schema import Case
from repro_matrix.grading.checks import number, same_json
from repro_matrix.grading.observation import Evidence, Rank, peak_bytes
from repro_matrix.records.attempt import STARTING, Effect, StrategySettings
from repro_matrix.text import list_ranks

# a shard may be this much larger than an equal part of the whole: padding, uneven rows ...
SHARE = 1.1
SPARE = 0.01  # ... and this part of the whole
WHOLE = 0.9  # what counts as the whole: a few parameters may have no gradient
# what is only loaded or saved may stay on the host
COMPUTES = ("training", "inference", "generating")
_HOLDS = {
    "parameters": "holds all parameters",
    "gradients": "holds all gradients",
    "updates": "updates all parameters",
}


def missing_effect(case: Case, variant: str, attempt: Evidence) -> str | None:
    """Return the first reason to doubt that the variant's settings took effect, or None."""
    invariants = attempt.settings.get("strategy", {}).get("invariants")
    if not invariants:
        return "its settings hold no promises of the strategy"
    changed = case.variants[variant].invariants if variant in case.variants else None
    promised = {**invariants, **(changed.model_dump(exclude_unset=True) if changed else {})}
    return (
        _process_group(attempt)
        or _gpu_use(case, attempt)
        or _strategy(case, attempt, promised)
        or _measurements(case, attempt)
        or _unread_setting(case, variant, attempt)
    )


def unread_change(case: Case, variant: str, attempt: Evidence) -> str | None:
    """Return the flag or option of the variant that no rank has read, or None.

    For an attempt that failed as the unfixed variant does. A rank that was stopped before it could
    record what it read may have read it.
    """
    recorded = all("read" in rank.record and rank.ended_at is not None for rank in attempt.ranks)
    return _unread_setting(case, variant, attempt) if recorded and attempt.ranks else None


def never_on_gpu(case: Case, attempt: Evidence) -> str | None:
    """Return which rank began the case's body without CUDA or on another GPU than its own, or None.

    Such a rank computed elsewhere, whatever it shows. The kit initializes CUDA before the body,
    with any backend, and writes the record there.
    """
    if attempt.accelerator != "cuda" or case.simulated:
        return None
    for rank in attempt.ranks:
        device, uuid = rank.record.get("device"), rank.record.get("gpu_uuid")
        if device is None and rank.wrote and rank.record["phase"] not in STARTING:
            return f"no GPU was in effect: rank {rank.rank} did not initialize CUDA"
        leased = {f"cuda:{number}": name for number, name in enumerate(attempt.gpus)}.get(
            device or ""
        )
        if uuid and attempt.gpus and uuid != leased:
            return (
                f"rank {rank.rank} was on another GPU than the one that was leased to it: {uuid},"
                f" not {leased}"
            )
    return None


def _effects(rank: Rank, what: str) -> list[Effect]:
    return [item for item in rank.record.get("effects", ()) if item["what"] == what]


def _process_group(attempt: Evidence) -> str | None:
    """Check that every rank was in a process group of all ranks, with the requested backend."""
    if attempt.world_size < 2:
        return None
    for rank in attempt.ranks:
        evidence = _effects(rank, "group")
        if not evidence:
            return f"no evidence of a process group on rank {rank.rank}"
        size = number(evidence[-1].get("actual"))
        if size != attempt.world_size:
            return (
                f"the process group of rank {rank.rank} has {_value(size)} of {attempt.world_size}"
                " ranks"
            )
        backend = evidence[-1].get("backend", "")
        if attempt.backend not in ("", "auto") and attempt.backend not in backend:
            return (
                f"the backend {attempt.backend} was not in effect: rank {rank.rank} used"
                f" {backend or 'none'}"
            )
    return None


def _gpu_use(case: Case, attempt: Evidence) -> str | None:
    """Check that the attempt computed on its GPUs.

    gloo and a lone process would use the CPU without an error.
    """
    if attempt.accelerator != "cuda" or case.simulated or case.pass_criteria.kind not in COMPUTES:
        return None
    devices = number(attempt.settings.get("devices")) or 0
    for rank in attempt.ranks:
        if not (peak_bytes(rank.record, "gpu") or 0) > 0:
            return f"no GPU was in effect: rank {rank.rank} used no memory of one"
        split = any(check.name == "split" for check in rank.checks)
        if devices > attempt.world_size and not split:
            return f"no evidence on rank {rank.rank} that the model was split over {devices:g} GPUs"
    return None


def _strategy(case: Case, attempt: Evidence, promised: Mapping[str, Any]) -> str | None:
    slug, kind = attempt.strategy or "the strategy", case.pass_criteria.kind
    ranks = attempt.world_size
    parts = max(ranks // replicas(attempt.settings["strategy"]), 1)
    for what in ("parameters", "gradients", "updates"):
        wanted = promised.get(what)
        if wanted not in ("whole", "shard", "part"):
            continue
        shares: list[float] = []
        for rank in attempt.ranks:
            evidence = _effects(rank, what)
            if not evidence and (what == "parameters" or kind == "training"):
                return f"{slug} left no evidence: {what} were not measured on rank {rank.rank}"
            for item in evidence[-1:]:
                actual, whole = number(item.get("actual")), number(item.get("whole"))
                if actual is None or whole is None or whole <= 0 or actual < 0:
                    measured = f"{item.get('actual')} of {item.get('whole')}"
                    return f"{slug} left no evidence: {what} on rank {rank.rank}: {measured}"
                shares.append(actual / whole)
        wrong = wrong_shares(what, str(wanted), shares, ranks, parts) if shares else None
        if wrong:
            return f"{slug} was not in effect: {wrong}"
    if kind == "training" and ranks > 1:
        return _collectives(attempt, slug, promised.get("collectives") or ())
    return None


def replicas(strategy: StrategySettings) -> int:
    """Return how often the ranks together hold the model, by the strategy's options."""
    options = strategy.get("options", {})
    for option, values in strategy.get("replicas", {}).items():
        copies = values.get(str(options.get(option)))
        if isinstance(copies, int) and copies > 0:
            return copies
    return 1


def wrong_shares(what: str, wanted: str, shares: list[float], ranks: int, parts: int) -> str | None:
    """Compare each rank's share of the whole with the promised one.

    All ranks together must hold the whole.
    """
    everyone = min(shares) >= WHOLE
    if wanted == "whole":
        if everyone:
            return None
        low = shares.index(min(shares))
        return f"rank {low} holds {shares[low]:.0%} of the {what}, all were promised"
    if ranks > 1 and everyone and (parts > 1 or wanted == "part"):
        return f"every rank {_HOLDS[what]}"
    if sum(shares) < WHOLE * (ranks // parts if wanted == "shard" else 1) * len(shares) / ranks:
        return f"the ranks together hold {sum(shares):.0%} of the {what}"
    if wanted == "part":
        return None
    # A rank's trainable parameters may all lie in its own part of what is sharded: only their sum
    # is evidence.
    bound = SHARE / parts + SPARE
    most = shares.index(max(shares))
    if what == "parameters" and shares[most] > bound:
        return f"rank {most} holds {shares[most]:.0%} of the {what}, 1/{parts} was promised"
    if sum(shares) > bound * len(shares):
        return (
            f"the ranks together hold {sum(shares):.0%} of the {what}, {ranks // parts} x 100% was"
            " promised"
        )
    return None


def _collectives(attempt: Evidence, slug: str, wanted: Iterable[Any]) -> str | None:
    for rank in attempt.ranks:
        evidence = _effects(rank, "collectives")
        if not evidence:
            return f"{slug} left no evidence: collectives were not counted on rank {rank.rank}"
        calls = evidence[-1].get("actual")
        calls = calls if isinstance(calls, dict) else {}
        for kind in wanted:
            if not (number(calls.get(kind)) or 0) > 0:
                return (
                    f"{slug} was not in effect: no {kind} between ranks in a step of rank"
                    f" {rank.rank}"
                )
    return None


def _measurements(case: Case, attempt: Evidence) -> str | None:
    """Check that every rank measured the same effects, each within its bounds.

    These are the effects in the pass criteria, those of changed flags, and those that any rank
    measured.
    """
    ranks = attempt.ranks
    of_flags = [name for name in _changed_flags(case, attempt) if case.flags[name].effect]
    measured = [item["what"] for rank in ranks for item in rank.record.get("effects", ())]
    for name in dict.fromkeys([*case.pass_criteria.effects, *of_flags, *measured]):
        without = [rank.rank for rank in ranks if not _effects(rank, name)]
        if without:
            return f"{name} left no evidence on {list_ranks(without)}"
    for rank in ranks:
        for item in rank.record.get("effects", ()):
            if "least" not in item and "most" not in item:
                continue
            value = number(item.get("actual"))
            low = number(item["least"]) if "least" in item else -math.inf
            high = number(item["most"]) if "most" in item else math.inf
            if value is None or low is None or high is None or not low <= value <= high:
                subject = f" ({item['subject']})" if item.get("subject") else ""
                bounds = " and ".join(
                    f"at {key} {_value(item[key])}" for key in ("least", "most") if key in item
                )
                actual = f"got {_value(item.get('actual'))}, promised {bounds}{subject}"
                return f"{item['what']} was not in effect on rank {rank.rank}: {actual}"
    return None


def _unread_setting(case: Case, variant: str, attempt: Evidence) -> str | None:
    """Return a changed flag or option of the variant, or of the cell, that no rank has read."""
    spec = case.variants.get(variant)
    if spec is None:
        return None
    recorded = [rank.record.get("read", {}) for rank in attempt.ranks]
    read = {
        "flag": {name for each in recorded for name in each.get("flags", ())},
        "option": {name for each in recorded for name in each.get("options", ())},
    }
    changed = _changed_flags(case, attempt)
    for kind, names in (("flag", changed), ("option", [] if spec.strategy else list(spec.options))):
        for name in names:
            if name not in read[kind]:
                return f"the {kind} {name} was never read: the variant changes nothing by it"
    return None


def _changed_flags(case: Case, attempt: Evidence) -> list[str]:
    flags = attempt.settings.get("flags", {})
    return [
        name
        for name, flag in case.flags.items()
        if name in flags and not same_json(flags[name], flag.default)
    ]


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)
