"""Find contradictions within a training script; no side of the comparison is trusted.

State which arguments must not change what your script computes. Each choice is launched once, on
one stack, and must train as the first one does, up to rounding:
  --ranks 1,2                              one process, then two ranks
  --ranks '1,2 --batch {8,4}'              values of several lists belong together: 8 samples a step
  --vary '--batch {8,2} --acc {1,4}'       one micro-batch, then four
  --vary --checkpoint                      without an argument, then with it
  --ranks '1,2,2 --strategy {none,ddp,fsdp}'
With several options, each is varied by itself, and then all of them together. Exit codes: 0 all
agree, 1 the script contradicts itself, 2 usage, 3 not everything could be checked.
"""

from __future__ import annotations

import shlex

import click

from repro_matrix.cli import options
from repro_matrix.cli import script_arguments as scripts
from repro_matrix.report.terminal import print_json
from repro_matrix.runner import run as workspace
from repro_matrix.search.prober import CellRunner
from repro_matrix.text import log, one_line


@options.command
@click.argument(
    "case", metavar="[SCRIPT]", required=False, help="./train.py, or a command line after --"
)
@options.overrides
@options.json
@options.launch
@options.vary
@options.trace
def main(args: options.Arguments) -> int:
    from repro_matrix.compare import consistency  # numpy
    from repro_matrix.compare.two_sides import Window

    chosen, base = scripts.configurations(args)
    stack = scripts.script_stack(base)
    runner = CellRunner()
    with workspace.interruptible(runner.stop, log), runner:
        found, runs = consistency.check_consistency(
            runner, chosen, stack, Window(args.steps, args.from_step)
        )
    command = shlex.join(args.line)
    if args.json:
        print_json({**consistency.consistency_to_json(found, runs), "command": command})
    else:
        lines = [*consistency.describe_consistency(found, runs), f"  again: {command}"]
        print("\n".join(map(one_line, lines)))
    return found.exit_code
