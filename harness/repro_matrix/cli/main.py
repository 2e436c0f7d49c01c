"""Run the `repro` command: choose the command's module, and turn errors into exit codes.

A command's module has ``main``, a click command. Its docstring is the command's help. The module is
imported only when the command runs.
"""

from __future__ import annotations

import errno
import gc
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence

import click

from repro_matrix.errors import ConfigError, ExitCode, ReproError, nearest

GROUPS = {
    "run": {
        "run": "run one case live, with all its variants",
        "matrix": "run every cell of a selection; show what reproduces, with each fix and without",
        "doctor": "report what this machine can run, and the reason for each skip",
    },
    "explore": {
        "list": "list the cases and cells of a selection",
        "show": "show one case: variants, signatures, claims, torchrun commands",
        "report": "write the results as a page, a site, JUnit, Markdown or JSON",
        "match": "find known failures in a training log, and the fixes that were measured for them",
        "diff": "compare two runs, stacks or machines",
        "nightly": (
            "compare a nightly run with the last passing one; draft an issue per changed case"
        ),
    },
    "search": {
        "versions": "measure in which releases of a package each variant of a case reproduces",
        "bisect": "find the release, package or commit that changed a result",
        "compare": "find the first number of your training that differs between two stacks",
        "consistency": "find contradictions within your training: ranks, micro-batches, strategies",
        "upgrade": "measure what changes between two stacks, and which package changed it",
        "reduce": "find the smallest trigger of a failure: settings, model size, ranks",
    },
    "maintain": {
        "new": "write the first files of a case: YAML with a proposed signature, and a script",
        "check": "run a new case several times under both launchers; list what is not ready",
        "export": "write one variant as a folder that runs alone, to attach to an issue",
        "accept": "publish measured results as the baseline and as expectations",
        "regrade": "grade stored evidence anew; report every verdict that differs",
        "stack": "list, show, lock, build or prune software stacks",
    },
}
COMMANDS = {command: text for group in GROUPS.values() for command, text in group.items()}
OPTIONS = ("--help", "--version")
HELP = """Which known training failures reproduce here? repro COMMAND --help, repro --version
{commands}
Exit codes: 0 as expected, 1 unexpected, 2 usage error, 3 incomplete, 70 defect, 130 interrupted
"""


# Errors of the disk or its permissions, which a user can correct.
DISK = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
)


def overview() -> str:
    """Return the text of `repro --help`, at most 24 lines, without importing a command."""
    lines = []
    for title, commands in GROUPS.items():
        for command, text in commands.items():
            lines.append(f"{title:<10}{command + ' ':<10}{text}")
            title = ""
    return HELP.format(commands="\n".join(lines))


def command_of(name: str) -> click.Command:
    """Import a command's module and return the command."""
    command: click.Command = importlib.import_module(f"repro_matrix.cli.{name}").main
    return command


def help_of(name: str) -> str:
    """Return the text of `repro NAME --help`."""
    command = command_of(name)
    return command.get_help(click.Context(command, None, f"repro {name}", max_content_width=100))


def parse(name: str, arguments: Sequence[str]) -> click.Context:
    """Return the parsed arguments of a command. Raise ConfigError or click.UsageError."""
    return command_of(name).make_context(f"repro {name}", list(arguments))


def _run(arguments: Sequence[str]) -> int:
    command = arguments[0] if arguments else ""
    if command in ("--help", "-h") and len(arguments) == 1:
        print(overview(), end="")
        return 0
    if command == "--version" and len(arguments) == 1:
        print(_version())
        return 0
    if command not in COMMANDS:
        what = "a command is missing"
        if command in OPTIONS:
            what = f"{command} takes no arguments"
        elif command.startswith("-"):
            what = f"unknown option {command!r}{nearest(command, OPTIONS)}"
        elif command:
            what = f"unknown command {command!r}{nearest(command, COMMANDS)}"
        raise ConfigError(f"{what} (`repro --help` lists the commands)")
    try:
        with parse(command, arguments[1:]) as context:
            return int(context.command.invoke(context) or 0)
    except click.exceptions.Exit as done:  # --help
        return done.exit_code
    except click.UsageError as error:
        from repro_matrix.cli.options import explain  # not for `repro --help`: it imports pydantic

        raise ConfigError(explain(error)) from None


def _version() -> str:
    from repro_matrix.git import code_state
    from repro_matrix.paths import PACKAGE, ROOT
    from repro_matrix.results.store import harness_version

    commit, changed = code_state()
    state = f", commit {commit[:12]}" if commit else ""
    if commit and changed:
        state += " and changes"
    place = ROOT if ROOT in PACKAGE.parents else PACKAGE
    return f"repro-matrix {harness_version()}{state}, in {place}; Python {sys.version.split()[0]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; `repro --help` lists them."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    gc.set_threshold(100_000)  # the default takes a third of the time in which results are read
    if sys.stdout is None:  # the caller closed it
        print(
            "repro: the standard output is closed (use > /dev/null to discard it)", file=sys.stderr
        )
        return ReproError.exit_code
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8
    try:
        code = _run(arguments)
        sys.stdout.flush()  # report a failed write here instead of at Python's exit
        return code
    except ReproError as error:
        print(f"repro: {error}", file=sys.stderr)
        # `git bisect run` reads 2 and 3 as "bad" and stops from 128 on.
        return error.exit_code + (128 if "--bisect-exit" in arguments else 0)
    except BrokenPipeError:  # `repro list | head`: 0 would be an answer
        _discard_output()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except OSError as error:
        if error.errno not in DISK:
            return _defect()
        place, advice = (
            error.filename,
            "Choose another folder: results=DIR, REPRO_CACHE=DIR, or the option for it.",
        )
        if place is None:
            place, advice = "the standard output", ""
            _discard_output()
        verb = "opened" if error.errno in (errno.EACCES, errno.EPERM) else "written"
        text = f"repro: {place}: cannot be {verb}: {error.strerror}. {advice}"
        print(text.rstrip(), file=sys.stderr)
        return ReproError.exit_code
    except Exception:  # noqa: BLE001 - Python's exit code for it is 1, which is a result here
        return _defect()


def _discard_output() -> None:
    """Discard what is still to be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _defect() -> int:
    traceback.print_exc()
    print(
        f"repro: this is a defect of repro-matrix, not a result; Python {sys.version.split()[0]}",
        file=sys.stderr,
    )
    return ExitCode.DEFECT


if __name__ == "__main__":
    sys.exit(main())
