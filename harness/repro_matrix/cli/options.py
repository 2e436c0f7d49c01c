"""What the arguments of commands have in common: the parser, overrides in Hydra's grammar, a script
instead of a case.

``args.overrides`` are axes and settings, ``args.words`` is the command line as it was typed. What a
script needs is
imported when one is given.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from repro_matrix.config.selection import GROUPS
from repro_matrix.config.settings import RunSettings, compose_run
from repro_matrix.errors import ConfigError, nearest
from repro_matrix.paths import CONFIG_PATH
from repro_matrix.text import log, wrap

if TYPE_CHECKING:
    from repro_matrix.compare.consistency import Configuration
    from repro_matrix.config.schema import Case
    from repro_matrix.runner.adhoc_case import Script
    from repro_matrix.runner.script_failure import ScriptFailure
    from repro_matrix.runner.session import Request
    from repro_matrix.search.algorithms import Stopped
    from repro_matrix.search.script_prober import ScriptProber

OVERRIDES = (
    "select and configure (Hydra's syntax): case=qwen15-* model=a,b strategy=fsdp flags.call=root"
    " repeat=3 jobs=2 hardware=cpu; +matrix=seeds is a matrix of conf/matrix"
)
SETTINGS = tuple(f"{name}=" for name in (*GROUPS, "ranks", *RunSettings.model_fields))
TAKEN = ("stack", "repeat", "results", "deadline", "env")  # overrides that apply to a script
# Options that describe a script's failure: script_failure.OPTIONS, whose import takes longer.
FAILURES = ("error", "log", "exit", "hang", "metric")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        text = (
            "a folder of your own cases, models, stacks ... beside conf/; REPRO_CONFIG_PATH sets it"
            " for all commands"
        )
        self.add_argument("--config-dir", metavar="DIR", help=text)

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file, flush=True)  # argparse ignores a full disk

    def error(self, message: str) -> NoReturn:
        if message.endswith(
            "expected one argument"
        ):  # argparse takes a value that begins with a dash for an option
            option = message.removeprefix("argument ").partition(":")[0]
            message += f". Write a value that begins with a dash as {option}=-VALUE."
        raise ConfigError(f"{message} (`{self.prog} --help` shows the arguments)")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A formatter that does not break names of options at their hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(text, "", 0, width, None)


# For configure


def case(
    parser: argparse.ArgumentParser, text: str = "the name of a case (`repro list` shows them)"
) -> None:
    parser.add_argument("case", metavar="CASE", help=text)


def case_or_script(parser: argparse.ArgumentParser) -> None:
    """Add the case or script, the overrides, and the options of a script. A command after -- is a
    script, too."""
    text = "the case's slug (`repro list` shows them), or a script of your own: ./train.py"
    parser.add_argument("case", metavar="CASE|SCRIPT", nargs="?", help=text)
    parser.set_defaults(command=())
    overrides(parser)
    script(parser)


def script(parser: argparse.ArgumentParser) -> None:
    add = add_launch_options(parser).add_argument
    text = (
        "when the script ends: parameters are equal on all ranks (replicas), parameters and"
        " gradients are finite, samples are disjoint and complete (data); may be repeated"
    )
    add(
        "--check",
        action="append",
        default=[],
        choices=("replicas", "finite", "data"),
        dest="checks",
        help=text,
    )
    add(
        "--error",
        metavar="'TYPE: REGEX'",
        help="the failure: an exception of the ranks that failed first",
    )
    add("--log", metavar="REGEX", help="the failure: a line that a rank prints, logs or warns")
    add("--exit", type=int, metavar="CODE", help="the failure: a rank ends with this code")
    add("--hang", type=_seconds, metavar="SECONDS", help="the failure: it has not ended by then")
    text = (
        "the failure: 'loss > 3.2', of the last such number printed (NAME: 3.4, JSON lines, or"
        " /REGEX (GROUP)/)"
    )
    add("--metric", metavar="'NAME > X'", help=text)


def add_launch_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add how a script is started."""
    group = parser.add_argument_group(
        "a script of your own (./train.py, or a command line after --)"
    )
    group.add_argument("--nproc", type=number_type(1), metavar="N", help="ranks (default: 2)")
    text = (
        "an argument of the script, or several in quotes; may be repeated: --args --bf16 --args"
        " '--lr 1e-4'"
    )
    group.add_argument(
        "--args", action="append", default=[], metavar="ARGS", dest="script_args", help=text
    )
    group.add_argument(
        "--module", action="store_true", help="the first argument is a module, as of python -m"
    )
    return group


def trace(parser: argparse.ArgumentParser) -> None:
    """Add what is traced of a training (launch/worker/tracer)."""
    add = parser.add_argument_group("what is compared").add_argument
    add(
        "--steps",
        type=number_type(1),
        default=3,
        metavar="N",
        help="trace N steps (default: 3), then end the script",
    )
    add(
        "--from-step",
        type=number_type(0),
        default=0,
        metavar="N",
        help="the first of them (default: 0)",
    )


def vary(parser: argparse.ArgumentParser) -> None:
    """Add what must not change the numbers of a script (compare/consistency.py)."""
    add = parser.add_argument_group("a script against itself").add_argument
    text = (
        "arguments that must not change the numbers: '--batch {8,2} --acc {1,4}' or --checkpoint;"
        " may be repeated"
    )
    add("--vary", action="append", default=[], metavar="ARGS", help=text)
    add(
        "--ranks",
        metavar="N,N",
        help="numbers of ranks that must not change them: 1,2 or '1,2 --batch {8,4}'",
    )


def overrides(parser: argparse.ArgumentParser, json: bool = True) -> None:
    """Add the overrides, and --json for a command that answers a question."""
    parser.add_argument("overrides", nargs="*", default=[], metavar="OVERRIDE", help=OVERRIDES)
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON with stable keys")


def number_type(least: int) -> Callable[[str], int]:
    """Return an option's type: a whole number of at least ``least``."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")
        return int(text)

    return read


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d*\.?\d+", text) or not float(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return float(text)


# For main


def one_stack(
    args: argparse.Namespace, refused: Mapping[str, str] | None = None
) -> tuple[str | None, list[str]]:
    """Return the value of ``stack=`` and the other overrides. ``refused``: names that the command
    does not take -> the reason. Raises ConfigError."""
    refused = {
        "matrix": "named matrices are for `repro matrix`, list and doctor",
        **(refused or {}),
    }
    found, rest = None, []
    for text in args.overrides:
        name, equals, value = (part.strip() for part in text.partition("="))
        reason = refused.get(name.lstrip("+~").split(".")[0])
        if reason or not equals:
            raise ConfigError(f"{text!r}: {reason or 'is not NAME=VALUE'}")
        if name != "stack":
            rest.append(text)
        elif found or not value:
            raise ConfigError("stack= is given twice" if found else "stack=: a value is missing")
        else:
            found = (
                value[1:-1]
                if len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
                else value
            )
    return found, rest


def case_of(
    args: argparse.Namespace, refused: Mapping[str, str] | None = None
) -> tuple[Case, Request, str]:
    """Return a search's case, the request, and the stack's specification: as given, else where the
    case fails.
    ``refused`` as for ``one_stack``. Raises ConfigError, also for options of a script."""
    from repro_matrix.runner.session import make_request
    from repro_matrix.search.prober import one_case

    refuse(args)
    stack, texts = one_stack(args, refused)
    case = one_case(named_case(args.case))
    return (
        case,
        make_request([f"case={args.case}", *texts]),
        stack or case.requires.stack or "current",
    )


def named_case(case: str | None) -> str:
    """Return the case that the command line names. Raises ConfigError."""
    if not case:
        raise ConfigError(
            "Nothing to run. Name a case (`repro list`), a script (./train.py), or a command"
            " after --."
        )
    return case


def check_stack(side: str, text: str) -> None:
    """Raise ConfigError where ``--good`` or ``--bad`` names no stack, before anything is built."""
    from repro_matrix.environment import stacks

    wanted = stacks.spec.parse_stack(text)
    if wanted.file and not wanted.file.exists():
        raise ConfigError(f"{wanted.base}: there is no such file")
    try:
        stacks.check_stack(text)
    except stacks.StackError as error:
        takes = "a release (4.45.2), a stack, an interpreter (python:PATH), or a lock file"
        raise ConfigError(f"--{side} {text}: {error}; --{side} takes {takes}") from None


def stack_of(side: str, text: str, base: str, package: str) -> str:
    """Return the stack that an option names: a stack, or a release of the package on top of
    ``base``. Raises ConfigError."""
    from repro_matrix.environment import stacks
    from repro_matrix.environment.stacks import lock as locks
    from repro_matrix.search.bisect import is_release

    if is_release(text):
        package = stacks.spec.canonical(package)
        known = locks.releases(package, yanked=True, pre=True)
        text = stacks.with_release(base, package, known[locks.exact(package, known, text)].version)
    check_stack(side, text)
    return text


def stopped(error: Stopped) -> int:
    """Print why a search ended early, and return its exit code."""
    reason = str(error).rstrip(".")
    log(f"stopped: {reason}. The probes are stored; the same command continues.")
    return error.exit_code


# For main, if a script is given


def names_script(args: argparse.Namespace) -> bool:
    """Return whether the command's first argument is a script, not a case."""
    from repro_matrix.runner.adhoc_case import is_script

    return bool(getattr(args, "command", None)) or args.module or is_script(args.case or "")


def _failures(args: argparse.Namespace) -> list[str]:
    named = [name for name in FAILURES if getattr(args, name, None) is not None]
    return [*named, *(["numbers"] if getattr(args, "numbers", False) else [])]


def refuse(args: argparse.Namespace) -> None:
    """Raise ConfigError where options of a script are given without one."""
    others = {"check": args.checks, "nproc": args.nproc, "args": args.script_args}
    others |= {name: getattr(args, name, None) for name in ("vary", "ranks")}
    if names := [*_failures(args), *(name for name, value in others.items() if value)]:
        raise ConfigError(
            f"--{names[0]} is for a script of your own. Write a script as ./train.py."
        )


def _failure_of(args: argparse.Namespace) -> ScriptFailure:
    from repro_matrix.runner import script_failure

    names = _failures(args)
    if len(names) > 1:
        raise ConfigError(
            f"--{names[0]} and --{names[1]} both describe the failure. Give one of them."
        )
    if not names or names == ["numbers"]:
        return script_failure.ScriptFailure()
    return script_failure.OPTIONS[names[0]](getattr(args, names[0]))


def script_of(
    args: argparse.Namespace, needs_limit: bool = True
) -> tuple[Script, str, RunSettings]:
    """Return the script, the stack's specification and the run's settings. Raises ConfigError
    before anything starts.

    ``needs_limit``: a metric without a limit is refused."""
    from repro_matrix.runner import adhoc_case, script_failure

    if getattr(args, "variant", None):
        raise ConfigError(f"--variant {args.variant}: a script has no variants.")
    words = list(getattr(args, "command", None) or ())
    if words and args.case:
        args.overrides, args.case = [args.case, *args.overrides], None
    stack, texts = one_stack(args)
    for text in texts:
        if re.split(r"[.=]", text.lstrip("+~"), maxsplit=1)[0] not in TAKEN:
            raise ConfigError(
                f"{text!r} does not apply to a script. Overrides that do: {', '.join(TAKEN)}."
            )
    settings = compose_run(texts)
    if words:
        if args.script_args:
            raise ConfigError(
                "--args goes with a script's name; a command line after -- has its own arguments."
            )
        command = adhoc_case.command_of_words(words, args.nproc)
    else:
        if not args.case:
            what = "--module: a module's name" if args.module else "the script's name"
            raise ConfigError(f"{what} is missing. Write ./train.py, or --module my.train.")
        command = adhoc_case.command_of_script(
            args.case, args.nproc or 2, args.script_args, args.module
        )
    failure = _failure_of(args)
    if needs_limit and failure.needs_limit:
        text = "write NAME > NUMBER; only a bisection can find the limit itself"
        raise ConfigError(f"--metric {failure.text!r}: {text}.")
    checks = tuple(sorted(set(getattr(args, "checks", ()))))
    failure = script_failure.with_checks(failure, checks) if checks else failure
    env, results = tuple(sorted(settings.env.items())), adhoc_case.script_results(settings.results)
    deadline = settings.deadline or adhoc_case.DEADLINE_S
    return (
        adhoc_case.Script(command, failure, results, deadline, env, checks),
        stack or "current",
        settings,
    )


def varies(args: argparse.Namespace) -> bool:
    """Return whether a script is to be compared with itself. Raises ConfigError: the failure is
    also described."""
    given = bool(args.vary or args.ranks)
    if given and (
        names := [*_failures(args), *(["check"] if getattr(args, "checks", ()) else [])]
    ) not in (
        [],
        ["numbers"],
    ):
        raise ConfigError(
            f"--vary and --ranks search for a script that contradicts itself: remove --{names[0]}."
        )
    return given


def with_arguments(
    args: argparse.Namespace, words: str, nproc: int | None = None
) -> argparse.Namespace:
    """Return the arguments of a command for the script with more arguments, and with another number
    of ranks."""
    own = copy.copy(args)
    if getattr(args, "command", None):
        from repro_matrix.runner.adhoc_case import with_ranks

        own.command = [
            *(with_ranks(args.command, nproc) if nproc else args.command),
            *shlex.split(words),
        ]
    else:
        own.nproc, own.script_args = nproc or args.nproc, f"{args.script_args} {words}".strip()
    return own


def configurations(args: argparse.Namespace) -> tuple[list[Configuration], str]:
    """Return the configurations of --ranks and --vary, else of the Trainer's arguments, and the
    stack's specification. Raises ConfigError before anything starts."""
    from repro_matrix.compare import consistency

    axes = [consistency.option_choices("--ranks", args.ranks)] if args.ranks else []
    axes += [consistency.option_choices("--vary", text) for text in args.vary]
    script, base, _ = script_of(copy.copy(args))
    axes = axes or [consistency.option_choices("--ranks", consistency.of_trainer(script))]
    found = []
    for chosen in consistency.combinations(axes):
        words, labels = (
            " ".join(each.words for each in chosen),
            (label for each in chosen for label in each.labels),
        )
        script, _, _ = script_of(with_arguments(args, words, chosen[0].ranks))
        found.append(consistency.Configuration(tuple(labels), script))
    return found, base


def script_prober(args: argparse.Namespace, needs_limit: bool = True) -> tuple[ScriptProber, str]:
    """Return the prober of a search with a script, for its failure, its numbers, or whether it
    contradicts itself, and the stack's specification."""
    from repro_matrix.search.script_prober import ScriptProber

    script, base, settings = script_of(args, needs_limit)
    against_itself = varies(args)
    if not args.numbers and not against_itself:
        return ScriptProber(script, log, threading.Event(), settings.repeat), base
    from repro_matrix.compare.two_sides import NumbersProber, Window  # numpy

    window = Window(args.steps, args.from_step)
    if args.numbers:
        if getattr(args, "any_change", False) or args.checks or settings.repeat:
            raise ConfigError("--numbers: remove --any-change, --check and repeat=.")
        if against_itself and args.numbers is not True:
            raise ConfigError(
                "--numbers: remove --vary and --ranks. `repro bisect --numbers` takes both."
            )
        return NumbersProber(script, window, log, threading.Event()), base
    from repro_matrix.compare.consistency import ConsistencyProber

    if settings.repeat:
        raise ConfigError("--vary and --ranks: remove repeat=; each configuration runs once.")
    given = [f"--ranks={args.ranks}"] * bool(args.ranks) + [f"--vary={text}" for text in args.vary]
    return ConsistencyProber(configurations(args)[0], given, window, log, threading.Event()), base


# For main.py


def parse_arguments(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """Parse a command's arguments; options and overrides may be mixed. Raises ConfigError."""
    before, command = list(words), []
    if (
        "--" in before and parser.get_default("command") is not None
    ):  # the command takes a user's command line
        cut = before.index("--")
        before, command = before[:cut], before[cut + 1 :]
        if not command:
            raise ConfigError(
                "No command after --. Write one, such as torchrun --nproc-per-node 2 train.py."
            )
    for option in (
        "--args",
        "--good-args",
        "--bad-args",
        "--vary",
    ):  # argparse refuses a value with a dash
        while option in parser._option_string_actions and option in before[:-1]:
            place = before.index(option)
            before[place : place + 2] = [f"{option}={before[place + 1]}"]
    if any(
        action.nargs == argparse.PARSER for action in parser._actions
    ):  # each of its actions has options
        args = parser.parse_args(before)
    else:
        _check_options(parser, before)
        args = parser.parse_intermixed_args(before)
    if "script_args" in args:
        args.script_args = " ".join(args.script_args)
    if command:
        args.command = command
    args.words = list(words)
    _add_config_dir(args.config_dir)
    return args


def _check_options(parser: Parser, words: Sequence[str]) -> None:
    """Raise ConfigError for the first option among ``words`` that the command does not take."""
    known = [
        name
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--")
    ]
    settings = SETTINGS if any(action.dest == "overrides" for action in parser._actions) else ()
    for option in (word.partition("=")[0] for word in words):
        if option.startswith("--") and option not in known:
            raise ConfigError(f"unknown option {option}{nearest(option, [*known, *settings])}")


def _add_config_dir(folder: str | None) -> None:
    """Put the folder of ``--config-dir`` before the other configuration folders. Raises
    ConfigError."""
    if folder is None:
        return
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ConfigError(
            f"--config-dir {path}: no such folder. Use one that holds case/, model/, matrix/ ..."
        )
    folders = dict.fromkeys(
        [str(path.resolve()), *os.environ.get(CONFIG_PATH, "").split(os.pathsep)]
    )
    os.environ[CONFIG_PATH] = os.pathsep.join(filter(None, folders))
