"""What of the user's environment a rank inherits: an allow-list. All else is no input of a measurement.

A verbosity hides the warning that a signature waits for, PYTHONOPTIMIZE removes the assertion, a debug level of
torch.distributed crashes DDP: each would be a false statement about upstream. What a person must be able to pass is a
setting (``env.NCCL_SOCKET_IFNAME=eth0``): it is recorded with the attempt, and part of the variant's fingerprint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

# Where programs, libraries and the user's own folders are, and how text is encoded.
_PLACES = {
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "LD_LIBRARY_PATH", "XDG_CACHE_HOME",
    "CUDA_HOME", "CUDA_PATH", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "SYSTEMROOT",
}  # fmt: skip
# Which compiler makes an extension: torch compiles one again when its command line changed, inside the attempt.
_TOOLCHAIN = {
    "CC", "CXX", "CUDACXX", "CUDAHOSTCXX", "NVCC_CCBIN", "TORCH_CUDA_ARCH_LIST", "CPATH", "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "CONDA_PREFIX",
}  # fmt: skip
# What it takes to reach the hub, and where real weights are kept: with ``weights=hub`` only.
_HUB = {
    "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN",
    "HF_ENDPOINT", "HF_HUB_OFFLINE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
}  # fmt: skip
# Set by the launch itself, for every attempt anew.
_CONTRACT = re.compile(
    r"(?:RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|CUDA_VISIBLE_DEVICES|TMPDIR"
    r"|(?:GROUP|ROLE|TORCHELASTIC|PET|REPRO)_.*)"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def inherited(hub: bool = False, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The part of ``given`` (default: this process's environment) that a process of a stack starts from."""
    names = _PLACES | _TOOLCHAIN | (_HUB if hub else set())
    environ = os.environ if given is None else given
    return {name: value for name, value in environ.items() if name in names or name.startswith("LC_")}


def building(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The same for a process that compiles extensions: compilers read more than ranks may."""
    environ = os.environ if given is None else given
    flags = {"CFLAGS", "CXXFLAGS", "LDFLAGS", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "MAX_JOBS", "TMPDIR"}
    return {**inherited(given=environ), **{name: value for name, value in environ.items() if name in flags}}


def set_by_launch(name: str) -> bool:
    """Whether a variable is part of a launch's contract with its ranks (RANK, MASTER_PORT ...)."""
    return bool(_CONTRACT.fullmatch(name))


def refused(name: str) -> str | None:
    """Why a variable cannot be given by the setting ``env``, or None."""
    if not _NAME.fullmatch(name):
        return "not the name of an environment variable"
    if _CONTRACT.fullmatch(name):
        return "the launch itself sets it for every attempt"
    if name in ("PYTHONPATH", "PYTHONHOME"):
        return "what is imported is the stack's to say: stack=python:/path/to/python, stack=current+package@release"
    return None
