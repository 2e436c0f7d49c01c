"""Declare the arguments that commands share, and read what they say about stacks and cases.

A command is a function with click's decorators. It gets ``Arguments``; ``args.overrides`` are axes
and settings in Hydra's grammar. cli/script_arguments.py reads the arguments of a user's script.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from repro_matrix.config.selection import GROUPS, parse_overrides
from repro_matrix.config.settings import RunSettings
from repro_matrix.errors import ConfigError, nearest
from repro_matrix.paths import CONFIG_PATH
from repro_matrix.search.algorithms import Stopped
from repro_matrix.text import log

if TYPE_CHECKING:
    from repro_matrix.config.executors import SlurmExecutor
    from repro_matrix.config.schema import Case
    from repro_matrix.runner.session import Request

SETTINGS = tuple(f"{name}=" for name in (*GROUPS, "ranks", *RunSettings.model_fields))
OPTIONS = "Options"  # the section of the help for options that do not name one
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Arguments(SimpleNamespace):
    """Hold the arguments of a command by name."""


class Option(click.Option):
    """Declare an option and the title of its section of the help."""

    def __init__(self, *args: Any, section: str = OPTIONS, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.section = section


class Choice(click.Choice[str]):
    """Suggest the nearest choice in the error about an invalid one."""

    def convert(self, value: str, param: Any, ctx: Any) -> str:
        if value not in self.choices:
            self.fail(f"{value!r} is not valid{nearest(value, self.choices)}", param, ctx)
        return value


class ReproCommand(click.Command):
    """Call a function with the arguments of a command as one object.

    Besides the declared arguments these are ``line``, the whole command line; ``given``, the
    options that the user gave, each with its section of the help; and ``command``, a user's command
    line after ``--``, of a command that takes scripts.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        line, cut = [*ctx.command_path.split(), *args], len(args)
        if "--" in args and any(param.name == "script_args" for param in self.params):
            cut = args.index("--")
            if args[cut:] == ["--"]:
                raise ConfigError(
                    "No command after --. Write one, such as torchrun --nproc-per-node 2 train.py."
                )
        rest = super().parse_args(ctx, args[:cut])
        typed = ParameterSource.COMMANDLINE
        given = {
            param.opts[0]: getattr(param, "section", OPTIONS)
            for param in self.params
            if isinstance(param, click.Option) and ctx.get_parameter_source(param.name) is typed
        }
        ctx.params |= {"line": line, "given": given, "command": args[cut + 1 :]}
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        assert self.callback
        try:
            return self.callback(Arguments(**ctx.params))
        except Stopped as error:
            reason = str(error).rstrip(".")
            log(f"stopped: {reason}. The probes are stored; the same command continues.")
            return error.exit_code

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections = defaultdict(list)
        for param in self.get_params(ctx):
            if isinstance(param, click.Option):
                title = getattr(param, "section", OPTIONS)
                sections[title].append(param.get_help_record(ctx) or ("", ""))
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


# Declarations


def as_written(text: str | None) -> str:
    """Return a docstring as a help text whose lines click does not wrap again."""
    return f"\b\n{text or ''}".replace("\n\n", "\n\n\b\n")


def command(main: Callable[[Any], int]) -> click.Command:
    """Return a module's command. Its help is the docstring of the module."""
    text = as_written(sys.modules[main.__module__].__doc__)
    return click.command(cls=ReproCommand, help=text, context_settings=CONTEXT)(config_dir(main))


def explain(error: click.UsageError) -> str:
    """Return what is wrong with a command line, with the nearest name of an unknown option."""
    context = error.ctx
    if not context:
        return error.format_message()
    if isinstance(error, click.NoSuchOption):
        params = context.command.get_params(context)
        known = [name for param in params for name in param.opts if name.startswith("--")]
        if any(param.name == "overrides" for param in params):
            known += SETTINGS
        return f"unknown option {error.option_name}{nearest(error.option_name, known)}"
    text = error.format_message().rstrip(".")
    return f"{text} (`{context.command_path} --help` shows the arguments)"


def _add_config_dir(ctx: click.Context, param: click.Parameter, folder: str | None) -> None:
    """Put the folder before the other configuration folders. Raise ConfigError."""
    if folder is None:
        return
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ConfigError(
            f"--config-dir {path}: no such folder. Use one that holds case/, model/, matrix/ ..."
        )
    folders = [str(path.resolve()), *os.environ.get(CONFIG_PATH, "").split(os.pathsep)]
    os.environ[CONFIG_PATH] = os.pathsep.join(filter(None, dict.fromkeys(folders)))


def together(*declarations: Any) -> Any:
    """Return a declaration of several arguments."""
    return lambda main: reduce(lambda inner, add: add(inner), reversed(declarations), main)


def in_section(title: str) -> Any:
    """Return what declares an option of this section of the help."""
    return partial(click.option, cls=Option, section=title)


def flag(name: str, help: str) -> Any:
    return click.option(name, is_flag=True, help=help)


config_dir = click.option(
    "--config-dir",
    metavar="DIR",
    expose_value=False,
    is_eager=True,
    callback=_add_config_dir,
    help="a folder of your own cases, models, stacks ... beside conf/; REPRO_CONFIG_PATH sets it"
    " for all commands",
)
json = flag("--json", "print JSON with stable keys")
case = click.argument("case", metavar="CASE", help="the name of a case (`repro list` shows them)")
overrides = click.argument(
    "overrides",
    nargs=-1,
    metavar="[OVERRIDE]...",
    help="select and configure (Hydra's syntax): case=qwen15-* model=a,b strategy=fsdp"
    " flags.call=root repeat=3 jobs=2 hardware=cpu; +matrix=seeds is a matrix of conf/matrix",
)

_of_script = in_section("A script of your own (./train.py, or a command line after --)")
launch = together(
    _of_script("--nproc", type=click.IntRange(1), metavar="N", help="ranks (default: 2)"),
    _of_script(
        "--args",
        "script_args",
        multiple=True,
        callback=lambda ctx, param, texts: " ".join(texts),
        metavar="ARGS",
        help="an argument of the script, or several in quotes; may be repeated: --args --bf16"
        " --args '--lr 1e-4'",
    ),
    _of_script("--module", is_flag=True, help="the first argument is a module, as of python -m"),
)
_script = together(
    launch,
    _of_script(
        "--check",
        "checks",
        multiple=True,
        type=Choice(("replicas", "finite", "data")),
        help="when the script ends: parameters are equal on all ranks (replicas), parameters and"
        " gradients are finite, samples are disjoint and complete (data); may be repeated",
    ),
    _of_script(
        "--error",
        metavar="'TYPE: REGEX'",
        help="the failure: an exception of the ranks that failed first",
    ),
    _of_script(
        "--log", metavar="REGEX", help="the failure: a line that a rank prints, logs or warns"
    ),
    _of_script("--exit", type=int, metavar="CODE", help="the failure: a rank ends with this code"),
    _of_script(
        "--hang",
        type=click.FloatRange(0, min_open=True),
        metavar="SECONDS",
        help="the failure: it has not ended by then",
    ),
    _of_script(
        "--metric",
        metavar="'NAME > X'",
        help="the failure: 'loss > 3.2', of the last such number printed (NAME: 3.4, JSON lines,"
        " or /REGEX (GROUP)/)",
    ),
)
case_or_script = together(
    click.argument(
        "case",
        required=False,
        metavar="[CASE|SCRIPT]",
        help="the case's slug (`repro list` shows them), or a script of your own: ./train.py",
    ),
    overrides,
    json,
    _script,
)
_of_trace = in_section("What is compared")
numbers = partial(_of_trace, "--numbers")
trace = together(
    _of_trace(
        "--steps",
        metavar="N",
        type=click.IntRange(1),
        default=3,
        help="trace N steps (default: 3), then end the script",
    ),
    _of_trace(
        "--from-step",
        metavar="N",
        type=click.IntRange(0),
        default=0,
        help="the first of them (default: 0)",
    ),
)
_of_itself = in_section("A script against itself")
vary = together(
    _of_itself(
        "--vary",
        multiple=True,
        metavar="ARGS",
        help="arguments that must not change the numbers: '--batch {8,2} --acc {1,4}' or"
        " --checkpoint; may be repeated",
    ),
    _of_itself(
        "--ranks",
        metavar="N,N",
        help="numbers of ranks that must not change them: 1,2 or '1,2 --batch {8,4}'",
    ),
)


# For main


def one_stack(
    args: Arguments, refused: Mapping[str, str] | None = None
) -> tuple[str | None, list[str]]:
    """Return the value of ``stack=``, or None, and the other overrides. Raise ConfigError.

    ``refused``: keys that the command does not take -> the reason.
    """
    reasons = {"matrix": "named matrices are for `repro matrix`, list and doctor"}
    reasons |= refused or {}
    selection = parse_overrides(args.overrides)
    for key, text in selection.words:
        if key in reasons:
            raise ConfigError(f"{text!r}: {reasons[key]}")
    if selection.stack[1:] or not selection.stack[0]:
        raise ConfigError(f"stack={','.join(selection.stack)}: name one stack.")
    stack = selection.stack[0] if "stack" in selection.given else None
    return stack, [text for key, text in selection.words if key != "stack"]


def executor_of(args: Arguments) -> SlurmExecutor | None:
    """Take the executor out of the overrides of a search; None: this machine. Raise ConfigError."""
    from repro_matrix.config import executors

    if args.command and args.case:  # the first word is an override
        args.overrides, args.case = [args.case, *args.overrides], None
    executor, args.overrides = executors.split(args.overrides)
    return executor


def case_of(args: Arguments, refused: Mapping[str, str] | None = None) -> tuple[Case, Request, str]:
    """Return a search's case, its request, and its stack. Raise ConfigError.

    Without ``stack=``, the stack is the one on which the case is known to fail. ``refused``: as for
    ``one_stack``. Options of a script are refused, too.
    """
    from repro_matrix.runner.session import make_request
    from repro_matrix.search.prober import one_case

    refuse_script_options(args)
    stack, texts = one_stack(args, refused)
    case = one_case(named_case(args.case))
    request = make_request([f"case={args.case}", *texts])
    return case, request, stack or case.requires.stack or "current"


def refuse_script_options(args: Arguments) -> None:
    """Raise ConfigError if an option of a script is given without a script."""
    for name, section in args.given.items():
        if section != OPTIONS:
            raise ConfigError(f"{name} is for a script of your own. Write a script as ./train.py.")


def named_case(case: str | None) -> str:
    """Return the case of the command line. Raise ConfigError if it is missing."""
    if not case:
        raise ConfigError(
            "Nothing to run. Name a case (`repro list`), a script (./train.py), or a command"
            " after --."
        )
    return case


def check_side(side: str, text: str) -> None:
    """Raise ConfigError if ``--good`` or ``--bad`` is not a stack, before anything is built."""
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
    """Return the stack of an option. Raise ConfigError.

    The option's value is a stack, or a release of the package, which replaces the one in ``base``.
    """
    from repro_matrix.environment import stacks
    from repro_matrix.environment.stacks import package_index
    from repro_matrix.search.bisect import is_release

    if is_release(text):
        package = stacks.spec.canonical(package)
        known = package_index.releases(package, yanked=True, pre=True)
        text = stacks.with_release(base, package, package_index.exact(package, known, text))
    check_side(side, text)
    return text
