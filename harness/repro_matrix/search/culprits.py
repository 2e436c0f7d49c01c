"""Two stacks that answer differently: which packages carry the difference. Probing is the prober's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

from packaging.version import InvalidVersion, Version

from repro_matrix.config.packages import RELEVANT, UPSTREAM
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import Stack, StackError
from repro_matrix.environment.stacks import index as releases
from repro_matrix.environment.stacks.build import too_heavy
from repro_matrix.environment.stacks.spec import parse
from repro_matrix.errors import ReproError
from repro_matrix.search import packages as guilty
from repro_matrix.search import releases as search
from repro_matrix.search.bisect import Hunt, Hunted, Roles, shown
from repro_matrix.search.prober import Target


@dataclass(frozen=True)
class Blame:
    """``members`` at the bad stack's versions carry the bad answer into the good stack. None: no set was seen to."""

    members: tuple[str, ...] | None
    unproven: tuple[str, ...]  # members of which it could not be known whether they can be left out
    changed: dict[str, tuple[str, str]]  # every package that both stacks have: (good, bad)
    notes: tuple[str, ...]  # what else differs between the two and was not tried
    tried: tuple[tuple[str, str], ...]  # (packages taken over, answer)


def differences(good: Stack, bad: Stack) -> dict[str, tuple[str, str]]:
    """Packages that both have, at other versions; those that failures usually come from first."""
    both = sorted(name for name in good.versions if name in bad.versions and name != "python")
    ranked = sorted(both, key=lambda name: RELEVANT.index(name) if name in RELEVANT else len(RELEVANT))
    pairs = {name: (good.versions[name], bad.versions[name]) for name in ranked}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def with_versions(spec: str, versions: Iterable[tuple[str, str]]) -> str:
    """The stack with these packages replaced."""
    return reduce(lambda text, item: stacks.with_release(text, *item), versions, spec)


def blame(hunt: Hunt, roles: Roles, spec: str, good: Stack, bad: Stack, only: Sequence[str] = ()) -> Blame:
    """The smallest set of packages that has to be taken over from ``bad`` into ``good`` (whose specification is
    ``spec``) for it to answer as the bad one does."""
    changed = differences(good, bad)
    tried: dict[str, str] = {}

    def probe(taken: frozenset[str]) -> search.Label | None:
        chosen = [name for name in changed if name in taken]
        name = " + ".join(["the good stack", *(f"{n} {changed[n][1]}" for n in chosen)])
        taken_over = with_versions(spec, ((n, changed[n][1]) for n in chosen))
        point = hunt.ask(Target(name, taken_over, held=_held(chosen)))
        answer = point.arms[hunt.arm]
        tried[" + ".join(f"{n} {changed[n][1]}" for n in chosen) or "nothing"] = shown(answer)
        return roles.of(answer)

    found = None
    for items in _attempts(list(changed), only):
        found = guilty.guilty(items, probe)
        if found.members is not None:
            break
    notes = _notes(good, bad)
    if found is None or found.members is None:
        return Blame(None, (), changed, notes, tuple(tried.items()))
    return Blame(found.members, found.unproven, changed, notes, tuple(tried.items()))


def _held(names: Iterable[str]) -> frozenset[str]:
    """What a probe of these packages is about: they, and the others of which failures usually come. The rest
    (tokenizers, huggingface-hub ...) moves with them, where a freeze pins it at a release that they do not take."""
    return frozenset([*names, *UPSTREAM])


def _attempts(changed: list[str], only: Sequence[str]) -> list[list[str]]:
    """Which packages to search among, the cheapest first: those that can be laid over a torch that stays, all of those
    that failures usually come from, then whatever differs."""
    if only:
        return [[name for name in changed if name in only]]
    usual = [name for name in changed if name in RELEVANT]
    light = [name for name in usual if not too_heavy(parse(f"x+{name}==0").swaps)]
    tries = [light, usual, changed]
    return [items for index, items in enumerate(tries) if items and items not in tries[:index]]


def _notes(good: Stack, bad: Stack) -> tuple[str, ...]:
    out = []
    pythons = good.versions.get("python", ""), bad.versions.get("python", "")
    if pythons[0] != pythons[1]:
        out.append(f"Python differs, too: {pythons[0]} and {pythons[1]}")
    for one, other, word in ((good, bad, "good"), (bad, good, "bad")):
        alone = [name for name in RELEVANT if name in one.versions and name not in other.versions]
        if alone:
            out.append(f"only the {word} stack has {', '.join(alone)}")
    return tuple(out)


def line_of(
    package: str,
    spec: str,
    good: str,
    bad: str,
    *,
    yanked: bool = False,
    pre: bool = False,
    kept: bool = False,
    held: frozenset[str] = frozenset(),
) -> list[Target]:
    """The releases of a package from the good version to the bad one, laid over a stack; both ends included.

    ``kept``: the stack itself is the good end. ``held``: Target.held of all of them.
    """
    ends = {Version(good): good, Version(bad): bad}
    found = {release.parsed: release.version for release in releases.releases(package, yanked=yanked, pre=pre)}
    low, high = min(ends), max(ends)
    inside = {version: text for version, text in found.items() if low < version < high}
    way = sorted({**inside, **ends}.items(), reverse=Version(good) > Version(bad))
    return [
        Target(
            f"{package} {text}", spec if kept and text == good else stacks.with_release(spec, package, text), held=held
        )
        for _, text in way
    ]


def release_of(
    hunt: Hunt, roles: Roles, spec: str, found: Blame, package: str, budget: int | None = None
) -> Hunted | str:
    """In which release the guilty package began to answer otherwise (the other members stay as in the bad stack), or
    why that could not be found."""
    others = [(name, found.changed[name][1]) for name in found.members or () if name != package]
    try:
        held = _held([package, *(name for name, _ in others)])
        targets = line_of(package, with_versions(spec, others), *found.changed[package], kept=True, held=held)
        return hunt.search(targets, roles, budget)
    except (StackError, InvalidVersion, ReproError) as error:
        return f"the release of {package} could not be found: {error}"
