"""Write one variant as a folder that runs without repro-matrix, for an upstream issue."""

from __future__ import annotations

from pathlib import Path

import click

from repro_matrix.authoring.export import export_variant
from repro_matrix.cli import options
from repro_matrix.errors import ConfigError, unknown
from repro_matrix.search.prober import one_case
from repro_matrix.text import log


@options.command
@options.case
@options.overrides
@click.option("--variant", help="the variant (default: the first, which is the unfixed one)")
@click.option("--out", metavar="FOLDER", help="the new folder (default: CASE-VARIANT here)")
def main(args: options.Arguments) -> int:
    case = one_case(args.case)
    variant = args.variant or next(iter(case.variants))
    if variant not in case.variants:
        raise unknown("variant", variant, case.variants, case.slug)
    stack, overrides = options.one_stack(args)
    exported = export_variant(args.case, variant, overrides, stack)
    out = Path(args.out or f"{case.slug}-{variant}")
    if out.exists():
        raise ConfigError(
            f"{out}: the folder exists and is not overwritten. Name another one with --out."
        )
    exported.write(out)
    log(f"wrote {out}; run it with torchrun --nproc-per-node {exported.ranks} {out / 'run.py'}")
    return 0
