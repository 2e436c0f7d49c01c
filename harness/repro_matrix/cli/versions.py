"""`repro versions CASE`: in which releases of a package each arm fires, from measurement."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from repro_matrix.cli import options as arguments
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import Stack
from repro_matrix.environment.stacks import index as releases
from repro_matrix.environment.stacks.index import Release
from repro_matrix.environment.stacks.spec import canonical
from repro_matrix.errors import ConfigError, MeasureError, ReproError
from repro_matrix.external.scripts import options
from repro_matrix.report.terminal import print_json, print_table
from repro_matrix.runner import workspace as workplace
from repro_matrix.runner.request import ask
from repro_matrix.search.prober import Point, Prober, Probing, Stopped, Target, one_case
from repro_matrix.search.releases import Boundary
from repro_matrix.search.version_map import VersionMap, maps
from repro_matrix.text import printable

EPILOG = (
    "and arms=[...], model=, strategy=, flags.<name>=, repeat=, results=... as for `repro run`; stack=: the stack\n"
    "whose package is replaced (default: the one on which the case is known to fire).\n\n"
    "History is not assumed to be monotone. A boundary is always between two probed releases. Probes are stored:\n"
    "the same command again goes on where it was stopped, and repeats none."
)


def configure(parser: argparse.ArgumentParser) -> None:
    options.case_or_script(parser, EPILOG)
    add = parser.add_argument
    add("--package", default="transformers", help="whose releases (default: transformers)")
    told = "such as 4.36..5.23, or one of them (default: from the oldest that a stack here pins)"
    add("--between", metavar="FIRST..LAST", help=told)
    told = "releases to probe at first (default: at least 8); every change seen is then narrowed to neighbours"
    add("--spread", type=arguments.number(1), metavar="N", help=told)
    add("--exhaustive", action="store_true", help="probe every release")
    add("--budget", type=arguments.number(1), metavar="N", help="at most so many probes")
    arguments.releases(parser)
    options.add(parser)


def main(args: argparse.Namespace) -> int:
    stop = threading.Event()
    if options.asked(args):
        from repro_matrix.external.scripts.prober import ScriptProber

        script, base, settings = options.script_of(args, search=True)
        if script.failure.kind == "metric" and not script.failure.op:
            raise ConfigError(
                f"--metric {args.metric!r}: write NAME > NUMBER (a bisection compares its ends by itself)"
            )
        how = settings.launcher.value
        prober = ScriptProber(script, _say, stop, settings.repeat or 1, launcher=how)
        return _draw(args, prober, base, stop)
    options.refuse(args)
    given, texts = arguments.one_stack(args)
    case = one_case(args.case)
    return _draw(
        args, Prober(ask([f"case={args.case}", *texts]), _say, stop), given or case.needs.stack or "current", stop
    )


def _draw(args: argparse.Namespace, prober: Probing, base: str, stop: threading.Event) -> int:
    package = canonical(args.package)
    spread, budget, exhaustive = args.spread, args.budget, args.exhaustive
    asked = args.between
    first, last = releases.parse_between(asked or "..")
    if not prober.arms:
        raise ReproError(f"{args.case}: the arms asked for run on a stack of their own: {', '.join(prober.own_stack)}")
    stack = prober.base(base)
    found = releases.releases(package, yanked=args.yanked, pre=args.pre)
    listed = releases.between(found, first if asked else _oldest(package, stack, found), last)
    targets = [Target(release.version, stacks.with_release(base, package, release.version)) for release in listed]

    points: dict[int, Point] = {}

    def ask(index: int) -> dict[str, Any]:
        points[index] = prober.probe(targets[index])
        return {arm: answer.label for arm, answer in points[index].arms.items()}

    known: dict[int, Mapping[str, Any]] = {}
    stopped: Stopped | None = None
    with workplace.interruptible(stop, _say), prober:
        try:
            drawn = maps(len(targets), prober.arms, ask, known, spread=spread, exhaustive=exhaustive, budget=budget)
        except Stopped as error:
            stopped = error
            drawn = maps(len(targets), prober.arms, ask, known, spread=1, budget=0)
    data = describe(prober, base, package, listed, drawn, points)
    data["stopped"] = str(stopped) if stopped else None
    print_json(data) if args.json else show(data)
    if stopped:
        _say(f"stopped: {stopped}. What was probed is stored; the same command goes on")
        return stopped.exit_code
    if not any(arm["segments"] for arm in data["arms"].values()):
        raise MeasureError("no release of these gave an answer: nothing is known")
    return 0


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def _oldest(package: str, stack: Stack, found: Sequence[Release]) -> str | None:
    """The oldest release that the base or a shipped stack's lock has."""
    from repro_matrix.environment.stacks import lock as locks
    from repro_matrix.environment.stacks import spec

    pinned = [stack.versions.get(package)]
    for slug, definition in spec.definitions().items():
        path = spec.lock_path(slug)
        if definition.kind == "lock" and path.exists():
            pinned.append(locks.read(path).pins.get(package))
    known = [release for release in found if release.version in pinned]
    return known[0].version if known else None


def describe(
    prober: Probing,
    base: str,
    package: str,
    listed: Sequence[Release],
    drawn: Mapping[str, VersionMap],
    points: Mapping[int, Point],
) -> dict[str, Any]:
    """Everything as plain data with stable keys; what is printed is made from it."""
    names = [release.version for release in listed]

    def edge(found: Boundary, arm: str) -> dict[str, Any]:
        sides = {
            side: {"release": names[i], "answer": points[i].arms[arm].label, "short": points[i].arms[arm].short,
                   "detail": points[i].arms[arm].detail, "error_at": points[i].arms[arm].error_at,
                   "document": points[i].document}
            for side, i in (("before", found.before), ("after", found.after))
        }  # fmt: skip
        return {**sides, "adjacent": found.exact, "unknown": [names[i] for i in found.unknown],
                "unprobed": [names[i] for i in found.unprobed]}  # fmt: skip

    arms = {}
    for arm, found in drawn.items():
        arms[arm] = {
            "segments": [
                {"first": names[s.first], "last": names[s.last], "answer": s.label,
                 "probed": [names[i] for i in s.probed], "releases": s.last - s.first + 1}
                for s in found.segments
            ],
            "boundaries": [edge(boundary, arm) for boundary in found.boundaries],
            "unknown": [{"release": names[i], "reason": points[i].arms[arm].detail} for i in found.unknown],
        }  # fmt: skip
    return {
        "case": prober.case.slug, "model": prober.cell.model, "strategy": prober.cell.strategy, "package": package,
        "stack": base, "releases": names, "arms": arms, "own_stack": prober.own_stack,
        "unprobed": [name for i, name in enumerate(names) if i not in points],
        "probes": [
            {"release": names[i], "stack": point.target.spec, "document": point.document, "launched": point.attempts,
             "wall_s": round(point.wall_s, 2), "stack_s": round(point.stack_s, 2),
             "answers": {arm: answer.label for arm, answer in point.arms.items()}}
            for i, point in sorted(points.items())
        ],
    }  # fmt: skip


def show(data: Mapping[str, Any]) -> None:
    """A line per stretch of releases that answered alike, then the changes that are not exact, then the unknown."""
    rows = []
    for arm, found in data["arms"].items():
        name = arm
        for part in found["segments"]:
            span = part["first"] if part["first"] == part["last"] else f"{part['first']}–{part['last']}"
            rows.append([name, span, f"{len(part['probed'])} of {part['releases']}", part["answer"]])
            name = ""
        if not found["segments"]:
            reasons = list(dict.fromkeys(item["reason"] for item in found["unknown"]))
            rows.append([arm, "", "", f"unknown: {'; '.join(reasons) or 'not probed'}"])
    what = " ".join(filter(None, (data["case"], data["model"], data["strategy"])))  # of a script only its name
    title = f"{what}: {data['package']} on stack {data['stack']}"
    print_table(title, ["arm", "releases", "probed", "answer"], rows)
    edges = [(arm, edge) for arm, found in data["arms"].items() for edge in found["boundaries"]]
    if edges and all(edge["adjacent"] for _, edge in edges):
        print("every change that was seen lies between two neighbouring releases, both probed")
    for arm, edge in edges:
        if not edge["adjacent"]:
            print(f"{arm}: {_edge(edge)}")
    for reason, names in _unknown(data).items():
        print(f"unknown: {', '.join(names)}: {reason}")
    for arm, stack in data["own_stack"].items():
        print(f"not in the map: {arm} runs on stack {stack}")
    if data["unprobed"]:
        print(f"not probed ({len(data['unprobed'])} of {len(data['releases'])}): {', '.join(data['unprobed'])}")
    launched = [probe for probe in data["probes"] if probe["launched"]]
    seconds = sum(probe["wall_s"] for probe in launched)
    each = f", {seconds / len(launched):.1f} s each" if launched else ""
    print(f"{len(data['probes'])} of {len(data['releases'])} releases probed, {len(launched)} launched now{each}")


def _edge(edge: Mapping[str, Any]) -> str:
    before, after = edge["before"], edge["after"]
    sides = [f"{side['release']} ({side['short']})" for side in (before, after)]
    text = f"changes between {sides[0]} and {sides[1]}"
    if edge["unknown"]:
        text += f"; between them, unknown: {', '.join(edge['unknown'])}"
    if edge["unprobed"]:
        text += f"; between them, not probed: {', '.join(edge['unprobed'])}"
    return text


def _unknown(data: Mapping[str, Any]) -> dict[str, list[str]]:
    """Reason -> releases (with the arm where it is not all of them)."""
    found: dict[str, dict[str, list[str]]] = {}
    for arm, described in data["arms"].items():
        for item in described["unknown"] if described["segments"] else ():  # an arm without any has its own line
            found.setdefault(item["reason"], {}).setdefault(item["release"], []).append(arm)
    every = sum(bool(described["segments"]) for described in data["arms"].values())
    return {
        reason: [r if len(arms) == every else f"{r} ({', '.join(arms)})" for r, arms in by_release.items()]
        for reason, by_release in found.items()
    }
