"""`repro show CASE`: everything its file says, and the command that reproduces each variant by hand."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from repro_matrix.cli import options as arguments
from repro_matrix.config.schema import Case, Variant
from repro_matrix.config.selection import expand
from repro_matrix.errors import ConfigError
from repro_matrix.grading.comparability import depends_on_capabilities
from repro_matrix.grading.expectations import expected
from repro_matrix.launch.attempt import torchrun_line
from repro_matrix.paths import REPROS
from repro_matrix.planning.plan import CellPlan
from repro_matrix.report.terminal import print_json, print_notes, print_table, print_wrapped
from repro_matrix.runner import session
from repro_matrix.runner.attempts import recipe


def configure(parser: argparse.ArgumentParser) -> None:
    arguments.case(parser)
    arguments.overrides(parser)


def main(args: argparse.Namespace) -> int:
    from repro_matrix.config import catalog as catalogue

    arguments.one_case(args.case, args.overrides)
    found = expand("case", [args.case], catalogue.load().cases)
    if len(found) > 1:
        raise ConfigError(f"{args.case}: `repro show` takes one case, and these are {len(found)}: {', '.join(found)}")
    prepared = session.prepare([f"case={args.case}", *args.overrides], build_stacks=False)
    print_notes(prepared.left_out)  # what is expected and not believed, too
    plan = prepared.plans[0]
    case = prepared.catalogue.cases[plan.cell.case]
    script = prepared.catalogue.script(case)
    variants: list[dict[str, Any]] = []
    for variant in plan.variants:
        spec = case.variants[variant.variant]
        stack = prepared.stacks.get(variant.stack)
        attempt = recipe(prepared.catalogue, variant, stack, Path("show"))
        settings = variant.settings
        variants.append(
            {
                "variant": variant.variant,
                "help": spec.help,
                "flags": settings["flags"],
                "options": settings["strategy"]["options"],
                "model": settings["model"]["slug"],
                "strategy": settings["strategy"]["slug"],
                "stack": variant.stack,
                "world_size": variant.world_size,
                "skipped": variant.skipped,
                "expected": _expected(case, plan, variant.variant, dict(stack.versions) if stack else {}),
                "torchrun": torchrun_line(attempt),
            }
        )
    data = {
        "case": case.slug,
        **case.model_dump(mode="json", exclude={"slug"}),
        "script": _shown(script),
        "variants": variants,
    }
    if args.json:
        print_json(data)
        return 0
    print_wrapped(f"{case.slug}: {case.title}")
    if case.simulated:
        print_wrapped(f"SIMULATED: {case.simulated}")
    print_wrapped(f"references: {', '.join(case.references) or 'none'}", f"script: {data['script']}")
    if case.summary:
        print_wrapped(case.summary)
    needs = [*case.requires.packages, *([f"{case.requires.gpus} GPUs"] if case.requires.gpus else [])]
    if needs or case.requires.stack:
        known = case.requires.stack or "current"
        print_wrapped(f"needs: {', '.join(needs) or 'nothing special'}; known to reproduce on: {known}")
    ranks = "all ranks" if case.pass_criteria.ranks == "all" else "the first rank"
    print_wrapped(f"pass criteria: {case.pass_criteria.kind}: {', '.join(case.pass_criteria.checks)} on {ranks}")
    for signature in case.signatures:
        detail = (
            signature.message or signature.check or signature.signal or ", ".join(f.function for f in signature.frames)
        )
        print_wrapped(f"signature {signature.name} ({signature.kind}): {signature.type or ''} {detail}".rstrip())
    print()
    title = f"expected of {plan.cell.where} on {plan.profile.name} with this stack"
    if len(prepared.plans) > 1:
        title += f" (the first of {len(prepared.plans)} cells: `repro list case={case.slug}`; model=... chooses)"
    if not case.expect:
        title = f"nothing is expected: no results/expected/{case.slug}.yaml, which `repro accept` writes"
    print_table(
        title,
        ["variant", "expected", "what it changes", "help"],
        [[a["variant"], a["expected"], _change(case.variants[a["variant"]]), a["help"]] for a in variants],
        narrow=("help",),
    )
    for variant_row in variants:
        print(
            f"\n{variant_row['variant']}"
            + (f"  (skipped here: {variant_row['skipped']})" if variant_row["skipped"] else "")
        )
        print(f"  {variant_row['torchrun']}")
    if case.claims:
        print()
        print_table("", ["claim", "source", "text"], [[c.id, c.source, c.text] for c in case.claims], ("text",))
    return 0


def _shown(script: Path) -> str:
    return f"repros/{script.name}" if script.parent == REPROS else str(script)


def _expected(case: Case, plan: CellPlan, variant: str, versions: dict[str, str]) -> str:
    """What results/expected says of a variant of the first cell; facts of the machine are known when ranks have run."""
    decide = depends_on_capabilities(case, variant)
    if decide:
        return f"by {', '.join(decide)}"
    entry = expected(case, plan.cell.where, variant, versions, plan.profile.name)
    return entry.verdicts[variant] if entry else ""


def _change(variant: Variant) -> str:
    parts = [f"{name}={value}" for name, value in {**variant.flags, **variant.options}.items()]
    for axis in ("model", "strategy", "stack", "world_size", "tp_size", "devices"):
        if getattr(variant, axis) is not None:
            parts.append(f"{axis}={getattr(variant, axis)}")
    return ", ".join(parts + [f"{name}={value}" for name, value in variant.env.items()])
