"""`repro doctor`: what this machine has, what can run here, and the reason for each case that
cannot."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from repro_matrix.cli import options
from repro_matrix.environment import probe
from repro_matrix.environment.gpus import (
    GpuState,
    describe_gpu,
    describe_unusable,
    other_user,
    states,
)
from repro_matrix.environment.machine import HardwareError, Machine, no_ptrace, shm_mb, unwritable
from repro_matrix.environment.stacks import resolve
from repro_matrix.environment.stacks.extensions import op_compiled
from repro_matrix.paths import cache_dir
from repro_matrix.report import terminal
from repro_matrix.report.terminal import print_json, print_wrapped
from repro_matrix.results import runs
from repro_matrix.runner import session
from repro_matrix.runner.prerequisites import check_stacks, check_torch, plan_cells
from repro_matrix.runner.session import make_request
from repro_matrix.text import counted

_SHOWN = ("python", "transformers", "accelerate", "peft", "deepspeed")


@options.command
@options.overrides
@options.json
def main(args: options.Arguments) -> int:
    problems, where = [], "here"
    try:
        prepared = session.prepare(args.overrides, build_stacks=False, as_locked=True)
    except HardwareError as error:  # a run would end with it; the rest is reported for the CPU
        problems, where = [str(error)], "with hardware=cpu"
        request = make_request(args.overrides).with_values({"hardware": "cpu"})
        prepared = session.prepare(request, build_stacks=False, as_locked=True)
    machine, profile = prepared.machine, prepared.profile
    used = [plan.cell.stack for plan in prepared.plans if plan.cell.stack in prepared.stacks]
    stack = (
        prepared.stacks[used[0]]
        if used
        else next(iter(prepared.stacks.values()), None) or resolve("current")
    )
    given, cells = prepared.settings.env, [each.cell for each in prepared.plans]
    checked = check_stacks(prepared, cells)
    if stack.name not in checked:  # it is used on the CPU alone
        checked[stack.name] = check_torch(stack, profile, machine, given)
    torch = checked[stack.name][0]
    for name, (answer, _) in checked.items():
        if answer.get("imports"):  # what does not import where a GPU is visible cannot run there
            prepared.stacks[name] = replace(prepared.stacks[name], probe=probe.probe_record(answer))
    plan_cells(prepared, cells, build=False)
    problems += [problem for _, problem in checked.values() if problem]
    folders = {"REPRO_CACHE": cache_dir(), "results": runs.scratch()}
    problems += [
        f"{why}: set another with {key}=DIR"
        for key, path in folders.items()
        if (why := unwritable(path))
    ]
    now = states([gpu.uuid for gpu in machine.gpus])
    problems += [
        f"GPU {gpu.index}: {why}" for gpu in profile.gpus if (why := now[gpu.uuid].problem)
    ]
    in_use = {gpu.index: user for gpu in profile.gpus if (user := other_user(now[gpu.uuid]))}
    problems += [*prepared.shortfall(), *prepared.too_few_free()]
    shm, untraceable = shm_mb(), no_ptrace()
    notes = (
        describe_unusable(machine.left_out) if where == "here" else []
    )  # else they are the problem
    notes += [machine.hidden] if machine.hidden else []
    notes += () if problems else machine.unusable  # on hardware=cpu
    notes += [f"left out: {text}" for text in prepared.catalogue.left_out]
    notes += [f"stack {stack.name}: {note}" for note in stack.changed]
    notes += [f"stack {name} would be built first" for name in prepared.to_build]
    slow = "DeepSpeed's CPU op is not compiled: the first run that needs it takes minutes more"
    notes += [
        f"stack {name}: {slow}" for name, each in prepared.stacks.items() if not op_compiled(each)
    ]
    notes += profile.warnings(shm)
    remedy = (
        "attempts use other GPUs, or wait until it is free. End that process, or leave the GPU"
        " out of"
    )
    notes += [
        f"GPU {index} is in use by {user}: {remedy} CUDA_VISIBLE_DEVICES"
        for index, user in in_use.items()
    ]
    if profile.gpus:
        notes += [
            *machine.notes(given),
            *probe.import_notes(torch),
            *probe.untested(torch, profile),
        ]
    notes += (
        [f"py-spy cannot inspect ranks ({untraceable}): hangs are dumped by faulthandler"]
        if untraceable
        else []
    )
    rows: list[dict[str, Any]] = [
        {
            **{name: getattr(plan.cell, name) for name in ("case", "model", "strategy")},
            "simulated": prepared.catalogue.cases[plan.cell.case].simulated,
            "runs": plan.skipped is None,
            "reason": plan.skipped,
            "skipped_variants": (
                {} if plan.skipped else {v.variant: v.skipped for v in plan.variants if v.skipped}
            ),
        }
        for plan in prepared.plans
    ]
    if args.json:
        print_json(
            {
                "machine": asdict(machine),
                "hardware": [each.name for each in prepared.profiles],
                "backend": profile.backend,
                "torch": torch,
                "gpus": [asdict(gpu) | asdict(now[gpu.uuid]) for gpu in machine.gpus],
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
        return 3 if problems else 0
    print_wrapped(
        f"machine: {machine.cpu}, {machine.cores} cores, {machine.memory_gb:.1f} GiB; {machine.os}"
    )
    _print_gpus(machine, now)
    of_torch = probe.describe_probe(torch, len(profile.gpus))
    print_wrapped(
        f"/dev/shm: {'none' if shm is None else f'{shm} MiB'}; hangs:"
        f" {'faulthandler' if untraceable else 'py-spy'}",
        f"hardware: {' | '.join(each.words() for each in prepared.profiles)}; {of_torch}",
        f"stack {stack.describe(_SHOWN)}",
        *(f"PROBLEM: {text}" for text in problems),
        *(f"note: {text}" for text in notes),
    )
    terminal.print_lines([*terminal.doctor_lines(rows, where, terminal.columns()), ""])
    first = (
        f", once {counted(len(problems), 'problem')} (PROBLEM, above) is solved" if problems else ""
    )
    first = first if where == "here" else f"; those of the GPUs{first}"
    print(f"{sum(row['runs'] for row in rows)} of {len(rows)} cells can run {where}{first}")
    return 3 if problems else 0


def _print_gpus(machine: Machine, states: dict[str, GpuState]) -> None:
    """Print one line per GPU, and one per other user's process on it."""
    cuda = f", CUDA up to {machine.cuda}" if machine.cuda else ""
    driver = f"; driver {machine.driver}{cuda}" if machine.driver else ""
    none = "none that can be used" if machine.unusable else "none"
    lines = [f"GPUs: {len(machine.gpus) or none}{driver}"]
    for gpu in machine.gpus:
        lines.append(f"  {describe_gpu(gpu, states[gpu.uuid])}")
        lines += [f"    in use by {process}" for process in states[gpu.uuid].others]
    print_wrapped(*lines)
