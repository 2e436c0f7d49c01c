"""`repro bisect CASE --good X --bad Y`: which release, package or commit changed the answer."""

from __future__ import annotations

import argparse
import shlex
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from packaging.version import InvalidVersion, Version

from repro_matrix.cli import options as arguments
from repro_matrix.config.catalog import load
from repro_matrix.environment import machine as machine_module
from repro_matrix.environment import profiles as profiles_module
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import StackError, spec
from repro_matrix.environment.stacks import index as releases
from repro_matrix.environment.stacks.spec import canonical
from repro_matrix.errors import ConfigError, unknown
from repro_matrix.external.scripts import options
from repro_matrix.report.terminal import print_json
from repro_matrix.results import provenance
from repro_matrix.runner import workspace as workplace
from repro_matrix.runner.request import ask
from repro_matrix.search import commits
from repro_matrix.search import report as bisect_report
from repro_matrix.search.bisect import FINDS, Find, Hunt, Hunted, Roles
from repro_matrix.search.culprits import Blame, blame, line_of, release_of
from repro_matrix.search.prober import Prober, Probing, Stopped, Target, one_case
from repro_matrix.text import printable

if TYPE_CHECKING:
    from repro_matrix.external.scripts.prober import ScriptProber

EPILOG = (
    "and model=, strategy=, flags.<name>=, repeat=, results=... as for `repro run`; stack=: the stack whose\n"
    "package is replaced (default: the one on which the case is known to fire).\n\n"
    "good: the arm does not fire (clean; or, where the good endpoint itself fails with another error, that error).\n"
    "bad: it fires. Any other answer in between is Unknown and is skipped over. Where good is the newer of the two,\n"
    "the search is for the release with the fix. With repeat=N a flaky failure is repeated by its measured firing\n"
    "rate. Two stacks: first the packages that carry the difference, then the release of each.\n"
    "Exit code 0: found (also when only a range is left); 2: the endpoints are wrong; 3: an endpoint cannot be\n"
    "measured, or no package was found guilty."
)


def configure(parser: argparse.ArgumentParser) -> None:
    options.case_or_script(parser, EPILOG)
    add = parser.add_argument
    add("--good", required=True, help="a release that does not fire, or a stack (a name, a lock, python:PATH ...)")
    add("--bad", required=True, help="a release that fires, or a stack")
    add("--package", help="whose releases (default: transformers); with two stacks: search in this package only")
    add("--arm", help="whose answer (default: broken)")
    told = "failure (default), fix (good and bad may be given the wrong way round) or change (any two answers)"
    add("--find", choices=FINDS, default=FINDS[0], help=told)
    add("--repo", metavar="DIR", help="a local git clone of the package: goes on to the commit; it is only read")
    add("--budget", type=arguments.number(3), metavar="N", help="at most so many probes of each search")
    arguments.releases(parser)
    options.add(parser)


def main(args: argparse.Namespace) -> int:
    if options.asked(args):
        return _of_script(args)
    options.refuse(args)
    base, texts = arguments.one_stack(args, {"arms": "a bisection is of one arm: --arm NAME"})
    case = one_case(args.case)
    good, bad = args.good, args.bad
    arm = args.arm or next(iter(case.arms))
    if arm not in case.arms:
        raise unknown("arm", arm, case.arms, f"case {case.slug}")
    if case.arms[arm].stack:
        raise ConfigError(f"arm {arm} of {case.slug} runs on a stack of its own ({case.arms[arm].stack})")
    stop = threading.Event()
    _check_ends(good, bad)
    return _search(
        args,
        Prober(ask([f"case={args.case}", *texts]), _say, stop, arms=[arm]),
        arm,
        base or case.needs.stack or "current",
    )


def _of_script(args: argparse.Namespace) -> int:
    """A script's one arm; two freezes become stacks first."""
    from repro_matrix.external.scripts import prober as probers
    from repro_matrix.external.scripts.endpoints import ends_of

    if args.arm:
        raise ConfigError(f"--arm {args.arm}: a script has no arms")
    script, base, settings = options.script_of(args, search=True)
    _check_ends(args.good, args.bad)
    how = settings.launcher.value
    prober = probers.ScriptProber(script, _say, threading.Event(), settings.repeat or 1, launcher=how)
    if not _is_release(args.good):
        args.good, args.bad, notes = ends_of(args.good, args.bad, script.results)
        prober.notes += notes
    return _search(args, prober, probers.ARM, base)


def _check_ends(good: str, bad: str) -> None:
    if _is_release(good) != _is_release(bad):
        raise ConfigError(f"--good {good} --bad {bad}: give two releases of a package, or two stacks")
    for side, text in (("good", good), ("bad", bad)):
        if not _is_release(text):
            _check_stack(side, text)
    for text in () if _is_release(good) else (good, bad):  # before the first of them is built
        wanted = spec.parse(text)
        if wanted.file and not wanted.file.exists():
            raise ConfigError(f"{wanted.base}: there is no such file")
        stacks.check(text)


def _search(args: argparse.Namespace, prober: Prober | ScriptProber, arm: str, base: str) -> int:
    good, bad, stop = args.good, args.bad, prober.stop
    package = canonical(args.package or "transformers")
    clone = commits.open_clone(args.repo, package) if args.repo else None
    search = Bisect(args, prober, arm, clone)
    with workplace.interruptible(stop, _say), prober:
        try:
            if _is_release(good):
                search.releases(good, bad, package, base)
            else:
                search.stacks(good, bad, [package] if args.package else [])
        except Stopped as error:
            _say(f"stopped: {error}. What was probed is stored; the same command goes on")
            return error.exit_code
    data = search.data(shlex.join(["repro", "bisect", *args.words]))
    print_json({**data, "report": bisect_report.render(data)}) if args.json else print(bisect_report.render(data))
    if search.stopped:
        _say(f"stopped: {search.stopped}. What was probed is stored; the same command goes on")
        return search.stopped.exit_code
    return 0 if search.stages else 3


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def _check_stack(side: str, text: str) -> None:
    try:
        stacks.check(text)
    except StackError as error:
        takes = "a release (4.45.2), a stack, an interpreter (python:PATH), or a file of packages (a freeze, a lock)"
        raise ConfigError(f"--{side} {text}: {error}; --{side} takes {takes}") from None


def _is_release(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


class Bisect:
    """One bisection: its searches one after another, each a stage of the report."""

    def __init__(self, args: argparse.Namespace, prober: Probing, arm: str, clone: commits.Clone | None) -> None:
        self.prober, self.arm, self.clone = prober, arm, clone
        self.find: Find = args.find
        self.budget, self.yanked, self.pre = args.budget, args.yanked, args.pre
        self.hunt = Hunt(prober, arm)
        self.stages: list[dict[str, Any]] = []
        self.blame: Blame | None = None
        self.notes: list[str] = []
        self.stopped: Stopped | None = None

    # -- two releases of one package

    def releases(self, good: str, bad: str, package: str, base: str) -> None:
        everything = releases.releases(package, yanked=True, pre=True)
        one, other = (everything[releases.exact(package, everything, text)].version for text in (good, bad))
        if Version(one) == Version(other):
            raise ConfigError(f"good and bad are the same release, {package} {one}")
        self.prober.base(base)  # says what is wrong with it
        targets = line_of(package, base, one, other, yanked=self.yanked, pre=self.pre)
        older_is_good = Version(one) < Version(other)
        self._learn(targets[0], targets[-1])
        roles, swapped = self.hunt.endpoints(targets[0], targets[-1], self.find, bad_is_older=not older_is_good)
        if swapped:
            targets, older_is_good = targets[::-1], not older_is_good
        _say(f"both ends verified: {len(targets)} releases of {package}, {_most(len(targets))} more probes at most")
        hunted = self.hunt.search(targets, roles, self.budget)
        self._add("release", package, hunted, older_is_good)
        self._commits(package, hunted, roles, older_is_good)

    # -- two stacks

    def stacks(self, good: str, bad: str, only: list[str]) -> None:
        one, other = self.prober.base(good), self.prober.base(bad)
        if good == bad or one.key == other.key:
            raise ConfigError(f"good and bad are the same stack, {good}")
        ends = Target("the good stack", good), Target("the bad stack", bad)
        self._learn(*ends)
        roles, swapped = self.hunt.endpoints(*ends, self.find, bad_is_older=None)
        if swapped:
            good, bad, one, other = bad, good, other, one
        _say("both stacks verified; now the packages in which they differ")
        self.blame = blame(self.hunt, roles, good, one, other, only)
        members = self.blame.members or ()
        for package in members:
            found = release_of(self.hunt, roles, good, self.blame, package, self.budget)
            if isinstance(found, str):
                self.notes.append(found)
                continue
            older, newer = (Version(version) for version in self.blame.changed[package])
            self._add("release", package, found, older < newer)
            if self.clone is not None and package == self.clone.package:
                self._commits(package, found, roles, older < newer)
        if self.clone is not None and self.clone.package not in members:
            self.notes.append(f"--repo {self.clone.path} was not used: {self.clone.package} is not the guilty package.")

    def _learn(self, good: Target, bad: Target) -> None:
        self.prober.learn(good, bad)
        self.hunt = Hunt(self.prober, self.arm)  # it may have learned how often to ask

    # -- the commits between two releases

    def _commits(self, package: str, hunted: Hunted, roles: Roles, older_is_good: bool) -> None:
        clone = self.clone
        if clone is None or self.stopped is not None or hunted.result.boundary is None:
            return
        ends = hunted.good, hunted.bad
        good, bad = (clone.commit_of(point.versions[package]) for point in ends)
        way = clone.between(good, bad)
        # The releases' own requirements may differ: laid over the one, and if that does not answer, over the other.
        reasons = []
        for point in sorted(ends, key=lambda end: Version(end.versions[package]), reverse=True):
            targets = [self._commit(clone, commit, point.target.spec) for commit in way]
            try:
                first, last = (self.hunt.ask(target).arms[self.arm] for target in (targets[0], targets[-1]))
                if (roles.of(first), roles.of(last)) == ("no", "yes"):
                    break
                reasons.append(f"over {point.target.name}: {first.label or first.detail}; {last.label or last.detail}")
            except Stopped as stopped:
                self.stopped = stopped
                return
        else:
            self.notes.append(
                "The tagged commits, laid over the releases' stacks, do not answer as the releases do "
                f"({' | '.join(reasons)}): no search over commits."
            )
            return
        _say(f"{len(way)} commits touch {package} between the two tags, {_most(len(way))} more probes at most")
        found = self.hunt.search(targets, roles, self.budget)
        self._add("commit", package, found, older_is_good)
        if found.result.boundary is not None and found.exact:
            pair = way[found.result.boundary.before], way[found.result.boundary.after]
            child = pair[1] if clone.is_ancestor(*pair) else pair[0]
            merged = clone.merged(child)
            self.stages[-1]["title"] = clone.title(child)
            self.stages[-1]["sentence"] = f"The answer changes with commit {child[:12]}" + (
                f", a merge of {merged} commits" if merged else ""
            )

    def _commit(self, clone: commits.Clone, commit: str, spec: str) -> Target:
        name = f"{spec}#{clone.package}@{commit[:12]}"
        make: Callable[[], Any] = lambda: clone.laid_over(self.prober.base(spec), commit, name)  # noqa: E731
        return Target(f"commit {commit[:12]}", name, make, base=spec)

    # -- the report

    def _add(self, kind: str, what: str, hunted: Hunted, older_is_good: bool) -> None:
        self.stages.append(bisect_report.stage(kind, what, hunted, self.prober, older_is_good))
        self.stages[-1]["title"] = None
        self.stages[-1]["withdrawn"] = [] if kind != "release" or self.yanked else _withdrawn(what, hunted)
        self.stopped = self.stopped or hunted.stopped

    def data(self, command: str) -> dict[str, Any]:
        case, cell = self.prober.case, self.prober.cell
        machine = machine_module.detect()
        profile = profiles_module.settle_all([cell.hardware], load().hardware, machine)[0]
        guilty = None
        if self.blame is not None:
            guilty = {key: getattr(self.blame, key) for key in ("members", "unproven", "changed", "notes", "tried")}
        return {
            "case": case.slug, "title": case.title, "references": case.references, "model": cell.model,
            "strategy": cell.strategy, "arm": self.arm, "find": self.find, "packages": guilty, "stages": self.stages,
            "notes": [*self.prober.notes, *self.notes], "command": command,
            "hardware": f"{profile.name} ({machine.cpu})",
            "commit": provenance.git_state()[0], "result": self._result(), "stopped": str(self.stopped or "") or None,
            "probes": len(self.prober.points), "launched": sum(p.attempts > 0 for p in self.prober.points.values()),
            "wall_s": round(sum(point.wall_s for point in self.prober.points.values()), 1),
        }  # fmt: skip

    def _result(self) -> str:
        said = [f"{item['sentence']}." for item in self.stages]
        if self.blame is not None and not said:
            members = self.blame.members
            said.append(f"Guilty: {', '.join(members)}." if members else "No package was found guilty by itself.")
        if self.stopped:
            said.append(f"The search was stopped ({self.stopped}); the same command goes on.")
        return " ".join(said)


def _withdrawn(package: str, hunted: Hunted) -> list[str]:
    """Yanked releases between the two sides, which were not asked: the change may have come with one of them."""
    one, other = (Version(point.versions[package]) for point in (hunted.good, hunted.bad))
    low, high = sorted((one, other))
    every = releases.releases(package, yanked=True)
    return [each.version for each in every if each.yanked and low < each.parsed < high]


def _most(count: int) -> int:
    """How many of ``count`` candidates a search asks at most, both ends left out, when all of them answer."""
    return max(0, count - 2).bit_length()
