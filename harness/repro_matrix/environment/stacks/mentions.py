"""Whether anything of a stack knows an environment variable.

An arm that sets a variable which nothing reads changes nothing, and would be judged as if it did: a misspelt name, a
release before the variable came, or after it went. Whether a process asks for it cannot be seen from Python where C++
does; that its name stands in some file of the packages can.
"""

from __future__ import annotations

import functools
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

from repro_matrix.config.packages import TRAINERS, UPSTREAM
from repro_matrix.environment.stacks.stack import Stack, site_folders

SEARCHED = (*UPSTREAM, *TRAINERS, "huggingface_hub", "safetensors", "tokenizers", "triton", "numpy")
# Of libraries that are no Python packages, or that hold gigabytes: believed.
ELSEWHERE = (
    "NCCL_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "UCX_", "FI_", "OMP_", "GOMP_", "KMP_", "MKL_", "ONEDNN_",
    "DNNL_", "OPENBLAS_", "PYTHON", "MALLOC_", "LD_", "GLIBC_",
)  # fmt: skip
SUFFIXES = ({".py"}, {".so", ".pyd"})  # the small ones first


def mentioned(stack: Stack, name: str) -> bool:
    """True where nothing can be searched."""
    folders = (*(Path(path) for path in stack.path), *site_folders(stack.python))
    return name.startswith(ELSEWHERE) or not folders or _mentioned(folders, name)


@functools.lru_cache(maxsize=256)
def _mentioned(folders: tuple[Path, ...], name: str) -> bool:
    sought = name.encode()
    packages = [folder / package for folder in folders for package in SEARCHED if (folder / package).is_dir()]
    return any(_holds(path, sought) for kinds in SUFFIXES for package in packages for path in _files(package, kinds))


def _files(folder: Path, kinds: set[str]) -> Iterator[str]:
    for at, _, names in os.walk(folder):
        for name in names:
            if not kinds.isdisjoint({os.path.splitext(name)[1], ".so" if ".so." in name else ""}):
                yield os.path.join(at, name)


def _holds(path: str, sought: bytes) -> bool:
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _word(data, sought)
    except (OSError, ValueError):  # an empty file cannot be mapped
        return False


def _word(data: mmap.mmap, sought: bytes) -> bool:
    """Whether it stands there as a whole: of a name that is cut short every text holds more."""
    at = data.find(sought)
    while at >= 0:
        around = data[max(0, at - 1) : at] + data[at + len(sought) : at + len(sought) + 1]
        if not re.search(rb"\w", around):
            return True
        at = data.find(sought, at + 1)
    return False
