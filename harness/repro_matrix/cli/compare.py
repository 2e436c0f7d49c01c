"""Find the first number of a training that differs by more than rounding.

The good side runs three times: once as it is, and twice with noise of one unit of rounding, which
measures how far each tensor may differ. State what differs between the sides:
  repro compare ./train.py --good torch2.6-tf4.51 --bad current    stacks, lock files, python:PATH
  repro compare ./train.py --package transformers --good 5.8.0 --bad 5.9.0
  repro compare ./train.py --good-nproc 1 --bad-nproc 2            ranks
  repro compare ./train.py --bad-args '--strategy zero2'           arguments
  repro compare ./one_process.py ./fsdp.py                         two scripts
Exit codes: 0 the numbers agree, 1 they differ, 2 usage, 3 inconclusive or less was compared.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from repro_matrix.cli import options
from repro_matrix.cli import script_arguments as scripts
from repro_matrix.errors import ConfigError
from repro_matrix.report.terminal import print_json
from repro_matrix.runner import run as workspace
from repro_matrix.search.prober import CellRunner
from repro_matrix.text import log, one_line


def _side_options(side: str) -> Any:
    """Return the declaration of the options of one side."""
    add = options.in_section(f"The {side} side")
    return options.together(
        add(
            f"--{side}",
            metavar="STACK",
            help="a stack, a lock file, python:PATH, or a release (default: stack=)",
        ),
        add(
            f"--{side}-nproc",
            type=click.IntRange(1),
            metavar="N",
            help="its ranks (default: --nproc)",
        ),
        add(
            f"--{side}-args",
            multiple=True,
            metavar="ARGS",
            help="arguments of its script, after those of --args",
        ),
    )


@options.command
@click.argument(
    "case",
    metavar="[SCRIPT]",
    required=False,
    help="./train.py, of both sides or of the good one",
)
@click.argument(
    "overrides",
    nargs=-1,
    metavar="[SCRIPT|OVERRIDE]...",
    help="the bad side's own script; stack=, deadline=, results=, env.NAME=value",
)
@options.json
@options.launch
@_side_options("good")
@_side_options("bad")
@options.vary
@options.trace
@click.option("--package", help="the package of two releases (default: transformers)")
@click.option("--html", metavar="FILE", help="also write a page: steps across, modules down")
def main(args: options.Arguments) -> int:
    from repro_matrix.compare import consistency, two_sides  # numpy
    from repro_matrix.compare.page import render_comparison
    from repro_matrix.report.page import write_report

    sides = {side: _side(args, side) for side in ("good", "bad")}
    (one, base, _), (other, _, _) = (scripts.script_of(each) for each in sides.values())
    specs, notes = _stacks(args, base, one.results)
    built = [scripts.script_stack(text) for text in specs]
    if one.request().cells[0].key == other.request().cells[0].key and built[0].key == built[1].key:
        raise ConfigError(
            "Both sides are the same. Say what differs: --bad STACK, --bad-nproc N, --bad-args ARGS"
            " or a second script."
        )
    window, checked = two_sides.Window(args.steps, args.from_step), {}
    varied = {}
    if scripts.varies(args):
        varied = {side: scripts.configurations(each)[0] for side, each in sides.items()}
    runner = CellRunner()
    with workspace.interruptible(runner.stop, log), runner:
        found = two_sides.compare_trainings(runner, (one, built[0]), (other, built[1]), window)
        for (side, chosen), stack in zip(varied.items(), built):
            checked[side] = consistency.check_consistency(runner, chosen, stack, window)[0]
    command = shlex.join(args.line)
    data = {**found.to_json(), "notes": notes, "command": command}
    data["consistency"] = {
        side: consistency.consistency_to_json(each, []) for side, each in checked.items()
    }
    notes += [f"the {side} side {each.judgement()}" for side, each in checked.items()]
    lines = [*two_sides.describe_comparison(found), *(f"  note: {text}" for text in notes)]
    lines = [one_line(text) for text in lines]
    if args.html:
        page = render_comparison(data, found.good.grid(found.bad.trace), lines)
        write_report(Path(args.html).expanduser(), page)
    if args.json:
        print_json(data)
    else:
        print("\n".join([*lines, f"  again: {command}"]))
    return found.exit_code


def _side(args: options.Arguments, side: str) -> options.Arguments:
    """Return the arguments of `repro run` for one side."""
    own = scripts.with_arguments(args, " ".join(getattr(args, f"{side}_args")))
    own.nproc = getattr(args, f"{side}_nproc") or args.nproc
    others = [word for word in args.overrides if "=" not in word]
    own.overrides = [word for word in args.overrides if "=" in word]
    if len(others) > 1:
        raise ConfigError(f"{' '.join(others)}: give at most two scripts, the good one first.")
    if others and side == "bad":
        own.case = others[0]
    return own


def _stacks(args: options.Arguments, base: str, results: Path) -> tuple[tuple[str, str], list[str]]:
    """Return both stacks, and notes on how lock files became stacks. Raise ConfigError."""
    from repro_matrix.environment.lockfiles import endpoints

    package = args.package or "transformers"
    good, bad, notes = endpoints(
        options.stack_of("good", args.good or base, base, package),
        options.stack_of("bad", args.bad or base, base, package),
        results,
    )
    return (good, bad), notes
