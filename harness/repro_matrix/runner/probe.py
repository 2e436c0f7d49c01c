"""Can a stack's torch use the cards? One process in the stack's own python, in the environment that ranks get, before
anything is launched. What it finds is recorded in the documents (``hardware.probe``)."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro_matrix.environment.gpus import Gpu
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.nvml import states
from repro_matrix.environment.profiles import Profile, counted
from repro_matrix.environment.stacks import drivers
from repro_matrix.environment.stacks.spec import Stack
from repro_matrix.launch.attempt import Attempt, stack_environment

SCRIPT = Path(__file__).parents[1] / "launch" / "worker" / "device_probe.py"
LIMIT_S = 240.0  # a cold import from a network disk, and cuInit on eight cards without persistence mode
ROOM_MB = 1024  # free memory that a context, a library's workspace and a small matrix need
Json = dict[str, Any]

_HINTS = {
    "system not yet initialized": "machines with NVSwitch need nvidia-fabricmanager to run, in the driver's version",
    "busy or unavailable": "another process holds the card, or its compute mode forbids it (nvidia-smi -q -d COMPUTE)",
    "No CUDA GPUs are available": "in a container, the devices have to be handed in, too",
}


@dataclass
class Prober:
    """Probes stacks for one run. A stack is asked once; only what went well is remembered."""

    profile: Profile
    machine: Machine
    state: Path  # the folder of the leases
    _passed: dict[str, Json] = field(default_factory=dict)

    def __call__(self, stack: Stack) -> tuple[Json, str | None]:
        """(what is recorded, why the stack cannot be used on these cards or None)."""
        if stack.key in self._passed:
            return self._passed[stack.key], None
        found = self.look(stack)
        wrong = problem(found, stack, self.profile, self.machine)
        kept = record(found)
        if wrong is None:
            self._passed[stack.key] = kept
        return kept, wrong

    def look(self, stack: Stack) -> Json:
        """Ask torch; of the cards only those compute that no other run holds and that have room for it."""
        from repro_matrix.runner.gpu_pool import GpuLocks

        run_id = f"probe-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        uuids = [gpu.uuid for gpu in self.profile.gpus]
        if not uuids:
            return ask(stack, self.profile, [], run_id)
        with GpuLocks(self.state, run_id) as locks:
            free = [name for name in uuids if locks.acquire([name])]
            try:
                roomy = [place for place, name in enumerate(uuids) if name in free and _room(name)]
                return ask(stack, self.profile, roomy, run_id)
            finally:
                locks.release(free)


def _room(name: str) -> bool:
    free = states([name])[name].free_mb
    return free is None or free >= ROOM_MB


def ask(stack: Stack, profile: Profile, touch: Sequence[int], run_id: str) -> Json:
    """Run the probe; its lines as one mapping. ``failed``: how it ended, where it did not get to its end."""
    settings = {"device": profile.accelerator, "backend": profile.backend, "case": "probe", "arm": "probe"}
    cards = tuple(gpu.uuid for gpu in profile.gpus)
    attempt = Attempt(
        run_id, run_id, Path("."), SCRIPT, settings, stack.python, len(cards), LIMIT_S, stack.environment({}), cards
    )
    wanted = ",".join(map(str, touch)) if cards else "cpu"
    try:
        done = subprocess.run(
            [stack.python, str(SCRIPT), wanted], capture_output=True, timeout=LIMIT_S, env=stack_environment(attempt)
        )
    except subprocess.TimeoutExpired as error:
        return merged(error.stdout or b"") | {"failed": f"was not done after {LIMIT_S:g} s"}
    except OSError as error:
        return {"failed": f"could not be started: {error}"}
    found = merged(done.stdout)
    if found.get("stage") != "done" and not found.keys() & {"import_error", "init_error"}:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
        found["failed"] = f"ended with exit code {done.returncode}" + (f": {last[:300]}" if last else "")
    return found


def merged(output: bytes) -> Json:
    """The probe's lines as one mapping; whatever else a package prints is left out."""
    found: Json = {"devices": []}
    for line in output.decode(errors="replace").splitlines():
        try:
            part = json.loads(line) if line.startswith("{") else None
        except ValueError:
            part = None
        if isinstance(part, dict):
            device = part.pop("device", None)
            found["devices"] += [device] if isinstance(device, dict) else []
            found.update(part)
    return found


def record(found: Mapping[str, Any]) -> Json:
    """What documents keep: what an answer can depend on, and nothing that differs from run to run."""
    names = ("torch", "cuda", "arch_list", "nccl_version")
    devices = [{key: device.get(key) for key in ("name", "capability")} for device in found.get("devices", ())]
    return {**{name: found.get(name) for name in names}, "devices": devices}


def problem(found: Mapping[str, Any], stack: Stack, profile: Profile, machine: Machine) -> str | None:
    """Why torch cannot use the cards that NVML sees, and what to do; None when it can. Pure."""
    torch = str(found.get("torch") or "")
    why = _why(found, profile, machine)
    if why is None:
        return None
    text, build = why
    hint = next((hint for words, hint in _HINTS.items() if words in text), None)
    cuda = f"CUDA {found['cuda']}" if found.get("cuda") else "no CUDA"
    known = f", which knows CUDA up to {machine.cuda}" if machine.cuda else ""
    lines = [
        f"NVML sees {counted([gpu.name for gpu in profile.gpus])} (driver {machine.driver}{known}), "
        f"and torch{f' {torch} ({cuda})' if torch else ''} of stack {stack.name} cannot use them: {text}"
    ]
    lines += [hint] if hint else []
    if build:
        lines.append(drivers.advice(machine.driver, torch, stack.python))
        if stack.name.partition("+")[0] != "current" and not stack.name.startswith("python:"):
            lines.append("this stack comes from a lock: make such an environment and name it as stack=python:PATH")
    lines.append("hardware=cpu runs with gloo anyway")
    return ";\n  ".join(lines)


def _why(found: Mapping[str, Any], profile: Profile, machine: Machine) -> tuple[str, bool] | None:
    """(what is wrong, whether another build of torch is what helps)."""
    cuda = str(found.get("cuda") or "")
    if found.get("import_error"):
        return f"it does not import: {found['import_error']}", False
    if found.get("failed") and not found.get("torch"):
        return f"the probe (at: {found.get('stage')}) {found['failed']}", False
    if found.get("hip"):
        return "it is a build for ROCm", True
    if not cuda:
        return "it is a build without CUDA", True
    if found.get("init_error"):
        old = drivers.fits(machine.driver or "", cuda) is False
        needs = f"; CUDA {cuda} needs driver {drivers.minimum(cuda)} or newer" if old else ""
        return f"{found['init_error']}{needs}", old
    if found.get("failed"):
        return f"the probe (at: {found.get('stage')}) {found['failed']}", False
    if int(found.get("gpus") or 0) != len(profile.gpus):
        return f"it sees {found.get('gpus')} of {len(profile.gpus)}", False
    others = _other_cards(found["devices"], profile.gpus)
    if others:
        return others, False
    lacking = _without_kernels(found.get("arch_list") or [], profile.gpus)
    if lacking:
        return f"it has no kernels for {lacking} (it has: {', '.join(found['arch_list'])})", True
    broken = [
        f"GPU {gpu.index} ({gpu.uuid}): {device['error']}"
        for gpu, device in zip(profile.gpus, found["devices"])
        if device.get("error")
    ]
    if broken:
        rest = "; CUDA_VISIBLE_DEVICES without it runs on the others" if len(broken) < len(profile.gpus) else ""
        return "; ".join(broken) + rest, "no kernel image" in broken[0]
    if profile.backend == "nccl" and not found.get("nccl"):
        return "it was built without NCCL", True
    return None


def _other_cards(devices: Sequence[Mapping[str, Any]], gpus: Sequence[Gpu]) -> str | None:
    """Whether torch's devices are the cards that NVML tells of, in that order, as far as both say."""
    if len(devices) != len(gpus):
        return f"it told of {len(devices)} of {len(gpus)} devices"
    for place, (device, gpu) in enumerate(zip(devices, gpus)):
        capability = device.get("capability")
        if capability and gpu.capability and capability != gpu.capability:
            seen = f"{device.get('name')} (compute capability {capability})"
            return f"its device {place} is {seen}, where NVML has GPU {gpu.index}: {gpu.name} ({gpu.capability})"
    return None


def _without_kernels(arch_list: Sequence[str], gpus: Sequence[Gpu]) -> str | None:
    """The first card that none of the build's architectures runs on: the same major and at most its minor (sm_80 on
    8.6), or any older one that is there as PTX (compute_70), compiled at the first use."""
    for gpu in gpus:
        if gpu.capability is None or not arch_list:
            continue
        major, minor = map(int, gpu.capability.split("."))
        for arch in arch_list:
            kind, _, number = arch.rstrip("af").partition("_")
            if not number.isdigit():
                return None  # a kind of architecture that is not known here says nothing
            own = int(number[:-1]), int(number[-1])
            exact = arch[-1] == "a"  # sm_90a: that architecture only
            if own == (major, minor) or (not exact and own[0] == major and own[1] <= minor):
                break
            if kind == "compute" and not exact and own <= (major, minor):
                break
        else:
            return f"{gpu.name} (compute capability {gpu.capability})"
    return None
