"""The options by which commands take a user's script instead of a case."""

from __future__ import annotations

import argparse
import re

from repro_matrix.cli import options as arguments
from repro_matrix.config.settings import RunSettings, compose_run
from repro_matrix.errors import ConfigError
from repro_matrix.external import adhoc_case as adhoc
from repro_matrix.external.log_scan import LogError, lines
from repro_matrix.search.algorithms import Stopped
from repro_matrix.text import log

TAKEN = ("stack", "repeat", "results", "deadline", "env")  # overrides that apply to a script
KINDS = {"error": adhoc.error, "log": adhoc.log, "exit": adhoc.exit_code, "hang": adhoc.hang, "metric": adhoc.metric}


def case_or_script(parser: argparse.ArgumentParser, epilog: str) -> None:
    arguments.case(parser, "the case's slug (`repro list` shows them), or a script of your own: ./train.py")
    arguments.overrides(parser)
    parser.epilog = epilog


def add(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a script of your own (./train.py, or a command line after --)")
    add = group.add_argument
    add("--nproc", type=arguments.number(1), metavar="N", help="ranks (default: 2)")
    add("--args", default="", metavar="'...'", dest="script_args", help="the script's arguments")
    add("--module", action="store_true", help="the first argument is a module, as of python -m")
    add("--error", metavar="'TYPE: REGEX'", help="the failure: an exception of the ranks that failed first")
    add("--log", metavar="REGEX", help="the failure: a line that a rank prints, logs or warns")
    add("--exit", type=int, metavar="CODE", help="the failure: a rank ends with this code")
    add("--hang", type=_seconds, metavar="SECONDS", help="the failure: it has not ended by then")
    text = "the failure: 'loss > 3.2', of the last such number printed (NAME: 3.4, JSON lines, or /REGEX (GROUP)/)"
    add("--metric", metavar="'NAME > X'", help=text)
    add("--same-failure-as", metavar="LOG", help="the failure: the one that this log shows")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def is_script(args: argparse.Namespace) -> bool:
    """Return whether the command's first argument is a script, not a case."""
    return bool(getattr(args, "command", None)) or args.module or adhoc.is_script(args.case or "")


def given(args: argparse.Namespace) -> list[str]:
    """Return the options of a script that were given."""
    names = [name for name in (*KINDS, "same_failure_as", "nproc") if getattr(args, name) is not None]
    return [name.replace("_", "-") for name in names] + (["args"] if args.script_args else [])


def stopped(error: Stopped) -> int:
    """Print why a search ended early, and return its exit code."""
    log(f"stopped: {error}. The probes are stored; the same command continues.")
    return error.exit_code


def refuse(args: argparse.Namespace) -> None:
    """Raise ConfigError where options of a script are given for a case."""
    names = given(args)
    if names:
        raise ConfigError(
            f"--{names[0]} is for a script of your own; {args.case!r} is a case. Write a script as ./x.py."
        )


def failure_of(args: argparse.Namespace) -> adhoc.Failure:
    names = [name for name in (*KINDS, "same_failure_as") if getattr(args, name) is not None]
    if len(names) > 1:
        one, other = (name.replace("_", "-") for name in names[:2])
        raise ConfigError(f"--{one} and --{other} both describe the failure. Give one of them.")
    if not names:
        return adhoc.Failure()
    value = getattr(args, names[0])
    if names[0] in KINDS:
        return KINDS[names[0]](value)  # type: ignore[operator]
    try:
        return adhoc.same_failure_as(lines(value), value)
    except LogError as error:
        raise ConfigError(f"--same-failure-as {error}") from None


def script_of(args: argparse.Namespace, needs_limit: str = "") -> tuple[adhoc.Script, str, RunSettings]:
    """Return the script, the stack's specification and the run's settings. Raises ConfigError before anything starts.

    ``needs_limit``: why a metric without a limit is refused."""
    words = list(getattr(args, "command", None) or ())
    if words and args.case:
        args.overrides, args.case = [args.case, *args.overrides], None
    stack, texts = arguments.one_stack(args)
    for text in texts:
        if re.split(r"[.=]", text.lstrip("+~"), maxsplit=1)[0] not in TAKEN:
            raise ConfigError(f"{text!r} does not apply to a script. Overrides that do: {', '.join(TAKEN)}.")
    settings = compose_run(texts)
    if words:
        if args.script_args:
            raise ConfigError("--args goes with a script's name; a command line after -- has its own arguments.")
        command = adhoc.command_of_words(words, args.nproc)
    else:
        if args.module and not args.case:
            raise ConfigError("--module: a module's name is missing. Write `repro run --module my.train`.")
        command = adhoc.command_of_script(args.case, args.nproc or 2, args.script_args, args.module)
    failure = failure_of(args)
    if needs_limit and failure.needs_limit:
        raise ConfigError(f"--metric {failure.text!r}: write NAME > NUMBER; {needs_limit}.")
    env = tuple(sorted(settings.env.items()))
    results = adhoc.results_folder(settings.results)
    script = adhoc.Script(command, failure, results, settings.deadline or adhoc.DEADLINE_S, env)
    return script, stack or "current", settings
