"""What the arguments of commands have in common: the parser, and overrides in Hydra's grammar.

A command's module has ``configure(parser)``, which adds its arguments, and ``main(args)``. ``args.overrides`` are axes
and settings, ``args.words`` is the command line as it was typed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from repro_matrix.config.selection import GROUPS
from repro_matrix.config.settings import RunSettings
from repro_matrix.errors import ConfigError, nearest
from repro_matrix.paths import CONFIG_PATH

OVERRIDES = (
    "select and configure (Hydra's syntax): case=qwen15-* model=a,b strategy=fsdp flags.call=root repeat=3 jobs=2 "
    "hardware=cpu; +matrix=seeds is a matrix of conf/matrix"
)
SETTINGS = tuple(f"{name}=" for name in (*GROUPS, "ranks", *(field.name for field in fields(RunSettings))))


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        text = "a folder of your own cases, models, stacks ... beside conf/; REPRO_CONFIG_PATH sets it for all commands"
        self.add_argument("--config-dir", metavar="DIR", help=text)

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file, flush=True)  # argparse ignores a full disk

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):  # argparse takes a value that begins with a dash for an option
            option = message.removeprefix("argument ").partition(":")[0]
            message += f". Write a value that begins with a dash as {option}=-VALUE."
        raise ConfigError(f"{message} (`{self.prog} --help` shows the arguments)")


# For configure


def case(parser: argparse.ArgumentParser, text: str = "the name of a case (`repro list` shows them)") -> None:
    parser.add_argument("case", metavar="CASE", help=text)


def overrides(parser: argparse.ArgumentParser) -> None:
    """Add the overrides, and --json, which all commands have that take overrides."""
    parser.add_argument("overrides", nargs="*", default=[], metavar="OVERRIDE", help=OVERRIDES)
    parser.add_argument("--json", action="store_true", help="print JSON with stable keys")


def cfg(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cfg", action="store_true", help="print the composed configuration and exit")


def releases(parser: argparse.ArgumentParser) -> None:
    """Add the options for releases that a search leaves out by default."""
    parser.add_argument("--yanked", action="store_true", help="include yanked releases")
    parser.add_argument("--pre", action="store_true", help="include pre-releases")


def number(least: int) -> Callable[[str], int]:
    """Return an option's type: a whole number of at least ``least``."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")
        return int(text)

    return read


# For main


def one_case(name: str, overrides: Sequence[str]) -> None:
    """Raise ConfigError if the overrides name a case, too."""
    again = next((text for text in overrides if text.startswith("case=")), None)
    if again:
        raise ConfigError(f"{again}: the case is given already: {name}")


def one_stack(args: argparse.Namespace, refused: Mapping[str, str] | None = None) -> tuple[str | None, list[str]]:
    """Return the value of ``stack=`` and the other overrides. ``refused``: names that the command does not take -> the
    reason. Raises ConfigError."""
    refused = {"matrix": "named matrices are for `repro matrix`, list and doctor", **(refused or {})}
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
            found = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
    return found, rest


# For main.py


def parse(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """Parse a command's arguments; options and overrides may be mixed. Raises ConfigError."""
    before, command = list(words), []
    if "--" in before and parser.get_default("command") is not None:  # the command takes a user's command line
        cut = before.index("--")
        before, command = before[:cut], before[cut + 1 :]
        if not command:
            raise ConfigError("No command after --. Write one, such as torchrun --nproc-per-node 2 train.py.")
    args, late = parser.parse_known_args(before)  # late: overrides after an option
    takes_overrides = hasattr(args, "overrides")
    option = next((word.partition("=")[0] for word in late if word.startswith("-")), None)
    if option:
        known = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
        raise ConfigError(f"unknown option {option}{nearest(option, [*known, *(SETTINGS if takes_overrides else ())])}")
    if late and not takes_overrides:
        parser.error(f"unexpected arguments: {' '.join(late)}")
    if late:
        args.overrides = [*args.overrides, *late]
    if command:
        args.command = command
    args.words = list(words)
    _add_config_dir(args.config_dir)
    return args


def _add_config_dir(folder: str | None) -> None:
    """Put the folder of ``--config-dir`` before the other configuration folders. Raises ConfigError."""
    if folder is None:
        return
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ConfigError(f"--config-dir {path}: no such folder. Use one that holds case/, model/, matrix/ ...")
    folders = dict.fromkeys([str(path.resolve()), *os.environ.get(CONFIG_PATH, "").split(os.pathsep)])
    os.environ[CONFIG_PATH] = os.pathsep.join(filter(None, folders))
