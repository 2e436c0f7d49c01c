"""A dress rehearsal of ranks on GPUs: they are planned, leased and judged for GPUs, and compute on
the CPU with gloo.

First on PYTHONPATH of an interpreter whose device probe is made up (tests/fake_stack.py).
Everything but the ranks' own device is what it would be on a GPU machine: profiles, planted cells,
leases, settings, documents, exit code. What is measured so is never published: it says so itself by
the stack's name, ``python:...``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from typing import Any

import memory


class _KitOnTheCpu(importlib.abc.MetaPathFinder):
    """Gives ``repro_kit.run`` an ``execute`` that takes a GPU for the CPU, and NCCL for gloo."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        spec = (
            importlib.machinery.PathFinder.find_spec(name, path)
            if name == "repro_kit.run"
            else None
        )
        if spec is None or spec.loader is None:
            return None
        own = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            own(module)
            execute = module.execute
            module.execute = lambda body, settings: execute(
                body_of(body, settings), on_the_cpu(settings, module)
            )

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def body_of(body: Any, settings: dict[str, Any]) -> Any:
    """Return the script's body, or what this GPU makes of it."""
    if settings["device"] != "cuda" or settings["case"].startswith("canary"):
        return body
    if "FAKE_CUDA_DEVICES" in os.environ:

        def marked(run: Any) -> None:
            import devices

            with devices.rules(run.strategy["slug"]):
                devices.plant(os.environ["FAKE_CUDA_DEVICES"])
                body(run)

        return marked
    if "FAKE_CUDA_ANSWERS" in os.environ:

        def refused(run: Any) -> None:
            import torch

            run.phase(f"{settings['variant']} on a GPU")
            torch.nn.functional.embedding(
                torch.zeros(1).long() + 9, torch.zeros(2, 2)
            )  # another error than the case's

        return refused
    return body


def on_the_cpu(settings: dict[str, Any], kit: Any) -> dict[str, Any]:
    if settings["device"] != "cuda" or settings["backend"] == "fake":
        return settings
    from repro_kit.record import Record

    backend = "nccl" if settings["backend"] == "auto" else settings["backend"]
    write, finish = Record.write, kit._finish
    used = "FAKE_CUDA_UNUSED" not in os.environ or settings["case"].startswith("canary")
    gpu = memory.Gpu()

    def written(self: Any) -> None:
        """Write a record with GPU evidence: gloo and the CPU were in effect."""
        for item in self.data.get("effects") or []:
            if item.get("what") == "group":
                item["backend"] = backend
        write(self)

    Record.write = written  # type: ignore[method-assign]
    from repro_kit.run import Run

    phase = Run.phase

    def begun(self: Any, name: str) -> None:
        """Write the record where the body begins, as on a GPU."""
        phase(self, name)
        if name == "body" and used:
            gpu.start()
            kit.record_device(self.record, gpu)
        elif name == "body":
            self.record.write()

    def finished(record: Any, *rest: Any) -> None:
        if used:
            kit.record_memory(record, gpu)
        finish(record, *rest)

    Run.phase = begun  # type: ignore[method-assign]
    kit._finish = finished
    if os.environ.get("RANK") == "0" and (how := os.environ.get("FAKE_CUDA_ASSERT")):
        fail_in_a_kernel(how)
    if os.environ.get("RANK") == "0" and (text := os.environ.get("FAKE_NCCL_START")):
        fail_to_connect(text)
    return {**settings, "device": "cpu", "backend": "gloo"}


def fail_to_connect(text: str) -> None:
    """Let the first collective fail, as where NCCL cannot connect."""
    from repro_kit.run import Run

    import torch.distributed as dist

    begin = Run.init_process_group

    def init_process_group(self: Any) -> None:
        begin(self)
        raise dist.DistBackendError(
            f"NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error\n{text}"
        )

    Run.init_process_group = init_process_group  # type: ignore[method-assign]


def fail_in_a_kernel(noticed_by: str) -> None:
    """Let an embedding's kernel fail. As on a GPU, the next ``item`` of the script notices it, or
    NCCL's ``watchdog`` aborts the process; where the host waits for each kernel, the embedding
    itself raises it."""
    import torch

    text = "CUDA error: device-side assert triggered"

    def fail(*_: Any, **__: Any) -> Any:
        if noticed_by == "watchdog":
            line = f"Process group watchdog thread terminated with exception: {text}\n"
            os.write(
                2, f"[rank0]:[E1124 ProcessGroupNCCL.cpp:2068] [PG ID 0 Rank 0] {line}".encode()
            )
            os.abort()
        error = torch.AcceleratorError(text)
        error.error_code = 710
        raise error

    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        if noticed_by != "race":  # where the host waits, there is none
            torch.nn.functional.embedding = fail
    else:
        torch.Tensor.item = fail  # type: ignore[method-assign]


sys.meta_path.insert(0, _KitOnTheCpu())
