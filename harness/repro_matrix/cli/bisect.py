"""Find the release, package or commit that changed a result.

Overrides are those of `repro run` (model=, strategy=, flags.<name>=, repeat=, results= ...), and
stack=: the stack whose package is replaced (default: the one on which the case is known to fail).

Good: the failure does not occur (the variant passes; or, if the good end fails with another error,
that error). Bad: the failure occurs. Any other result in between is unknown and is skipped. If good
is the newer end, the search is for the release with the fix. With repeat=N, a flaky failure is
repeated according to its rate. Between two stacks, the search first finds the packages that cause
the difference, then the release of each. executor=slurm measures the probes in jobs of a cluster.

Exit codes: 0 found (also if only a range is left), 2 wrong ends, 3 an end cannot be measured, or no
package is the cause.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from repro_matrix.cli import options
from repro_matrix.cli import script_arguments as scripts
from repro_matrix.config.schema import VARIANT
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks.spec import canonical
from repro_matrix.errors import ConfigError
from repro_matrix.report.terminal import print_json
from repro_matrix.runner import run as workspace
from repro_matrix.search import report
from repro_matrix.search.bisect import Search, is_release
from repro_matrix.search.commits import Clone
from repro_matrix.search.other_causes import list_causes, reworded
from repro_matrix.search.prober import Prober, SameResult, one_variant
from repro_matrix.text import log


@options.command
@options.case_or_script
@click.option(
    "--good",
    required=True,
    metavar="RELEASE|STACK",
    help="a release without the failure, or a stack (a name, a lock file, python:PATH)",
)
@click.option(
    "--bad", required=True, metavar="RELEASE|STACK", help="a release with the failure, or a stack"
)
@click.option(
    "--package",
    help="search its releases (default: transformers); with two stacks: search this package only",
)
@click.option("--variant", help="default: the first variant")
@options.flag("--any-change", "search for any change of the result, not only of this failure")
@click.option(
    "--repo",
    metavar="DIR",
    help="a local git clone of the package, to find the commit; the clone is only read",
)
@click.option(
    "--max-probes", type=click.IntRange(3), metavar="N", help="at most N probes in each search"
)
@options.numbers(
    is_flag=True,
    help="the failure: a number of the training differs from the good end's by more than rounding;"
    " names the module",
)
@options.vary
@options.trace
def main(args: options.Arguments) -> int:
    _check_ends(args.good, args.bad)
    executor = options.executor_of(args)
    prober, variant, base = _of_script(args) if scripts.names_script(args) else _of_case(args)
    if executor is not None:
        prober.run_in_jobs(executor)
    package = canonical(args.package) if args.package else None
    clone = None
    if args.repo:
        clone = Clone(Path(args.repo).expanduser().absolute(), package or "transformers")
    search = Search(prober, variant, args.any_change, clone, args.max_probes)
    with workspace.interruptible(prober.stop, log), prober:
        try:
            search.run(args.good, args.bad, package, base)
            if args.numbers and scripts.varies(args):
                _judge_ends(args, prober)
        except SameResult as error:
            causes = _other_causes(args, search, package, base)
            raise ConfigError("\n  ".join([str(error), *causes])) from None
    data = report.bisection(search, shlex.join(args.line))
    text = report.render_search("bisect", data)
    print_json({**data, "report": text}) if args.json else print(text)
    if search.stopped:
        raise search.stopped
    return 0 if search.stages else 3


def _of_case(args: options.Arguments) -> tuple[Prober, str, str]:
    case, request, base = options.case_of(
        args, {"variants": "bisect one variant with --variant NAME"}
    )
    variant = one_variant(case, args.variant)
    return Prober(request, variant), variant, base


def _of_script(args: options.Arguments) -> tuple[Prober, str, str]:
    """Return the prober of a script. Lock files become stacks first."""
    from repro_matrix.environment.lockfiles import endpoints

    prober, base = scripts.script_prober(args, needs_limit=False)
    if not is_release(args.good):
        args.good, args.bad, notes = endpoints(args.good, args.bad, prober.script.results)
        prober.notes += notes
    return prober, VARIANT, base


def _other_causes(
    args: options.Arguments, search: Search, package: str | None, base: str
) -> list[str]:
    """Return what else the failure may depend on, with commands."""
    releases, name = is_release(args.good), package or "transformers"
    good = stacks.with_release(base, name, args.good) if releases else args.good
    more = [f"stack={good}"]
    if args.numbers:
        more += ["--numbers", good]
    if args.variant:
        more.append(f"variants={search.variant}")
    ends = dict.fromkeys(("--good", "--bad", "--repo", "--variant", "--vary", "--ranks"))
    versions = reworded(
        ["repro", "versions", *args.line[2:]], ends, ("--any-change", "--numbers", "stack"), more
    )
    return list_causes(search.prober, [name] if releases else [], args.line, versions)


def _judge_ends(args: options.Arguments, prober: Prober) -> None:
    """Add to the report which of the two ends is consistent with itself."""
    from repro_matrix.compare.consistency import check_consistency
    from repro_matrix.compare.two_sides import NumbersProber

    assert isinstance(prober, NumbersProber)
    chosen, _ = scripts.configurations(args)
    for name, stack in prober.ends.items():
        found, _ = check_consistency(prober, chosen, stack, prober.window)
        prober.notes.append(f"{name} {found.judgement()}.")


def _check_ends(good: str, bad: str) -> None:
    """Raise ConfigError for ends that cannot be compared, before a stack is built."""
    if is_release(good) != is_release(bad):
        raise ConfigError(
            f"--good {good} --bad {bad}: give two releases of a package, or two stacks."
        )
    if not is_release(good):
        options.check_side("good", good)
        options.check_side("bad", bad)
