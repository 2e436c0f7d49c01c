"""Set-up's first step (see the Makefile): install a torch that fits this machine's driver, where none is installed yet.

    python harness/repro_matrix/environment/torch_install.py 2.13.0

Without an NVIDIA driver, pip's torch. With one, uv's choice (``--torch-backend=auto`` knows which index has the build
that fits); where that index cannot be reached or has no such build, pip's torch, and the command that would fix it.
Run by the new environment's python before anything is installed: standard library only.

The table: since CUDA 11 a build runs with any driver of its CUDA's major release or a newer one. Source: CUDA Toolkit
release notes, "CUDA Toolkit and Minimum Required Driver Version for CUDA Minor Version Compatibility", Linux (11.x: the
archive of 11.8.0). NVIDIA's forward compatibility package (cuda-compat) allows older ones: the table only advises, the
probe (probe.py) decides.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

TESTED = Path(__file__).resolve().parents[3] / "requirements" / "tested.txt"
MINIMUM_DRIVER = {"13": (580,), "12": (525, 60, 13), "11": (450, 80, 2)}  # CUDA major release -> oldest driver
_USE_GPU = "import torch; torch.cuda.init(); torch.ones(2, device='cuda').sum().item()"
Run = Callable[[Sequence[str]], bool]


def driver_version(root: Path = Path("/")) -> str | None:
    """Return this machine's NVIDIA driver, from the kernel or (under WSL only there) from nvidia-smi; or None."""
    for path, pattern in (
        ("sys/module/nvidia/version", r"(\d+\.[\d.]+)"),
        ("proc/driver/nvidia/version", r"Kernel Module\D*?(?:for \S+\s+)?(\d+\.[\d.]+)"),
    ):
        file = root / path
        match = re.search(pattern, file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else None
        if match:
            return match[1]
    program = shutil.which("nvidia-smi") if root == Path("/") else None
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return lines[0] if lines and _parse(lines[0]) else None


def _parse(driver: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", driver.strip())
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def too_old(driver: str, cuda: str) -> str | None:
    """Return the oldest driver for a build with this CUDA ("13.0") where ``driver`` is older; None: it fits, or the
    table does not know."""
    have, least = _parse(driver), MINIMUM_DRIVER.get(cuda.partition(".")[0])
    return ".".join(f"{part:02d}" for part in least) if have and least and have < least else None


def advice(driver: str | None, torch: str, python: str) -> str:
    """Return what to install for this driver, with the command."""
    have = _parse(driver or "")
    major = next((major for major, least in MINIMUM_DRIVER.items() if have >= least), None)
    if have and major is None:
        return f"driver {driver} is too old for every build of torch since CUDA 11"
    build = f"a build for CUDA {major}, which driver {driver} can run" if major else "a build with CUDA"
    release = torch.partition("+")[0]
    command = f"uv pip install --python {python} --reinstall-package torch --torch-backend=auto torch"
    return (
        f"install {build}: `{command}{f'=={release}' if release else ''}` (another release of torch where this one has "
        "no such build; where that index cannot be reached: the same build from yours)"
    )


def _run(command: Sequence[str], quiet: bool = False) -> bool:
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(command, env=env, capture_output=quiet).returncode == 0


def main(release: str, driver: str | None, run: Run = _run, check: Run = lambda command: _run(command, True)) -> int:
    """Install torch ``release``; return the exit code. GPUs that it cannot use are a warning: the CPU still works."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    installed = False
    if driver is not None:
        print(f"NVIDIA driver {driver}: looking for a build of torch {release} that fits it")
        uv = [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", sys.executable, "--torch-backend=auto"]
        installed = run([*pip, "-c", str(TESTED), "uv"]) and run([*uv, f"torch=={release}"])
        if not installed:
            print("no such build, or its index cannot be reached: installing pip's torch")
    if not installed and not run([*pip, f"torch=={release}"]):
        return 1
    if driver is not None and not check([sys.executable, "-c", _USE_GPU]):
        print(f"WARNING: this torch cannot use the GPUs. To measure on them: {advice(driver, release, sys.executable)}")
    return 0


if __name__ == "__main__":
    if importlib.util.find_spec("torch") is None:
        sys.exit(main(sys.argv[1], driver_version()))
