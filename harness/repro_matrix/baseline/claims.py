"""The claims ledger: what stored measurements show about each claim. Pure.

A claim predicts; each stored cell that a prediction is about makes it true or false, or decides
nothing. All true:
``supported``; all false: ``refuted``; both: ``mixed``, on what differs between them; none decided:
``untested``.

A measurement counts only where the failure occurs: what was skipped, lost, inconclusive or flaky
decides nothing, and neither does a variant where the one that it is compared with (``unfixed``, or
``relative_to``) does not reproduce.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from repro_matrix.baseline.claim_evidence import Cell, as_set, decide
from repro_matrix.config.expectations import Claim, Prediction
from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import UPSTREAM
from repro_matrix.grading.expected import settings_difference
from repro_matrix.records.attempt import Settings
from repro_matrix.results.rows import Row
from repro_matrix.text import counted, list_some

Status = Literal["supported", "refuted", "mixed", "untested"]
MAX_REASONS = 3  # that are shown


@dataclass(frozen=True)
class ClaimEvidence:
    """The evidence of one stored cell for or against a prediction."""

    document: str  # where it is stored
    case: str
    variant: str
    model: str
    strategy: str
    ranks: str
    stack: str
    hardware: str
    setting: str  # flags, scale, weights and whether it is simulated
    predicted: str
    measured: str  # what was measured, or why it decides nothing
    holds: bool | None  # None: not decided
    simulated: bool  # measured on fake devices; decides only where no real measurement does
    when: str | None
    versions: Mapping[str, str]


@dataclass(frozen=True)
class ClaimRow:
    """One claim of the ledger."""

    case: str
    id: str
    text: str
    source: str
    status: Status
    detail: str  # mixed: on what; untested: why; else how much was measured
    evidence: tuple[ClaimEvidence, ...] = ()
    brief: str = ""  # of a settled one: by how many measurements


def ledger(cases: Iterable[Case], rows: Iterable[Row]) -> list[ClaimRow]:
    """Return one row per claim, in the catalogue's order, from all stored rows.

    Of several measurements of the same cell on the same versions and machine the newest that
    decides counts.
    """
    cells = sorted(_cells(rows), key=lambda cell: -_first(cell).started)
    by_case: dict[str, list[Cell]] = {}
    for cell in cells:
        by_case.setdefault(_first(cell).case, []).append(cell)
    return [_claim(case, claim, by_case) for case in cases for claim in case.claims]


def _cells(rows: Iterable[Row]) -> list[Cell]:
    """Group the rows of complete cells.

    The rows of a cell are consecutive, its first variant first.
    """
    cells: list[dict[str, Row]] = []
    for row in rows:
        if row.first:
            cells.append({})
        if cells:
            cells[-1][row.variant] = row
    return [cell for cell in cells if _first(cell).complete]


def _first(cell: Cell) -> Row:
    return next(iter(cell.values()))


def _place(cell: Cell) -> tuple[str, str, str]:
    row = _first(cell)
    return row.cell_id, row.params, row.hardware.kind


def _claim(case: Case, claim: Claim, by_case: Mapping[str, Sequence[Cell]]) -> ClaimRow:
    def result(
        status: Status, detail: str, evidence: Iterable[ClaimEvidence] = (), brief: str = ""
    ) -> ClaimRow:
        return ClaimRow(
            case.slug, claim.id, claim.text, claim.source, status, detail, tuple(evidence), brief
        )

    if claim.untestable:
        return result("untested", claim.untestable)
    evidence: list[ClaimEvidence] = []
    missing: list[str] = []
    uncommitted = False
    for prediction in claim.predictions:
        slug = prediction.case or case.slug
        cells = [cell for cell in by_case.get(slug, ()) if _is_about(prediction, _first(cell))]
        each = [_evidence(prediction, cell, cells) for cell in cells]
        evidence += _newest(each, cells)
        uncommitted = uncommitted or any(_first(cell).dirty for cell in cells)
        if not cells:
            missing.append(f"no stored measurement of {_scope(prediction, slug)}")
    evidence = _real_before_simulated(evidence)
    decided = [item for item in evidence if item.holds is not None]
    reasons = [*(item.measured for item in evidence if item.holds is None), *missing]
    undecided = list_some(list(dict.fromkeys(reasons)), MAX_REASONS, "; ")
    if not decided:
        return result("untested", undecided, evidence)
    edited = ", with files that were not committed" if uncommitted else ""
    if len({item.holds for item in decided}) == 2:
        simulated = "simulated: " if decided[0].simulated else ""
        return result("mixed", simulated + _conditions(decided) + edited, evidence)
    brief = (
        counted(len(decided), "simulated measurement" if decided[0].simulated else "measurement")
        + edited
    )
    shown = list(dict.fromkeys(f"{item.variant} {item.measured}" for item in decided))
    detail = f"{brief}: {list_some(shown, 2, '; ')}" + (
        f"; not decided: {undecided}" if undecided else ""
    )
    return result("supported" if decided[0].holds else "refuted", detail, evidence, brief)


def _real_before_simulated(found: list[ClaimEvidence]) -> list[ClaimEvidence]:
    """Let a simulation decide nothing if a real measurement decides."""
    if not any(item.holds is not None and not item.simulated for item in found):
        return found
    reason = "simulated, and a real measurement decides"
    return [
        replace(i, holds=None, measured=f"{reason}: {i.measured}") if i.simulated else i
        for i in found
    ]


def _newest(evidence: list[ClaimEvidence], cells: Sequence[Cell]) -> list[ClaimEvidence]:
    """Keep one per cell, versions and machine: the newest that decides, else the newest.

    Both lists are newest first.
    """
    kept: dict[str, ClaimEvidence] = {}
    for item, cell in zip(evidence, cells):
        hardware = _first(cell).hardware
        machine = (item.hardware, hardware.cpu, sorted(hardware.gpus))
        settings = (item.model, item.strategy, item.ranks, item.setting)
        key = repr((settings, machine, sorted(item.versions.items())))
        if key not in kept or (kept[key].holds is None and item.holds is not None):
            kept[key] = item
    return list(kept.values())


def _is_about(prediction: Prediction, row: Row) -> bool:
    axes = (
        (prediction.model, row.model),
        (prediction.strategy, row.strategy),
        (prediction.stack, row.stack.name),
    )
    hardware = (None, row.hardware.accelerator, row.hardware.kind, row.hardware.profile)
    return prediction.hardware in hardware and all(
        wanted is None or wanted == actual for wanted, actual in axes
    )


def _evidence(prediction: Prediction, cell: Cell, cells: Sequence[Cell]) -> ClaimEvidence:
    """Return what a cell shows.

    It decides nothing if its settings differ from those of the cell's newest measurement.
    """
    holds, measured = decide(prediction, cell)
    row = _first(cell)
    newest = next(other for other in cells if _place(other) == _place(cell))
    for variant in (prediction.relative_to or "unfixed", prediction.variant):
        if variant in cell and variant in newest:
            settings = (cast(Settings, each[variant].settings) for each in (cell, newest))
            if difference := settings_difference(*settings):
                holds = None
                measured = f"left out: variant {variant}: {difference}"
    setting = [f"{name}={value}" for name, value in row.flags.items()]
    setting += [word for word in row.overrides if word != f"ranks={row.ranks}"]
    setting += [row.scale, f"{row.weights} weights"]
    if row.simulated:
        setting.append("simulated")
    versions = row.stack.versions
    known = [f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions]
    return ClaimEvidence(
        document=row.evidence or row.cell_id,
        case=row.case,
        variant=prediction.variant,
        model=row.model,
        strategy=row.strategy,
        ranks=counted(row.ranks, "rank"),
        stack=f"{row.stack.name} ({', '.join(known)})" if known else row.stack.name,
        hardware=row.hardware.profile,
        setting=" ".join(setting),
        predicted=_predicted(prediction),
        measured=measured,
        holds=holds,
        simulated=bool(row.simulated),
        when=prediction.condition,
        versions=versions,
    )


def _predicted(prediction: Prediction) -> str:
    if metric := prediction.metric:
        side, other = ("below", metric.below) if metric.below else ("above", metric.above)
        factor = f" x {metric.factor:g}" if metric.factor != 1 else ""
        return f"{metric.name} {side} {other}{factor}"
    without = prediction.outcome_without_warning
    names = without or prediction.verdict or prediction.outcome
    return " or ".join(sorted(as_set(names))) + (" but for the remark" if without else "")


def _scope(prediction: Prediction, case: str) -> str:
    """Describe the measurement that is missing."""
    axes = (prediction.model, prediction.strategy, prediction.stack, prediction.hardware)
    return " ".join(
        [f"{case}, variant {prediction.variant}", *(f"[{axis}]" for axis in axes if axis)]
    )


# -- conditions: on what a claim's truth depends

AXES = ("when", "variant", "model", "strategy", "ranks", "hardware", "setting", "case", "predicted")
PACKAGES = (*UPSTREAM, "trl")
MAX_VALUES = 4  # of one side


def _conditions(decided: Sequence[ClaimEvidence]) -> str:
    """Return the condition: ``holds in torch 2.2.2; not in torch 2.13.0``.

    It is the first axis, or package, that separates both sides.
    """
    for axis in (*AXES, *PACKAGES):
        sides: dict[bool | None, set[str]] = {True: set(), False: set()}
        for item in decided:
            sides[item.holds].add(
                getattr(item, axis, None) or item.versions.get(axis) or "any other"
            )
        if not sides[True] & sides[False]:
            where = ":" if axis == "when" else f" in {axis}"
            return f"holds{where} {_list(sides[True])}; not{where} {_list(sides[False])}"
    held = sum(bool(item.holds) for item in decided)
    return f"measurements disagree: {held} for it, {len(decided) - held} against it"


def _list(values: Iterable[str]) -> str:
    """Return the first values, releases in order."""
    listed = sorted(
        values, key=lambda value: [(part.isdigit(), part.zfill(9)) for part in value.split(".")]
    )
    return list_some(listed, MAX_VALUES)
