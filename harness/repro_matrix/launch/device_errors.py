"""Decide whether a rank failed because its device could not be used. Pure.

Then the attempt is no evidence about its case: it is ``infra``, of one of these kinds.

``gpu_failure``      the GPU has failed: no computation causes that
``device``           it could not be used, or the machine failed under NCCL
``gpu_or_program``   a failing GPU and a faulty kernel look the same: the attempt is repeated, on other GPUs where there
                     are some; the same error again is the attempt's own (harness/repro_matrix/runner/retry.py)

The evidence is structured: where the exception was raised, what the rank was doing, which code the driver returned.
CUDA's text is used for torch releases without the code only, and only where torch and NCCL put it. Errors that a
training can cause itself (out of memory in its own steps, an illegal address, an ordinal that does not exist) are no
device failure once the script's body has begun.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

Kind = Literal["gpu_failure", "device", "gpu_or_program"]
EITHER: Kind = "gpu_or_program"

# Where torch initialises a device: nothing of the case has run on it yet.
_INITIALISING = {("torch.cuda", "set_device"), ("torch.cuda", "_lazy_init"), ("torch.cuda", "init")}
_TYPES = {"RuntimeError", "AcceleratorError", "DistBackendError"}
# cudaError_t: errors that no computation can cause. Numbers: CUDA runtime API, "Data types".
_CODES = {
    3: "initialization error",
    35: "CUDA driver version is insufficient for CUDA runtime version",
    46: "CUDA-capable device(s) is/are busy or unavailable",
    100: "no CUDA-capable device is detected",
    209: "no kernel image is available for execution on the device",
    802: "system not yet initialized",
    803: "system has unsupported display driver / cuda driver combination",
}
_GPU_FAILURE = {
    214: "uncorrectable ECC error encountered",
    220: "uncorrectable NVLink error detected during the execution",
}
_EITHER = {
    226: "Invalid access of peer GPU memory over nvlink or a hardware error",
    719: "unspecified launch failure",
    999: "unknown error",
}


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of CUDA's texts, where torch and NCCL put them."""
    words = "|".join(map(re.escape, texts))
    return re.compile(rf"(?:^CUDA error: |Cuda failure (?:\d+ )?')(?:{words})", re.MULTILINE)


_WORDS = _pattern(["all CUDA-capable devices are busy or unavailable", *_CODES.values()])
_GPU_FAILURE_WORDS, _EITHER_WORDS = _pattern(_GPU_FAILURE.values()), _pattern(_EITHER.values())
# ncclSystemError: a socket, shared memory, a device that is gone. Never what a program computes.
_NCCL = re.compile(r"\bncclSystemError\b|\bunhandled system error\b")
_BEFORE_THE_BODY = {"start", "init_process_group"}
_FULL = re.compile(r"\bout of memory\b")


def classify_device_error(error: Mapping[str, Any], phase: str) -> Kind | None:
    """Return the kind of device failure that this exception of a rank on a GPU (as in record.py) is, or None."""
    message = str(error.get("message") or "")
    kind = str(error.get("type") or "")
    code = error.get("error_code")
    by_text = kind in _TYPES
    if code in _GPU_FAILURE or (by_text and _GPU_FAILURE_WORDS.search(message)):
        return "gpu_failure"
    frames = error.get("frames") or [{}]
    if (str(frames[-1].get("module")), str(frames[-1].get("function"))) in _INITIALISING:
        return "device"
    if code in _CODES or (by_text and _WORDS.search(message)):
        return "device"
    # Before the first step: other processes use the missing memory, and NCCL has only been asked to start.
    if phase in _BEFORE_THE_BODY and (
        kind == "DistBackendError" or (kind in {*_TYPES, "OutOfMemoryError"} and bool(_FULL.search(message)))
    ):
        return "device"
    if kind == "DistBackendError" and _NCCL.search(message):
        return "device"
    return EITHER if code in _EITHER or (by_text and _EITHER_WORDS.search(message)) else None
