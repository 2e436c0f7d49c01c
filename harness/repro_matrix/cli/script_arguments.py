"""Read the arguments of a user's script: its command, its failure, and what must not change it."""

from __future__ import annotations

import copy
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from repro_matrix.cli.options import Arguments, one_stack
from repro_matrix.config.catalog import load
from repro_matrix.config.settings import RunSettings, compose_run
from repro_matrix.environment import stacks
from repro_matrix.environment.stacks import Stack
from repro_matrix.errors import ConfigError
from repro_matrix.runner import adhoc_case, script_failure
from repro_matrix.runner.adhoc_case import Script
from repro_matrix.runner.script_failure import ScriptFailure
from repro_matrix.search.script_prober import ScriptProber
from repro_matrix.text import log

if TYPE_CHECKING:
    from repro_matrix.compare.consistency import Configuration

OVERRIDES = ("stack", "repeat", "results", "deadline", "env")  # those that apply to a script
# option -> the function that reads the failure from its value
FAILURES = {f"--{name}": read for name, read in script_failure.OPTIONS.items()}


def names_script(args: Arguments) -> bool:
    """Return whether the command is for a script, not for a case."""
    return bool(args.command or args.module or adhoc_case.is_script(args.case or ""))


def _failure_of(args: Arguments, needs_limit: bool) -> ScriptFailure:
    """Return the failure that the options describe. Raise ConfigError."""
    names = [name for name in args.given if name in (*FAILURES, "--numbers")]
    if len(names) > 1:
        raise ConfigError(f"{names[0]} and {names[1]} both describe the failure. Give one of them.")
    failure = ScriptFailure()
    if names and names != ["--numbers"]:
        value = getattr(args, names[0].strip("-"))
        failure = replace(FAILURES[names[0]](value), option=(names[0], str(value)))
    if needs_limit and failure.needs_limit:
        text = "write NAME > NUMBER; only a bisection can find the limit itself"
        raise ConfigError(f"--metric {failure.text!r}: {text}.")
    return failure


def _command_of(args: Arguments) -> adhoc_case.Command:
    """Return the command that starts the script. Raise ConfigError."""
    if args.command and args.script_args:
        raise ConfigError(
            "--args goes with a script's name; a command line after -- has its own arguments."
        )
    if args.command:
        return adhoc_case.command_of_words(args.command, args.nproc)
    if not args.case:
        what = "--module: a module's name" if args.module else "the script's name"
        raise ConfigError(f"{what} is missing. Write ./train.py, or --module my.train.")
    if args.case in load().cases and not (args.module or Path(args.case).exists()):
        raise ConfigError(
            f"{args.case} is a case, not a script. `repro run {args.case}` measures it with all its"
            " fixes; `repro compare` and `repro consistency` take a script, such as ./train.py."
        )
    return adhoc_case.command_of_script(args.case, args.nproc or 2, args.script_args, args.module)


def script_of(args: Arguments, needs_limit: bool = True) -> tuple[Script, str, RunSettings]:
    """Return the script, the stack's specification and the run's settings. Raise ConfigError.

    ``needs_limit``: refuse a metric without a limit.
    """
    if "--variant" in args.given:
        raise ConfigError(f"--variant {args.variant}: a script has no variants.")
    if args.command and args.case:  # the first word is an override
        args.overrides, args.case = [args.case, *args.overrides], None
    stack, texts = one_stack(args)
    for text in texts:
        if re.split(r"[.=]", text.lstrip("+~"), maxsplit=1)[0] not in OVERRIDES:
            known = ", ".join(OVERRIDES)
            raise ConfigError(f"{text!r} does not apply to a script. Overrides that do: {known}.")
    settings = compose_run(texts)
    command = _command_of(args)
    failure = _failure_of(args, needs_limit)
    checks = tuple(sorted(set(getattr(args, "checks", ()))))
    script = Script(
        command,
        script_failure.with_checks(failure, checks) if checks else failure,
        adhoc_case.script_results(settings.results),
        settings.deadline or adhoc_case.DEADLINE_S,
        tuple(sorted(settings.env.items())),
        checks,
    )
    return script, stack or "current", settings


def script_stack(spec: str) -> Stack:
    """Return the stack of a script, built if necessary; its name is how the user wrote it."""
    return adhoc_case.in_shell(replace(stacks.resolve(spec, say=log), name=spec))


def varies(args: Arguments) -> bool:
    """Return whether to compare a script with itself. Raise ConfigError for a second failure."""
    if not (args.vary or args.ranks):
        return False
    for name in args.given:
        if name in (*FAILURES, "--check"):
            raise ConfigError(
                f"--vary and --ranks search for a script that contradicts itself: remove {name}."
            )
    return True


def with_arguments(args: Arguments, words: str, nproc: int | None = None) -> Arguments:
    """Return the arguments of a command for the script with more arguments, or other ranks."""
    own = copy.copy(args)
    if args.command:
        command = adhoc_case.with_ranks(args.command, nproc) if nproc else args.command
        own.command = [*command, *shlex.split(words)]
    else:
        own.nproc, own.script_args = nproc or args.nproc, f"{args.script_args} {words}".strip()
    return own


def configurations(args: Arguments) -> tuple[list[Configuration], str]:
    """Return the configurations that must train the same, and the stack. Raise ConfigError.

    They come from --ranks and --vary, else from the Trainer's arguments of the script.
    """
    from repro_matrix.compare import consistency  # numpy

    axes = [consistency.option_choices("--ranks", args.ranks)] if args.ranks else []
    axes += [consistency.option_choices("--vary", text) for text in args.vary]
    script, base, _ = script_of(copy.copy(args))
    axes = axes or [consistency.option_choices("--ranks", consistency.of_trainer(script))]
    found = []
    for chosen in consistency.combinations(axes):
        words = " ".join(each.words for each in chosen)
        labels = tuple(label for each in chosen for label in each.labels)
        script, _, _ = script_of(with_arguments(args, words, chosen[0].ranks))
        found.append(consistency.Configuration(labels, script))
    return found, base


def script_prober(args: Arguments, needs_limit: bool = True) -> tuple[ScriptProber, str]:
    """Return the prober of a search with a script, and the stack's specification.

    It probes for the script's failure, its numbers, or a contradiction within it.
    """
    script, base, settings = script_of(args, needs_limit)
    against_itself = varies(args)
    if not args.numbers and not against_itself:
        return ScriptProber(script, settings.repeat), base
    from repro_matrix.compare.consistency import ConsistencyProber  # numpy
    from repro_matrix.compare.two_sides import NumbersProber, Window

    window = Window(args.steps, args.from_step)
    if args.numbers:
        if settings.repeat or {"--any-change", "--check"} & args.given.keys():
            raise ConfigError("--numbers: remove --any-change, --check and repeat=.")
        if against_itself and args.numbers is not True:
            raise ConfigError(
                "--numbers: remove --vary and --ranks. `repro bisect --numbers` takes both."
            )
        return NumbersProber(script, window), base
    if settings.repeat:
        raise ConfigError("--vary and --ranks: remove repeat=; each configuration runs once.")
    given = [f"--vary={text}" for text in args.vary]
    if args.ranks:
        given.insert(0, f"--ranks={args.ranks}")
    chosen = configurations(args)[0]
    return ConsistencyProber(chosen, given, window), base
