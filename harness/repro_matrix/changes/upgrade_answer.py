"""Word the answer of `repro upgrade`: the verdict in a sentence, then its details. Pure."""

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

SHOWN = 6  # reasons and cases
FIXES = 3  # of a problem
CHANGES = 10  # packages


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
    worse = ""
    if upgrade.compared:
        worse = ": nothing gets worse in these"
        if fixes:
            worse = f": at least these fixes are needed: {fixes}"
        if not upgrade.informed:
            worse += ", but none of them depends on what changes"
    gone = ""
    if lost := [each for each in upgrade.unknown if each.lost]:
        count = counted(len(lost), "result")
        gone = f"; {count} of today cannot be compared: {lost[0].reason}"
    return f"UNDECIDED: {_share(upgrade)}{worse}{gone}{_unread(upgrade)}{_by_nearest(upgrade)[:-1]}"


def _share(upgrade: Upgrade) -> str:
    return (
        f"{upgrade.compared} of {counted(upgrade.compared + len(upgrade.unknown), 'result')}"
        " compared"
    )


def _by_nearest(upgrade: Upgrade) -> str:
    """Describe what the nearest measured releases predict."""
    counts = Counter(each.nearest for each in upgrade.unknown if each.nearest)
    if not counts:
        return ""
    worse = dict.fromkeys(
        f"{each.cell.case}/{each.variant}" for each in upgrade.unknown if each.nearest == "worse"
    )
    names = f" ({list_some(list(worse))})" if worse else ""
    parts = f"{counts['same']} the same, {counts['worse']} worse{names}, {counts['better']} better"
    return f". By the nearest measured releases, which is no measurement: {parts}."


def _unread(upgrade: Upgrade) -> str:
    """Advise what to do if the releases of a stack are not known."""
    names = [each.name for each in (upgrade.source, upgrade.target) if not each.versions]
    todo = [
        f"pin torch in {name}" if parse_stack(name).file else f"run `repro stack lock {name}`"
        for name in names
    ]
    return f"; {UNREAD.format(' and '.join(names))}: {', '.join(todo)}" if names else ""


Moved = dict[str, tuple[str, str]]


def _moved(upgrade: Upgrade) -> tuple[Moved, Moved, Moved]:
    """Return the packages whose releases differ, in three groups.

    Those that results depend on, the others, and those that only one stack has ("" in the other).
    """
    found: tuple[Moved, Moved, Moved] = {}, {}, {}
    old, new = upgrade.source.versions, upgrade.target.versions
    differences = version_differences(old, new) if old and new else {}
    for name, pair in differences.items():
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
    yield verdict_sentence(upgrade)
    for each in upgrade.problems:
        yield from _describe_problem(upgrade, each)
    yield ""
    yield from _describe_packages(upgrade)
    if upgrade.gone:
        count = counted(len(upgrade.gone), "known failure")
        yield f"Fixed by the upgrade: {count} ({list_some(upgrade.gone, SHOWN)})."
    same, other = upgrade.same, upgrade.compared - upgrade.same
    yield f"Compared: {counted(upgrade.compared, 'result')}, {same} unchanged, {other} changed."
    reasons = Counter(each.reason for each in upgrade.unknown).most_common()
    if reasons:
        count = counted(len(upgrade.unknown), "result")
        yield f"Not compared: {count}{_by_nearest(upgrade) or '.'}"
    shown = SHOWN if reasons[SHOWN + 1 :] else SHOWN + 1
    yield from (f"  {number} {reason}" for reason, number in reasons[:shown])
    if rest := sum(number for _, number in reasons[shown:]):
        yield f"  {rest} for other reasons, which --json lists"
    if upgrade.missing:
        cells = counted(len({key for key, _ in upgrade.missing}), "cell")
        minutes = f"about {max(1, round(upgrade.seconds / 60))} min"
        stacks = f"{upgrade.source.name} or {upgrade.target.name}"
        yield (
            f"To measure {cells}: --measure ({minutes}, and building {stacks} if they are missing)."
        )


def _describe_problem(upgrade: Upgrade, problem: Problem) -> Iterator[str]:
    case, boundary = problem.case, problem.boundary
    failing = "" if problem.kind == "new_failure" else f" (variant {', '.join(problem.variants)})"
    yield ""
    yield f"{problem.kind.replace('_', ' ')}: {case.slug}{failing}: {case.title}"
    cells = ", ".join(cell.where for cell in problem.cells)
    yield f"  in {cells}: {problem.text or problem.state}"
    if boundary:
        nearest = "" if boundary.exact else f"; {boundary.last} does not have it"
        yield f"  from {boundary.package} {boundary.first}{nearest}"
    else:
        command = problem.bisect(upgrade.source.name, upgrade.target.name)
        yield f"  the release is not known; search: {command}"
    fixes = [_fix(case, name) for name in problem.fixes]
    yield f"  works there: {list_some(fixes, FIXES, '; ') or 'nothing that was compared'}"


def _describe_packages(upgrade: Upgrade) -> Iterator[str]:
    *both, single = _moved(upgrade)
    for head, moved in zip(("Changes", "Changes that are not judged here"), both):
        listed = [f"{name} {old} -> {new}" for name, (old, new) in moved.items()]
        if listed:
            yield f"{head}: {list_some(listed, CHANGES, more='more (--json)')}."
    for index, end in enumerate((upgrade.source, upgrade.target)):
        only = {package: pair[index] for package, pair in single.items() if pair[index]}
        if only:
            listed = [f"{package} {release}" for package, release in only.items()]
            judged = " or ".join(package for package in only if package in UPSTREAM)
            rest = f"What needs {judged} is not compared." if judged else "Not judged here."
            text = list_some(listed, CHANGES, more="more (--json)")
            yield f"Only in {end.name}: {text}. {rest}"


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
