"""`repro versions CASE`: measure in which releases of a package each variant shows the failure."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from repro_matrix.cli import options as arguments
from repro_matrix.cli import script_options
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import Stack, index, spec
from repro_matrix.environment.stacks import lock as locks
from repro_matrix.environment.stacks.index import Release
from repro_matrix.environment.stacks.spec import canonical
from repro_matrix.errors import MeasureError, ReproError
from repro_matrix.report.terminal import print_json, print_table
from repro_matrix.runner import workspace
from repro_matrix.runner.request import ask
from repro_matrix.search import report
from repro_matrix.search.prober import Point, Prober, Stopped, Target, one_case
from repro_matrix.search.releases import maps
from repro_matrix.text import log, printable

EPILOG = (
    "and variants=[...], model=, strategy=, flags.<name>=, repeat=, results=... as for `repro run`; stack=: the stack\n"
    "whose package is replaced (default: the one on which the case is known to fail).\n\n"
    "History is not assumed to be monotone. A boundary always lies between two probed releases. Probes are stored:\n"
    "the same command continues an interrupted search and repeats no probe."
)


def configure(parser: argparse.ArgumentParser) -> None:
    script_options.case_or_script(parser, EPILOG)
    add = parser.add_argument
    add("--package", default="transformers", help="map its releases (default: transformers)")
    text = "such as 4.36..5.23, or one side of it (default: from the oldest that a stack here pins)"
    add("--range", metavar="FIRST..LAST", help=text)
    text = "releases to probe first (default: at least 8); every change is then narrowed to neighbours"
    add("--samples", type=arguments.number(1), metavar="N", help=text)
    add("--exhaustive", action="store_true", help="probe every release")
    add("--max-probes", type=arguments.number(1), metavar="N", help="at most N probes")
    arguments.releases(parser)
    script_options.add(parser)


def main(args: argparse.Namespace) -> int:
    prober, base = _prober(args)
    package = canonical(args.package)
    if not prober.variants:
        raise ReproError(f"{args.case}: the variants run on stacks of their own: {', '.join(prober.own_stack)}")
    first, last = index.parse_between(args.range or "..")
    stack = prober.base(base)
    every = index.releases(package, yanked=args.yanked, pre=args.pre)
    listed = index.between(every, first if args.range else _oldest(package, stack, every), last)
    targets = [Target(release.version, stacks.with_release(base, package, release.version)) for release in listed]
    points: dict[int, Point] = {}
    known: dict[int, Mapping[str, Any]] = {}

    def probe(at: int) -> dict[str, Any]:
        points[at] = prober.probe(targets[at])
        return {variant: answer.label for variant, answer in points[at].variants.items()}

    stopped: Stopped | None = None
    with workspace.interruptible(prober.stop, log), prober:
        how = {"samples": args.samples, "exhaustive": args.exhaustive, "max_probes": args.max_probes}
        try:
            found = maps(len(targets), prober.variants, probe, known, **how)
        except Stopped as error:
            stopped = error
            found = maps(len(targets), prober.variants, probe, known, samples=1, max_probes=0)
    data = report.version_maps(prober, base, package, listed, found, points)
    data["stopped"] = str(stopped) if stopped else None
    print_json(data) if args.json else _show(data, script_options.is_script(args))
    if stopped:
        log(f"stopped: {stopped}. The probes are stored; the same command continues.")
        return stopped.exit_code
    if not any(variant["segments"] for variant in data["variants"].values()):
        raise MeasureError("No release in the range has a result. The reasons are listed above.")
    return 0


def _prober(args: argparse.Namespace) -> tuple[Prober, str]:
    if script_options.is_script(args):
        from repro_matrix.external.script_prober import ScriptProber

        script, base, settings = script_options.script_of(args, "only a bisection can find the limit itself")
        return ScriptProber(script, log, threading.Event(), settings.repeat), base
    script_options.refuse(args)
    given, texts = arguments.one_stack(args)
    case = one_case(args.case)
    prober = Prober(ask([f"case={args.case}", *texts]), log, threading.Event())
    return prober, given or case.requires.stack or "current"


def _oldest(package: str, stack: Stack, every: Sequence[Release]) -> str | None:
    """Return the oldest release that the base or a shipped stack's lock has."""
    pinned = [stack.versions.get(package)]
    for slug, definition in spec.definitions().items():
        path = spec.lock_path(slug)
        if definition.kind == "lock" and path.exists():
            pinned.append(locks.read(path).pins.get(package))
    return next((release.version for release in every if release.version in pinned), None)


def _show(data: dict[str, Any], script: bool) -> None:
    cell = data["case"] if script else f"{data['case']} {data['model']} {data['strategy']}"
    title = f"{cell}: {data['package']} on stack {data['stack']}"
    print_table(title, ["variant", "releases", "probed", "answer"], report.map_rows(data))
    for line in report.map_notes(data):
        print(printable(line))
