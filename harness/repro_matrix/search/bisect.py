"""Bisect releases, packages and commits: find the neighbours between which the answer changes.

The two ends are verified first; they define which answer is good and which is bad. Any other answer
in between (another error, a hang, a release that cannot be installed) is unknown: it is skipped and
reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from packaging.version import InvalidVersion, Version

from repro_matrix.config.vocabulary import RELEVANT, UPSTREAM
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import Stack, package_index, version_differences
from repro_matrix.environment.stacks.build import too_heavy
from repro_matrix.environment.stacks.spec import parse_stack
from repro_matrix.errors import ConfigError, MeasureError, ReproError
from repro_matrix.search import algorithms
from repro_matrix.search.algorithms import Boundary, ChangeSide, Culprits, Stopped, Trail
from repro_matrix.search.commits import Clone
from repro_matrix.search.prober import (
    OTHER_SIZE,
    PASSED,
    REPRODUCED,
    Point,
    ProbeAnswer,
    Prober,
    SameResult,
    Target,
)
from repro_matrix.text import log


@dataclass(frozen=True)
class Roles:
    """Decide which answers count as good and as bad."""

    good: str
    bad: str
    exact: bool = False  # any change: only these two results; another passing run is unknown

    def side(self, answer: ProbeAnswer) -> ChangeSide:
        label = answer.result if self.exact else answer.label
        if label == self.bad:
            return ChangeSide.BAD
        without = label == PASSED or str(label).startswith(OTHER_SIZE)  # does not show the failure
        good = label == self.good or (not self.exact and without)
        return ChangeSide.GOOD if good else ChangeSide.UNKNOWN


@dataclass(frozen=True)
class Bisection:
    """Hold a change between two of some targets.

    ``points``: all probes, by the index of their target, in the order in which they were made.
    """

    roles: Roles
    targets: Sequence[Target]
    boundary: Boundary
    points: Mapping[int, Point]
    stopped: Stopped | None

    @property
    def good(self) -> Point:
        return self.points[self.boundary.before]

    @property
    def bad(self) -> Point:
        return self.points[self.boundary.after]


@dataclass
class Stage:
    """Keep one search over the releases or the commits of a package."""

    kind: str  # release or commit
    package: str
    found: Bisection
    older_is_good: bool
    yanked: Sequence[str] = ()  # releases between the two neighbours
    title: str | None = None  # of the commit that was found
    sentence: str = ""  # the result, if it is not that of the two neighbours


@dataclass
class Search:
    """Run the searches of one `repro bisect` of one variant, each a stage of the report.

    A flaky failure is repeated as often as its rate requires (``repeats``).
    """

    prober: Prober
    variant: str
    any_change: bool
    clone: Clone | None
    max_probes: int | None
    stages: list[Stage] = field(default_factory=list)
    culprits: Culprits | None = None
    notes: list[str] = field(default_factory=list)
    stopped: Stopped | None = None
    repeats: int = 1

    def run(self, good: str, bad: str, package: str | None, base: str) -> None:
        """Search between two releases of the package, or between two stacks.

        Raises Stopped before any result.
        """
        self.repeats = self.prober.repeat
        if is_release(good):
            self._releases(good, bad, package or "transformers", base)
        else:
            self._stacks(good, bad, package)

    def _releases(self, good: str, bad: str, package: str, base: str) -> None:
        available = package_index.releases(package, yanked=True, pre=True)
        one, other = (package_index.exact(package, available, text) for text in (good, bad))
        if Version(one) == Version(other):
            raise ConfigError(f"Good and bad are the same release, {package} {one}.")
        stacks.resolve(base, say=log)
        targets = release_line(package, base, one, other)
        roles = self._roles(targets[0], targets[-1])
        log(f"both ends verified: {len(targets)} releases of {package}")
        self._add(package, self._bisect(targets, roles))

    def _stacks(self, good: str, bad: str, only: str | None) -> None:
        one, other = (stacks.resolve(spec, say=log) for spec in (good, bad))
        if good == bad or one.key == other.key:
            raise ConfigError(f"Good and bad are the same stack, {good}.")
        roles = self._roles(Target("the good stack", good), Target("the bad stack", bad))
        log("both stacks verified; now the packages in which they differ")
        self.culprits = self._find_culprits(roles, good, one, other, only)
        members = self.culprits.members or ()
        for package in members:
            try:
                found = self._release_of(roles, good, self.culprits, package)
            except (InvalidVersion, ReproError) as error:
                self.notes.append(f"The release of {package} could not be found: {error}")
            else:
                self._add(package, found)
        if self.clone is not None and self.clone.package not in members:
            self.notes.append(
                f"--repo {self.clone.path} was not used: {self.clone.package} is not the culprit."
            )

    def _add(self, package: str, found: Bisection) -> None:
        good, bad = (Version(point.versions[package]) for point in (found.good, found.bad))
        low, high = sorted((good, bad))
        # The change may have come with a yanked release between the two neighbours.
        listed = package_index.releases(package, yanked=True)
        yanked = [each.version for each in listed if each.yanked and low < each.parsed < high]
        self.stages.append(Stage("release", package, found, good < bad, yanked))
        self.stopped = self.stopped or found.stopped
        if self.clone is not None and package == self.clone.package and self.stopped is None:
            self._commits(self.clone, found, good < bad)

    def _commits(self, clone: Clone, found: Bisection, older_is_good: bool) -> None:
        """Bisect the commits between the two releases, on top of the newer one's stack."""
        good, bad = (
            clone.commit_of(point.versions[clone.package]) for point in (found.good, found.bad)
        )
        base = (found.bad if older_is_good else found.good).target.spec
        commits = clone.between(good, bad)
        targets = [Target(f"commit {commit[:12]}", clone.stack(base, commit)) for commit in commits]
        log(f"{len(commits)} commits touch {clone.package} between the two tags")
        try:
            result = self._bisect(targets, found.roles)
        except Stopped as stopped:
            self.stopped = stopped
            return
        except ConfigError as error:
            self.notes.append(
                f"The tagged commits do not give the releases' results, on top of {base}: {error}"
            )
            return
        stage = Stage("commit", clone.package, result, older_is_good)
        self.stages.append(stage)
        self.stopped = result.stopped
        if result.boundary.exact:
            pair = commits[result.boundary.before], commits[result.boundary.after]
            child = pair[0] if clone.git("merge-base", "--is-ancestor", *pair) is None else pair[1]
            stage.title = clone.git("show", "--no-patch", "--format=%h %cs %s", child)
            stage.sentence = f"The result changes with commit {child[:12]}"

    # -- one search

    def _ask(self, target: Target) -> Point:
        """Probe a target, and a flaky failure as often as its rate requires; may raise Stopped."""
        point = self.prober.probe(target)
        answer = point.variants[self.variant]
        passes = not answer.flaky and answer.label not in (None, REPRODUCED)
        if passes and answer.counted < self.repeats:
            # One passing attempt of a flaky failure is not proof.
            point = self.prober.probe(target, self.repeats)
            answer = point.variants[self.variant]
        if answer.flaky:
            repeats = algorithms.repeats_for(answer.reproductions, answer.counted)
            self.repeats = max(self.repeats, repeats)
        return point

    def _roles(self, good: Target, bad: Target) -> Roles:
        """Define the failure by the two ends if necessary, and verify them.

        Raises MeasureError if an end has no answer, and ConfigError if the ends are wrong.
        """
        self.prober.expect([good, bad])
        self.prober.learn(good, bad)
        worse = self._ask(bad).variants[self.variant]
        better = self._ask(good).variants[self.variant]
        for side, target, answer in (("bad", bad, worse), ("good", good, better)):
            if answer.label is None:
                reason = f"variant {self.variant} has no result: {answer.detail}"
                raise MeasureError(f"Cannot bisect: on {target.name} ({side}), {reason}")
        ends = f"{good.name} (good): {better}; {bad.name} (bad): {worse}"
        if (worse.result == better.result) if self.any_change else (worse.label == better.label):
            raise SameResult(
                f"Cannot bisect: both ends give the same result ({ends}). Use `repro versions` to"
                " see the result of every release, or describe the failure more precisely. It may"
                " also depend on:"
            )
        if self.any_change:
            return Roles(str(better.result), str(worse.result), True)
        if worse.label != REPRODUCED:
            swapped = better.label == REPRODUCED
            hint = "Swap them." if swapped else "Use --any-change to find where the result changes."
            raise ConfigError(
                f"Cannot bisect: the failure does not occur at the bad end ({ends}). {hint}"
            )
        return Roles(str(better.label), REPRODUCED)

    def _bisect(self, targets: Sequence[Target], roles: Roles) -> Bisection:
        """Bisect ``targets``, in order from the good end to the bad one.

        Raises ConfigError if the ends are not good and bad, and Stopped before both ends are
        measured.
        """
        points: dict[int, Point] = {}
        last = len(targets) - 1
        self.prober.expect([targets[0], targets[-1]])

        def probe(at: int) -> ChangeSide:
            points[at] = self._ask(targets[at])
            return roles.side(points[at].variants[self.variant])

        trail = Trail(probe, {last: probe(last), 0: probe(0)}, self.max_probes)
        valid = (trail.answers[0], trail.answers[last]) == (ChangeSide.GOOD, ChangeSide.BAD)
        boundary = algorithms.bisect(trail, 0, last, confirm=probe) if valid else None
        if boundary is None:
            ends = "; ".join(
                f"{targets[at].name}: {points[at].variants[self.variant]}" for at in (0, last)
            )
            raise ConfigError(f"Cannot bisect: the two ends do not differ as expected ({ends}).")
        stopped = trail.ended if isinstance(trail.ended, Stopped) else None
        return Bisection(roles, targets, boundary, points, stopped)

    def _find_culprits(
        self, roles: Roles, spec: str, good: Stack, bad: Stack, only: str | None
    ) -> Culprits:
        """Return the smallest set of packages of ``bad`` that gives ``good`` the bad answer.

        ``spec``: the specification of ``good``.
        """
        changed = {
            name: pair
            for name, pair in version_differences(good.versions, bad.versions).items()
            if all(pair)
        }
        tried: dict[str, str] = {}

        def probe(taken: frozenset[str]) -> ChangeSide:
            chosen = {name: changed[name][1] for name in changed if name in taken}
            words = [f"{name} {version}" for name, version in chosen.items()]
            target = Target(
                " + ".join(["the good stack", *words]),
                _with_versions(spec, chosen.items()),
                fixed=_fixed(chosen),
            )
            answer = self._ask(target).variants[self.variant]
            tried[" + ".join(words) or "nothing"] = str(answer)
            return roles.side(answer)

        culprits = Culprits(None)
        for items in _candidates(list(changed), only):
            culprits = algorithms.find_culprits(items, probe)
            if culprits.members is not None:
                break
        return replace(
            culprits, changed=changed, notes=_untested(good, bad), tried=tuple(tried.items())
        )

    def _release_of(self, roles: Roles, spec: str, culprits: Culprits, package: str) -> Bisection:
        """Find the release in which the culprit package changed the answer.

        The other culprits stay as in the bad stack. Raises ReproError and InvalidVersion.
        """
        others = [
            (name, culprits.changed[name][1]) for name in culprits.members or () if name != package
        ]
        fixed = _fixed([package, *(name for name, _ in others)])
        ends = culprits.changed[package]
        targets = release_line(
            package, _with_versions(spec, others), *ends, unchanged=True, fixed=fixed
        )
        return self._bisect(targets, roles)


def _with_versions(spec: str, versions: Iterable[tuple[str, str]]) -> str:
    for package, version in versions:
        spec = stacks.with_release(spec, package, version)
    return spec


def _fixed(names: Iterable[str]) -> frozenset[str]:
    """Return the packages that keep their versions in a probe.

    These, and the other usual causes of failures. The rest (tokenizers ...) may move if a lock file
    pins a release that they do not accept.
    """
    return frozenset([*names, *UPSTREAM])


def _candidates(changed: list[str], only: str | None) -> list[list[str]]:
    """Return the sets of packages to search, the cheapest first.

    Usual causes that can be installed on top of the same torch, all usual causes, then every
    package that differs.
    """
    if only:
        return [[name for name in changed if name == only]]
    usual = [name for name in changed if name in RELEVANT]
    light = [name for name in usual if not too_heavy(parse_stack(f"x+{name}==0").swaps)]
    tries = [light, usual, changed]
    return [items for at, items in enumerate(tries) if items and items not in tries[:at]]


def _untested(good: Stack, bad: Stack) -> tuple[str, ...]:
    """Return the differences between two stacks that no probe can test."""
    one, other = (stack.versions.get("python", "") for stack in (good, bad))
    notes = [f"Python differs, too: {one} and {other}"] if one != other else []
    for stack, without, side in ((good, bad, "good"), (bad, good, "bad")):
        missing = stack.versions.keys() - without.versions.keys()
        alone = [name for name in RELEVANT if name in missing]
        notes += [f"only the {side} stack has {', '.join(alone)}"] if alone else []
    return tuple(notes)


def release_line(
    package: str,
    spec: str,
    good: str,
    bad: str,
    *,
    unchanged: bool = False,
    fixed: frozenset[str] = frozenset(),
) -> list[Target]:
    """Return the releases of a package from the good version to the bad one, on top of a stack.

    Both ends are included. ``unchanged``: the stack itself is the good end. ``fixed``: Target.fixed
    of all targets.
    """
    ends = {Version(good): good, Version(bad): bad}
    known = {release.parsed: release.version for release in package_index.releases(package)}
    inside = {version: text for version, text in known.items() if min(ends) < version < max(ends)}
    line = sorted({**inside, **ends}.items(), reverse=Version(good) > Version(bad))

    def target(text: str) -> Target:
        at = spec if unchanged and text == good else stacks.with_release(spec, package, text)
        return Target(f"{package} {text}", at, fixed=fixed)

    return [target(text) for _, text in line]


def is_release(text: str) -> bool:
    """Return whether this is a version, such as 4.45.2."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True
