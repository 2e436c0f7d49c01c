"""Find the smallest trigger of a failure: the settings, model size and ranks that it needs.

Overrides are those of `repro run` (model=, strategy=, flags.<name>=, model.config.<key>=, ranks=,
repeat=, results= ...), and stack=: a stack on which it fails (default: the stack on which the case
is known to fail; for a script: current). Every probe is a launched attempt. It is graded by the
case's signature, or by the failure that you describe. The probes are stored, and the same command
continues from them. Exit codes: 0 minimal, 2 it does not fail to begin with, 3 no outcome, or no
attempts are left.
"""

from __future__ import annotations

import shlex
from dataclasses import replace

import click

from repro_matrix.cli import options
from repro_matrix.cli import script_arguments as scripts
from repro_matrix.environment import stacks
from repro_matrix.errors import ConfigError
from repro_matrix.report.terminal import print_json
from repro_matrix.runner import run as workspace
from repro_matrix.search import report
from repro_matrix.search.algorithms import Stopped
from repro_matrix.search.reduce import CaseReduction, ScriptReduction
from repro_matrix.text import log


@options.command
@options.case_or_script
@click.option("--variant", help="of a case: the variant to reduce (default: the first)")
@click.option("--max-probes", type=click.IntRange(1), metavar="N", help="launch at most N attempts")
def main(args: options.Arguments) -> int:
    search = _script(args) if scripts.names_script(args) else _case(args)
    with workspace.interruptible(search.stop, log), search:
        data = search.run()
    text = report.render_search("reduce", {**data, "command_line": shlex.join(data["command"])})
    print_json(data) if args.json else print(text)
    if isinstance(search.ended, Stopped):
        raise search.ended
    if data["unsure"]:
        log(
            f"No answer because of the machine: {'; '.join(data['unsure'])}. Run the same command"
            " again."
        )
    elif not data["done"]:
        log(
            "No attempts are left. The probes are stored; run the same command with a larger"
            " --max-probes to continue."
        )
    return 0 if data["done"] else 3


def _case(args: options.Arguments) -> CaseReduction:
    _, request, spec = options.case_of(args, {"variants": "reduce one variant with --variant NAME"})
    stack = replace(stacks.resolve(spec, say=log), name=spec)
    return CaseReduction(args.variant, request, stack, args.max_probes)


def _script(args: options.Arguments) -> ScriptReduction:
    if args.command:
        raise ConfigError("reduce varies --args: write ./train.py --args ... instead of --.")
    script, spec, settings = scripts.script_of(args)
    stack, repeat = scripts.script_stack(spec), settings.repeat or 1
    return ScriptReduction(script, args.case, args.script_args, stack, repeat, args.max_probes)
