"""`repro`: which verb, and exit codes. Each verb's module has its arguments, imported only when it is asked for."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from repro_matrix.errors import ReproError, nearest

# verb -> (module in harness/verbs with configure(parser) and main(args), one line of help)
VERBS = {
    "list": ("list", "the cells of a selection, and which of them cannot run here"),
    "show": ("show", "one case: variants, signatures, claims, the command that reproduces each variant by hand"),
    "run": ("run", "one case, all its variants, live"),
    "matrix": ("matrix", "every cell of a selection; the final table says what reproduces, with and without each fix"),
    "versions": ("versions", "in which releases of a package each variant of a case reproduces, from measurement"),
    "bisect": ("bisect", "which release, package or commit changed the answer; ends with a report to paste"),
    "reduce": ("reduce", "the smallest trigger of a failure: settings, model size, ranks, a script's statements"),
    "diff": ("diff", "compare two runs, stacks or machines: failures, fixes, error text, coverage, time, memory"),
    "nightly": ("nightly", "compare a nightly run with the last passing one; an issue for each changed case"),
    "merge": ("merge", "the results of all shards of a run in one folder; says which is missing"),
    "upgrade": ("upgrade", "what changes between two stacks, and which package and release changed it"),
    "match": ("match", "which known failures a training log shows, and which fixes hold by stored measurement"),
    "new": ("new", "the first files of a case: YAML with a proposed signature, and a script"),
    "check": ("check", "run a case several times, warm and cold: what is not ready about it"),
    "export": ("export", "one variant as one script without the kit, with versions and what to expect, for an issue"),
    "claims": ("claims", "the ledger: what the write-ups claim, and what measurement says"),
    "report": ("report", "one page of what was measured, a static site, or JUnit, Markdown, JSON, CSV"),
    "stack": ("stack", "software stacks: list, show, lock, build, prune"),
    "doctor": ("doctor", "what this machine can run, and why not the rest"),
    "accept": ("accept", "publish measured results as the baseline and as the cases' expectations"),
    "regrade": ("regrade", "grade stored evidence anew, and report every difference from its summary"),
}


class Overview(argparse.ArgumentParser):
    """argparse whose help is an error where it cannot be written; it swallows that."""

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file, flush=True)


def overview() -> argparse.ArgumentParser:
    """`repro --help`: every verb with its line; no verb's module is imported for it."""
    parser = Overview(
        prog="repro",
        description="Which known distributed-training failures reproduce on this stack, and do their fixes still work?",
        epilog="exit codes: 0 as expected; 1 something differs from its expectation; 2 usage or configuration; "
        "3 less could be measured than was asked for; 70 a defect of this program; 130 interrupted",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="which release this is, of which commit, and where")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, (_, text) in VERBS.items():
        verbs.add_parser(verb, help=text, add_help=False)
    return parser


DEFECT = 70  # as EX_SOFTWARE of sysexits.h
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # the machine's doing, whatever was being written
REFUSED = (errno.EACCES, errno.EPERM)  # and its owner's


def command_parser(verb: str) -> tuple[Any, Any]:
    """Return a command's module and its parser."""
    name, text = VERBS[verb]
    module = importlib.import_module(f"repro_matrix.cli.{name}")
    from repro_matrix.cli import options as arguments  # after the overview: it reads the settings' names

    parser = arguments.Parser(
        prog=f"repro {verb}",
        description=text,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.configure(parser)
    return module, parser


def parsed(verb: str, words: Sequence[str]) -> tuple[Any, argparse.Namespace]:
    """The verb's module, and its arguments. Raises SystemExit or ConfigError: they are wrong."""
    from repro_matrix.cli import options as arguments

    module, parser = command_parser(verb)
    return module, arguments.parse(parser, list(words))


def _run(words: list[str]) -> int:
    if words == ["--version"]:
        return _version()
    if not words or words[0].startswith("-"):
        told = overview()
        told.parse_args(words)  # --help, or what is wrong; both end here
        told.error(f"{words[0]} goes with no verb")
    module, args = parsed(words[0], words[1:])
    return int(module.main(args))


def _version() -> int:
    from importlib.metadata import PackageNotFoundError, version

    from repro_matrix.paths import PACKAGE, ROOT
    from repro_matrix.results.provenance import code_state

    try:
        release = version("repro-matrix")
    except PackageNotFoundError:  # run from its folder, never installed
        release = "not installed"
    commit, changed = code_state()
    of = f", commit {commit[:12]}{' and changes' if changed else ''}" if commit else ""
    place = ROOT if ROOT in PACKAGE.parents else PACKAGE
    print(f"repro-matrix {release}{of}, in {place}; Python {sys.version.split()[0]}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    verb = words[0] if words else ""
    if verb and not verb.startswith("-") and verb not in VERBS:
        print(f"repro: unknown verb {verb!r}{nearest(verb, VERBS)}", file=sys.stderr)
        return 2
    if sys.stdout is None:  # closed by who started this; Python puts nothing in its place
        print("repro: the standard output is closed (> /dev/null throws it away)", file=sys.stderr)
        return 2
    try:
        code = _run(words)
        sys.stdout.flush()  # what cannot be written is said here, and not by Python as it ends
        return code
    except ReproError as error:
        print(f"repro: {error}", file=sys.stderr)
        # `git bisect run` takes 2 and 3 for "bad"; from 128 on it stops.
        return error.exit_code + (128 if "--bisect-exit" in words else 0)
    except BrokenPipeError:  # `repro list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno in REFUSED and error.filename is not None:
            print(f"repro: {error.filename}: {error.strerror}{_elsewhere(error.filename)}", file=sys.stderr)
            return ReproError.exit_code
        if error.errno not in FULL:
            return _defect()
        other = "" if error.filename is None else "; results=DIR and REPRO_CACHE=DIR say where else to write"
        print(
            f"repro: {error.filename or 'the standard output'}: cannot be written: {error.strerror}{other}",
            file=sys.stderr,
        )
        if error.filename is None:  # nor can what is still to be written
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ReproError.exit_code
    except Exception:  # noqa: BLE001 - Python's own exit code for it is 1, which is an answer here
        return _defect()


def _elsewhere(refused: object) -> str:
    """What to do where the cache cannot be written to: a home folder that is read-only, or not there."""
    from repro_matrix.paths import cache_dir

    with contextlib.suppress(OSError):
        cache, place = cache_dir(), Path(os.fsdecode(str(refused)))
        if place == cache or place in cache.parents or cache in place.parents:
            return f"; the cache, {cache}, cannot be written to: REPRO_CACHE=DIR says where else"
    return ""


def _defect() -> int:
    traceback.print_exc()
    print(f"repro: this is a defect of repro-matrix, no answer; {sys.version.split()[0]}", file=sys.stderr)
    return DEFECT


if __name__ == "__main__":
    sys.exit(main())
