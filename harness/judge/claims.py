"""The claims ledger: what stored measurements say about each claim. Pure.

A claim predicts; each stored document that a prediction is about makes it true, makes it false, or leaves it open. All
true: ``upheld``; all false: ``refuted``; both: ``conditional``, on what tells them apart; none decided: ``untested``,
with the reasons. What was skipped, lost, inconclusive or flaky decides nothing, and neither does a fix where nothing is
broken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from harness.judge.evidence import items, mapping, number, text
from harness.judge.metrics import compare_metric
from harness.judge.verdict import NO_EVIDENCE
from harness.schema import Case, Claim, OutcomeName, Prediction, VerdictName

Document = Mapping[str, Any]
Status = Literal["upheld", "refuted", "conditional", "untested"]

FIRING = frozenset({"FIX_HOLDS", "FIX_BROKEN", "FIX_UNMASKS"})  # verdicts that only a broken arm that fires can have
NOT_FIRING = frozenset({"NOT_FIRING", "UPSTREAM_FIXED", "FIX_HARMFUL"})  # and those of one that is clean


@dataclass(frozen=True)
class Evidence:
    """One stored document's word on one prediction."""

    document: str  # where it is stored
    case: str
    arm: str
    model: str
    strategy: str
    stack: str
    hardware: str
    setting: str  # flags, scale, weights and whether it is simulated, in words
    predicted: str
    measured: str  # what was seen, or why it decides nothing
    holds: bool | None  # None: not decided
    when: str | None = None


@dataclass(frozen=True)
class ClaimRow:
    """One claim of the ledger."""

    case: str
    id: str
    text: str
    source: str
    status: Status
    detail: str  # conditional: on what; untested: why; else how much was measured
    evidence: tuple[Evidence, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ledger(cases: Iterable[Case], documents: Iterable[Document]) -> list[ClaimRow]:
    """One row per claim, in the catalogue's order. Of several documents of the same cell on the same versions and
    machine the newest that decides counts."""
    by_case: dict[str, list[Document]] = {}
    newest_first = sorted(documents, key=lambda d: -(number(mapping(d.get("provenance")).get("started")) or 0.0))
    for document in newest_first:
        by_case.setdefault(text(document.get("case")), []).append(document)
    return [_row(case, claim, by_case) for case in cases for claim in case.claims]


def _row(case: Case, claim: Claim, by_case: Mapping[str, Sequence[Document]]) -> ClaimRow:
    def row(status: Status, detail: str, evidence: Iterable[Evidence] = ()) -> ClaimRow:
        return ClaimRow(case.slug, claim.id, claim.text, claim.source, status, detail, tuple(evidence))

    if claim.untestable:
        return row("untested", claim.untestable)
    found: list[Evidence] = []
    absent: list[str] = []  # predictions that no stored document is about
    for prediction in claim.predicts:
        slug = prediction.case or case.slug
        about = [d for d in by_case.get(slug, ()) if _is_about(prediction, d)]
        found += _newest([_evidence(prediction, slug, document) for document in about], about)
        if not about:
            absent.append(f"no stored measurement of {_scope(prediction, slug)}")
    decided = [item for item in found if item.holds is not None]
    open_ = list(dict.fromkeys([*(item.measured for item in found if item.holds is None), *absent]))
    if not decided:
        return row("untested", "; ".join(open_), found)
    true = [item for item in decided if item.holds]
    false = [item for item in decided if not item.holds]
    if true and false:
        return row("conditional", _condition(true, false), found)
    rest = f"; not decided: {'; '.join(open_)}" if open_ else ""
    return row("refuted" if false else "upheld", _by(decided) + rest, found)


def _by(decided: list[Evidence]) -> str:
    """How many measurements, and what the first of them showed."""
    shown = list(dict.fromkeys(f"{item.arm} {item.measured}" for item in decided))
    more = f"; and {len(shown) - 2} more" if len(shown) > 2 else ""
    return f"{len(decided)} measurement{'s' if len(decided) > 1 else ''}: {'; '.join(shown[:2])}{more}"


def _newest(found: list[Evidence], documents: list[Document]) -> list[Evidence]:
    """One per cell, versions and machine: the newest that decides, else the newest. Both lists are newest first."""
    kept: dict[str, Evidence] = {}
    for item, document in zip(found, documents):
        hardware = mapping(document.get("hardware"))
        gpus = sorted(text(gpu.get("name")) for gpu in items(hardware.get("gpus")))
        versions = sorted((str(k), str(v)) for k, v in mapping(mapping(document.get("stack")).get("versions")).items())
        key = repr((item.model, item.strategy, item.setting, item.hardware, hardware.get("cpu"), gpus, versions))
        if key not in kept or (kept[key].holds is None and item.holds is not None):
            kept[key] = item
    return list(kept.values())


def _is_about(prediction: Prediction, document: Document) -> bool:
    stack, hardware = mapping(document.get("stack")), mapping(document.get("hardware"))
    axes = (
        (prediction.model, document.get("model")),
        (prediction.strategy, document.get("strategy")),
        (prediction.stack, stack.get("name")),
        (prediction.hardware, hardware.get("profile")),
    )
    return all(wanted is None or wanted == have for wanted, have in axes)


def _evidence(prediction: Prediction, case: str, document: Document) -> Evidence:
    holds, measured = _decide(prediction, document)
    stack = mapping(document.get("stack"))
    versions = mapping(stack.get("versions"))
    known = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions)
    setting = [f"{name}={value}" for name, value in mapping(document.get("flags")).items()]
    setting += [text(document.get("scale")), f"{text(document.get('weights'))} weights"]
    if document.get("simulated"):
        setting.append("simulated")
    where = f"{case}/{text(document.get('model'))}-{text(document.get('strategy'))}"
    return Evidence(
        document=text(document.get("path")) or where,
        case=case,
        arm=prediction.arm,
        model=text(document.get("model")),
        strategy=text(document.get("strategy")),
        stack=text(stack.get("name")) + (f" ({known})" if known else ""),
        hardware=text(mapping(document.get("hardware")).get("profile")),
        setting=" ".join(setting),
        predicted=_predicted(prediction),
        measured=measured,
        holds=holds,
        when=prediction.when,
    )


def _decide(prediction: Prediction, document: Document) -> tuple[bool | None, str]:
    """Whether the document makes the prediction true, and what it shows."""
    arm = mapping(mapping(document.get("arms")).get(prediction.arm))
    if not arm:
        return None, f"arm {prediction.arm} was not run"
    if arm.get("skipped"):
        return None, f"skipped: {arm['skipped']}"
    if prediction.metric is not None:
        return compare_metric(prediction.metric, prediction.arm, document)
    if prediction.outcome is not None:
        return _by_outcome(_listed(prediction.outcome), arm)
    verdict = mapping(mapping(document.get("verdicts")).get(prediction.arm))
    if text(verdict.get("name")) not in get_args(VerdictName):
        return None, f"arm {prediction.arm} has no verdict"
    holds, why = _by_verdict(_listed(prediction.verdict), text(verdict.get("name")))
    reason = text(verdict.get("reason"))
    return holds, (f"{why}: " if why else "") + text(verdict.get("name")) + (f" ({reason})" if reason else "")


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


def _by_outcome(wanted: frozenset[str], arm: Mapping[str, Any]) -> tuple[bool | None, str]:
    outcomes = [mapping(attempt.get("outcome")) for attempt in items(arm.get("attempts"))]
    names = [text(outcome.get("outcome")) for outcome in outcomes]
    counted = [name for name in names if name in get_args(OutcomeName) and name not in NO_EVIDENCE]
    if not counted:
        reasons = dict.fromkeys(f"{text(o.get('outcome'))}: {text(o.get('reason'))}" for o in outcomes)
        return None, "; ".join(reasons) or "not run"
    kinds = sorted(set(counted), key=lambda kind: (-counted.count(kind), kind))
    shown = ", ".join(f"{kind} {counted.count(kind)}/{len(counted)}" for kind in kinds)
    if set(counted) <= wanted:
        return True, shown
    if set(counted) & wanted:
        return None, f"flaky: {shown}"
    reason = next(text(outcome.get("reason")) for outcome in outcomes if outcome.get("outcome") == kinds[0])
    if set(counted) == {"hang"}:
        return None, f"inconclusive: {shown} ({reason})"
    return False, f"{shown} ({reason})"


def _condition(true: list[Evidence], false: list[Evidence]) -> str:
    """On what it depends: the predictions' own words where they tell the two apart, else the axes that do."""
    yes, no = {item.when for item in true}, {item.when for item in false}
    if not yes & no and (yes | no) - {None}:
        return f"holds: {_words(yes)}; does not hold: {_words(no)}"
    axes = ("stack", "model", "strategy", "hardware", "setting", "case", "arm", "predicted")
    # Several axes may tell them apart equally well: which of them it is, the measurements do not say.
    alone = [apart for apart in (_apart((axis,), true, false) for axis in axes) if apart]
    if alone:
        return " | or ".join(alone)
    differing = tuple(axis for axis in axes if len({getattr(item, axis) for item in true + false}) > 1)
    return _apart(differing, true, false) or "measurements of the same cell disagree"


def _apart(axes: Sequence[str], true: list[Evidence], false: list[Evidence]) -> str:
    """Both sides by these axes, when together they tell every true measurement from every false one."""
    yes = {tuple(getattr(item, axis) for axis in axes) for item in true}
    no = {tuple(getattr(item, axis) for axis in axes) for item in false}
    if yes & no or not axes:
        return ""
    named = " ".join(axes)
    return f"{named}: holds on {_values(yes)}; not on {_values(no)}"


def _values(values: Iterable[tuple[str, ...]]) -> str:
    return ", ".join(sorted(" ".join(part for part in value if part) for value in values))


def _words(conditions: Iterable[str | None]) -> str:
    return ", ".join(sorted(item or "otherwise" for item in conditions))


def _listed(value: Any) -> frozenset[str]:
    return frozenset(value if isinstance(value, list) else [value])


def _predicted(prediction: Prediction) -> str:
    metric = prediction.metric
    if metric is not None:
        side, other = ("below", metric.below) if metric.below else ("above", metric.above)
        return f"{metric.name} {side} {other}" + (f" x {metric.factor:g}" if metric.factor != 1 else "")
    return " or ".join(sorted(_listed(prediction.verdict if prediction.verdict is not None else prediction.outcome)))


def _scope(prediction: Prediction, case: str) -> str:
    """What would have to be measured, in words."""
    axes = (prediction.model, prediction.strategy, prediction.stack, prediction.hardware)
    return " ".join([f"{case}, arm {prediction.arm}", *(f"[{axis}]" for axis in axes if axis)])
