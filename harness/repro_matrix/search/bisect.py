"""Bisect releases, packages and commits: find the neighbours between which the answer changes.

The two endpoints are verified first; they define which answer is good and which is bad. Any other answer in between
(another error, a hang, a release that cannot be installed) is unknown: it is skipped and reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from repro_matrix.config.vocabulary import RELEVANT, UPSTREAM
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import Stack, StackError, differences, index
from repro_matrix.environment.stacks.build import too_heavy
from repro_matrix.environment.stacks.spec import parse
from repro_matrix.errors import ConfigError, MeasureError, ReproError
from repro_matrix.search import releases, report
from repro_matrix.search.commits import Clone
from repro_matrix.search.labels import PASSED, REPRODUCED, Answer
from repro_matrix.search.prober import Point, Prober, Stopped, Target
from repro_matrix.search.releases import NO, YES, Bisection, Culprits

Find = Literal["failure", "fix", "change"]


@dataclass(frozen=True)
class Roles:
    """Which answers count as good and as bad."""

    good: str
    bad: str
    exact: bool = False  # any change: only these two texts; another passing run is unknown

    def label(self, answer: Answer) -> releases.Label | None:
        """Return YES (bad), NO (good), or None (unknown)."""
        label = answer.whole if self.exact else answer.label
        if label is None:
            return None
        if label == self.bad:
            return YES
        return NO if label == self.good or (not self.exact and label == PASSED) else None


@dataclass(frozen=True)
class BisectionResult:
    """``targets`` from the good end to the bad one; ``points`` by their index."""

    variant: str
    roles: Roles
    targets: tuple[Target, ...]
    result: Bisection
    points: dict[int, Point] = field(hash=False)
    stopped: Stopped | None = None

    @property
    def good(self) -> Point:
        return self.points[self.result.boundary.before if self.result.boundary else 0]

    @property
    def bad(self) -> Point:
        return self.points[self.result.boundary.after if self.result.boundary else len(self.targets) - 1]

    @property
    def unknown(self) -> list[Point]:
        return [self.points[i] for i in (self.result.boundary.unknown if self.result.boundary else ())]

    @property
    def unprobed(self) -> list[Target]:
        return [self.targets[i] for i in (self.result.boundary.unprobed if self.result.boundary else ())]

    @property
    def exact(self) -> bool:
        return self.result.boundary is not None and self.result.boundary.exact


class Bisector:
    """Probes of one variant; a flaky one is repeated as often as its failure rate requires."""

    def __init__(self, prober: Prober, variant: str) -> None:
        self.prober, self.variant = prober, variant
        self.repeats = prober.repeat

    def ask(self, target: Target) -> Point:
        point = self.prober.probe(target)
        answer = point.variants[self.variant]
        if not answer.flaky and answer.label not in (None, REPRODUCED) and answer.counted < self.repeats:
            point = self.prober.probe(target, self.repeats)  # one passing attempt of a flaky failure is no proof
            answer = point.variants[self.variant]
        if answer.flaky:
            self.repeats = max(self.repeats, releases.repeats_for(answer.fired, answer.counted))
        return point

    def endpoints(self, good: Target, bad: Target, find: Find, bad_is_older: bool | None) -> tuple[Roles, bool]:
        """Return the roles of the two endpoints, and whether they have to change places.

        ``bad_is_older``: None for two stacks. Raises MeasureError: an end has no answer; ConfigError: wrong ends.
        """
        worse, better = self.ask(bad).variants[self.variant], self.ask(good).variants[self.variant]
        for side, target, answer in (("bad", bad, worse), ("good", good, better)):
            if answer.label is None:
                reason = f"variant {self.variant} has no result: {answer.detail}"
                raise MeasureError(f"Cannot bisect: on {target.name} ({side}), {reason}")
        exact = find == "change"
        ends = f"{good.name} (good): {better}; {bad.name} (bad): {worse}"
        if (worse.whole == better.whole) if exact else (worse.label == better.label):
            raise ConfigError(
                f"Cannot bisect: {good.name} (good) and {bad.name} (bad) give the same result "
                f"({'; '.join(dict.fromkeys(map(str, (better, worse))))}). Use `repro versions` to see the result of "
                "every release, or describe the failure more precisely."
            )
        if exact:
            return Roles(str(better.whole), str(worse.whole), True), False
        if REPRODUCED not in (worse.label, better.label):
            raise ConfigError(
                f"Cannot bisect: the failure occurs at neither end ({ends}). Use --any-change to find where the result "
                "changes."
            )
        swapped = better.label == REPRODUCED
        fixing = bad_is_older if not swapped else (None if bad_is_older is None else not bad_is_older)
        if swapped and find != "fix":
            how = "Swap them." if fixing is False else "Search for the fix with --find-fix, or swap them."
            raise ConfigError(f"Good and bad are swapped: {ends}. {how}")
        if find == "fix" and fixing is False:
            raise ConfigError(f"--find-fix: the failure begins between {good.name} and {bad.name}. Leave it out.")
        reproducing, other = (better, worse) if swapped else (worse, better)
        return Roles(str(other.label), str(reproducing.label)), swapped

    def search(self, targets: Sequence[Target], roles: Roles, max_probes: int | None = None) -> BisectionResult:
        """Bisect ``targets``, in order from the good end to the bad one. Both ends are measured."""
        points: dict[int, Point] = {}
        last = len(targets) - 1

        def probe(at: int) -> releases.Label | None:
            points[at] = self.ask(targets[at])
            return roles.label(points[at].variants[self.variant])

        known = {last: probe(last), 0: probe(0)}
        left = None if max_probes is None else max(0, max_probes - 2)
        try:
            result = releases.bisect(len(targets), probe, known=known, max_probes=left, confirm=probe)
        except Stopped as stopped:
            known = {at: roles.label(point.variants[self.variant]) for at, point in points.items()}
            result = releases.bisect(len(targets), probe, known=known, max_probes=0)
            return BisectionResult(self.variant, roles, tuple(targets), result, points, stopped)
        if result.status != "found":
            ends = "; ".join(f"{targets[at].name}: {points[at].variants[self.variant]}" for at in (0, last))
            raise ConfigError(f"Cannot bisect: with more attempts, the two ends no longer differ ({ends}).")
        return BisectionResult(self.variant, roles, tuple(targets), result, points)

    # -- which packages

    def culprits(self, roles: Roles, spec: str, good: Stack, bad: Stack, only: Sequence[str] = ()) -> Culprits:
        """Return the smallest set of packages that, at the versions of ``bad``, gives ``good`` the bad answer.

        ``spec``: the specification of ``good``."""
        changed = changed_packages(good, bad)
        tried: dict[str, str] = {}

        def probe(taken: frozenset[str]) -> releases.Label | None:
            chosen = [name for name in changed if name in taken]
            words = [f"{name} {changed[name][1]}" for name in chosen]
            replaced = with_versions(spec, ((name, changed[name][1]) for name in chosen))
            answer = self.ask(Target(" + ".join(["the good stack", *words]), replaced, fixed=_fixed(chosen))).variants[
                self.variant
            ]
            tried[" + ".join(words) or "nothing"] = str(answer)
            return roles.label(answer)

        culprits = Culprits(None)
        for items in _candidates(list(changed), only):
            culprits = releases.find_culprits(items, probe)
            if culprits.members is not None:
                break
        return replace(culprits, changed=changed, notes=_notes(good, bad), tried=tuple(tried.items()))

    def release_of(
        self, roles: Roles, spec: str, culprits: Culprits, package: str, max_probes: int | None = None
    ) -> BisectionResult | str:
        """Return in which release the culprit package changed the answer (the other culprits stay as in the bad stack),
        or the reason why that is unknown."""
        others = [(name, culprits.changed[name][1]) for name in culprits.members or () if name != package]
        try:
            fixed = _fixed([package, *(name for name, _ in others)])
            base = with_versions(spec, others)
            targets = release_line(package, base, *culprits.changed[package], unchanged=True, fixed=fixed)
            return self.search(targets, roles, max_probes)
        except (StackError, InvalidVersion, ReproError) as error:
            return f"The release of {package} could not be found: {error}"


def changed_packages(good: Stack, bad: Stack) -> dict[str, tuple[str, str]]:
    """Return the packages of which both have different versions, the usual causes of failures first."""
    pairs = {name: pair for name, pair in differences(good.versions, bad.versions).items() if all(pair)}
    rank = {name: at for at, name in enumerate(RELEVANT)}
    return dict(sorted(pairs.items(), key=lambda item: rank.get(item[0], len(rank))))


def with_versions(spec: str, versions: Iterable[tuple[str, str]]) -> str:
    """Return the stack's specification with these packages replaced."""
    return reduce(lambda text, item: stacks.with_release(text, *item), versions, spec)


def _fixed(names: Iterable[str]) -> frozenset[str]:
    """Return the packages that keep their versions in a probe: these, and the other usual causes of failures. The rest
    (tokenizers ...) may move where a lock file pins a release that they do not accept."""
    return frozenset([*names, *UPSTREAM])


def _candidates(changed: list[str], only: Sequence[str]) -> list[list[str]]:
    """Return the sets of packages to search, the cheapest first: usual causes that can be installed on top of the same
    torch, all usual causes, then every package that differs."""
    if only:
        return [[name for name in changed if name in only]]
    usual = [name for name in changed if name in RELEVANT]
    light = [name for name in usual if not too_heavy(parse(f"x+{name}==0").swaps)]
    tries = [light, usual, changed]
    return [items for at, items in enumerate(tries) if items and items not in tries[:at]]


def _notes(good: Stack, bad: Stack) -> tuple[str, ...]:
    pythons = good.versions.get("python", ""), bad.versions.get("python", "")
    notes = [f"Python differs, too: {pythons[0]} and {pythons[1]}"] if pythons[0] != pythons[1] else []
    for one, other, side in ((good, bad, "good"), (bad, good, "bad")):
        alone = [name for name in RELEVANT if name in one.versions and name not in other.versions]
        notes += [f"only the {side} stack has {', '.join(alone)}"] if alone else []
    return tuple(notes)


def release_line(
    package: str, spec: str, good: str, bad: str, *, yanked: bool = False, pre: bool = False, unchanged: bool = False,
    fixed: frozenset[str] = frozenset(),
) -> list[Target]:  # fmt: skip
    """Return the releases of a package from the good version to the bad one, on top of a stack; both ends included.

    ``unchanged``: the stack itself is the good end. ``fixed``: Target.fixed of all of them.
    """
    ends = {Version(good): good, Version(bad): bad}
    known = {release.parsed: release.version for release in index.releases(package, yanked=yanked, pre=pre)}
    inside = {version: text for version, text in known.items() if min(ends) < version < max(ends)}
    line = sorted({**inside, **ends}.items(), reverse=Version(good) > Version(bad))

    def target(text: str) -> Target:
        at = spec if unchanged and text == good else stacks.with_release(spec, package, text)
        return Target(f"{package} {text}", at, fixed=fixed)

    return [target(text) for _, text in line]


@dataclass
class Search:
    """One bisection: its searches one after another, each a stage of the report."""

    prober: Prober
    variant: str
    find: Find = "failure"
    clone: Clone | None = None
    max_probes: int | None = None
    yanked: bool = False
    pre: bool = False
    stages: list[dict[str, Any]] = field(default_factory=list)
    culprits: Culprits | None = None
    notes: list[str] = field(default_factory=list)
    stopped: Stopped | None = None

    def run(self, good: str, bad: str, package: str | None, base: str) -> None:
        """Search between two releases of the package, or between two stacks. Raises Stopped before any result."""
        if is_release(good):
            self._releases(good, bad, package or "transformers", base)
        else:
            self._stacks(good, bad, [package] if package else [])

    def _releases(self, good: str, bad: str, package: str, base: str) -> None:
        everything = index.releases(package, yanked=True, pre=True)
        one, other = (everything[index.exact(package, everything, text)].version for text in (good, bad))
        if Version(one) == Version(other):
            raise ConfigError(f"Good and bad are the same release, {package} {one}.")
        self.prober.base(base)
        targets = release_line(package, base, one, other, yanked=self.yanked, pre=self.pre)
        older_is_good = Version(one) < Version(other)
        self.prober.learn(targets[0], targets[-1])
        bisector = Bisector(self.prober, self.variant)
        roles, swapped = bisector.endpoints(targets[0], targets[-1], self.find, bad_is_older=not older_is_good)
        if swapped:
            targets, older_is_good = targets[::-1], not older_is_good
        self.prober.say(f"both ends verified: {len(targets)} releases of {package}, {_most(len(targets))}")
        self._add("release", package, bisector.search(targets, roles, self.max_probes), older_is_good, bisector)

    def _stacks(self, good: str, bad: str, only: list[str]) -> None:
        one, other = self.prober.base(good), self.prober.base(bad)
        if good == bad or one.key == other.key:
            raise ConfigError(f"Good and bad are the same stack, {good}.")
        ends = Target("the good stack", good), Target("the bad stack", bad)
        self.prober.learn(*ends)
        bisector = Bisector(self.prober, self.variant)
        roles, swapped = bisector.endpoints(*ends, self.find, bad_is_older=None)
        if swapped:
            good, bad, one, other = bad, good, other, one
        self.prober.say("both stacks verified; now the packages in which they differ")
        self.culprits = bisector.culprits(roles, good, one, other, only)
        members = self.culprits.members or ()
        for package in members:
            found = bisector.release_of(roles, good, self.culprits, package, self.max_probes)
            if isinstance(found, str):
                self.notes.append(found)
                continue
            older, newer = (Version(version) for version in self.culprits.changed[package])
            self._add("release", package, found, older < newer, bisector)
        if self.clone is not None and self.clone.package not in members:
            self.notes.append(f"--repo {self.clone.path} was not used: {self.clone.package} is not the culprit.")

    def _add(self, kind: str, what: str, found: BisectionResult, older_is_good: bool, bisector: Bisector) -> None:
        stage = report.stage(kind, what, found, self.prober, older_is_good)
        self.stages.append(stage)
        stage["yanked"] = [] if kind != "release" or self.yanked else _yanked(what, found)
        self.stopped = self.stopped or found.stopped
        if kind == "release" and self.clone is not None and what == self.clone.package:
            self._commits(self.clone, found, older_is_good, bisector)

    def _commits(self, clone: Clone, found: BisectionResult, older_is_good: bool, bisector: Bisector) -> None:
        """Go on to the commits between two releases."""
        if self.stopped is not None or found.result.boundary is None:
            return
        ends = found.good, found.bad
        good, bad = (clone.commit_of(point.versions[clone.package]) for point in ends)
        line = clone.between(good, bad)
        # The releases' requirements may differ: try the commits on top of one, then of the other.
        reasons = []
        for point in sorted(ends, key=lambda end: Version(end.versions[clone.package]), reverse=True):
            targets = [self._commit(clone, commit, point.target.spec) for commit in line]
            try:
                first, last = (bisector.ask(target).variants[self.variant] for target in (targets[0], targets[-1]))
            except Stopped as stopped:
                self.stopped = stopped
                return
            if (found.roles.label(first), found.roles.label(last)) == (NO, YES):
                break
            reasons.append(f"on top of {point.target.name}: {first}; {last}")
        else:
            self.notes.append(
                "No search over commits: the tagged commits, on top of the releases' stacks, do not give the releases' "
                f"results ({' | '.join(reasons)})."
            )
            return
        self.prober.say(f"{len(line)} commits touch {clone.package} between the two tags, {_most(len(line))}")
        commits = bisector.search(targets, found.roles, self.max_probes)
        self._add("commit", clone.package, commits, older_is_good, bisector)
        if commits.result.boundary is not None and commits.exact:
            pair = line[commits.result.boundary.before], line[commits.result.boundary.after]
            child = pair[1] if clone.is_ancestor(*pair) else pair[0]
            count = clone.merged_commits(child)
            self.stages[-1]["title"] = clone.title(child)
            self.stages[-1]["sentence"] = f"The result changes with commit {child[:12]}" + (
                f", a merge of {count} commits" if count else ""
            )

    def _commit(self, clone: Clone, commit: str, spec: str) -> Target:
        name = f"{spec}#{clone.package}@{commit[:12]}"

        def make() -> Stack:
            return clone.overlay(self.prober.base(spec), commit, name)

        return Target(f"commit {commit[:12]}", name, make, base=spec)


def is_release(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def _yanked(package: str, found: BisectionResult) -> list[str]:
    """Return the yanked releases between the two neighbours: the change may have come with one of them."""
    low, high = sorted(Version(point.versions[package]) for point in (found.good, found.bad))
    return [each.version for each in index.releases(package, yanked=True) if each.yanked and low < each.parsed < high]


def _most(count: int) -> str:
    return f"at most {max(0, count - 2).bit_length()} more probes"
