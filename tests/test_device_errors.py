"""A rank whose device cannot be used says nothing about its case; what a training does to itself is not that."""

from __future__ import annotations

from typing import Any

import pytest

from harness.device_errors import of_device

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
    "ECC, by its code": (error("AcceleratorError", "CUDA error: uncorrectable ECC", TRAIN, error_code=214), BODY),
    "NCCL": (
        error("DistBackendError", "NCCL error: cuda error\nCuda failure 35 'CUDA "
              "driver version is insufficient for CUDA runtime version'", ("torch.distributed", "all_reduce")), BODY,
    ),
    "NCCL's start": (error("DistBackendError", "ncclSystemError", ("torch.distributed.c10d", "new_group")), INIT),
    "a full card": (error("OutOfMemoryError", "CUDA out of memory. 2 MiB", ("torch.cuda", "x")), INIT),
    "a full card at set_device": (error("AcceleratorError", "CUDA error: out of memory", SET, error_code=2), INIT),
}  # fmt: skip

CASES_OWN = {
    "out of memory in training": (error("OutOfMemoryError", "CUDA out of memory. 2 GiB", TRAIN), BODY),
    "an illegal address": (error("AcceleratorError", "CUDA error: illegal address", TRAIN, error_code=700), BODY),
    "an ordinal in the body": (error("RuntimeError", "CUDA error: bad ordinal", TRAIN, error_code=101), BODY),
    "the text in another error": (error("ValueError", BUSY, TRAIN), BODY),
    "the text in the middle": (error("RuntimeError", "while saying CUDA error: initialization error", TRAIN), BODY),
    "sizes": (error("RuntimeError", "The size of tensor a (256) must match", TRAIN), BODY),
    "NCCL in the body": (error("DistBackendError", "NCCL error: remote process exited", TRAIN), BODY),
    "no frames": ({"type": "RuntimeError", "message": "x", "frames": []}, BODY),
}  # fmt: skip


@pytest.mark.parametrize("name", DEVICE)
def test_the_devices_failures(name: str) -> None:
    assert of_device(*DEVICE[name])


@pytest.mark.parametrize("name", CASES_OWN)
def test_the_cases_own(name: str) -> None:
    assert not of_device(*CASES_OWN[name])
