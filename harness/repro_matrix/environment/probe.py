"""Can a stack's torch use the GPUs? Asked in one process of the stack before anything is launched.

The answer is recorded in the results (``hardware.probe``). ``problem`` is pure.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from repro_matrix.environment import torch_install
from repro_matrix.environment.gpus import Gpu
from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile, counted
from repro_matrix.environment.stacks import Stack
from repro_matrix.paths import PACKAGE

SCRIPT = PACKAGE / "launch" / "worker" / "device_probe.py"
LIMIT_S = 240.0  # a cold import from a network disk, and cuInit on eight GPUs without persistence mode
RECORDED = ("torch", "cuda", "arch_list", "nccl_version")
Json = dict[str, Any]

_HINTS = {
    "system not yet initialized": "machines with NVSwitch need nvidia-fabricmanager to run, in the driver's version",
    "busy or unavailable": "another process holds the GPU, or its compute mode forbids it (nvidia-smi -q -d COMPUTE)",
    "No CUDA GPUs are available": "in a container, the devices have to be passed in, too",
}


def ask(stack: Stack, devices: Sequence[int] | None, env: Mapping[str, str]) -> Json:
    """Run the probe in the stack; return its lines as one mapping, with ``failed`` where it did not finish.

    ``devices``: indices of the GPUs to compute on; None: the CPU. ``env``: what ranks of the stack get.
    """
    argument = "cpu" if devices is None else ",".join(map(str, devices))
    try:
        command = [stack.python, str(SCRIPT), argument]
        done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, env=env)
    except subprocess.TimeoutExpired as error:
        return parse_output(error.stdout or b"") | {"failed": f"was not done after {LIMIT_S:g} s"}
    except OSError as error:
        return {"failed": f"could not be started: {error}"}
    answer = parse_output(done.stdout)
    if answer.get("stage") != "done" and not answer.keys() & {"import_error", "init_error"}:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
        answer["failed"] = f"ended with exit code {done.returncode}" + (f": {last[:300]}" if last else "")
    return answer


def parse_output(output: bytes) -> Json:
    """Return the probe's lines as one mapping, without what packages print besides."""
    answer: Json = {"devices": []}
    for line in output.decode(errors="replace").splitlines():
        try:
            part = json.loads(line) if line.startswith("{") else None
        except ValueError:
            part = None
        if isinstance(part, dict):
            device = part.pop("device", None)
            answer["devices"] += [device] if isinstance(device, dict) else []
            answer.update(part)
    return answer


def record(answer: Mapping[str, Any]) -> Json:
    """Return what results keep: what a measurement can depend on, and nothing that differs from run to run."""
    devices = [{key: device.get(key) for key in ("name", "capability")} for device in answer.get("devices", ())]
    return {**{name: answer.get(name) for name in RECORDED}, "devices": devices}


def describe(answer: Mapping[str, Any]) -> str:
    """Describe torch and its build, and on how many GPUs it computes."""
    parts = [("CUDA", answer.get("cuda")), ("HIP", answer.get("hip")), ("NCCL", answer.get("nccl_version"))]
    built = ", ".join(f"{name} {version}" for name, version in parts if version) or "no CUDA"
    devices = answer.get("devices") or []
    working = sum(bool(one.get("touched")) and not one.get("error") for one in devices)
    errors = "".join(f"; GPU {one['index']}: {one['error']}" for one in devices if one.get("error"))
    gpus = f": it computes on {working} of {len(devices)} GPUs{errors}" if devices else ""
    return f"torch {answer.get('torch') or 'unknown'} ({built}){gpus}"


def problem(answer: Mapping[str, Any], stack: Stack, profile: Profile, machine: Machine) -> str | None:
    """Return why torch cannot use the GPUs that NVML reports, and what to do; None when it can."""
    diagnosis = _problem(answer, profile, machine)
    if diagnosis is None:
        return None
    reason, other_build_helps = diagnosis
    torch = str(answer.get("torch") or "")
    cuda = f"CUDA {answer['cuda']}" if answer.get("cuda") else "no CUDA"
    newest = f", which supports CUDA up to {machine.cuda}" if machine.cuda else ""
    lines = [
        f"NVML sees {counted([gpu.name for gpu in profile.gpus])} (driver {machine.driver}{newest}), "
        f"and torch{f' {torch} ({cuda})' if torch else ''} of stack {stack.name} cannot use them: {reason}"
    ]
    lines += [hint for words, hint in _HINTS.items() if words in reason][:1]
    if other_build_helps:
        lines.append(torch_install.advice(machine.driver, torch, stack.python))
        if stack.name.partition("+")[0] != "current" and not stack.name.startswith("python:"):
            lines.append("this stack comes from a lock: make such an environment and name it as stack=python:PATH")
    return ";\n  ".join([*lines, "hardware=cpu runs with gloo anyway"])


def _problem(answer: Mapping[str, Any], profile: Profile, machine: Machine) -> tuple[str, bool] | None:
    """Return (what is wrong, whether another build of torch helps)."""
    cuda, failed = str(answer.get("cuda") or ""), answer.get("failed")
    if answer.get("import_error"):
        return f"it does not import: {answer['import_error']}", False
    if failed and not answer.get("torch"):
        return f"the probe (at: {answer.get('stage')}) {failed}", False
    if answer.get("hip"):
        return "it is a build for ROCm", True
    if not cuda:
        return "it is a build without CUDA", True
    if answer.get("init_error"):
        least = torch_install.too_old(machine.driver or "", cuda)
        needs = f"; CUDA {cuda} needs driver {least} or newer" if least else ""
        return f"{answer['init_error']}{needs}", least is not None
    if failed:
        return f"the probe (at: {answer.get('stage')}) {failed}", False
    if int(answer.get("gpus") or 0) != len(profile.gpus):
        return f"it sees {answer.get('gpus')} of {len(profile.gpus)}", False
    devices, arch_list = answer["devices"], answer.get("arch_list") or []
    different = _different_gpus(devices, profile.gpus)
    if different:
        return different, False
    lacking = next((gpu for gpu in profile.gpus if not has_kernels(arch_list, gpu.capability)), None)
    if lacking:
        name = f"{lacking.name} (compute capability {lacking.capability})"
        return f"it has no kernels for {name} (it has: {', '.join(arch_list)})", True
    errors = [
        f"GPU {gpu.index} ({gpu.uuid}): {device['error']}"
        for gpu, device in zip(profile.gpus, devices)
        if device.get("error")
    ]
    if errors:
        rest = "; CUDA_VISIBLE_DEVICES without it runs on the others" if len(errors) < len(profile.gpus) else ""
        return "; ".join(errors) + rest, "no kernel image" in errors[0]
    if profile.backend == "nccl" and not answer.get("nccl"):
        return "it was built without NCCL", True
    return None


def _different_gpus(devices: Sequence[Mapping[str, Any]], gpus: Sequence[Gpu]) -> str | None:
    """Return how torch's devices differ from NVML's GPUs: in another order, not the leased GPUs would be measured."""
    if len(devices) != len(gpus):
        return f"it reported {len(devices)} of {len(gpus)} devices"
    for place, (device, gpu) in enumerate(zip(devices, gpus)):
        capability = device.get("capability")
        if capability and gpu.capability and capability != gpu.capability:
            name = f"{device.get('name')} (compute capability {capability})"
            return f"its device {place} is {name}, where NVML has GPU {gpu.index}: {gpu.name} ({gpu.capability})"
    return None


def has_kernels(arch_list: Sequence[str], capability: str | None) -> bool:
    """Return whether one of the build's architectures runs on a GPU; unknown counts as yes.

    The same major and at most its minor (sm_80 on 8.6), or any older one as PTX (compute_70), compiled at first use.
    """
    if capability is None or not arch_list:
        return True
    major, minor = map(int, capability.split("."))
    for arch in arch_list:
        kind, _, number = arch.rstrip("af").partition("_")
        if not number.isdigit():
            return True  # an unknown kind of architecture
        built = int(number[:-1]), int(number[-1])
        exact = arch[-1] == "a"  # sm_90a: that architecture only
        if built == (major, minor) or (not exact and built[0] == major and built[1] <= minor):
            return True
        if kind == "compute" and not exact and built <= (major, minor):
            return True
    return False
