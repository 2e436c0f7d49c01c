"""Report what this machine has, what can run here, and the reason for each case that cannot.

Exit codes: 0 no problem, 3 a problem that a run would stop at, or with less measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from repro_matrix.cli import options
from repro_matrix.environment import probe
from repro_matrix.environment.gpus import GpuState, describe_gpu, other_user, states
from repro_matrix.environment.machine import Machine, no_loopback, no_ptrace, shm_mb, unwritable
from repro_matrix.environment.profiles import HardwareError
from repro_matrix.environment.stacks import Stack, resolve
from repro_matrix.environment.stacks.extensions import op_compiled
from repro_matrix.paths import cache_dir
from repro_matrix.planning.plan import CellPlan
from repro_matrix.report import terminal
from repro_matrix.report.terminal import print_json, print_wrapped
from repro_matrix.results import runs
from repro_matrix.runner import session
from repro_matrix.runner.prerequisites import check_stacks, check_torch, plan_cells
from repro_matrix.runner.session import Session, make_request
from repro_matrix.text import counted

_SHOWN = ("python", "transformers", "accelerate", "peft", "deepspeed")


@options.command
@options.overrides
@options.json
def main(args: options.Arguments) -> int:
    problems, where = [], "here"
    try:
        prepared = session.prepare(args.overrides, build_stacks=False, as_locked=True)
    except HardwareError as error:  # a run would stop; report the rest for the CPU
        problems, where = [str(error)], "with hardware=cpu"
        request = make_request(args.overrides).with_values({"hardware": "cpu"})
        prepared = session.prepare(request, build_stacks=False, as_locked=True)
    stack, checked = _check_stacks(prepared)
    torch = checked[stack.name][0]
    problems += [problem for _, problem in checked.values() if problem]
    machine, shm, untraceable = prepared.machine, shm_mb(), no_ptrace()
    gpus = states([gpu.uuid for gpu in machine.gpus])
    problems += _problems(prepared, gpus)
    notes = _notes(prepared, gpus, torch, where == "here" and not problems)
    if untraceable:
        notes.append(f"py-spy cannot inspect ranks ({untraceable}): faulthandler dumps hangs")
    rows = [_row(prepared, plan) for plan in prepared.plans]
    if args.json:
        print_json(
            {
                "machine": asdict(machine),
                "hardware": [each.name for each in prepared.profiles],
                "backend": prepared.profile.backend,
                "torch": torch,
                "gpus": [asdict(gpu) | asdict(gpus[gpu.uuid]) for gpu in machine.gpus],
                "shm_mb": shm,
                "ptrace": untraceable is None,
                "problems": problems,
                "notes": notes,
                "stack": {
                    "name": stack.name,
                    "python": stack.python,
                    "versions": dict(stack.versions),
                },
                "cells": rows,
                "unavailable_stacks": prepared.unavailable,
            }
        )
    else:
        _print_machine(machine, gpus)
        hardware = " | ".join(each.words() for each in prepared.profiles)
        print_wrapped(
            f"/dev/shm: {'none' if shm is None else f'{shm} MiB'};"
            f" hangs: {'faulthandler' if untraceable else 'py-spy'}",
            f"hardware: {hardware}; {probe.describe_probe(torch, len(prepared.profile.gpus))}",
            f"stack {stack.describe(_SHOWN)}",
            *(f"PROBLEM: {text}" for text in problems),
            *(f"note: {text}" for text in notes),
        )
        terminal.print_lines([*terminal.doctor_lines(rows, where, terminal.columns()), ""])
        first = ""
        if problems:
            first = f", once {counted(len(problems), 'problem')} (PROBLEM, above) is solved"
        if where != "here":
            first = f"; those of the GPUs{first}"
        print(f"{sum(row['runs'] for row in rows)} of {len(rows)} cells can run {where}{first}")
    return 3 if problems else 0


def _check_stacks(prepared: Session) -> tuple[Stack, dict[str, tuple[Any, str | None]]]:
    """Probe the stacks of the plan, and plan again with the answers. Return the first of them."""
    cells = [plan.cell for plan in prepared.plans]
    named = [cell.stack for cell in cells if cell.stack in prepared.stacks] or [*prepared.stacks]
    stack = prepared.stacks[named[0]] if named else resolve("current")
    checked = check_stacks(prepared, cells)
    if stack.name not in checked:  # only the CPU uses it
        given = prepared.settings.env
        checked[stack.name] = check_torch(stack, prepared.profile, prepared.machine, given)
    for name, (answer, _) in checked.items():
        if answer.get("imports"):  # packages that do not import where a GPU is visible
            prepared.stacks[name] = replace(prepared.stacks[name], probe=probe.probe_record(answer))
    plan_cells(prepared, cells, build=False)
    return stack, checked


def _problems(prepared: Session, gpus: Mapping[str, GpuState]) -> list[str]:
    """Return the problems that a run would have with folders and GPUs."""
    problems = [why] if (why := no_loopback()) else []
    for key, folder in {"REPRO_CACHE": cache_dir(), "results": runs.scratch()}.items():
        if why := unwritable(folder):
            problems.append(f"{why}: set another with {key}=DIR")
    for gpu in prepared.profile.gpus:
        if why := gpus[gpu.uuid].problem:
            problems.append(f"GPU {gpu.index}: {why}")
    return [*problems, *prepared.shortfall(), *prepared.too_few_free()]


def _notes(
    prepared: Session, gpus: Mapping[str, GpuState], torch: Mapping[str, Any], sound: bool
) -> list[str]:
    """Return what is no problem, and good to know. ``sound``: there are no problems."""
    profile, notes = prepared.profile, prepared.notes()
    if sound and not profile.gpus:
        notes += prepared.machine.unusable
    notes += [f"stack {name} would be built first" for name in prepared.to_build]
    slow = "DeepSpeed's CPU op is not compiled: the first run that needs it takes minutes more"
    notes += [
        f"stack {name}: {slow}" for name, stack in prepared.stacks.items() if not op_compiled(stack)
    ]
    remedy = "End that process, or remove the GPU from CUDA_VISIBLE_DEVICES"
    for gpu in profile.gpus:
        if user := other_user(gpus[gpu.uuid]):
            notes.append(
                f"GPU {gpu.index} is in use by {user}: attempts use other GPUs, or wait until it is"
                f" free. {remedy}"
            )
    if profile.gpus:
        notes += [*probe.import_notes(torch), *probe.untested(torch, profile)]
    return notes


def _row(prepared: Session, plan: CellPlan) -> dict[str, Any]:
    """Return one cell for JSON and for the summary of what runs."""
    skipped = {variant.variant: variant.skipped for variant in plan.variants if variant.skipped}
    return {
        "case": plan.cell.case,
        "model": plan.cell.model,
        "strategy": plan.cell.strategy,
        "simulated": prepared.catalogue.cases[plan.cell.case].simulated,
        "runs": plan.skipped is None,
        "reason": plan.skipped,
        "skipped_variants": {} if plan.skipped else skipped,
    }


def _print_machine(machine: Machine, gpus: Mapping[str, GpuState]) -> None:
    """Print the machine, a line per GPU, and a line per other user's process on it."""
    print_wrapped(
        f"machine: {machine.cpu}, {machine.cores} cores, {machine.memory_gb:.1f} GiB; {machine.os}"
    )
    cuda = f", CUDA up to {machine.cuda}" if machine.cuda else ""
    driver = f"; driver {machine.driver}{cuda}" if machine.driver else ""
    none = "none that can be used" if machine.unusable else "none"
    lines = [f"GPUs: {len(machine.gpus) or none}{driver}"]
    for gpu in machine.gpus:
        lines.append(f"  {describe_gpu(gpu, gpus[gpu.uuid])}")
        lines += [f"    in use by {process}" for process in gpus[gpu.uuid].others]
    print_wrapped(*lines)
