"""Did a rank fail because its device could not be used? Pure.

Then the attempt says nothing about its case: it is ``infra`` by the name ``device``. The evidence is structured: where
the exception was raised, what the rank was doing, which code the driver gave. Only torch releases without the code are
read by CUDA's own words, and those only at the place where torch and NCCL put them. What a training can do to itself
(running out of memory in its own steps, an illegal address, an ordinal that does not exist) is no device failure once
the script's body has begun.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Where torch initialises a device: nothing of the case has run on it yet.
_INITIALISING = {("torch.cuda", "set_device"), ("torch.cuda", "_lazy_init"), ("torch.cuda", "init")}
_TYPES = {"RuntimeError", "AcceleratorError", "DistBackendError"}
# cudaError_t: what no program can bring about by what it computes. Numbers: CUDA runtime API, "Data types".
_CODES = {
    3: "initialization error",
    35: "CUDA driver version is insufficient for CUDA runtime version",
    46: "CUDA-capable device(s) is/are busy or unavailable",
    100: "no CUDA-capable device is detected",
    209: "no kernel image is available for execution on the device",
    214: "uncorrectable ECC error encountered",
    226: "uncorrectable NVLink error detected during the execution",
    802: "system not yet initialized",
    803: "system has unsupported display driver / cuda driver combination",
}
_WORDS = re.compile(
    r"(?:^CUDA error: |Cuda failure (?:\d+ )?')(?:all CUDA-capable devices are busy or unavailable|"
    + "|".join(map(re.escape, _CODES.values()))
    + r")",
    re.MULTILINE,
)
_BEFORE_THE_BODY = {"start", "init_process_group"}
_FULL = re.compile(r"\bout of memory\b")


def of_device(error: Mapping[str, Any], phase: str) -> bool:
    """Whether this exception of a rank on a GPU (as kit/record.py describes it) is its device's failure."""
    message = str(error.get("message") or "")
    kind = str(error.get("type") or "")
    frames = error.get("frames") or [{}]
    if (str(frames[-1].get("module")), str(frames[-1].get("function"))) in _INITIALISING:
        return True
    if error.get("error_code") in _CODES:
        return True
    if kind in _TYPES and _WORDS.search(message):
        return True
    # Not a step has been made: memory that is missing now is somebody else's, and NCCL has only been asked to start.
    return phase in _BEFORE_THE_BODY and (
        kind == "DistBackendError" or (kind in {*_TYPES, "OutOfMemoryError"} and bool(_FULL.search(message)))
    )
