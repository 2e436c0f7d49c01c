"""Write the first files of a case: YAML with a proposed signature, and a script.

You add the trigger to the script. No file is overwritten.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import click

from repro_matrix.authoring import draft
from repro_matrix.cli import options
from repro_matrix.config import catalog, project
from repro_matrix.errors import ConfigError, unknown
from repro_matrix.match.keywords import SignatureIndex
from repro_matrix.match.known_failures import recognize
from repro_matrix.match.lines import read_lines
from repro_matrix.match.scan import scan


@options.command
@click.argument("slug", help="the case's name: lower case, with hyphens")
@click.option(
    "--from-log", metavar="LOG", help="propose the signature of the first error in a training log"
)
@click.option(
    "--like",
    metavar="CASE",
    help="copy flags, variants, axes, checks and script of another case",
)
@click.option(
    "--silent",
    metavar="CHECK",
    help="no error, wrong numbers: the check that fails (updates, loss ...)",
)
def main(args: options.Arguments) -> int:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", args.slug):
        raise ConfigError(
            f"{args.slug!r}: not a case's name. Use lower-case letters, digits and hyphens."
        )
    if args.silent and args.from_log:
        raise ConfigError(
            "--silent with --from-log: a log does not show wrong numbers. Remove one of them."
        )
    project.make_folders()
    known = catalog.load()
    if args.slug in known.cases:
        raise ConfigError(
            f"{args.slug} exists already. See `repro show {args.slug}`, or choose another name."
        )
    if args.like and args.like not in known.cases:
        raise unknown("case", args.like, known.cases, "--like")
    made = draft.draft(known.raw["case"][args.like] if args.like else None)
    script = known.script(known.cases[args.like]) if args.like else draft.SCRIPT
    if args.from_log:
        made["signatures"] = [_signature_of_log(args.from_log, known)]
    if args.silent:
        made["signatures"] = [{"name": "wrong", "kind": "check", "check": args.silent}]
    for path in draft.write_draft(args.slug, made, script.read_text(encoding="utf-8")):
        print(f"wrote {path}")
    print(
        f"Next: write the trigger, replace every {draft.TODO}, then run `repro check {args.slug}`."
    )
    return 0


def _signature_of_log(path: str, catalogue: catalog.Catalogue) -> dict[str, Any]:
    known = SignatureIndex(catalogue.cases, catalogue.strategies)
    answer = recognize(scan(read_lines(path), known), known)
    if answer.names:
        print(f"note: {path} shows a known failure: {', '.join(answer.names)}", file=sys.stderr)
    errors = [failure.error for failure in answer.causes if failure.error.record]
    if not errors:
        raise ConfigError(f"{path}: no rank raises an error in this log. See `repro match {path}`.")
    return draft.signature_of_error(errors[0])
