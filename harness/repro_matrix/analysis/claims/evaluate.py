"""Whether one document makes a claim's prediction true, false, or says nothing of it. Pure."""

from __future__ import annotations

from typing import Any

from repro_matrix.analysis.claims.metrics import compare_metric
from repro_matrix.config.predictions import Prediction
from repro_matrix.grading.outcome import Outcome
from repro_matrix.grading.verdict import NO_EVIDENCE, judge_pair
from repro_matrix.records.document import Arm, Document

FIRING = frozenset({"FIX_HOLDS", "FIX_BROKEN", "FIX_UNMASKS"})  # verdicts that only a broken arm that fires can have
NOT_FIRING = frozenset({"NOT_FIRING", "UPSTREAM_FIXED", "FIX_HARMFUL"})  # and those of one that is clean


def decide(prediction: Prediction, case: str, document: Document) -> tuple[bool | None, str]:
    """Whether the document makes the prediction true, and what it shows."""
    arm = document["arms"].get(prediction.arm)
    if arm is None:
        return None, f"arm {prediction.arm} was not run"
    if arm["skipped"]:
        return None, f"skipped: {arm['skipped']}"
    if prediction.metric is not None:
        return compare_metric(prediction.metric, prediction.arm, document)
    if prediction.outcome is not None:
        wanted = listed(prediction.outcome)
        return _not_there(prediction, wanted, document) or _by_outcome(wanted, arm)
    if prediction.otherwise is not None:
        there = _not_there(prediction, frozenset({"fires"}), document)
        if there:
            return there
        holds, measured = _by_outcome(listed(prediction.otherwise), arm, but_for_remarks=True)
        return holds, f"but for the remark {measured}"
    if prediction.against:
        return _against(prediction, case, document)
    verdict = document["verdicts"].get(prediction.arm)
    if verdict is None:
        return None, f"arm {prediction.arm} has no verdict"
    holds, why = _by_verdict(listed(prediction.verdict), verdict["name"])
    return holds, (f"{why}: " if why else "") + f"{verdict['name']} ({verdict['reason']})"


def _against(prediction: Prediction, case: str, document: Document) -> tuple[bool | None, str]:
    """The verdict of an arm that stands in the place of another one than ``broken``."""
    other = prediction.against or "broken"
    found = judge_pair(case, _outcomes(document, other), _outcomes(document, prediction.arm))
    holds, why = _by_verdict(listed(prediction.verdict), found.name)
    return holds, (f"{why}: " if why else "") + f"{found.name} against {other} ({found.reason})"


def _outcomes(document: Document, arm: str) -> list[Outcome]:
    held = document["arms"].get(arm)
    return [Outcome.from_json(attempt["outcome"]) for attempt in held["attempts"]] if held else []


def _not_there(prediction: Prediction, wanted: frozenset[str], document: Document) -> tuple[None, str] | None:
    """That the failure does not fire where this outcome is predicted, so that it decides nothing; None when it may.

    Of the broken arm itself anything may be predicted but that it fires: where it does not, the failure is not there.
    """
    arm, other = prediction.arm, prediction.against or "broken"
    if arm == "control" or (arm == other and "fires" not in wanted):
        return None
    names = {outcome.outcome for outcome in _outcomes(document, other)} - set(NO_EVIDENCE)
    if names == {"fires"}:
        return None
    if arm == other and (not names or "fires" in names):
        return None  # what its own attempts say: none ran, or they disagree
    return None, f"could not be tested on this stack: {other} does not fire"


def _by_verdict(wanted: frozenset[str], name: str) -> tuple[bool | None, str]:
    """Whether a verdict makes the prediction true; None, with the reason, when it says nothing about it."""
    if name == "INCONCLUSIVE":
        return None, "inconclusive"
    if name in wanted or (name == "UPSTREAM_FIXED" and "NOT_FIRING" in wanted):
        return True, ""
    if name == "FLAKY":
        return None, "flaky"
    if name == "NOT_FIRING" and "UPSTREAM_FIXED" in wanted:
        return None, "no stored measurement of an older stack fired"
    # A fix can only be tried where something is broken, and only be harmful where nothing is.
    if name in NOT_FIRING | {"CHANGED"} and wanted <= FIRING:
        return None, "could not be tested on this stack: broken does not fire"
    if name in FIRING | {"CHANGED"} and wanted <= {"FIX_HARMFUL"}:
        return None, "could not be tested on this stack: broken is not clean"
    if name in NOT_FIRING and wanted <= {"CHANGED"}:
        return None, "could not be tested on this stack: broken is clean"
    return False, ""


def _by_outcome(wanted: frozenset[str], arm: Arm, but_for_remarks: bool = False) -> tuple[bool | None, str]:
    outcomes = [attempt["outcome"] for attempt in arm["attempts"]]
    if but_for_remarks:
        outcomes = [{**outcome, "outcome": outcome.get("otherwise") or outcome["outcome"]} for outcome in outcomes]
    counted = [outcome["outcome"] for outcome in outcomes if outcome["outcome"] not in NO_EVIDENCE]
    if not counted:
        reasons = dict.fromkeys(f"{outcome['outcome']}: {outcome['reason']}" for outcome in outcomes)
        return None, "; ".join(reasons) or "not run"
    kinds = sorted(set(counted), key=lambda kind: (-counted.count(kind), kind))
    shown = ", ".join(f"{kind} {counted.count(kind)}/{len(counted)}" for kind in kinds)
    if set(counted) <= wanted:
        return True, shown
    if set(counted) & wanted:
        return None, f"flaky: {shown}"
    reason = next(outcome["reason"] for outcome in outcomes if outcome["outcome"] == kinds[0])
    if set(counted) == {"hang"}:
        return None, f"inconclusive: {shown} ({reason})"
    return False, f"{shown} ({reason})"


def listed(value: Any) -> frozenset[str]:
    return frozenset(value if isinstance(value, list) else [value])
