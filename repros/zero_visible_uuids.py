"""CUDA_VISIBLE_DEVICES with UUIDs, as CUDA's guide allows, under DeepSpeed (deepspeedai/DeepSpeed#5278, #8510)."""

from __future__ import annotations

import os

from repro_kit import Run, main
from repro_kit.models import build
from repro_kit.zero import engine

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"  # of the guide's example; the CPU has none


def body(run: Run) -> None:
    uuid = run.record.data.get("gpu_uuid") or UUID
    if run.flags["reader"] == "launcher":
        from deepspeed.launcher.runner import parse_inclusion_exclusion

        found = parse_inclusion_exclusion({"localhost": 2}, f"localhost:{uuid}", "")  # as its main() calls it
        run.check("device", actual=str(found["localhost"][0]), expected=uuid, subject="the first device")
        engine(run, build(run), int(run.options["stage"]))
        return
    lists = {"uuid": uuid, "short": uuid[:12], "mig": "MIG-" + uuid[4:]}
    # On a GPU the launch's own list has numbers.
    lists["numbers"] = "1,0" if run.device_kind == "cpu" else os.environ["CUDA_VISIBLE_DEVICES"]
    if run.flags["visible"] == "unset":
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = lists[run.flags["visible"]]
    if run.flags["order"] == "pci":
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    engine(run, build(run), int(run.options["stage"]))  # <- on a GPU, its memory is asked for here
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    device = CUDA_Accelerator()._get_nvml_gpu_id(0)  # <- as its available_memory() does, also on a CPU
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    run.check("device", actual=str(device), expected=first, subject="NVML's name of the first device")


if __name__ == "__main__":
    main(body)
