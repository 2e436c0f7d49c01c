"""Prepare what cells need: built stacks, GPUs that torch can use, DeepSpeed's op, weights.

Everything that takes minutes happens here, in processes of the stack, before the deadline of any
attempt starts.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from repro_matrix.environment import probe
from repro_matrix.environment.gpus import Nvml
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile
from repro_matrix.environment.stacks import (
    Stack,
    StackError,
    check_stack,
    defined_stacks,
    described,
    extensions,
    resolve,
    spec,
)
from repro_matrix.launch.attempt import Attempt, stack_environment
from repro_matrix.paths import cache_dir
from repro_matrix.planning import cells as matrix
from repro_matrix.planning.cells import Skip
from repro_matrix.planning.memory import add_memory
from repro_matrix.planning.plan import CellPlan, VariantPlan, no_torch, skip_with_first
from repro_matrix.results.store import code_hashes
from repro_matrix.runner.gpu_pool import GpuLocks
from repro_matrix.runner.prepared import Session
from repro_matrix.text import log

Json = dict[str, Any]
ROOM_MB = 1024  # free memory that a context, a library's workspace and a small matrix need
PAIR_ROOM_MB = 3 * ROOM_MB  # of that process, and two ranks of NCCL: a GPU may be in two pairs


def ask_torch(stack: Stack, profile: Profile, given: Mapping[str, str]) -> Json:
    """Ask a stack's torch about the GPUs.

    Only GPUs compute that no other run has locked and that have room for it.

    ``given``: the variables that the run gives its ranks (``env.NAME=value``).
    """
    run_id = f"probe-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    uuids = tuple(gpu.uuid for gpu in profile.gpus)
    attempt = Attempt(
        run_id,
        run_id,
        Path("."),
        probe.SCRIPT,
        {"device": profile.accelerator},
        stack.python,
        len(uuids),
        probe.IMPORT_S,
        {**stack.environment({}), **given},
        uuids,
        tuple(gpu.visible for gpu in profile.gpus),
    )
    env = stack_environment(attempt)
    if not uuids:
        return probe.run_probe(stack, None, env)
    # one process at a time on each
    exclusive = any(gpu.mode.startswith("exclusive") for gpu in profile.gpus)
    # NVML stays open: without persistence mode the driver would start the GPUs anew for each
    # process.
    with GpuLocks(cache_dir() / "state", run_id) as locks, Nvml(uuids) as nvml:
        free_mb = {name: nvml.look(name).free_mb for name in uuids if locks.acquire([name])}
        single, pair = (
            [uuids.index(name) for name, free in free_mb.items() if free is None or free >= room]
            for room in (ROOM_MB, PAIR_ROOM_MB)
        )
        pairs = [pair[:1]] if profile.shared and pair else probe.pairs_of(pair)
        pairs = pairs if profile.backend == "nccl" else []
        with ThreadPoolExecutor(1 if exclusive else 1 + len(pairs)) as pool:
            asked = pool.submit(probe.run_probe, stack, single, env)
            added = [pool.submit(probe.ask_pair, stack, devices, env) for devices in pairs]
            answer = asked.result()
            if probe.problem_of_torch(answer, profile):
                pool.shutdown(wait=False, cancel_futures=True)
            else:
                answer |= probe.merge_pairs(
                    [(pair, each.result()) for pair, each in zip(pairs, added)]
                )
        return answer


def check_torch(
    stack: Stack, profile: Profile, machine: Machine, given: Mapping[str, str]
) -> tuple[Json, str | None]:
    """Return (the answer of the probe, why the stack cannot be used on this hardware or None)."""
    answer = ask_torch(stack, profile, given)
    return answer, (
        probe.problem(answer, stack, profile, machine)
        if "torch" in stack.versions
        else no_torch(stack)
    )


def check_stacks(
    session: Session, cells: Iterable[matrix.Cell]
) -> dict[str, tuple[Json, str | None]]:
    """Return ``check_torch`` of each stack that these cells and their variants use on GPUs."""
    cpu = {profile.name for profile in session.profiles if profile.accelerator == "cpu"}
    on_gpus = [cell for cell in cells if cell.hardware not in cpu]
    profile = replace(session.profile, gpus=tuple(session.gpus))
    used = {cell.stack for cell in on_gpus} | _stacks_of_variants(session, on_gpus)
    given = session.settings.env
    return {
        name: check_torch(session.stacks[name], profile, session.machine, given)
        for name in sorted(used & session.stacks.keys())
    }


def plan_cells(
    session: Session, cells: Sequence[matrix.Cell], build: bool, check_gpus: bool = False
) -> None:
    """Build what is missing and plan the cells; skip what cannot be built, with the reason.

    ``build``: whether stacks may be built, and ops compiled. ``check_gpus``: ask the stacks' torch
    about them.
    Raises StackError for a name without a stack.
    """
    _locate(session, cells, build)
    for name, (answer, problem) in check_stacks(session, cells).items() if check_gpus else ():
        if problem is None:
            session.stacks[name] = replace(session.stacks[name], probe=probe.probe_record(answer))
            continue
        del session.stacks[name]  # nothing of it is run
        session.unavailable[name] = problem
        session.unusable.add(name)
    usable = dict(session.stacks)
    compiling = [cell for cell in cells if cell.stack in usable and _compiles(session, cell)]
    for name in (
        {cell.stack for cell in compiling} | _stacks_of_variants(session, compiling)
    ) & usable.keys():
        usable[name] = _with_op(usable[name], build)
    code = code_hashes(session.catalogue, {cell.case for cell in cells})
    stacks: Mapping[str, Stack | str] = {**usable, **session.to_build, **session.unavailable}
    plans = session.planner(stacks, code).plan(cells)
    if build and session.settings.weights == "hub":
        plans = with_weights(plans, session.stacks)
    deadline = session.settings.deadline
    planned = [add_memory(plan, session.catalogue, session.machine, deadline) for plan in plans]
    session.plans = [plan for plan, _ in planned]
    session.unplanned = sorted({note for _, notes in planned for note in notes})


def _locate(session: Session, cells: Sequence[matrix.Cell], build: bool) -> None:
    """Resolve the stacks of the cells, and build those that are missing."""
    states = {listed.name: listed.state for listed in defined_stacks()}
    named = {cell.stack for cell in cells}
    for name in sorted(named - session.stacks.keys()):
        check_stack(name)
    # A stack that only one variant needs is used when it is there, and built by `repro stack
    # build`. This includes variants that are not selected: their recorded attempts stay while they
    # would be launched in the same way.
    for name in sorted(
        (named | _stacks_of_variants(session, cells, every=True)) - session.stacks.keys()
    ):
        state, requested = states.get(name), spec.parse_stack(name)
        existing = requested.python is not None and not requested.swaps
        there = state in ("here", "built") or existing
        # Only resolving a stack that conf/stack does not list (a file, a swap) shows whether it is
        # built already.
        possible = ("here", "built", "floating")
        unlisted = state is None and states.get(requested.base, "here") in possible
        if not there and not (name in named if build else unlisted):
            if session.as_locked and name in named and (stack := described(name)):
                session.to_build[name] = stack
            else:
                session.unavailable[name] = f"it is not built here: `repro stack build {name}`"
            continue
        try:
            if not there and build:
                pinned = described(name)
                if pinned and not _runs_on(session, cells, pinned):
                    session.to_build[name] = pinned  # the plan says why nothing runs on it
                    continue
                log(f"building stack {name}; this takes minutes, once")
            session.stacks[name] = resolve(name)
        except StackError as error:
            session.unavailable[name] = str(error)


def _runs_on(session: Session, cells: Iterable[matrix.Cell], stack: Stack) -> bool:
    """Return whether any variant would be launched on this stack, by the versions that it pins."""
    own = [cell for cell in cells if cell.stack == stack.name]
    planner = session.planner({stack.name: stack}, {cell.case: "" for cell in own})
    return any(not each.skipped for plan in planner.plan(own) for each in plan.variants)


def _stacks_of_variants(
    session: Session, cells: Iterable[matrix.Cell], every: bool = False
) -> set[str]:
    cases = [session.catalogue.cases[slug] for slug in {cell.case for cell in cells}]
    selected = None if every else session.settings.variants
    variants = [
        case.variants[name] for case in cases for name in matrix.variants_of(case, selected)
    ]
    return {variant.stack for variant in variants if variant.stack}


def _compiles(session: Session, cell: matrix.Cell) -> bool:
    """Return whether the cell needs DeepSpeed on a CPU: its op takes minutes to compile."""
    if any(
        profile.name == cell.hardware and profile.accelerator != "cpu"
        for profile in session.profiles
    ):
        return False
    case = session.catalogue.cases[cell.case]
    variants = [case.variants[name] for name in matrix.variants_of(case, session.settings.variants)]
    strategies = {cell.strategy, *(variant.strategy for variant in variants if variant.strategy)}
    needs = [
        case.requires.packages,
        case.launch.imports,
        *(variant.requires for variant in variants),
    ]
    needs += [session.catalogue.strategies[name].requires for name in strategies]
    return any(item.startswith("deepspeed") for items in needs for item in items)


def _with_op(stack: Stack, build: bool) -> Stack:
    """Return the stack with DeepSpeed's op compiled.

    Without a C++ compiler: as a stack without DeepSpeed.
    """
    problem = extensions.no_compiler(stack)
    if build and problem is None and not extensions.op_compiled(stack):
        log(
            f"compiling DeepSpeed's op for stack {stack.name}; this takes minutes, once; its cells"
            " follow"
        )
        problem = extensions.compile_op(stack)
    if problem is None:
        return stack
    versions = {name: version for name, version in stack.versions.items() if name != "deepspeed"}
    return replace(stack, versions=versions, missing={"deepspeed": problem})


# Real weights (weights=hub): downloaded once; the ranks then read them from the hub's own cache,
# offline

DOWNLOAD_S = 4 * 3600.0
_DOWNLOAD = """
import sys, huggingface_hub
kinds = ["*.safetensors", "*.json", "*.py", "*.model", "*.tiktoken", "*.txt"]
huggingface_hub.snapshot_download(sys.argv[1], allow_patterns=kinds)
"""


def download(stack: Stack, name: str) -> str | None:
    """Download a model into the user's hub cache. Return None, or why its weights are not there."""
    env = {**os.environ, **stack.environment(), "HF_HUB_DISABLE_TELEMETRY": "1"}
    try:
        done = subprocess.run(
            [stack.python, "-c", _DOWNLOAD, name],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_S,
            env=env,
        )
    except subprocess.TimeoutExpired:
        problem = f"it was not done within {DOWNLOAD_S / 3600:g} hours"
    except OSError as error:
        problem = str(error)
    else:
        if not done.returncode:
            return None
        problem = (done.stderr.strip().splitlines() or ["?"])[-1]
    hint = ". Accept its terms on the hub, and set HF_TOKEN." if "GatedRepoError" in problem else ""
    return f"weights=hub: {name} cannot be downloaded: {problem}{hint}"


def with_weights(plans: Iterable[CellPlan], stacks: Mapping[str, Stack]) -> list[CellPlan]:
    """Return the plans with every model's weights on this machine.

    A variant without weights is skipped for that.
    """

    @cache
    def problem(stack: str, hub: str) -> str | None:
        return download(stacks[stack], hub)

    def checked(variant: VariantPlan) -> VariantPlan:
        model = variant.settings["model"]
        if variant.skipped or model["weights"] != "hub" or variant.stack not in stacks:
            return variant
        why = problem(variant.stack, model["hub"])
        return replace(variant, skip=Skip("weights", why, (model["hub"],)) if why else None)

    return [
        replace(plan, variants=skip_with_first([*map(checked, plan.variants)])) for plan in plans
    ]
