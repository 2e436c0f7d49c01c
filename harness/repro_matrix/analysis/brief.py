"""One stored cell in brief: all that a comparison of many cells needs, in a hundredth of its document. Pure.

A brief is made of a document that was judged anew (judge.again), never of what the document says of itself.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from repro_matrix.config.packages import RELEVANT
from repro_matrix.grading.comparability import settings_difference
from repro_matrix.grading.expectations import as_expected
from repro_matrix.grading.observation import number
from repro_matrix.grading.outcome import Outcome
from repro_matrix.grading.root_cause import all_failure_ids
from repro_matrix.records.document import Arm, Document, Made
from repro_matrix.records.observation import Settings
from repro_matrix.results.rows import error_at, where_of, words_of
from repro_matrix.search.labels import answer

NO_EVIDENCE = ("skipped", "infra")
HANG = "hang"
# Of an arm's settings, what makes it another measurement. Device and backend are left out: a comparison of two machines
# is about those. Each part is stored once for all arms that have it.
_PARTS = ("model", "flags", "strategy", "plain")
Parts = dict[str, Any]  # digest -> a part of some arm's settings


class ArmBrief(NamedTuple):
    """``met``: what failed, by its identity (grading.failure_id), or ``hang``. ``kinds``: outcome -> attempts
    that count. ``wall_s``, ``peak_mb``: of each of these, the fullest rank's peak."""

    verdict: str | None
    kinds: Mapping[str, int]
    met: Sequence[str]
    text: str  # what failed in its own words, without what differs from run to run; or why nothing is known
    wall_s: Sequence[float]
    peak_mb: Sequence[float]
    settings: Sequence[str]  # digests of its parts
    skipped: str | None = None
    expected: str | None = None
    error_at: str | None = None  # file:line

    @property
    def measured(self) -> int:
        """Attempts that count."""
        return sum(self.kinds.values())

    @property
    def steady(self) -> bool:
        return len(self.kinds) == 1

    def counted(self) -> str:
        """``fires 3/3``, ``clean 2/3, fires 1/3``, or why there is none."""
        n = self.measured
        shown = sorted(self.kinds.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{kind} {k}/{n}" for kind, k in shown) if n else self.skipped or self.text or "not measured"


@dataclass(frozen=True)
class Brief:
    """A cell. ``axes``: the words that choose it beside its case. ``versions``: of its stack, those that matter.
    ``started``: seconds since the epoch. ``model``, ``strategy``: empty where a night tells of it."""

    case: str
    key: str
    axes: tuple[str, ...]
    hardware: str
    stack: str
    versions: Mapping[str, str]
    started: float
    commit: str | None
    control: bool
    arms: Mapping[str, ArmBrief]
    path: str = ""
    model: str = ""
    strategy: str = ""

    @property
    def where(self) -> str:
        """The cell as a command line takes it."""
        return placed(self.case, self.axes)

    @property
    def first(self) -> str:
        return next(iter(self.arms), "")


def placed(case: str, axes: Iterable[str]) -> str:
    return " ".join([f"case={case}", *axes])


def brief(document: Document, parts: Parts) -> Brief:
    """A judged document in brief; ``parts`` takes up what its arms' settings consist of."""
    stack, made = document["stack"], document["provenance"]
    return Brief(
        case=document["case"], key=document.get("key") or f"{document['case']}/{where_of(document)}",
        axes=words_of(document), hardware=document["hardware"]["profile"], stack=stack["name"],
        versions={name: version for name, version in stack["versions"].items() if name in RELEVANT},
        started=made["started"], commit=made["git_commit"], control=document["kind"] == "control",
        arms={name: _arm(document, name, arm, parts) for name, arm in document["arms"].items()},
        path=document.get("path", ""), model=document["model"], strategy=document["strategy"],
    )  # fmt: skip


def _arm(document: Document, name: str, arm: Arm, parts: Parts) -> ArmBrief:
    case, attempts = document["case"], arm["attempts"]
    outcomes = [Outcome.from_json(attempt["outcome"]) for attempt in attempts]
    pairs = [(a, o) for a, o in zip(attempts, outcomes) if o.outcome not in NO_EVIDENCE]
    met = {str(item) for item in all_failure_ids(case, outcomes)} | {HANG for _, o in pairs if o.outcome == HANG}
    told = answer(case, attempts)
    verdict = document["verdicts"].get(name)
    lost = [o.reason for o in outcomes if o.outcome == "infra"]
    peaks = [_peak(attempt) for attempt, _ in pairs]
    return ArmBrief(
        verdict=as_expected(verdict["name"]) if verdict else None,
        kinds=dict(Counter(o.outcome for _, o in pairs)),
        met=sorted(met),
        text=told.detail if pairs and met else (lost[0] if lost and not pairs else ""),
        wall_s=[a["observation"]["attempt"]["wall_s"] for a, _ in pairs],
        peak_mb=peaks if all(peaks) else [],
        settings=_settings(arm["settings"], parts),
        skipped=arm["skipped"],
        expected=verdict.get("expected") if verdict else None,
        error_at=error_at(arm["attempts"]),
    )


def _peak(attempt: Made) -> float:
    """MiB of the fullest rank: of its card where it used one, else of the process; 0 where that is not recorded."""
    records = [rank["record"] for rank in attempt["observation"]["ranks"] if rank["record"]]
    for name in ("peak_gpu_mb", "peak_rss_mb"):
        found = [number(record.get(name)) or 0.0 for record in records]
        if any(found):
            return max(found)
    return 0.0


def _settings(settings: Settings, parts: Parts) -> list[str]:
    if not settings:
        return []
    model: Mapping[str, Any] = settings.get("model", {})
    strategy: Mapping[str, Any] = settings.get("strategy", {})
    plain: Mapping[str, Any] = dict(settings)
    found = {
        "model": {key: model.get(key) for key in ("slug", "scale", "weights", "config")},
        "flags": settings.get("flags"),
        "strategy": {key: strategy.get(key) for key in ("slug", "options")},
        "plain": {key: plain[key] for key in ("world_size", "tp_size", "steps", "seed") if key in plain},
    }
    return [_digest(found[name], parts) for name in _PARTS]


def _digest(part: Any, parts: Parts) -> str:
    written = json.dumps(part, sort_keys=True)
    digest = hashlib.blake2b(written.encode(), digest_size=6).hexdigest()
    parts.setdefault(digest, part)
    return digest


def unlike(one: ArmBrief, other: ArmBrief, parts: Parts) -> str | None:
    """Why two arms were not measured alike, in words; None where they were, but for the machine."""
    if one.settings == other.settings or not one.settings or not other.settings:
        return None
    mine, theirs = ({n: parts.get(d) for n, d in zip(_PARTS, arm.settings)} for arm in (one, other))
    left, right = ({**said, **(said["plain"] or {})} for said in (mine, theirs))
    return settings_difference(cast(Settings, left), cast(Settings, right))


def to_json(found: Brief) -> dict[str, Any]:
    """As it is kept: by ``from_json`` it is the same again."""
    arms = {name: list(arm) for name, arm in found.arms.items()}
    return {**vars(found), "arms": arms}


def from_json(data: Mapping[str, Any]) -> Brief:
    arms = {name: ArmBrief(*values) for name, values in data["arms"].items()}
    return Brief(**{**data, "axes": tuple(data["axes"]), "arms": arms})


def latest(found: Iterable[Brief]) -> dict[tuple[str, str, str], Brief]:
    """(cell's key, hardware, stack) -> its newest brief."""
    best: dict[tuple[str, str, str], Brief] = {}
    for each in found:
        at = (each.key, each.hardware, each.stack)
        if at not in best or (each.started, each.path) > (best[at].started, best[at].path):
            best[at] = each
    return best
