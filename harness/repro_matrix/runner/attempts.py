"""Run one attempt, from a variant's plan to an observation, and decide what is repeated."""

from __future__ import annotations

import os
import threading
import time
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from packaging.requirements import Requirement

from repro_matrix.config.catalog import Catalogue
from repro_matrix.config.schema import AdhocCase, Case
from repro_matrix.config.settings import RunSettings
from repro_matrix.config.vocabulary import RELEVANT
from repro_matrix.environment.gpus import Nvml, stranger
from repro_matrix.environment.nodes import Nodes, of_slurm, started_by
from repro_matrix.environment.stacks import Stack
from repro_matrix.grading.observation import exception_of
from repro_matrix.launch.attempt import Attempt, Launcher
from repro_matrix.launch.observe import EITHER, classify_device_error
from repro_matrix.paths import REPROS, cache_dir
from repro_matrix.planning.memory import GPU_DEADLINE_S
from repro_matrix.planning.plan import CellPlan, VariantPlan
from repro_matrix.records.attempt import InfraErrorKind, Observation, Settings
from repro_matrix.results import runs
from repro_matrix.runner import tracing
from repro_matrix.runner.gpu_pool import GpuLocks, GpuProblem
from repro_matrix.text import first_line

if TYPE_CHECKING:
    from repro_matrix.runner.prepared import Session

# in a run's folder: what its attempts leave each other; removed when the run ends
REFERENCES = "references"


@dataclass
class Workplace:
    """The launcher, the GPU locks and the folder of attempts that consecutive runs share."""

    launcher: Launcher
    locks: GpuLocks
    nvml: Nvml
    run_dir: Path


def run_attempt(
    session: Session,
    place: Workplace,
    plan: VariantPlan,
    gpus: Sequence[str],
    stop: threading.Event,
) -> tuple[Observation, dict[str, GpuProblem]]:
    """Launch once on locked ``gpus`` and release them.

    An exception of the harness becomes an infra_error. Thread-safe.

    Return which of the GPUs cannot be used any more, too.
    """
    try:
        stack = session.stacks[plan.stack]
        attempt = recipe(session.catalogue, plan, stack, place.run_dir, gpus)
        visible = {gpu.uuid: gpu.visible for gpu in session.gpus}
        attempt = replace(
            attempt,
            # a traced attempt makes its own
            references=None if attempt.trace else place.run_dir / REFERENCES,
            visible=tuple(visible[uuid] for uuid in gpus),
            nodes=choose_nodes(session.settings, plan.settings.get("nodes", 1)),
        )
        observation = cast(Observation, place.launcher.launch(attempt, stop))
        if attempt.trace:
            tracing.keep(attempt, observation, runs.results_folder(session.settings))
    except Exception as error:  # noqa: BLE001 - whatever it is, the other cells go on
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        observation = infra_error(plan, "launch", f"the harness could not launch it: {text}")
    else:
        # The ranks' versions are compared with these: a package may be replaced during a run.
        observation["attempt"]["fingerprint"] = plan.fingerprint
        observation["attempt"]["versions"] = {
            name: stack.versions[name] for name in RELEVANT if name in stack.versions
        }
    problems = {**place.locks.release(gpus, plan.share_mb), **failed_gpus(observation, gpus)}
    lost = observation["infra_error"]
    states = [stranger(place.nvml.look(uuid)) for uuid in gpus if uuid not in problems]
    users = ", ".join(filter(None, states))
    # An attempt that shares its GPU may have lost the memory to another one of this run.
    if lost and lost["kind"] == "memory" and users and not plan.share_mb:
        text = f"{lost['message']} (another user's work is on its GPUs: {users})"
        observation = with_infra_error(observation, "device", text)
    return observation, problems


def choose_nodes(settings: RunSettings, count: int) -> Nodes | None:
    """Return the nodes of an attempt; None: this machine."""
    if count == 1:
        return None
    if settings.node_command:
        return started_by(settings.node_command, count, settings.rendezvous)
    return of_slurm(count, settings.rendezvous)


def recipe(
    catalogue: Catalogue,
    plan: VariantPlan,
    stack: Stack | None,
    run_dir: Path,
    gpus: Sequence[str] = (),
) -> Attempt:
    """Return how a variant is launched, by a run or by the command that `repro show` prints.

    ``stack``: None where it is not built here.
    """
    case = catalogue.cases[plan.cell.case]
    script = catalogue.script(case)
    identity = f"{run_dir.name}-{uuid.uuid4().hex[:10]}"
    cold = case.launch.cold_start_reason
    if case.launch.normal_exit:
        cold = cold or "launch.teardown: how the process ends is tested"
    if plan.settings.get("nodes", 1) > 1:
        cold = cold or "nodes: each has its own agent of torchrun"
    command = case if isinstance(case, AdhocCase) else None
    trace: dict[str, str] = {}
    options = command.trace if command else plan.settings.get("trace")
    if options is not None:
        trace = tracing.variables(run_dir / tracing.TRACES / identity, options)
    # Variables of the ranks beyond the inherited ones; later ones win.
    env = stack.environment({}) if stack else {}
    env |= {**case.launch.env, **plan.settings.get("env", {}), **case.variants[plan.variant].env}
    return Attempt(
        id=identity,
        run_id=run_dir.name,
        directory=run_dir / identity,
        script=script,
        kit=REPROS if script.parent != REPROS else None,
        files=catalogue.files(plan.settings),
        settings=plan.settings,
        python=stack.python if stack else "python",
        world_size=plan.world_size,
        deadline_s=plan.deadline,
        env=env,
        gpus=tuple(gpus),
        imports=tuple(case.launch.imports) if command else imports_of(catalogue, case, plan),
        overlay=stack.path if stack else (),
        cold_start_reason=cold,
        stack_cache=cache_dir() / "stack-caches" / stack.key if stack and not command else None,
        command=command,
        trace=trace,
    )


def imports_of(catalogue: Catalogue, case: Case, plan: VariantPlan) -> tuple[str, ...]:
    """Return what the case's script imports, and what its variant's strategy brings (deepspeed)."""
    strategy = catalogue.strategies[plan.settings["strategy"]["slug"]]
    brought = {Requirement(text).name for text in strategy.requires}
    needed = dict.fromkeys([*case.launch.imports, *sorted(brought)])
    anyway = {"torch"}
    if "accelerate" in needed:  # its server imports them, too: one server for all
        anyway |= {"deepspeed", "peft"}
    return tuple(name for name in needed if name not in anyway)


def variant_of(plan: CellPlan, name: str) -> VariantPlan:
    return next(variant for variant in plan.variants if variant.variant == name)


def new_run_dir(state: Path) -> Path:
    """Create a folder for this run's attempts; its name is the run's id."""
    path = state / "runs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{uuid.uuid4().hex[:4]}"
    path.mkdir(parents=True)
    return path


# Attempts that are no evidence, and which of them are repeated

GPU_FAILURE: Final = "gpu_failure"  # the kind of infrastructure error of a failed GPU
OTHER_GPUS = (GPU_FAILURE, "device", EITHER)  # other GPUs may give a result
TOO_SLOW = "timeout_while_progressing"
BLOCKING: Final = {"CUDA_LAUNCH_BLOCKING": "1"}
LONGER = 3.0  # factor for the deadline of an attempt that was too slow


def infra_error(plan: VariantPlan, kind: InfraErrorKind, message: str) -> Observation:
    """Return the observation of an attempt that could not be launched."""
    now = time.time()
    return {
        "schema": 1,
        "attempt": {
            "id": "none",
            "launcher": "none",
            "command": [],
            "torchrun": "",
            "backend": plan.settings["backend"],
            "world_size": plan.world_size,
            "started": now,
            "ended": now,
            "wall_s": 0.0,
            "cpu_s": 0.0,
            "deadline_s": plan.deadline,
            "timed_out": False,
            "interrupted": False,
            "leaked_processes": [],
            "seed": plan.settings["seed"],
            "settings": cast(Settings, plan.settings),
        },
        "infra_error": {"kind": kind, "message": message},
        "ranks": [],
    }


def with_infra_error(observation: Observation, kind: InfraErrorKind, message: str) -> Observation:
    """Return the observation of an attempt that is no evidence, whatever its ranks reported."""
    attempt = {**observation["attempt"], "interrupted": False}
    return cast(
        Observation,
        {**observation, "attempt": attempt, "infra_error": {"kind": kind, "message": message}},
    )


def failed_gpus(observation: Observation, gpus: Sequence[str]) -> dict[str, GpuProblem]:
    """Return the GPUs that failed according to a rank's own error.

    NVML does not report it in every container. The error of a rank with several GPUs does not tell
    which one failed.
    """
    if len(gpus) not in (1, observation["attempt"]["world_size"]):
        return {}
    found = {}
    for rank in observation["ranks"]:
        record, error = rank["record"], exception_of(rank)
        if record and error and classify_device_error(error, record["phase"]) == GPU_FAILURE:
            why = f"rank {rank['rank']}: {first_line(error['message'])}"
            found[gpus[rank["rank"] % len(gpus)]] = GpuProblem("lost", why)
    return found


def plan_retry(
    observation: Observation, gpus: Sequence[str] = (), shared: bool = False
) -> dict[str, Any] | None:
    """Return the changes to the task (schedule.Task) for a retry, or None where the result stands.

    No attempt is repeated more than once. ``gpus``: those that it ran on; ``shared``: other
    attempts may have been on them.
    """
    error, attempt = observation["infra_error"], observation["attempt"]
    if error is None or attempt.get("retry_of"):
        return None
    reason = {"kind": error["kind"], "message": error["message"]}
    if error["kind"] == TOO_SLOW:
        deadline = LONGER * attempt["deadline_s"]
        longer = not gpus or deadline <= GPU_DEADLINE_S
        return {"retry_of": reason, "deadline": deadline, "share_mb": 0} if longer else None
    if error["kind"] == "memory" and shared:
        return {"retry_of": reason, "share_mb": 0}
    if error["kind"] not in OTHER_GPUS:
        return None
    changes: dict[str, Any] = {"retry_of": reason, "avoid": tuple(gpus)}
    # An error of an earlier kernel: where the host waits for each kernel, the line that raises it
    # launched it.
    if error["kind"] == EITHER:
        changes["env"] = BLOCKING
    return changes


def resolve_repeated_error(observation: Observation) -> Observation:
    """Grade an error that a GPU or the program caused as the program's, once it occurred again."""
    error, before = observation["infra_error"], observation["attempt"].get("retry_of")
    repeated = error and before and error["kind"] == before["kind"] == EITHER
    return {**observation, "infra_error": None} if repeated else observation


def unconfirmed_pass(observation: Observation) -> Observation:
    """Return a pass with blocking launches after an asynchronous error as no evidence.

    Such launches hide races.
    """
    before = observation["attempt"].get("retry_of")
    if not before or before["kind"] != EITHER:
        return observation
    text = (
        f"{before['message']}; it did not occur again with CUDA_LAUNCH_BLOCKING=1, which hides"
        " races between kernels"
    )
    return with_infra_error(observation, EITHER, text)
