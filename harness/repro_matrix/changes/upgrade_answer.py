"""The answer of `repro upgrade`: the verdict in a sentence, then its details. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from packaging.version import Version

from repro_matrix.changes.upgrade import UNREAD, Problem, ReleaseBoundary, Upgrade, release_of
from repro_matrix.config.schema import Case
from repro_matrix.config.vocabulary import UPSTREAM
from repro_matrix.environment.stacks.spec import parse_stack, version_differences
from repro_matrix.text import counted, list_some

SHOWN, FIXES, CHANGES = (
    6,
    3,
    10,
)  # reasons and cases, fixes of a problem, and packages that are listed


def verdict_sentence(upgrade: Upgrade) -> str:
    """Return the verdict and its reason in a sentence."""
    verdict, source, problems = upgrade.verdict, upgrade.source.name, upgrade.problems
    fixes = "; ".join(
        f"{each.case.slug}: {_fix(each.case, each.fixes[0])}" for each in problems if each.fixes
    )
    if verdict == "GO with these fixes":
        return f"{verdict}: {fixes} ({_share(upgrade)})"
    if verdict == "NO-GO":
        unfixed = [each for each in problems if not each.fixes]
        lowest: dict[str, ReleaseBoundary] = {}
        for boundary in (each.boundary for each in unfixed if each.boundary):
            other = lowest.setdefault(boundary.package, boundary)
            lowest[boundary.package] = min(other, boundary, key=lambda each: Version(each.first))
        hold = " and ".join(each.hold for each in lowest.values())
        if not all(each.boundary for each in unfixed):
            hold = f"stay on {source}" + (f", at least {hold}," if hold else "")
        more = f" (and {counted(len(unfixed) - 1, 'more problem')})" if unfixed[1:] else ""
        return f"NO-GO: {hold} because {_what(unfixed[0])}{more} ({_share(upgrade)})"
    if verdict == "GO":
        return f"GO: no new failure, and every fix that works still works ({_share(upgrade)})"
    lost = [each for each in upgrade.unknown if each.lost]
    worse = (
        f": at least these fixes are needed: {fixes}" if fixes else ": nothing gets worse in these"
    )
    worse += ", but none of them depends on what changes" * (not upgrade.informed)
    worse *= bool(upgrade.compared)
    gone = (
        f"; {counted(len(lost), 'result')} of today cannot be compared: {lost[0].reason}"
        if lost
        else ""
    )
    return f"UNDECIDED: {_share(upgrade)}{worse}{gone}{_unread(upgrade)}{_by_nearest(upgrade)[:-1]}"


def _share(upgrade: Upgrade) -> str:
    return (
        f"{upgrade.compared} of {counted(upgrade.compared + len(upgrade.unknown), 'result')}"
        " compared"
    )


def _by_nearest(upgrade: Upgrade) -> str:
    """Say what the nearest measured releases predict of what was not measured."""
    counts = Counter(each.nearest for each in upgrade.unknown if each.nearest)
    worse = dict.fromkeys(
        f"{each.cell.case}/{each.variant}" for each in upgrade.unknown if each.nearest == "worse"
    )
    names = f" ({list_some(list(worse))})" if worse else ""
    parts = [
        f"{counts['same']} the same",
        f"{counts['worse']} worse{names}",
        f"{counts['better']} better",
    ]
    return (
        f". By the nearest measured releases, which is no measurement: {', '.join(parts)}."
        if counts
        else ""
    )


def _unread(upgrade: Upgrade) -> str:
    """Say what to do where the releases of a stack are not known."""
    names = [each.name for each in (upgrade.source, upgrade.target) if not each.versions]
    todo = [
        f"pin torch in {name}" if parse_stack(name).file else f"run `repro stack lock {name}`"
        for name in names
    ]
    return f"; {UNREAD.format(' and '.join(names))}: {', '.join(todo)}" if names else ""


Moved = dict[str, tuple[str, str]]


def _moved(upgrade: Upgrade) -> tuple[Moved, Moved, Moved]:
    """Return the packages whose releases differ: those that results depend on, the others, and
    those that only one stack has ("" in the other)."""
    found: tuple[Moved, Moved, Moved] = {}, {}, {}
    known = upgrade.source.versions and upgrade.target.versions
    for name, pair in (
        version_differences(upgrade.source.versions, upgrade.target.versions).items()
        if known
        else ()
    ):
        if release_of(pair[0]) != release_of(pair[1]):
            found[2 if not all(pair) else name not in UPSTREAM][name] = pair
    return found


def _what(problem: Problem) -> str:
    if problem.kind == "new_failure":
        return f"{problem.case.slug} begins to fail: {problem.case.title}"
    return f"{problem.case.slug} has no fix left that works: {problem.case.title}"


def _fix(case: Case, variant: str) -> str:
    if variant == next(iter(case.variants)):
        return f"no fix ({variant} passes)"
    return f"{variant} ({case.variants[variant].help})"


def describe_upgrade(upgrade: Upgrade) -> Iterator[str]:
    """Yield the verdict, then its details."""
    source, target = upgrade.source.name, upgrade.target.name
    yield verdict_sentence(upgrade)
    for each in upgrade.problems:
        failing = "" if each.kind == "new_failure" else f" (variant {', '.join(each.variants)})"
        yield from (
            "",
            f"{each.kind.replace('_', ' ')}: {each.case.slug}{failing}: {each.case.title}",
        )
        yield f"  in {', '.join(cell.where for cell in each.cells)}: {each.text or each.state}"
        if each.boundary:
            nearest = "" if each.boundary.exact else f"; {each.boundary.last} does not have it"
            yield f"  from {each.boundary.package} {each.boundary.first}{nearest}"
        else:
            yield f"  the release is not known; search: {each.bisect(source, target)}"
        fixes = [_fix(each.case, name) for name in each.fixes]
        yield f"  works there: {list_some(fixes, FIXES, '; ') or 'nothing that was compared'}"
    yield ""
    *both, single = _moved(upgrade)
    for head, moved in zip(("Changes", "Changes that are not judged here"), both):
        listed = [f"{name} {old} -> {new}" for name, (old, new) in moved.items()]
        yield from (
            [f"{head}: {list_some(listed, CHANGES, more='more (--json)')}."] if listed else []
        )
    for index, name in enumerate((source, target)):
        listed = [f"{package} {pair[index]}" for package, pair in single.items() if pair[index]]
        judged = [
            package for package, pair in single.items() if pair[index] and package in UPSTREAM
        ]
        consequence = (
            f" What needs {' or '.join(judged)} is not compared." if judged else " Not judged here."
        )
        yield from (
            [f"Only in {name}: {list_some(listed, CHANGES, more='more (--json)')}.{consequence}"]
            if listed
            else []
        )
    if upgrade.gone:
        yield (
            f"Fixed by the upgrade: {counted(len(upgrade.gone), 'known failure')}"
            f" ({list_some(upgrade.gone, SHOWN)})."
        )
    other = upgrade.compared - upgrade.same
    yield (
        f"Compared: {counted(upgrade.compared, 'result')}, {upgrade.same} unchanged, {other}"
        " changed."
    )
    reasons = Counter(each.reason for each in upgrade.unknown).most_common()
    if reasons:
        yield (
            f"Not compared: {counted(len(upgrade.unknown), 'result')}{_by_nearest(upgrade) or '.'}"
        )
    shown = SHOWN if reasons[SHOWN + 1 :] else SHOWN + 1
    yield from (f"  {count} {reason}" for reason, count in reasons[:shown])
    if reasons[shown:]:
        yield (
            f"  {sum(count for _, count in reasons[shown:])} for other reasons, which --json lists"
        )
    if upgrade.missing:
        cells = counted(len({key for key, _ in upgrade.missing}), "cell")
        minutes = f"about {max(1, round(upgrade.seconds / 60))} min"
        yield (
            f"To measure {cells}: --measure ({minutes}, and building {source} or {target} if they"
            " are missing)."
        )


def upgrade_to_json(upgrade: Upgrade) -> dict[str, Any]:
    """Return the answer under stable keys."""
    source, target = upgrade.source.name, upgrade.target.name
    return {
        "schema": 1,
        "from": source,
        "to": target,
        "verdict": upgrade.verdict,
        "headline": verdict_sentence(upgrade),
        "problems": [
            {
                "kind": each.kind,
                "case": each.case.slug,
                "title": each.case.title,
                "variants": list(each.variants),
                "cells": [cell.key for cell in each.cells],
                "text": each.text,
                "fixes": list(each.fixes),
                "boundary": each.boundary and each.boundary._asdict(),
                "bisect": each.bisect(source, target),
            }
            for each in upgrade.problems
        ],
        **dict(zip(("changes", "not_judged", "only_one_side"), _moved(upgrade))),
        "fixed": upgrade.gone,
        "compared": upgrade.compared,
        "unchanged": upgrade.same,
        "not_compared": [
            {
                "cell": each.cell.key,
                "variant": each.variant,
                "reason": each.reason,
                "measure_on": list(each.ends),
                "nearest": each.nearest or None,
            }
            for each in upgrade.unknown
        ],
        "measure": {
            "cells": len({key for key, _ in upgrade.missing}),
            "seconds": round(upgrade.seconds),
        },
        "exit_code": upgrade.exit_code,
    }
