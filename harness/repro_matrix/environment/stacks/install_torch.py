"""Set-up's first step (see the Makefile): a torch that fits this machine's driver, where none is installed yet.

    python harness/repro_matrix/environment/stacks/install_torch.py 2.13.0

Without an NVIDIA driver, what pip gives. With one, the build that fits it: uv knows which index has it
(``--torch-backend=auto``); where that index cannot be reached or has no such build, what pip gives, and where that
cannot use the GPUs, the command that would. Run by the new environment's python: standard library only.
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

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(__file__).resolve().parent))

import drivers  # noqa: E402 - not installed yet

_USE = "import torch; torch.cuda.init(); torch.ones(2, device='cuda').sum().item()"
Run = Callable[[Sequence[str]], bool]


def driver_version(root: Path = Path("/")) -> str | None:
    """The NVIDIA driver of this machine, from the kernel or (under WSL there is only that) nvidia-smi; or None."""
    for path, pattern in (
        ("sys/module/nvidia/version", r"(\d+\.[\d.]+)"),
        ("proc/driver/nvidia/version", r"Kernel Module\D*?(?:for \S+\s+)?(\d+\.[\d.]+)"),
    ):
        try:
            found = re.search(pattern, (root / path).read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
        if found:
            return found[1]
    program = shutil.which("nvidia-smi") if root == Path("/") else None
    if program is None:
        return None
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=60).stdout.strip().splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said[0].strip() if said and drivers.parsed(said[0]) else None


def run(command: Sequence[str]) -> bool:
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(command, env=env).returncode == 0


def quietly(command: Sequence[str]) -> bool:
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(command, env=env, capture_output=True).returncode == 0


def main(
    release: str, driver: str | None, do: Run = run, check: Run = quietly, say: Callable[[str], None] = print
) -> int:
    """Install torch ``release``. The exit code of the installation; GPUs that it cannot use are said, and no error: the
    CPU can still be measured, and a run on the GPUs ends with the same words."""
    python = sys.executable
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if driver is None:
        return 0 if do([*pip, f"torch=={release}"]) else 1
    say(f"NVIDIA driver {driver}: looking for a build of torch {release} that fits it")
    uv = [python, "-m", "uv", "pip", "install", "-q", "--python", python, "--torch-backend=auto", f"torch=={release}"]
    if not (do([*pip, "-c", str(ROOT / "requirements" / "tested.txt"), "uv"]) and do(uv)):
        say("that index cannot be reached, or has no such build; taking what pip gives")
        if not do([*pip, f"torch=={release}"]):
            return 1
    if not check([python, "-c", _USE]):
        say(f"WARNING: this torch cannot use the GPUs. To measure on them: {drivers.advice(driver, release, python)}")
    return 0


if __name__ == "__main__":
    if importlib.util.find_spec("torch") is None:
        sys.exit(main(sys.argv[1], driver_version()))
