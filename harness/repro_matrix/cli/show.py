"""`repro show CASE`: what its file says, what is expected of each variant, and the command that runs it by hand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from repro_matrix.cli import options
from repro_matrix.config.schema import Case, Variant
from repro_matrix.config.selection import expand
from repro_matrix.environment import machine
from repro_matrix.environment.stacks import spec
from repro_matrix.errors import ConfigError
from repro_matrix.grading.expectations import depends_on_capabilities, expected
from repro_matrix.launch.attempt import torchrun_line
from repro_matrix.paths import REPROS
from repro_matrix.planning import cells
from repro_matrix.planning.plan import CellPlan
from repro_matrix.report.terminal import print_json, print_notes, print_table, print_wrapped
from repro_matrix.runner import prerequisites
from repro_matrix.runner.attempts import recipe
from repro_matrix.runner.session import Request, Session, ask
from repro_matrix.text import counted

AXES = ("model", "strategy", "stack", "world_size", "tp_size", "devices")


def configure(parser: argparse.ArgumentParser) -> None:
    options.case(parser)
    options.overrides(parser)


def main(args: argparse.Namespace) -> int:
    options.one_case(args.case, args.overrides)
    request = ask(args.overrides)
    names = expand("case", [args.case], request.catalogue.cases)
    if len(names) > 1:
        raise ConfigError(f"{args.case}: `repro show` takes one case, and these are {len(names)}: {', '.join(names)}")
    request = replace(request, selections=[replace(each, case=names) for each in request.selections])
    print_notes(request.left_out)
    case = request.catalogue.cases[names[0]]
    prepared, plan = _plan_first_cell(request, case)
    variants = list(_variants(prepared, plan, case))
    script = request.catalogue.script(case)
    place = f"repros/{script.name}" if script.parent == REPROS else str(script)
    if args.json:
        fields = case.model_dump(mode="json", exclude={"slug"})
        print_json({"case": case.slug, **fields, "script": place, "variants": variants})
        return 0
    print_wrapped(*_head(case), f"script: {place}", "")
    more = f" (the first of {len(request.cells)} cells; choose with model=, strategy=)" if request.cells[1:] else ""
    title = f"Expected of {plan.cell.where} on {plan.profile.name} with stack {plan.cell.stack}{more}"
    if not case.expect:
        title = f"Nothing is expected: no results/expected/{case.slug}.yaml. `repro accept` writes it."
    heads = ["variant", "role", "expected", "what it changes", "help"]
    rows = [
        [v["variant"], v["role"], v["expected"], _changes(case.variants[v["variant"]]), v["help"]] for v in variants
    ]
    print_table(title, heads, rows, narrow=heads[3:])
    for each in variants if prepared.settings.variants else variants[:1]:
        skipped = f" (skipped here: {each['skipped']})" if each["skipped"] else ""
        print(f"\n{each['variant']}{skipped}, by hand:\n  {each['torchrun']}")
    if not prepared.settings.variants:
        print_wrapped("", f"The command of another variant: repro show {case.slug} variants=NAME")
    if case.claims:
        print()
        rows = [[claim.id, claim.source, claim.text] for claim in case.claims]
        print_table("", ["claim", "source", "text"], rows, narrow=("text",))
    return 0


def _plan_first_cell(request: Request, case: Case) -> tuple[Session, CellPlan]:
    """Plan the first selected cell with stacks that are here; nothing is built."""
    settings, here = request.settings, machine.detect()
    if settings.variants:
        settings.variants = expand("variant", settings.variants, case.variants)
    settled = machine.settle_all(request.hardware, request.catalogue.hardware, here)
    placed, _ = cells.place(request.catalogue, request.cells[:1], settled, auto=request.hardware == ["auto"])
    prepared = Session(request.catalogue, settings, settled, here)
    prepared.stacks["current"] = spec.existing("current", sys.executable, spec.own_versions())
    prerequisites.plan(prepared, placed, build=False)
    return prepared, prepared.plans[0]


def _variants(prepared: Session, plan: CellPlan, case: Case) -> Iterator[dict[str, Any]]:
    for variant in plan.variants:
        name, settings, stack = variant.variant, variant.settings, prepared.stacks.get(variant.stack)
        declared = case.variants[name]
        needed = depends_on_capabilities(case, name)  # known when ranks have run
        entry = expected(case, plan.cell.where, name, stack.versions if stack else {}, plan.profile.name)
        yield {
            "variant": name, "role": declared.role, "help": declared.help, "flags": settings["flags"],
            "options": settings["strategy"]["options"], "model": settings["model"]["slug"],
            "strategy": settings["strategy"]["slug"], "stack": variant.stack, "world_size": variant.world_size,
            "skipped": variant.skipped,
            "expected": f"by {', '.join(needed)}" if needed else entry.verdicts[name] if entry else "",
            "torchrun": torchrun_line(recipe(prepared.catalogue, variant, stack, Path("show"))),
        }  # fmt: skip


def _head(case: Case) -> Iterator[str]:
    yield f"{case.slug}: {case.title}"
    if case.simulated:
        yield f"SIMULATED: {case.simulated}"
    yield f"references: {', '.join(case.references) or 'none'}"
    yield from [case.summary] if case.summary else []
    needs = [*case.requires.packages, *([counted(case.requires.gpus, "GPU")] if case.requires.gpus else [])]
    if needs or case.requires.stack:
        yield f"needs: {', '.join(needs) or 'nothing special'}; reproduces on: {case.requires.stack or 'current'}"
    ranks = "all ranks" if case.pass_criteria.ranks == "all" else "the first rank"
    yield f"pass criteria: {case.pass_criteria.kind}: {', '.join(case.pass_criteria.checks)} on {ranks}"
    for one in case.signatures:
        detail = one.message or one.check or one.signal or ", ".join(frame.function for frame in one.frames)
        yield f"signature {one.name} ({one.kind}): {' '.join(filter(None, (one.type, detail)))}"


def _changes(variant: Variant) -> str:
    values = {**variant.flags, **variant.options, **{axis: getattr(variant, axis) for axis in AXES}, **variant.env}
    return ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
