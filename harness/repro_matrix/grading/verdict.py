"""All outcomes of a cell -> a verdict per fix arm. Pure.

Only attempts that ran count: ``skipped`` and ``infra`` are no evidence, and never a reason to be surer.

==================  ==========  =====================================================================
broken              fix         verdict
==================  ==========  =====================================================================
fires               clean       FIX_HOLDS
fires               fires       FIX_BROKEN
fires               other       FIX_UNMASKS (named when it is a case of the catalogue)
clean               clean       NOT_FIRING, or UPSTREAM_FIXED when a measurement of an older stack fired
clean               fires/other FIX_HARMFUL
other               any         CHANGED
attempts of either disagree     FLAKY
hang in either, or none left    INCONCLUSIVE
fires nowhere, nothing stored   INCONCLUSIVE (a new case: unseen)
==================  ==========  =====================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from packaging.version import InvalidVersion, Version

from repro_matrix.config.packages import UPSTREAM
from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import VerdictName
from repro_matrix.grading.capabilities import depends_on, differs
from repro_matrix.grading.comparability import comparable
from repro_matrix.grading.failure_id import Met, all_met
from repro_matrix.grading.outcome import Outcome
from repro_matrix.records.document import Cell
from repro_matrix.records.observation import Settings

Interval = tuple[float, float]
NO_EVIDENCE = ("skipped", "infra")
# The verdicts that say that something failed: they are the same answer only where the same thing was met.
MEETING = frozenset({"FIX_BROKEN", "FIX_UNMASKS", "FIX_HARMFUL", "CHANGED", "UNHEALTHY"})
# The packages whose releases make failures come and go; what else differs between stacks dates nothing.
DATED = frozenset({*UPSTREAM, "trl"})


@dataclass(frozen=True)
class Verdict:
    """A fix arm (or a control) judged. ``to_json`` makes it JSON."""

    name: VerdictName
    reason: str
    broken_k: int = 0  # attempts of the broken arm in which the signature fired ...
    broken_n: int = 0  # ... of those that count
    fix_k: int = 0  # attempts of this arm that were clean ...
    fix_n: int = 0  # ... of those that count
    interval: Interval | None = None  # 95 % Wilson interval of fix_k / fix_n
    broken_interval: Interval | None = None  # likewise of broken_k / broken_n
    named_case: str | None = None  # the case of the catalogue that was met instead
    measured: bool = True  # False: no attempt was left to judge (skipped, infra, not run)
    met: tuple[Met, ...] = ()  # what failed: of a fix its own failures, where CHANGED the broken arm's
    infra: bool = False  # nothing was measured because what was launched is no evidence
    unseen: bool = False  # a failure that nothing stored expects and that does not fire: less than was asked for

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "met": tuple(dict(vars(met)) for met in self.met)}


KEYS = frozenset(each.name for each in fields(Verdict))


def wilson(k: int, n: int, z: float = 1.959963984540054) -> Interval:
    """The Wilson interval of a share k/n; (0, 1) when nothing was counted."""
    if n <= 0:
        return 0.0, 1.0
    share, spread = k / n, z * z / n
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    low = 0.0 if k == 0 else max(0.0, centre - half)
    high = 1.0 if k == n else min(1.0, centre + half)
    return round(low, 4), round(high, 4)


def judge(
    case: Case,
    outcomes: Mapping[str, Sequence[Outcome]],
    history: Iterable[Cell] = (),
    versions: Mapping[str, str] | None = None,
    settings: Settings | None = None,
    facts: Mapping[str, Any] | None = None,
    changed: Sequence[str] = (),
) -> dict[str, Verdict]:
    """One verdict per fix arm of a failure, or of a control's one arm; arms that ``outcomes`` lacks have none.

    ``history`` are stored documents of the same cell on other stacks; with ``versions`` (this stack's) only those of an
    older stack count, and with ``settings`` (of the broken arm) only those that were measured alike, on a machine whose
    ``facts`` that the broken arm depends on are the same. ``changed``: what of this stack is not as its packages were
    installed: what such a stack does not show says nothing of a release.
    """
    if case.kind == "control":
        return {"control": _control(outcomes.get("control", ()))}
    decide = {fact: (facts or {}).get(fact) for fact in depends_on(case, "broken")}
    fired = _fired_before(history, versions, settings or {}, decide)
    if changed and fired.where:
        fired = Fired(None, f"{fired.where}, where it fired: here, {changed[0]}")
    broken = outcomes.get("broken", ())
    fixes = [arm for arm in case.arms if arm != "broken" and arm in outcomes]
    judged = {arm: _fix(case.slug, broken, outcomes[arm], fired) for arm in fixes}
    if case.expect or fired.where or fired.otherwise or "fires" in {outcome.outcome for outcome in broken}:
        return judged
    return {arm: _unseen(found, broken) for arm, found in judged.items()}


def _unseen(found: Verdict, broken: Sequence[Outcome]) -> Verdict:
    """A case that has never been seen to fire, and does not here: its script or signature may be what is wrong."""
    if not found.measured or found.name in ("INCONCLUSIVE", "FLAKY"):
        return found
    counted = evidence(broken)
    why = f"no stored measurement shows this failure, and broken is {firing(counted)}: {counted[0].reason}"
    return replace(found, name="INCONCLUSIVE", reason=why, named_case=None, met=(), unseen=True)


def judge_pair(case: str, broken: Sequence[Outcome], fix: Sequence[Outcome]) -> Verdict:
    """An arm judged against any other one in the broken arm's place."""
    return _fix(case, broken, fix, Fired())


def evidence(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The attempts that count."""
    return [outcome for outcome in outcomes if outcome.outcome not in NO_EVIDENCE]


def firing(outcomes: Sequence[Outcome]) -> str:
    """An arm in a few words: ``fires 3/3``, ``fires 2/3, clean 1/3``, ``skipped: needs 2 GPUs``."""
    counted = evidence(outcomes)
    if not counted:
        return _nothing(outcomes)
    names = [outcome.outcome for outcome in counted]
    kinds = sorted(set(names), key=lambda kind: (-names.count(kind), kind))
    return ", ".join(f"{kind} {names.count(kind)}/{len(names)}" for kind in kinds)


def _fix(case: str, broken_all: Sequence[Outcome], fix_all: Sequence[Outcome], fired: Fired) -> Verdict:
    broken, fix = evidence(broken_all), evidence(fix_all)
    base = _counts(broken, fix)
    left = len(broken_all) - len(broken) + len(fix_all) - len(fix)
    note = f" ({left} attempt{'s' if left > 1 else ''} not counted)" if left and broken and fix else ""

    def verdict(name: VerdictName, reason: str, source: Sequence[Outcome] = ()) -> Verdict:
        met = all_met(case, source) if name in MEETING else ()
        return replace(base, name=name, reason=reason + note, named_case=_named(case, source), met=met)

    if not broken:
        lost = _lost(broken_all)
        return replace(base, reason=f"broken: {_nothing(broken_all)}", measured=False, infra=lost)
    if not fix:
        said = f"broken {firing(broken)}; fix {_nothing(fix_all)}"
        return replace(base, reason=said, measured=False, infra=_lost(fix_all))
    kinds, fix_kinds = {o.outcome for o in broken}, {o.outcome for o in fix}
    both = f"broken {firing(broken)}; fix {firing(fix)}"
    if len(kinds) > 1 or len(fix_kinds) > 1:
        return verdict("FLAKY", both, fix)
    before, after = kinds.pop(), fix_kinds.pop()
    if before == "hang":
        return verdict("INCONCLUSIVE", f"broken hangs, which is not its signature: {broken[0].reason}")
    if before == "other_error":
        return verdict("CHANGED", f"broken fails, but not with its signature: {broken[0].reason}", broken)
    if after == "hang":
        return verdict("INCONCLUSIVE", f"broken {firing(broken)}; the fix hangs: {fix[0].reason}")
    if before == "clean":
        if after != "clean":
            return verdict("FIX_HARMFUL", f"broken is clean, the fix fails: {fix[0].reason}", fix)
        if fired.where:
            return verdict("UPSTREAM_FIXED", f"{both}; it fired in {fired.where}")
        return verdict("NOT_FIRING", both + (f"; not compared with {fired.otherwise}" if fired.otherwise else ""))
    if after == "clean":
        return verdict("FIX_HOLDS", both)
    if after == "fires":
        return verdict("FIX_BROKEN", f"{both}: {fix[0].reason}", fix)
    return verdict("FIX_UNMASKS", f"broken {firing(broken)}; the fix meets another failure: {fix[0].reason}", fix)


def _control(outcomes: Sequence[Outcome]) -> Verdict:
    counted = evidence(outcomes)
    base = _counts([], counted)
    kinds = {outcome.outcome for outcome in counted}
    if not counted:
        return replace(base, reason=_nothing(outcomes), measured=False, infra=_lost(outcomes))
    if len(kinds) > 1:
        return replace(base, name="FLAKY", reason=firing(counted))
    if kinds == {"clean"}:
        return replace(base, name="HEALTHY", reason=firing(counted))
    if kinds == {"hang"}:
        return replace(base, reason=f"it hangs: {counted[0].reason}")
    named = _named("", counted)
    reason = f"{firing(counted)}: {counted[0].reason}"
    return replace(base, name="UNHEALTHY", reason=reason, named_case=named, met=all_met("", counted))


def _counts(broken: Sequence[Outcome], fix: Sequence[Outcome]) -> Verdict:
    """The figures of a verdict, before it has a name."""
    fires = sum(outcome.outcome == "fires" for outcome in broken)
    clean = sum(outcome.outcome == "clean" for outcome in fix)
    return Verdict(
        "INCONCLUSIVE",
        "",
        broken_k=fires,
        broken_n=len(broken),
        fix_k=clean,
        fix_n=len(fix),
        interval=wilson(clean, len(fix)) if fix else None,
        broken_interval=wilson(fires, len(broken)) if broken else None,
    )


def _named(case: str, outcomes: Iterable[Outcome]) -> str | None:
    """The other known failure that was met: the one seen most often, by name where that is a tie."""
    seen: dict[str, int] = {}
    for outcome in outcomes:
        for item in outcome.others(case)[:1] if outcome.outcome == "other_error" else ():
            seen[item.case] = seen.get(item.case, 0) + 1
    return min(seen, key=lambda name: (-seen[name], name)) if seen else None


def _lost(outcomes: Sequence[Outcome]) -> bool:
    return any(outcome.outcome == "infra" for outcome in outcomes)


def _nothing(outcomes: Sequence[Outcome]) -> str:
    """Why an arm has no evidence."""
    if not outcomes:
        return "not run"
    reasons = dict.fromkeys(f"{outcome.outcome}: {outcome.reason}" for outcome in outcomes)
    return "; ".join(reasons)


@dataclass(frozen=True)
class Fired:
    """The older stack on which the broken arm fired, in words; and one where it did, but was measured otherwise."""

    where: str | None = None
    otherwise: str | None = None


def _fired_before(
    history: Iterable[Cell],
    versions: Mapping[str, str] | None,
    settings: Settings,
    facts: Mapping[str, Any],
) -> Fired:
    otherwise = None
    for document in history:
        stack, broken = document["stack"], document["arms"].get("broken")
        seen = {attempt["outcome"]["outcome"] for attempt in broken["attempts"]} if broken else set()
        if broken is None or seen - set(NO_EVIDENCE) != {"fires"} or stack.get("changed"):
            continue
        theirs = stack["versions"]
        if versions is None or is_older(theirs, versions):
            shown = ", ".join(f"{name} {theirs[name]}" for name in ("torch", "transformers") if name in theirs)
            where = f"{stack['name'] or 'an older stack'}" + (f" ({shown})" if shown else "")
            why = comparable(settings, broken["settings"])
            why = why or differs(facts, facts, document["hardware"].get("facts", {}))
            if why is None:
                return Fired(where)
            otherwise = otherwise or f"{where}, where it fired: {why}"
    return Fired(None, otherwise)


def is_older(versions: Mapping[str, Any], than: Mapping[str, Any]) -> bool:
    """Some upstream package is older, and none newer, of those that both have."""
    older = False
    for name in versions.keys() & than.keys() & DATED:
        try:
            left, right = Version(str(versions[name])), Version(str(than[name]))
        except InvalidVersion:
            continue
        if left > right:
            return False
        older = older or left < right
    return older
