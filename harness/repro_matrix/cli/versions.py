"""Measure in which releases of a package each variant of a case reproduces.

Overrides are those of `repro run` (variants=, model=, strategy=, flags.<name>=, repeat=, results=
...), and stack=: the stack whose package is replaced (default: the one on which the case is known
to fail).

History is not assumed to be monotone. A boundary is always between two probed releases. Probes are
stored: the same command continues an interrupted search and repeats no probe. executor=slurm
measures the probes side by side, in jobs of a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import click

from repro_matrix.cli import options
from repro_matrix.cli import script_arguments as scripts
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import Stack, package_index, spec
from repro_matrix.environment.stacks.lock import read_lock
from repro_matrix.environment.stacks.package_index import Release
from repro_matrix.environment.stacks.spec import canonical
from repro_matrix.errors import MeasureError, ReproError
from repro_matrix.report.terminal import print_json
from repro_matrix.runner import run as workspace
from repro_matrix.search import algorithms, report
from repro_matrix.search.algorithms import Label, Stopped, Trail
from repro_matrix.search.other_causes import list_causes, reworded
from repro_matrix.search.prober import Point, Prober, Target
from repro_matrix.text import log

if TYPE_CHECKING:
    from packaging.version import Version

    from repro_matrix.compare.two_sides import NumbersProber


@options.command
@options.case_or_script
@click.option("--package", default="transformers", help="map its releases (default: transformers)")
@click.option(
    "--range",
    metavar="FIRST..LAST",
    help="such as 4.36..5.23, or one side of it (default: from the oldest that a stack here pins)",
)
@click.option(
    "--samples",
    type=click.IntRange(2),
    metavar="N",
    default=8,
    help="releases to probe first (default: 8); every change is then narrowed to neighbours",
)
@click.option("--max-probes", type=click.IntRange(1), metavar="N", help="at most N probes")
@options.numbers(
    metavar="RELEASE|STACK",
    help="the failure of a script: a number of its training differs from those of this release by"
    " more than rounding",
)
@options.vary
@options.trace
def main(args: options.Arguments) -> int:
    executor = options.executor_of(args)
    prober, base = _prober(args)
    if executor is not None:
        prober.run_in_jobs(executor)
    package = canonical(args.package)
    if not prober.variants:
        raise ReproError(
            f"{args.case}: the variants run on stacks of their own: {', '.join(prober.own_stack)}"
        )
    first, last = package_index.parse_between(args.range or "..")
    stack = stacks.resolve(base, say=log)
    available = package_index.releases(package)
    if not args.range:
        first = _oldest(package, stack, available)
    listed = package_index.between(available, first, last)
    names = [release.version for release in listed]
    points: dict[int, Point] = {}

    def target(at: int) -> Target:
        return Target(names[at], stacks.with_release(base, package, names[at]))

    def probe(at: int) -> Mapping[str, Label]:
        points[at] = prober.probe(target(at))
        return {variant: answer.result for variant, answer in points[at].variants.items()}

    def prepare(indices: Sequence[int]) -> None:
        prober.expect([target(at) for at in indices])

    trail = Trail(probe, max_probes=args.max_probes, prepare=prepare)
    with workspace.interruptible(prober.stop, log), prober:
        if args.numbers:
            good = options.stack_of("numbers", args.numbers, base, package)
            cast("NumbersProber", prober).measure_good(Target(args.numbers, good))
        algorithms.version_map(trail, len(names), prober.variants, args.samples)
    stopped = trail.ended if isinstance(trail.ended, Stopped) else None
    data = report.version_map_to_json(prober, base, package, names, trail, points)
    data["stopped"] = str(stopped) if stopped else None
    data["may_depend_on"] = []
    if trail.ended is None and all(
        len(variant["segments"]) == 1 for variant in data["variants"].values()
    ):
        vary = reworded(args.line, {"--numbers": good} if args.numbers else {})
        data["may_depend_on"] = list_causes(prober, [package], args.line, vary)
    print_json(data) if args.json else print(report.render_search("versions", data))
    if stopped:
        raise stopped
    if not any(variant["segments"] for variant in data["variants"].values()):
        raise MeasureError("No release in the range has a result. The reasons are listed above.")
    if trail.ended:
        log(
            "The map is not complete. The probes are stored; to continue, run the command with a"
            " larger --max-probes."
        )
    return 3 if trail.ended else 0


def _prober(args: options.Arguments) -> tuple[Prober, str]:
    if scripts.names_script(args):
        return scripts.script_prober(args)
    _, request, base = options.case_of(args)
    return Prober(request), base


def _oldest(package: str, stack: Stack, available: Sequence[Release]) -> Version | None:
    """Return the oldest release that the base or a shipped stack's lock has."""
    pinned = [stack.versions.get(package)]
    for slug in spec.definitions():
        path = spec.lock_path(slug)
        if path.exists():
            pinned.append(read_lock(path).pins.get(package))
    return next((release.parsed for release in available if release.version in pinned), None)
