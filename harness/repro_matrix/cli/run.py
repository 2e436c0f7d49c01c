"""`repro run CASE`: one case, all its arms, live. `repro run ./train.py`: a script of somebody's own, as it is."""

from __future__ import annotations

import argparse
import sys
import threading

from repro_matrix.cli import matrix
from repro_matrix.cli import options as arguments
from repro_matrix.config import catalog as catalogue
from repro_matrix.config.selection import expand
from repro_matrix.environment import stacks
from repro_matrix.errors import ConfigError, unknown
from repro_matrix.external.scripts import options
from repro_matrix.report.terminal import print_json
from repro_matrix.runner import workspace as workplace
from repro_matrix.text import printable


def configure(parser: argparse.ArgumentParser) -> None:
    told = "the case's slug (`repro list` shows them), or a script of your own: ./train.py"
    parser.add_argument("case", metavar="CASE|SCRIPT", nargs="?", help=told)
    arguments.overrides(parser)
    matrix.run_options(parser)
    told = "for git bisect run: of the broken arm, 0 clean, 1 fires, 125 neither; 128 and more: an error"
    parser.add_argument("--bisect-exit", action="store_true", help=told)
    options.add(parser)
    parser.set_defaults(command=())
    parser.epilog = (
        "repro run [OPTION ...] -- torchrun|python|accelerate launch|deepspeed ...: a command line as it is.\n"
        "A script's exit codes: 0 clean, 1 the failure or another one, 3 it could not be told."
    )


def main(args: argparse.Namespace) -> int:
    if options.asked(args):
        return of_script(args)
    options.refuse(args)
    known = catalogue.load().cases
    if not args.case:
        raise ConfigError("what is to be run? A case (`repro list` shows them), ./train.py, or a command line after --")
    if "=" in args.case:
        raise unknown("case", args.case or "", known, "the first argument of `repro run` is a case or a script")
    arguments.one_case(args.case, args.overrides)
    expand("case", args.case.split(","), known)
    texts = [f"case={args.case}", *args.overrides]
    return matrix.measure(args, texts, every_arm=True, live=True, for_git=args.bisect_exit)


def of_script(args: argparse.Namespace) -> int:
    from repro_matrix.external.scripts import known_failures as known
    from repro_matrix.external.scripts import measure, show
    from repro_matrix.results import rows

    script, spec, settings = options.script_of(args)
    if script.failure.kind == "metric" and not script.failure.op:
        raise ConfigError(f"--metric {script.failure.text!r}: write NAME > NUMBER; only a search compares by itself")
    if args.dry_run:
        print(f"{script.command.shown}: {script.command.nproc} ranks on stack {spec}, at most {script.limit_s:g} s")
        return 0
    stack = stacks.resolve(spec, say=_say)
    stop = threading.Event()
    with workplace.interruptible(stop, _say, workplace.RESUMED):
        document, _ = measure.measure(script, stack, settings.repeat or 1, stop, fresh=not args.resume)
    outcomes = [attempt["outcome"]["outcome"] for attempt in document["attempts"]]
    shipped = catalogue.load().cases if set(outcomes) - {"clean", "infra"} else {}
    seen = known.cases(document["attempts"], shipped.values())
    if args.json:
        at = rows.error_at(document["attempts"])
        print_json({**document, "error_at": at, "known": seen, "document": str(script.path(stack))})
    else:
        print("\n".join(show.lines(document)))
        for slug in seen:
            print(f"a known failure: {slug}, {shipped[slug].title}")
            print(f"  what helps: `repro show {slug}`; live: `repro run {slug}`")
        print(f"on stack {spec}; document: {script.path(stack)}")
    if stop.is_set():
        return 130
    if args.bisect_exit:
        return 1 if "fires" in outcomes else 0 if set(outcomes) == {"clean"} else 125
    return 0 if set(outcomes) == {"clean"} else 3 if set(outcomes) <= {"infra"} else 1


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
