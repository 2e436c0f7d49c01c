"""`repro compare SCRIPT --good X --bad Y`: find the first number of a training that differs by more
than rounding.

The good side runs three times: as it is, and twice with noise of one unit of rounding,
which measures how far each tensor may differ. Give what differs between the sides:
  repro compare ./train.py --good torch2.6-tf4.51 --bad current       stacks, lock files,
  python:PATH
  repro compare ./train.py --package transformers --good 5.8.0 --bad 5.9.0
  repro compare ./train.py --good-nproc 1 --bad-nproc 2               ranks
  repro compare ./train.py --bad-args '--strategy zero2'              arguments
  repro compare ./one_process.py ./fsdp.py                            two scripts
Exit codes: 0 the numbers agree, 1 they differ, 2 usage, 3 inconclusive or less was compared.
"""

from __future__ import annotations

import argparse
import shlex
import threading
from dataclasses import replace
from pathlib import Path

from repro_matrix.cli import options
from repro_matrix.environment import stacks
from repro_matrix.errors import ConfigError
from repro_matrix.report.terminal import print_json
from repro_matrix.runner import run as workspace
from repro_matrix.search.algorithms import Stopped
from repro_matrix.text import log, one_line


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "case", metavar="SCRIPT", nargs="?", help="./train.py, of both sides or of the good one"
    )
    text = "the bad side's own script; stack=, deadline=, results=, env.NAME=value"
    parser.add_argument("overrides", nargs="*", default=[], metavar="SCRIPT|OVERRIDE", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON with stable keys")
    options.add_launch_options(parser)
    for side in ("good", "bad"):
        add = parser.add_argument_group(f"the {side} side").add_argument
        add(
            f"--{side}",
            metavar="STACK",
            help="a stack, a lock file, python:PATH, or a release (default: stack=)",
        )
        add(
            f"--{side}-nproc",
            type=options.number_type(1),
            metavar="N",
            help="its ranks (default: --nproc)",
        )
        text = "arguments of its script, after those of --args"
        add(f"--{side}-args", action="append", default=[], metavar="ARGS", help=text)
    options.vary(parser)
    options.trace(parser)
    parser.add_argument("--package", help="the package of two releases (default: transformers)")
    parser.add_argument(
        "--html", metavar="FILE", help="also write a page: steps across, modules down"
    )
    parser.set_defaults(command=())


def main(args: argparse.Namespace) -> int:
    from repro_matrix.compare import consistency
    from repro_matrix.compare import page as comparison
    from repro_matrix.compare import two_sides as compare  # numpy
    from repro_matrix.report.page import write_report
    from repro_matrix.runner.adhoc_case import in_shell

    (one, base, _), (other, _, _) = (
        options.script_of(_side(args, side)) for side in ("good", "bad")
    )
    specs, notes = _stacks(args, base, one.results)
    built = [in_shell(replace(stacks.resolve(text, say=log), name=text)) for text in specs]
    good, bad = (one, built[0]), (other, built[1])
    if (
        good[0].request().cells[0].key == bad[0].request().cells[0].key
        and good[1].key == bad[1].key
    ):
        raise ConfigError(
            "Both sides are the same. Say what differs: --bad STACK, --bad-nproc N, --bad-args ARGS"
            " or a second script."
        )
    stop, window = threading.Event(), compare.Window(args.steps, args.from_step)
    varied = [
        (side, options.configurations(_side(args, side))[0], stack)
        for side, stack in (("good", built[0]), ("bad", built[1]))
        if options.varies(args)
    ]
    runner = compare.TraceRunner(log, stop)
    with workspace.interruptible(stop, log), runner:
        try:
            found = compare.compare_trainings(runner, good, bad, window)
            checked = {
                side: consistency.check_consistency(runner, each, stack, window)[0]
                for side, each, stack in varied
            }
        except Stopped as stopped:
            return options.stopped(stopped)
    command = shlex.join(["repro", "compare", *args.words])
    data = {**found.to_json(), "notes": notes, "command": command}
    data["consistency"] = {
        side: consistency.consistency_to_json(each, []) for side, each in checked.items()
    }
    notes += [f"the {side} side {each.judgement()}" for side, each in checked.items()]
    lines = [
        one_line(text)
        for text in (*compare.describe_comparison(found), *(f"  note: {text}" for text in notes))
    ]
    if args.html:
        write_report(
            Path(args.html).expanduser(),
            comparison.render_comparison(data, found.good.grid(found.bad.trace), lines, command),
        )
    if args.json:
        print_json(data)
    else:
        print("\n".join([*lines, f"  again: {command}"]))
    return found.exit_code


def _side(args: argparse.Namespace, side: str) -> argparse.Namespace:
    """Return the arguments of `repro run` for one side."""
    own = options.with_arguments(args, " ".join(getattr(args, f"{side}_args")))
    own.nproc = getattr(args, f"{side}_nproc") or args.nproc
    others = [word for word in args.overrides if "=" not in word]
    own.overrides = [word for word in args.overrides if "=" in word]
    if len(others) > 1:
        raise ConfigError(f"{' '.join(others)}: give at most two scripts, the good one first.")
    if others and side == "bad":
        own.case = others[0]
    return own


def _stacks(args: argparse.Namespace, base: str, results: Path) -> tuple[list[str], list[str]]:
    """Return the specifications of both stacks, and notes on how lock files became stacks. Raises
    ConfigError."""
    from repro_matrix.environment.lockfiles import endpoints

    package = args.package or "transformers"
    good, bad = (
        options.stack_of(side, getattr(args, side) or base, base, package)
        for side in ("good", "bad")
    )
    good, bad, notes = endpoints(good, bad, results)
    return [good, bad], notes
