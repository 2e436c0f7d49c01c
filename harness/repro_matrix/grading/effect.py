"""Was what the arm names in force? Judged from what every rank measured of it. Pure.

Libraries fall back without a word: accelerate to DDP, ZeRO to stage 0, adapters that match no module. An attempt that
ran like that is no evidence about what it names. Four questions, of attempts that would be clean otherwise:

- the strategy: its promises (conf/strategy) against elements held, reduced and updated, and the collectives called;
- the cards: what computes and was given GPUs used memory of one on every rank, and what was given more cards than
  ranks was split over several;
- what else the case's proof lists (``in_force``) or a rank measured: a number within its bounds;
- flags and options that the arm changes: some rank has read them.

Observations whose settings hold no promises are older than this: nothing is asked of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from repro_matrix.config.schema import Case
from repro_matrix.grading.observation import Attempt, Rank, mapping, number
from repro_matrix.records.observation import StrategySettings
from repro_matrix.records.rank import InForce

SHARE = 1.1  # a shard may be this much larger than an equal part of the whole: padding, uneven rows ...
SPARE = 0.01  # ... and this part of the whole
WHOLE = 0.9  # what is called whole: a few parameters may have no gradient
COMPUTES = ("training", "inference", "generating")  # what is only loaded or saved may stay on the host
VERBS = {"parameters": "holds all parameters", "gradients": "holds all gradients", "updates": "updates all parameters"}


def problem(case: Case, arm: str, attempt: Attempt) -> str | None:
    """The first reason to doubt that the arm was what it says, or None."""
    strategy = attempt.settings.get("strategy", {})
    promises = strategy.get("promises")
    if not promises:
        return None
    own = case.arms[arm].promises if arm in case.arms else None
    promised = {**promises, **(own.model_dump(exclude_unset=True) if own else {})}
    return (
        _group(attempt)
        or _cards(case, attempt)
        or _promises(attempt, attempt.strategy or "the strategy", promised, strategy, case.proof.kind)
        or _measured(case, attempt.ranks)
        or _read(case, arm, attempt)
    )


def unread(case: Case, arm: str, attempt: Attempt) -> str | None:
    """Of an attempt that failed as the broken arm does: what the arm changes and no rank has read. A rank that was
    ended before it could say what it had read may have read it."""
    said = all("read" in rank.record for rank in attempt.ranks)
    return _read(case, arm, attempt) if said and attempt.ranks else None


def _of(rank: Rank, what: str) -> list[InForce]:
    return [item for item in rank.record.get("in_force", ()) if item["what"] == what]


def _group(attempt: Attempt) -> str | None:
    """Every rank was in a process group of all of them, with the backend that was asked for."""
    if attempt.world_size < 2:
        return None
    for rank in attempt.ranks:
        found = _of(rank, "group")
        if not found:
            return f"no evidence of a process group on rank {rank.rank}"
        size = number(found[-1].get("got"))
        if size != attempt.world_size:
            return f"the process group of rank {rank.rank} has {_n(size)} of {attempt.world_size} ranks"
        backend = found[-1].get("backend", "")
        if attempt.backend not in ("", "auto") and attempt.backend not in backend:
            return f"the backend {attempt.backend} was not in force: rank {rank.rank} used {backend or 'none'}"
    return None


def _cards(case: Case, attempt: Attempt) -> str | None:
    """Computed on the cards that the attempt was given: gloo and a lone process would use the CPU and not fail."""
    if attempt.accelerator != "cuda" or case.simulated or case.proof.kind not in COMPUTES:
        return None
    for rank in attempt.ranks:
        if not (number(rank.record.get("peak_gpu_mb")) or 0) > 0:
            return f"no card was in force: rank {rank.rank} used no memory of one"
        devices = number(attempt.settings.get("devices"))
        if (devices or 0) > attempt.world_size and not any(each.name == "split" for each in rank.checks):
            return f"no evidence on rank {rank.rank} that the model was split over {_n(devices)} cards"
    return None


def _promises(
    attempt: Attempt, slug: str, promised: Mapping[str, Any], strategy: StrategySettings, kind: str
) -> str | None:
    ranks = max(attempt.world_size, 1)
    parts = max(ranks // _copies(strategy), 1)
    for what in ("parameters", "gradients", "updates"):
        wanted = promised.get(what)
        if wanted not in ("whole", "shard", "part"):
            continue
        shares: list[float] = []
        for rank in attempt.ranks:
            found = _of(rank, what)
            if not found and (what == "parameters" or kind == "training"):
                return f"{slug} left no evidence: {what} were not measured on rank {rank.rank}"
            for item in found[-1:]:
                got, whole = number(item.get("got")), number(item.get("whole"))
                if got is None or whole is None or whole <= 0 or got < 0:
                    seen = f"{item.get('got')} of {item.get('whole')}"
                    return f"{slug} left no evidence: {what} on rank {rank.rank}: {seen}"
                shares.append(got / whole)
        wrong = _shares(what, str(wanted), shares, ranks, parts) if shares else None
        if wrong:
            return f"{slug} was not in force: {wrong}"
    if kind == "training" and ranks > 1:
        return _collectives(attempt, slug, promised.get("collectives") or ())
    return None


def _copies(strategy: StrategySettings) -> int:
    """How often the ranks together hold the model, by the strategy's options."""
    options = strategy.get("options", {})
    for option, values in strategy.get("copies", {}).items():
        found = values.get(str(options.get(option)))
        if isinstance(found, int) and found > 0:
            return found
    return 1


def _shares(what: str, wanted: str, shares: list[float], ranks: int, parts: int) -> str | None:
    """Each rank's share of the whole against what was promised; all ranks together hold it all."""
    everyone = min(shares) >= WHOLE
    if wanted == "whole":
        low = shares.index(min(shares))
        return None if everyone else f"rank {low} holds {shares[low]:.0%} of the {what}, all were promised"
    if ranks > 1 and everyone and (parts > 1 or wanted == "part"):
        return f"every rank {VERBS[what]}"
    if sum(shares) < WHOLE * (ranks // parts if wanted == "shard" else 1) * len(shares) / ranks:
        return f"the ranks together hold {sum(shares):.0%} of the {what}"
    if wanted == "part":
        return None
    # A rank's trainable parameters may all lie in its own part of what is sharded: only their sum says something.
    bound = SHARE / parts + SPARE
    most = shares.index(max(shares))
    if what == "parameters" and shares[most] > bound:
        return f"rank {most} holds {shares[most]:.0%} of the {what}, 1/{parts} was promised"
    if sum(shares) > bound * len(shares):
        return f"the ranks together hold {sum(shares):.0%} of the {what}, {ranks // parts} x 100% was promised"
    return None


def _collectives(attempt: Attempt, slug: str, wanted: Iterable[Any]) -> str | None:
    for rank in attempt.ranks:
        found = _of(rank, "collectives")
        if not found:
            return f"{slug} left no evidence: collectives were not counted on rank {rank.rank}"
        calls = mapping(found[-1].get("got"))
        for kind in wanted:
            if not (number(calls.get(kind)) or 0) > 0:
                return f"{slug} was not in force: no {kind} between ranks in a step of rank {rank.rank}"
    return None


def _measured(case: Case, ranks: Sequence[Rank]) -> str | None:
    """What the proof lists, and what any rank measured, every rank measured; and within its bounds."""
    told = [item["what"] for rank in ranks for item in rank.record.get("in_force", ())]
    for name in dict.fromkeys([*case.proof.in_force, *told]):
        without = [rank.rank for rank in ranks if not _of(rank, name)]
        if without:
            return f"{name} left no evidence on rank {', '.join(map(str, without))}"
    for rank in ranks:
        for item in rank.record.get("in_force", ()):
            if "least" not in item and "most" not in item:
                continue
            got = item.get("got")
            value = number(got)
            low, high = number(item.get("least")), number(item.get("most"))
            bad = value is None or (low is None and high is None)
            if bad or (low is not None and value < low) or (high is not None and value > high):  # type: ignore[operator]
                said = f"got {_n(got)}, {_bounds(low, high)}"
                seen = f" ({item['looked_at']})" if item.get("looked_at") else ""
                return f"{item['what'] or '?'} was not in force on rank {rank.rank}: {said}{seen}"
    return None


def _read(case: Case, arm: str, attempt: Attempt) -> str | None:
    """What the arm (or the cell) sets apart from the defaults was read by the script, on some rank."""
    spec = case.arms.get(arm)
    if spec is None:
        return None
    read: dict[str, set[str]] = {"flag": set(), "option": set()}
    for rank in attempt.ranks:
        said = rank.record.get("read", {})
        read["flag"] |= set(said.get("flags", ()))
        read["option"] |= set(said.get("options", ()))
    flags = attempt.settings.get("flags", {})
    set_flags = [name for name, flag in case.flags.items() if name in flags and not _same(flags[name], flag.default)]
    for kind, names in (("flag", set_flags), ("option", [] if spec.strategy else list(spec.options))):
        for name in names:
            if name not in read[kind]:
                return f"the {kind} {name} was never read: the arm changes nothing by it"
    return None


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def _n(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _bounds(low: float | None, high: float | None) -> str:
    if low is not None and low == high:
        return f"promised {_n(low)}"
    parts = [f"at least {_n(low)}"] if low is not None else []
    parts += [f"at most {_n(high)}"] if high is not None else []
    return f"promised {' and '.join(parts) or 'nothing that can be judged'}"
