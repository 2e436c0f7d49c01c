"""`repro show CASE`: everything its file says, and the command that reproduces each arm by hand."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from repro_matrix.cli import options as arguments
from repro_matrix.config.schema import Arm, Case
from repro_matrix.config.selection import expand
from repro_matrix.errors import ConfigError
from repro_matrix.grading.comparability import depends_on
from repro_matrix.grading.expectations import expected
from repro_matrix.launch.command_line import torchrun_line
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
    arms: list[dict[str, Any]] = []
    for arm in plan.arms:
        spec = case.arms[arm.arm]
        stack = prepared.stacks.get(arm.stack)
        attempt = recipe(prepared.catalogue, arm, stack, Path("show"))
        settings = arm.settings
        arms.append(
            {
                "arm": arm.arm,
                "help": spec.help,
                "flags": settings["flags"],
                "options": settings["strategy"]["options"],
                "model": settings["model"]["slug"],
                "strategy": settings["strategy"]["slug"],
                "stack": arm.stack,
                "world_size": arm.world_size,
                "skipped": arm.skipped,
                "expected": _expected(case, plan, arm.arm, dict(stack.versions) if stack else {}),
                "torchrun": torchrun_line(attempt),
            }
        )
    data = {"case": case.slug, **case.model_dump(mode="json", exclude={"slug"}), "script": _shown(script), "arms": arms}
    if args.json:
        print_json(data)
        return 0
    print_wrapped(f"{case.slug}: {case.title}")
    if case.simulated:
        print_wrapped(f"SIMULATED: {case.simulated}")
    print_wrapped(f"references: {', '.join(case.references) or 'none'}", f"script: {data['script']}")
    if case.summary:
        print_wrapped(case.summary)
    needs = [*case.needs.requires, *([f"{case.needs.gpus} GPUs"] if case.needs.gpus else [])]
    if needs or case.needs.stack:
        known = case.needs.stack or "current"
        print_wrapped(f"needs: {', '.join(needs) or 'nothing special'}; known to fire on: {known}")
    ranks = "all ranks" if case.proof.ranks == "all" else "the first rank"
    print_wrapped(f"clean means: {case.proof.kind}: {', '.join(case.proof.checks)} on {ranks}")
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
        ["arm", "expected", "what it changes", "help"],
        [[a["arm"], a["expected"], _change(case.arms[a["arm"]]), a["help"]] for a in arms],
        narrow=("help",),
    )
    for arm_row in arms:
        print(f"\n{arm_row['arm']}" + (f"  (skipped here: {arm_row['skipped']})" if arm_row["skipped"] else ""))
        print(f"  {arm_row['torchrun']}")
    if case.claims:
        print()
        print_table("", ["claim", "source", "text"], [[c.id, c.source, c.text] for c in case.claims], ("text",))
    return 0


def _shown(script: Path) -> str:
    return f"repros/{script.name}" if script.parent == REPROS else str(script)


def _expected(case: Case, plan: CellPlan, arm: str, versions: dict[str, str]) -> str:
    """What results/expected says of an arm of the first cell; facts of the machine are known when ranks have run."""
    decide = depends_on(case, arm)
    if decide:
        return f"by {', '.join(decide)}"
    entry = expected(case, plan.cell.where, arm, versions, plan.profile.name)
    return entry.verdicts[arm] if entry else ""


def _change(arm: Arm) -> str:
    parts = [f"{name}={value}" for name, value in {**arm.flags, **arm.options}.items()]
    for axis in ("model", "strategy", "stack", "world_size", "tp_size", "devices"):
        if getattr(arm, axis) is not None:
            parts.append(f"{axis}={getattr(arm, axis)}")
    return ", ".join(parts + [f"{name}={value}" for name, value in arm.env.items()])
