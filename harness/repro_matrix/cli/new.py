"""`repro new SLUG`: write the first files of a case. You add the trigger. Nothing is overwritten."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from repro_matrix.errors import ConfigError, unknown


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("slug", metavar="SLUG", help="the case's name: lower case, with hyphens")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--from-log", metavar="LOG", help="propose the signature of the first error in a training log")
    start.add_argument("--from-script", metavar="FILE", help="begin with a script that shows the failure")
    start.add_argument(
        "--from-reduction", metavar="FILE", help="begin with the result of `repro reduce ... --json > FILE`"
    )
    parser.add_argument("--like", metavar="CASE", help="copy flags, variants, axes, checks and script of another case")
    parser.add_argument(
        "--silent", metavar="CHECK", help="no error, wrong numbers: the check that fails (updates, loss ...)"
    )


def main(args: argparse.Namespace) -> int:
    from repro_matrix.authoring import draft, from_reduction
    from repro_matrix.authoring.files import case_folders, write_files
    from repro_matrix.config import catalog as catalogue

    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", args.slug):
        raise ConfigError(f"{args.slug!r}: not a case's name. Use lower-case letters, digits and hyphens.")
    if args.silent and args.from_log:
        raise ConfigError("--silent with --from-log: a log does not show wrong numbers. Leave one out.")
    if args.from_reduction and (args.like or args.silent):
        raise ConfigError(
            "--from-reduction with --like or --silent: the reduction has its own shape and signature. Leave one out."
        )
    known = catalogue.load()
    if args.slug in known.cases:
        raise ConfigError(f"{args.slug} exists already. See `repro show {args.slug}`, or choose another name.")
    if args.like and args.like not in known.cases:
        raise unknown("case", args.like, known.cases, "--like")
    shape: dict[str, Any] = draft.SHAPE
    script = draft.SCRIPT
    signatures = [draft.silent(args.silent) if args.silent else draft.unknown_exception()]
    references: list[str] = []
    models: dict[str, str] = {}
    if args.from_reduction:
        reduction = from_reduction.read(args.from_reduction)
        files = from_reduction.files(args.slug, reduction, args.from_reduction)
        shape, script, signatures = files.shape, files.script, files.signatures
        references, models = files.references, files.models
    if args.from_script:
        text = _read(args.from_script)
        script, shape = draft.script_from(text, Path(args.from_script).name), draft.script_shape(text)
    if args.from_log:
        signatures = [_signature_of_log(args.from_log, known.cases)]
    if args.like:
        shape = known.raw["case"][args.like]
        script = script if args.from_script else known.script(known.cases[args.like]).read_text(encoding="utf-8")
    folder, scripts = case_folders()
    written = {**{folder.parent / "model" / f"{name}.yaml": text for name, text in models.items()},
               folder / f"{args.slug}.yaml": draft.case_text(args.slug, signatures, shape, references),
               scripts / f"{args.slug.replace('-', '_')}.py": script}  # fmt: skip
    existing = [path for path in written if path.exists()]
    if existing:
        raise ConfigError(f"{existing[0]} exists and is not overwritten. Choose another name.")
    write_files(written)
    print(f"Next: write the trigger, replace every {draft.TODO}, then run `repro check {args.slug}`.")
    return 0


def _signature_of_log(path: str, cases: Any) -> dict[str, Any]:
    from repro_matrix.authoring import draft
    from repro_matrix.external.log_match import Catalogue, recognise
    from repro_matrix.external.log_scan import lines, scan

    catalogue = Catalogue(cases)
    answer = recognise(scan(lines(path), catalogue.texts), catalogue)
    if answer.names:
        print(f"note: {path} shows a known failure: {', '.join(answer.names)}", file=sys.stderr)
    errors = [failure.error for failure in answer.causes if failure.error.record]
    if not errors:
        raise ConfigError(f"{path}: no rank raises an error in this log. See `repro match {path}`.")
    return draft.signature_of_error(errors[0])


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such script") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
