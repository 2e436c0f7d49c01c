"""Grade a variant over all its attempts: the outcomes of a cell -> a verdict per fix variant. Pure.

Only attempts that ran count: ``skipped`` and ``infra_error`` are no evidence, and never make a
verdict more certain.

===============================  ================  ======================================
unfixed                          fix               verdict
===============================  ================  ======================================
reproduced                       passed            FIXED
reproduced                       reproduced        NOT_FIXED
reproduced                       other_failure     DIFFERENT_FAILURE (names a known case)
passed                           passed            NOT_REPRODUCED, or FIXED_UPSTREAM where
                                                   an older stack reproduced the failure
passed                           any failure       FIX_BREAKS
other_failure                    any               SIGNATURE_MISMATCH
attempts of either disagree                        FLAKY
hang in either, or none counts                     INCONCLUSIVE
never reproduced, none stored                      INCONCLUSIVE (a new case)
===============================  ================  ======================================
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from packaging.version import InvalidVersion, Version

from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import UPSTREAM, VerdictName
from repro_matrix.grading.expected import (
    capability_difference,
    depends_on_capabilities,
    settings_difference,
)
from repro_matrix.grading.root_cause import all_failure_ids
from repro_matrix.records.attempt import Settings
from repro_matrix.records.document import CellRecord
from repro_matrix.records.outcome import FAILING, Interval, Outcome, Verdict
from repro_matrix.text import counted

NO_EVIDENCE = ("skipped", "infra_error")
Z = 1.959963984540054  # of a 95 % interval
# The packages whose releases make failures come and go; other differences between stacks date
# nothing.
DATED = frozenset({*UPSTREAM, "trl"})


@dataclass(frozen=True)
class OlderReproduction:
    """Hold the older stack on which the unfixed variant reproduced.

    ``not_comparable``: one on which it did, but whose measurement is not comparable.
    """

    stack: str | None = None
    not_comparable: str | None = None


def wilson(k: int, n: int) -> Interval:
    """Return the 95 % Wilson interval of a share k/n; (0, 1) when nothing was counted."""
    if n <= 0:
        return 0.0, 1.0
    share, spread = k / n, Z * Z / n
    centre = (share + spread / 2) / (1 + spread)
    half = Z * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    low = 0.0 if k == 0 else max(0.0, centre - half)
    high = 1.0 if k == n else min(1.0, centre + half)
    return round(low, 4), round(high, 4)


def judge(
    case: Case,
    outcomes: Mapping[str, Sequence[Outcome]],
    history: Iterable[CellRecord] = (),
    versions: Mapping[str, str] | None = None,
    settings: Settings | None = None,
    facts: Mapping[str, Any] | None = None,
    changed: Sequence[str] = (),
) -> dict[str, Verdict]:
    """Return one verdict per fix variant of a failure, or of a control's one variant.

    Variants without ``outcomes`` have none. ``history`` are stored documents of the same cell on
    other stacks. With ``versions`` (this stack's) only those of an older stack count; with
    ``settings`` (of the unfixed variant) only those with comparable settings, on a machine with the
    same capabilities (``facts``) if the unfixed variant depends on them. ``changed``: files of this
    stack that are not as their packages installed them; such a stack is not evidence about a
    release.
    """
    if case.kind == "control":
        return {"control": _control(outcomes.get("control", ()))}
    needed = {fact: (facts or {}).get(fact) for fact in depends_on_capabilities(case, "unfixed")}
    history = list(history)
    older = _older_reproduction(history, versions, settings or {}, needed)
    if changed and older.stack:
        older = OlderReproduction(None, f"{older.stack}, where it reproduced: here, {changed[0]}")
    unfixed = outcomes.get("unfixed", ())
    fixes = [variant for variant in case.variants if variant != "unfixed" and variant in outcomes]
    verdicts = {
        variant: judge_pair(case.slug, unfixed, outcomes[variant], older) for variant in fixes
    }
    reproduced = any(outcome.outcome == "reproduced" for outcome in unfixed)
    if case.expect or reproduced or any(map(_reproduced, history)):
        return verdicts
    return {variant: _unproven(verdict, unfixed) for variant, verdict in verdicts.items()}


def evidence(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the attempts that count."""
    return [outcome for outcome in outcomes if outcome.outcome not in NO_EVIDENCE]


def count_outcomes(outcomes: Sequence[Outcome]) -> str:
    """Return ``reproduced 3/3`` or ``reproduced 2/3, passed 1/3``.

    Without evidence ``skipped: needs 2 GPUs``.
    """
    counted = evidence(outcomes)
    if not counted:
        return _why_no_evidence(outcomes)
    return shares(Counter(outcome.outcome for outcome in counted))


def shares(counts: Counter[Any]) -> str:
    """Return ``reproduced 2/3, passed 1/3``, the most frequent first."""
    order = sorted(counts, key=lambda name: (-counts[name], name))
    return ", ".join(f"{name} {counts[name]}/{counts.total()}" for name in order)


def _unproven(verdict: Verdict, unfixed: Sequence[Outcome]) -> Verdict:
    """Return the verdict of a case that never reproduced, and does not here.

    Its script or signature may be wrong.
    """
    if not verdict.measured or verdict.name in ("INCONCLUSIVE", "FLAKY"):
        return verdict
    counted = evidence(unfixed)
    reason = (
        f"no stored measurement shows this failure, and unfixed is {count_outcomes(counted)}:"
        f" {counted[0].reason}"
    )
    return replace(
        verdict, name="INCONCLUSIVE", reason=reason, named_case=None, failure_ids=(), unseen=True
    )


def judge_pair(
    case: str,
    all_unfixed: Sequence[Outcome],
    all_fix: Sequence[Outcome],
    older: OlderReproduction = OlderReproduction(),
) -> Verdict:
    """Grade a variant against the unfixed one, or any other one in its place."""
    unfixed, fix = evidence(all_unfixed), evidence(all_fix)
    base = _figures(unfixed, fix)
    lost = len(all_unfixed) - len(unfixed) + len(all_fix) - len(fix)
    note = f" ({counted(lost, 'attempt')} not counted)" if lost and unfixed and fix else ""
    for name, outcomes in (("unfixed", unfixed), ("the fix", fix)):
        if outcomes and all(outcome.blocking for outcome in outcomes):
            note += (
                f"; {name} only with CUDA_LAUNCH_BLOCKING=1, without which it ends with an"
                " asynchronous CUDA error"
            )

    if not unfixed:
        return _not_measured(base, f"unfixed: {_why_no_evidence(all_unfixed)}", all_unfixed)
    if not fix:
        reason = f"unfixed {count_outcomes(unfixed)}; fix {_why_no_evidence(all_fix)}"
        return _not_measured(base, reason, all_fix)
    name, reason, failing = _decide(unfixed, fix, older)
    return replace(
        base,
        name=name,
        reason=reason + note,
        named_case=_named_case(case, failing),
        failure_ids=all_failure_ids(case, failing) if name in FAILING else (),
    )


def _decide(
    unfixed: Sequence[Outcome], fix: Sequence[Outcome], older: OlderReproduction
) -> tuple[VerdictName, str, Sequence[Outcome]]:
    """Return the verdict by the table above, its reason, and the outcomes of what failed."""
    before, after = ({each.outcome for each in outcomes} for outcomes in (unfixed, fix))
    alone, why_unfixed, why_fix = count_outcomes(unfixed), unfixed[0].reason, fix[0].reason
    both = f"unfixed {alone}; fix {count_outcomes(fix)}"
    if len(before) > 1 or len(after) > 1:
        return "FLAKY", both, fix
    match before.pop(), after.pop():
        case "hang", _:
            return "INCONCLUSIVE", f"unfixed hangs, which is not its signature: {why_unfixed}", ()
        case "other_failure", _:
            reason = f"unfixed fails, but not with its signature: {why_unfixed}"
            return "SIGNATURE_MISMATCH", reason, unfixed
        case _, "hang":
            return "INCONCLUSIVE", f"unfixed {alone}; the fix hangs: {why_fix}", ()
        case "passed", "passed" if older.stack:
            return "FIXED_UPSTREAM", f"{both}; it reproduced in {older.stack}", ()
        case "passed", "passed":
            note = f"; not compared with {older.not_comparable}" if older.not_comparable else ""
            return "NOT_REPRODUCED", both + note, ()
        case "passed", _:
            return "FIX_BREAKS", f"unfixed passes, the fix fails: {why_fix}", fix
        case _, "passed":
            return "FIXED", both, ()
        case _, "reproduced":
            count, fixes = len(unfixed), len(fix)
            shares = f"fails {count}/{count} without the fix, {fixes}/{fixes} with it"
            return "NOT_FIXED", f"{shares}: {why_fix}", fix
    reason = f"unfixed {alone}; the fix shows a different failure: {why_fix}"
    return "DIFFERENT_FAILURE", reason, fix


def _control(outcomes: Sequence[Outcome]) -> Verdict:
    counted = evidence(outcomes)
    base = _figures([], counted)
    kinds = {outcome.outcome for outcome in counted}
    if not counted:
        return _not_measured(base, _why_no_evidence(outcomes), outcomes)
    if len(kinds) > 1:
        return replace(base, name="FLAKY", reason=count_outcomes(counted))
    if kinds == {"passed"}:
        return replace(base, name="PASSED", reason=count_outcomes(counted))
    if kinds == {"hang"}:
        return replace(base, reason=f"it hangs: {counted[0].reason}")
    reason, ids = f"{count_outcomes(counted)}: {counted[0].reason}", all_failure_ids("", counted)
    return replace(
        base, name="FAILED", reason=reason, named_case=_named_case("", counted), failure_ids=ids
    )


def _figures(unfixed: Sequence[Outcome], fix: Sequence[Outcome]) -> Verdict:
    """Return the figures of a verdict that has no name yet."""
    reproduced = sum(outcome.outcome == "reproduced" for outcome in unfixed)
    passed = sum(outcome.outcome == "passed" for outcome in fix)
    interval = wilson(passed, len(fix)) if fix else None
    unfixed_interval = wilson(reproduced, len(unfixed)) if unfixed else None
    return Verdict(
        "INCONCLUSIVE", "", reproduced, len(unfixed), passed, len(fix), interval, unfixed_interval
    )


def _not_measured(base: Verdict, reason: str, outcomes: Sequence[Outcome]) -> Verdict:
    infra_error = any(each.outcome == "infra_error" for each in outcomes)
    return replace(base, reason=reason, measured=False, infra_error=infra_error)


def _named_case(case: str, outcomes: Iterable[Outcome]) -> str | None:
    """Return the most frequent other known failure; of equally many the first by name."""
    failed = (
        outcome.others(case)[:1] for outcome in outcomes if outcome.outcome == "other_failure"
    )
    count = Counter(item.case for others in failed for item in others)
    return min(count, key=lambda name: (-count[name], name), default=None)


def _why_no_evidence(outcomes: Sequence[Outcome]) -> str:
    return (
        "; ".join(dict.fromkeys(f"{outcome.outcome}: {outcome.reason}" for outcome in outcomes))
        or "not run"
    )


def _older_reproduction(
    history: Iterable[CellRecord],
    versions: Mapping[str, str] | None,
    settings: Settings,
    needed: Mapping[str, Any],
) -> OlderReproduction:
    not_comparable = None
    for document in filter(_reproduced, history):
        stack, unfixed = document["stack"], document["variants"]["unfixed"]
        older = stack["versions"]
        if versions is not None and not is_older(older, versions):
            continue
        known = [f"{name} {older[name]}" for name in ("torch", "transformers") if name in older]
        named = (stack["name"] or "an older stack") + (f" ({', '.join(known)})" if known else "")
        facts = document["hardware"].get("capabilities", {})
        difference = settings_difference(settings, unfixed["settings"])
        difference = difference or capability_difference(needed, needed, facts)
        if difference is None:
            return OlderReproduction(named)
        not_comparable = not_comparable or f"{named}, where it reproduced: {difference}"
    return OlderReproduction(None, not_comparable)


def _reproduced(document: CellRecord) -> bool:
    """Return whether every attempt of the unfixed variant with evidence reproduced the failure."""
    unfixed = document["variants"].get("unfixed")
    attempts = unfixed["attempts"] if unfixed else ()
    outcomes = {attempt["outcome"]["outcome"] for attempt in attempts} - set(NO_EVIDENCE)
    return outcomes == {"reproduced"} and not document["stack"].get("changed")


def is_older(versions: Mapping[str, Any], than: Mapping[str, Any]) -> bool:
    """Return whether some common upstream package is older, and none newer."""
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
