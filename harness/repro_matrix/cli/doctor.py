"""`repro doctor`: what this machine has, and for every case whether it runs here and if not why."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from repro_matrix.cli import options as arguments
from repro_matrix.environment import nvml
from repro_matrix.environment import nvml as nvml_module
from repro_matrix.environment import system_checks as around
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import HardwareError
from repro_matrix.paths import cache_dir
from repro_matrix.report import listing
from repro_matrix.report.terminal import columns, named, print_json, print_lines, print_table, print_wrapped
from repro_matrix.results import local as own_results
from repro_matrix.runner import session
from repro_matrix.runner.probe import Prober, problem
from repro_matrix.runner.request import ask

_SHOWN = ("transformers", "accelerate", "peft", "deepspeed")


def configure(parser: argparse.ArgumentParser) -> None:
    arguments.overrides(parser)
    parser.add_argument("--all", action="store_true", help="a line for every cell")


def main(args: argparse.Namespace) -> int:
    problems, notes = [], []
    try:
        prepared = session.prepare(args.overrides, build_stacks=False)
    except HardwareError as error:  # what a run would end with; the rest is told for the CPU
        problems.append(str(error))
        prepared = session.prepare(ask(args.overrides).having({"hardware": "cpu"}), build_stacks=False)
    machine, profile = prepared.machine, prepared.profile
    if machine.nvml_error and not problems:
        problems.append(machine.nvml_error)
    notes += [text for text in [*map(str, machine.left_out), profile.why_idle(), machine.unseen] if text]
    notes += [f"left out: {text}" for text in prepared.catalogue.left_out]
    used = [plan.cell.stack for plan in prepared.plans if plan.cell.stack in prepared.stacks]
    stack = prepared.stacks[used[0]] if used else next(iter(prepared.stacks.values()))
    notes += [f"stack {stack.name}: {note}" for note in stack.changed]
    torch = Prober(profile, machine, cache_dir() / "state").look(stack)
    if profile.accelerator != "cpu":
        wrong = problem(torch, stack, profile, machine)
        problems += [wrong] if wrong else []
    elif "import_error" in torch or "failed" in torch:
        problems.append(f"torch does not import in stack {stack.name}: {torch.get('import_error') or torch['failed']}")
    for folder, other in ((cache_dir(), "REPRO_CACHE=DIR"), (own_results.scratch(), "results=DIR")):
        why = around.unwritable(folder)
        problems += [f"{why}: {other} says where else"] if why else []
    shm, blind = around.shm_mb(), around.no_stacks()
    notes += around.warnings(profile, shm)
    notes += [f"py-spy cannot look into ranks ({blind}): a hang's stacks come from faulthandler"] if blind else []
    states = nvml_module.states([gpu.uuid for gpu in machine.gpus])
    apart = nvml.without_peers([gpu.uuid for gpu in machine.gpus])
    rows: list[dict[str, Any]] = [
        {
            "case": plan.cell.case, "model": plan.cell.model, "strategy": plan.cell.strategy,
            "simulated": prepared.catalogue.cases[plan.cell.case].simulated,
            "runs": plan.skipped is None, "reason": plan.skipped,
            "skipped_arms": {arm.arm: arm.skipped for arm in plan.arms if arm.skipped} if not plan.skipped else {},
        }
        for plan in prepared.plans
    ]  # fmt: skip
    data = {
        "machine": machine.to_json(), "hardware": [each.name for each in prepared.profiles],
        "backend": profile.backend, "torch": torch,
        "gpus": [asdict(gpu) | asdict(states[gpu.uuid]) for gpu in machine.gpus], "without_peer_access": apart,
        "shm_mb": shm, "ptrace": blind is None, "problems": problems, "notes": notes,
        "stack": {"name": stack.name, "versions": dict(stack.versions)}, "cells": rows,
        "unavailable_stacks": prepared.unavailable,
    }  # fmt: skip
    if args.json:
        print_json(data)
        return 3 if problems else 0
    print_wrapped(f"machine: {machine.cpu}, {machine.cores} cores, {machine.memory_gb} GiB; {machine.os}")
    _print_gpus(machine, states, apart)
    shared = "none" if shm is None else f"{shm} MiB"
    print_wrapped(
        f"/dev/shm: {shared}; stacks of hung ranks: {'faulthandler' if blind else 'py-spy'}",
        f"hardware: {' | '.join(each.words() for each in prepared.profiles)}; {_of_torch(torch)}",
    )
    shown = [f"{name} {stack.versions[name]}" for name in _SHOWN if name in stack.versions]
    print_wrapped(f"stack {stack.name}: python {stack.versions.get('python')}, {', '.join(shown)}")
    print_wrapped(*(f"PROBLEM: {text}" for text in problems), *(f"note: {text}" for text in notes))
    if args.all:
        table = [
            [
                named(r["case"], r["simulated"]), r["model"], r["strategy"], "yes" if r["runs"] else "no",
                r["reason"] or _arms(r["skipped_arms"]),
            ]
            for r in rows
        ]  # fmt: skip
        print_table("", ["case", "model", "strategy", "runs here", "why not"], table, narrow=("why not",))
    else:
        print_lines([*listing.runs_here(rows, columns()), ""])
    print(f"{sum(r['runs'] for r in rows)} of {len(rows)} cells can run here")
    return 3 if problems else 0


def _of_torch(found: Mapping[str, Any]) -> str:
    """What the stack's torch was built with, and which cards it computed on; what is wrong is said as a problem."""
    parts = [("CUDA", found.get("cuda")), ("HIP", found.get("hip")), ("NCCL", found.get("nccl_version"))]
    built = ", ".join(f"{name} {version}" for name, version in parts if version) or "no CUDA"
    cards = found.get("devices") or []
    used = sum(bool(card.get("touched")) and not card.get("error") for card in cards)
    left = "".join(f"; GPU {card['index']}: {card['error']}" for card in cards if card.get("error"))
    seen = f": it computes on {used} of {len(cards)} cards{left}" if cards else ""
    return f"torch {found.get('torch') or 'unknown'} ({built}){seen}"


def _print_gpus(machine: Machine, states: dict[str, nvml_module.CardState], apart: list[tuple[str, str]]) -> None:
    """A line per card and a line per process on it that is not ours."""
    known = f", CUDA up to {machine.cuda}" if machine.cuda else ""
    print_wrapped(
        f"GPUs: {len(machine.gpus) or 'none'}" + (f"; driver {machine.driver}{known}" if machine.driver else "")
    )
    for gpu in machine.gpus:
        state = states[gpu.uuid]
        facts = [
            f"{gpu.name} {gpu.uuid}",
            f"{state.free_mb if state.free_mb is not None else '?'} of {gpu.memory_mb} MiB free",
            f"compute capability {gpu.capability or '?'}",
            f"mode {gpu.mode}",
            f"persistence {_said(gpu.persistence)}",
            "MIG off",  # a card in MIG mode is left out
            "no ECC" if state.ecc_uncorrected is None else f"{state.ecc_uncorrected} uncorrected ECC errors",
        ]
        facts += ["rows to be remapped at the next reset"] if state.remap_pending else []
        facts += [f"NOT USABLE: {state.sick}"] if state.sick else []
        print_lines(listing.wrapped(f"GPU {gpu.index}: {', '.join(facts)}", columns(), "  ", "    "))
        for process in state.foreign:
            print_lines(listing.wrapped(f"in use by {process}", columns(), "    ", "      "))
    for left in machine.left_out:
        print_lines(listing.wrapped(str(left), columns(), "  ", "    "))
    index = {gpu.uuid: gpu.index for gpu in machine.gpus}
    if len(machine.gpus) > 1:
        pairs = ", ".join(f"{index[one]}-{index[other]}" for one, other in apart)
        print(f"  peer access: {f'none between {pairs}' if pairs else 'between all'}")


def _said(value: bool | None) -> str:
    return "unknown" if value is None else "on" if value else "off"


def _arms(skipped: dict[str, str]) -> str:
    return "; ".join(f"arm {arm}: {reason}" for arm, reason in skipped.items())
