"""`repro diff A B`: compare two runs, stacks or machines.

A, B: folders of results (DIR or DIR,DIR,...; of a cell in several, the newest result counts), or a
stack of the baseline (torch2.2-tf4.39, current). If each side has one stack or one hardware and
these differ, the comparison goes across them.

exit codes: 0 no difference; 1 a result differs (outcome, verdict, failure id, flakiness); 3 no
result differs, but B lacks results of A that its run planned, or a file cannot be read; 2 usage, no
results, or no cell in common. Results that only B has are listed and do not change the exit code.
--agreement: 0 a GPU agrees with a CPU; 1 they differ; 3 no such pair; 2 as above.
"""

from __future__ import annotations

import click

from repro_matrix.changes import agreement
from repro_matrix.changes import diff as diffs
from repro_matrix.changes.sides import Side, load_sides
from repro_matrix.cli import options
from repro_matrix.errors import ConfigError, ExitCode
from repro_matrix.report.terminal import print_json, print_notes, print_wrapped
from repro_matrix.text import counted, log


@options.command
@click.argument("one", metavar="A", help="the results to compare with")
@click.argument("other", metavar="B", help="the results to compare")
@click.argument(
    "overrides",
    nargs=-1,
    metavar="[NAME=VALUE]...",
    help="compare only these cells: case='fsdp*' model= strategy= stack= hardware=",
)
@options.flag(
    "--agreement",
    "count for each case how many variants have the same result on a CPU and on a GPU",
)
@options.flag("--all", "list every change")
@options.json
def main(args: options.Arguments) -> int:
    one, other = (each.select(args.overrides) for each in load_sides((args.one, args.other)))
    print_notes([*one.notes, *other.notes])
    if not args.json:
        print_wrapped(*(diffs.describe_side(side.name, side.rows) for side in (one, other)))
    return _agreement(args, one, other) if args.agreement else _diff(args, one, other)


def _diff(args: options.Arguments, one: Side, other: Side) -> int:
    if not any(row.kinds for side in (one, other) for row in side.rows):
        raise ConfigError(
            f"nothing to compare: neither {args.one} nor {args.other} has a measured result"
        )
    everything = diffs.compare_rows(one.rows, other.rows)
    result = everything.without_unrequested(other.runs)
    if not result.cells:
        raise ConfigError(f"nothing to compare: {args.one} and {args.other} have no cell in common")
    unreadable = len(one.unreadable) + len(other.unreadable)
    code = result.exit_code or (ExitCode.INCOMPLETE if unreadable else 0)
    if args.json:
        counts = {
            "unreadable": unreadable,
            "unrequested": sum(result.excused.values()),
            "exit_code": code,
        }
        print_json({"a": args.one, "b": args.other, **diffs.diff_to_json(result), **counts})
        return code
    reason = {0: "no difference", 1: "results differ"}.get(
        code, "the second side lacks results of the first"
    )
    if unreadable and not result.exit_code:
        reason = f"no difference, but {counted(unreadable, 'file')} could not be read"
    print_wrapped(*diffs.describe_diff(result, args.all))
    for excuse, number in result.excused.items():
        print_wrapped(f"not compared: {counted(number, 'result')} of {args.one}: {excuse}")
    print_wrapped(f"exit code {code}: {reason}")
    return code


def _agreement(args: options.Arguments, one: Side, other: Side) -> int:
    cases = agreement.measure_agreement(one.rows, other.rows)
    if args.json:
        print_json({"a": args.one, "b": args.other, **agreement.agreement_to_json(cases)})
    else:
        print_wrapped("", *agreement.describe_agreement(cases, args.all))
    if any(each.across for each in cases):
        return ExitCode.DIFFERS if any(each.disagreements for each in cases) else ExitCode.OK
    log(
        f"repro: no GPU was compared with a CPU: {args.one} and {args.other} have no cell that was"
        " measured on a GPU in one of them and on the CPU in the other. Measure one where `repro"
        " doctor` lists a usable GPU."
    )
    return ExitCode.INCOMPLETE
