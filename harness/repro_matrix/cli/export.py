"""`repro export CASE --variant NAME`: write one script without this project's kit, for an upstream issue."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from repro_matrix.authoring.export import export_variant
from repro_matrix.cli import options as arguments
from repro_matrix.errors import ConfigError, unknown
from repro_matrix.search.prober import one_case
from repro_matrix.text import log


def configure(parser: argparse.ArgumentParser) -> None:
    arguments.case(parser)
    arguments.overrides(parser, json=False)
    parser.add_argument("--variant", help="the variant (default: the first, which is the unfixed one)")
    parser.add_argument("--out", metavar="FILE", help="write the script to FILE instead of the standard output")


def main(args: argparse.Namespace) -> int:
    case = one_case(args.case)
    variant = args.variant or next(iter(case.variants))
    if variant not in case.variants:
        raise unknown("variant", variant, case.variants, case.slug)
    stack, overrides = arguments.one_stack(args)
    exported = export_variant(args.case, variant, overrides, stack)
    text, run = exported.text, f"torchrun --nproc-per-node {exported.ranks}"
    if not args.out:
        sys.stdout.write(text)
        sys.stdout.flush()
        log(f"save it with --out FILE.py; run it with {run} FILE.py")
        return 0
    out = Path(args.out)
    if out.exists():
        raise ConfigError(f"--out {out}: the file exists and is not overwritten. Name another one.")
    out.write_text(text, encoding="utf-8")
    log(f"wrote {out} ({text.count(chr(10))} lines); run it with {run} {out}")
    return 0
