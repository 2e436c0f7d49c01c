"""`repro show CASE`: everything its file says, and the command that reproduces each arm by hand."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from repro_matrix.conf import arguments
from repro_matrix.conf.overrides import expand
from repro_matrix.conf.schema import Arm, Case
from repro_matrix.judge.expect import expected
from repro_matrix.judge.facts import depends_on
from repro_matrix.launch.attempt import Attempt, torchrun_line
from repro_matrix.paths import REPROS
from repro_matrix.planning.plan import CellPlan
from repro_matrix.running import session
from repro_matrix.terminal.report import print_json, print_table


def configure(parser: argparse.ArgumentParser) -> None:
    arguments.case(parser)
    arguments.overrides(parser)


def main(args: argparse.Namespace) -> int:
    from repro_matrix.conf import catalogue

    expand("case", [args.case], catalogue.load().cases)
    prepared = session.prepare([f"case={args.case}", *args.overrides], build_stacks=False)
    plan = prepared.plans[0]
    case = prepared.catalogue.cases[plan.cell.case]
    script = prepared.catalogue.script(case)
    arms: list[dict[str, Any]] = []
    for arm in plan.arms:
        spec = case.arms[arm.arm]
        stack = prepared.stacks.get(arm.stack)
        attempt = Attempt(
            id="show",
            run_id="show",
            directory=Path("."),
            script=script,
            kit=REPROS if script.parent != REPROS else None,
            files=prepared.catalogue.files(arm.settings),
            settings=arm.settings,
            python=stack.python if stack else "python",
            world_size=arm.world_size,
            deadline_s=arm.deadline,
            env={**case.launch.env, **arm.settings.get("env", {}), **spec.env},
        )
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
    print(f"{case.slug}: {case.title}")
    if case.simulated:
        print(f"SIMULATED: {case.simulated}")
    print(f"references: {', '.join(case.references) or 'none'}   script: {data['script']}")
    if case.summary:
        print(case.summary)
    needs = [*case.needs.requires, *([f"{case.needs.gpus} GPUs"] if case.needs.gpus else [])]
    if needs or case.needs.stack:
        print(f"needs: {', '.join(needs) or 'nothing special'}; known to fire on: {case.needs.stack or 'current'}")
    print(f"clean means: {case.proof.kind}: {', '.join(case.proof.checks)} on {case.proof.ranks} rank(s)")
    for signature in case.signatures:
        detail = (
            signature.message or signature.check or signature.signal or ", ".join(f.function for f in signature.frames)
        )
        print(f"signature {signature.name} ({signature.kind}): {signature.type or ''} {detail}".rstrip())
    print()
    print_table(
        f"expected of {plan.cell.where} on {plan.profile.name} with this stack",
        ["arm", "expected", "what it changes", "help"],
        [[a["arm"], a["expected"], _change(case.arms[a["arm"]]), a["help"]] for a in arms],
    )
    for arm_row in arms:
        print(f"\n{arm_row['arm']}" + (f"  (skipped here: {arm_row['skipped']})" if arm_row["skipped"] else ""))
        print(f"  {arm_row['torchrun']}")
    if case.claims:
        print()
        print_table("", ["claim", "source", "text"], [[c.id, c.source, c.text] for c in case.claims])
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
