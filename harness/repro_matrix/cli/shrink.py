"""`repro shrink CASE|SCRIPT`: a smallest trigger of a failure, and what of it the failure needs."""

from __future__ import annotations

import argparse
import shlex
import sys
import threading
from typing import Any

from repro_matrix.cli import options as arguments
from repro_matrix.environment import stacks
from repro_matrix.errors import ConfigError
from repro_matrix.external.scripts import options
from repro_matrix.report.terminal import print_json, print_lines
from repro_matrix.results import provenance
from repro_matrix.runner import workspace as workplace
from repro_matrix.runner.request import ask
from repro_matrix.search.prober import one_case
from repro_matrix.search.reduce import report
from repro_matrix.search.reduce.parameters import Shrunk
from repro_matrix.search.reduce.settings import Search
from repro_matrix.text import printable

EPILOG = (
    "and model=, strategy=, flags.<name>=, model.config.<key>=, ranks=, repeat=, results=... as for `repro run`;\n"
    "stack=: where it fires (default: the stack on which the case is known to fire; of a script: current).\n"
    "Every question is a launched attempt, judged by the case's signature or by the failure that is asked for;\n"
    "answers are stored, and the same command goes on from them.\n"
    "Exit code 0: minimal; 2: it does not fire to begin with; 3: no answer, or the budget ended the search."
)


def configure(parser: argparse.ArgumentParser) -> None:
    options.case_or_script(parser, EPILOG)
    add = parser.add_argument
    add("--arm", help="of a case: what is made smaller (default: broken)")
    add("--budget", type=arguments.number(1), metavar="N", help="launch at most so many attempts")
    add("--out", metavar="FILE", help="of a script: the smaller file (default: beside it, train.shrunk.py)")
    options.add(parser)


def main(args: argparse.Namespace) -> int:
    if options.asked(args):
        from repro_matrix.search.reduce.script import shrink_script

        if args.arm:
            raise ConfigError(f"--arm {args.arm}: a script has no arms")
        return shrink_script(args, _say, finish)
    options.refuse(args)
    if args.out:
        raise ConfigError("--out is for a script of your own; a case's smallest cell is a command")
    return _of_case(args)


def _of_case(args: argparse.Namespace) -> int:
    from repro_matrix.search.reduce.case import open_case

    spec, texts = arguments.one_stack(args, {"arms": "what is made smaller is one arm: --arm NAME"})
    case = one_case(args.case)
    stack = stacks.resolve(spec or case.needs.stack or "current", say=_say)
    stop = threading.Event()
    asker = open_case(args.arm, ask([f"case={args.case}", *texts]), stack, _say, stop)
    knobs = tuple(each.knob for each in asker.varied)
    search = Search(asker, knobs, _say, args.budget, asker.settings.repeat or case.repeat)
    launcher = asker.settings.launcher.value
    with workplace.interruptible(stop, _say), workplace.workplace(launcher, asker.gpus, _say) as place:
        asker.at = place
        first = search.first()
        _say(f"{len(knobs)} settings vary: {', '.join(knob.name for knob in knobs)}")
        shrunk = search.run()
    final = search.asked[shrunk.config]
    data: dict[str, Any] = {
        "case": args.case, "arm": args.arm or asker.first,
        "what": f"{args.case} on {stack.name}", "failure": first.said.detail, "references": case.references,
        "stack": {"name": stack.name, "versions": dict(stack.versions)},
        "command": asker.command(shrunk.config),
        "overrides": asker.overrides(shrunk.config), "error_at": final.said.error_at, "document": final.document,
        "confirmed": f"{final.said.fired} of {final.said.counted}",
    }  # fmt: skip
    return finish(args, search, shrunk, data)


def finish(args: argparse.Namespace, search: Search, shrunk: Shrunk, own: dict[str, Any]) -> int:
    """``own``: what a case, or a script, says beside its settings."""
    lines = own.get("lines") or {"done": True, "unsure": []}
    unsure = [*search.unsure(shrunk), *lines["unsure"]]
    done = shrunk.done and lines["done"] and not unsure
    data = {
        "schema": 1, "kind": "shrunk", **own,
        **report.settings(search, shrunk), "given": report.config_of(search, search.given),
        "minimal": report.config_of(search, shrunk.config), "done": done, "notes": search.notes,
        "attempts": search.attempts, "wall_s": round(search.wall_s, 1),
        "asked_by": shlex.join(["repro", "shrink", *args.words]), "commit": provenance.git_state()[0],
    }  # fmt: skip
    print_json(data) if args.json else print_lines(list(report.lines(data)))
    if search.stopped:
        _say(f"stopped: {search.stopped}. What was measured is stored; the same command goes on")
        return search.stopped.exit_code
    if unsure:
        _say(f"whether these can be left out is not known: {', '.join(unsure)}; the same command asks again")
        return 3
    if not data["done"]:
        _say("the budget is spent: what was measured is stored; the same command with a larger one goes on")
        return 3
    return 0


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
