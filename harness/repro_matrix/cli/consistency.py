"""`repro consistency SCRIPT --ranks 1,2 --vary '--acc {1,4}'`: compare a script with itself; no
side is trusted.

Say which arguments must not change what your script computes. Each choice is launched once, on one
stack, and must train as the first one does, up to rounding:
  --ranks 1,2                              one process and two ranks
  --ranks '1,2 --batch {8,4}'              the values of several lists belong together: here 8
  samples in each step
  --vary '--batch {8,2} --acc {1,4}'       one micro-batch and four
  --vary --checkpoint                      without an argument and with it
  --ranks '1,2,2 --strategy {none,ddp,fsdp}'
With several options, each is varied by itself, and then all of them together. Exit codes: 0 all
agree, 1 the script contradicts itself, 2 usage, 3 not everything could be checked.
"""

from __future__ import annotations

import argparse
import shlex
import threading
from dataclasses import replace

from repro_matrix.cli import options
from repro_matrix.environment import stacks
from repro_matrix.report.terminal import print_json
from repro_matrix.runner import run as workspace
from repro_matrix.search.algorithms import Stopped
from repro_matrix.search.prober import CellRunner
from repro_matrix.text import log, one_line


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "case", metavar="SCRIPT", nargs="?", help="./train.py, or a command line after --"
    )
    options.overrides(parser)
    options.add_launch_options(parser)
    options.vary(parser)
    options.trace(parser)
    parser.set_defaults(command=())


def main(args: argparse.Namespace) -> int:
    from repro_matrix.compare import consistency  # numpy
    from repro_matrix.compare.two_sides import Window
    from repro_matrix.runner.adhoc_case import in_shell

    chosen, base = options.configurations(args)
    stack = in_shell(replace(stacks.resolve(base, say=log), name=base))
    stop = threading.Event()
    runner = CellRunner(log, stop)
    with workspace.interruptible(stop, log), runner:
        try:
            found, runs = consistency.check_consistency(
                runner, chosen, stack, Window(args.steps, args.from_step)
            )
        except Stopped as stopped:
            return options.stopped(stopped)
    command = shlex.join(["repro", "consistency", *args.words])
    if args.json:
        print_json({**consistency.consistency_to_json(found, runs), "command": command})
    else:
        print(
            "\n".join(
                map(
                    one_line,
                    [*consistency.describe_consistency(found, runs), f"  again: {command}"],
                )
            )
        )
    return found.exit_code
