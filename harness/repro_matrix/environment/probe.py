"""Try in one process of the stack whether its torch can use the GPUs, before any launch.

The answer is recorded in the results (``hardware.probe``). ``problem`` is pure.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from repro_kit.settings import host_of_its_own

from repro_matrix.environment.machine import Machine
from repro_matrix.environment.profiles import Profile, count_names
from repro_matrix.environment.stacks import Stack
from repro_matrix.paths import PACKAGE
from repro_matrix.text import describe_exit, log

SCRIPT = PACKAGE / "launch" / "worker" / "device_probe.py"
IMPORT_S = 240.0  # of torch or another package, from a cold network disk: slow, and no hang
DEVICE_S, PAIR_S = (
    15.0,
    8.0,
)  # for each step on a GPU, and for two ranks of NCCL that both have their GPU
NEWS_S = 10.0  # between two lines about a step that takes long
RECORDED = ("torch", "cuda", "arch_list", "nccl_version")
Json = dict[str, Any]

_HINTS = {
    "system not yet initialized": (
        "machines with NVSwitch need nvidia-fabricmanager to run, in the driver's version"
    ),
    "busy or unavailable": (
        "another process holds the GPU, or its compute mode forbids it (nvidia-smi -q -d COMPUTE)"
    ),
    "No CUDA GPUs are available": "in a container, the devices have to be passed in, too",
    "was not done after": (
        "a GPU does not answer: `nvidia-smi` shows which, and CUDA_VISIBLE_DEVICES can leave it"
        " out. Without persistence mode (nvidia-smi -pm 1) the driver takes seconds to start each"
        " GPU for its first program"
    ),
}
# Such a signal says nothing about the GPUs. The others are errors of the process itself (SIGSEGV,
# SIGABRT).
_FROM_OUTSIDE = {signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM, signal.SIGXCPU}
# In errors that another build of torch avoids.
_OTHER_BUILD = (
    "driver on your system is too old",
    "no kernel image",
    "it is a build for ROCm",
    "it is a build without CUDA",
    "it was built without NCCL",
)
_WRAPPER = "a program that wraps python, or a package that prints when it is imported"


def run_probe(stack: Stack, devices: Sequence[int] | None, env: Mapping[str, str]) -> Json:
    """Run the probe in the stack; return its lines as one mapping.

    It has ``failed`` if the probe did not finish.

    ``devices``: indices of the GPUs to compute on; None: the CPU. ``env``: what ranks of the stack
    get.
    """
    with _probe_folder() as folder:
        argument = "cpu" if devices is None else ",".join(map(str, devices))
        return {
            **_run_processes(stack, folder, [[argument]], [env])[0],
            "asked": list(devices or ()),
        }


def ask_pair(stack: Stack, devices: Sequence[int], env: Mapping[str, str]) -> Json:
    """Let two ranks add numbers with NCCL; return {} where that works. One device: they share it.

    ``pair``: what went wrong. ``without_p2p``: whether it works with NCCL_P2P_DISABLE=1.
    """
    if len(devices) == 1:
        shared = _all_reduce(
            stack, [*devices, *devices], [{**env, **host_of_its_own(rank)} for rank in (0, 1)]
        )
        return {"pair": shared, "shared": True} if shared else {}
    if (problem := _all_reduce(stack, devices, [env] * 2)) is None:
        return {}
    return {
        "pair": problem,
        "without_p2p": _all_reduce(stack, devices, [{**env, "NCCL_P2P_DISABLE": "1"}] * 2) is None,
    }


def pairs_of(devices: Sequence[int]) -> list[list[int]]:
    """Return each with the next; an odd last one with the one before it, too."""
    pairs = [[*devices[at : at + 2]] for at in range(0, len(devices) - 1, 2)]
    return pairs + ([[*devices[-2:]]] if len(devices) > 2 and len(devices) % 2 else [])


def merge_pairs(answers: Sequence[tuple[Sequence[int], Json]]) -> Json:
    """Return the answer of the pairs that failed, with their devices; {} if all work."""
    failed = [(devices, answer) for devices, answer in answers if answer]
    if not failed:
        return {}
    without_p2p = all(answer.get("without_p2p") for _, answer in failed)
    return {
        **failed[0][1],
        "without_p2p": without_p2p,
        "pairs": [[*devices] for devices, _ in failed],
    }


def _all_reduce(
    stack: Stack, devices: Sequence[int], envs: Sequence[Mapping[str, str]]
) -> str | None:
    """Return what went wrong, or None."""
    with _probe_folder() as folder:
        ranks = [
            ["rank", str(rank), str(folder), str(device)] for rank, device in enumerate(devices)
        ]
        answers = _run_processes(stack, folder, ranks, envs)
    problems = [str(answer["error"]) for answer in answers if answer.get("error")]
    # else ended for it
    failed = [answer for answer in answers if answer.get("failed") and not problems]
    problems += [f"a rank {answer['failed']}" for answer in failed if not answer.get("hangs")]
    problems += [f"it hangs (at: {answer.get('stage')}, {answer['failed']})" for answer in failed]
    return next(iter(problems), None)


def _probe_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="repro-probe-")


def _limit(stage: str | None) -> float:
    """Return how many seconds a step of the probe may take."""
    if stage is None or stage.startswith("import"):
        return IMPORT_S
    return PAIR_S if stage == "all-reduce" else DEVICE_S


def _run_processes(
    stack: Stack, folder: str, arguments: Sequence[Sequence[str]], envs: Sequence[Mapping[str, str]]
) -> list[Json]:
    """Run one process of the probe for each ``arguments``; return the answer of each.

    It ends when all have ended, when one has an error, or when none reaches its next step in time.
    An answer has ``failed`` if its process did not finish, and ``hangs``.
    """
    logs = [Path(folder) / f"{number}.log" for number in range(len(arguments))]
    running: list[subprocess.Popen[bytes]] = []
    stages: list[str | None] = []
    since = said = time.monotonic()
    late = ""
    with contextlib.ExitStack() as opened:
        for words, env, path in zip(arguments, envs, logs):
            out = opened.enter_context(open(path, "wb"))
            try:
                command = [stack.python, str(SCRIPT), *words]
                running.append(
                    opened.enter_context(subprocess.Popen(command, stdout=out, stderr=out, env=env))
                )
            except OSError as error:
                return [{"failed": f"could not be started: {error}"} for _ in arguments]
            opened.callback(running[-1].kill)
        while alive := [number for number, process in enumerate(running) if process.poll() is None]:
            answers = [parse_output(path.read_bytes()) for path in logs]
            if any(answer.get("error") for answer in answers):
                break
            now = time.monotonic()
            if (at := [answer.get("stage") for answer in answers]) != stages:
                stages, since = at, now
            # a rank may wait for one that is slower
            limit = max(_limit(at[number]) for number in alive)
            if now - since > limit:
                late = f"was not done after {limit:g} s"
                break
            # the ranks of pairs would say the same
            if len(running) == 1 and now - max(since, said) > NEWS_S:
                log(
                    f"stack {stack.name}: {at[alive[0]] or 'starting python'} has taken"
                    f" {now - since:.0f} s so far"
                )
                said = now
            time.sleep(0.05)
    return [_final_answer(path.read_bytes(), process, late) for path, process in zip(logs, running)]


def _final_answer(output: bytes, process: subprocess.Popen[bytes], late: str) -> Json:
    """Return the answer of a process of the probe, and why it did not finish.

    ``late``: why it was ended.
    """
    answer = parse_output(output)
    if answer.get("stage") == "done" or answer.keys() & {"error", "import_error", "init_error"}:
        return answer
    if late and process.returncode == -signal.SIGKILL:
        return answer | {"failed": late, "hangs": True}
    last = [
        line
        for line in output.decode(errors="replace").splitlines()
        if line.strip() and line[0] != "{"
    ][-1:]
    if -process.returncode in _FROM_OUTSIDE:
        answer |= {"stopped": True}
    how = describe_exit(process.returncode)
    return answer | {"failed": ": ".join([how, *last])[:400]}


def parse_output(output: bytes) -> Json:
    """Return the probe's lines as one mapping, without what packages print besides."""
    answer: Json = {"devices": []}
    for line in output.decode(errors="replace").splitlines():
        part = None
        with contextlib.suppress(ValueError):
            part = json.loads(line)
        if isinstance(part, dict):
            device = part.pop("device", None)
            answer["devices"] += [device] if device else []
            answer.update(part)
    return answer


def probe_record(answer: Mapping[str, Any]) -> Json:
    """Return what results keep: what a measurement can depend on, equal in every run."""
    devices = [
        {key: device.get(key) for key in ("name", "capability")}
        for device in answer.get("devices", ())
    ]
    failed = {"imports": answer["imports"]} if answer.get("imports") else {}
    return {**{name: answer.get(name) for name in RECORDED}, "devices": devices, **failed}


def describe_probe(answer: Mapping[str, Any], gpus: int) -> str:
    """Describe torch and its build, and on how many of the ``gpus`` that NVML shows it computes."""
    parts = [
        ("CUDA", answer.get("cuda")),
        ("HIP", answer.get("hip")),
        ("NCCL", answer.get("nccl_version")),
    ]
    built = ", ".join(f"{name} {version}" for name, version in parts if version) or "no CUDA"
    devices = answer["devices"] if answer.get("asked") else []
    working = sum(bool(one.get("touched")) and not one.get("error") for one in devices)
    fewer = f", of which torch sees {len(devices)}" if len(devices) != gpus else ""
    computes = f": it computes on {working} of {gpus} GPUs{fewer}" if devices else ""
    return f"torch {answer.get('torch') or 'unknown'} ({built}){computes}"


def import_notes(answer: Mapping[str, Any]) -> list[str]:
    """Return a line for each package that does not import where a GPU is visible."""
    remedy = "set CUDA_HOME to a CUDA toolkit that has nvcc, or install a newer release of it"
    return [
        f"{name} does not import with a GPU visible, and cells that need it are skipped on GPUs"
        f" ({error}): {remedy}"
        for name, error in (answer.get("imports") or {}).items()
    ]


def untested(answer: Mapping[str, Any], profile: Profile) -> list[str]:
    """Return a line about the GPUs on which nothing was computed.

    Another run has locked them, or their memory is in use.
    """
    names = [
        str(gpu.index) for number, gpu in enumerate(profile.gpus) if number not in answer["asked"]
    ]
    why = (
        "another run of this project holds it, or it has less than 1 GiB free: repeat `repro"
        " doctor` when it is free"
    )
    return [f"GPU {', '.join(names)} not tested: {why}"] if names else []


def problem(
    answer: Mapping[str, Any], stack: Stack, profile: Profile, machine: Machine
) -> str | None:
    """Return why torch cannot use the GPUs that NVML reports, and what to do; None if it can.

    On the CPU: why it does not import.
    """
    if profile.accelerator == "cpu":
        error = answer.get("import_error") or (
            answer.get("failed") and f"the probe {answer['failed']}"
        )
        return f"torch does not import in stack {stack.name}: {error}" if error else None
    reason = problem_of_torch(answer, profile)
    if reason is None:
        return None
    torch = str(answer.get("torch") or "")
    newest = f", which supports CUDA up to {machine.cuda}" if machine.cuda else ""
    seen = f"NVML sees {count_names(profile.gpus)} (driver {machine.driver}{newest}), and"
    if answer.get("stopped"):
        remedy = "Repeat it; if it happens again, look for a time limit or for memory that ran out"
        return (
            f"{seen} it is unknown whether torch of stack {stack.name} can use them: {reason}."
            f" {remedy}"
        )
    lines = [
        f"{seen} torch {torch} (CUDA {answer.get('cuda') or 'none'}) of stack {stack.name} cannot"
        f" use them: {reason}"
    ]
    hints = (
        [] if answer.get("pair") else [hint for words, hint in _HINTS.items() if words in reason]
    )
    lines += hints[:1]  # the reason of a pair has its own
    if any(text in reason for text in _OTHER_BUILD):
        release = f"=={torch.partition('+')[0]}" if torch else ""
        lines.append(
            "install a build that fits the driver: `uv pip install --reinstall-package torch"
            f" --torch-backend=auto --python {stack.python} torch{release}` (or another release of"
            " torch)"
        )
    return ";\n  ".join([*lines, "hardware=cpu runs with gloo anyway"])


def problem_of_torch(answer: Mapping[str, Any], profile: Profile) -> str | None:
    """Return what is wrong; None if torch computes on the GPUs."""
    if answer.get("import_error"):
        return f"it does not import: {answer['import_error']}"
    if answer.get("torch") and (answer.get("hip") or not answer.get("cuda")):
        return f"it is a build {'for ROCm' if answer.get('hip') else 'without CUDA'}"
    if error := answer.get("init_error"):
        return str(error)
    if answer.get("failed"):
        return f"the probe (at: {answer.get('stage')}) {answer['failed']}"
    devices = answer["devices"]
    if not answer.get("gpus") == len(devices) == len(profile.gpus):
        fewer = f"it sees {answer.get('gpus')} of {len(profile.gpus)} GPUs"
        remedy = (
            "a container was given fewer than NVML shows: pass all in, or list its own in"
            " CUDA_VISIBLE_DEVICES"
        )
        return f"{fewer} ({remedy})"
    indices = [device.get("index", number) for number, device in enumerate(devices)]
    if indices != list(range(len(devices))):
        usual = f"0 to {len(devices) - 1}"
        return f"the probe reports devices {indices} instead of {usual} (look for {_WRAPPER})"
    for number, (gpu, device) in enumerate(zip(profile.gpus, devices)):
        if error := device.get("error"):
            more = "; CUDA_VISIBLE_DEVICES without it runs on the others" if devices[1:] else ""
            return f"GPU {gpu.index} ({gpu.uuid}): {error}{more}"
        name, capability = str(device.get("name") or ""), device.get("capability")
        uuid = str(device.get("uuid") or "")
        # another order: other GPUs than the locked
        seen = (capability, name.removeprefix("NVIDIA "), uuid.removeprefix("GPU-"))
        real = (gpu.capability, gpu.name.removeprefix("NVIDIA "), gpu.uuid.removeprefix("GPU-"))
        if any(one and other and one != other for one, other in zip(seen, real)):
            sees = f"it sees {name} (compute capability {capability}, {uuid or 'UUID unknown'})"
            have = f"{gpu.name} ({gpu.capability}, {gpu.uuid})"
            return f"{sees}, where NVML has GPU {gpu.index}: {have}"
        if number in answer.get("asked", ()) and not device.get("touched"):
            return f"nothing was computed on GPU {gpu.index}, which is free (look for {_WRAPPER})"
    if profile.backend == "nccl" and not answer.get("nccl"):
        return "it was built without NCCL"
    if answer.get("pair"):
        numbers = [[str(profile.gpus[device].index) for device in pair] for pair in answer["pairs"]]
        pairs = ", GPU ".join(" and ".join(pair) for pair in numbers)
        fails = f"an all-reduce of two ranks with NCCL fails on GPU {pairs}: {answer['pair']}"
        return fails + _detour(answer)
    return None


def _detour(answer: Mapping[str, Any]) -> str:
    """Return what to do about a failed pair."""
    if answer.get("shared"):
        return (
            "; this NCCL does not let two ranks share a GPU: hardware=gpu1-shared uses gloo instead"
        )
    if answer["without_p2p"]:
        return (
            "; direct copies between these GPUs are broken, and it works without them: add"
            " env.NCCL_P2P_DISABLE=1"
        )
    return (
        "; NCCL_P2P_DISABLE=1 does not help: NCCL_DEBUG=INFO with any program under torchrun shows"
        " where it stops"
    )
