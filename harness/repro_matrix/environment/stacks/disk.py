"""Room on the disk: how much a stack takes, and whether it is there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from repro_matrix.environment.stacks.errors import StackError

# Unpacked sizes in MB, measured over torch 2.2 and 2.6 for Linux x86_64 (the larger of the two, rounded up).
_LARGE = {
    "torch": 1600, "triton": 720, "nvidia-cudnn": 1200, "nvidia-cublas": 630, "nvidia-cufft": 300,
    "nvidia-cusparselt": 220, "nvidia-cusparse": 290, "nvidia-nccl": 260, "nvidia-cusolver": 210, "nvidia": 100,
    "transformers": 60, "numpy": 70,
}  # fmt: skip
_OTHER = 12
MARGIN = 500 * 2**20  # left free for whatever else runs


def megabytes(package: str) -> int:
    prefixes = [name for name in _LARGE if package == name or package.startswith(f"{name}-")]
    return _LARGE[max(prefixes, key=len)] if prefixes else _OTHER


def estimate(packages: Iterable[str]) -> int:
    """About how many bytes these packages take once they are unpacked."""
    return sum(megabytes(package) for package in packages) * 2**20


def check(what: str, needed: int, folders: Iterable[Path]) -> None:
    """Refuse before anything is downloaded when one of these folders' disks has not enough room."""
    for folder in folders:
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(there).free
        if free < needed + MARGIN:
            raise StackError(
                "disk",
                f"{what}: about {gigabytes(needed + MARGIN)} is needed under {there}, {gigabytes(free)} is free; "
                "`repro stack prune` frees what is not in use, REPRO_CACHE and UV_CACHE_DIR move the caches",
            )


def gigabytes(size: int) -> str:
    return f"{size / 2**30:.1f} GB" if size >= 2**29 else f"{size / 2**20:.0f} MB"


def same_disk(first: Path, second: Path) -> bool:
    def device(path: Path) -> int:
        return os.stat(next(parent for parent in (path, *path.parents) if parent.exists())).st_dev

    return device(first) == device(second)


def size_of(folder: Path) -> int:
    """Bytes that would come free: files with other names elsewhere (hard links into uv's cache) do not count."""
    total = 0
    for where, _, files in os.walk(folder):
        for name in files:
            try:
                seen = os.lstat(os.path.join(where, name))
            except OSError:
                continue
            total += seen.st_size if seen.st_nlink == 1 else 0
    return total
