"""`repro match train.log ...`: find known failures in training logs, and what helps.

The versions come from the log; for packages that it does not mention, from stack=NAME or
--versions.

exit codes: 0 a known failure was recognized; 1 a failure, but not a known one; 2 usage (no such
file, a format that is not read, every log empty); 3 no failure. For several logs, the lowest of
their codes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from repro_matrix.cli import options
from repro_matrix.config import catalog
from repro_matrix.environment import lockfiles
from repro_matrix.environment.stacks import lock, spec
from repro_matrix.errors import ConfigError, ExitCode
from repro_matrix.match.answer import Versions, log_json, log_lines
from repro_matrix.match.keywords import SignatureIndex
from repro_matrix.match.known_failures import recognize
from repro_matrix.match.lines import read_lines
from repro_matrix.match.scan import scan
from repro_matrix.report.terminal import print_json, print_notes


@options.command
@click.argument(
    "logs",
    nargs=-1,
    metavar="[LOG]...",
    help="a training log: text, gzip or JSON lines; - or none: stdin",
)
@click.option(
    "--versions",
    metavar="FILE",
    help="what is installed: pip freeze > FILE, or a uv.lock; or stack=NAME",
)
@options.json
def main(args: options.Arguments) -> int:
    cases = catalog.load()
    print_notes([f"left out: {text}" for text in cases.left_out])
    known = SignatureIndex(cases.cases, cases.strategies)
    stacks = [text.removeprefix("stack=") for text in args.logs if text.startswith("stack=")]
    given = _versions(stacks, args.versions)
    found = []
    codes, empty = set(), True
    for path in [text for text in args.logs if not text.startswith("stack=")] or ["-"]:
        seen = scan(read_lines(path), known)
        answer, empty = recognize(seen, known), empty and not seen.lines
        codes.add(ExitCode.USAGE if seen.unread and answer.exit_code == 3 else answer.exit_code)
        if args.json:
            found.append(log_json(path, seen, answer, cases.cases, given))
        else:
            print("\n".join(log_lines(path, seen, answer, cases.cases, given)))
    if args.json:
        print_json(found)
    return ExitCode.USAGE if empty else min(codes)


def _versions(stacks: list[str], file: str | None) -> Versions | None:
    """Return the versions of a stack's lock, of this environment (``current``), or of a file.

    Raises ConfigError.
    """
    if len(stacks) + bool(file) > 1:
        raise ConfigError(
            f"{', '.join(filter(None, [*stacks, file]))}: give one stack or one file of versions."
        )
    if file:
        return lockfiles.read_lock_file(Path(file)).pins, f"from {file}"
    for name in stacks:
        if name == "current":
            return spec.existing(name, sys.executable).versions, "stack current"
        spec.find_definition(name)
        return lock.read_lock(spec.lock_path(name)).pins, f"stack {name}"
    return None
