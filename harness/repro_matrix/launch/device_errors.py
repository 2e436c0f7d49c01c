"""Did a rank fail because its device could not be used? Pure.

Then the attempt says nothing about its case: it is ``infra``, by one of these names.

``card``    the card has failed: nothing that is computed brings that about
``device``  it could not be used, or the machine failed under NCCL
``card or program``  what a failing card and a faulty kernel look like alike: made once more, on other cards where there
            are some, it is the attempt's own error when it comes again (harness/repro_matrix/runner/retry.py)

The evidence is structured: where the exception was raised, what the rank was doing, which code the driver gave. Only
torch releases without the code are read by CUDA's own words, and those only at the place where torch and NCCL put them.
What a training can do to itself (running out of memory in its own steps, an illegal address, an ordinal that does not
exist) is no device failure once the script's body has begun.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

Kind = Literal["card", "device", "card or program"]
EITHER: Kind = "card or program"

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
    802: "system not yet initialized",
    803: "system has unsupported display driver / cuda driver combination",
}
_CARD = {
    214: "uncorrectable ECC error encountered",
    220: "uncorrectable NVLink error detected during the execution",
}
_EITHER = {
    226: "Invalid access of peer GPU memory over nvlink or a hardware error",
    719: "unspecified launch failure",
    999: "unknown error",
}


def _said(texts: Iterable[str]) -> re.Pattern[str]:
    """These words where torch and NCCL put CUDA's."""
    words = "|".join(map(re.escape, texts))
    return re.compile(rf"(?:^CUDA error: |Cuda failure (?:\d+ )?')(?:{words})", re.MULTILINE)


_WORDS = _said(["all CUDA-capable devices are busy or unavailable", *_CODES.values()])
_CARD_WORDS, _EITHER_WORDS = _said(_CARD.values()), _said(_EITHER.values())
# ncclSystemError: a socket, shared memory, a device that is gone. Never what a program computes.
_NCCL = re.compile(r"\bncclSystemError\b|\bunhandled system error\b")
_BEFORE_THE_BODY = {"start", "init_process_group"}
_FULL = re.compile(r"\bout of memory\b")


def of_device(error: Mapping[str, Any], phase: str) -> Kind | None:
    """Whether this exception of a rank on a GPU (as record.py describes it) is its device's failure; how sure."""
    message = str(error.get("message") or "")
    kind = str(error.get("type") or "")
    code = error.get("error_code")
    said = kind in _TYPES
    if code in _CARD or (said and _CARD_WORDS.search(message)):
        return "card"
    frames = error.get("frames") or [{}]
    if (str(frames[-1].get("module")), str(frames[-1].get("function"))) in _INITIALISING:
        return "device"
    if code in _CODES or (said and _WORDS.search(message)):
        return "device"
    # Not a step has been made: memory that is missing now is somebody else's, and NCCL has only been asked to start.
    if phase in _BEFORE_THE_BODY and (
        kind == "DistBackendError" or (kind in {*_TYPES, "OutOfMemoryError"} and bool(_FULL.search(message)))
    ):
        return "device"
    if kind == "DistBackendError" and _NCCL.search(message):
        return "device"
    return EITHER if code in _EITHER or (said and _EITHER_WORDS.search(message)) else None
