"""The claims ledger: what stored measurements say about each claim. Pure.

A claim predicts; each stored document that a prediction is about makes it true, makes it false, or leaves it open. All
true: ``upheld``; all false: ``refuted``; both: ``conditional``, on what tells them apart; none decided: ``untested``,
with the reasons.

Only where the failure is there does a measurement count: what was skipped, lost, inconclusive or flaky decides nothing,
and neither does an arm where the one in whose place it stands (``broken``, or ``against``) does not fire, nor an arm
that failed under a strategy which does not run on this stack and hardware at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from repro_matrix.analysis.claims import conditions
from repro_matrix.analysis.claims.conditions import Point
from repro_matrix.analysis.claims.evaluate import decide, listed
from repro_matrix.analysis.claims.support import Grounds
from repro_matrix.config.axes import Strategy
from repro_matrix.config.predictions import Claim, Prediction
from repro_matrix.config.schema import Case
from repro_matrix.grading.comparability import cell_difference
from repro_matrix.records.document import Document

Status = Literal["upheld", "refuted", "conditional", "untested"]


@dataclass(frozen=True)
class Evidence:
    """One stored document's word on one prediction."""

    document: str  # where it is stored
    case: str
    arm: str
    model: str
    strategy: str
    ranks: str
    stack: str
    hardware: str
    setting: str  # flags, scale, weights and whether it is simulated, in words
    predicted: str
    measured: str  # what was seen, or why it decides nothing
    holds: bool | None  # None: not decided
    simulated: bool = False  # what happened on fake devices; decides only where no real measurement does
    when: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


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
    brief: str = ""  # of a settled one: by how many measurements

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def ledger(
    cases: Iterable[Case],
    documents: Iterable[Document],
    strategies: Mapping[str, Strategy] | None = None,
    grounds: Grounds | None = None,
) -> list[ClaimRow]:
    """One row per claim, in the catalogue's order. Of several documents of the same cell on the same versions and
    machine the newest that decides counts. ``strategies`` say what they need of a stack and a machine.
    ``grounds``: where the documents are not all that is stored."""
    by_case: dict[str, list[Document]] = {}
    newest_first = sorted(documents, key=lambda document: -document["provenance"]["started"])
    for document in newest_first:
        by_case.setdefault(document["case"], []).append(document)
    grounds = grounds or Grounds(newest_first, strategies or {})
    return [_row(case, claim, by_case, grounds) for case in cases for claim in case.claims]


def _row(case: Case, claim: Claim, by_case: Mapping[str, Sequence[Document]], grounds: Grounds) -> ClaimRow:
    def row(status: Status, detail: str, evidence: Iterable[Evidence] = (), brief: str = "") -> ClaimRow:
        return ClaimRow(case.slug, claim.id, claim.text, claim.source, status, detail, tuple(evidence), brief)

    if claim.untestable:
        return row("untested", claim.untestable)
    found: list[Evidence] = []
    absent: list[str] = []  # predictions that no stored document is about
    for prediction in claim.predicts:
        slug = prediction.case or case.slug
        about = [d for d in by_case.get(slug, ()) if _is_about(prediction, d)]
        found += _newest([_unless_alike(prediction, slug, d, about, grounds) for d in about], about)
        if not about:
            absent.append(f"no stored measurement of {_scope(prediction, slug)}")
    found = _real_before_simulated(found)
    decided = [item for item in found if item.holds is not None]
    open_ = list(dict.fromkeys([*(item.measured for item in found if item.holds is None), *absent]))
    if not decided:
        return row("untested", _reasons(open_), found)
    true = [item for item in decided if item.holds]
    false = [item for item in decided if not item.holds]
    if true and false:
        depends = conditions.condition([_point(item) for item in decided])
        return row("conditional", ("simulated: " if decided[0].simulated else "") + depends, found)
    rest = f"; not decided: {_reasons(open_)}" if open_ else ""
    return row("refuted" if false else "upheld", f"{_count(decided)}: {_by(decided)}{rest}", found, _count(decided))


REASONS, LONGEST = 3, 160  # why measurements decided nothing: so many are shown, in so many characters each


def _reasons(open_: list[str]) -> str:
    """Why nothing was decided, in a few words: the evidence has all of it."""
    shown = dict.fromkeys(text if len(text) <= LONGEST else text[: LONGEST - 1] + "…" for text in open_)
    more = f"; and {len(shown) - REASONS} more" if len(shown) > REASONS else ""
    return "; ".join(list(shown)[:REASONS]) + more


def _by(decided: list[Evidence]) -> str:
    """What the first of the measurements showed."""
    shown = list(dict.fromkeys(f"{item.arm} {item.measured}" for item in decided))
    more = f"; and {len(shown) - 2} more" if len(shown) > 2 else ""
    return f"{'; '.join(shown[:2])}{more}"


def _count(decided: list[Evidence]) -> str:
    # all or none: a simulation decides only where no real measurement does
    kind = "simulated measurement" if decided[0].simulated else "measurement"
    return f"{len(decided)} {kind}{'s' if len(decided) > 1 else ''}"


def _real_before_simulated(found: list[Evidence]) -> list[Evidence]:
    """A simulation decides nothing where a real measurement does."""
    if not any(item.holds is not None and not item.simulated for item in found):
        return found
    why = "simulated, and a real measurement decides"
    return [replace(i, holds=None, measured=f"{why}: {i.measured}") if i.simulated else i for i in found]


def _newest(found: list[Evidence], documents: list[Document]) -> list[Evidence]:
    """One per cell, versions and machine: the newest that decides, else the newest. Both lists are newest first."""
    kept: dict[str, Evidence] = {}
    for item, document in zip(found, documents):
        hardware = document["hardware"]
        gpus = sorted(gpu["name"] for gpu in hardware["gpus"])
        versions = sorted(document["stack"]["versions"].items())
        key = repr(
            (item.model, item.strategy, item.ranks, item.setting, item.hardware, hardware["cpu"], gpus, versions)
        )
        if key not in kept or (kept[key].holds is None and item.holds is not None):
            kept[key] = item
    return list(kept.values())


def _is_about(prediction: Prediction, document: Document) -> bool:
    axes = (
        (prediction.model, document["model"]),
        (prediction.strategy, document["strategy"]),
        (prediction.ranks, document["ranks"]),
        (prediction.stack, document["stack"]["name"]),
        (prediction.hardware, document["hardware"]["profile"]),
    )
    return all(wanted is None or wanted == have for wanted, have in axes)


def _evidence(prediction: Prediction, case: str, document: Document, grounds: Grounds) -> Evidence:
    holds, measured = decide(prediction, case, document)
    if holds is not None and prediction.metric is None:
        absent = grounds.cannot_run(prediction.arm, document)
        holds, measured = (None, absent) if absent else (holds, measured)
    stack = document["stack"]
    versions = stack["versions"]
    known = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions)
    setting = [f"{name}={value}" for name, value in document["flags"].items()]
    setting += [word for word in document["variant"] if word != f"ranks={document['ranks']}"]
    setting += [document["scale"], f"{document['weights']} weights"]
    if document["simulated"]:
        setting.append("simulated")
    return Evidence(
        document=document.get("path") or f"{case}/{document['model']}-{document['strategy']}",
        case=case,
        arm=prediction.arm,
        model=document["model"],
        strategy=document["strategy"],
        ranks=f"{document['ranks']} ranks",
        stack=stack["name"] + (f" ({known})" if known else ""),
        hardware=document["hardware"]["profile"],
        setting=" ".join(setting),
        predicted=_predicted(prediction),
        measured=measured,
        holds=holds,
        simulated=bool(document["simulated"]),
        when=prediction.when,
        versions=versions,
    )


def _unless_alike(
    prediction: Prediction, case: str, document: Document, about: Sequence[Document], grounds: Grounds
) -> Evidence:
    """The document's word, unless it was measured otherwise than the newest of its cell on this hardware."""
    said = _evidence(prediction, case, document, grounds)
    newest = next(d for d in about if _same_cell(d, document))
    arms = dict.fromkeys([prediction.arm, prediction.against or "broken"])
    why = cell_difference(document, newest, arms)
    return said if why is None else replace(said, holds=None, measured=f"left out: {why}")


def _same_cell(one: Document, other: Document) -> bool:
    axes = ("model", "strategy", "flags", "scale", "weights", "ranks", "variant")
    same_place = one["hardware"]["profile"] == other["hardware"]["profile"]
    return same_place and all(one[axis] == other[axis] for axis in axes)  # type: ignore[literal-required]


def _predicted(prediction: Prediction) -> str:
    metric = prediction.metric
    if metric is not None:
        side, other = ("below", metric.below) if metric.below else ("above", metric.above)
        return f"{metric.name} {side} {other}" + (f" x {metric.factor:g}" if metric.factor != 1 else "")
    if prediction.otherwise is not None:
        return f"{' or '.join(sorted(listed(prediction.otherwise)))} but for the remark"
    return " or ".join(sorted(listed(prediction.verdict if prediction.verdict is not None else prediction.outcome)))


def _scope(prediction: Prediction, case: str) -> str:
    """What would have to be measured, in words."""
    ranks = f"ranks={prediction.ranks}" if prediction.ranks else None
    axes = (prediction.model, prediction.strategy, ranks, prediction.stack, prediction.hardware)
    return " ".join([f"{case}, arm {prediction.arm}", *(f"[{axis}]" for axis in axes if axis)])


def _point(item: Evidence) -> Point:
    axes = {name: getattr(item, name) or "" for name in conditions.AXES}
    return Point(bool(item.holds), axes, item.versions)
