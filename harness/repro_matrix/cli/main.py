"""Run the `repro` command: choose the command's module, and turn errors into exit codes.

A command's module has ``main``, a click command. Its docstring is the command's help. The module is
imported only when the command runs.
"""

from __future__ import annotations

import contextlib
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
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
)


class Stderr(io.TextIOWrapper):
    """A standard error that discards what it cannot write.

    A full disk or a closed pipe behind it neither ends a run nor changes an exit code.
    """

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


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
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        old = sys.stderr
        sys.stderr = Stderr(old.buffer, old.encoding, "replace", line_buffering=True)
    gc.set_threshold(100_000)  # the default takes a third of the time in which results are read
    if sys.stdout is None:  # the caller closed it
        print(
            "repro: the standard output is closed (use > /dev/null to discard it)", file=sys.stderr
        )
        return ReproError.exit_code
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8
    try:
        code = _run(arguments)
        sys.stdout.flush()  # report a failed write here instead of at Python's exit
        return code
    except Exception as error:  # noqa: BLE001 - else Python's exit code is 1, a result here
        code = _failed(error)
        # `git bisect run` reads smaller codes as "bad" and stops from 128 on.
        return code + 128 if "--bisect-exit" in arguments and code < 128 else code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _failed(error: Exception) -> int:
    """Report what ended the command; return its exit code."""
    if isinstance(error, ReproError):
        print(f"repro: {error}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, BrokenPipeError):  # `repro list | head`: 0 would be an answer
        _discard_output()
        return 128 + signal.SIGPIPE
    if not isinstance(error, OSError) or error.errno not in DISK:
        traceback.print_exc()
        python = f"Python {sys.version.split()[0]}"
        path = os.environ.get("PYTHONPATH")
        shadowed = path and isinstance(error, (ImportError, AttributeError))
        hint = f". A module of PYTHONPATH={path} may be in its way" if shadowed else ""
        print(
            f"repro: this is a defect of repro-matrix, not a result; {python}{hint}",
            file=sys.stderr,
        )
        return ExitCode.DEFECT
    place, advice = (
        error.filename,
        "Choose another folder: results=DIR, REPRO_CACHE=DIR, or the option for it.",
    )
    if place is None:
        place, advice = "the standard output", ""
        _discard_output()
    hidden = str(place).startswith("/proc/")
    if hidden:
        advice = "repro-matrix needs it."
    verb = "opened" if hidden or error.errno in (errno.EACCES, errno.EPERM) else "written"
    text = f"repro: {place}: cannot be {verb}: {error.strerror}. {advice}"
    print(text.rstrip(), file=sys.stderr)
    return ReproError.exit_code


def _discard_output() -> None:
    """Discard what is still to be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
