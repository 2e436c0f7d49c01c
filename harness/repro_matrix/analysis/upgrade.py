"""What going from one stack to another changes, and which package and release changed it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from repro_matrix.analysis.diff import KINDS, RESULTS, Change, compare, describe_row, pair_cells, pair_variants
from repro_matrix.analysis.inputs import VariantResult
from repro_matrix.environment.stacks import Stack
from repro_matrix.records.document import Document
from repro_matrix.runner.session import Request
from repro_matrix.search.algorithms import Culprits
from repro_matrix.search.bisect import Bisector, Roles, changed_packages
from repro_matrix.search.prober import PASSED, REPRODUCED, Answer, Prober, Target
from repro_matrix.text import counted

WORSE = ("new_failure", "fix_stopped_working", "reproduces_now")
NOT_SEARCHED = ("became_flaky", "became_steady")


class Unknown(NamedTuple):
    """A variant without a comparable result on both stacks. ``declared``: it was skipped because of a declared need."""

    cell: str
    variant: str
    reason: str
    declared: bool = False


@dataclass(frozen=True)
class Upgrade:
    changes: tuple[Change, ...]
    unknown: tuple[Unknown, ...]
    same: int

    @property
    def exit_code(self) -> int:
        """Return 1 where something gets worse; else 3 where a result is missing without a declared need; else 0."""
        if any(change.kind in WORSE for change in self.changes):
            return 1
        missing = any(not each.declared for each in self.unknown) or not (self.changes or self.same)
        return 3 if missing else 0


def compare_stacks(before: Sequence[VariantResult], after: Sequence[VariantResult]) -> Upgrade:
    """Compare the same variants of the same cells on two stacks."""
    diff = compare(before, after)
    unknown = [Unknown(row.key, row.variant, f"measured with other settings: {why}") for row, why in diff.incomparable]
    excluded = {(each.cell, each.variant) for each in unknown}
    older, newer, _ = pair_cells(before, after)
    measured = 0
    for old, new in pair_variants(older, newer):
        if old is None or new is None:
            continue
        if old.measured and new.measured:
            measured += (new.key, new.variant) not in excluded
            continue
        sides = [f"{side}: {describe_row(row)}" for side, row in (("from", old), ("to", new)) if not row.measured]
        unknown.append(Unknown(new.key, new.variant, "; ".join(sides), bool(old.skipped or new.skipped)))
    changes = tuple(diff.select(RESULTS))
    return Upgrade(changes, tuple(sorted(unknown)), measured - len(changes))


def kind_of(before: Answer, after: Answer) -> str | None:
    """Return the kind of change between two answers of a script; None: no change, or one of them is unknown."""
    if before.label is None or after.label is None or before.label == after.label:
        return None
    if REPRODUCED in (before.label, after.label):
        return "reproduces_now" if after.label == REPRODUCED else "no_longer_reproduces"
    if PASSED in (before.label, after.label):
        return "failure_gone" if after.label == PASSED else "new_failure"
    return "different_failure"


def compare_answers(
    name: str, variant: str, before: Answer, after: Answer, cause: Any
) -> tuple[list[dict[str, Any]], list[Unknown]]:
    """Return the change of a script's answer as ``changes_to_json`` does, and why the answers cannot be compared."""
    reasons = [answer.detail for answer in (before, after) if answer.label is None]
    kind = kind_of(before, after)
    place = {"case": name, "cell": name, "variant": variant, "error_at": [before.error_at, after.error_at]}
    texts = {"before": before.whole, "after": after.whole, "documents": [None, None]}
    changes = [{"change": kind, **place, **texts, "cause": cause}] if kind else []
    return changes, [Unknown(name, variant, "; ".join(reasons))] if reasons else []


@dataclass
class CauseSearch:
    """Find the packages (and their releases) that caused each change. ``request``: None for a user's script."""

    request: Request | None
    specs: tuple[str, str]
    ends: tuple[Stack, Stack]
    stop: threading.Event
    with_releases: bool
    budget: int | None
    log: Callable[[str], None]
    causes: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  # (cell, variant) -> cause

    def run(self, changes: Iterable[Change], documents: Iterable[Document]) -> None:
        """Search all changes, cell by cell. Raises Stopped; the causes found until then are kept."""
        cells = {document["cell_id"]: document for document in documents}
        by_cell: dict[str, list[Change]] = {}
        for change in changes:
            if change.kind not in NOT_SEARCHED:
                by_cell.setdefault(change.row.key, []).append(change)
        assert self.request is not None
        for key, group in by_cell.items():
            variants = [change.variant for change in group]  # a probe measures every variant that is searched
            with Prober(_one_cell(cells[key], self.request), self.log, self.stop, variants=variants) as prober:
                for change in group:
                    self.log(f"{key} {change.variant} {change.kind}: which package?")
                    self.causes[key, change.variant] = self.cause(Bisector(prober, change.variant))

    def cause(self, bisector: Bisector) -> dict[str, Any]:
        """Search the packages that carry the second stack's answer into the first."""
        before, after = (bisector.ask(Target(spec, spec)).variants[bisector.variant] for spec in self.specs)
        good, bad = before.label, after.label
        if good is None or bad is None or good == bad:
            return {"packages": None, "note": "measured alone, the two stacks did not differ in this way again"}
        roles = Roles(good, bad)
        found = bisector.culprits(roles, self.specs[0], *self.ends)
        cause: dict[str, Any] = {
            "packages": list(found.members) if found.members is not None else None,
            "unproven": list(found.unproven),
            "note": "" if found.members else "; ".join(found.notes) or "no set of packages carries the change",
            "tried": [list(item) for item in found.tried],
        }
        if self.with_releases:
            cause["releases"] = {name: self._release(bisector, roles, found, name) for name in found.members or ()}
        return cause

    def _release(self, bisector: Bisector, roles: Roles, found: Culprits, package: str) -> dict[str, Any]:
        result = bisector.release_of(roles, self.specs[0], found, package, self.budget)
        if isinstance(result, str):
            return {"first": None, "last": None, "exact": False, "text": result}
        if result.stopped:
            raise result.stopped
        first, last = result.bad.target.name, result.good.target.name  # ``first`` is like --to, ``last`` like --from
        unknown = len(result.unknown) + len(result.unprobed)
        text = f"{first} (not yet {last})" if result.exact else f"between {last} and {first} ({unknown} unknown)"
        return {"first": first, "last": last, "exact": result.exact, "text": text}


def _one_cell(document: Document, request: Request) -> Request:
    """Return the request for one cell, with the run's other settings."""
    rest = request.without(
        lambda key: key in ("case", "model", "strategy", "variants", "ranks") or key.startswith("flags.")
    )
    axes: dict[str, Any] = {"case": document["case"], "model": document["model"], "strategy": document["strategy"]}
    if request.selections[0].ranks:
        axes["ranks"] = document["ranks"]
    return rest.with_values({**axes, **{f"flags.{name}": value for name, value in document["flags"].items()}})


def to_json(
    specs: tuple[str, str], ends: tuple[Stack, Stack], changes: Sequence[dict[str, Any]],
    unknown: Iterable[Unknown], same: int,
) -> dict[str, Any]:  # fmt: skip
    return {
        "from": specs[0], "to": specs[1],
        "packages": {name: list(pair) for name, pair in changed_packages(*ends).items()},
        "changes": changes, "same": same, "counts": dict(Counter(change["change"] for change in changes)),
        "unknown": [{"cell": each.cell, "variant": each.variant, "reason": each.reason} for each in unknown],
    }  # fmt: skip


def changes_to_json(changes: Iterable[Change], causes: Mapping[tuple[str, str], Any]) -> list[dict[str, Any]]:
    return [
        {
            "change": c.kind,
            "case": c.row.case,
            "cell": c.row.key,
            "variant": c.variant,
            "before": describe_row(c.before),
            "after": describe_row(c.after),
            "error_at": [row.error_at if row else None for row in (c.before, c.after)],
            "documents": [row.path or None if row else None for row in (c.before, c.after)],
            "cause": causes.get((c.row.key, c.variant)),
        }
        for c in changes
    ]


COLUMNS = ("change", "cell", "variant", "cause", "results")


def describe(data: Mapping[str, Any]) -> tuple[list[list[str]], list[str]]:
    """Return the rows of a table and the lines below it."""
    table = [
        [c["change"], c["cell"], c["variant"], _describe_cause(c["cause"]), f"{c['before']}  =>  {c['after']}"]
        for c in data["changes"]
    ]
    lines = [f"{kind} ({count}): {KINDS[kind]}" for kind, count in data["counts"].items()]
    reasons: dict[str, list[str]] = {}
    for item in data["unknown"]:
        reasons.setdefault(item["reason"], []).append(f"{item['cell']} {item['variant']}")
    for reason, variants in reasons.items():
        lines.append(
            f"unknown: {reason}: {', '.join(variants[:4])}" + (f" and {len(variants) - 4} more" if variants[4:] else "")
        )
    lines.append(f"{counted(len(table), 'variant')} changed, {data['same']} unchanged, {len(data['unknown'])} unknown")
    return table, lines


def _describe_cause(cause: Mapping[str, Any] | None) -> str:
    if cause is None:
        return ""
    if not cause["packages"]:
        return f"not found: {cause['note']}"
    releases = cause.get("releases", {})
    return "; ".join(releases[name]["text"] if name in releases else name for name in cause["packages"])
