"""A rank whose device cannot be used is no evidence; an error that a training can cause itself is evidence."""

from __future__ import annotations

from typing import Any

import pytest
from repro_matrix.launch.observe import classify_device_error

INIT, BODY = "init_process_group", "body"
SET, LAZY, TRAIN = ("torch.cuda", "set_device"), ("torch.cuda", "_lazy_init"), ("torch.nn.modules.linear", "forward")
BUSY = "CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors might be ..."


def error(kind: str, message: str, where: tuple[str, str], **more: Any) -> dict[str, Any]:
    frames = [{"module": "__main__", "function": "body"}, {"module": where[0], "function": where[1]}]
    return {"type": kind, "message": message, "frames": frames, "cause": None, **more}


ECC = "uncorrectable ECC error encountered"
NCCL = ("torch.distributed", "all_reduce")
SYSTEM_ERROR = (
    "unhandled system error (run with NCCL_DEBUG=INFO), NCCL version 2.29.3\nncclSystemError: System call failed"
)


@pytest.mark.parametrize(
    ("kind", "raised", "phase"),
    [
        ("device", error("RuntimeError", "CUDA error: invalid device ordinal", SET), INIT),
        ("device", error("RuntimeError", "The NVIDIA driver on your system is too old (found 12020)", LAZY), BODY),
        ("device", error("RuntimeError", BUSY, TRAIN), BODY),
        ("device", error("AcceleratorError", "some other words", TRAIN, error_code=46), BODY),
        ("device", error("RuntimeError", "CUDA error: no kernel image is available for execution on the device", TRAIN),
         BODY),
        ("device", error("DistBackendError", f"NCCL error in: NCCLUtils.cpp:94, {SYSTEM_ERROR}", NCCL), BODY),
        ("device", error("DistBackendError", "NCCL error: remote process exited", NCCL), INIT),
        ("device", error("OutOfMemoryError", "CUDA out of memory. 2 MiB", ("torch.cuda", "x")), INIT),
        ("gpu_failure", error("AcceleratorError", "some other words", TRAIN, error_code=214), BODY),
        ("gpu_failure", error("RuntimeError", f"CUDA error: {ECC}\nCUDA", TRAIN), BODY),
        ("gpu_failure", error("DistBackendError", f"NCCL error: unhandled cuda error\nCuda failure 214 '{ECC}'", NCCL),
         BODY),
        ("gpu_or_program", error("AcceleratorError", "some other words", TRAIN, error_code=719), BODY),
        ("gpu_or_program", error("RuntimeError", "CUDA error: unspecified launch failure\nx", TRAIN), BODY),
        # The case's own:
        (None, error("OutOfMemoryError", "CUDA out of memory. 2 GiB", TRAIN), BODY),
        (None, error("AcceleratorError", "CUDA error: illegal address", TRAIN, error_code=700), BODY),
        (None, error("RuntimeError", "CUDA error: bad ordinal", TRAIN, error_code=101), BODY),
        (None, error("ValueError", BUSY, TRAIN), BODY),
        (None, error("RuntimeError", "in the middle: CUDA error: initialization error", TRAIN), BODY),
        (None, error("DistBackendError", "NCCL error: remote process exited", TRAIN), BODY),
    ],
)  # fmt: skip
def test_classify_device_error(kind: str | None, raised: dict[str, Any], phase: str) -> None:
    assert classify_device_error(raised, phase) == kind
