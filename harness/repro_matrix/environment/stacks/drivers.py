"""Which NVIDIA driver a build of torch needs. Pure; standard library only: set-up uses it before anything is there.

Since CUDA 11 a build runs with any driver of its CUDA's major release (minor version compatibility) or a newer one.
Source: CUDA Toolkit release notes, table "CUDA Toolkit and Minimum Required Driver Version for CUDA Minor Version
Compatibility" (docs.nvidia.com/cuda/cuda-toolkit-release-notes; for 11.x: its archive, 11.8.0), Linux column. A driver
below the minimum may still do where NVIDIA's forward compatibility package (cuda-compat) is installed: so this table
explains and advises, and a probe decides (harness/repro_matrix/runner/probe.py).
"""

from __future__ import annotations

import re

# CUDA major release -> the oldest driver, newest first
MINIMUM = {"13": (580,), "12": (525, 60, 13), "11": (450, 80, 2)}


def parsed(driver: str) -> tuple[int, ...]:
    """``535.129.03`` -> (535, 129, 3); () where it is none."""
    found = re.match(r"\d+(?:\.\d+)*", driver.strip())
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def minimum(cuda: str) -> str | None:
    """The oldest driver for a build with this CUDA ("13.0"), in words; None where the table does not know it."""
    found = MINIMUM.get(cuda.partition(".")[0])
    return ".".join(f"{part:02d}" for part in found) if found else None


def fits(driver: str, cuda: str) -> bool | None:
    """Whether a build with this CUDA runs with this driver; None where the table cannot tell."""
    have, least = parsed(driver), MINIMUM.get(cuda.partition(".")[0])
    return have >= least if have and least else None


def newest_cuda(driver: str) -> str | None:
    """The newest CUDA major release whose builds run with this driver, or None."""
    have = parsed(driver)
    return next((major for major, least in MINIMUM.items() if have >= least), None)


def install_line(python: str, torch: str) -> str:
    """The command that puts a build of this torch release that fits the driver into that interpreter's environment."""
    release = torch.partition("+")[0]
    wanted = f"torch=={release}" if release else "torch"
    return f"uv pip install --python {python} --reinstall-package torch --torch-backend=auto {wanted}"


def advice(driver: str | None, torch: str, python: str) -> str:
    """What to install for this driver, in one sentence or two."""
    major = newest_cuda(driver or "")
    if driver and parsed(driver) and major is None:
        return f"driver {driver} is too old for any build of torch since CUDA 11: it needs {minimum('11')} or newer"
    what = f"a build for CUDA {major}, which driver {driver} can run" if major else "a build with CUDA"
    return (
        f"install {what}: `{install_line(python, torch)}` (another release of torch where this one has no such build; "
        "where that index cannot be reached: the same build from your own)"
    )
