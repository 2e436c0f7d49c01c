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


DEVICE = {
    "set_device": (error("RuntimeError", "CUDA error: invalid device ordinal", SET), INIT),
    "too old": (error("RuntimeError", "The NVIDIA driver on your system is too old (found version 12020)", LAZY), BODY),
    "busy": (error("RuntimeError", BUSY, TRAIN), BODY),
    "busy, by its code": (error("AcceleratorError", "some other words", TRAIN, error_code=46), BODY),
    "no kernels": (
        error("RuntimeError", "CUDA error: no kernel image is available for execution on the device", TRAIN), BODY,
    ),
    "NCCL": (
        error("DistBackendError", "NCCL error: cuda error\nCuda failure 35 'CUDA "
              "driver version is insufficient for CUDA runtime version'", ("torch.distributed", "all_reduce")), BODY,
    ),
    "a system error of NCCL": (
        error("DistBackendError", "NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO), "
              "NCCL version 2.29.3\nncclSystemError: System call (e.g. socket, malloc) or external library call failed",
              ("torch.distributed", "all_reduce")), BODY,
    ),
    "NCCL's start": (error("DistBackendError", "ncclSystemError", ("torch.distributed.c10d", "new_group")), INIT),
    "a full GPU": (error("OutOfMemoryError", "CUDA out of memory. 2 MiB", ("torch.cuda", "x")), INIT),
}  # fmt: skip

GPU_FAILURE = {
    "ECC, by its code": (error("AcceleratorError", "some other words", TRAIN, error_code=214), BODY),
    "ECC, in words": (error("RuntimeError", "CUDA error: uncorrectable ECC error encountered\nCUDA", TRAIN), BODY),
    "ECC, through NCCL": (
        error("DistBackendError", "NCCL error: unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function "
              "failed.\nLast error:\nCuda failure 214 'uncorrectable ECC error encountered'",
              ("torch.distributed", "all_reduce")), BODY,
    ),
}  # fmt: skip

GPU_OR_PROGRAM = {
    "a launch failure": (error("AcceleratorError", "some other words", TRAIN, error_code=719), BODY),
    "a launch failure, in words": (error("RuntimeError", "CUDA error: unspecified launch failure\nx", TRAIN), BODY),
    "contained": (error("AcceleratorError", "some other words", TRAIN, error_code=226), BODY),
}

CASES_OWN = {
    "out of memory in training": (error("OutOfMemoryError", "CUDA out of memory. 2 GiB", TRAIN), BODY),
    "an illegal address": (error("AcceleratorError", "CUDA error: illegal address", TRAIN, error_code=700), BODY),
    "an ordinal in the body": (error("RuntimeError", "CUDA error: bad ordinal", TRAIN, error_code=101), BODY),
    "the text in another error": (error("ValueError", BUSY, TRAIN), BODY),
    "the text in the middle": (error("RuntimeError", "while saying CUDA error: initialization error", TRAIN), BODY),
    "NCCL in the body": (error("DistBackendError", "NCCL error: remote process exited", TRAIN), BODY),
}  # fmt: skip


ALL = {"device": DEVICE, "gpu_failure": GPU_FAILURE, "gpu_or_program": GPU_OR_PROGRAM, None: CASES_OWN}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, errors in ALL.items() for name in errors])
def test_classify_device_error(kind: str | None, name: str) -> None:
    assert classify_device_error(*ALL[kind][name]) == kind
