"""What verbs' arguments have in common: the parser, Hydra overrides, and the old NAME=VALUE words that are options now.

A verb's module owns its arguments: ``configure(parser)`` adds them, ``main(args)`` obeys them. ``args.overrides`` are
axes and settings in Hydra's grammar, ``args.words`` the command as it was typed, ``args.options`` the verb's options.
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
from repro_matrix.errors import ConfigError, nearest, unknown
from repro_matrix.paths import CONFIG_PATH

OVERRIDES = (
    "Hydra overrides: case=qwen15-* model=a,b strategy=fsdp flags.call=root repeat=3 jobs=2 hardware=cpu ...; "
    "+matrix=seeds: a matrix of conf/matrix"
)
SETTINGS = (*GROUPS, "ranks", *(field.name for field in fields(RunSettings)))  # never an option: these stay overrides


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are ConfigErrors: one way to say what is wrong, and one exit code for it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        told = "also look there for case/ model/ strategy/ stack/ hardware/ matrix/ (Hydra's; REPRO_CONFIG_PATH lasts)"
        self.add_argument("--config-dir", metavar="DIR", help=told)

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file, flush=True)  # argparse swallows that it cannot be written

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):  # argparse takes what begins with a dash for an option
            option = message.removeprefix("argument ").partition(":")[0]
            message += f"; a value that begins with a dash is written {option}=-VALUE"
        raise ConfigError(f"{message} (`{self.prog} --help` shows its arguments)")


# -- for configure


def case(parser: argparse.ArgumentParser, text: str = "the case's slug (`repro list` shows them)") -> None:
    parser.add_argument("case", metavar="CASE", help=text)


def overrides(parser: argparse.ArgumentParser) -> None:
    """The overrides, and --json, which goes with all verbs that take any."""
    parser.add_argument("overrides", nargs="*", default=[], metavar="OVERRIDE", help=OVERRIDES)
    parser.add_argument("--json", action="store_true", help="print JSON with stable keys instead of a table")


def cfg(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cfg", action="store_true", help="print the composed configuration, and do nothing")


def releases(parser: argparse.ArgumentParser) -> None:
    """Which of a package's releases a search may ask, beside the usual ones."""
    parser.add_argument("--yanked", action="store_true", help="yanked releases too")
    parser.add_argument("--pre", action="store_true", help="pre-releases too")


def number(least: int) -> Callable[[str], int]:
    """An option's type: a whole number of at least ``least``."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")
        return int(text)

    return read


# -- for main


def one_case(named: str, overrides: Sequence[str]) -> None:
    """Raise ConfigError where a verb's case is named twice: the second would be taken, and nobody told."""
    again = next((text for text in overrides if text.startswith("case=")), None)
    if again:
        raise ConfigError(f"{again}: the case is named already: {named}")


def one_stack(args: argparse.Namespace, refused: Mapping[str, str] | None = None) -> tuple[str | None, list[str]]:
    """(the value of ``stack=``, the other overrides) of a verb that goes over stacks by itself.

    ``refused``: names that mean nothing here, with the reason. A name that no run knows is an error with the nearest:
    a search would compose it only with its first probe.
    """
    found, rest = None, []
    for text in args.overrides:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise ConfigError(f"{text!r} is not NAME=VALUE")
        if name in (refused or {}):
            raise ConfigError(f"{text!r}: {(refused or {})[name]}")
        if name != "stack" and f"--{name}" in args.options:  # a run's setting of that name means something else
            raise ConfigError(f"{text!r}: here it is an option: --{name} {value}".rstrip())
        if name.lstrip("+~").split(".")[0] == "matrix":
            raise ConfigError(f"{text!r}: a named matrix is for `repro matrix`, plan, list and doctor")
        if name.lstrip("+~").split(".")[0] not in (*SETTINGS, "flags"):
            raise unknown("setting", name, (*SETTINGS, *args.options))
        if name != "stack":
            rest.append(text)
        elif found is not None:
            raise ConfigError("stack= is given twice")
        elif not _unquoted(value):
            raise ConfigError("stack=: a value is missing")
        else:
            found = _unquoted(value)
    return found, rest


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


# -- for cli


def parse(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """Raises ConfigError: an unknown option with the nearest one, an old word with the command as it is written now."""
    words, command = list(words), []
    if "--" in words and parser.get_default("command") is not None:  # the verb takes a command line of the user's
        cut = words.index("--")
        words, command = words[:cut], words[cut + 1 :]
        if not command:
            raise ConfigError("No command after --. Write one, such as torchrun --nproc-per-node 2 train.py.")
    known = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
    if "--cfg" in words[:-1] and words[words.index("--cfg") + 1] == "job":  # as Hydra's own is written
        words.pop(words.index("--cfg") + 1)
    args, late = parser.parse_known_args(words)
    # Overrides that stand after an option arrive here: argparse takes a positional list in one piece only.
    for word in late:
        if word.startswith("-"):
            raise ConfigError(_no_option(word, known, settings=hasattr(args, "overrides")))
    if late and not hasattr(args, "overrides"):
        parser.error(f"too many words: {' '.join(late)}")
    if late:
        args.overrides = [*args.overrides, *late]
    args.words, args.options = [*words, *(["--", *command] if command else [])], known
    search_path(args)
    if command:
        args.command = command
    return args


def _no_option(word: str, known: Sequence[str], settings: bool) -> str:
    """``settings``: the verb takes those, too."""
    option = word.partition("=")[0]
    name = option.lstrip("-").replace("-", "_")
    setting = next((each for each in (name, f"{name}s") if settings and each in SETTINGS), None)
    if setting:
        value = "[NAME]" if setting == "variants" else "VALUE"
        return f"unknown option {word}: that is a setting, {setting}={value}"
    return f"unknown option {word}{nearest(option, known)}"


def search_path(args: argparse.Namespace) -> None:
    """Add the folder that ``--config-dir`` names to the folders of groups. Raises ConfigError if it does not exist."""
    if not args.config_dir:
        return
    folder = Path(args.config_dir).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--config-dir {folder}: no such folder of configuration groups (case/ model/ matrix/ ...)")
    folders = dict.fromkeys([str(folder.resolve()), *os.environ.get(CONFIG_PATH, "").split(os.pathsep)])
    os.environ[CONFIG_PATH] = os.pathsep.join(filter(None, folders))
