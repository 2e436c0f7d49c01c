"""What an upgrade changes for a user's own script, and which package and release changed it. It launches the script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from repro_matrix.environment.stacks import Stack
from repro_matrix.search.algorithms import Culprits
from repro_matrix.search.bisect import Bisector, Roles, changed_packages
from repro_matrix.search.prober import PASSED, Answer, Target


def upgrade(
    bisector: Bisector, specs: Sequence[str], ends: tuple[Stack, Stack], releases: bool, budget: int | None
) -> dict[str, Any]:
    """Run the script on both stacks; where its result differs, search for the packages, and with ``releases`` for their
    releases. Raises Stopped."""
    bisector.prober.learn(*(Target(spec, spec) for spec in specs))
    before, after = (bisector.ask(Target(spec, spec)).variants[bisector.variant] for spec in specs)
    data: dict[str, Any] = {
        "from": specs[0], "to": specs[1],
        "packages": {name: list(pair) for name, pair in changed_packages(*ends).items()},
        "before": str(before), "after": str(after), "error_at": [before.error_at, after.error_at], "cause": None,
    }  # fmt: skip
    if before.label and after.label and before.label != after.label:
        data["cause"] = _cause(bisector, Roles(before.label, after.label), specs[0], ends, releases, budget)
    verdict, reason = _verdict(before, after)
    if verdict == "NO-GO":
        exact = {name: each for name, each in (data["cause"].get("releases") or {}).items() if each["first"]}
        hold = " and ".join(f"{name} below {each['first'].split()[-1]}" for name, each in exact.items())
        packages = ", ".join(data["cause"]["packages"] or ())
        reason = f"hold {hold or packages or specs[0]} because {reason}"
    return {**data, "verdict": verdict, "headline": f"{verdict}: {reason}", "notes": list(bisector.prober.notes)}


def _verdict(before: Answer, after: Answer) -> tuple[str, str]:
    if before.label is None or after.label is None:
        return "UNDECIDED", "; ".join(each.detail for each in (before, after) if each.label is None)
    if after.label == PASSED:
        return "GO", "the script passes" if before.label == PASSED else "the upgrade fixes the script"
    if before.label == after.label:
        return "GO", f"the script fails in the same way before and after: {after}"
    return "NO-GO", f"the script fails: {after}"


def _cause(
    bisector: Bisector, roles: Roles, spec: str, ends: tuple[Stack, Stack], releases: bool, budget: int | None
) -> dict[str, Any]:
    """Search the packages that carry the second stack's answer into the first."""
    found = bisector.culprits(roles, spec, *ends)
    cause: dict[str, Any] = {
        "packages": list(found.members) if found.members is not None else None,
        "unproven": list(found.unproven),
        "note": "" if found.members else "; ".join(found.notes) or "no set of packages carries the change",
        "tried": [list(item) for item in found.tried],
    }
    if releases:
        members = found.members or ()
        cause["releases"] = {name: _release(bisector, roles, spec, found, name, budget) for name in members}
    return cause


def _release(
    bisector: Bisector, roles: Roles, spec: str, found: Culprits, package: str, budget: int | None
) -> dict[str, Any]:
    result = bisector.release_of(roles, spec, found, package, budget)
    if isinstance(result, str):
        return {"first": None, "last": None, "exact": False, "text": result}
    if result.stopped:
        raise result.stopped
    first, last = result.bad.target.name, result.good.target.name  # ``first`` is like --to, ``last`` like --from
    unknown = len(result.unknown) + len(result.unprobed)
    text = f"{first} (not yet {last})" if result.exact else f"between {last} and {first} ({unknown} unknown)"
    return {"first": first, "last": last, "exact": result.exact, "text": text}
