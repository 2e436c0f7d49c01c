"""The arguments by which verbs take a script of somebody's own, and what they make of them."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from repro_matrix.cli import options as arguments
from repro_matrix.config import project
from repro_matrix.config.settings import RunSettings, compose_run
from repro_matrix.errors import ConfigError
from repro_matrix.external.logs.read import LogError, blocks
from repro_matrix.external.scripts import command_line as commands
from repro_matrix.external.scripts import failure as failures
from repro_matrix.external.scripts.failure import Failure
from repro_matrix.external.scripts.measure import DEADLINE_S, Script

TAKEN = ("stack", "repeat", "results", "deadline", "env")  # overrides that mean something for a script
_KINDS = ("error", "log", "exit", "hang", "metric", "like")


def case_or_script(parser: argparse.ArgumentParser, epilog: str) -> None:
    """What a verb takes first that is of a case, or of a script of one's own; ``add`` comes behind its own options."""
    arguments.case(parser, "the case's slug (`repro list` shows them), or a script of your own: ./train.py")
    arguments.overrides(parser)
    parser.epilog = epilog


def add(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a script of your own (./train.py, or a command line after --)")
    group.add_argument("--nproc", type=arguments.number(1), metavar="N", help="ranks (default: 2)")
    group.add_argument("--args", default="", metavar="'...'", dest="script_args", help="the script's own arguments")
    group.add_argument("--module", action="store_true", help="the first argument is a module, as of python -m")
    told = "the failure: an exception's type and a regular expression, of the ranks that failed first"
    group.add_argument("--error", metavar="'TYPE: REGEX'", help=told)
    group.add_argument("--log", metavar="REGEX", help="the failure: a line that a rank prints, logs or warns")
    group.add_argument("--exit", type=int, metavar="CODE", help="the failure: a rank ends with this code")
    group.add_argument("--hang", type=_seconds, metavar="SECONDS", help="the failure: it has not ended by then")
    told = "the failure: 'loss > 3.2', of the last such number printed (NAME: 3.4, JSON lines, or /REGEX (GROUP)/)"
    group.add_argument("--metric", metavar="'NAME > X'", help=told)
    group.add_argument("--like", metavar="LOG", help="the failure: the one that this log shows")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def asked(args: argparse.Namespace) -> bool:
    """Whether the verb's first argument is a script and not a case."""
    return bool(getattr(args, "command", None)) or args.module or commands.is_script(args.case or "")


def given(args: argparse.Namespace) -> list[str]:
    """The options of a script that were given."""
    found = [name for name in (*_KINDS, "nproc") if getattr(args, name) is not None]
    return [*found, *(["args"] if args.script_args else [])]


def refuse(args: argparse.Namespace) -> None:
    """Of a case none of these options is taken: its file says what its failure is."""
    found = given(args)
    if found:
        raise ConfigError(
            f"--{found[0]} is for a script of your own; {args.case!r} is a case (a script is written ./x.py)"
        )


def failure_of(args: argparse.Namespace) -> Failure:
    said = [name for name in _KINDS if getattr(args, name) is not None]
    if len(said) > 1:
        raise ConfigError(f"--{said[0]} and --{said[1]}: one of them says what the failure is")
    if not said:
        return Failure()
    value = getattr(args, said[0])
    if said[0] == "error":
        return failures.error(value)
    if said[0] == "log":
        return failures.log(value)
    if said[0] == "metric":
        return failures.metric(value)
    if said[0] == "hang":
        return Failure("hang", f"{value:g} s", seconds=value)
    if said[0] == "exit":
        if not 1 <= value <= 255:
            raise ConfigError(f"--exit {value}: a failing process ends with 1 to 255")
        return Failure("exit", f"exit code {value}", code=value)
    try:
        return failures.like_log(blocks(value), value)
    except LogError as error:
        raise ConfigError(f"--like {error}") from None


def script_of(args: argparse.Namespace, search: bool = False) -> tuple[Script, str, RunSettings]:
    """(what is measured, the stack's specification, the run's settings). Raises ConfigError before anything starts.
    ``search``: over releases, whose probes may be launched in more than one way."""
    words = list(getattr(args, "command", None) or ())
    if words and args.case:
        args.overrides, args.case = [args.case, *args.overrides], None
    stack, texts = arguments.one_stack(args)
    taken = (*TAKEN, "launcher") if search else TAKEN
    for text in texts:
        name = re.split(r"[.=]", text.lstrip("+~"), maxsplit=1)[0]
        if name not in taken:
            raise ConfigError(f"{text!r} says nothing of a script (there are: {', '.join(taken)})")
    settings = compose_run(texts)
    if words:
        if args.script_args:
            raise ConfigError("--args goes with a script's name; a command line after -- has its own")
        command = commands.of_words(words, args.nproc)
    else:
        if args.module and not args.case:
            raise ConfigError("--module: of which? `repro run --module my.train`, as of python -m")
        command = commands.of_script(args.case, args.nproc or 2, args.script_args, args.module)
    results = Path(settings.results).absolute() if settings.results else project.current().results / "scratch"
    script = Script(command, failure_of(args), results, settings.deadline or DEADLINE_S, dict(settings.env))
    return script, stack or "current", settings
